"""From slabs of a file to tensors of a unit.

A slab is a stretch of a shard in (pinned) host memory. Bytes that lie in the unit as
they lie in the file are copied straight to their place; transposed, interleaved,
converted or widened ones land in a staging tensor first and are placed when complete.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from leadline.rig.checkpoint import TensorEntry
from leadline.rig.units import SAFETENSORS_DTYPES, Place, Unit, UnitTensor


@dataclass(kw_only=True, slots=True)
class _Part:
    """Bytes wanted from the file, and what happens to them."""

    begin: int
    end: int
    target: Tensor | None
    """uint8 on the device when the bytes can go straight to their place."""
    place: tuple[UnitTensor, Place] | None = None
    source: TensorEntry | None = None
    staged: Tensor | None = None
    missing: int = field(default=0)


class Landing:
    """Fills one unit's buffer; `take` every slab, then `finish`."""

    def __init__(self, unit: Unit, buffer: Tensor) -> None:
        """*buffer*: uint8 on the device, at least `unit.num_bytes` long."""
        self._unit = unit
        self._buffer = buffer
        self._parts: dict[str, list[_Part]] = {}
        self._converted: dict[str, Tensor] = {}
        self.tensors = {tensor.name: tensor_in(buffer, tensor) for tensor in unit.tensors}
        for tensor in unit.tensors:
            for place in tensor.places:
                self._want(tensor, place)
        for conversion in unit.conversions:
            for source in conversion.sources:
                part = _Part(begin=source.begin, end=source.end, target=None, source=source)
                self._add(source.shard, part)

    def _want(self, tensor: UnitTensor, place: Place) -> None:
        direct = place.is_dense and SAFETENSORS_DTYPES[place.source.dtype] == tensor.dtype
        target = None
        if direct:
            start = tensor.offset + place.offset * tensor.dtype.itemsize
            target = self._buffer[start : start + place.end - place.begin]
        part = _Part(begin=place.begin, end=place.end, target=target, place=(tensor, place))
        self._add(place.source.shard, part)

    def _add(self, shard: str, part: _Part) -> None:
        part.missing = part.end - part.begin
        self._parts.setdefault(shard, []).append(part)

    def wanted(self) -> dict[str, list[tuple[int, int]]]:
        """Byte ranges by shard, in file order, each once."""
        return {
            shard: sorted({(part.begin, part.end) for part in parts if part.end > part.begin})
            for shard, parts in self._parts.items()
        }

    def take(self, shard: str, begin: int, data: Tensor) -> None:
        """Copy what *data* (uint8, from byte *begin* of *shard*) holds of this unit."""
        end = begin + data.numel()
        for part in self._parts[shard]:
            low, high = max(begin, part.begin), min(end, part.end)
            if low >= high:
                continue
            if part.target is not None:
                target = part.target
            else:
                if part.staged is None:
                    part.staged = self._buffer.new_empty(part.end - part.begin)
                target = part.staged
            target[low - part.begin : high - part.begin].copy_(
                data[low - begin : high - begin], non_blocking=True
            )
            part.missing -= high - low
            if part.missing == 0 and part.staged is not None:
                self._place(part)

    def _place(self, part: _Part) -> None:
        assert part.staged is not None
        if part.source is not None:
            self._converted[part.source.name] = as_source(part.staged, part.source)
            part.staged = None
            return
        assert part.place is not None
        tensor, place = part.place
        dtype = SAFETENSORS_DTYPES[place.source.dtype]
        where = self.tensors[tensor.name].as_strided(
            place.shape,
            place.stride,
            self.tensors[tensor.name].storage_offset() + place.offset,
        )
        where.copy_(part.staged.view(dtype).view(place.shape))
        part.staged = None

    def finish(self) -> Mapping[str, Tensor]:
        """Run the conversions that could not be placed; tensors of the unit by full name."""
        for conversion in self._unit.conversions:
            made = conversion.apply({s.name: self._converted[s.name] for s in conversion.sources})
            for name, value in made.items():
                if name in self.tensors:
                    self.tensors[name].copy_(value)
        self._converted.clear()
        return self.tensors


def tensor_in(buffer: Tensor, tensor: UnitTensor) -> Tensor:
    """The tensor's view of its unit's *buffer*."""
    raw = buffer[tensor.offset : tensor.offset + tensor.num_bytes]
    return raw.view(tensor.dtype).view(tensor.shape)


def as_source(staged: Tensor, source: TensorEntry) -> Tensor:
    """Raw bytes as the tensor the checkpoint says they are."""
    return staged.view(SAFETENSORS_DTYPES[source.dtype]).view(source.shape)
