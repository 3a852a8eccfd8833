"""Build a pack: `NAME.tar` and `NAME.manifest.json`, whole or not at all.

The order is the procedure's: refuse what is unsafe or hollow, scan for secrets, find the
room, then write. The manifest is hashed from the very bytes that went into the tar, and
names the tar's own hash. Shards are held against their own manifest before a new one is
made over them, because a manifest made after the damage would bless it.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from leadline.core.atomic import atomic_writer, explained_os_errors
from leadline.core.canonical import sha256_file
from leadline.core.errors import IntegrityError, UnsafePackError, UsageError
from leadline.core.manifest import FileEntry, Manifest
from leadline.core.tree import TreeFile, summary, walk_tree
from leadline.pack.progress import Meter, OnProgress
from leadline.pack.secrets import SecretsScan, scan_tree
from leadline.pack.space import FreeBytes, disk_free_bytes, require_space
from leadline.pack.tar import Sink, tar_bytes, write_tar
from leadline.pack.tokens import (
    TokenFacts,
    may_be_shards_manifest,
    read_token_facts,
    token_problems,
)

MANIFEST_SUFFIX = ".manifest.json"
TAR_SUFFIX = ".tar"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MANIFEST_ENTRY_BYTES = 512  # generous for one file's path, size and hash in JSON


def manifest_path_of(tarball: Path) -> Path:
    """Where the manifest of *tarball* lies: beside it."""
    return tarball.with_name(tarball.name.removesuffix(TAR_SUFFIX) + MANIFEST_SUFFIX)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackResult:
    """A pack as built, or as found already there with the same bytes."""

    tarball: Path
    manifest_path: Path
    tarball_bytes: int
    tarball_sha256: str
    manifest_sha256: str
    files: int
    bytes: int
    """Sum of the files' sizes."""
    tokens: tuple[TokenFacts, ...]
    """One for each folder of token shards in the tree."""
    scan: SecretsScan
    """No findings, or there would be no pack; what was allowed and what was not read."""
    already_there: bool

    @property
    def train_tokens(self) -> int:
        """Training tokens of all shard folders together."""
        return sum(facts.train_tokens for facts in self.tokens)

    @property
    def document(self) -> dict[str, Any]:
        """Everything as JSON holds it."""
        return {
            "tarball": str(self.tarball),
            "manifest": str(self.manifest_path),
            "tarball_bytes": self.tarball_bytes,
            "tarball_sha256": self.tarball_sha256,
            "manifest_sha256": self.manifest_sha256,
            "files": self.files,
            "bytes": self.bytes,
            "tokens": [facts.document for facts in self.tokens],
            "train_tokens": self.train_tokens,
            "eval_tokens": sum(facts.eval_tokens for facts in self.tokens),
            "secrets_allowed": [str(finding) for finding in self.scan.allowed],
            "unused_allowances": list(self.scan.unused_allowances),
            "scanned_in_part": list(self.scan.cut_short),
            "already_there": self.already_there,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    root: Path
    files: tuple[TreeFile, ...]
    tokens: tuple[TokenFacts, ...]
    scan: SecretsScan
    tarball: Path
    manifest_path: Path


def build_pack(
    source_dir: Path,
    out_dir: Path,
    name: str | None = None,
    *,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    free_bytes: FreeBytes = disk_free_bytes,
) -> PackResult:
    """Pack every file under *source_dir*; the same files always give the same bytes.

    *name* is the source folder's own where none is given.

    Raises:
        UsageError: no such folder, a name that cannot be one, *out_dir* inside the source,
            or another pack of that name without *overwrite*.
        UnsafePackError: links, devices, unusable names or secrets; all are listed.
        DataError: git-LFS pointers or empty shards.
        IntegrityError: shards that differ from their own manifest, or a file that changed.
        DiskSpaceError: not enough room; nothing is left behind.
    """
    job = _prepare(source_dir, out_dir, name, on_progress)
    if job.tarball.exists():
        found = _compare(job, on_progress)
        if found is not None:
            return found
        if not overwrite:
            raise UsageError(
                f"{job.tarball} holds other bytes than {source_dir} now gives; "
                "choose another name, or give --overwrite"
            )
    elif job.manifest_path.exists() and not overwrite:
        raise UsageError(
            f"{job.manifest_path} is there without its tar; choose another name, "
            "or give --overwrite"
        )
    needed_bytes = tar_bytes(job.files) + _MANIFEST_ENTRY_BYTES * (len(job.files) + 8)
    require_space(out_dir, needed_bytes, free_bytes(out_dir), "the pack")
    return _write(job, on_progress)


def _prepare(
    source_dir: Path, out_dir: Path, name: str | None, on_progress: OnProgress | None
) -> _Job:
    name = source_dir.resolve().name if name is None else name
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"pack name {name!r} is not 1-100 letters, digits, dots, '-' or '_' beginning with "
            "a letter or digit; give --name"
        )
    files = walk_tree(source_dir)
    if not files:
        raise UsageError(f"{source_dir} holds no files; give the folder that does")
    if out_dir.resolve().is_relative_to(source_dir.resolve()):
        raise UsageError(
            f"{out_dir} lies inside {source_dir}, so the pack would hold itself; "
            "give an --out elsewhere"
        )
    total_bytes = sum(file.bytes for file in files)
    scan = scan_tree(source_dir, Meter("scan for secrets", total_bytes, on_progress))
    if scan.findings:
        raise UnsafePackError(
            f"{source_dir} holds {len(scan.findings)} secrets and is not packed: "
            f"{summary([str(finding) for finding in scan.findings])}; "
            "remove them, or list what is harmless in .leadlineallow"
        )
    return _Job(
        root=source_dir,
        files=files,
        tokens=_read_tokens(source_dir, files),
        scan=scan,
        tarball=out_dir / (name + TAR_SUFFIX),
        manifest_path=out_dir / (name + MANIFEST_SUFFIX),
    )


def _read_tokens(root: Path, files: Sequence[TreeFile]) -> tuple[TokenFacts, ...]:
    found = []
    for file in files:
        if may_be_shards_manifest(file.path, file.bytes):
            with explained_os_errors(root / file.path, "read"):
                data = (root / file.path).read_bytes()
            if facts := read_token_facts(data, file.path):
                found.append(facts)
    return tuple(found)


def _compare(job: _Job, on_progress: OnProgress | None) -> PackResult | None:
    """The pack that is there, if it is exactly what this job would write; else None."""
    if job.tarball.stat().st_size != tar_bytes(job.files):
        return None
    digest = _HashSink()
    entries = write_tar(job.root, job.files, digest, _meter(job, "compare", on_progress))
    if digest.hexdigest() != sha256_file(job.tarball):
        return None
    manifest = _manifest(job, entries, digest.hexdigest())
    if not job.manifest_path.exists():
        # A kill between the two renames leaves the tar alone; the rest is made up for here.
        with atomic_writer(job.manifest_path) as stream:
            stream.write(manifest.to_bytes())
    elif job.manifest_path.read_bytes() != manifest.to_bytes():
        return None
    return _result(job, manifest, digest.hexdigest(), already_there=True)


def _write(job: _Job, on_progress: OnProgress | None) -> PackResult:
    with ExitStack() as files:
        # Both files are complete before either takes its name: the inner one ends first.
        tar = files.enter_context(atomic_writer(job.tarball))
        side = files.enter_context(atomic_writer(job.manifest_path))
        digest = _HashSink(tar)
        entries = write_tar(job.root, job.files, digest, _meter(job, "write", on_progress))
        manifest = _manifest(job, entries, digest.hexdigest())
        side.write(manifest.to_bytes())
    return _result(job, manifest, digest.hexdigest(), already_there=False)


def _manifest(job: _Job, entries: tuple[FileEntry, ...], tarball_sha256: str) -> Manifest:
    files = {entry.path: entry for entry in entries}
    problems = [problem for facts in job.tokens for problem in token_problems(facts, files)]
    if problems:
        raise IntegrityError(
            f"{job.root} holds shards that differ from their own manifest and is not packed: "
            f"{summary(problems)}"
        )
    extra: Mapping[str, Any] = {
        "tarball": {
            "name": job.tarball.name,
            "bytes": tar_bytes(job.files),
            "sha256": tarball_sha256,
        },
        "tokens": [facts.document for facts in job.tokens],
        "secrets_allowed": [str(finding) for finding in job.scan.allowed],
    }
    return Manifest(files=entries, extra=extra)


def _result(job: _Job, manifest: Manifest, tarball_sha256: str, already_there: bool) -> PackResult:
    return PackResult(
        tarball=job.tarball,
        manifest_path=job.manifest_path,
        tarball_bytes=tar_bytes(job.files),
        tarball_sha256=tarball_sha256,
        manifest_sha256=manifest.sha256,
        files=len(manifest.files),
        bytes=manifest.total_bytes,
        tokens=job.tokens,
        scan=job.scan,
        already_there=already_there,
    )


def _meter(job: _Job, stage: str, on_progress: OnProgress | None) -> Meter:
    return Meter(stage, sum(file.bytes for file in job.files), on_progress)


class _HashSink:
    """Hashes a tar on its way to a file, or to nowhere."""

    def __init__(self, target: Sink | None = None) -> None:
        self._target = target
        self._digest = sha256()

    def write(self, data: bytes, /) -> None:
        """Take the next bytes of the tar."""
        self._digest.update(data)
        if self._target is not None:
            self._target.write(data)

    def hexdigest(self) -> str:
        """Sha256 of all bytes so far."""
        return self._digest.hexdigest()
