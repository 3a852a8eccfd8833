"""The RADGRAM2 file: one Gram as a full square matrix behind a fixed header.

32 bytes, little-endian: magic `RADGRAM2`, u32 k, u32 rank, u64 rows, u32 domain, u32 zero;
then k x k float32, row-major. The sum is raw: divide by `rows` for a mean.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import IntegrityError

MAGIC = b"RADGRAM2"
HEADER = struct.Struct("<8sIIQII")
_MAX_U32 = 2**32 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RadgramHeader:
    """What a RADGRAM2 file says before its numbers."""

    num_features: int
    rank: int
    rows: int
    domain: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return radgram_bytes(self.num_features)


def radgram_bytes(num_features: int) -> int:
    """Size of the file of a Gram of *num_features*."""
    return HEADER.size + 4 * num_features * num_features


def fits_u32(value: int) -> bool:
    """Whether a rank or domain fits its place in the header."""
    return 0 <= value <= _MAX_U32


def write_radgram(path: Path, header: RadgramHeader, gram: NDArray[np.float32]) -> None:
    """Write one file and wait until it is on the disk; the folder is the caller's to publish.

    Raises:
        DiskSpaceError: the disk is full.
    """
    assert gram.shape == (header.num_features, header.num_features)
    head = HEADER.pack(MAGIC, header.num_features, header.rank, header.rows, header.domain, 0)
    with explained_os_errors(path), path.open("xb") as stream:
        stream.write(head)
        stream.write(np.ascontiguousarray(gram, dtype="<f4").data)
        stream.flush()
        os.fsync(stream.fileno())


def read_radgram(path: Path) -> tuple[RadgramHeader, NDArray[np.float32]]:
    """Header and matrix of a RADGRAM2 file.

    Raises:
        IntegrityError: another magic, or a size that is not the header's.
    """
    with explained_os_errors(path, "read"):
        data = path.read_bytes()
    if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise IntegrityError(f"{path} begins with {data[:8]!r}, wanted {MAGIC!r}; export it again")
    _, num_features, rank, rows, domain, _ = HEADER.unpack_from(data)
    header = RadgramHeader(num_features=num_features, rank=rank, rows=rows, domain=domain)
    if len(data) != header.file_bytes:
        raise IntegrityError(
            f"{path} has {len(data)} bytes, its header says {header.file_bytes}; export it again"
        )
    numbers = np.frombuffer(data, dtype="<f4", offset=HEADER.size)
    return header, numbers.reshape(num_features, num_features).astype(np.float32)
