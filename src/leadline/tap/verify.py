"""Whether a tap on the disk is the tap that was sealed, and whether its numbers can be true.

Every byte is read once: hashed, and every Gram looked at on the way. All problems are
returned, none repaired; an empty list means that the tap can be trusted.

- Sizes and hashes are those of grams.json; no layer is missing, none is there unlisted.
- Grams are finite, diagonals are not negative, a Gram without rows is exactly zero.
  Symmetry needs no check: only the upper triangle is stored.
- Rows = tokens x rows per token, and the counts are those that grams.json shows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leadline.core.atomic import explained_os_errors
from leadline.core.canonical import sha256_file
from leadline.core.errors import LeadlineError
from leadline.tap.facts import GramFacts
from leadline.tap.folder import is_layer_file, names_in
from leadline.tap.layer_file import CHUNK_NUMBERS, LayerFile
from leadline.tap.manifest import LayerEntry, Manifest, read_manifest
from leadline.tap.reader import open_sealed
from leadline.tap.rows import check_gram, check_rows, place, summarize
from leadline.tap.triangle import packed_length

OnVerified = Callable[[int, int], None]
"""Called with bytes checked and bytes in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TapReport:
    """What was checked, and what was found wrong."""

    path: str
    problems: tuple[str, ...]
    complete: bool
    layers: int
    grams: int
    tokens: int
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.problems

    @property
    def document(self) -> dict[str, object]:
        """The report as JSON."""
        return {
            "ok": self.ok,
            "problems": list(self.problems),
            "complete": self.complete,
            "layers": self.layers,
            "grams": self.grams,
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "tap_dir": self.path,
        }


def verify_tap(
    path: Path, *, allow_partial: bool = False, on_progress: OnVerified | None = None
) -> TapReport:
    """Check the tap at *path*; with *allow_partial* a missing layer is no problem.

    Raises:
        LeadlineError: grams.json cannot be read at all.
    """
    path = Path(path)
    manifest = read_manifest(path)
    problems = [*_check_list(path, manifest, allow_partial=allow_partial)]
    total_bytes = sum(entry.num_bytes for entry in manifest.layers)
    grams = done_bytes = 0
    for entry in manifest.layers:
        if entry.layer in manifest.sealed:
            try:
                file = open_sealed(path, manifest, entry.layer)
                grams += sum(max(1, facts.end_expert) for facts in file.facts.values())
                problems += _check_layer(file, entry, manifest)
            except LeadlineError as error:
                problems.append(str(error))
        done_bytes += entry.num_bytes
        if on_progress is not None:
            on_progress(done_bytes, total_bytes)
    return TapReport(
        path=str(path),
        problems=tuple(problems),
        complete=manifest.complete,
        layers=len(manifest.sealed),
        grams=grams,
        tokens=manifest.key.tokens,
        num_bytes=total_bytes,
    )


def _check_list(path: Path, manifest: Manifest, *, allow_partial: bool) -> Iterator[str]:
    missing = manifest.missing_layers
    if missing and not allow_partial:
        yield (
            f"layer {missing[0]} is not sealed ({len(missing)} of {len(manifest.planned_layers)} "
            "are missing); run the tap again to seal them"
        )
    elif not manifest.complete and not allow_partial:
        yield "the tap was broken off before its end; run it again to complete it"
    listed = [entry.layer for entry in manifest.layers]
    if len(set(listed)) != len(listed) or not set(listed) <= set(manifest.planned_layers):
        yield f"grams.json lists the layers {listed}, planned {list(manifest.planned_layers)}"
    if manifest.complete:
        for name in names_in(path):
            if is_layer_file(name) and name not in manifest.files:
                yield f"{name} lies in the folder and is not listed in grams.json"


def _check_layer(file: LayerFile, entry: LayerEntry, manifest: Manifest) -> Iterator[str]:
    with explained_os_errors(file.path, "read"):
        found = sha256_file(file.path)
    if found != entry.sha256:
        yield f"{entry.file} is not the file that was sealed: its sha256 differs"
        return
    if set(entry.rows) != set(file.facts):
        yield f"{entry.file} has the Grams {sorted(file.facts)}, listed {sorted(entry.rows)}"
        return
    for name, facts in file.facts.items():
        rows = file.rows(name)
        if summarize(rows) != entry.rows[name]:
            yield f"{place(file.layer, facts)} has other row counts than grams.json shows"
        try:
            check_rows(file.layer, facts, rows, manifest.key.tokens)
        except LeadlineError as error:
            yield str(error)
        yield from _check_numbers(file, facts, rows.reshape(-1))


def _check_numbers(file: LayerFile, facts: GramFacts, rows: NDArray[np.int64]) -> Iterator[str]:
    length = packed_length(facts.num_features)
    at_once = max(1, CHUNK_NUMBERS // max(1, length))
    for first in range(0, rows.size, at_once):
        some = rows[first : first + at_once]
        packed = file.numbers(facts.name, first * length, some.size * length)
        packed = packed.reshape(some.size, length)
        try:
            check_gram(file.layer, facts, packed, first=first)
        except LeadlineError as error:
            yield str(error)
            continue
        for index in np.flatnonzero(~np.isfinite(packed).all(axis=1)):
            yield f"{place(file.layer, facts, first + int(index))} holds NaN or Inf"
        for index in np.flatnonzero((some == 0) & packed.any(axis=1)):
            yield (
                f"{place(file.layer, facts, first + int(index))} is not zero although no row "
                "reached it"
            )
