"""The writing end of a tap: layers are sealed one at a time and survive a kill.

Order of a seal: the layer's file under a temporary name, fsync, rename, fsync of the
folder; then grams.json in the same way. A layer counts only once grams.json lists it
with the size it has, so a kill between any two steps leaves it sealed or not there.

A corpus that crosses the layers in several waves seals a layer once a wave: the sums so
far are read, added to, and written under another name before grams.json turns to it.

- One store, one folder: a second writer is refused and the first one named.
- A tap goes on only where its key equals that of the folder.
- Space for the whole plan is asked for before anything is written.
- Calls come from one thread at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import DiskSpaceError, LeadlineError, UsageError
from leadline.core.notes import Note
from leadline.pack.space import disk_free_bytes, require_space
from leadline.tap.facts import ROWS_PREFIX, GramFacts, GramUser
from leadline.tap.folder import (
    FolderLock,
    layer_file_name,
    refuse_foreign,
)
from leadline.tap.key import TapKey
from leadline.tap.layer_file import Block, LayerFile, array_block, open_layer_file, write_layer_file
from leadline.tap.manifest import LayerEntry, LayerNote, Manifest, with_notes, write_manifest
from leadline.tap.resume import begin, bytes_to_come
from leadline.tap.rows import check_gram, check_rows, starved_experts, summarize
from leadline.tap.triangle import packed_length

_HEADER_ALLOWANCE_BYTES = 256 << 10  # a layer's header and its share of grams.json


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedGram:
    """One Gram to be stored, or one for each expert, as raw sums."""

    packed: NDArray[np.float32]
    """Row-major upper triangle [K (K + 1) / 2], or [experts, K (K + 1) / 2]."""
    num_features: int
    users: tuple[GramUser, ...]
    """Every weight that is multiplied by exactly these rows."""
    rows_per_token: int | None
    """1, or top-k over all experts; None where the number varies."""
    num_experts: int | None = None
    """Experts of the module, for a 2-D Gram; None: as many as given."""
    first_expert: int = 0
    """The first expert in `packed`, where a rig taps only some."""

    def facts(self, name: str) -> GramFacts:
        """What the layer file says about it."""
        experts = self.packed.shape[0] if self.packed.ndim == 2 else 0
        total = None if self.packed.ndim == 1 else self.num_experts or experts
        return GramFacts(
            name=name,
            num_features=self.num_features,
            users=self.users,
            num_experts=total,
            first_expert=self.first_expert,
            end_expert=self.first_expert + experts,
            rows_per_token=self.rows_per_token,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePlan:
    """What a tap is going to seal."""

    layer_bytes: Mapping[int, int]
    """Layers with something to tap, and the bytes of each one's file (`planned_layer_bytes`)."""
    notes: tuple[Note, ...] = ()
    """Notes known before the start, about the corpus or the checkpoint."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers to seal, in order."""
        return tuple(sorted(self.layer_bytes))


def planned_layer_bytes(grams: Mapping[str, tuple[int, int | None]]) -> int:
    """Upper bound of a layer file's bytes, from each Gram's features and experts (or None)."""
    numbers = sum(
        (4 * packed_length(features) + 8) * (1 if experts is None else experts)
        for features, experts in grams.values()
    )
    return numbers + _HEADER_ALLOWANCE_BYTES


class TapStore:
    """A tap's folder, open for writing; close it, or use it in a `with` block."""

    def __init__(self, folder: Path, manifest: Manifest, plan: StorePlan, lock: FolderLock) -> None:
        self._folder = folder
        self._manifest = manifest
        self._plan = plan
        self._lock = lock

    @classmethod
    def open(
        cls, path: Path, key: TapKey, plan: StorePlan, *, parts: tuple[TapKey, ...] = ()
    ) -> "TapStore":
        """Begin a tap in a new or empty folder, or go on with the one of the same key.

        *parts* are the keys of the taps that are being merged.

        Raises:
            LockError: another process writes there; it is named.
            UsageError: the folder is another tap's, or holds files that no tap made.
            IntegrityError, DataError: its grams.json is damaged or of another version.
            DiskSpaceError: the plan does not fit; both numbers are named.
            LeadlineError: the folder cannot be written to.
        """
        path = Path(path)
        refuse_foreign(path)
        if not path.exists():
            needed = sum(plan.layer_bytes.values())
            require_space(path, needed, disk_free_bytes(path), "the tap")
        with explained_os_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(path)
        lock.acquire()
        try:
            refuse_foreign(path)
            fresh = Manifest(key=key, parts=parts, planned_layers=plan.layers)
            manifest = begin(path, fresh, plan.layer_bytes, plan.notes)
        except BaseException:
            lock.release()
            raise
        return cls(path, manifest, plan, lock)

    @property
    def folder(self) -> Path:
        """The folder of the tap."""
        return self._folder

    @property
    def sealed(self) -> frozenset[int]:
        """Layers that are sealed with all waves."""
        return self._manifest.sealed

    @property
    def complete(self) -> bool:
        """Whether `finish` was called and nothing is missing since."""
        return self._manifest.complete

    @property
    def manifest(self) -> Manifest:
        """What grams.json says now."""
        return self._manifest

    @property
    def bytes_to_spare(self) -> int:
        """Free bytes of the disk that no layer to come needs; below 0 where it fills up."""
        to_come = bytes_to_come(self._manifest, self._plan.layer_bytes)
        return disk_free_bytes(self._folder) - to_come

    def waves_sealed(self, layer: int) -> int:
        """Waves of the corpus that are in the file of *layer*."""
        entry = self._manifest.entry(layer)
        return 0 if entry is None else entry.waves

    def seal(
        self,
        layer: int,
        grams: Mapping[str, SealedGram],
        rows: Mapping[str, NDArray[np.int64]],
        notes: Sequence[Note] = (),
        *,
        wave: int | None = None,
    ) -> bool:
        """Store a wave of a layer's Grams, with the rows that are in each.

        *rows* has the names of *grams*: a scalar for a single Gram, else int64 [experts].
        With the last wave, experts that no token reached are noted beside *notes*.
        The arrays are not modified and not kept. *wave*, from 0, says which it is, so that one
        that the layer holds already is left alone (and false returned); without it, it is taken
        for the next.

        Raises:
            NonFiniteStateError: a Gram holds NaN or Inf; layer, Gram and expert are named.
            IntegrityError: rows are not what the corpus must give.
            DiskSpaceError: the disk is full; the layer leaves no trace.
            UsageError: the layer is not in the plan, or an earlier wave is due.
        """
        key = self._manifest.key
        done = self.waves_sealed(layer)
        if not self._is_due(layer, done, wave):
            return False
        waves = done + 1
        facts = {name: gram.facts(name) for name, gram in grams.items()}
        counts = _checked_shapes(layer, grams, rows, facts)
        before = self._sums_so_far(layer, facts)
        if before is not None:
            counts = {name: counts[name] + before.rows(name) for name in counts}
        for name, gram in grams.items():
            check_gram(layer, facts[name], gram.packed)
            if waves == key.num_waves:
                check_rows(layer, facts[name], counts[name], key.tokens)
                notes = [*notes, *starved_experts(layer, facts[name], counts[name])]
        blocks = [array_block(ROWS_PREFIX + name, count) for name, count in counts.items()]
        blocks += [_gram_block(name, gram, before) for name, gram in grams.items()]
        self._write(layer, waves, facts, blocks, counts, notes)
        return True

    def seal_blocks(
        self,
        layer: int,
        facts: Mapping[str, GramFacts],
        blocks: list[Block],
        rows: Mapping[str, NDArray[np.int64]],
        notes: Sequence[Note] = (),
    ) -> None:
        """Store a layer whose Grams are not in memory as a whole; else as `seal`."""
        for name, count in rows.items():
            check_rows(layer, facts[name], count, self._manifest.key.tokens)
        self._write(layer, self._manifest.key.num_waves, facts, blocks, rows, notes)

    def add_notes(self, notes: Sequence[Note]) -> None:
        """Record notes about the corpus or the whole tap; one that is there is not repeated."""
        merged = with_notes(self._manifest, [LayerNote(layer=None, note=note) for note in notes])
        if merged != self._manifest:
            self._replace(merged)

    def finish(self, result: Mapping[str, object]) -> None:
        """Declare the tap complete; floats in *result* become decimal strings.

        Raises:
            UsageError: a planned layer is not sealed; it is named.
        """
        missing = self._manifest.missing_layers
        if missing:
            raise UsageError(
                f"{self._folder} cannot be complete: layer {missing[0]} is not sealed "
                f"({len(missing)} of {len(self._manifest.planned_layers)} are missing); "
                "run the tap again to seal them"
            )
        exact = {name: _exact(value) for name, value in result.items()}
        self._replace(replace(self._manifest, complete=True, result=exact))

    def close(self) -> None:
        """Let the folder go; a second call does nothing."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _is_due(self, layer: int, done: int, wave: int | None) -> bool:
        """Whether *wave* is the next of a layer that holds *done* of them."""
        num_waves = self._manifest.key.num_waves
        due = min(done, num_waves - 1) if wave is None else wave
        if layer in self._plan.layer_bytes and due < done:
            return False
        if layer in self._plan.layer_bytes and due == done < num_waves:
            return True
        raise UsageError(
            f"wave {due} (from 0) of layer {layer} cannot be sealed: the layer holds {done} of "
            f"{num_waves} waves, and the plan has the layers {sorted(self._plan.layer_bytes)}"
        )

    def _sums_so_far(self, layer: int, facts: Mapping[str, GramFacts]) -> LayerFile | None:
        entry = self._manifest.entry(layer)
        if entry is None:
            return None
        before = open_layer_file(self._folder / entry.file, layer)
        if before.facts != facts:
            raise LeadlineError(
                f"layer {layer} has other Grams in wave {entry.waves + 1} than before; every wave "
                "must bring the same: tap again into another folder"
            )
        return before

    def _write(
        self,
        layer: int,
        waves: int,
        facts: Mapping[str, GramFacts],
        blocks: list[Block],
        rows: Mapping[str, NDArray[np.int64]],
        notes: Sequence[Note],
    ) -> None:
        name = layer_file_name(layer, waves, self._manifest.key.num_waves)
        path = self._folder / name
        try:
            written = write_layer_file(path, layer, facts, blocks)
        except DiskSpaceError as error:
            needed = sum(block.num_bytes for block in blocks)
            raise DiskSpaceError(
                f"{error} ({path} needs {needed} bytes, {disk_free_bytes(path)} are free; "
                "the layers sealed before are safe)"
            ) from error
        entry = LayerEntry(
            layer=layer,
            file=name,
            num_bytes=written.num_bytes,
            sha256=written.sha256,
            waves=waves,
            rows={name: summarize(count) for name, count in sorted(rows.items())},
        )
        before = self._manifest.entry(layer)
        others = [other for other in self._manifest.layers if other.layer != layer]
        layers = tuple(sorted((*others, entry), key=lambda other: other.layer))
        listed = [LayerNote(layer=layer, note=note) for note in notes]
        self._replace(with_notes(replace(self._manifest, layers=layers), listed))
        if before is not None:
            (self._folder / before.file).unlink(missing_ok=True)

    def _replace(self, manifest: Manifest) -> None:
        write_manifest(self._folder, manifest)
        self._manifest = manifest


def _checked_shapes(
    layer: int,
    grams: Mapping[str, SealedGram],
    rows: Mapping[str, NDArray[np.int64]],
    facts: Mapping[str, GramFacts],
) -> dict[str, NDArray[np.int64]]:
    """Row counts as int64 arrays, once everything has the shape that its facts give it."""
    if set(grams) != set(rows):
        raise ValueError(f"layer {layer}: grams {sorted(grams)} but rows {sorted(rows)}")
    counts = {}
    for name, gram in grams.items():
        count = np.asarray(rows[name], dtype=np.int64)
        fits = gram.packed.shape == facts[name].shape and count.shape == facts[name].rows_shape
        if not fits or gram.packed.dtype != np.float32 or name.startswith(ROWS_PREFIX):
            raise ValueError(
                f"layer {layer}: gram {name} is {gram.packed.dtype} {gram.packed.shape} with rows "
                f"{count.shape}, wanted float32 {facts[name].shape} with {facts[name].rows_shape}"
            )
        counts[name] = count
    return counts


def _gram_block(name: str, gram: SealedGram, before: LayerFile | None) -> Block:
    if before is None:
        return array_block(name, gram.packed)

    def chunks() -> Iterator[NDArray[Any]]:
        flat, begin = gram.packed.reshape(-1), 0
        for piece in before.chunks(name):
            piece += flat[begin : begin + piece.size]
            begin += piece.size
            yield piece

    return Block(name=name, dtype="F32", shape=gram.packed.shape, chunks=chunks)


def _exact(value: object) -> object:
    """*value* without floats, however deep: two readers must not differ over its digits."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return {name: _exact(item) for name, item in value.items()}
    return [_exact(item) for item in value] if isinstance(value, (list, tuple)) else value
