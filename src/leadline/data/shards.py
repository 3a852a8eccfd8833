"""Token shards as files: little-endian ids, and an index of where documents start.

- A document is never cut: a shard closes before the document that would pass its size.
- The width of an id follows the vocabulary; an id that does not fit is refused, never wrapped.
- Hashes are taken from the bytes as they are written, so a manifest cannot bless a bad disk.
"""

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import DataError, UsageError
from leadline.data.manifest import DTYPE_BYTES, INDEX_ENTRY_BYTES, Shard, Split

DEFAULT_SHARD_TOKENS = 2**24
_UINT16_IDS = 2**16


def little_endian(dtype: str) -> np.dtype[np.unsignedinteger]:
    """The on-disk dtype for a manifest's dtype name."""
    return np.dtype(dtype).newbyteorder("<")


def choose_dtype(vocab_size: int, wanted: str | None = None) -> str:
    """The narrowest id type for a vocabulary, or *wanted* where the caller insists.

    Raises:
        UsageError: a type that shards do not have.
    """
    if wanted is None:
        return "uint16" if vocab_size <= _UINT16_IDS else "uint32"
    if wanted not in DTYPE_BYTES:
        raise UsageError(f"shards have no dtype {wanted!r}; give {' or '.join(DTYPE_BYTES)}")
    return wanted


class SplitWriter:
    """Appends documents to the shards of one split under ROOT/NAME."""

    def __init__(
        self,
        root: Path,
        name: str,
        *,
        dtype: str,
        vocab_size: int,
        end_of_text: int,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
    ) -> None:
        self._root = root
        self._name = name
        self._dtype = little_endian(dtype)
        self._vocab_size = vocab_size
        self._limit = min(vocab_size, int(np.iinfo(self._dtype).max) + 1)
        self._end = np.array([end_of_text], dtype=np.uint32)
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._open: _OpenShard | None = None
        with explained_os_errors(root / name):
            (root / name).mkdir()

    def append(self, ids: NDArray[np.integer], where: str) -> None:
        """Add one document and its closing token; *where* names it in errors.

        Raises:
            DataError: an id that the vocabulary or the dtype does not hold.
            DiskSpaceError: the disk is full.
        """
        self._refuse_unfit(ids, where)
        tokens = np.concatenate([ids.astype(np.uint32), self._end])
        self._refuse_unfit(self._end, where)
        if self._open is not None and self._open.tokens + tokens.size > self._shard_tokens:
            self._close_shard()
        if self._open is None:
            path = f"{self._name}/shard-{len(self._shards):05d}.bin"
            self._open = _OpenShard(self._root, path)
        self._open.write(tokens, self._dtype)

    def finish(self) -> Split:
        """Close the last shard and return what was written."""
        if self._open is not None:
            self._close_shard()
        return Split(
            tokens=sum(shard.tokens for shard in self._shards),
            documents=sum(shard.documents for shard in self._shards),
            shards=tuple(self._shards),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open is not None:
            self._open.abandon()

    def _refuse_unfit(self, ids: NDArray[np.integer], where: str) -> None:
        bad = np.flatnonzero((ids < 0) | (ids >= self._limit))
        if bad.size:
            raise DataError(
                f"{where} holds the id {ids[bad[0]]} at token {bad[0]}, but a vocabulary of "
                f"{self._vocab_size} in {self._dtype.name} ends at {self._limit - 1}; "
                "use the tokenizer's own vocabulary and uint32 beyond 65,536 ids"
            )

    def _close_shard(self) -> None:
        assert self._open is not None
        self._shards.append(self._open.close())
        self._open = None


class _OpenShard:
    """The shard being written."""

    def __init__(self, root: Path, path: str) -> None:
        self._root = root
        self._path = path
        self._digest = hashlib.sha256()
        self._starts: list[int] = []
        self._max_id = 0
        self.tokens = 0
        with explained_os_errors(root / path):
            self._stream: BinaryIO = (root / path).open("xb")

    def write(self, tokens: NDArray[np.uint32], dtype: np.dtype[np.unsignedinteger]) -> None:
        data = tokens.astype(dtype).tobytes()
        with explained_os_errors(self._root / self._path):
            self._stream.write(data)
        self._digest.update(data)
        self._starts.append(self.tokens)
        self._max_id = max(self._max_id, int(tokens.max()))
        self.tokens += tokens.size

    def close(self) -> Shard:
        index = np.array(self._starts, dtype="<u8").tobytes()
        index_path = (self._root / self._path).with_suffix(".idx")
        with explained_os_errors(self._root / self._path):
            size_bytes = self._stream.tell()
            _sync_and_close(self._stream)
            with index_path.open("xb") as stream:
                stream.write(index)
                _sync_and_close(stream)
        return Shard(
            path=self._path,
            tokens=self.tokens,
            documents=len(self._starts),
            max_id=self._max_id,
            bytes=size_bytes,
            sha256=self._digest.hexdigest(),
            index_bytes=len(self._starts) * INDEX_ENTRY_BYTES,
            index_sha256=hashlib.sha256(index).hexdigest(),
        )

    def abandon(self) -> None:
        # A full disk makes the flush inside close() fail again; the first error is the one to show.
        with explained_os_errors(self._root / self._path):
            self._stream.close()


def _sync_and_close(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()
