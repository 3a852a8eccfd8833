import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.probe.rowerror import SATURATED, lost_elements, row_error


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    share=st.floats(1e-4, 0.5),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e20, 1e37]),
)
def test_row_error_of_scaled_rows_is_the_scale_at_any_size(
    seed: int, share: float, scale: float
) -> None:
    reference = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) * scale
    error = row_error(reference, reference * (1 + share), 0.5)
    # The guard of small rows takes a little off, never adds.
    assert 0.95 * share <= error <= share * 1.001


def test_row_error_of_equal_tensors_is_zero() -> None:
    assert row_error(torch.ones(4, 4), torch.ones(4, 4), 0.9) == 0.0


def test_row_error_few_rows_far_off_are_below_the_quantile() -> None:
    reference = torch.randn(100, 8)
    other = reference.clone()
    other[:9] = torch.randn(9, 8)
    assert row_error(reference, other, 0.90) == 0.0
    assert row_error(reference, other, 0.98) > 0.5


def test_row_error_noise_in_a_zero_row_is_measured_against_typical_rows() -> None:
    reference = torch.ones(100, 8)
    reference[:50] = 0
    other = reference + 1e-3
    assert row_error(reference, other, 1.0) < 0.02


@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (3, 0)])
def test_row_error_of_odd_shapes_is_defined(shape: tuple[int, ...]) -> None:
    assert row_error(torch.ones(shape), torch.ones(shape), 0.9) == 0.0


def test_row_error_something_in_place_of_zeros_is_saturated() -> None:
    assert row_error(torch.zeros(4, 4), torch.ones(4, 4), 0.9) == SATURATED


def test_row_error_equal_masks_count_as_equal() -> None:
    reference = torch.tensor([[1.0, -math.inf, torch.finfo(torch.float32).min]])
    other = torch.tensor([[1.0, -math.inf, -math.inf]])
    assert row_error(reference, other, 0.9) == 0.0
    assert lost_elements(reference, other) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_lost_elements_counts_what_bf16_could_have_held(value: float) -> None:
    reference = torch.tensor([1.0, 2.0, 3.3e38])
    other = torch.tensor([value, 2.0, value])
    assert lost_elements(reference, other) == 2
