"""Hidden states of paused micro-batches, in device memory or in pinned host memory.

A wave keeps the residual stream of every micro-batch between two layers. Those that
device memory has no room for are parked in the host pool and copied back one ahead of
their turn, on streams of their own. Never on disk while a pass runs: once memory holds
the residuals of half a layer's weight bytes, reading the weights again is cheaper.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class _Slot:
    host: Tensor | None
    """Pinned bytes in which this micro-batch is parked; None: it stays on the device."""
    shape: tuple[int, ...] = ()
    parked: torch.cuda.Event | None = None
    fetched: tuple[Tensor, torch.cuda.Event] | None = None


class ResidualStore:
    """One slot a micro-batch; *host[i]* is its pinned memory or None."""

    def __init__(
        self, host: Sequence[Tensor | None], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._slots = [_Slot(host=memory) for memory in host]
        self._kept: dict[int, Tensor] = {}
        self._device = device
        self._dtype = dtype
        on_cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if on_cuda else None
        self._in = torch.cuda.Stream(device) if on_cuda else None

    def park(self, index: int, hidden: Tensor) -> Tensor:
        """Put *hidden* away after a layer; the tensor that stands for it until its turn.

        What comes back must replace *hidden* wherever the caller keeps it, or the device
        memory stays in use.
        """
        slot = self._slots[index]
        if slot.host is None:
            return hidden
        slot.shape = tuple(hidden.shape)
        target = self._host_view(slot)
        if self._out is None:
            target.copy_(hidden)
            return target
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            target.copy_(hidden, non_blocking=True)
            hidden.record_stream(self._out)
            slot.parked = self._out.record_event()
        return target

    def prefetch(self, index: int) -> None:
        """Start copying a parked micro-batch back."""
        slot = self._slots[index]
        if slot.host is None or self._in is None or slot.fetched is not None or not slot.shape:
            return
        if slot.parked is not None:
            self._in.wait_event(slot.parked)
        with torch.cuda.stream(self._in):
            fresh = self._host_view(slot).to(self._device, non_blocking=True)
            slot.fetched = (fresh, self._in.record_event())

    def fetch(self, index: int, standing_in: Tensor) -> Tensor:
        """Hidden states of micro-batch *index* on the device; *standing_in* is what park gave."""
        slot = self._slots[index]
        if slot.host is None:
            return self._kept.pop(index, standing_in)
        if self._in is None:
            # The next layer may write into its input's memory; the slot is its only copy.
            return self._host_view(slot).to(self._device, copy=True)
        self.prefetch(index)
        assert slot.fetched is not None
        fresh, done = slot.fetched
        slot.fetched = None
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(done)
        fresh.record_stream(stream)
        return fresh

    def restore(self, hidden: Iterable[Tensor]) -> None:
        """Put residuals of an earlier run in place, one micro-batch after another."""
        for index, (slot, saved) in enumerate(zip(self._slots, hidden, strict=True)):
            placed = self.park(index, saved.to(self._device))
            if slot.host is None:
                self._kept[index] = placed

    def states(self, standing_in: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """Residuals of every micro-batch, in order; *standing_in* is what `park` gave for each."""
        self.drain()
        for index, slot in enumerate(self._slots):
            yield standing_in(index) if slot.host is None else self._host_view(slot)

    def drain(self) -> None:
        """Wait until everything parked has arrived in host memory."""
        if self._out is not None:
            self._out.synchronize()

    def _host_view(self, slot: _Slot) -> Tensor:
        assert slot.host is not None
        num_bytes = prod(slot.shape) * self._dtype.itemsize
        return slot.host[:num_bytes].view(self._dtype).view(slot.shape)
