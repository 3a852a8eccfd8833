"""Grams against float64, on the CPU and, where there is one, on a CUDA device."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from leadline.tap.gram import GramSum, GroupedGramSum, packed_length

from .grams import full_gram, offsets_of, packed_gram, packed_grams, relative_error

TOLERANCE = 1e-5  # BUGS-tap: "Equal"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


def random_rows(n: int, width: int, *, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator).to(device)


def narrow_rows(n: int) -> Tensor:
    """Width 64, mean 3, spread 0.01: sums whose every addend has the same sign and size."""
    return 3 + 0.01 * random_rows(n, 64)


def leave_nan_behind(device: str) -> None:
    """Free blocks of several sizes that hold NaN, for the next allocations to find."""
    sizes = [64 * 64, 6 * 128 * 128, 6 * packed_length(64), 1_000_000]
    blocks = [torch.full((size,), float("nan"), device=device) for size in sizes for _ in range(3)]
    del blocks


@every_device
def test_t16_million_rows_in_batches_of_37_lose_no_digits(device: str) -> None:
    rows = narrow_rows(1_000_000)
    sums = GramSum(64, device=device)
    for part in rows.to(device).split(37):
        sums.add(part)
    assert sums.rows == 1_000_000
    assert relative_error(sums.packed(), packed_gram(rows)) < TOLERANCE


@every_device
def test_t16_two_runs_give_the_same_bits(device: str) -> None:
    rows = narrow_rows(50_000).to(device)
    found = []
    for _ in range(2):
        sums = GramSum(64, device=device)
        for part in rows.split(3_700):
            sums.add(part)
        found.append(sums.packed())
    assert torch.equal(*found)


@every_device
def test_t86_empty_groups_over_recycled_nan_stay_exactly_zero(device: str) -> None:
    offsets = offsets_of((150, 0, 2500, 400, 0, 90), device)
    rows = random_rows(3140, 64, device=device)
    wanted = packed_grams(rows, offsets)
    for _ in range(100 if device == "cuda" else 3):
        leave_nan_behind(device)
        sums = GroupedGramSum(6, 64, device=device)
        sums.add(rows, offsets)
        found = sums.packed().cpu()
        assert not found[[1, 4]].any()
        assert max(map(relative_error, found, wanted)) < TOLERANCE


@every_device
@every_dtype
def test_t87_rows_behind_the_last_offset_take_no_part(device: str, dtype: torch.dtype) -> None:
    rows = random_rows(100, 64, device=device).to(dtype)
    rows[96:] = float("nan")
    offsets = offsets_of((50, 46), device)
    sums = GroupedGramSum(2, 64, device=device)
    sums.add(rows, offsets)
    assert not sums.nonfinite_groups().any()
    assert sums.counts.tolist() == [50, 46]
    assert relative_error(sums.packed(), packed_grams(rows, offsets)) < TOLERANCE


@every_device
@every_dtype
def test_t88_ill_conditioned_rows_in_50_batches_keep_their_small_directions(
    device: str, dtype: torch.dtype
) -> None:
    scale = torch.logspace(0, -3, 64)  # of the rows: 1e6 between the Gram's eigenvalues
    rows = (random_rows(5000, 64) * scale).to(dtype)
    sums = GroupedGramSum(1, 64, device=device)
    for part in rows.to(device).split(100):
        sums.add(part, offsets_of((100,), device))
    found = sums.packed()
    assert found.dtype == torch.float32
    assert relative_error(found, packed_grams(rows, offsets_of((5000,)))) < TOLERANCE
    eigenvalues = torch.linalg.eigvalsh(full_gram(found[0], 64))
    assert eigenvalues[0] > -1e-6 * eigenvalues[-1]
    assert eigenvalues[0] > 0.5e-6 * eigenvalues[-1], "the smallest direction was lost"


def test_t88_sums_rounded_to_bf16_would_be_found() -> None:
    rows = random_rows(500, 64)
    assert relative_error(packed_gram(rows).bfloat16(), packed_gram(rows)) > 100 * TOLERANCE


@every_device
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_t09_nonfinite_row_marks_its_group_alone(device: str, bad: float) -> None:
    rows = random_rows(120, 64, device=device)
    rows[45, 63] = bad
    sums = GroupedGramSum(4, 64, device=device)
    offsets = offsets_of((40, 40, 0, 40), device)
    sums.add(rows, offsets)
    sums.add(random_rows(120, 64, device=device, seed=1), offsets)
    assert sums.nonfinite_groups().tolist() == [False, True, False, False]
    assert sums.packed()[[0, 2, 3]].isfinite().all()


@every_device
def test_nonfinite_single_gram_is_told(device: str) -> None:
    sums = GramSum(64, device=device)
    sums.add(random_rows(40, 64, device=device))
    assert not sums.nonfinite()
    sums.add(torch.full((1, 64), float("nan"), device=device))
    assert sums.nonfinite()


@every_device
def test_t05_rows_of_zeros_count_and_leave_the_gram_zero(device: str) -> None:
    sums = GroupedGramSum(2, 64, device=device)
    sums.add(torch.zeros(30, 64, device=device), offsets_of((10, 20), device))
    assert sums.counts.tolist() == [10, 20]
    assert not sums.packed().any()


@every_device
@pytest.mark.parametrize("width", [1, 31, 96, 128, 200, 257])
def test_grouped_any_width_equals_float64(device: str, width: int) -> None:
    rows = random_rows(300, width, device=device).bfloat16()
    offsets = offsets_of((1, 0, 170, 129), device)
    sums = GroupedGramSum(4, width, device=device)
    sums.add(rows, offsets)
    found = sums.packed()
    assert found.shape == (4, width * (width + 1) // 2)
    assert max(map(relative_error, found, packed_grams(rows, offsets))) < TOLERANCE


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=1, max_size=4),
    behind=st.integers(0, 3),
)
def test_grouped_any_batches_conserve_rows_and_sum_to_the_whole(
    batches: list[list[int]], behind: int
) -> None:
    sums = GroupedGramSum(5, 6, device="cpu")
    parts: list[list[Tensor]] = [[] for _ in range(5)]
    for number, sizes in enumerate(batches):
        rows = random_rows(sum(sizes) + behind, 6, seed=number)
        sums.add(rows, offsets_of(sizes))
        for group, part in enumerate(rows[: sum(sizes)].split(sizes)):
            parts[group].append(part)
    assert sums.counts.tolist() == [sum(column) for column in zip(*batches, strict=True)]
    wanted = [packed_gram(torch.cat(group)) for group in parts]
    assert max(map(relative_error, sums.packed(), wanted)) < TOLERANCE


@hypothesis_settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_single_any_batches_sum_to_the_whole(sizes: list[int]) -> None:
    rows = random_rows(sum(sizes), 7)
    sums = GramSum(7, device="cpu")
    for part in rows.split(sizes):
        sums.add(part)
    assert sums.rows == sum(sizes)
    assert relative_error(sums.packed(), packed_gram(rows)) < TOLERANCE


@every_device
def test_grouped_part_of_the_groups_lands_where_it_belongs(device: str) -> None:
    rows = random_rows(30, 64, device=device)
    sums = GroupedGramSum(5, 64, device=device)
    sums.add(rows, offsets_of((10, 20), device), first_group=2)
    assert sums.counts.tolist() == [0, 0, 10, 20, 0]
    assert sums.packed().any(dim=1).tolist() == [False, False, True, True, False]


@every_device
def test_packed_range_of_groups_equals_that_part_of_all(device: str) -> None:
    sums = GroupedGramSum(4, 64, device=device)
    sums.add(random_rows(40, 64, device=device), offsets_of((10, 5, 20, 5), device))
    out = torch.full((2, packed_length(64)), float("nan"), device=device)
    assert sums.packed(out, groups=range(1, 3)) is out
    assert torch.equal(out, sums.packed()[1:3])


@every_device
def test_clear_leaves_no_trace(device: str) -> None:
    grouped = GroupedGramSum(2, 64, device=device)
    grouped.add(torch.full((3, 64), float("nan"), device=device), offsets_of((1, 2), device))
    grouped.clear()
    single = GramSum(64, device=device)
    single.add(random_rows(3, 64, device=device))
    single.clear()
    assert single.rows == 0
    assert not grouped.counts.any()
    assert not grouped.packed().any()
    assert not single.packed().any()


@every_device
def test_rows_with_gaps_between_them_sum_like_dense_ones(device: str) -> None:
    wide = random_rows(50, 200, device=device)
    for rows in (wide[:, 3:67], wide[:, ::3][:, :64], wide[::2, :64]):
        sums = GramSum(64, device=device)
        sums.add(rows)
        assert relative_error(sums.packed(), packed_gram(rows)) < TOLERANCE


@every_device
def test_rows_of_a_graph_are_summed_outside_it(device: str) -> None:
    rows = random_rows(50, 64, device=device).requires_grad_()
    sums = GramSum(64, device=device)
    sums.add(rows)
    assert not sums.packed().requires_grad


def test_offsets_that_fall_or_pass_the_rows_are_refused_on_the_cpu() -> None:
    sums = GroupedGramSum(2, 4, device="cpu")
    for offsets in ([0, 3, 2], [0, 3, 11], [-1, 3, 4]):
        with pytest.raises(AssertionError, match="offsets"):
            sums.add(random_rows(10, 4), torch.tensor(offsets, dtype=torch.int32))
    assert not sums.counts.any()


@pytest.mark.gpu
@pytest.mark.parametrize("carry", [True, False])
def test_experts_of_a_real_size_equal_float64(carry: bool) -> None:
    sizes = [500 + 17 * (group % 31) for group in range(64)]
    sizes[3] = sizes[63] = 0
    rows = random_rows(sum(sizes), 768, device="cuda").bfloat16()
    offsets = offsets_of(sizes, "cuda")
    sums = GroupedGramSum(64, 768, device="cuda", carry=carry)
    sums.add(rows, offsets)
    sums.add(rows, offsets)
    found = sums.packed().double()
    assert sums.counts.tolist() == [2 * size for size in sizes]
    row, column = torch.triu_indices(768, 768, device="cuda")
    for group, (begin, size) in enumerate(zip(offsets.tolist(), sizes, strict=False)):
        wide = rows[begin : begin + size].double()
        wanted = 2 * (wide.T @ wide)[row, column]
        assert (found[group] - wanted).norm() <= TOLERANCE * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2048, 2880])
def test_single_gram_of_a_real_size_equals_float64(width: int) -> None:
    rows = (random_rows(20_000, width, device="cuda") + 1).bfloat16()
    sums = GramSum(width, device="cuda")
    sums.add(rows[:16_000])
    sums.add(rows[16_000:])
    row, column = torch.triu_indices(width, width, device="cuda")
    wide = rows.double()
    wanted = (wide.T @ wide)[row, column]
    assert (sums.packed().double() - wanted).norm() <= TOLERANCE * wanted.norm()


@pytest.mark.gpu
def test_add_does_not_wait_for_the_device() -> None:
    sums = GroupedGramSum(8, 128, device="cuda")
    rows = random_rows(800, 128, device="cuda").bfloat16()
    offsets = offsets_of([100] * 8, "cuda")
    for _ in range(2):  # compiled, and index tables made, the first time
        sums.add(rows, offsets)
        sums.packed()
        sums.nonfinite_groups()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums.add(rows, offsets)
        sums.packed()
        sums.nonfinite_groups()
    finally:
        torch.cuda.set_sync_debug_mode("default")
