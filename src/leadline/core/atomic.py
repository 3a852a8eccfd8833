"""Writes that are whole or absent.

A file appears under its final name only after its bytes are on the disk: write
to a temporary name in the same folder, fsync, rename, fsync the folder. A full
disk or a kill at any moment leaves the old file, or none, never half of one.
"""

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

from leadline.core.errors import DiskSpaceError, LeadlineError

_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a binary stream whose content becomes *path* when the block ends well.

    Raises:
        DiskSpaceError: the disk is full.
        LeadlineError: the folder is read-only or cannot be made.
    """
    with explained_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Named before it is made, so that a stop signal at any moment leaves none behind.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                temporary.unlink()
            raise
        fsync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace *path* by *data*, atomically and durably."""
    with atomic_writer(path) as stream:
        stream.write(data)


def write_text(path: Path, text: str) -> None:
    """Replace *path* by *text* in UTF-8, atomically and durably."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: object) -> None:
    """Replace *path* by indented JSON for people; floats allowed, NaN and Inf refused."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    # A file name that is no UTF-8 comes as lone surrogates; they are shown as escapes.
    write_bytes(path, text.encode("utf-8", "backslashreplace") + b"\n")


def fsync_folder(folder: Path) -> None:
    """Make a rename inside *folder* survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained_os_errors(path: Path, verb: Literal["read", "write"] = "write") -> Iterator[None]:
    """Turn the operating system's refusals into sentences that name *path* and a way out.

    Raises:
        DiskSpaceError: no space, no quota, or a file size limit.
        LeadlineError: any other OSError raised inside the block.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskSpaceError(
                f"the disk is full while writing {path}; free space there and run the command again"
            ) from error
        if error.errno == errno.EFBIG:
            raise DiskSpaceError(
                f"{path} reached the largest file this process or disk allows; "
                "raise the limit (ulimit -f) or choose another disk"
            ) from error
        raise LeadlineError(f"cannot {verb} {_what_failed(path, error, verb)}") from error


def _what_failed(path: Path, error: OSError, verb: str) -> str:
    why = error.strerror or str(error)
    hint = "check the path"
    if error.errno in _NOT_ALLOWED:
        readable = "make it readable to you"
        hint = readable if verb == "read" else "choose a folder you may write to"
    # The block may have tripped over another file than the one it is about.
    other = error.filename
    ours = (path.name, f".{path.name}.")
    if isinstance(other, str) and not Path(other).name.startswith(ours):
        return f"{path}: {other}: {why}; {hint}"
    return f"{path}: {why}; {hint}"
