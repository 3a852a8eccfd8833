import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.rate import (
    Timing,
    Window,
    difference_percent,
    interval_95,
    timing_problems,
    tok_s_floor,
)

SECOND = 1_000_000_000
counts = st.integers(1, 2**40)


def _window(tokens=1000, wall_ns=SECOND, device_ns=None, steps=10):
    return Window(
        tokens=tokens,
        steps=steps,
        wall_ns=wall_ns,
        device_ns=wall_ns if device_ns is None else device_ns,
    )


def _timing(first=None, second=None, step_ns=(SECOND // 10,) * 20):
    return Timing(
        warmup_steps=0,
        warmup_ns=0,
        halves=(first or _window(), second or _window()),
        step_ns=tuple(step_ns),
    )


@settings(deadline=None, max_examples=100)
@given(tokens=counts, wall_ns=counts)
def test_tok_s_of_any_window_is_exact(tokens, wall_ns):
    assert _window(tokens, wall_ns).tok_s * wall_ns == tokens * SECOND


@settings(deadline=None, max_examples=100)
@given(tokens=counts, wall_ns=counts)
def test_floor_of_any_window_is_below_the_truth_by_less_than_one(tokens, wall_ns):
    window = _window(tokens, wall_ns)
    assert 0 <= window.tok_s - tok_s_floor(window) < 1


def test_floor_beyond_float_precision_is_still_exact():
    tokens = 2**53 + 1
    assert tok_s_floor(_window(tokens, SECOND)) == tokens


def test_whole_of_a_timing_is_both_halves():
    whole = _timing(_window(1, 2, 3, 4), _window(10, 20, 30, 40)).whole
    assert (whole.tokens, whole.wall_ns, whole.device_ns, whole.steps) == (11, 22, 33, 44)


def test_interval_of_a_hand_computed_case_matches():
    # Ten stretches of two steps with means 95 and 105, five each: mean 100, standard deviation
    # sqrt(10 * 25 / 9) = 5.2705, error 5.2705 / sqrt(10) * 2.262 = 3.7700, share 0.037700.
    steps = [90, 100] * 5 + [100, 110] * 5
    low, high = interval_95(_timing(step_ns=steps))
    assert (low, high) == (pytest.approx(1000 / 1.0377), pytest.approx(1000 / 0.9623))


def test_interval_of_equal_steps_is_the_rate_itself():
    assert interval_95(_timing()) == (1000.0, 1000.0)


@pytest.mark.parametrize("count", [11, 19, 20, 27, 109])
def test_interval_counts_every_step_to_the_last(count):
    steps = [100] * (count - 1) + [200]
    low, high = interval_95(_timing(step_ns=steps))
    assert low < 1000 < high


def test_interval_of_one_step_says_nothing():
    assert interval_95(_timing(step_ns=[100])) == (0.0, math.inf)


def test_interval_wider_than_the_mean_has_no_upper_end():
    low, high = interval_95(_timing(step_ns=[1, 1000]))
    assert low < 1000
    assert high == math.inf


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=60))
def test_interval_of_any_steps_holds_the_rate(step_ns):
    low, high = interval_95(_timing(step_ns=step_ns))
    assert low <= 1000.0 <= high


@pytest.mark.parametrize(
    ("first", "second", "percent"),
    [(100, 97, 3), (97, 100, 3), (5, 5, 0), (0, 0, 0), (0, 7, 100)],
)
def test_difference_is_a_share_of_the_larger(first, second, percent):
    assert difference_percent(first, second) == percent


def test_difference_of_large_numbers_is_exact():
    assert difference_percent(10**18, 10**18 - 1) == Fraction(100, 10**18)


def test_halves_exactly_at_the_limit_are_steady():
    timing = _timing(_window(1000), _window(970))
    assert timing_problems(timing, steady_percent=Fraction(3)) == []


def test_halves_beyond_the_limit_are_named_with_both_rates():
    timing = _timing(_window(1000), _window(969))
    (problem,) = timing_problems(timing, steady_percent=Fraction(3))
    assert "3.1 %" in problem
    assert "1000 and 969 tok/s" in problem


@pytest.mark.parametrize(("which", "device_percent"), [("first", 103), ("second", 97)])
def test_clocks_that_differ_in_one_half_are_named(which, device_percent):
    odd = _window(device_ns=SECOND * device_percent // 100)
    halves = (odd, _window()) if which == "first" else (_window(), odd)
    (problem,) = timing_problems(_timing(*halves), steady_percent=Fraction(3))
    assert f"{which} half" in problem
    assert f"{odd.device_ns} ns" in problem


def test_clocks_exactly_two_percent_apart_pass():
    timing = _timing(_window(device_ns=SECOND * 98 // 100))
    assert timing_problems(timing, steady_percent=Fraction(3)) == []


def test_all_problems_of_a_timing_are_told_at_once():
    timing = _timing(_window(device_ns=1), _window(tokens=10, device_ns=1))
    assert len(timing_problems(timing, steady_percent=Fraction(3))) == 3
