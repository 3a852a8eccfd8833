"""The host pool: what it hands out, what it refuses, and pinning on a device."""

import resource
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import EnvironmentUnfitError, UsageError
from leadline.rig.host_pool import HostPool

pieces = st.tuples(st.integers(0, 5000), st.sampled_from([1, 16, 512, 4096]))


@given(pieces=st.lists(pieces, max_size=20))
@settings(max_examples=50, deadline=None)
def test_take_gives_aligned_pieces_that_do_not_overlap(pieces: list[tuple[int, int]]) -> None:
    with HostPool(20 * 8192, pinned=False) as pool:
        taken = [pool.take(size, align) for size, align in pieces]
        spans = []
        for tensor, (size, align) in zip(taken, pieces, strict=True):
            assert tensor.dtype == torch.uint8
            assert tensor.numel() == size
            if size:
                assert tensor.data_ptr() % align == 0
                spans.append((tensor.data_ptr(), tensor.data_ptr() + size))
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert pool.taken_bytes + pool.free_bytes == pool.num_bytes


def test_take_of_the_whole_pool_is_writable_to_its_last_byte() -> None:
    with HostPool(12_345, pinned=False) as pool:
        memory = pool.take(12_345)
        memory[-1] = 7
        assert memory[-1].item() == 7
        assert pool.free_bytes == 0


def test_take_beyond_the_pool_is_refused_with_the_size_that_would_do() -> None:
    with HostPool(2**20, pinned=False) as pool:
        pool.take(2**20 - 4096)
        with pytest.raises(UsageError, match=r"8,192 bytes .* 4,096 free; give --host-pool-mib 2 "):
            pool.take(8192)
        assert pool.take(4096).numel() == 4096


@pytest.mark.parametrize(("size", "align"), [(-1, 4096), (8, 0), (8, 3), (8, 8192)])
def test_take_of_impossible_pieces_is_refused(size: int, align: int) -> None:
    with HostPool(2**16, pinned=False) as pool, pytest.raises(UsageError, match="aligned to"):
        pool.take(size, align)


@pytest.mark.parametrize("size", [0, -5])
def test_pool_without_bytes_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match="--host-pool-mib 1"):
        HostPool(size, pinned=False)


@pytest.mark.parametrize("size", [2**62, 2**80])
def test_pool_beyond_the_address_space_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match="no room for a host pool"):
        HostPool(size, pinned=False)


def test_pool_not_written_to_costs_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with HostPool(2**33, pinned=False) as pool:
        pool.take(2**33)
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown_bytes < 2**30


def test_tensors_outlive_the_pool() -> None:
    pool = HostPool(2**16, pinned=False)
    memory = pool.take(2**16).fill_(3)
    pool.close()
    pool.close()
    assert memory.sum().item() == 3 * 2**16
    with pytest.raises(UsageError, match="closed"):
        pool.take(1)


def test_pinned_pool_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentUnfitError, match="needs a CUDA device"):
        HostPool(2**16, pinned=True)


@pytest.mark.gpu
def test_pinned_pool_gives_pinned_tensors_until_closed() -> None:
    pool = HostPool(2**24, pinned=True)
    memory = pool.take(2**22)
    assert pool.pinned
    assert memory.is_pinned()
    memory.fill_(9)
    copy = memory.to("cuda", non_blocking=True)
    pool.close()
    assert not memory.is_pinned()
    assert copy.eq(9).all().item()


@pytest.mark.gpu
def test_pool_is_pinned_anew_after_closing_another() -> None:
    for _ in range(3):
        with HostPool(2**24, pinned=True) as pool:
            assert pool.take(2**24).is_pinned()
