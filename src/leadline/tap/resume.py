"""What a writer finds in a folder, and goes on with: nothing, or the tap it was.

Leftovers of a killed writer are removed; a layer whose file is gone or cut is taken from
the list and made anew. A tap of another key is refused with the field that differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import UsageError
from leadline.core.notes import Note
from leadline.pack.space import disk_free_bytes, require_space
from leadline.tap.folder import names_in, remove_leftovers
from leadline.tap.key import first_difference
from leadline.tap.manifest import (
    MANIFEST_FILE,
    LayerEntry,
    LayerNote,
    Manifest,
    read_manifest,
    with_notes,
    write_manifest,
)


def begin(
    path: Path, fresh: Manifest, layer_bytes: Mapping[int, int], notes: Sequence[Note]
) -> Manifest:
    """The manifest to go on with, on the disk, and the folder free of leftovers.

    Raises:
        UsageError: the folder holds the tap of another key.
        IntegrityError, DataError: its grams.json is damaged or of another version.
        DiskSpaceError: what is not sealed yet does not fit; only leftovers were removed.
    """
    old = read_manifest(path) if MANIFEST_FILE in names_in(path) else None
    if old is not None:
        _refuse_other_key(path, old, fresh)
    manifest = fresh if old is None else _without_lost_layers(path, old)
    manifest = with_notes(manifest, [LayerNote(layer=None, note=note) for note in notes])
    remove_leftovers(path, (old or fresh).files)
    needed = bytes_to_come(manifest, layer_bytes)
    require_space(path, needed, disk_free_bytes(path), "the rest of the tap")
    if manifest != old:
        write_manifest(path, manifest)
    remove_leftovers(path, manifest.files)
    return manifest


def _without_lost_layers(path: Path, manifest: Manifest) -> Manifest:
    """Without the layers whose file is gone or has another size than it was sealed with."""
    lost = {entry.layer for entry in manifest.layers if not _is_whole(path, entry)}
    if not lost:
        return manifest
    return replace(
        manifest,
        layers=tuple(entry for entry in manifest.layers if entry.layer not in lost),
        notes=tuple(item for item in manifest.notes if item.layer not in lost),
        complete=False,
        result={},
    )


def _refuse_other_key(path: Path, old: Manifest, fresh: Manifest) -> None:
    differs = first_difference(old.key, fresh.key, besides=frozenset())
    if differs is not None:
        raise UsageError(
            f"{path} holds a tap with {differs.field} = {differs.left!r}, this one has "
            f"{differs.right!r}; go on with the same, or choose another --out"
        )
    if old.planned_layers != fresh.planned_layers or old.parts != fresh.parts:
        raise UsageError(
            f"{path} holds a tap of the layers {list(old.planned_layers)}, this one has "
            f"{list(fresh.planned_layers)}; go on with the same, or choose another --out"
        )


def _is_whole(folder: Path, entry: LayerEntry) -> bool:
    path = folder / entry.file
    with explained_os_errors(path, "read"):
        return path.is_file() and path.stat().st_size == entry.num_bytes


def bytes_to_come(manifest: Manifest, layer_bytes: Mapping[int, int]) -> int:
    """Upper bound of what the layers that are not sealed yet will take on the disk."""
    present = {entry.layer for entry in manifest.layers}
    rest = [size for layer, size in layer_bytes.items() if layer not in present]
    # While a wave is added, the sums before and after it lie side by side.
    beside = max(layer_bytes.values(), default=0) if manifest.key.num_waves > 1 else 0
    return sum(rest) + (beside if manifest.missing_layers else 0)
