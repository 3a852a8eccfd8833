"""Clocks that know the difference between work asked for and work done.

A launch returns long before the device has finished. `sync` waits for all of it,
`mark` notes a point on the device's own timeline, and `wait` waits for one mark.
"""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Host and device time, in nanoseconds."""

    def now_ns(self) -> int:
        """Host time."""

    def sync(self) -> None:
        """Return when the device has done everything asked so far."""

    def mark(self) -> Any:
        """Note the end of the work asked so far; does not wait."""

    def wait(self, mark: Any) -> None:
        """Return when the device has passed *mark*."""

    def between_ns(self, start: Any, end: Any) -> int:
        """Device time between two passed marks."""


class HostClock:
    """A CPU does the work before the call returns, so every mark is already passed."""

    def now_ns(self) -> int:
        """Monotonic host time."""
        return time.perf_counter_ns()

    def sync(self) -> None:
        """Nothing is outstanding on a CPU."""

    def mark(self) -> int:
        """Host time."""
        return time.perf_counter_ns()

    def wait(self, mark: int) -> None:
        """Passed when it was made."""

    def between_ns(self, start: int, end: int) -> int:
        """Difference of two host times."""
        return end - start


class CudaClock:
    """CUDA events on the current stream."""

    def now_ns(self) -> int:
        """Monotonic host time."""
        return time.perf_counter_ns()

    def sync(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        """Record a timing event."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Block until the event has been reached."""
        mark.synchronize()

    def between_ns(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """Event time; CUDA resolves about half a microsecond."""
        milliseconds: float = start.elapsed_time(end)
        return round(milliseconds * 1e6)


def clock_for(device: torch.device) -> Clock:
    """The clock of *device*."""
    return CudaClock() if device.type == "cuda" else HostClock()
