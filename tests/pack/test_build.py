import errno
import os
import subprocess
import sys
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.canonical import sha256_file
from leadline.core.errors import (
    DataError,
    DiskSpaceError,
    IntegrityError,
    LeadlineError,
    UnsafePackError,
    UsageError,
)
from leadline.core.manifest import read_manifest
from leadline.core.tree import walk_tree
from leadline.pack.build import build_pack
from leadline.pack.tar import tar_bytes


def _names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_pack_holds_every_file_in_order_with_fixed_facts(packed):
    with tarfile.open(packed.tarball) as tar:
        members = tar.getmembers()
    assert [m.name for m in members] == ["a.txt", "sub/b.bin", "sub/empty.py"]
    facts = {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode, m.type) for m in members}
    assert facts == {(0, 0, 0, "", "", 0o644, tarfile.REGTYPE)}


def test_pack_manifest_names_tarball_and_files_with_their_hashes(packed, tree):
    manifest = read_manifest(packed.manifest_path)
    assert manifest.extra["tarball"] == {
        "name": "demo.tar",
        "bytes": packed.tarball.stat().st_size,
        "sha256": sha256_file(packed.tarball),
    }
    assert {f.path: f.sha256 for f in manifest.files} == {
        f.path: sha256_file(tree / f.path) for f in walk_tree(tree)
    }
    assert packed.manifest_sha256 == sha256_file(packed.manifest_path)


def test_pack_of_the_same_files_made_in_another_way_has_the_same_bytes(tree, packed, tmp_path):
    twin = tmp_path / "twin"
    (twin / "sub").mkdir(parents=True)
    old = os.umask(0o077)
    try:
        for path in ("sub/empty.py", "sub/b.bin", "a.txt"):
            (twin / path).write_bytes((tree / path).read_bytes())
            (twin / path).chmod(0o700)
            os.utime(twin / path, (1, 1))
        second = build_pack(twin, tmp_path / "out2", "demo")
    finally:
        os.umask(old)
    assert second.tarball.read_bytes() == packed.tarball.read_bytes()
    assert second.manifest_path.read_bytes() == packed.manifest_path.read_bytes()


def test_pack_in_a_process_with_another_hash_seed_and_locale_has_the_same_bytes(packed, tree):
    code = (
        "import sys; from pathlib import Path; from leadline.pack.build import build_pack\n"
        "print(build_pack(Path(sys.argv[1]), Path(sys.argv[2]), 'demo').tarball_sha256)"
    )
    command = [sys.executable, "-c", code, str(tree), str(tree.parent / "out3")]
    env = {**os.environ, "PYTHONHASHSEED": "7", "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == packed.tarball_sha256


@given(
    names=st.lists(
        st.text("ab\u00e9\u65e5 .-", min_size=1, max_size=70).filter(lambda n: n.strip(" .")),
        min_size=1,
        max_size=5,
        unique_by=lambda n: n.casefold(),
    ),
    # hypothesis tries constants of our own source too, and a pointer is refused, as it should be
    content=st.binary(max_size=1100).filter(lambda data: not data.startswith(b"version ")),
)
@settings(max_examples=25, deadline=None)
def test_pack_of_any_names_and_sizes_is_as_long_as_foretold(tmp_path_factory, names, content):
    root = tmp_path_factory.mktemp("any")
    (root / "tree").mkdir()
    for name in names:
        (root / "tree" / name).write_bytes(content)
    result = build_pack(root / "tree", root / "out", "demo")
    assert result.tarball.stat().st_size == tar_bytes(walk_tree(root / "tree"))
    with tarfile.open(result.tarball) as tar:
        assert [m.name for m in tar] == [f.path for f in walk_tree(root / "tree")]


def test_pack_manifest_of_another_without_its_tar_is_not_replaced(tree, tmp_path):
    (tmp_path / "demo.manifest.json").write_text("precious", encoding="utf-8")
    with pytest.raises(UsageError, match="without its tar"):
        build_pack(tree, tmp_path, "demo")
    assert (tmp_path / "demo.manifest.json").read_text(encoding="utf-8") == "precious"
    assert build_pack(tree, tmp_path, "demo", overwrite=True).tarball.exists()


def test_pack_built_twice_is_already_there(tree, packed):
    second = build_pack(tree, packed.tarball.parent, "demo")
    assert second.already_there
    assert not packed.already_there
    assert second.tarball_sha256 == packed.tarball_sha256


def test_pack_whose_manifest_a_kill_prevented_gets_it_on_the_second_run(tree, packed):
    manifest = packed.manifest_path.read_bytes()
    packed.manifest_path.unlink()
    assert build_pack(tree, packed.tarball.parent, "demo").already_there
    assert packed.manifest_path.read_bytes() == manifest


def test_pack_over_another_of_that_name_is_refused_and_left_alone(tree, packed):
    before = packed.tarball.read_bytes()
    (tree / "a.txt").write_text("alphb")
    with pytest.raises(UsageError, match="holds other bytes"):
        build_pack(tree, packed.tarball.parent, "demo")
    assert packed.tarball.read_bytes() == before


def test_pack_beside_an_edited_manifest_is_refused(tree, packed):
    packed.manifest_path.write_bytes(packed.manifest_path.read_bytes() + b" ")
    with pytest.raises(UsageError, match="holds other bytes"):
        build_pack(tree, packed.tarball.parent, "demo")


def test_pack_over_another_with_overwrite_replaces_both_files(tree, packed):
    (tree / "a.txt").write_text("another alpha")
    second = build_pack(tree, packed.tarball.parent, "demo", overwrite=True)
    assert second.tarball_sha256 == sha256_file(packed.tarball) != packed.tarball_sha256
    assert read_manifest(packed.manifest_path).extra["tarball"]["sha256"] == second.tarball_sha256


def test_pack_takes_the_folders_name_where_none_is_given(tree, tmp_path):
    assert build_pack(tree, tmp_path / "out").tarball.name == "tree.tar"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 101])
def test_pack_name_that_is_no_file_name_is_refused(tree, tmp_path, name):
    with pytest.raises(UsageError, match="pack name"):
        build_pack(tree, tmp_path / "out", name)


def test_pack_of_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no folder"):
        build_pack(tmp_path / "nowhere", tmp_path / "out")


def test_pack_of_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no files"):
        build_pack(tmp_path / "empty", tmp_path / "out")


@pytest.mark.parametrize("out", [".", "sub", "new/deeper"])
def test_pack_into_its_own_source_is_refused(tree, out):
    with pytest.raises(UsageError, match="lies inside"):
        build_pack(tree, tree / out)


def test_pack_of_a_tree_with_secrets_lists_them_all_and_writes_nothing(tree, tmp_path):
    token = "hf_" + "aB3" * 12
    (tree / "a.txt").write_text(f"x\n{token}\n")
    (tree / ".env").write_text("")
    with pytest.raises(UnsafePackError) as caught:
        build_pack(tree, tmp_path / "out")
    assert ".env:0 secret-file; a.txt:2 huggingface-token" in str(caught.value)
    assert token not in str(caught.value)
    assert _names(tmp_path / "out") == []


def test_pack_records_what_the_allow_list_let_through(tree, tmp_path):
    (tree / "a.txt").write_text("hf_" + "aB3" * 12)
    (tree / ".leadlineallow").write_text("a.txt huggingface-token\n")
    result = build_pack(tree, tmp_path / "out")
    manifest = read_manifest(result.manifest_path)
    assert manifest.extra["secrets_allowed"] == ["a.txt:1 huggingface-token"]


def test_pack_of_a_tree_with_a_link_is_refused_and_writes_nothing(tree, tmp_path):
    (tree / "link").symlink_to("/etc/passwd")
    with pytest.raises(UnsafePackError, match="'link' is a symbolic link"):
        build_pack(tree, tmp_path / "out")
    assert _names(tmp_path / "out") == []


def test_g38_pack_over_a_pointer_is_refused(tree, tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 768\n"
    (tree / "sub/b.bin").write_bytes(pointer)
    with pytest.raises(DataError, match=f"pointer of {len(pointer)} bytes"):
        build_pack(tree, tmp_path / "out")


def test_pack_states_the_tokens_of_its_shards(shards, tmp_path):
    result = build_pack(shards, tmp_path / "out")
    (facts,) = read_manifest(result.manifest_path).extra["tokens"]
    assert (facts["train_tokens"], facts["eval_tokens"], facts["dtype"]) == (300, 20, "uint16")
    assert result.train_tokens == 300


def test_g38_pack_over_shards_damaged_since_they_were_made_is_refused(shards, tmp_path):
    shard = shards / "train/shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(IntegrityError, match="differ from their own manifest"):
        build_pack(shards, tmp_path / "out")
    assert _names(tmp_path / "out") == []


def test_pack_without_room_names_both_numbers_and_writes_nothing(tree, tmp_path):
    needed = tar_bytes(walk_tree(tree))
    with pytest.raises(DiskSpaceError) as caught:
        build_pack(tree, tmp_path / "out", free_bytes=lambda path: 1000)
    assert "1000 bytes" in str(caught.value)
    assert needed == 10_240
    assert _names(tmp_path / "out") == []


def test_pack_whose_disk_fills_up_leaves_nothing(tree, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskSpaceError, match="disk is full"):
        build_pack(tree, tmp_path / "out")
    assert _names(tmp_path / "out") == []


def test_pack_of_a_file_that_grows_meanwhile_is_refused(tree, tmp_path, monkeypatch):
    listed = walk_tree(tree)
    (tree / "a.txt").write_text("alpha and more")
    monkeypatch.setattr("leadline.pack.build.walk_tree", lambda root: listed)
    with pytest.raises(IntegrityError, match="another size now"):
        build_pack(tree, tmp_path / "out")
    assert _names(tmp_path / "out") == []


def test_pack_into_a_file_used_as_a_folder_is_one_sentence(tree, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LeadlineError, match="cannot write"):
        build_pack(tree, tmp_path / "file" / "out")


def test_pack_reports_progress_of_each_stage_to_its_end(tree, tmp_path):
    last = {}
    build_pack(tree, tmp_path / "out", on_progress=lambda s, d, t: last.update({s: (d, t)}))
    assert last["write"] == (773, 773)
