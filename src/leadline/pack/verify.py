"""Verify a tarball against the manifest beside it, and unpack it only then.

One pass reads every byte: the tar's own hash, each member against its entry, missing,
extra and repeated members by name. Token counts are recomputed, and the negative control
shows that the checker can fail. What is merely wrong is listed, all of it; what is unsafe
(a link, a device, a path that escapes) is refused at once.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import IntegrityError, UsageError
from leadline.core.manifest import FileEntry, Manifest, Readable, check_stream, read_manifest
from leadline.pack.build import manifest_path_of
from leadline.pack.control import control_problem
from leadline.pack.progress import Meter, OnProgress
from leadline.pack.report import PackReport
from leadline.pack.space import FreeBytes, disk_free_bytes, require_space
from leadline.pack.tar import Member, TarReader
from leadline.pack.tokens import may_be_shards_manifest, recount
from leadline.pack.unpack import SPACE_FACTOR, refuse_occupied, unpack


@dataclass(kw_only=True, slots=True)
class _Seen:
    """What one pass over a tar has shown so far."""

    entries: Mapping[str, FileEntry]
    problems: list[str] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    shard_manifests: dict[str, bytes] = field(default_factory=dict)
    sha256: str = ""


def verify_pack(
    tarball: Path,
    unpack_to: Path | None = None,
    *,
    on_progress: OnProgress | None = None,
    free_bytes: FreeBytes = disk_free_bytes,
) -> PackReport:
    """Verify `NAME.tar` against `NAME.manifest.json`; unpack when asked and nothing is wrong.

    Raises:
        UsageError: no tarball there, or *unpack_to* holds something.
        IntegrityError: no manifest, a malformed one, or a checker that is blind.
        UnsafePackError: a link, device or escaping path in the tar or its manifest.
        DiskSpaceError: less than twice the pack free at *unpack_to*.
    """
    manifest = _manifest_of(tarball)
    needed_bytes = SPACE_FACTOR * tarball.stat().st_size
    free = free_bytes(tarball if unpack_to is None else unpack_to)
    if unpack_to is not None:
        refuse_occupied(unpack_to)
        require_space(unpack_to, needed_bytes, free, "unpacking (twice the pack)")
    seen = _read_tar(tarball, manifest, on_progress)
    tokens, token_faults = recount(seen.shard_manifests, manifest)
    problems = [*seen.problems, *token_faults]
    control = None
    if not problems:
        control, problems = control_problem(
            manifest, lambda entry: _content_of(tarball, seen.offsets[entry.path], entry.bytes)
        )
    report = PackReport(
        source=tarball,
        problems=tuple(problems),
        tarball_sha256=seen.sha256,
        manifest_sha256=manifest.sha256,
        files=len(manifest.files),
        bytes=manifest.total_bytes,
        tokens=tokens,
        negative_control=control,
        free_bytes=free,
        needed_bytes=needed_bytes,
    )
    if unpack_to is None or not report.ok:
        return report
    unpack(tarball, unpack_to, manifest, on_progress)
    return replace(report, unpacked_to=unpack_to)


def _manifest_of(tarball: Path) -> Manifest:
    if not tarball.is_file():
        raise UsageError(f"there is no pack at {tarball}; give a NAME.tar or a folder")
    path = manifest_path_of(tarball)
    if not path.is_file():
        raise IntegrityError(
            f"{tarball} has no manifest {path.name} beside it; fetch it, or build the pack again"
        )
    manifest = read_manifest(path)
    tar = manifest.extra.get("tarball")
    wanted = {"name": str, "bytes": int, "sha256": str}
    if not isinstance(tar, dict) or {key: type(tar.get(key)) for key in tar} != wanted:
        raise IntegrityError(
            f"manifest {path} does not say which tarball it is of; build the pack again"
        )
    return manifest


def _read_tar(tarball: Path, manifest: Manifest, on_progress: OnProgress | None) -> _Seen:
    seen = _Seen(entries={entry.path: entry for entry in manifest.files})
    size_bytes = tarball.stat().st_size
    with explained_os_errors(tarball, "read"), tarball.open("rb") as stream:
        reader = TarReader(stream, Meter("check pack", size_bytes, on_progress))
        try:
            for member in reader.members():
                _take(member, seen)
        except IntegrityError as error:
            seen.problems.append(str(error))
        size_bytes, seen.sha256 = reader.finish()
    missing = sorted(set(seen.entries) - set(seen.offsets))
    seen.problems += [f"{path} is missing from the tar" for path in missing]
    whole = list(_tar_problems(tarball, manifest.extra["tarball"], size_bytes, seen.sha256))
    seen.problems = whole + seen.problems
    return seen


def _tar_problems(
    tarball: Path, recorded: Mapping[str, Any], size_bytes: int, sha256: str
) -> Iterator[str]:
    if recorded["name"] != tarball.name:
        yield f"the manifest is that of {recorded['name']}, not of {tarball.name}"
    if recorded["bytes"] != size_bytes:
        yield f"{tarball.name} has {size_bytes} bytes where {recorded['bytes']} are recorded"
    if recorded["sha256"] != sha256:
        yield (
            f"{tarball.name} has the sha256 {sha256[:12]}... where "
            f"{recorded['sha256'][:12]}... is recorded"
        )


def _take(member: Member, seen: _Seen) -> None:
    """Hold one member against its entry."""
    if member.path in seen.offsets:
        seen.problems.append(f"{member.path} is in the tar twice")
        return
    seen.offsets[member.path] = member.offset
    entry = seen.entries.get(member.path)
    if entry is None:
        seen.problems.append(f"{member.path} is in the tar and not in the manifest")
    elif member.bytes != entry.bytes:
        # Not read at all: a size beyond the recorded one is how a tar bomb begins.
        seen.problems.append(
            f"{entry.path} has {member.bytes} bytes where {entry.bytes} are recorded"
        )
    else:
        kept = _Kept(member.content)
        keep = may_be_shards_manifest(entry.path, entry.bytes)
        if problem := check_stream(kept if keep else member.content, entry):
            seen.problems.append(problem)
        elif keep:
            seen.shard_manifests[entry.path] = b"".join(kept.chunks)


class _Kept:
    """Passes reads through and keeps what was read."""

    def __init__(self, content: Readable) -> None:
        self._content = content
        self.chunks: list[bytes] = []

    def read(self, size: int, /) -> bytes:
        self.chunks.append(self._content.read(size))
        return self.chunks[-1]


@contextmanager
def _content_of(tarball: Path, offset: int, size_bytes: int) -> Iterator[Readable]:
    """One member's content, read straight from where the first pass saw it begin."""
    with explained_os_errors(tarball, "read"), tarball.open("rb") as stream:
        stream.seek(offset)
        yield _Part(stream, size_bytes)


class _Part:
    """The next bytes of a file, up to a size."""

    def __init__(self, stream: BinaryIO, size_bytes: int) -> None:
        self._stream = stream
        self._left_bytes = size_bytes

    def read(self, size: int, /) -> bytes:
        chunk = self._stream.read(min(size, self._left_bytes))
        self._left_bytes -= len(chunk)
        return chunk
