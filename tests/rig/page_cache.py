"""What of a file is in the page cache, as the kernel tells."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest


def resident_pages(path: Path) -> int:
    """Pages of *path* in the page cache, as the kernel tells."""
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        flags = (ctypes.c_ubyte * (-(-len(mapped) // mmap.PAGESIZE)))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        assert mincore(address, len(mapped), flags) == 0
        return sum(flag & 1 for flag in flags)


def drop_pages(path: Path) -> None:
    """Give up the pages of *path*; skips the test where they cannot go."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(path):
        pytest.skip("the file system of the temporary folder keeps files in memory")
