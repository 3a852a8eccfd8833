"""The folder of a tap: one writer at a time, and nothing in it that is not the tap's own."""

import os
import platform
import re
from pathlib import Path

from filelock import FileLock, Timeout

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import LockError, UsageError
from leadline.tap.manifest import MANIFEST_FILE

LOCK_FILE = ".tap.lock"
HOLDER_FILE = ".tap.pid"
WORK_FOLDER = "work"
"""The recorder's own scratch, which the store neither reads nor removes."""
MARKER_FILE = "tap.marker"

_LAYER_FILE = re.compile(r"layer_(\d{5,})(\.wave_(\d{5,}))?\.safetensors")
_TEMPORARY = re.compile(r"\.(grams\.json|layer_\d{5,}.*\.safetensors)\..*\.tmp")
_OWN = frozenset({MANIFEST_FILE, LOCK_FILE, HOLDER_FILE, WORK_FOLDER, MARKER_FILE, "lost+found"})


def layer_file_name(layer: int, waves: int, num_waves: int) -> str:
    """Name of a layer's file; while waves are missing it says how many it holds."""
    part = "" if waves == num_waves else f".wave_{waves:05d}"
    return f"layer_{layer:05d}{part}.safetensors"


def is_layer_file(name: str) -> bool:
    """Whether a file of this name would be a layer's."""
    return _LAYER_FILE.fullmatch(name) is not None


def names_in(folder: Path) -> list[str]:
    """Names in the folder, in order; none when there is no folder.

    Raises:
        UsageError: the path is a file.
    """
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file, wanted a folder for Grams; choose another --out")
    with explained_os_errors(folder, "read"):
        return sorted(path.name for path in folder.iterdir())


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds anything a tap did not put there.

    Raises:
        UsageError: a strange file, or layer files without their grams.json.
    """
    names = names_in(folder)
    strange = [
        name
        for name in names
        if name not in _OWN and not is_layer_file(name) and not _TEMPORARY.fullmatch(name)
    ]
    if strange:
        raise UsageError(
            f"{folder} holds {strange[0]} ({len(strange)} such), which no tap made; choose an "
            "--out that is new or empty"
        )
    if MANIFEST_FILE not in names and any(map(is_layer_file, names)):
        raise UsageError(
            f"{folder} holds layer files without their {MANIFEST_FILE}, which a tap writes first; "
            "put it back, or choose an --out that is new or empty"
        )


def remove_leftovers(folder: Path, listed: frozenset[str]) -> None:
    """Remove what a broken-off tap left: temporary files, and layer files not *listed*."""
    with explained_os_errors(folder):
        for name in names_in(folder):
            if _TEMPORARY.fullmatch(name) or (is_layer_file(name) and name not in listed):
                (folder / name).unlink(missing_ok=True)


class FolderLock:
    """Holds a folder against a second writer; a killed holder lets go by itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Sealing may run in another thread than the one that opened the tap.
        self._lock = FileLock(folder / LOCK_FILE, thread_local=False)

    def acquire(self) -> None:
        """Take the folder.

        Raises:
            LockError: another process writes there; it is named.
            LeadlineError: the folder may not be written to.
        """
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise LockError(
                f"{self._folder} is being written by {self._holder()}; wait for it, end it, or "
                "choose another --out"
            ) from error
        except OSError:
            with explained_os_errors(self._folder / LOCK_FILE):
                raise
        try:
            with explained_os_errors(self._folder / HOLDER_FILE):
                text = f"process {os.getpid()} on {platform.node() or 'this machine'}\n"
                (self._folder / HOLDER_FILE).write_text(text, encoding="utf-8")
        except BaseException:
            self._lock.release()
            raise

    def release(self) -> None:
        """Let the folder go; a second call does nothing."""
        if not self._lock.is_locked:
            return
        try:
            with explained_os_errors(self._folder / HOLDER_FILE):
                (self._folder / HOLDER_FILE).unlink(missing_ok=True)
        finally:
            self._lock.release()

    def _holder(self) -> str:
        try:
            text = (self._folder / HOLDER_FILE).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "another process"
        return text.strip() or "another process"
