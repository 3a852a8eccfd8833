import ctypes
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import ProbeError
from leadline.probe import memory as memory_module
from leadline.probe.memory import (
    HostMemory,
    MemoryWatch,
    group_headroom_bytes,
    growth_problem,
    judge_memory,
    memory_of,
)

MIB = 1 << 20
GIB = 1 << 30
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class FakeMemory:
    """A device whose readings the test sets."""

    total_bytes = 80 * GIB
    noise_bytes = 0

    def __init__(self, used=0, allocated=0):
        self.used = used
        self.allocated = allocated
        self.read = threading.Event()

    def used_bytes(self):
        self.read.set()
        return self.used() if callable(self.used) else self.used

    def allocated_bytes(self):
        return self.allocated

    def allocator_peak_bytes(self):
        return self.allocated

    def allocator_retries(self):
        return 0


@pytest.fixture
def fast_sampling(monkeypatch):
    monkeypatch.setattr(memory_module, "_SAMPLE_SECONDS", 0.001)


def test_g08_peak_counts_what_the_allocator_does_not_see():
    device = FakeMemory(used=GIB // 2, allocated=0)
    with MemoryWatch(device) as watch:
        device.allocated = GIB
        device.used = GIB // 2 + GIB + 2 * GIB  # context, torch's, a raw allocation
        watch.sample()
        device.used = device.allocated = 0
    assert watch.peak_bytes == 3 * GIB + GIB // 2
    assert watch.start_bytes == GIB // 2


def test_g08_peak_between_two_samples_of_ours_is_seen_by_the_thread(fast_sampling):
    device = FakeMemory(used=GIB)
    with MemoryWatch(device) as watch:
        device.used = 5 * GIB
        device.read.clear()
        device.read.wait(10)
        device.read.clear()
        device.read.wait(10)  # the reading before it is kept by now
        device.used = GIB
    assert watch.peak_bytes == 5 * GIB


def _cuda_runtime():
    """The CUDA runtime that torch has loaded, whatever its version."""
    torch.cuda.init()
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    (path,) = {line.split()[-1] for line in lines if "libcudart" in line}
    return ctypes.CDLL(path)


@pytest.mark.gpu
@needs_cuda
def test_g08_raw_allocation_on_the_card_counts_towards_the_peak():
    device = memory_of(torch.device("cuda"))
    raw = _cuda_runtime()
    pointer = ctypes.c_void_p()
    with MemoryWatch(device) as watch:
        held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        assert raw.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(2 * GIB)) == 0
        watch.sample()
        raw.cudaFree(pointer)
    assert held.numel() == GIB
    assert watch.peak_bytes - watch.start_bytes >= 3 * GIB
    assert device.allocator_peak_bytes() < 2 * GIB


def test_g09_device_reading_rejects_what_the_allocator_would_have_passed():
    total, allocator, device = 81_920 * MIB, 65_100 * MIB, 66_400 * MIB
    verdict = judge_memory(device, total, 80)
    assert (verdict.fits, verdict.percent) == (False, "81.05")
    assert verdict.why == "peak is 81.05 % of the device, limit 80 %"
    assert judge_memory(allocator, total, 80).percent == "79.47"


@pytest.mark.parametrize(("peak", "fits"), [(799, True), (800, False), (801, False)])
def test_peak_must_lie_strictly_below_the_limit(peak, fits):
    assert judge_memory(peak, 1000, 80).fits is fits


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**50), st.integers(1, 2**50), st.integers(1, 100))
def test_memory_verdict_compares_whole_bytes(peak, total, limit):
    verdict = judge_memory(peak, total, limit)
    assert verdict.fits is (peak * 100 < total * limit)
    assert (verdict.why == "") is verdict.fits


@pytest.mark.parametrize(
    ("held", "grows"),
    [
        ([100, 100, 100], False),
        ([50, 100, 101], False),
        ([50, 10_000, 10_101], True),
        ([100, 100, 100, 100, 140], True),
        ([100, 100, 90], False),
        ([100, 900], False),
        ([0, 0, 0], False),
        ([0, 0, 5], True),
    ],
)
def test_g13_growth_past_the_second_batch_is_told(held, grows):
    problem = growth_problem(held, 0)
    assert bool(problem) is grows
    assert not grows or problem.startswith("eval memory grows")


def test_g13_growth_within_the_noise_of_the_reading_is_not_told():
    assert growth_problem([100 * MIB, 100 * MIB, 110 * MIB], 32 * MIB) == ""


def test_watch_never_takes_two_readings_at_once(fast_sampling):
    """Or the smaller could be kept last."""
    entered, overlapped = threading.Event(), []

    def used():
        if threading.current_thread().name == "memory-watch":
            entered.set()
        else:
            entered.clear()
            overlapped.append(entered.wait(0.05))  # fifty times what the thread needs
        return GIB

    with MemoryWatch(FakeMemory(used=used)) as watch:
        watch.sample()
    assert overlapped == [False, False, False]


def test_watch_that_could_not_read_on_says_so(fast_sampling):
    failed = threading.Event()

    def used():
        if threading.current_thread().name == "memory-watch":
            failed.set()
            raise RuntimeError("driver gone")
        return GIB

    with (
        pytest.raises(ProbeError, match="driver gone"),
        MemoryWatch(FakeMemory(used=used)),
    ):
        assert failed.wait(10)


def test_watch_ends_its_thread_when_the_block_fails(fast_sampling):
    with pytest.raises(ZeroDivisionError), MemoryWatch(FakeMemory(used=GIB)):
        raise ZeroDivisionError
    assert "memory-watch" not in [thread.name for thread in threading.enumerate()]


def test_host_peak_is_the_largest_resident_set():
    device = HostMemory()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    high = device.allocated_bytes()
    assert high >= block.numel()
    del block
    assert device.allocator_peak_bytes() >= high


def test_host_memory_is_this_process_against_what_it_may_have():
    device = memory_of(torch.device("cpu"))
    assert device.used_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert device.used_bytes() < device.total_bytes
    assert device.total_bytes <= psutil.virtual_memory().total
    assert device.allocator_retries() == 0


@pytest.mark.parametrize(
    ("limit", "used", "headroom"),
    [("1000\n", "400\n", 600), ("300", "400", 0), ("max\n", "400\n", sys.maxsize)],
)
def test_group_headroom_follows_the_control_groups_limit(tmp_path, limit, used, headroom):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    assert group_headroom_bytes(tmp_path) == headroom


def test_group_headroom_of_the_older_layout_is_read_too(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("500")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("100")
    assert group_headroom_bytes(tmp_path) == 400


def test_group_headroom_without_control_groups_is_no_limit(tmp_path):
    assert group_headroom_bytes(tmp_path) == sys.maxsize
