"""Documents of a tree of text, or of one JSONL file, in an order that never varies.

- Paths are sorted; symbolic links are never followed.
- What is not text is skipped and counted by reason, never dropped in silence.
- A git-lfs pointer is refused: it stands for text that was never fetched.
- Bytes are kept as they are: no newline, byte-order or Unicode rewriting.
"""

import json
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from leadline.core.errors import DataError, UsageError

STDLIB_SUFFIXES = (".py",)
STDLIB_EXCLUDED_FOLDERS = frozenset(
    # Tests are left out because distributions ship different subsets of them.
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
_ALWAYS_EXCLUDED_FOLDERS = frozenset({".git", "__pycache__"})

_LFS_MAX_BYTES = 1024  # git-lfs specification: a pointer file is smaller than this
_LFS_FIRST_LINE = b"version https://git-lfs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text: where it came from, and its exact UTF-8 bytes."""

    path: str
    utf8: bytes

    @property
    def text(self) -> str:
        """The document as a string."""
        return self.utf8.decode("utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSource:
    """Which documents to read; two equal sources over equal files give equal documents."""

    root: Path
    """A folder of text, or one .jsonl file with a `text` key on every line."""
    suffixes: tuple[str, ...] | None = None
    """File name endings to keep; None keeps every file."""
    excluded_folders: frozenset[str] = frozenset()
    """Folder names to stay out of, besides .git and __pycache__."""
    max_bytes: int | None = None
    """Leave out every document that would pass this many bytes in all; None reads all."""


def stdlib_root() -> Path:
    """Folder of the running interpreter's own standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_source(max_bytes: int | None = None) -> CorpusSource:
    """The embedded default corpus: the standard library's own source, without its tests."""
    return CorpusSource(
        root=stdlib_root(),
        suffixes=STDLIB_SUFFIXES,
        excluded_folders=STDLIB_EXCLUDED_FOLDERS,
        max_bytes=max_bytes,
    )


def is_lfs_pointer(head: bytes, size_bytes: int) -> bool:
    """Whether a file of *size_bytes* that begins with *head* is a git-lfs pointer."""
    return size_bytes < _LFS_MAX_BYTES and head.startswith(_LFS_FIRST_LINE)


def read_documents(
    source: CorpusSource, *, skipped: Counter[str] | None = None
) -> Iterator[Document]:
    """Yield the documents of *source* in path order; reasons for the rest go into *skipped*.

    Raises:
        UsageError: the root does not exist.
        DataError: nothing to read, a git-lfs pointer, a malformed line or an unreadable file.
    """
    counts = Counter[str]() if skipped is None else skipped
    if not source.root.exists():
        raise UsageError(f"no text at {source.root}: give a folder of text or a .jsonl file")
    entries = _lines(source.root) if source.root.is_file() else _files(source, counts)
    found, used_bytes = 0, 0
    for entry in entries:
        if source.max_bytes is not None and used_bytes + entry.size_bytes > source.max_bytes:
            counts["over_max_bytes"] += 1
            continue
        data = entry.read()
        reason = _unusable(data)
        if reason is not None:
            counts[reason] += 1
            continue
        found, used_bytes = found + 1, used_bytes + len(data)
        yield Document(path=entry.path, utf8=data)
    if not found:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
        raise DataError(
            f"no usable text in {source.root} (skipped: {reasons or 'nothing, it is empty'}); "
            "give a folder that holds UTF-8 text"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A document that has not been read: what does not fit is never read."""

    path: str
    size_bytes: int
    read: Callable[[], bytes]


def _unusable(data: bytes) -> str | None:
    """Reason to skip a document, or None when it is text."""
    if not data.strip():
        return "empty"
    if b"\0" in data:
        return "binary"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return "undecodable"
    return None


def _files(source: CorpusSource, counts: Counter[str]) -> Iterator[_Entry]:
    for name in sorted(_regular_files(source, counts), key=os.fsencode):
        path = source.root / name
        with _explained_read(path):
            size_bytes = path.stat().st_size
        yield _Entry(
            path=os.fsencode(name).decode("utf-8", "backslashreplace"),
            size_bytes=size_bytes,
            read=partial(_file_bytes, path),
        )


def _file_bytes(path: Path) -> bytes:
    with _explained_read(path):
        data = path.read_bytes()
    if is_lfs_pointer(data[:64], len(data)):
        raise DataError(
            f"{path} is a git-lfs pointer of {len(data)} bytes, not text; "
            "fetch the real file with `git lfs pull`"
        )
    return data


@contextmanager
def _explained_read(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}; make it readable or move it out of the corpus"
        ) from error


def _regular_files(source: CorpusSource, counts: Counter[str]) -> Iterator[str]:
    excluded = source.excluded_folders | _ALWAYS_EXCLUDED_FOLDERS
    folders = [""]
    while folders:
        prefix = folders.pop()
        with _explained_read(source.root / prefix):
            entries = list(os.scandir(source.root / prefix))
        for entry in entries:
            path = f"{prefix}{entry.name}"
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                counts["symlink"] += 1
            elif stat.S_ISDIR(mode):
                if entry.name in excluded:
                    counts["excluded_folder"] += 1
                else:
                    folders.append(f"{path}/")
            elif not stat.S_ISREG(mode):
                counts["special_file"] += 1
            elif source.suffixes is not None and not entry.name.endswith(source.suffixes):
                counts["other_suffix"] += 1
            else:
                yield path


def _lines(path: Path) -> Iterator[_Entry]:
    if path.suffix != ".jsonl":
        raise UsageError(f"{path} is a file; give a folder of text or a file that ends in .jsonl")
    with _explained_read(path), path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1 and is_lfs_pointer(line, path.stat().st_size):
                raise DataError(f"{path} is a git-lfs pointer, not text; run `git lfs pull`")
            if line.strip():
                data = _line_text(line, f"{path}:{number}")
                yield _Entry(
                    path=f"{path.name}:{number}", size_bytes=len(data), read=partial(bytes, data)
                )


def _line_text(line: bytes, where: str) -> bytes:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}); write one JSON object a line") from error
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where} has no string under `text`; every line needs one")
    # A lone surrogate, legal in JSON and not in UTF-8, comes out undecodable and is counted.
    return text.encode("utf-8", "surrogatepass")
