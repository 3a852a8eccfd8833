"""Secrets scan of a tree, run before anything is packed.

- Every file's name is judged; the content of text files is read in bounded blocks, so a
  large corpus costs time and no memory. Known binary suffixes and files with a NUL in
  their first 8 KiB are not read. Archives are not opened.
- A finding says where and what kind. The secret itself is never kept or printed.
- `.leadlineallow` in the tree's root lists what a person has looked at: lines of
  `PATH KIND`, where PATH may hold `*`. What it lets through is reported, as is a line
  that lets nothing through.
"""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import UsageError
from leadline.core.manifest import OnBytes
from leadline.core.tree import survey
from leadline.pack.rules import find_secrets, secret_file_kind

ALLOW_FILE = ".leadlineallow"

_BLOCK_BYTES = 1 << 20
_OVERLAP_BYTES = 8192  # longer than any rule's match, so that none is cut by a block's edge
_LIMIT_BYTES = 64 << 20
_HEAD_BYTES = 8192
_BINARY_SUFFIXES = frozenset(
    (".bin", ".idx", ".npy", ".npz", ".safetensors", ".pt", ".pth", ".parquet", ".arrow", ".gz",
     ".zip", ".zst", ".xz", ".bz2", ".tar", ".png", ".jpg", ".jpeg", ".gif", ".pdf", ".so", ".pyc")
)  # fmt: skip
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Finding:
    """Where a secret stands; never the secret itself."""

    path: str
    line: int
    """From 1; 0 when the file's name alone gives it away."""
    kind: str

    def __str__(self) -> str:
        """`path:line kind`, as compilers write it."""
        return f"{self.path}:{self.line} {self.kind}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretsScan:
    """What a scan found and what it did not look at."""

    findings: tuple[Finding, ...]
    allowed: tuple[Finding, ...]
    """Found, and let through by the allow-list."""
    unused_allowances: tuple[str, ...]
    """Lines of the allow-list that let nothing through."""
    cut_short: tuple[str, ...]
    """Text files of which only the first 64 MiB were read."""


def scan_secrets(root: Path) -> list[Finding]:
    """Secrets in the tree that no allow-list lets through; see `scan_tree` for the rest.

    Raises:
        UsageError: no folder at *root*, or an allow-list that cannot be read.
    """
    return list(scan_tree(root).findings)


def scan_tree(root: Path, on_bytes: OnBytes | None = None) -> SecretsScan:
    """Scan every file under *root*.

    Raises:
        UsageError: no folder at *root*, or an allow-list that cannot be read.
    """
    allowances = _read_allowances(root)
    found: set[Finding] = set()
    cut_short: list[str] = []
    for file in survey(root).files:
        if kind := secret_file_kind(file.path):
            found.add(Finding(path=file.path, line=0, kind=kind))
        with explained_os_errors(root / file.path, "read"):
            found.update(_scan_file(root, file.path, on_bytes))
        if file.bytes > _LIMIT_BYTES and _is_text_name(file.path):
            cut_short.append(file.path)
    allowed = {item for item in found if any(_allows(rule, item) for rule in allowances)}
    unused = [rule for rule in allowances if not any(_allows(rule, item) for item in found)]
    return SecretsScan(
        findings=tuple(sorted(found - allowed)),
        allowed=tuple(sorted(allowed)),
        unused_allowances=tuple(" ".join(rule) for rule in unused),
        cut_short=tuple(cut_short),
    )


def _is_text_name(path: str) -> bool:
    return Path(path).suffix.lower() not in _BINARY_SUFFIXES


def _scan_file(root: Path, path: str, on_bytes: OnBytes | None) -> Iterator[Finding]:
    if not _is_text_name(path):
        return
    line = 1
    with (root / path).open("rb") as stream:
        for window, fresh in _windows(stream, on_bytes):
            for offset, kind in find_secrets(window, path):
                number = line + window.count(b"\n", 0, offset)
                yield Finding(path=path, line=number, kind=kind)
            line += window.count(b"\n", 0, fresh)


def _windows(stream: BinaryIO, on_bytes: OnBytes | None) -> Iterator[tuple[bytes, int]]:
    """Overlapping windows of a text file, each with the offset where the next one starts.

    A binary file yields nothing.
    """
    head = stream.read(_HEAD_BYTES)
    wide = head.startswith(_UTF16)
    if b"\0" in head and not wide:
        return
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace") if wide else None
    window, block, read_bytes = b"", head, 0
    while block:
        read_bytes += len(block)
        if on_bytes is not None:
            on_bytes(len(block))
        window += decoder.decode(block).encode("utf-8", "replace") if decoder else block
        block = stream.read(_BLOCK_BYTES) if read_bytes < _LIMIT_BYTES else b""
        keep_from = max(0, len(window) - _OVERLAP_BYTES) if block else len(window)
        yield window, keep_from
        window = window[keep_from:]


def _read_allowances(root: Path) -> list[tuple[str, str]]:
    path = root / ALLOW_FILE
    if not path.is_file() or path.is_symlink():
        return []
    allowances = []
    with explained_os_errors(path, "read"):
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, _, kind = line.strip().rpartition(" ")
        if not pattern:
            raise UsageError(
                f"{path} line {number} is {line.strip()!r}; write `PATH KIND`, "
                "as the scan's own message shows them"
            )
        allowances.append((pattern.strip(), kind))
    return allowances


def _allows(rule: tuple[str, str], finding: Finding) -> bool:
    pattern, kind = rule
    return kind == finding.kind and fnmatchcase(finding.path, pattern)
