import os
import socket
import stat

import pytest

from leadline.core.errors import DataError, UnsafePackError, UsageError
from leadline.core.tree import collisions, path_problem, summary, survey, walk_tree

_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 1073741824\n"
)


def test_walk_tree_lists_regular_files_in_order_of_path(tmp_path):
    for path in ("b.txt", "a/z.txt", "a-b.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / "empty folder").mkdir()
    assert [file.path for file in walk_tree(tmp_path)] == ["a-b.txt", "a/z.txt", "b.txt"]


def test_walk_tree_leaves_out_what_is_excluded(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "a").write_text("x")
    assert [file.path for file in walk_tree(tmp_path, ["manifest.json"])] == ["a"]


@pytest.mark.parametrize("missing", ["nowhere", "file"])
def test_walk_tree_of_anything_but_a_folder_is_refused(tmp_path, missing):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="no folder at"):
        walk_tree(tmp_path / missing)


def _link(path):
    path.symlink_to("/etc/passwd")


def _link_to_folder(path):
    path.symlink_to("/etc")


def _dangling_link(path):
    path.symlink_to("nowhere")


def _socket(path):
    os.chdir(path.parent)  # a socket's path is limited to about 100 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)


def _device(path):
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (_link, "a symbolic link"),
        (_link_to_folder, "a symbolic link"),
        (_dangling_link, "a symbolic link"),
        (os.mkfifo, "a fifo"),
        (_socket, "a socket"),
        pytest.param(
            _device,
            "a character device",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="mknod needs root"),
        ),
    ],
)
def test_walk_tree_with_anything_but_files_and_folders_names_it(tmp_path, monkeypatch, make, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    make(tmp_path / "sub" / "odd")
    with pytest.raises(UnsafePackError, match=rf"'sub/odd' is {named}"):
        walk_tree(tmp_path)


def test_walk_tree_reports_every_unsafe_entry_at_once(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).symlink_to("x")
    with pytest.raises(UnsafePackError, match=r"'one'.*'two'"):
        walk_tree(tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "a\x7fb", "a\u202eb", "a\\b", "c:x", b"a\xff"])
def test_walk_tree_with_a_name_that_misleads_is_refused(tmp_path, name):
    with open(os.path.join(os.fsencode(tmp_path), os.fsencode(name)), "wb"):  # noqa: PTH118, PTH123
        pass
    with pytest.raises(UnsafePackError):
        walk_tree(tmp_path)


@pytest.mark.parametrize(
    "name", ["\u00fcber \u65e5\u672c.txt", "a b", ".hidden", "a..b", "-x", "~"]
)
def test_walk_tree_with_an_odd_but_harmless_name_keeps_it(tmp_path, name):
    (tmp_path / name).write_text("x")
    assert [file.path for file in walk_tree(tmp_path)] == [name]


@pytest.mark.parametrize(
    "path", ["/a", "../a", "a/../b", "a/..", "./a", "a//b", "", ".", "..", "a/", "C:/a", "a\\..\\b"]
)
def test_path_problem_of_a_path_that_escapes_or_is_not_plain_says_so(path):
    assert path_problem(path)


@pytest.mark.parametrize(
    "paths",
    [
        ["Data.bin", "data.bin"],
        ["Dir/a", "dir/b"],
        ["caf\u00e9", "cafe\u0301"],
        ["stra\u00dfe", "STRASSE"],
        ["a", "a/b"],
    ],
)
def test_collisions_of_paths_that_are_one_on_some_disk_are_found(paths):
    assert collisions(paths)
    assert collisions(reversed(paths))


def test_collisions_of_files_that_share_a_folder_are_none():
    assert collisions(["a/b", "a/c", "ab"]) == []


def test_case_collision_in_a_tree_is_refused(tmp_path):
    (tmp_path / "A").write_text("x")
    (tmp_path / "a").write_text("y")
    if len(list(tmp_path.iterdir())) < 2:
        pytest.skip("this disk ignores case")
    with pytest.raises(UnsafePackError, match="one name on some disks"):
        walk_tree(tmp_path)


def test_g38_pointer_instead_of_a_shard_is_refused_with_its_size(tmp_path):
    (tmp_path / "shard.bin").write_bytes(_POINTER)
    with pytest.raises(DataError, match=rf"shard.bin is .* of {len(_POINTER)} bytes"):
        walk_tree(tmp_path)


def test_g38_all_pointers_are_listed_at_once(tmp_path):
    for name in ("a.bin", "b.txt"):
        (tmp_path / name).write_bytes(_POINTER)
    with pytest.raises(DataError, match=r"a\.bin .*b\.txt "):
        walk_tree(tmp_path)


@pytest.mark.parametrize("name", ["x.bin", "x.idx", "x.npy", "x.safetensors"])
def test_g38_empty_shard_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match="empty shard"):
        walk_tree(tmp_path)


def test_g38_empty_source_file_is_fine(tmp_path):
    (tmp_path / "__init__.py").write_bytes(b"")
    assert walk_tree(tmp_path)[0].bytes == 0


def test_g38_large_text_that_quotes_the_pointer_line_is_fine(tmp_path):
    (tmp_path / "notes.md").write_bytes(_POINTER * 20)
    assert survey(tmp_path).hollow == ()


def test_summary_of_many_problems_counts_those_not_shown():
    assert summary([str(n) for n in range(25)]).endswith("; 19; and 5 more")
