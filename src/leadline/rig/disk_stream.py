"""Stretches of files, in order, through a bounded ring in host memory.

Threads read ahead as far as the ring has room; the consumer takes slabs in the order of
the requests and gives their space back when the bytes are elsewhere.

- Every byte lands at an address that agrees with its file offset modulo a page, so reads
  go straight into the ring (`leadline.rig.direct_file`).
- Never more memory than the ring. A consumer that holds on to slabs that fill the ring and
  waits for another one waits for ever.
- A fault of a reading thread is raised to the consumer in place of the next slab that is
  not complete.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor, uint8

from leadline.core.errors import LeadlineError, UsageError
from leadline.rig.direct_file import PAGE_BYTES, DirectFile, page_ceil, page_floor
from leadline.rig.ring_space import Region, RingSpace


class Awaitable(Protocol):
    """Something on the device that ends, such as a CUDA event."""

    def synchronize(self) -> None:
        """Return when it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Bytes *begin* to *end* of a file; *tag* is the caller's."""

    path: Path
    begin: int
    end: int
    tag: object = None

    @property
    def num_bytes(self) -> int:
        """Length."""
        return self.end - self.begin


def coalesce(extents: Sequence[Extent], *, max_gap: int, max_bytes: int) -> list[Extent]:
    """Join neighbours of one file and tag, then cut to pages of at most *max_bytes* in all.

    Neighbours follow each other in *extents*, in file order, with at most *max_gap* bytes
    between them (which are read too); overlaps are read once. Cuts lie between pages, and
    no piece touches more than *max_bytes* of pages (at least one page).
    """
    pieces: list[Extent] = []
    for run in _runs(extents, max_gap):
        step = max(page_floor(max_bytes), PAGE_BYTES)
        begin = run.begin
        while begin < run.end:
            end = min(page_floor(begin) + step, run.end)
            pieces.append(Extent(path=run.path, begin=begin, end=end, tag=run.tag))
            begin = end
    return pieces


def _runs(extents: Sequence[Extent], max_gap: int) -> Iterator[Extent]:
    run: Extent | None = None
    for extent in extents:
        if extent.end <= extent.begin:
            continue
        if (
            run is not None
            and (run.path, run.tag) == (extent.path, extent.tag)
            and run.begin <= extent.begin <= run.end + max_gap
        ):
            end = max(run.end, extent.end)
            run = Extent(path=run.path, begin=run.begin, end=end, tag=run.tag)
            continue
        if run is not None:
            yield run
        run = extent
    if run is not None:
        yield run


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStats:
    """What a stream has done so far."""

    bytes_read: int
    """Asked for and read."""
    bytes_from_disk: int
    """With the rest of the pages they lie in."""
    direct: bool
    """Every file so far took O_DIRECT."""
    seconds_waiting: float
    """The consumer's, for slabs that were not there yet."""


class Slab:
    """One request's bytes, in the ring until `release`."""

    __slots__ = ("_region", "_stream", "data", "extent")

    def __init__(
        self, extent: Extent, data: Tensor, stream: "DiskStream", region: Region | None
    ) -> None:
        self.extent = extent
        self.data = data
        """uint8, exactly the extent's bytes, inside the ring."""
        self._stream = stream
        self._region = region

    def release(self, after: Awaitable | None = None) -> None:
        """Give the space back, from any thread; once *after* has ended, when given.

        A reader that needs the space waits for *after*; the caller does not.
        """
        region, self._region = self._region, None
        if region is not None:
            self._stream._release(region, after)


@dataclass(eq=False, kw_only=True, slots=True)
class _Placed:
    """A request that has room in the ring."""

    region: Region | None
    reads_left: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """What one thread reads at once."""

    placed: _Placed
    path: Path
    begin: int
    end: int
    offset: int
    """Of the first page, in the ring."""


@dataclass(kw_only=True, slots=True)
class _Counters:
    bytes_read: int = 0
    bytes_from_disk: int = 0
    direct: bool = True
    seconds_waiting: float = 0.0
    delivered: int = 0
    """Requests handed out."""
    started: int = 0
    """Requests given room."""
    reads_left: Counter[Path] = field(default_factory=Counter)


class DiskStream:
    """Iterates over the slabs of *requests* in order; one consumer."""

    def __init__(
        self,
        requests: Sequence[Extent],
        *,
        ring: Tensor,
        slab_bytes: int,
        threads: int = 8,
        direct: bool = True,
    ) -> None:
        """Start reading.

        *ring*: uint8 on the host, its address a multiple of a page. *slab_bytes*: the most
        one thread reads at once; a longer request is read by several side by side.
        Not *direct*: through the page cache in any case.

        Raises:
            UsageError: an impossible request, or one that the ring does not hold.
        """
        self._requests = requests
        self._ring = ring
        self._read_bytes = max(page_floor(slab_bytes), PAGE_BYTES)
        self._direct = direct
        _refuse(requests, ring, threads)
        self._bytes = ring.numpy().data
        self._space = RingSpace(page_floor(ring.numel()))
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._reads: deque[_Read] = deque()
        self._placed: dict[int, _Placed] = {}
        self._releasing: deque[tuple[Region, Awaitable]] = deque()
        self._files: dict[Path, DirectFile] = {}
        self._count = _Counters()
        self._fault: BaseException | None = None
        self._closed = False
        for extent in requests:
            self._count.reads_left[extent.path] += len(self._cuts(extent))
        self._threads = [
            threading.Thread(target=self._work, name=f"leadline-disk-{index}", daemon=True)
            for index in range(max(min(threads, self._count.reads_left.total()), 1))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stats(self) -> StreamStats:
        """So far; from any thread."""
        with self._lock:
            return StreamStats(
                bytes_read=self._count.bytes_read,
                bytes_from_disk=self._count.bytes_from_disk,
                direct=self._count.direct,
                seconds_waiting=self._count.seconds_waiting,
            )

    def __iter__(self) -> Iterator[Slab]:
        return self

    def __next__(self) -> Slab:
        """Return the next slab, waiting for its bytes.

        Raises:
            LeadlineError: what a reading thread met, or the stream was closed.
        """
        with self._lock:
            index = self._count.delivered
            if index == len(self._requests):
                raise StopIteration
            placed = self._wait_for(index)
            self._count.delivered += 1
            del self._placed[index]
        extent = self._requests[index]
        start = 0 if placed.region is None else placed.region.offset + extent.begin % PAGE_BYTES
        return Slab(extent, self._ring[start : start + extent.num_bytes], self, placed.region)

    def close(self) -> None:
        """Stop reading and wait for the threads and for what releases wait for; any time.

        Slabs still held lose their bytes to the ring's next user.
        """
        with self._lock:
            self._closed = True
            self._room.notify_all()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()
        with self._lock:
            releasing, self._releasing = self._releasing, deque()
            files, self._files = self._files, {}
        for file in files.values():
            file.close()
        for region, after in releasing:
            after.synchronize()
            self._release(region, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait_for(self, index: int) -> _Placed:
        begin = time.monotonic()
        try:
            while True:
                if self._closed:
                    raise LeadlineError(
                        f"the disk stream was closed after {index:,} of {len(self._requests):,} "
                        "reads; take what is wanted before closing it"
                    )
                placed = self._placed.get(index)
                if placed is not None and placed.reads_left == 0:
                    return placed
                if self._fault is not None:
                    raise self._fault
                self._ready.wait()
        finally:
            self._count.seconds_waiting += time.monotonic() - begin

    def _release(self, region: Region, after: Awaitable | None) -> None:
        with self._lock:
            if after is None:
                self._space.release(region)
            else:
                self._releasing.append((region, after))
            self._room.notify_all()

    def _work(self) -> None:
        try:
            while (read := self._take()) is not None:
                file = self._open(read.path)
                room = page_ceil(read.end) - page_floor(read.begin)
                into = self._bytes[read.offset : read.offset + room]
                self._finish(read, file, file.read(into, read.begin, read.end))
        except BaseException as error:  # the consumer raises it
            with self._lock:
                self._fault = self._fault or error
                self._room.notify_all()
                self._ready.notify_all()

    def _take(self) -> _Read | None:
        """Next read, once there is room for it; None: nothing is left to do."""
        while True:
            with self._lock:
                while not self._reads:
                    if self._closed or self._fault or self._count.started == len(self._requests):
                        return None
                    if self._place_next():
                        continue
                    if self._releasing:
                        break
                    self._room.wait()
                else:
                    if self._closed or self._fault:
                        return None
                    return self._reads.popleft()
                region, after = self._releasing.popleft()
            after.synchronize()
            self._release(region, None)

    def _place_next(self) -> bool:
        """Give the next request room in the ring and queue its reads."""
        index = self._count.started
        extent = self._requests[index]
        first, last = page_floor(extent.begin), page_ceil(extent.end)
        cuts = self._cuts(extent)
        region = self._space.place(last - first) if cuts else None
        if cuts and region is None:
            return False
        placed = _Placed(region=region, reads_left=len(cuts))
        self._placed[index] = placed
        self._count.started += 1
        for begin, end in cuts:
            assert region is not None
            self._reads.append(
                _Read(
                    placed=placed,
                    path=extent.path,
                    begin=begin,
                    end=end,
                    offset=region.offset + page_floor(begin) - first,
                )
            )
        if not cuts:
            self._ready.notify_all()
        elif len(cuts) > 1:
            self._room.notify_all()
        return True

    def _cuts(self, extent: Extent) -> list[tuple[int, int]]:
        """What single threads read of *extent*; cut between pages."""
        begins = range(page_floor(extent.begin), extent.end, self._read_bytes)
        if extent.num_bytes == 0:
            return []
        return [
            (max(begin, extent.begin), min(begin + self._read_bytes, extent.end))
            for begin in begins
        ]

    def _open(self, path: Path) -> DirectFile:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = DirectFile(path, direct=self._direct)
            return file

    def _finish(self, read: _Read, file: DirectFile, from_disk: int) -> None:
        with self._lock:
            count = self._count
            count.bytes_read += read.end - read.begin
            count.bytes_from_disk += from_disk
            count.direct = count.direct and file.is_direct
            count.reads_left[read.path] -= 1
            if not count.reads_left[read.path]:
                self._files.pop(read.path).close()
            read.placed.reads_left -= 1
            if read.placed.reads_left == 0:
                self._ready.notify_all()


def _refuse(requests: Sequence[Extent], ring: Tensor, threads: int) -> None:
    if ring.dtype != uint8 or ring.dim() != 1 or ring.data_ptr() % PAGE_BYTES:
        raise UsageError(
            f"the read ring is {ring.dtype} of shape {tuple(ring.shape)} at address "
            f"{ring.data_ptr():#x}; give bytes from a host pool, on a page of {PAGE_BYTES}"
        )
    if threads < 1:
        raise UsageError(f"{threads} reading threads were asked for; give 1 or more")
    for extent in requests:
        if not 0 <= extent.begin <= extent.end:
            raise UsageError(
                f"bytes {extent.begin:,} to {extent.end:,} of {extent.path} cannot be read; "
                "give a begin of 0 or more and an end not before it"
            )
        pages = page_ceil(extent.end) - page_floor(extent.begin)
        if pages > page_floor(ring.numel()):
            raise UsageError(
                f"bytes {extent.begin:,} to {extent.end:,} of {extent.path} take {pages:,} bytes "
                f"of pages where the read ring holds {ring.numel():,}; cut the request or give a "
                "larger --host-pool-mib"
            )
