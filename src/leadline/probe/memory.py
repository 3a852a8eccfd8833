"""Peak memory as the device sees it, with the allocator's own figure beside it.

The allocator does not count the CUDA context, loaded kernels, or anything taken
outside torch, so a configuration is judged on the device's reading. On a CPU the
device is what this process may have of the machine.
"""

import sys
import threading
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import psutil
import torch

from leadline.core.errors import ProbeError

_SAMPLE_SECONDS = 0.1


class DeviceMemory(Protocol):
    """Readings of one device, in bytes."""

    total_bytes: int
    noise_bytes: int
    """Growth below this is the measurement's own: 0 where the allocator counts exactly."""

    def used_bytes(self) -> int:
        """In use on the device, by anyone."""

    def allocated_bytes(self) -> int:
        """Held by this process, as exactly as can be read."""

    def allocator_peak_bytes(self) -> int:
        """The allocator's peak since the last reset; 0 where there is none."""

    def allocator_retries(self) -> int:
        """Times the allocator had to flush its cache and try again."""


class CudaMemory:
    """One CUDA device, read through the driver."""

    noise_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = torch.cuda.mem_get_info(device)[1]

    def used_bytes(self) -> int:
        """Total minus free, as the driver reports it."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def allocated_bytes(self) -> int:
        """Live tensors."""
        return torch.cuda.memory_allocated(self._device)

    def allocator_peak_bytes(self) -> int:
        """Peak of live tensors."""
        return torch.cuda.max_memory_allocated(self._device)

    def allocator_retries(self) -> int:
        """The caching allocator's own count."""
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


class HostMemory:
    """What a probe on a CPU takes of the memory it could have.

    The machine's other memory moves with everything else that runs on it, so the process is
    judged by its own resident set, against that plus what could still be had when it began:
    the machine's available memory or its control group's limit, the smaller of the two.
    """

    noise_bytes = 32 << 20
    """malloc keeps and returns arenas on its own schedule."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = 0
        available = int(psutil.virtual_memory().available)
        self.total_bytes = self.allocated_bytes() + min(available, group_headroom_bytes())

    def used_bytes(self) -> int:
        """Resident set of this process."""
        return self.allocated_bytes()

    def allocated_bytes(self) -> int:
        """Resident set of this process."""
        resident = int(self._process.memory_info().rss)
        self._peak = max(self._peak, resident)
        return resident

    def allocator_peak_bytes(self) -> int:
        """Largest resident set seen."""
        self.allocated_bytes()
        return self._peak

    def allocator_retries(self) -> int:
        """A CPU has no caching allocator."""
        return 0


def group_headroom_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes left under the control group's memory limit; a huge number where there is none."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (root / limit_name).read_text("ascii").strip()
            used = int((root / used_name).read_text("ascii"))
        except (OSError, ValueError):
            continue  # this version of control groups is not mounted here
        if limit != "max":
            return max(0, int(limit) - used)
    return sys.maxsize


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory of *device*."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


class MemoryWatch:
    """Samples the device in a thread while the block runs; `peak_bytes` is the largest reading."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self.start_bytes = memory.used_bytes()
        self.peak_bytes = self.start_bytes

    def sample(self) -> int:
        """Take a reading now and keep it if it is the largest."""
        with self._lock:  # two threads sample, and the larger reading must win
            used = self._memory.used_bytes()
            self._memory.allocated_bytes()
            self.peak_bytes = max(self.peak_bytes, used)
        return used

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop sampling.

        Raises:
            ProbeError: a reading failed in between, so the peak may have been missed.
        """
        self._stop.set()
        self._thread.join()
        self.sample()
        if self._failure is not None and error is None:
            raise ProbeError(
                f"the device's memory could not be read to the end: {self._failure}; "
                "its peak is not known, measure again"
            ) from self._failure

    def _run(self) -> None:
        try:
            while not self._stop.wait(_SAMPLE_SECONDS):
                self.sample()
        except Exception as error:  # told where the block ends
            self._failure = error


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryVerdict:
    """A peak held against the limit."""

    fits: bool
    percent: str
    """Peak over total, two decimals."""
    why: str


def judge_memory(peak_bytes: int, total_bytes: int, limit_percent: int) -> MemoryVerdict:
    """Accept a peak strictly below *limit_percent* of the device; compared in whole bytes."""
    fits = peak_bytes * 100 < total_bytes * limit_percent
    percent = (Decimal(peak_bytes) * 100 / Decimal(total_bytes)).quantize(
        Decimal("0.01"), rounding=ROUND_HALF_UP
    )
    why = "" if fits else f"peak is {percent} % of the device, limit {limit_percent} %"
    return MemoryVerdict(fits=fits, percent=str(percent), why=why)


def growth_problem(after_each_bytes: list[int], noise_bytes: int) -> str:
    """Say if memory held after each eval batch keeps growing past the second by over 1 %.

    The first batch may allocate what later ones reuse; the third has no such excuse.
    """
    if len(after_each_bytes) < 3:
        return ""
    second, last = after_each_bytes[1], after_each_bytes[-1]
    if (last - second) * 100 > second and last - second > noise_bytes:
        return (
            f"eval memory grows: {second} bytes held after batch 2, {last} after batch "
            f"{len(after_each_bytes)}; something keeps outputs"
        )
    return ""
