"""Weights of the units of a pass, in order: disk, pinned ring, device.

A thread lands unit after unit into the slots of the device as they become free, so that
the next layer is read while this one computes. With one slot the ring holds what has
been read ahead; with two, the device does. Slots come in pools, because a layer cut by
experts keeps its other weights while its groups follow each other.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from leadline.rig.disk_stream import DiskStream, Extent, Slab, coalesce
from leadline.rig.landing import Landing, tensor_in
from leadline.rig.units import Unit

MAX_GAP_BYTES = 64 * 1024
"""Neighbours in a file closer than this are read in one go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamShape:
    """How the stream is cut."""

    slab_bytes: int
    threads: int


@dataclass(kw_only=True, slots=True)
class StreamCounters:
    """What the stream did; bytes as the checkpoint counts them and as the disk does."""

    bytes_wanted: int = 0
    bytes_from_disk: int = 0
    table_bytes: int = 0
    """Rows of gather tables, apart from the layers."""
    table_bytes_from_disk: int = 0
    direct: bool = True
    waited_s: float = 0.0
    """Time the pass stood waiting for weights."""


@dataclass(kw_only=True, slots=True)
class _Slot:
    buffer: Tensor
    free: threading.Event = field(default_factory=threading.Event)
    event: torch.cuda.Event | None = None
    """Work that reads what is in the slot."""


@dataclass(kw_only=True, slots=True)
class _Landed:
    done: threading.Event = field(default_factory=threading.Event)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    event: torch.cuda.Event | None = None
    slot: _Slot | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A unit and the pool whose slot it takes; None: memory of its own until released."""

    unit: Unit
    pool: str | None
    image: Tensor | None = None
    """The unit's bytes in host memory, where an earlier pass has left them: no read."""


class WeightStream:
    """Lands units in order; `acquire` and `release` them in the same order within a pool."""

    def __init__(
        self,
        turns: Sequence[Turn],
        *,
        shards: Mapping[str, Path],
        ring: Tensor,
        pools: Mapping[str, Sequence[Tensor]],
        shape: StreamShape,
        device: torch.device,
        counters: StreamCounters,
        inspect: Callable[[Unit, Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        """*ring*: uint8 host memory; *pools*: slots, uint8 on the device, by name.

        *inspect* sees every unit once it has landed, on the landing thread.
        """
        self._units = [turn.unit for turn in turns]
        self._turns = turns
        self._shards = shards
        self._ring = ring
        self._pools = {
            name: [_Slot(buffer=buffer) for buffer in buffers] for name, buffers in pools.items()
        }
        for slot in self._all_slots():
            slot.free.set()
        self._shape = shape
        self._device = device
        self._counters = counters
        self._inspect = inspect
        self._landed = [_Landed() for _ in turns]
        self._fault: BaseException | None = None
        self._stopping = threading.Event()
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._stream: DiskStream | None = None
        self._thread = threading.Thread(target=self._run, name="leadline-landing", daemon=True)
        self._thread.start()

    def acquire(self, index: int) -> Mapping[str, Tensor]:
        """Tensors of unit *index* by full name, once they are in place for this stream."""
        landed = self._landed[index]
        while not landed.done.wait(timeout=0.5):
            if self._fault is not None:
                break
        if self._fault is not None:
            raise self._fault
        if landed.event is not None:
            torch.cuda.current_stream(self._device).wait_event(landed.event)
        return landed.tensors

    def release(self, index: int) -> None:
        """All work that reads unit *index* has been queued on the current stream."""
        landed = self._landed[index]
        landed.tensors = {}
        slot, landed.slot = landed.slot, None
        assert slot is not None
        if self._copies is not None:
            slot.event = torch.cuda.current_stream(self._device).record_event()
        slot.free.set()

    def buffer(self, index: int) -> Tensor:
        """Memory of unit *index*, which has been acquired and not yet released."""
        slot = self._landed[index].slot
        assert slot is not None
        return slot.buffer[: self._units[index].num_bytes]

    def close(self) -> None:
        """Stop reading; waits for the threads."""
        self._stopping.set()
        for slot in self._all_slots():
            slot.free.set()
        if self._stream is not None:
            self._stream.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._land_all()
        except BaseException as error:
            if not self._stopping.is_set():
                self._fault = error
        finally:
            for landed in self._landed:
                landed.done.set()

    @torch.inference_mode()
    def _land_all(self) -> None:
        extents = [
            extent
            for index, turn in enumerate(self._turns)
            if turn.image is None
            for extent in self._extents(index, turn.unit)
        ]
        stream = DiskStream(
            extents,
            ring=self._ring,
            slab_bytes=self._shape.slab_bytes,
            threads=self._shape.threads,
        )
        self._stream = stream
        if self._stopping.is_set():
            stream.close()
            return
        slabs = iter(stream)
        try:
            counts = Counter(extent.tag for extent in extents)
            taken: Counter[str] = Counter()
            for index, unit in enumerate(self._units):
                slot = self._slot_for(index, taken)
                slot.free.wait()
                slot.free.clear()
                if self._stopping.is_set():
                    return
                self._land(index, slot, slabs, counts[index])
                if self._turns[index].image is None:
                    self._counters.bytes_wanted += unit.bytes_to_read
        finally:
            self._counters.bytes_from_disk += stream.stats.bytes_from_disk
            self._counters.direct = self._counters.direct and stream.stats.direct
            stream.close()

    def _slot_for(self, index: int, taken: Counter[str]) -> _Slot:
        pool = self._turns[index].pool
        if pool is None:
            size = self._units[index].num_bytes
            slot = _Slot(buffer=torch.empty(size, dtype=torch.uint8, device=self._device))
            slot.free.set()
            return slot
        slots = self._pools[pool]
        slot = slots[taken[pool] % len(slots)]
        taken[pool] += 1
        return slot

    def _all_slots(self) -> list[_Slot]:
        return [slot for slots in self._pools.values() for slot in slots]

    def _land(self, index: int, slot: _Slot, slabs: Iterator[Slab], count: int) -> None:
        landed = self._landed[index]
        landed.slot = slot
        if self._copies is None:
            landed.tensors = self._fill(index, slot, slabs, count)
        else:
            with torch.cuda.stream(self._copies):
                if slot.event is not None:
                    self._copies.wait_event(slot.event)
                landed.tensors = self._fill(index, slot, slabs, count)
                landed.event = self._copies.record_event()
        landed.done.set()

    def _fill(
        self, index: int, slot: _Slot, slabs: Iterator[Slab], count: int
    ) -> Mapping[str, Tensor]:
        unit, image = self._units[index], self._turns[index].image
        if image is not None:
            slot.buffer[: unit.num_bytes].copy_(image[: unit.num_bytes], non_blocking=True)
            return {tensor.name: tensor_in(slot.buffer, tensor) for tensor in unit.tensors}
        landing = Landing(unit, slot.buffer)
        for _ in range(count):
            slab = next(slabs)
            shard, begin = slab.extent.path, slab.extent.begin
            landing.take(shard.name, begin, slab.data)
            slab.release(None if self._copies is None else self._copies.record_event())
        tensors = landing.finish()
        if self._inspect is not None:
            self._inspect(unit, tensors)
        return tensors

    def _extents(self, index: int, unit: Unit) -> list[Extent]:
        wanted = Landing(
            unit, torch.empty(unit.num_bytes, dtype=torch.uint8, device="meta")
        ).wanted()
        extents: list[Extent] = []
        for shard, ranges in wanted.items():
            pieces = [
                Extent(path=self._shards[shard], begin=begin, end=end, tag=index)
                for begin, end in ranges
            ]
            extents += coalesce(pieces, max_gap=MAX_GAP_BYTES, max_bytes=self._shape.slab_bytes)
        return extents


def install(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put *tensors* (by full name) in place of the model's parameters and buffers."""
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor


def uninstall(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Put the memoryless tensors of *state* back."""
    install(model, {name: state[name] for name in names})
