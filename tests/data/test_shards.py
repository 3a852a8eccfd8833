"""Shard files: whole documents, exact ids, and no id that wraps."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import DataError, DiskSpaceError, UsageError
from leadline.data.manifest import Split, load_manifest
from leadline.data.reader import open_split
from leadline.data.shards import SplitWriter, choose_dtype
from leadline.data.verify import check_shards

MakeShards = Callable[..., Path]
WIDE_IDS = [0, 65_535, 65_536, 128_255]
WIDE_VOCAB_SIZE = 128_256


def _write(root: Path, documents: list[list[int]], **options: object) -> Split:
    settings_ = {"dtype": "uint16", "vocab_size": 1000, "end_of_text": 0, **options}
    with SplitWriter(root, "train", **settings_) as writer:  # type: ignore[arg-type]
        for number, ids in enumerate(documents):
            writer.append(np.array(ids, dtype=np.uint32), f"document {number}")
        return writer.finish()


def _ids_on_disk(root: Path, split: Split, width_bytes: int) -> list[int]:
    """Read without the library's own dtype code: little-endian by hand."""
    data = b"".join((root / shard.path).read_bytes() for shard in split.shards)
    return [
        int.from_bytes(data[at : at + width_bytes], "little")
        for at in range(0, len(data), width_bytes)
    ]


def test_g33_ids_of_a_wide_vocabulary_read_back_equal(make_shards: MakeShards) -> None:
    root = make_shards([WIDE_IDS], vocab_size=WIDE_VOCAB_SIZE)
    manifest = load_manifest(root)
    assert manifest.dtype == "uint32"
    assert _ids_on_disk(root, manifest.train, 4) == [*WIDE_IDS, 0]
    rows = open_split(root, "train").windows(np.array([0]), 5)
    assert rows.tolist() == [[*WIDE_IDS, 0]]
    assert check_shards(root) == []


@pytest.mark.parametrize("bad", [65_536, 128_255])
def test_g33_uint16_asked_for_ids_that_do_not_fit_is_refused(
    make_shards: MakeShards, bad: int
) -> None:
    with pytest.raises(DataError, match=f"holds the id {bad} at token 2"):
        make_shards([[0, 65_535, bad]], vocab_size=WIDE_VOCAB_SIZE, dtype="uint16")


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint16"), (65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (2**31, "uint32")],
)
def test_g33_dtype_follows_the_vocabulary(vocab_size: int, dtype: str) -> None:
    assert choose_dtype(vocab_size) == dtype


@settings(max_examples=40, deadline=None)
@given(
    vocab_size=st.sampled_from([257, 65_536, 65_537, 128_256, 2**31]),
    draws=st.lists(
        st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=9), min_size=1, max_size=9
    ),
    shard_tokens=st.integers(1, 30),
)
def test_g33_any_ids_of_any_vocabulary_read_back_equal(
    vocab_size: int, draws: list[list[float]], shard_tokens: int
) -> None:
    documents = [[int(draw * vocab_size) for draw in row] for row in draws]
    dtype = choose_dtype(vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        split = _write(
            root, documents, dtype=dtype, vocab_size=vocab_size, shard_tokens=shard_tokens
        )
        on_disk = _ids_on_disk(root, split, 2 if dtype == "uint16" else 4)
    assert on_disk == [token for ids in documents for token in [*ids, 0]]


def test_g37_id_beyond_the_vocabulary_is_refused_when_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"document 1 holds the id 1000 at token 1.* 1000 "):
        _write(tmp_path, [[1, 2], [3, 1000]])


def test_negative_id_is_refused_when_written(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "train", dtype="uint16", vocab_size=9, end_of_text=0)
    with pytest.raises(DataError, match="id -1 at token 0"):
        writer.append(np.array([-1, 3]), "a document")


def test_end_of_text_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="id 1000"):
        _write(tmp_path, [[1]], end_of_text=1000)


def test_shard_closes_before_the_document_that_would_pass_its_size(tmp_path: Path) -> None:
    split = _write(tmp_path, [[1] * 4, [2] * 4, [3] * 4, [4] * 20, [5]], shard_tokens=10)
    assert [shard.tokens for shard in split.shards] == [10, 5, 21, 2]
    assert [shard.documents for shard in split.shards] == [2, 1, 1, 1]
    assert (split.tokens, split.documents) == (38, 5)


def test_index_holds_the_start_of_every_document(tmp_path: Path) -> None:
    shard = _write(tmp_path, [[1] * 4, [2], [3] * 2]).shards[0]
    assert np.fromfile(tmp_path / shard.index_path, dtype="<u8").tolist() == [0, 5, 7]


def test_shard_records_its_largest_id_and_sizes(tmp_path: Path) -> None:
    shard = _write(tmp_path, [[1, 7, 2], [5]]).shards[0]
    assert (shard.max_id, shard.bytes, shard.index_bytes) == (7, 12, 16)
    assert (tmp_path / shard.path).stat().st_size == 12


def test_dtype_that_shards_lack_is_refused() -> None:
    with pytest.raises(UsageError, match="no dtype 'int8'"):
        choose_dtype(10, "int8")


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("leadline.data.shards.os.fsync", refuse)
    with pytest.raises(DiskSpaceError, match="disk is full"):
        _write(tmp_path, [[1, 2]])
