"""What a layer's turn needs from disk, as byte ranges and the memory they land in.

A *unit* is what is in memory together: a whole layer, a layer without its routed
experts, or a group of experts. Each of its tensors has an offset in one flat buffer,
and each piece of the checkpoint a strided place in one of those tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from leadline.core.errors import UsageError
from leadline.rig.checkpoint import TensorEntry
from leadline.rig.layout import Conversion, ModelLayout

ALIGNMENT = 256
"""Bytes; what CUDA's own allocator gives, so that every kernel is content."""

SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a part of a checkpoint tensor belongs inside a unit's tensor, in elements."""

    source: TensorEntry
    begin: int
    """First byte in the shard file."""
    end: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def is_dense(self) -> bool:
        """Whether the bytes lie in the unit as they lie in the file."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTensor:
    """One parameter or buffer (or its share of the experts) inside a unit."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes from the start of the unit's buffer."""
    places: tuple[Place, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes it takes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Tensors that are in memory together."""

    layer: int
    """Decoder layer; -1 for what stands outside."""
    experts: range | None
    """Group of experts; None: no group."""
    tensors: tuple[UnitTensor, ...]
    conversions: tuple[Conversion, ...]
    num_bytes: int
    """Size of the buffer."""

    @property
    def bytes_to_read(self) -> int:
        """Checkpoint bytes it is made of."""
        placed = sum(p.end - p.begin for tensor in self.tensors for p in tensor.places)
        sources = {s.name: s.num_bytes for c in self.conversions for s in c.sources}
        return placed + sum(sources.values())


def build_unit(
    layout: ModelLayout,
    names: Iterable[str],
    state: Mapping[str, Tensor],
    *,
    layer: int,
    experts: range | None = None,
) -> Unit:
    """Lay out *names* (full names in the model) in one buffer; *state* holds them on meta.

    With *experts*, the first axis of every tensor is cut to that range.

    Raises:
        UsageError: a fused tensor of the family cannot be cut by experts.
    """
    tensors: list[UnitTensor] = []
    conversions: dict[int, Conversion] = {}
    offset = 0
    for name in names:
        known = layout.parameters.get(name)
        if known is None:  # tied: its bytes belong to another name
            continue
        meta = state[name].to("meta")
        if known.conversion is not None:
            if experts is not None:
                raise _cannot_cut(name)
            conversions[id(known.conversion)] = known.conversion
        places = tuple(
            place
            for piece in known.pieces
            for place in _place(name, piece.source, piece.view(meta), meta, experts)
        )
        shape = tuple(meta.shape) if experts is None else (len(experts), *meta.shape[1:])
        tensor = UnitTensor(name=name, shape=shape, dtype=meta.dtype, offset=offset, places=places)
        tensors.append(tensor)
        offset += -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
    return Unit(
        layer=layer,
        experts=experts,
        tensors=tuple(tensors),
        conversions=tuple(conversions.values()),
        num_bytes=offset,
    )


def _place(
    name: str, source: TensorEntry, view: Tensor, meta: Tensor, experts: range | None
) -> Sequence[Place]:
    """Place of *source*, cut to *experts*; none when it lies outside."""
    begin, end, start = source.begin, source.end, view.storage_offset()
    if experts is not None:
        step = meta.stride(0)
        low, high = experts.start * step, experts.stop * step
        last = start + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
        if last < low or start >= high:
            return ()
        if start < low or last >= high:
            if view.dim() == 0 or view.stride(0) != step or view.shape[0] != meta.shape[0]:
                raise _cannot_cut(name)
            row = source.num_bytes // view.shape[0]
            end = begin + experts.stop * row
            begin += experts.start * row
            view = view[experts.start : experts.stop]
            start = view.storage_offset()
        start -= low
    return (
        Place(
            source=source,
            begin=begin,
            end=end,
            shape=tuple(view.shape),
            stride=tuple(view.stride()),
            offset=int(start),
        ),
    )


def _cannot_cut(name: str) -> UsageError:
    return UsageError(
        f"{name} is stored so that its experts cannot be read apart, and the layer is larger than "
        "its memory budget; raise --vram-mib"
    )
