"""The disk stream: right bytes in order under a small ring, and every way it can end."""

import errno
import os
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline.core.errors import IntegrityError, LeadlineError, UsageError
from leadline.rig.direct_file import PAGE_BYTES, page_ceil, page_floor
from leadline.rig.disk_stream import DiskStream, Extent, Slab, coalesce
from leadline.rig.host_pool import HostPool

from .page_cache import drop_pages, resident_pages

SIZES = (300_000 + 1234, 4096 * 20, 5000)


class Blobs:
    """Random files and what is in them."""

    def __init__(self, folder: Path) -> None:
        self.contents = {folder / f"{n}.bin": os.urandom(size) for n, size in enumerate(SIZES)}
        self.paths = list(self.contents)
        for path, content in self.contents.items():
            path.write_bytes(content)

    def of(self, extent: Extent) -> bytes:
        return self.contents[extent.path][extent.begin : extent.end]

    def are_in(self, slab: Slab) -> bool:
        return slab.data.numpy().tobytes() == self.of(slab.extent)


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Blobs:
    return Blobs(tmp_path_factory.mktemp("stream"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No thread of a stream and no descriptor of a file outlives its test."""
    before = open_files()
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("leadline-disk")] == []
    assert open_files() == before


def open_files() -> set[str]:
    return {str(path) for path in Path("/proc/self/fd").iterdir()}


def make_ring(num_bytes: int) -> Tensor:
    return HostPool(num_bytes, pinned=False).take(num_bytes)


def pages_of(extent: Extent) -> int:
    return page_ceil(extent.end) - page_floor(extent.begin)


def extents_of(blobs: Blobs, spans: Sequence[tuple[int, int, int]]) -> list[Extent]:
    """Extents from (file, begin, length), each inside its file."""
    extents = []
    for number, begin, length in spans:
        path, size = blobs.paths[number], SIZES[number]
        begin %= size + 1
        extents.append(Extent(path=path, begin=begin, end=min(begin + length, size), tag=number))
    return extents


def whole(path: Path, num_bytes: int, step: int) -> list[Extent]:
    return coalesce([Extent(path=path, begin=0, end=num_bytes)], max_gap=0, max_bytes=step)


spans = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, SIZES[0]),
        st.one_of(st.integers(0, 200), st.integers(0, 20_000), st.integers(0, 120_000)),
    ),
    max_size=25,
)


@given(
    spans=spans,
    spare_pages=st.integers(0, 20),
    slab_bytes=st.sampled_from([1, 4096, 10_000, 65_536, 2**20]),
    threads=st.integers(1, 9),
    direct=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_random_extents_come_in_order_with_their_bytes(
    blobs: Blobs,
    spans: list[tuple[int, int, int]],
    spare_pages: int,
    slab_bytes: int,
    threads: int,
    direct: bool,
) -> None:
    extents = extents_of(blobs, spans)
    largest = max([PAGE_BYTES, *map(pages_of, extents)])
    ring = make_ring(largest + spare_pages * PAGE_BYTES)
    with DiskStream(
        extents, ring=ring, slab_bytes=slab_bytes, threads=threads, direct=direct
    ) as stream:
        for extent, slab in zip(extents, stream, strict=True):
            assert slab.extent is extent
            assert blobs.are_in(slab)
            assert slab.data.untyped_storage().data_ptr() == ring.untyped_storage().data_ptr()
            slab.release()
        assert stream.stats.bytes_read == sum(extent.num_bytes for extent in extents)
        assert stream.stats.direct == (direct or not any(e.num_bytes for e in extents))


@given(spans=spans, seed=st.integers(0, 1000), num_releasing=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_slabs_checked_and_released_by_other_threads_stay_whole_until_then(
    blobs: Blobs, spans: list[tuple[int, int, int]], seed: int, num_releasing: int
) -> None:
    extents = extents_of(blobs, spans * 3)
    ring = make_ring(max([PAGE_BYTES, *map(pages_of, extents)]) + 3 * PAGE_BYTES)
    slabs: queue.SimpleQueue[Slab | None] = queue.SimpleQueue()
    wrong: list[Extent] = []
    chance = random.Random(seed)

    def check() -> None:
        while (slab := slabs.get()) is not None:
            if not blobs.are_in(slab):
                wrong.append(slab.extent)
            slab.release(Passed() if chance.random() < 0.5 else None)

    checkers = [threading.Thread(target=check) for _ in range(num_releasing)]
    for checker in checkers:
        checker.start()
    with DiskStream(extents, ring=ring, slab_bytes=8192, threads=5) as stream:
        for slab in stream:
            slabs.put(slab)
        for _ in checkers:
            slabs.put(None)
        for checker in checkers:
            checker.join()
    assert wrong == []


class Passed:
    """An event that has happened."""

    def synchronize(self) -> None:
        return


def test_many_small_extents_come_in_order(blobs: Blobs) -> None:
    path = blobs.paths[0]
    extents = [Extent(path=path, begin=n * 131, end=n * 131 + n % 7) for n in range(2000)]
    with DiskStream(extents, ring=make_ring(2**16), slab_bytes=2**16) as stream:
        for number, slab in enumerate(stream):
            assert slab.extent is extents[number]
            assert blobs.are_in(slab)
            slab.release()


def test_no_extents_end_at_once() -> None:
    with DiskStream([], ring=make_ring(PAGE_BYTES), slab_bytes=PAGE_BYTES) as stream:
        assert list(stream) == []


def test_extents_without_bytes_come_empty(blobs: Blobs) -> None:
    extents = [Extent(path=blobs.paths[0], begin=n, end=n) for n in (0, 5, 4096)]
    with DiskStream(extents, ring=make_ring(PAGE_BYTES), slab_bytes=PAGE_BYTES) as stream:
        assert [slab.data.numel() for slab in stream] == [0, 0, 0]


def test_same_bytes_asked_twice_are_read_twice(blobs: Blobs) -> None:
    path = blobs.paths[0]
    extents = [Extent(path=path, begin=4096, end=8192)] * 2
    with DiskStream(extents, ring=make_ring(2**16), slab_bytes=2**16) as stream:
        assert [slab.data.numel() for slab in stream] == [4096, 4096]
        assert stream.stats.bytes_from_disk == 8192


def test_bytes_from_disk_count_the_pages_of_each_request(blobs: Blobs) -> None:
    path = blobs.paths[0]
    extents = [
        Extent(path=path, begin=4095, end=4097),
        Extent(path=path, begin=300_000, end=300_001),
    ]
    with DiskStream(extents, ring=make_ring(2**16), slab_bytes=2**16) as stream:
        assert len(list(stream)) == 2
        assert stream.stats.bytes_read == 3
        # The last page of the file holds 301,234 - 299,008 bytes.
        assert stream.stats.bytes_from_disk == 8192 + 2226


@pytest.mark.parametrize("direct", [True, False])
def test_t67_streamed_weights_leave_the_cache_to_the_table(blobs: Blobs, direct: bool) -> None:
    weights, table, _ = blobs.paths
    drop_pages(weights)
    table.read_bytes()
    extents = whole(weights, SIZES[0], 8192)
    with DiskStream(extents, ring=make_ring(2**16), slab_bytes=8192, direct=direct) as stream:
        for slab in stream:
            slab.release()
    assert resident_pages(weights) == 0
    assert resident_pages(table) == SIZES[1] // PAGE_BYTES


class Gate:
    """An event of the device: notes what the ring held when it was waited for."""

    def __init__(self, ring: Tensor) -> None:
        self._ring = ring
        self.seen: list[bytes] = []

    def synchronize(self) -> None:
        self.seen.append(self._ring.numpy().tobytes())


def test_space_released_after_an_event_is_not_written_before_it(blobs: Blobs) -> None:
    path = blobs.paths[0]
    ring = make_ring(8192)
    gates = [Gate(ring) for _ in range(4)]
    extents = [Extent(path=path, begin=n * 8192, end=(n + 1) * 8192) for n in range(4)]
    with DiskStream(extents, ring=ring, slab_bytes=4096, threads=3) as stream:
        for gate, slab in zip(gates, stream, strict=True):
            slab.release(after=gate)
    assert [gate.seen for gate in gates] == [[blobs.of(extent)] for extent in extents]


def test_close_waits_for_the_events_of_releases(blobs: Blobs) -> None:
    path = blobs.paths[0]
    ring = make_ring(2**16)
    gate = Gate(ring)
    stream = DiskStream(
        [Extent(path=path, begin=0, end=100)] * 2, ring=ring, slab_bytes=2**16, threads=1
    )
    next(stream).release(after=gate)
    next(stream).release(after=gate)
    stream.close()
    assert len(gate.seen) == 2


def test_event_that_fails_reaches_the_consumer(blobs: Blobs) -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("device lost")

    path = blobs.paths[0]
    extents = whole(path, SIZES[0], 8192)
    with DiskStream(extents, ring=make_ring(8192), slab_bytes=8192) as stream:
        next(stream).release(after=Broken())
        with pytest.raises(RuntimeError, match="device lost"):
            next(stream)


def test_release_twice_frees_once(blobs: Blobs) -> None:
    extents = whole(blobs.paths[0], SIZES[0], 8192)
    with DiskStream(extents, ring=make_ring(16384), slab_bytes=8192) as stream:
        for slab in stream:
            assert blobs.are_in(slab)
            slab.release()
            slab.release()


def test_t43_file_cut_meanwhile_names_file_expected_and_found(tmp_path: Path) -> None:
    path = tmp_path / "model-00002.safetensors"
    path.write_bytes(bytes(10 * PAGE_BYTES))
    extents = whole(path, 10 * PAGE_BYTES, PAGE_BYTES)
    with DiskStream(extents, ring=make_ring(PAGE_BYTES), slab_bytes=PAGE_BYTES) as stream:
        first = next(stream)
        os.truncate(path, 3 * PAGE_BYTES + 5)
        first.release()
        for _ in range(2):
            next(stream).release()
        with pytest.raises(IntegrityError, match=r"model-00002.* 12,293 where .* to 16,384 "):
            next(stream)


def fail_reads_from(monkeypatch: pytest.MonkeyPatch, begin: int, error: BaseException) -> None:
    system_read = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset >= begin:
            raise error
        return system_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize(
    ("error", "raised", "match"),
    [
        (OSError(errno.EIO, "Input/output error"), LeadlineError, "0.bin: Input/output error"),
        (MemoryError("no room"), MemoryError, "no room"),
    ],
)
def test_fault_of_a_reader_reaches_the_consumer_in_its_place(
    blobs: Blobs,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
    match: str,
) -> None:
    path = blobs.paths[0]
    fail_reads_from(monkeypatch, 2 * 8192, error)
    with DiskStream(whole(path, SIZES[0], 8192), ring=make_ring(8192), slab_bytes=8192) as stream:
        for _ in range(2):
            next(stream).release()
        for _ in range(2):
            with pytest.raises(raised, match=match):
                next(stream)


def test_missing_file_reaches_the_consumer(tmp_path: Path) -> None:
    extent = Extent(path=tmp_path / "gone.bin", begin=0, end=10)
    with (
        DiskStream([extent], ring=make_ring(PAGE_BYTES), slab_bytes=PAGE_BYTES) as stream,
        pytest.raises(LeadlineError, match=r"gone\.bin: No such file"),
    ):
        next(stream)


@contextmanager
def in_thread(body: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Run *body* beside the block; what it raised, once the block has ended."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except LeadlineError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield raised
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_close_wakes_a_consumer_that_waits(blobs: Blobs) -> None:
    path = blobs.paths[0]
    stream = DiskStream(whole(path, SIZES[0], 8192), ring=make_ring(8192), slab_bytes=8192)
    held = next(stream)
    with in_thread(lambda: next(stream)) as raised:
        stream.close()
    assert "closed after 1 of 37 reads" in str(raised[0])
    held.release()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_in_the_middle_ends_with_an_error_and_not_as_if_complete(
    blobs: Blobs, taken: int
) -> None:
    path = blobs.paths[0]
    stream = DiskStream(whole(path, SIZES[0], 4096), ring=make_ring(2**15), slab_bytes=4096)
    for _ in range(taken):
        next(stream).release()
    stream.close()
    stream.close()
    with pytest.raises(LeadlineError, match=f"closed after {taken} of 74 reads"):
        next(stream)


def test_close_from_several_threads_returns_in_each(blobs: Blobs) -> None:
    path = blobs.paths[0]
    stream = DiskStream(whole(path, SIZES[0], 4096), ring=make_ring(2**15), slab_bytes=4096)
    with in_thread(stream.close), in_thread(stream.close), in_thread(stream.close):
        stream.close()


def test_closed_after_the_last_slab_is_complete(blobs: Blobs) -> None:
    path = blobs.paths[0]
    stream = DiskStream([Extent(path=path, begin=0, end=9)], ring=make_ring(4096), slab_bytes=4096)
    next(stream)
    stream.close()
    assert list(stream) == []


@pytest.mark.parametrize(("begin", "end"), [(4095, 12_289), (0, 8193), (1, 8193), (8191, 16_385)])
def test_extent_whose_pages_the_ring_does_not_hold_is_refused(
    blobs: Blobs, begin: int, end: int
) -> None:
    extent = Extent(path=blobs.paths[0], begin=begin, end=end)
    with pytest.raises(UsageError, match=r"ring holds 8,192; .* --host-pool-mib"):
        DiskStream([extent], ring=make_ring(8192), slab_bytes=4096)


@pytest.mark.parametrize(("begin", "end"), [(-1, 5), (6, 5)])
def test_extent_that_cannot_be_is_refused(blobs: Blobs, begin: int, end: int) -> None:
    extent = Extent(path=blobs.paths[0], begin=begin, end=end)
    with pytest.raises(UsageError, match="cannot be read"):
        DiskStream([extent], ring=make_ring(8192), slab_bytes=4096)


def test_ring_off_a_page_or_of_other_type_is_refused() -> None:
    for ring in (make_ring(8192)[1:], make_ring(8192).view(torch.int8)):
        with pytest.raises(UsageError, match="read ring"):
            DiskStream([], ring=ring, slab_bytes=4096)


def test_no_threads_are_refused() -> None:
    with pytest.raises(UsageError, match="0 reading threads"):
        DiskStream([], ring=make_ring(8192), slab_bytes=4096, threads=0)


@given(
    spans=spans,
    max_gap=st.sampled_from([0, 1, 5000, 10**6]),
    max_bytes=st.sampled_from([1, 4096, 9000, 65_536]),
)
@settings(max_examples=150, deadline=None)
def test_coalesce_covers_every_byte_in_order_and_keeps_to_its_limits(
    blobs: Blobs, spans: list[tuple[int, int, int]], max_gap: int, max_bytes: int
) -> None:
    extents = sorted(extents_of(blobs, spans), key=lambda e: (e.path, e.begin))
    pieces = coalesce(extents, max_gap=max_gap, max_bytes=max_bytes)
    assert all(0 < pages_of(p) <= max(page_floor(max_bytes), PAGE_BYTES) for p in pieces)
    for before, after in pairwise(pieces):
        assert before.path != after.path or before.end <= after.begin or before.tag != after.tag
    for extent in extents:
        inside = [
            (max(p.begin, extent.begin), min(p.end, extent.end))
            for p in pieces
            if p.path == extent.path and p.tag == extent.tag
        ]
        assert sum(max(0, end - begin) for begin, end in inside) == extent.num_bytes
    read = sum(p.num_bytes for p in pieces)
    assert read <= sum(e.num_bytes for e in extents) + max_gap * len(extents)


def test_coalesce_keeps_extents_that_go_back_in_their_file() -> None:
    spans = [(8192, 8292), (0, 100), (100, 200)]
    extents = [Extent(path=Path("a"), begin=begin, end=end) for begin, end in spans]
    pieces = coalesce(extents, max_gap=10**6, max_bytes=2**20)
    assert [(piece.begin, piece.end) for piece in pieces] == [(8192, 8292), (0, 200)]


def test_coalesce_keeps_files_and_tags_apart() -> None:
    first, second = Path("a"), Path("b")
    extents = [
        Extent(path=first, begin=0, end=10, tag=1),
        Extent(path=first, begin=10, end=20, tag=1),
        Extent(path=first, begin=20, end=30, tag=2),
        Extent(path=second, begin=30, end=40, tag=2),
    ]
    assert [
        (e.path, e.begin, e.end, e.tag) for e in coalesce(extents, max_gap=0, max_bytes=4096)
    ] == [
        (first, 0, 20, 1),
        (first, 20, 30, 2),
        (second, 30, 40, 2),
    ]


@pytest.mark.gpu
def test_slabs_released_after_their_copies_land_whole_on_the_device(
    blobs: Blobs,
) -> None:
    path = blobs.paths[0]
    extents = whole(path, SIZES[0], 8192)
    target = torch.zeros(SIZES[0], dtype=torch.uint8, device="cuda")
    with HostPool(2**16, pinned=True) as pool:
        copies = torch.cuda.Stream()
        with DiskStream(extents, ring=pool.take(3 * 8192), slab_bytes=8192) as stream:
            for slab in stream:
                with torch.cuda.stream(copies):
                    where = target[slab.extent.begin : slab.extent.end]
                    where.copy_(slab.data, non_blocking=True)
                    slab.release(after=copies.record_event())
    assert target.cpu().numpy().tobytes() == blobs.contents[path]
