"""Plain tar, written the same way every time and read without trust.

Writing: PAX format, files only and in order of path, mode 0644, time, owner and group
zero and unnamed, closed by zeros to a multiple of 10,240 bytes. Nothing of the machine,
the clock or the umask gets in, so the same files give the same bytes.

Reading: one pass, no seeking. Only regular files with plain relative paths get through;
links, devices, fifos, sparse files and paths that escape are refused by name, and headers
that claim megabytes are refused before they fill the memory.
"""

import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, BinaryIO, Protocol, Self, cast

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import IntegrityError, UnsafePackError
from leadline.core.manifest import FileEntry, OnBytes, Readable, measure
from leadline.core.tree import TreeFile, path_problem

_BLOCK_BYTES = tarfile.BLOCKSIZE
_RECORD_BYTES = tarfile.RECORDSIZE
_HEADER_LIMIT_BYTES = 1 << 20  # far above any path's PAX header, far below memory


class Sink(Protocol):
    """Where a tar is written: a file, a hash, or both."""

    def write(self, data: bytes, /) -> object: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One regular file of a tar, to be read before the next is asked for."""

    path: str
    bytes: int
    offset: int
    """Where its content begins in the tar."""
    content: Readable


def tar_bytes(files: Sequence[TreeFile]) -> int:
    """Exact size of the tar that `write_tar` makes of *files*."""
    content = sum(len(_header(file)) + _padded(file.bytes) for file in files)
    return -(-(content + 2 * _BLOCK_BYTES) // _RECORD_BYTES) * _RECORD_BYTES


def write_tar(
    root: Path, files: Sequence[TreeFile], sink: Sink, on_bytes: OnBytes | None = None
) -> tuple[FileEntry, ...]:
    """Write *files*, which come sorted from `walk_tree`, and return them hashed.

    Raises:
        IntegrityError: a file's size changed since it was listed.
    """
    entries = []
    for file in files:
        sink.write(_header(file))
        with _Tee(root / file.path, sink) as source:
            size, digest = measure(source, limit_bytes=file.bytes + 1, on_bytes=on_bytes)
        if size != file.bytes:
            raise IntegrityError(
                f"{root / file.path} had {file.bytes} bytes when packing began and has another "
                "size now; stop whatever writes to it and pack again"
            )
        sink.write(b"\0" * (_padded(size) - size))
        entries.append(FileEntry(path=file.path, bytes=size, sha256=digest))
    written = sum(len(_header(file)) + _padded(file.bytes) for file in files)
    sink.write(b"\0" * (tar_bytes(files) - written))
    return tuple(entries)


class TarReader:
    """One pass over a tar file that hashes every byte, those between and after members too."""

    def __init__(self, raw: BinaryIO, on_bytes: OnBytes | None = None) -> None:
        self._source = _Metered(raw, on_bytes)
        self._total_bytes = os.fstat(raw.fileno()).st_size

    def members(self) -> Iterator[Member]:
        """The files in order.

        Raises:
            UnsafePackError: a member that is no plain file with a plain path.
            IntegrityError: not a tar, or a tar that breaks off.
        """
        self._source.allow(_HEADER_LIMIT_BYTES)
        with _explained(), tarfile.open(fileobj=cast("IO[bytes]", self._source), mode="r|") as tar:
            while True:
                info = tar.next()
                if info is None:
                    return
                _refuse_unsafe(info)
                if info.offset_data + info.size > self._total_bytes:
                    # Told here, because tarfile would skip to where it ends block by block.
                    raise IntegrityError(
                        f"{info.name} claims {info.size} bytes and the tar breaks off before them"
                    )
                self._source.allow(info.offset_data + _padded(info.size) + _HEADER_LIMIT_BYTES)
                content = tar.extractfile(info)
                assert content is not None  # a regular file always has content
                yield Member(
                    path=info.name,
                    bytes=info.size,
                    offset=info.offset_data,
                    content=_Content(content),
                )

    def finish(self) -> tuple[int, str]:
        """Read what is left and return size and sha256 of the whole file."""
        self._source.allow(None)
        while self._source.read(_HEADER_LIMIT_BYTES):
            pass
        return self._source.size_bytes, self._source.digest.hexdigest()


class _Tee:
    """Reads a file and writes the same bytes to a sink, telling whose errors are whose."""

    def __init__(self, path: Path, sink: Sink) -> None:
        self._path = path
        self._sink = sink
        with explained_os_errors(path, "read"):
            self._source = path.open("rb")

    def read(self, size: int, /) -> bytes:
        with explained_os_errors(self._path, "read"):
            chunk = self._source.read(size)
        self._sink.write(chunk)
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()


class _Content:
    """A member's content, with tarfile's errors explained."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, size: int, /) -> bytes:
        with _explained():
            return self._stream.read(size)


class _Metered:
    """Hashes what is read and refuses to read past where headers can sensibly end."""

    def __init__(self, raw: BinaryIO, on_bytes: OnBytes | None) -> None:
        self._raw = raw
        self._on_bytes = on_bytes
        self._limit: int | None = None
        self.size_bytes = 0
        self.digest = sha256()

    def allow(self, limit: int | None) -> None:
        """Let reading go as far as *limit* bytes from the start."""
        self._limit = limit

    def read(self, size: int, /) -> bytes:
        if self._limit is not None and self.size_bytes > self._limit:
            raise UnsafePackError(
                f"the tar has a header of more than {_HEADER_LIMIT_BYTES} bytes before byte "
                f"{self.size_bytes}; no pack of ours has one, so it is refused"
            )
        chunk = self._raw.read(size)
        self.digest.update(chunk)
        self.size_bytes += len(chunk)
        if self._on_bytes is not None:
            self._on_bytes(len(chunk))
        return chunk


def _header(file: TreeFile) -> bytes:
    info = tarfile.TarInfo(file.path)
    info.size = file.bytes
    info.mode = 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _refuse_unsafe(info: tarfile.TarInfo) -> None:
    plain = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
    kinds = (
        (info.issym(), f"is a symbolic link to {info.linkname!r}"),
        (info.islnk(), f"is a hard link to {info.linkname!r}"),
        (info.isdev(), "is a device or fifo"),
        (info.issparse(), "is a sparse file"),
        (info.isdir(), "is a folder entry, which packs do not hold"),
        (not plain, f"has the type {info.type!r}, which is no regular file"),
    )
    problem = path_problem(info.name) or next((why for is_so, why in kinds if is_so), None)
    if problem is None and info.size < 0:
        problem = f"claims a size of {info.size} bytes"
    if problem:
        raise UnsafePackError(f"member {info.name!r} {problem}; nothing was unpacked")


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what tarfile raises over bad bytes into one IntegrityError."""
    try:
        yield
    # tarfile lets arithmetic and lookup errors through for headers that contradict themselves.
    except (tarfile.TarError, ValueError, LookupError, EOFError, OverflowError) as error:
        raise IntegrityError(f"the tar cannot be read on: {error}") from error
