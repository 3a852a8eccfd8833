"""Free space, asked before anything large is written."""

import shutil
from collections.abc import Callable
from pathlib import Path

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import DiskSpaceError
from leadline.core.units import format_bytes

FreeBytes = Callable[[Path], int]
"""Free bytes on the disk that would hold a path, which need not exist yet."""


def disk_free_bytes(path: Path) -> int:
    """Free bytes on the disk of *path*, or of its nearest folder that exists."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    with explained_os_errors(place, "read"):
        return shutil.disk_usage(place).free


def require_space(path: Path, needed_bytes: int, free_bytes: int, why: str) -> None:
    """Refuse before writing when the disk cannot hold it.

    Raises:
        DiskSpaceError: with both numbers.
    """
    if free_bytes < needed_bytes:
        raise DiskSpaceError(
            f"{path} has {format_bytes(free_bytes)} ({free_bytes} bytes) free and {why} needs "
            f"{format_bytes(needed_bytes)} ({needed_bytes} bytes); choose another disk"
        )
