"""`grams.json`: what a tap holds, rewritten whole each time a layer is sealed.

- Canonical JSON of integers and strings; its own digest is inside, so that an edit shows.
- A layer counts as sealed only when it is listed here with the size the file has, and
  when all waves of the corpus are in it.
- The file is written first in a new folder and is the only way to tell a tap from a folder.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from leadline._version import __version__
from leadline.core.atomic import explained_os_errors, write_bytes
from leadline.core.canonical import canonical_bytes, parse_canonical, sha256_json
from leadline.core.errors import DataError, IntegrityError
from leadline.core.notes import Note, parse_note
from leadline.tap.key import TapKey, parse_key

MANIFEST_FILE = "grams.json"
TAP_FORMAT = "leadline-grams"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsSummary:
    """Row counts of one Gram, or over the experts of one, as integers."""

    total: int
    min: int
    median: int
    """The lower of two middle values."""
    max: int
    without_rows: int
    """Experts that no row reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerEntry:
    """One layer file as it was sealed."""

    layer: int
    file: str
    num_bytes: int
    sha256: str
    waves: int
    """Waves of the corpus summed in it."""
    rows: Mapping[str, RowsSummary]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNote:
    """A note, and the layer it is about; None: the corpus or the whole tap."""

    layer: int | None
    note: Note


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of grams.json."""

    key: TapKey
    parts: tuple[TapKey, ...] = ()
    """Keys of the taps that were merged into this one; empty: it was recorded."""
    planned_layers: tuple[int, ...]
    """Layers that have something to tap, in order."""
    layers: tuple[LayerEntry, ...] = ()
    notes: tuple[LayerNote, ...] = ()
    result: Mapping[str, object] = field(default_factory=dict)
    complete: bool = False
    tool: str = __version__

    @property
    def sealed(self) -> frozenset[int]:
        """Layers that hold all waves."""
        waves = self.key.num_waves
        return frozenset(entry.layer for entry in self.layers if entry.waves == waves)

    @property
    def files(self) -> frozenset[str]:
        """Names of the layer files."""
        return frozenset(entry.file for entry in self.layers)

    @property
    def missing_layers(self) -> tuple[int, ...]:
        """Planned layers that are not sealed."""
        return tuple(layer for layer in self.planned_layers if layer not in self.sealed)

    @property
    def sources(self) -> tuple[TapKey, ...]:
        """The keys of what was recorded: the parts of a merge, or the tap itself."""
        return self.parts or (self.key,)

    def entry(self, layer: int) -> LayerEntry | None:
        """The entry of *layer*, whatever waves it holds."""
        return next((entry for entry in self.layers if entry.layer == layer), None)

    def to_bytes(self) -> bytes:
        """The bytes of grams.json."""
        document = _document(self)
        return canonical_bytes({**document, "digest": sha256_json(document)}) + b"\n"


def with_notes(manifest: Manifest, notes: Iterable[LayerNote]) -> Manifest:
    """*manifest* with *notes* behind its own; one that is there is not repeated."""
    return replace(manifest, notes=tuple(dict.fromkeys((*manifest.notes, *notes))))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace grams.json, atomically and durably.

    Raises:
        DiskSpaceError: the disk is full; the old file stays.
    """
    write_bytes(folder / MANIFEST_FILE, manifest.to_bytes())


def read_manifest(folder: Path) -> Manifest:
    """Read grams.json and hold it against its own digest; no layer file is looked at.

    Raises:
        DataError: there is no tap, or its version is unknown.
        IntegrityError: the file was cut or edited.
    """
    path = folder / MANIFEST_FILE
    with explained_os_errors(path, "read"):
        if not path.exists():
            raise DataError(f"{folder} holds no {MANIFEST_FILE}, so it is no tap; check the path")
        data = path.read_bytes()
    try:
        document = parse_canonical(data.removesuffix(b"\n"))
    except IntegrityError as error:
        raise IntegrityError(
            f"{path} {error}; restore it, or tap again into another folder"
        ) from error
    if not isinstance(document, dict):
        raise IntegrityError(f"{path} holds no JSON object; restore it, or tap again elsewhere")
    _refuse_other_format(path, document)
    digest = document.pop("digest", None)
    if digest != sha256_json(document) or not data.endswith(b"\n"):
        raise IntegrityError(
            f"{path} was edited or cut: its digest differs; restore it, or tap again elsewhere"
        )
    try:
        return _parse(document)
    except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(
            f"{path} is damaged ({type(error).__name__}: {error}); restore it, or tap again "
            "into another folder"
        ) from error


def _refuse_other_format(path: Path, document: Mapping[str, Any]) -> None:
    if document.get("format") != TAP_FORMAT:
        raise DataError(
            f"{path} has the format {document.get('format')!r}, wanted {TAP_FORMAT!r}; "
            "it is no tap of this program"
        )
    if document.get("version") != VERSION:
        raise DataError(
            f"{path} has version {document.get('version')!r}, this program reads {VERSION}; "
            "use the version of leadline that wrote it"
        )


def _document(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": TAP_FORMAT,
        "version": VERSION,
        "leadline": manifest.tool,
        "complete": manifest.complete,
        "key": manifest.key.document,
        "parts": [part.document for part in manifest.parts],
        "planned_layers": list(manifest.planned_layers),
        "layers": [_entry_document(entry) for entry in manifest.layers],
        "notes": [{"layer": item.layer, **item.note.document} for item in manifest.notes],
        "result": dict(manifest.result),
    }


def _entry_document(entry: LayerEntry) -> dict[str, Any]:
    return {
        "layer": entry.layer,
        "file": entry.file,
        "bytes": entry.num_bytes,
        "sha256": entry.sha256,
        "waves": entry.waves,
        "rows": {name: _summary_document(summary) for name, summary in entry.rows.items()},
    }


def _summary_document(summary: RowsSummary) -> dict[str, int]:
    return {name: getattr(summary, name) for name in RowsSummary.__slots__}


def _parse(document: Mapping[str, Any]) -> Manifest:
    return Manifest(
        key=parse_key(document["key"]),
        parts=tuple(parse_key(part) for part in document["parts"]),
        planned_layers=tuple(_count(layer) for layer in document["planned_layers"]),
        layers=tuple(_parse_entry(entry) for entry in document["layers"]),
        notes=tuple(
            LayerNote(layer=item["layer"], note=parse_note(item)) for item in document["notes"]
        ),
        result=document["result"],
        complete=document["complete"] is True,
        tool=document["leadline"],
    )


def _parse_entry(document: Mapping[str, Any]) -> LayerEntry:
    if "/" in document["file"] or document["file"].startswith("."):
        raise ValueError(f"file {document['file']!r} is no name inside the folder")
    return LayerEntry(
        layer=_count(document["layer"]),
        file=document["file"],
        num_bytes=_count(document["bytes"]),
        sha256=document["sha256"],
        waves=_count(document["waves"]),
        rows={
            name: RowsSummary(**{key: _count(value) for key, value in summary.items()})
            for name, summary in document["rows"].items()
        },
    )


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
