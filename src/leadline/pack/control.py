"""The negative control: a checker that has never failed is not known to check.

One file is copied to a place that is thrown away, one byte of the copy is flipped, and
the copy goes through the same checker as every file of the pack. The untouched copy must
pass and the flipped one must fail. One small file is enough, so the control costs the
same for a pack of a megabyte and one of a hundred gigabytes.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import IntegrityError
from leadline.core.manifest import FileEntry, Manifest, Readable, check_stream

Checker = Callable[[Readable, FileEntry], str | None]

_CHUNK_BYTES = 1 << 20
_CHEAP_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlResult:
    """What the checker said to a copy with one byte flipped."""

    file: str
    offset: int
    found: bool
    said: str


def control_problem(
    manifest: Manifest, open_content: Callable[[FileEntry], AbstractContextManager[Readable]]
) -> tuple[ControlResult | None, list[str]]:
    """Run the control on a file of *manifest*: its result, or why there can be none.

    Which file and which byte follow from the manifest's hash, so a run can be repeated.

    Raises:
        IntegrityError: the checker is blind.
    """
    entry = choose_entry(manifest.files, manifest.sha256)
    if entry is None:
        return None, ["there is no byte in any file, so the negative control cannot be run"]
    with open_content(entry) as content:
        return negative_control(entry, content, seed=manifest.sha256), []


def choose_entry(entries: Sequence[FileEntry], seed: str) -> FileEntry | None:
    """A file to copy: any of at most 64 MiB, else the smallest; None when all are empty."""
    filled = [entry for entry in entries if entry.bytes > 0]
    if not filled:
        return None
    cheap = [entry for entry in filled if entry.bytes <= _CHEAP_BYTES]
    if not cheap:
        return min(filled, key=lambda entry: entry.bytes)
    return random.Random(seed).choice(cheap)


def negative_control(
    entry: FileEntry,
    content: Readable,
    *,
    seed: str,
    offset: int | None = None,
    checker: Checker = check_stream,
) -> ControlResult:
    """Flip one byte of a copy of *content* and demand that *checker* sees it.

    The offset is drawn from *seed* where none is given.

    Raises:
        IntegrityError: the checker passed the flipped copy, or failed the untouched one.
        DiskSpaceError: the temporary folder cannot hold the copy.
    """
    if offset is None:
        offset = random.Random(f"offset {seed}").randrange(entry.bytes)
    with explained_os_errors(Path(tempfile.gettempdir())), tempfile.TemporaryFile() as copy:
        while chunk := content.read(_CHUNK_BYTES):
            copy.write(chunk)
        copy.seek(0)
        if said := checker(copy, entry):
            raise IntegrityError(f"the untouched copy of {entry.path} fails the check: {said}")
        copy.seek(offset)
        (byte,) = copy.read(1)
        copy.seek(offset)
        copy.write(bytes([byte ^ 0xFF]))
        copy.seek(0)
        said = checker(copy, entry)
    if said is None:
        raise IntegrityError(
            f"the checker is blind: byte {offset} of a copy of {entry.path} was flipped and it "
            "found nothing; do not trust this machine's verdict on any pack"
        )
    return ControlResult(file=entry.path, offset=offset, found=True, said=said)
