"""Manifest of a tree: every file's size and sha256, in canonical JSON.

Schema 1: `{"schema": 1, "files": [{"path", "bytes", "sha256"}...], ...}` with files in
order of path; any further top-level keys are kept and are the writer's own.

- Making a manifest refuses what `core/tree.py` refuses, so damage is never blessed.
- Checking reports every problem at once. `check_stream` is the one place where bytes are
  held against an entry: a folder, a tarball member and the negative control all use it.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from leadline.core.atomic import explained_os_errors, write_bytes
from leadline.core.canonical import canonical_bytes, parse_canonical, sha256_bytes
from leadline.core.errors import IntegrityError, UnsafePackError
from leadline.core.tree import collisions, path_problem, summary, survey, walk_tree

MANIFEST_FILE = "manifest.json"
SCHEMA = 1

_CHUNK_BYTES = 1 << 20
_HEX = frozenset("0123456789abcdef")

OnBytes = Callable[[int], object]
"""Told how many bytes were read since the last call; for a progress bar."""


class Readable(Protocol):
    """Anything bytes can be read from: a file, a tar member."""

    def read(self, size: int, /) -> bytes: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file as recorded."""

    path: str
    """Relative to the tree's root, with forward slashes."""
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A tree as recorded."""

    files: tuple[FileEntry, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further top-level keys: integers, strings, lists and objects of them."""

    @property
    def total_bytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(entry.bytes for entry in self.files)

    @property
    def sha256(self) -> str:
        """Sha256 of `to_bytes()`, which is also that of a manifest file."""
        return sha256_bytes(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Canonical JSON.

        Raises:
            UsageError: `extra` holds a float or something else JSON must not hold here.
        """
        files = [
            {"path": entry.path, "bytes": entry.bytes, "sha256": entry.sha256}
            for entry in sorted(self.files, key=lambda entry: entry.path)
        ]
        return canonical_bytes({**self.extra, "schema": SCHEMA, "files": files})

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> "Manifest":
        """Read canonical JSON; *source* names it in errors.

        Raises:
            IntegrityError: not canonical, another schema, or a malformed entry.
            UnsafePackError: a path that would be written outside the tree.
        """
        try:
            document = _document_of(parse_canonical(data))
            files = _files_of(document)
        except IntegrityError as error:
            raise IntegrityError(f"manifest {source} {error}; make the pack again") from error
        paths = [entry.path for entry in files]
        unsafe = [f"{path!r} {why}" for path in paths if (why := path_problem(path))]
        unsafe += collisions(paths)
        if unsafe:
            raise UnsafePackError(f"manifest {source} is refused: {summary(unsafe)}")
        extra = {key: value for key, value in document.items() if key not in ("schema", "files")}
        return cls(files=files, extra=extra)


def build_manifest(
    root: Path,
    *,
    exclude: Iterable[str] = (),
    extra: Mapping[str, Any] | None = None,
    on_bytes: OnBytes | None = None,
) -> Manifest:
    """Hash every file under *root* but those whose relative path is in *exclude*.

    Raises:
        UsageError: no folder at *root*.
        UnsafePackError: links, devices or unusable names; all are listed.
        DataError: git-LFS pointers or empty shards; all are listed.
        IntegrityError: a file changed while it was read.
    """
    entries = []
    for file in walk_tree(root, exclude):
        path = root / file.path
        with explained_os_errors(path, "read"), path.open("rb") as stream:
            size, digest = measure(stream, on_bytes=on_bytes)
        if size != file.bytes:
            raise IntegrityError(
                f"{path} had {file.bytes} bytes and then {size}; stop whatever writes to it"
            )
        entries.append(FileEntry(path=file.path, bytes=size, sha256=digest))
    return Manifest(files=tuple(entries), extra=dict(extra or {}))


def check_manifest(
    root: Path,
    manifest: Manifest,
    *,
    exclude: Iterable[str] = (),
    on_bytes: OnBytes | None = None,
) -> list[str]:
    """Every difference between *root* and *manifest*, one sentence each; empty when none.

    Raises:
        UsageError: no folder at *root*.
        LeadlineError: a file cannot be read.
    """
    found = survey(root, exclude)
    problems = list(found.unsafe)
    present = {file.path for file in found.files}
    recorded = {entry.path for entry in manifest.files}
    for entry in manifest.files:
        path = root / entry.path
        if entry.path not in present:
            # A link in its place has been told above and must not be followed.
            if not path.is_symlink():
                problems.append(f"{entry.path} is missing")
            continue
        with explained_os_errors(path, "read"), path.open("rb") as stream:
            if problem := check_stream(stream, entry, on_bytes=on_bytes):
                problems.append(problem)
    problems += found.hollow
    problems += [f"{path} is not in the manifest" for path in sorted(present - recorded)]
    return problems


def check_stream(
    stream: Readable, entry: FileEntry, *, on_bytes: OnBytes | None = None
) -> str | None:
    """Hold a stream's bytes against *entry*: the problem, or None.

    Reads at most one chunk more than the entry's size, however long the stream is.
    """
    size, digest = measure(stream, limit_bytes=entry.bytes + 1, on_bytes=on_bytes)
    if size > entry.bytes:
        return f"{entry.path} has more than the {entry.bytes} bytes recorded"
    if size < entry.bytes:
        return f"{entry.path} has {size} bytes where {entry.bytes} are recorded"
    if digest != entry.sha256:
        return (
            f"{entry.path} has the sha256 {digest[:12]}... where {entry.sha256[:12]}... is recorded"
        )
    return None


def measure(
    stream: Readable, *, limit_bytes: int | None = None, on_bytes: OnBytes | None = None
) -> tuple[int, str]:
    """Size and sha256 of a stream, reading no further than *limit_bytes*."""
    digest = hashlib.sha256()
    size = 0
    while limit_bytes is None or size < limit_bytes:
        want = _CHUNK_BYTES if limit_bytes is None else min(_CHUNK_BYTES, limit_bytes - size)
        chunk = stream.read(want)
        if not chunk:
            break
        digest.update(chunk)
        size += len(chunk)
        if on_bytes is not None:
            on_bytes(len(chunk))
    return size, digest.hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Read a manifest file.

    Raises:
        IntegrityError: not canonical, another schema, or a malformed entry.
        UnsafePackError: a path that would be written outside the tree.
        LeadlineError: the file cannot be read.
    """
    with explained_os_errors(path, "read"):
        data = path.read_bytes()
    return Manifest.from_bytes(data, str(path))


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest file, whole or not at all."""
    write_bytes(path, manifest.to_bytes())


def _document_of(value: object) -> dict[str, Any]:
    """The parsed manifest as an object; error texts continue `manifest NAME ...`."""
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise IntegrityError(f"is not a manifest of schema {SCHEMA}")
    return value


def _files_of(document: dict[str, Any]) -> tuple[FileEntry, ...]:
    listed = document.get("files")
    if not isinstance(listed, list):
        raise IntegrityError("has no list of files")
    files = tuple(_file_of(item, number) for number, item in enumerate(listed, start=1))
    paths = [entry.path for entry in files]
    if paths != sorted(set(paths)):
        raise IntegrityError("lists a file twice or out of order")
    return files


def _file_of(item: object, number: int) -> FileEntry:
    if not isinstance(item, dict) or sorted(item) != ["bytes", "path", "sha256"]:
        raise IntegrityError(f"has an entry {number} without exactly path, bytes and sha256")
    path, size, digest = item["path"], item["bytes"], item["sha256"]
    sound = (
        isinstance(path, str)
        and type(size) is int
        and size >= 0
        and isinstance(digest, str)
        and len(digest) == 64
        and set(digest) <= _HEX
    )
    if not sound:
        raise IntegrityError(f"has an entry {number} with an unusable path, size or sha256")
    return FileEntry(path=path, bytes=size, sha256=digest)
