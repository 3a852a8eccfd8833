"""A split opened for reading: its shards as one long row of ids.

`open_split` is the door between training and held-out text. It refuses a shard
that is not, by resolved path, a file of its own split, and a training shard
that equals a held-out one. Ids are checked against the vocabulary when read,
and never brought into range.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from leadline.core.canonical import sha256_file
from leadline.core.errors import DataError
from leadline.data.corpus import is_lfs_pointer
from leadline.data.manifest import (
    DTYPE_BYTES,
    Shard,
    ShardsManifest,
    SplitName,
    load_manifest,
)
from leadline.data.shards import little_endian


class TokenSplit:
    """Random access to the ids of one split, memory-mapped."""

    def __init__(self, root: Path, manifest: ShardsManifest, shards: Sequence[Shard]) -> None:
        dtype = little_endian(manifest.dtype)
        self.manifest = manifest
        self._shards = tuple(shards)
        self._maps = [np.memmap(root / shard.path, dtype=dtype, mode="r") for shard in shards]
        self._ends = np.cumsum([shard.tokens for shard in shards], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        """Ids in the split, closing ones included."""
        return int(self._ends[-1])

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Ids from each start on, as int64 [starts, length]; a window may cross shards.

        Raises:
            DataError: an id outside the vocabulary.
        """
        rows = np.empty((starts.size, length), dtype=np.int64)
        for row, start in zip(rows, starts.tolist(), strict=True):
            self._fill(row, start)
        if rows.size and int(rows.max()) >= self.manifest.vocab_size:
            self._refuse_outside(rows, starts)
        return rows

    def _locate(self, position: int) -> tuple[int, int]:
        """Shard and offset in it of a position in the split."""
        shard = int(np.searchsorted(self._ends, position, side="right"))
        return shard, position - (int(self._ends[shard]) - self._shards[shard].tokens)

    def _fill(self, row: NDArray[np.int64], start: int) -> None:
        shard, offset = self._locate(start)
        filled = 0
        while filled < row.size:
            part = self._maps[shard][offset : offset + row.size - filled]
            row[filled : filled + part.size] = part
            filled, shard, offset = filled + part.size, shard + 1, 0

    def _refuse_outside(self, rows: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        row, column = np.argwhere(rows >= self.manifest.vocab_size)[0].tolist()
        shard, offset = self._locate(int(starts[row]) + column)
        raise DataError(
            f"{self._shards[shard].path} holds the id {rows[row, column]} at token {offset}, "
            f"outside the vocabulary of {self.manifest.vocab_size}; pack the text again with "
            "the tokenizer of the model"
        )


def open_split(root: Path, split: SplitName) -> TokenSplit:
    """Open one split after checking that its shards are whole and its own.

    Sizes are checked here, hashes only where a held-out shard could hide; `check_shards` reads
    every byte.

    Raises:
        DataError: a shard missing, cut, a pointer, empty, outside its folder or held out.
    """
    root = Path(root)
    manifest = load_manifest(root)
    shards = manifest.split(split).shards
    if not shards:
        raise DataError(f"{root} has no {split} shard; pack the text again")
    for shard in shards:
        if not (root / shard.path).is_file():
            raise DataError(f"shard {root / shard.path} is missing; restore it or pack again")
        _check_place(root, shard, split)
        _check_whole(root, shard, DTYPE_BYTES[manifest.dtype])
    if split == "train":
        _refuse_held_out(root, manifest)
    return TokenSplit(root, manifest, shards)


def _check_place(root: Path, shard: Shard, split: SplitName) -> None:
    wanted = root.resolve() / split
    resolved = (root / shard.path).resolve()
    if PurePosixPath(shard.path).parts[:1] != (split,) or resolved.parent != wanted:
        raise DataError(
            f"{split} shard {shard.path} lies at {resolved}, outside {wanted}; the {split} loader "
            f"opens nothing but files of {split}/"
        )


def _check_whole(root: Path, shard: Shard, width_bytes: int) -> None:
    path = root / shard.path
    size_bytes = path.stat().st_size
    with path.open("rb") as stream:
        if is_lfs_pointer(stream.read(64), size_bytes):
            raise DataError(
                f"shard {path} is a git-lfs pointer of {size_bytes} bytes, not {shard.bytes} "
                "bytes of data; run `git lfs pull`"
            )
    if size_bytes != shard.tokens * width_bytes or size_bytes == 0:
        raise DataError(
            f"shard {path} has {size_bytes} bytes, {shard.tokens * width_bytes} wanted for "
            f"{shard.tokens} tokens; restore it or pack the text again"
        )


def _refuse_held_out(root: Path, manifest: ShardsManifest) -> None:
    """Refuse a training shard that equals a held-out one, by what is on the disk."""
    held_out: dict[int, set[str]] = {}
    listed = {shard.sha256 for shard in manifest.eval.shards}
    for shard in manifest.eval.shards:
        path = root / shard.path
        if path.is_file():
            held_out.setdefault(path.stat().st_size, set()).add(sha256_file(path))
    for shard in manifest.train.shards:
        path = root / shard.path
        # Only a file of equal size can be equal, so most training shards are not read here.
        candidates = held_out.get(path.stat().st_size, set())
        if shard.sha256 in listed or (candidates and sha256_file(path) in candidates):
            raise DataError(
                f"train shard {path} equals a shard of eval/: held-out text would be trained on; "
                "pack the text again"
            )
