"""One layer's Grams in one safetensors file: written in a stream, read in parts.

- `NAME` holds packed upper triangles in float32, `rows.NAME` the int64 row counts.
- Row counts come first, then Grams, each group in order of name: equal content, equal bytes.
- The header's metadata names format, version, layer and the facts of every Gram.
- A reader holds offsets, shapes and file size against each other before it reads a number,
  and reads with `pread`, so that a file cut meanwhile is an error and not a fault of the memory.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leadline._version import __version__
from leadline.core.atomic import atomic_writer, explained_os_errors
from leadline.core.errors import DataError, IntegrityError
from leadline.tap.facts import ROWS_PREFIX, GramFacts, parse_facts

LAYER_FORMAT = "leadline-grams-layer"
VERSION = 1

_DTYPES: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8")}
_HEADER_LIMIT_BYTES = 100 << 20  # safetensors' own limit
_ALIGN_BYTES = 8
_FLUSH_BYTES = 64 << 20  # dirty pages that may pile up before they are sent to the disk
CHUNK_NUMBERS = 4 << 20  # float32 read or added at once: 16 MiB

Chunks = Callable[[], Iterator[NDArray[Any]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A tensor to be written: its numbers come in contiguous pieces, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Chunks

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Size and hash of a file, taken from the bytes as they were written."""

    num_bytes: int
    sha256: str


def write_layer_file(
    path: Path, layer: int, facts: Mapping[str, GramFacts], blocks: list[Block]
) -> Written:
    """Write a layer's file whole, durably, and without keeping its pages in memory.

    Raises:
        DiskSpaceError: the disk is full; nothing is left behind.
        LeadlineError: the folder may not be written to.
    """
    ordered = sorted(blocks, key=lambda block: (block.dtype != "I64", block.name))
    head = _header(layer, facts, ordered)
    digest, written = hashlib.sha256(), 0
    with atomic_writer(path) as stream:
        for data in _pieces(head, ordered):
            stream.write(data)
            digest.update(data)
            written += len(data)
            if written // _FLUSH_BYTES != (written - len(data)) // _FLUSH_BYTES:
                stream.flush()
                _send_to_disk(stream.fileno())
    _forget_pages(path)
    return Written(num_bytes=written, sha256=digest.hexdigest())


def array_block(name: str, array: NDArray[Any]) -> Block:
    """A block of an array that is at hand."""
    dtype = "I64" if array.dtype.kind == "i" else "F32"
    return Block(name=name, dtype=dtype, shape=array.shape, chunks=lambda: iter((array,)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Extent:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFile:
    """A layer file whose header has been held against its size."""

    path: Path
    layer: int
    num_bytes: int
    facts: Mapping[str, GramFacts]
    tool: str
    """The version of leadline that wrote it."""
    extents: Mapping[str, _Extent]

    def numbers(self, name: str, begin: int, count: int) -> NDArray[Any]:
        """*count* numbers of the tensor *name*, flattened, from *begin* on; a fresh array.

        Raises:
            IntegrityError: the file ends early.
        """
        extent = self.extents[name]
        out = np.empty(count, _DTYPES[extent.dtype])
        offset = extent.begin + begin * out.itemsize
        view = out.data.cast("B") if count else memoryview(b"")
        with explained_os_errors(self.path, "read"), self.path.open("rb") as stream:
            done = 0
            while done < len(view):
                got = os.preadv(stream.fileno(), [view[done:]], offset + done)
                if got == 0:
                    raise IntegrityError(
                        f"{self.path} ends at byte {offset + done}, wanted {self.num_bytes}; "
                        "it was cut while it was read: tap this layer again"
                    )
                done += got
        return out

    def chunks(self, name: str) -> Iterator[NDArray[Any]]:
        """All numbers of the tensor *name*, in pieces of at most 16 MiB."""
        total = math.prod(self.extents[name].shape)
        for begin in range(0, total, CHUNK_NUMBERS):
            yield self.numbers(name, begin, min(CHUNK_NUMBERS, total - begin))

    def rows(self, name: str) -> NDArray[np.int64]:
        """Row counts of the Gram *name*: int64 [experts in the file], or a scalar array."""
        shape = self.facts[name].rows_shape
        count = math.prod(shape)
        return self.numbers(ROWS_PREFIX + name, 0, count).reshape(shape)


def open_layer_file(path: Path, layer: int) -> LayerFile:
    """Read and check the header of a layer file; no Gram is read.

    Raises:
        IntegrityError: not a file of this format, or header, shapes and size disagree.
        DataError: a version that this program does not read.
    """
    with explained_os_errors(path, "read"), path.open("rb") as stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        head_bytes = int.from_bytes(stream.read(8), "little")
        if num_bytes < 8 or head_bytes > min(num_bytes - 8, _HEADER_LIMIT_BYTES):
            raise IntegrityError(
                f"{path} has {num_bytes} bytes and a header of {head_bytes}: it was cut or is no "
                "layer file; tap this layer again"
            )
        head = stream.read(head_bytes)
    try:
        return _parse(path, layer, num_bytes, head)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(
            f"{path} is no layer file: its header is damaged ({type(error).__name__}: {error}); "
            "tap this layer again"
        ) from error


def _pieces(head: bytes, blocks: list[Block]) -> Iterator[memoryview]:
    yield memoryview(head)
    for block in blocks:
        sent = 0
        for chunk in block.chunks():
            piece = np.ascontiguousarray(chunk, dtype=_DTYPES[block.dtype])
            sent += piece.nbytes
            if piece.size:
                yield from _cut(piece.reshape(-1).data.cast("B"))
        assert sent == block.num_bytes, (block.name, sent, block.num_bytes)


def _cut(view: memoryview) -> Iterator[memoryview]:
    step = 4 * CHUNK_NUMBERS
    for begin in range(0, len(view), step):
        yield view[begin : begin + step]


def _header(layer: int, facts: Mapping[str, GramFacts], blocks: list[Block]) -> bytes:
    described = {name: facts[name].document for name in sorted(facts)}
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": LAYER_FORMAT,
            "version": str(VERSION),
            "leadline": __version__,
            "layer": str(layer),
            "grams": json.dumps(described, sort_keys=True, separators=(",", ":")),
        }
    }
    begin = 0
    for block in blocks:
        end = begin + block.num_bytes
        offsets = [begin, end]
        entries[block.name] = {
            "dtype": block.dtype,
            "shape": list(block.shape),
            "data_offsets": offsets,
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def _parse(path: Path, layer: int, num_bytes: int, head: bytes) -> LayerFile:
    entries = json.loads(head)
    metadata = entries.pop("__metadata__")
    if metadata["format"] != LAYER_FORMAT or metadata["version"] != str(VERSION):
        raise DataError(
            f"{path} is {metadata['format']} of version {metadata['version']}, this program reads "
            f"{LAYER_FORMAT} of version {VERSION}; use the version of leadline that wrote it"
        )
    if metadata["layer"] != str(layer):
        raise ValueError(f"it holds layer {metadata['layer']}, wanted {layer}")
    grams = json.loads(metadata["grams"])
    facts = {name: parse_facts(name, document) for name, document in grams.items()}
    extents = _extents(entries, 8 + len(head), num_bytes)
    for name, fact in facts.items():
        shapes = (extents[name].shape, extents[ROWS_PREFIX + name].shape)
        if shapes != (fact.shape, fact.rows_shape):
            raise ValueError(f"{name} has the shapes {shapes}, described otherwise")
    strange = set(extents) - {prefix + name for name in facts for prefix in ("", ROWS_PREFIX)}
    if strange:
        raise ValueError(f"{min(strange)} is described nowhere")
    return LayerFile(
        path=path,
        layer=layer,
        num_bytes=num_bytes,
        facts=facts,
        tool=metadata["leadline"],
        extents=extents,
    )


def _extents(entries: Mapping[str, Any], data_begin: int, num_bytes: int) -> dict[str, _Extent]:
    """Extents that follow each other without gap or overlap and end where the file ends."""
    extents, expected = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        dtype = "I64" if name.startswith(ROWS_PREFIX) else "F32"
        if any(type(size) is not int or size < 0 for size in shape) or entry["dtype"] != dtype:
            raise ValueError(f"{name} is {entry['dtype']} of shape {shape}, wanted {dtype}")
        wanted = math.prod(shape) * _DTYPES[dtype].itemsize
        if begin != expected or end - begin != wanted:
            raise ValueError(f"{name} lies at {begin} to {end}, wanted {wanted} at {expected}")
        extents[name] = _Extent(dtype=dtype, shape=shape, begin=data_begin + begin)
        expected = end
    if data_begin + expected != num_bytes:
        raise ValueError(f"the file has {num_bytes} bytes, its header {data_begin + expected}")
    return extents


def _send_to_disk(handle: int) -> None:
    os.fsync(handle)
    _advise(handle)


def _forget_pages(path: Path) -> None:
    """Give the file's pages back: they count against the memory of this process's group."""
    with explained_os_errors(path, "read"), path.open("rb") as stream:
        _advise(stream.fileno())


def _advise(handle: int) -> None:
    if sys.platform == "linux":  # elsewhere the system decides alone
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
