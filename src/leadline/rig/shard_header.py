"""One safetensors file's header, read strictly.

The header is the only thing that says where a tensor's bytes lie, so nothing in it is
taken on trust: a range beyond the file, two tensors over the same bytes, a shape that does
not come to the range's length or a name given twice is refused with the file's name.
"""

import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import IntegrityError, UsageError
from leadline.core.units import format_bytes

MAX_HEADER_BYTES = 512 * 2**20
"""More than any file holds: a checkpoint of 100,000 tensors needs about 15 MiB."""

DTYPE_BYTES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "BOOL": 1,
}
"""What is read as it is; any narrower dtype holds codes of quantised weights."""

_QUANTISED = re.compile(r"[FIU][468](_\w+)?|F6_\w+")
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where one published tensor's bytes lie."""

    name: str
    dtype: str
    """As safetensors writes it: `BF16`."""
    shape: tuple[int, ...]
    shard: str
    """File name inside the checkpoint's folder."""
    begin: int
    """First byte, from the start of the file."""
    end: int

    @property
    def num_bytes(self) -> int:
        """Length in the file."""
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardHeader:
    """What a shard holds."""

    raw: bytes
    """Length prefix and JSON as they stand in the file."""
    file_bytes: int
    entries: tuple[TensorEntry, ...]
    """In the order of their bytes."""


def read_shard_header(path: Path) -> ShardHeader:
    """Read and check the header of the safetensors file *path*.

    Raises:
        IntegrityError: the file is not what its header says.
        UsageError: it holds quantised tensors.
    """
    with explained_os_errors(path, "read"), path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        raw = _read_raw(path, file, file_bytes)
    document = _parse(path, raw[8:])
    document.pop("__metadata__", None)
    entries = [_entry(path, len(raw), name, fields) for name, fields in document.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _refuse_overlaps(path, entries)
    wanted = max((entry.end for entry in entries), default=len(raw))
    if wanted != file_bytes:
        which = "is cut short" if file_bytes < wanted else "is longer than its header says"
        raise IntegrityError(
            f"{path.name} {which}: its header describes {wanted:,} bytes, the file has "
            f"{file_bytes:,}; fetch {path} again"
        )
    return ShardHeader(raw=raw, file_bytes=file_bytes, entries=tuple(entries))


def _read_raw(path: Path, file: Any, file_bytes: int) -> bytes:
    head: bytes = file.read(8)
    if (head + file.read(len(_LFS_POINTER) - 8)).startswith(_LFS_POINTER):
        raise IntegrityError(
            f"{path} is a Git LFS pointer of {file_bytes} bytes, not the weights; fetch the file "
            "itself with `git lfs pull`"
        )
    if len(head) < 8:
        raise IntegrityError(
            f"{path.name} has {file_bytes} bytes, a safetensors file has 8 and a header; fetch "
            f"{path} again"
        )
    (length,) = struct.unpack("<Q", head)
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise IntegrityError(
            f"{path.name} says that its header has {length:,} bytes, wanted 2 to "
            f"{format_bytes(MAX_HEADER_BYTES)}; {path} is no safetensors file or is damaged"
        )
    if 8 + length > file_bytes:
        raise IntegrityError(
            f"{path.name} is cut short inside its header: expected {8 + length:,} bytes, found "
            f"{file_bytes:,}; fetch {path} again"
        )
    file.seek(0)
    raw: bytes = file.read(8 + length)
    return raw


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise IntegrityError(
                f"{path.name} names {twice} twice in its header, wanted every name once; write "
                f"{path} again"
            )
        return fields

    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"the header of {path.name} is no JSON ({error}); fetch {path} again"
        ) from error
    if not isinstance(document, dict):
        raise IntegrityError(
            f"the header of {path.name} is a JSON {type(document).__name__}, wanted an object; "
            f"fetch {path} again"
        )
    return document


def _entry(path: Path, data_begin: int, name: str, fields: object) -> TensorEntry:
    if not isinstance(fields, dict):
        raise _bad_entry(path, name, f"is {fields!r}, wanted dtype, shape and data_offsets")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str):
        raise _bad_entry(path, name, f"has dtype {dtype!r}, wanted a name such as BF16")
    if not _are_sizes(shape):
        raise _bad_entry(path, name, f"has shape {shape!r}, wanted a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad_entry(path, name, f"has data_offsets {offsets!r}, wanted [begin, end]")
    if dtype not in DTYPE_BYTES:
        if _QUANTISED.fullmatch(dtype):
            raise UsageError(
                f"tensor {name} in {path.name} is {dtype}, which holds quantised codes; wanted a "
                "checkpoint in BF16, F16 or F32: dequantise it first or take the published "
                "full-width one"
            )
        raise _bad_entry(path, name, f"has unknown dtype {dtype}; known: {', '.join(DTYPE_BYTES)}")
    wanted, found = prod(shape) * DTYPE_BYTES[dtype], offsets[1] - offsets[0]
    if wanted != found:
        raise _bad_entry(
            path, name, f"is {dtype} {shape} of {wanted:,} bytes but is given {found:,}"
        )
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        shard=path.name,
        begin=data_begin + offsets[0],
        end=data_begin + offsets[1],
    )


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _bad_entry(path: Path, name: str, what: str) -> IntegrityError:
    return IntegrityError(f"in the header of {path.name}, tensor {name} {what}; fetch {path} again")


def _refuse_overlaps(path: Path, entries: Sequence[TensorEntry]) -> None:
    last: TensorEntry | None = None
    for entry in entries:
        if entry.begin == entry.end:
            continue
        if last is not None and entry.begin < last.end:
            raise IntegrityError(
                f"in {path.name}, tensors {last.name} and {entry.name} share bytes "
                f"{entry.begin:,} to {min(last.end, entry.end):,}, wanted every byte in one "
                f"tensor; write {path} again"
            )
        last = entry
