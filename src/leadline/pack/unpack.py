"""Unpack a verified tarball: into a temporary folder beside the target, then renamed.

Nothing of the tar is trusted because an earlier pass liked it: members are held against
the manifest while they are written, and the folder against the manifest once it is on
the disk. The target appears whole or not at all.
"""

import os
import shutil
import tempfile
from pathlib import Path

from leadline.core.atomic import explained_os_errors, fsync_folder
from leadline.core.errors import IntegrityError, UsageError
from leadline.core.manifest import FileEntry, Manifest, Readable, check_manifest, check_stream
from leadline.core.tree import summary
from leadline.pack.progress import Meter, OnProgress
from leadline.pack.tar import TarReader

SPACE_FACTOR = 2
"""Free disk wanted for unpacking, in packs: the files, and as much again to work in."""


def refuse_occupied(target: Path) -> None:
    """Refuse a target that holds anything.

    Raises:
        UsageError: *target* is a file, a link or a folder that is not empty.
    """
    taken = target.is_symlink() or (target.exists() and not target.is_dir())
    with explained_os_errors(target, "read"):
        if taken or (target.is_dir() and any(target.iterdir())):
            raise UsageError(
                f"{target} exists and is not an empty folder; unpack into a new one, "
                "nothing is overwritten"
            )


def unpack(
    tarball: Path, target: Path, manifest: Manifest, on_progress: OnProgress | None = None
) -> None:
    """Unpack into *target*, whole or not at all.

    Raises:
        UsageError: *target* holds something.
        IntegrityError: the tar, or what it became on the disk, is not what was recorded.
        UnsafePackError: a link, device or escaping path.
        DiskSpaceError: the disk is full; nothing is left behind.
    """
    refuse_occupied(target)
    with explained_os_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            meter = Meter("unpack", manifest.total_bytes, on_progress)
            _extract(tarball, staging, manifest, meter)
            meter = Meter("check again", manifest.total_bytes, on_progress)
            _recheck(staging, manifest, meter)
            _sync_folders(staging)
            staging.chmod(0o755)
            staging.replace(target)
        except BaseException:
            shutil.rmtree(staging)
            raise
        fsync_folder(target.parent)


def _extract(tarball: Path, folder: Path, manifest: Manifest, meter: Meter) -> None:
    entries = {entry.path: entry for entry in manifest.files}
    with tarball.open("rb") as stream:
        for member in TarReader(stream).members():
            entry = entries.pop(member.path, None)
            if entry is None or entry.bytes != member.bytes:
                raise IntegrityError(
                    f"{tarball} changed while it was unpacked: {member.path} is not the file that "
                    "was verified a moment ago"
                )
            path = folder / member.path
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, member.content, entry, meter)


def _recheck(folder: Path, manifest: Manifest, meter: Meter) -> None:
    if problems := check_manifest(folder, manifest, on_bytes=meter):
        raise IntegrityError(
            f"the pack came out different on the disk: {summary(problems)}; nothing was kept"
        )


def _write(path: Path, content: Readable, entry: FileEntry, meter: Meter) -> None:
    with path.open("xb") as stream:

        class Copying:
            def read(self, size: int, /) -> bytes:
                chunk = content.read(size)
                stream.write(chunk)
                return chunk

        if problem := check_stream(Copying(), entry, on_bytes=meter):
            raise IntegrityError(f"{problem}; nothing was kept")
        stream.flush()
        os.fsync(stream.fileno())
    path.chmod(0o644)


def _sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root, topdown=False):
        fsync_folder(Path(folder))
