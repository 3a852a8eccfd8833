import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.canonical import canonical_bytes, sha256_bytes, sha256_file
from leadline.core.errors import DataError, IntegrityError, UnsafePackError, UsageError
from leadline.core.manifest import (
    FileEntry,
    Manifest,
    build_manifest,
    check_manifest,
    check_stream,
    read_manifest,
    write_manifest,
)
from leadline.core.tree import walk_tree

_FILES = {"a.txt": b"alpha", "sub/b.bin": bytes(range(256)), "sub/empty.txt": b""}


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for path, content in _FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def test_build_manifest_records_size_and_hash_in_order_of_path(tree):
    assert build_manifest(tree).files == tuple(
        FileEntry(path=path, bytes=len(content), sha256=sha256_bytes(content))
        for path, content in sorted(_FILES.items())
    )


def test_build_manifest_reports_every_byte_read(tree):
    seen = []
    manifest = build_manifest(tree, on_bytes=seen.append)
    assert sum(seen) == manifest.total_bytes == 261


def test_build_manifest_leaves_out_what_is_excluded(tree):
    assert [f.path for f in build_manifest(tree, exclude=["a.txt"]).files] == [
        "sub/b.bin",
        "sub/empty.txt",
    ]


def test_build_manifest_of_a_file_that_grows_meanwhile_is_refused(tree, monkeypatch):
    listed = walk_tree(tree)
    (tree / "a.txt").write_bytes(b"alpha and more")
    monkeypatch.setattr("leadline.core.manifest.walk_tree", lambda root, exclude: listed)
    with pytest.raises(IntegrityError, match="had 5 bytes and then 14"):
        build_manifest(tree)


def test_written_manifest_reads_back_equal_and_hashes_to_its_sha256(tree, tmp_path):
    manifest = build_manifest(tree, extra={"tokens": 7, "name": "x"})
    write_manifest(tmp_path / "m.json", manifest)
    assert read_manifest(tmp_path / "m.json") == manifest
    assert sha256_file(tmp_path / "m.json") == manifest.sha256


def test_manifest_with_a_float_is_refused():
    with pytest.raises(UsageError, match="float"):
        Manifest(files=(), extra={"loss": 0.5}).to_bytes()


def test_check_manifest_of_an_untouched_tree_finds_nothing(tree):
    assert check_manifest(tree, build_manifest(tree)) == []


def test_check_manifest_reports_all_problems_together(tree):
    manifest = build_manifest(tree)
    (tree / "a.txt").write_bytes(b"alphA")
    (tree / "sub/b.bin").write_bytes(b"short")
    (tree / "sub/empty.txt").unlink()
    (tree / "new.txt").write_bytes(b"")
    problems = check_manifest(tree, manifest)
    assert len(problems) == 4
    assert "a.txt has the sha256" in problems[0]
    assert problems[1] == "sub/b.bin has 5 bytes where 256 are recorded"
    assert problems[2] == "sub/empty.txt is missing"
    assert problems[3] == "new.txt is not in the manifest"


def test_check_manifest_of_a_grown_file_says_more_than_recorded(tree):
    manifest = build_manifest(tree)
    (tree / "a.txt").write_bytes(b"alpha and more")
    assert check_manifest(tree, manifest) == ["a.txt has more than the 5 bytes recorded"]


def test_check_manifest_does_not_follow_a_link_put_in_a_files_place(tree, tmp_path):
    manifest = build_manifest(tree)
    (tree / "a.txt").rename(tmp_path / "elsewhere")
    (tree / "a.txt").symlink_to(tmp_path / "elsewhere")
    (problem,) = check_manifest(tree, manifest)
    assert "'a.txt' is a symbolic link" in problem


def test_check_manifest_of_a_missing_folder_is_refused(tree, tmp_path):
    with pytest.raises(UsageError, match="no folder"):
        check_manifest(tmp_path / "gone", build_manifest(tree))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_check_stream_finds_any_single_byte_change(data):
    content = data.draw(st.binary(min_size=1, max_size=300))
    at = data.draw(st.integers(0, len(content) - 1))
    entry = FileEntry(path="f", bytes=len(content), sha256=sha256_bytes(content))
    changed = bytearray(content)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert check_stream(io.BytesIO(content), entry) is None
    assert "sha256" in (check_stream(io.BytesIO(bytes(changed)), entry) or "")


def test_check_stream_of_an_endless_stream_stops_one_byte_past_the_size():
    class Endless:
        read_bytes = 0

        def read(self, size):
            self.read_bytes += size
            return b"\0" * size

    stream, entry = Endless(), FileEntry(path="f", bytes=10, sha256="0" * 64)
    assert "more than the 10 bytes" in (check_stream(stream, entry) or "")
    assert stream.read_bytes == 11


def test_g38_pointer_in_place_of_a_shard_is_red_against_the_old_manifest(tree):
    manifest = build_manifest(tree)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 256\n"
    (tree / "sub/b.bin").write_bytes(pointer)
    problems = check_manifest(tree, manifest)
    assert f"sub/b.bin has {len(pointer)} bytes where 256 are recorded" in problems
    assert any("git-LFS pointer" in problem for problem in problems)


def test_g38_pointer_of_the_recorded_size_is_red_by_its_hash(tree):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 256\n"
    (tree / "sub/b.bin").write_bytes(b"x" * len(pointer))
    manifest = build_manifest(tree)
    (tree / "sub/b.bin").write_bytes(pointer)
    assert any("sha256" in problem for problem in check_manifest(tree, manifest))


def test_g38_new_manifest_over_a_pointer_is_refused(tree):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 256\n"
    (tree / "sub/b.bin").write_bytes(pointer)
    with pytest.raises(DataError, match=rf"pointer of {len(pointer)} bytes"):
        build_manifest(tree)


def _document(**changes):
    entry = {"path": "a", "bytes": 1, "sha256": "0" * 64}
    return {"schema": 1, "files": [{**entry, **changes}]}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"schema": 2, "files": []},
        {"schema": 1},
        {"schema": 1, "files": {}},
        {"schema": 1, "files": ["a"]},
        {"schema": 1, "files": [{"path": "a", "bytes": 1}]},
        _document(bytes=-1),
        _document(bytes="1"),
        _document(bytes=True),
        _document(path=1),
        _document(sha256="0" * 63),
        _document(sha256="A" * 64),
        {"schema": 1, "files": _document()["files"] * 2},
        {"schema": 1, "files": _document(path="b")["files"] + _document()["files"]},
    ],
)
def test_reading_a_malformed_manifest_names_the_file(tmp_path, document):
    (tmp_path / "m.json").write_bytes(canonical_bytes(document))
    with pytest.raises(IntegrityError, match=r"manifest .*m\.json "):
        read_manifest(tmp_path / "m.json")


@pytest.mark.parametrize("path", ["../a", "/a", "a/../../b", "a\\b", "C:a", "a\nb"])
def test_reading_a_manifest_with_an_escaping_path_is_refused(tmp_path, path):
    (tmp_path / "m.json").write_bytes(canonical_bytes(_document(path=path)))
    with pytest.raises(UnsafePackError, match="is refused"):
        read_manifest(tmp_path / "m.json")


def test_reading_a_manifest_reformatted_by_hand_is_refused(tree, tmp_path):
    document = json.loads(build_manifest(tree).to_bytes())
    (tmp_path / "m.json").write_text(json.dumps(document, indent=2))
    with pytest.raises(IntegrityError, match="not its canonical form"):
        read_manifest(tmp_path / "m.json")
