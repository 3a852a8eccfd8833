"""One stretch of host memory under one budget, pinned for the copy engines when asked.

Everything on the host that is large and lives long (read ring, parked residuals, packed
Grams, resident layers) is taken from here, so the budget holds by construction.

- Memory is mapped once, on a page boundary, and handed out by moving a mark; nothing is
  given back before `close`.
- It asks for huge pages: a direct read into small ones ends at the disk's limit of segments.
  Measured with bench/disk_stream.py (2 cores, virtio disk of 254 segments): 1.74 GB/s into
  huge pages, 1.26 GB/s into small ones.
- A child process does not inherit it: a copy made on write under a running direct read or
  device copy would leave the parent with stale bytes.
"""

import mmap
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from leadline.core.errors import EnvironmentUnfitError, UsageError
from leadline.rig.direct_file import PAGE_BYTES

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""


class HostPool:
    """*num_bytes* of host memory, handed out piece by piece."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        """Map the pool, and pin it if *pinned*.

        Raises:
            UsageError: the size is not positive, or the system has no room for it.
            EnvironmentUnfitError: no CUDA device to pin for, or the driver will not pin it.
        """
        if num_bytes <= 0:
            raise UsageError(
                f"a host pool of {num_bytes:,} bytes was asked for; give --host-pool-mib 1 or more"
            )
        if pinned and not torch.cuda.is_available():
            raise EnvironmentUnfitError(
                "pinned host memory needs a CUDA device and none is visible; "
                "ask for an unpinned pool"
            )
        self._map = _map_memory(num_bytes)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._taken_bytes = 0
        self._closed = False
        self._pinned = False
        if pinned:
            self._pin()

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        return len(self._map)

    @property
    def taken_bytes(self) -> int:
        """Handed out so far, gaps of alignment included."""
        return self._taken_bytes

    @property
    def free_bytes(self) -> int:
        """Not yet handed out."""
        return self.num_bytes - self._taken_bytes

    @property
    def pinned(self) -> bool:
        """Whether device copies from and to the pool run beside the host."""
        return self._pinned

    def take(self, num_bytes: int, align: int = PAGE_BYTES) -> Tensor:
        """Next *num_bytes* of the pool as uint8; the address is a multiple of *align*.

        Raises:
            UsageError: they are not free, or the pool is closed.
        """
        if self._closed:
            raise UsageError("the host pool is closed; take memory before closing it")
        if num_bytes < 0 or align <= 0 or PAGE_BYTES % align:
            raise UsageError(
                f"{num_bytes:,} bytes aligned to {align} were asked of the host pool; ask for 0 "
                f"bytes or more, aligned to a power of two up to {PAGE_BYTES}"
            )
        begin = -(-self._taken_bytes // align) * align
        if begin + num_bytes > self.num_bytes:
            raise UsageError(
                f"{num_bytes:,} bytes were asked of a host pool of {self.num_bytes:,} bytes with "
                f"{max(self.num_bytes - begin, 0):,} free; give "
                f"--host-pool-mib {-(-(begin + num_bytes) // 2**20)} or more"
            )
        self._taken_bytes = begin + num_bytes
        return self._memory[begin : begin + num_bytes]

    def close(self) -> None:
        """Unpin and let go; the memory is returned once no tensor taken from it is left.

        Waits for the device first, so that no copy runs on memory being unpinned.
        """
        if self._closed:
            return
        self._closed = True
        if self._pinned:
            torch.cuda.synchronize()
            _check(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()), "unpin")
            self._pinned = False
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _pin(self) -> None:
        torch.cuda.init()
        # The driver pins page by page on one thread; pages that exist already go faster.
        self._memory[:: mmap.PAGESIZE].zero_()
        result = torch.cuda.cudart().cudaHostRegister(
            self._memory.data_ptr(), self.num_bytes, _PORTABLE
        )
        _check(result, "pin")
        self._pinned = True


def _map_memory(num_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"the system has no room for a host pool of {num_bytes:,} bytes ({error}); "
            "give a smaller --host-pool-mib"
        ) from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        _advise(memory, advice)
    return memory


def _advise(memory: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is None:
        return
    try:
        memory.madvise(advice)
    except OSError:
        # A kernel built without huge pages says EINVAL; the pool works without.
        return


def _check(result: object, verb: str) -> None:
    code = int(result)  # type: ignore[call-overload]
    if code:
        raise EnvironmentUnfitError(
            f"the CUDA driver did not {verb} the host pool (error {code}); give a smaller "
            "--host-pool-mib or raise the limit on locked memory (ulimit -l)"
        )
