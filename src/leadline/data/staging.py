"""A folder that appears whole under its final name, or not at all.

The content is made in a hidden sibling, synced, and renamed. Any error removes
the sibling; only a kill that cannot be caught leaves it, under a name that
starts with a dot and ends in `.tmp`.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leadline.core.atomic import explained_os_errors, fsync_folder
from leadline.core.errors import UsageError


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes *out* when the block ends well.

    *out* may exist only as an empty folder. The files in the staged folder must be synced by
    whoever wrote them; the folders are synced here.

    Raises:
        UsageError: *out* came to hold something, or its parent is not a folder.
        DiskSpaceError: the disk is full.
        LeadlineError: the parent may not be written to.
    """
    parent = out.absolute().parent
    created = _missing_parents(parent)
    staging = parent / f".{out.absolute().name}.{secrets.token_hex(6)}.tmp"
    try:
        with explained_os_errors(out):
            parent.mkdir(parents=True, exist_ok=True)
            staging.mkdir()
        yield staging
        with explained_os_errors(out):
            _publish(staging, out)
            fsync_folder(parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        for folder in created:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _missing_parents(parent: Path) -> list[Path]:
    """Folders that have to be made for *parent* to exist, innermost first."""
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"cannot make a folder under {parent}: it is a file; choose another place")
    return missing


def _publish(staging: Path, out: Path) -> None:
    for folder, _, _ in os.walk(staging):
        fsync_folder(Path(folder))
    try:
        staging.rename(out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise UsageError(
                f"{out} appeared while it was being made; remove it or choose another folder"
            ) from error
        raise
