"""A wave: as much of the corpus as memory holds, across all layers, each read once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadline.core.errors import NonFiniteStateError
from leadline.core.notes import Note
from leadline.rig.experts import ExpertRows
from leadline.rig.layer_pass import Chunk, LayerPass
from leadline.rig.layer_weights import StreamedWeights, UnitBook
from leadline.rig.layout import ModelLayout
from leadline.rig.residuals import ResidualStore
from leadline.rig.skeleton import Skeleton
from leadline.rig.units import Unit
from leadline.rig.weights import StreamCounters, StreamShape
from leadline.tap.gram_tap import GramTap, LayerGrams
from leadline.tap.residual_checkpoint import SavedResiduals, read_residuals

OUTSIDE = -1
"""In place of a layer: embeddings and what else stands outside the layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadWeight:
    """A tensor that holds NaN or Inf."""

    layer: int
    name: str
    experts: tuple[int, ...]
    """Experts whose share is bad; empty: the tensor has none."""


@dataclass(kw_only=True, slots=True)
class WeightScan:
    """Finds NaN and Inf while weights stream by."""

    found: dict[int, list[BadWeight]] = field(default_factory=dict)

    def look(self, unit: Unit, tensors: Mapping[str, Tensor]) -> None:
        """One sum over each tensor, per expert where the unit holds a group or a fused tensor.

        A sum in fp32 is finite exactly when all its terms are (bf16 and fp32 weights are
        far below the point where adding them overflows).
        """
        sums = {
            name: tensor.flatten(1).sum(1, dtype=torch.float32)
            if tensor.dim() == 3
            else tensor.sum(dtype=torch.float32).view(1)
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
        if not sums:
            return
        # One transfer a unit instead of one a tensor.
        good = torch.cat(list(sums.values())).isfinite().cpu()
        if good.all():
            return
        start = unit.experts.start if unit.experts is not None else 0
        position = 0
        for name, each in sums.items():
            bad = (~good[position : position + each.numel()]).nonzero().flatten().tolist()
            position += each.numel()
            if bad:
                experts = tuple(start + e for e in bad) if tensors[name].dim() == 3 else ()
                found = BadWeight(layer=unit.layer, name=name, experts=experts)
                self.found.setdefault(unit.layer, []).append(found)


class TapListener:
    """Couples a pass to a tap, and watches the residual stream for NaN and Inf."""

    def __init__(
        self,
        tap: GramTap,
        *,
        first_layer: int,
        wants_linears: bool,
        layer_done: Callable[[int, bool, Iterator[Tensor]], None],
        chunk_done: Callable[[int, int], None],
        before_collect: Callable[[], None] | None = None,
    ) -> None:
        """*first_layer*: layers before it run but are not tapped.

        *layer_done* is told the layer, whether its residual stream is finite, and the
        stream itself. *before_collect* returns when the last layer's Grams are no
        longer needed on the host.
        """
        self._tap = tap
        self._first = first_layer
        self._linears = wants_linears
        self._layer_done = layer_done
        self._chunk_done = chunk_done
        self._before_collect = before_collect
        self._residual_sum: Tensor | None = None

    def experts(self, layer: int, module: str) -> ExpertRows | None:
        """Rows of an experts module go to the tap."""
        return self._tap.rows_of(module) if layer >= self._first else None

    def wants_linears(self) -> bool:
        """Whether linear projections are tapped."""
        return self._linears

    def linear(self, layer: int, module: str, rows: Tensor, source: Tensor) -> None:
        """Rows of a linear projection go to the tap."""
        if layer >= self._first:
            self._tap.linear(module, rows, source)

    def stage_begins(self, layer: int, stage: int) -> None:
        """Open the sums of a stage."""
        if stage == 0:
            self._residual_sum = None
        if layer >= self._first:
            self._tap.begin(layer, stage)

    def chunk_done(self, layer: int, index: int, hidden: Tensor) -> None:
        """Add up the residual stream: the sum is finite when every element is."""
        self._tap.end_chunk()
        total = hidden.sum(dtype=torch.float32)
        self._residual_sum = total if self._residual_sum is None else self._residual_sum + total * 0
        self._chunk_done(layer, index)

    def stage_done(self, layer: int, stage: int) -> None:
        """Bring a stage's Grams to the host."""
        del stage
        if layer >= self._first:
            if self._before_collect is not None:
                self._before_collect()
            self._tap.end_stage()

    def layer_done(self, layer: int, residuals: Iterator[Tensor]) -> None:
        """Hand the layer over."""
        assert self._residual_sum is not None
        self._layer_done(layer, bool(torch.isfinite(self._residual_sum)), residuals)


def refuse_bad_numbers(
    layer: int, scan: WeightScan, grams: LayerGrams | None, *, residual_is_finite: bool
) -> list[Note]:
    """Notes on bad weights that touched nothing; an error where they did.

    Raises:
        NonFiniteStateError: layer, tensor and expert are named.
    """
    notes = []
    tapped = grams is not None and bool(grams.packed)
    # What stands outside the layers is told once, with the first layer that can hold a note.
    outside = scan.found.pop(OUTSIDE, []) if tapped else scan.found.get(OUTSIDE, [])
    for bad in (*outside, *scan.found.get(layer, ())):
        where = f"{bad.name}" + (
            f" of expert {', '.join(map(str, bad.experts[:8]))}" if bad.experts else ""
        )
        if residual_is_finite and bad.layer == OUTSIDE:
            if tapped:
                detail = f"{where} holds NaN or Inf; no token of the corpus shows it"
                notes.append(Note(kind="weight_not_finite", count=1, detail=detail))
            continue
        if residual_is_finite and bad.experts and not _reached(bad, grams):
            detail = f"layer {layer}: {where} holds NaN or Inf; no token reached it"
            notes.append(Note(kind="weight_not_finite", count=len(bad.experts), detail=detail))
            continue
        raise NonFiniteStateError(
            f"layer {layer}: {where} holds NaN or Inf and was used; the tap stops here and layers "
            "before it are sealed: get a sound copy of the checkpoint"
        )
    if not residual_is_finite:
        raise NonFiniteStateError(
            f"layer {layer}: {_first_not_finite(grams)} hold NaN or Inf although its weights are "
            "finite; the tap stops here and layers before it are sealed: try --dtype float32"
        )
    return notes


def _first_not_finite(grams: LayerGrams | None) -> str:
    """The rows of the first Gram that shows NaN or Inf, by module and expert."""
    for name, packed in grams.packed.items() if grams is not None else ():
        bad = (~packed.isfinite().all(dim=-1)).nonzero()
        if len(bad):
            expert = f" of expert {int(bad[0])}" if packed.dim() == 2 else ""
            return f"the rows of {name}{expert}"
    return "the hidden states behind it"


def _reached(bad: BadWeight, grams: LayerGrams | None) -> bool:
    if grams is None:
        return True
    module = bad.name.rpartition(".")[0]
    for name, rows in grams.rows.items():
        if rows.dim() == 1 and module.endswith(name.rpartition(".")[0]):
            return any(int(rows[expert]) for expert in bad.experts)
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class WaveParts:
    """What a wave needs; made once for all waves of a tap."""

    skeleton: Skeleton
    layout: ModelLayout
    book: UnitBook
    shards: Mapping[str, Path]
    ring: Tensor
    pools: Mapping[str, Sequence[Tensor]]
    shape: StreamShape
    device: torch.device
    counters: StreamCounters
    scan: WeightScan


def run_wave(
    parts: WaveParts,
    chunks: Sequence[Chunk],
    parking: Sequence[Tensor | None],
    listener: TapListener,
    *,
    saved: SavedResiduals | None,
) -> None:
    """Take *chunks* across all layers; with *saved*, from behind its layer on."""
    start = 0 if saved is None else saved.layer + 1
    residuals = ResidualStore(parking, device=parts.device, dtype=parts.skeleton.dtype)
    if saved is not None:
        residuals.restore(read_residuals(saved, parts.skeleton.dtype))
    weights = StreamedWeights(
        parts.book,
        parts.skeleton,
        first_layer=start,
        with_entry=start == 0,
        shards=parts.shards,
        ring=parts.ring,
        pools=parts.pools,
        shape=parts.shape,
        device=parts.device,
        counters=parts.counters,
        inspect=parts.scan.look,
    )
    try:
        run = LayerPass(parts.skeleton, weights, device=parts.device, listener=listener)
        run.run(chunks, residuals, start=start)
    finally:
        weights.close()


def wave_chunks(documents: Sequence[Any], batches: Sequence[Any]) -> list[Chunk]:
    """Right-padded chunks of the documents of each micro-batch."""
    return [_chunk(documents, batch) for batch in batches]


def _chunk(documents: Sequence[Any], batch: Any) -> Chunk:
    lengths = [len(documents[number]) for number in batch.documents]
    width = max(lengths)
    tokens = torch.zeros(len(lengths), width, dtype=torch.int64)
    for place, number in enumerate(batch.documents):
        tokens[place, : lengths[place]] = torch.as_tensor(documents[number], dtype=torch.int64)
    rows = None
    if any(length != width for length in lengths):
        rows = torch.cat(
            [torch.arange(place * width, place * width + n) for place, n in enumerate(lengths)]
        )
    return Chunk(tokens=tokens, rows=rows, label=", ".join(map(str, batch.documents[:4])))
