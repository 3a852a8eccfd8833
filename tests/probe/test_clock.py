import pytest
import torch

from leadline.probe.clock import CudaClock, HostClock, clock_for

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_clock_of_a_cpu_is_the_host():
    assert isinstance(clock_for(torch.device("cpu")), HostClock)


def test_clock_of_a_cuda_device_reads_its_events():
    assert isinstance(clock_for(torch.device("cuda")), CudaClock)


def test_host_clock_never_goes_backwards():
    clock = HostClock()
    times = [clock.now_ns() for _ in range(100)]
    assert times == sorted(times)


def test_host_marks_lie_between_the_readings_around_them():
    clock = HostClock()
    before = clock.now_ns()
    first, second = clock.mark(), clock.mark()
    clock.sync()
    clock.wait(second)
    assert 0 <= clock.between_ns(first, second) <= clock.now_ns() - before


@pytest.mark.gpu
@needs_cuda
def test_cuda_clock_sees_work_that_the_launch_did_not_wait_for():
    clock = CudaClock()
    left = torch.randn(8192, 8192, device="cuda")
    (left @ left).sum()
    clock.sync()
    start_ns, start = clock.now_ns(), clock.mark()
    for _ in range(10):
        left @ left
    launched_ns, end = clock.now_ns() - start_ns, clock.mark()
    clock.sync()
    wall_ns = clock.now_ns() - start_ns
    assert launched_ns < wall_ns / 2
    assert clock.between_ns(start, end) == pytest.approx(wall_ns, rel=0.1)
