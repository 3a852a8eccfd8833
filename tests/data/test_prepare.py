"""Packing text: the whole way from files to shards, and what is never left behind."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from leadline.core.canonical import sha256_bytes, sha256_json
from leadline.core.errors import DataError, DiskSpaceError, UsageError
from leadline.data.manifest import ShardsManifest
from leadline.data.prepare import pack_text
from leadline.data.scan import PackProgress
from leadline.data.verify import check_shards

MakeText = Callable[..., Path]


def _tree(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def _decoded(root: Path, manifest: ShardsManifest, name: str) -> list[str]:
    """Documents of a split, cut at the index and decoded by the packed tokenizer."""
    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    texts = []
    for shard in manifest.split(name).shards:
        ids = np.fromfile(root / shard.path, dtype="<u2").tolist()
        starts = np.fromfile(root / shard.index_path, dtype="<u8").tolist()
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            assert ids[end - 1] == manifest.tokenizer.end_of_text
            texts.append(tokenizer.decode(ids[start : end - 1]))
    return texts


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_packed_documents_decode_to_the_files(
    text_tree: MakeText, tmp_path: Path, tokenizer: str
) -> None:
    root, out = text_tree(), tmp_path / "out"
    manifest = pack_text(
        root, out, tokenizer=tokenizer, eval_fraction="0.3", shard_tokens=500, seed=4
    )
    decoded = [*_decoded(out, manifest, "train"), *_decoded(out, manifest, "eval")]
    assert sorted(decoded) == sorted(data.decode() for data in _tree(root).values())
    assert len(manifest.train.shards) > 1
    assert manifest.eval.documents > 0
    assert check_shards(out) == []


def test_given_tokenizer_packs_like_the_one_it_was_saved_from(
    text_tree: MakeText, tmp_path: Path
) -> None:
    root = text_tree()
    first = pack_text(root, tmp_path / "a", vocab_size=280)
    second = pack_text(root, tmp_path / "b", tokenizer=str(tmp_path / "a" / "tokenizer.json"))
    assert second.tokenizer.sha256 == first.tokenizer.sha256
    assert second.train == first.train


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_same_inputs_give_the_same_bytes(
    text_tree: MakeText, tmp_path: Path, tokenizer: str
) -> None:
    root = text_tree()
    pack_text(root, tmp_path / "a", tokenizer=tokenizer)
    pack_text(str(root), tmp_path / "b", tokenizer=tokenizer, eval_fraction="0.020")
    assert _tree(tmp_path / "a") == _tree(tmp_path / "b")


def test_manifest_describes_the_source(text_tree: MakeText, tmp_path: Path) -> None:
    root = text_tree({"b": b"two", "a": b"one", "c": b""})
    source = pack_text(root, tmp_path / "out", tokenizer="bytes").source
    assert (source.files, source.bytes, source.skipped) == (2, 6, {"empty": 1})
    assert source.sha256 == sha256_json([["a", sha256_bytes(b"one")], ["b", sha256_bytes(b"two")]])


def test_duplicates_of_a_text_land_on_one_side(text_tree: MakeText, tmp_path: Path) -> None:
    files = {f"{n:02d}": f"text {n % 4}".encode() for n in range(16)}
    out = tmp_path / "out"
    manifest = pack_text(text_tree(files), out, tokenizer="bytes", eval_fraction="0.5")
    train, held_out = (set(_decoded(out, manifest, name)) for name in ("train", "eval"))
    assert train | held_out == {f"text {n}" for n in range(4)}
    assert not train & held_out


def test_bpe_learns_nothing_from_the_held_out_side(text_tree: MakeText, tmp_path: Path) -> None:
    words = [f"q{first}{second}z" for first in "bcdf" for second in "ghjk"]
    out = tmp_path / "out"
    root = text_tree({word: (f" {word}" * 50).encode() for word in words})
    manifest = pack_text(root, out, eval_fraction="0.3", vocab_size=400)
    learned = json.loads((out / "tokenizer.json").read_bytes())["model"]["vocab"]
    known = {word for word in words if f"\u0120{word}" in learned}
    held_out = {text.split()[0] for text in _decoded(out, manifest, "eval")}
    assert held_out
    assert known == set(words) - held_out


def test_max_bytes_is_recorded_and_caps_the_text(text_tree: MakeText, tmp_path: Path) -> None:
    manifest = pack_text(text_tree(), tmp_path / "out", tokenizer="bytes", max_bytes=1000)
    assert manifest.request["max_bytes"] == 1000
    assert manifest.source.bytes <= 1000
    assert manifest.source.skipped["over_max_bytes"] == 12 - manifest.source.files


def test_existing_shards_of_the_same_inputs_are_kept(text_tree: MakeText, tmp_path: Path) -> None:
    root, out = text_tree(), tmp_path / "out"
    first = pack_text(root, out, tokenizer="bytes")
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    stages: list[PackProgress] = []
    assert pack_text(root, out, tokenizer="bytes", on_progress=stages.append) == first
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times
    assert {progress.stage for progress in stages} == {"scan"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 1}, "seed 0 there, 1 asked"),
        ({"eval_fraction": "0.5"}, "eval fraction 0.02 there, 0.5 asked"),
        ({"tokenizer": "bpe"}, "tokenizer bytes there, bpe asked"),
        ({"shard_tokens": 100}, "shard_tokens 16777216 there, 100 asked"),
        ({"dtype": "uint32"}, "dtype unset there, uint32 asked"),
        ({"max_bytes": 10**9}, "max_bytes unset there, 1000000000 asked"),
    ],
)
def test_existing_shards_of_other_inputs_are_refused_with_the_difference(
    text_tree: MakeText, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    root, out = text_tree(), tmp_path / "out"
    pack_text(root, out, tokenizer="bytes")
    before = _tree(out)
    with pytest.raises(UsageError, match=words):
        pack_text(root, out, **{"tokenizer": "bytes", **options})  # type: ignore[arg-type]
    assert _tree(out) == before


def test_existing_shards_of_changed_text_are_refused(text_tree: MakeText, tmp_path: Path) -> None:
    root, out = text_tree(), tmp_path / "out"
    pack_text(root, out, tokenizer="bytes")
    (root / "00.txt").write_bytes(b"changed")
    with pytest.raises(UsageError, match=r"text [0-9a-f]{12} there, [0-9a-f]{12} asked"):
        pack_text(root, out, tokenizer="bytes")


def test_existing_shards_that_are_damaged_are_not_called_good(
    text_tree: MakeText, tmp_path: Path
) -> None:
    root, out = text_tree(), tmp_path / "out"
    pack_text(root, out, tokenizer="bytes")
    (out / "train" / "shard-00000.bin").write_bytes(b"")
    with pytest.raises(DataError, match="damaged"):
        pack_text(root, out, tokenizer="bytes")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_existing_output_of_another_kind_is_refused(
    text_tree: MakeText, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
        (out / "notes.txt").write_bytes(b"mine")
    else:
        out.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists and holds no token shards"):
        pack_text(text_tree(), out)


def test_output_inside_the_text_is_refused(text_tree: MakeText) -> None:
    root = text_tree()
    with pytest.raises(UsageError, match="lies inside the text"):
        pack_text(root, root / "shards")


def test_text_that_changes_while_packing_is_refused(text_tree: MakeText, tmp_path: Path) -> None:
    root = text_tree()

    total_bytes = sum(len(data) for data in _tree(root).values())

    def meddle(progress: PackProgress) -> None:
        if progress.done_bytes == total_bytes:
            (root / "11.txt").write_bytes(b"other")

    with pytest.raises(DataError, match=r"11\.txt .* changed while"):
        pack_text(root, tmp_path / "out", tokenizer="bytes", on_progress=meddle)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_full_disk_at_any_sync_leaves_nothing(
    text_tree: MakeText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = text_tree()
    calls = [0, 0]  # syncs so far, and the one that fails

    def fail_at_one(handle: int) -> None:
        calls[0] += 1
        if calls[0] == calls[1]:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail_at_one)
    for nth in range(1, 7):  # two files of each split, then tokenizer and manifest
        calls[:] = [0, nth]
        with pytest.raises(DiskSpaceError):
            pack_text(root, tmp_path / "out", tokenizer="bytes")
        assert [path.name for path in tmp_path.iterdir()] == ["text"]
    calls[:] = [0, 0]
    pack_text(root, tmp_path / "out", tokenizer="bytes")
    assert calls[0] > 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**53}, "seed is 9007199254740992"),
        ({"eval_fraction": "1"}, "eval fraction 1 "),
        ({"shard_tokens": 0}, "shard size is 0"),
        ({"max_bytes": 0}, "max bytes is 0"),
        ({"vocab_size": 100}, "vocabulary of 100"),
        ({"dtype": "int64"}, "no dtype 'int64'"),
    ],
)
def test_input_that_cannot_be_is_refused_before_anything_is_written(
    text_tree: MakeText, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    root = text_tree()
    with pytest.raises(UsageError, match=words):
        pack_text(root, tmp_path / "new" / "out", **options)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_progress_of_every_stage_ends_at_its_total(text_tree: MakeText, tmp_path: Path) -> None:
    seen: dict[str, PackProgress] = {}

    def note(progress: PackProgress) -> None:
        seen[progress.stage] = progress

    manifest = pack_text(text_tree(), tmp_path / "out", on_progress=note)
    assert list(seen) == ["scan", "train tokenizer", "encode"]
    assert seen["encode"].done_bytes == seen["encode"].total_bytes == manifest.source.bytes
    assert seen["train tokenizer"].done_bytes == seen["train tokenizer"].total_bytes


def test_standard_library_packs_by_its_name(tmp_path: Path) -> None:
    manifest = pack_text("stdlib", tmp_path / "out", tokenizer="bytes", max_bytes=200_000)
    assert manifest.train.tokens > 150_000
    assert check_shards(tmp_path / "out") == []
