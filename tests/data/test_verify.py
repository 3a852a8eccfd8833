"""Damage to shards is found, named, and never blessed."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from leadline.core.canonical import canonical_bytes, sha256_file
from leadline.core.errors import DataError
from leadline.data.manifest import load_manifest
from leadline.data.reader import open_split
from leadline.data.verify import check_shards

MakeShards = Callable[..., Path]
TRAIN = "train/shard-00000.bin"
INDEX = "train/shard-00000.idx"
EVAL = "eval/shard-00000.bin"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:" + b"4d7a2146" * 8 + b"\nsize 1073741824\n"
)


def _rewrite(root: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Change the manifest and keep it canonical, as someone would who blesses damage."""
    path = root / "manifest.json"
    value = json.loads(path.read_bytes())
    change(value)
    path.write_bytes(canonical_bytes(value))


def _bless(root: Path) -> None:
    """Write the hashes and sizes of the files that are there into the manifest."""

    def change(value: dict) -> None:  # type: ignore[type-arg]
        for split in value["splits"].values():
            for shard in split["shards"]:
                path = root / shard["path"]
                shard["sha256"] = sha256_file(path)
                shard["bytes"] = path.stat().st_size
                shard["index_sha256"] = sha256_file(path.with_suffix(".idx"))

    _rewrite(root, change)


def _set_id(root: Path, position: int, value: int) -> None:
    ids = np.fromfile(root / TRAIN, dtype="<u2")
    ids[position] = value
    ids.tofile(root / TRAIN)


def test_shards_as_packed_have_no_problem(make_shards: MakeShards) -> None:
    assert check_shards(make_shards([[1, 2, 3], [4, 5]], shard_tokens=4)) == []


def test_missing_manifest_is_a_problem(tmp_path: Path) -> None:
    assert "manifest.json" in check_shards(tmp_path)[0]


@pytest.mark.parametrize("name", [TRAIN, INDEX, EVAL, "eval/shard-00000.idx", "tokenizer.json"])
def test_missing_file_is_named(make_shards: MakeShards, name: str) -> None:
    root = make_shards([[1, 2, 3]])
    (root / name).unlink()
    assert check_shards(root) == [f"{name} is missing"]


@pytest.mark.parametrize("name", ["train/shard-00001.bin", "eval/x", "notes.txt", "more"])
def test_extra_file_is_named(make_shards: MakeShards, name: str) -> None:
    root = make_shards([[1, 2, 3]])
    (root / name).write_bytes(b"x")
    assert check_shards(root) == [f"{name} is not in the manifest"]


@pytest.mark.parametrize("keep_bytes", [0, 1, 7])
def test_truncated_shard_is_named_with_both_sizes(make_shards: MakeShards, keep_bytes: int) -> None:
    root = make_shards([[1, 2, 3]])
    (root / TRAIN).write_bytes((root / TRAIN).read_bytes()[:keep_bytes])
    assert f"{TRAIN} has {keep_bytes} bytes, 8 listed" in check_shards(root)


def _flips(path: Path, step: int = 1) -> Iterator[int]:
    """Flip one bit of every *step*-th byte in turn, and put the file back at the end."""
    good = path.read_bytes()
    for at in range(0, len(good), step):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        yield at
    path.write_bytes(good)


def test_any_flipped_bit_of_the_data_is_found(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    for path in sorted(path for path in root.rglob("*.*") if path.name != "manifest.json"):
        for at in _flips(path):
            assert check_shards(root), f"bit flipped in byte {at} of {path.name}"
    assert check_shards(root) == []


def test_any_flipped_bit_of_the_manifest_is_found_or_changes_its_hash(
    make_shards: MakeShards,
) -> None:
    root = make_shards([[1, 2, 3]])
    recorded = load_manifest(root).sha256
    for at in _flips(root / "manifest.json", step=5):
        found = check_shards(root) or load_manifest(root).sha256 != recorded
        assert found, f"bit flipped in byte {at}"


def test_link_in_place_of_a_shard_is_named(make_shards: MakeShards, tmp_path: Path) -> None:
    root = make_shards([[1, 2, 3]])
    (root / TRAIN).rename(tmp_path / "elsewhere.bin")
    (root / TRAIN).symlink_to(tmp_path / "elsewhere.bin")
    assert check_shards(root) == [f"{TRAIN} is a symbolic link; shards must be files of their own"]


def test_g37_id_beyond_the_vocabulary_is_named_with_shard_and_offset(
    make_shards: MakeShards,
) -> None:
    root = make_shards([[1, 2, 3], [4, 5, 6]], vocab_size=50_257)
    _set_id(root, 5, 50_300)
    _bless(root)
    problems = check_shards(root)
    assert f"{TRAIN} holds the id 50300 at token 5, outside the vocabulary of 50257" in problems


def test_g37_tokenizer_that_was_exchanged_is_named(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    (root / "tokenizer.json").write_bytes(b'{"larger": true}')
    assert check_shards(root) == [
        "tokenizer.json is not the file the ids were made with: its sha256 differs"
    ]


def test_g38_pointer_in_place_of_a_shard_is_named_with_both_sizes(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    (root / TRAIN).write_bytes(POINTER)
    assert check_shards(root) == [
        f"{TRAIN} is a git-lfs pointer of {len(POINTER)} bytes, not 8 bytes of data; "
        "run `git lfs pull`"
    ]


def test_g38_manifest_made_after_the_damage_does_not_bless_a_pointer(
    make_shards: MakeShards,
) -> None:
    root = make_shards([[1, 2, 3]])
    (root / TRAIN).write_bytes(POINTER)
    _bless(root)
    assert any("git-lfs pointer" in problem for problem in check_shards(root))
    with pytest.raises(DataError, match="git-lfs pointer"):
        open_split(root, "train")


def test_held_out_shard_equal_to_a_training_shard_is_named(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    shutil.copyfile(root / TRAIN, root / EVAL)
    _bless(root)
    expected = f"{EVAL} equals {TRAIN}: held-out text would be trained on"
    assert expected in check_shards(root)


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ([0, 0], "does not rise"),
        ([1, 4], "does not rise"),
        ([0, 99], "does not rise"),
        ([0, 3], "does not end in the end-of-text id"),
    ],
)
def test_index_that_points_wrong_is_named(
    make_shards: MakeShards, starts: list[int], words: str
) -> None:
    root = make_shards([[1, 2, 3], [4, 5]])
    np.array(starts, dtype="<u8").tofile(root / INDEX)
    _bless(root)
    assert any(words in problem for problem in check_shards(root))


@pytest.mark.parametrize(
    ("split_key", "value", "words"),
    [
        ("tokens", 5, "train claims 5 tokens but its shards list 4"),
        ("documents", 9, "train claims 9 documents but its shards list 1"),
    ],
)
def test_counts_that_do_not_sum_are_named(
    make_shards: MakeShards, split_key: str, value: int, words: str
) -> None:
    root = make_shards([[1, 2, 3]])
    _rewrite(root, lambda manifest: manifest["splits"]["train"].update({split_key: value}))
    assert words in check_shards(root)


def test_split_without_shards_is_named(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    empty = {"tokens": 0, "documents": 0, "shards": []}
    _rewrite(root, lambda manifest: manifest["splits"].update(eval=empty))
    assert "eval has no shard" in check_shards(root)


def test_empty_shard_is_named(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    (root / TRAIN).write_bytes(b"")
    _rewrite(root, lambda m: m["splits"]["train"]["shards"][0].update(tokens=0, bytes=0))
    assert f"{TRAIN} is empty: 0 tokens in 1 documents" in check_shards(root)


def test_largest_id_that_is_listed_wrong_is_named(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    _rewrite(root, lambda m: m["splits"]["train"]["shards"][0].update(max_id=2))
    assert f"{TRAIN} has the largest id 3, 2 listed" in check_shards(root)


@pytest.mark.parametrize("path", ["eval/shard-00000.bin", "../x.bin", "train/a/b.bin", "train/x"])
def test_shard_path_outside_its_split_is_named(make_shards: MakeShards, path: str) -> None:
    root = make_shards([[1, 2, 3]])
    _rewrite(root, lambda m: m["splits"]["train"]["shards"][0].update(path=path))
    assert any("is listed under train" in problem for problem in check_shards(root))


def test_progress_reaches_every_byte(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3], [4, 5]], shard_tokens=4)
    seen: list[tuple[int, int]] = []
    check_shards(root, on_progress=lambda done, total: seen.append((done, total)))
    total_bytes = sum(
        shard.bytes
        for name in ("train", "eval")
        for shard in load_manifest(root).split(name).shards
    )
    assert seen[-1] == (total_bytes, total_bytes)
