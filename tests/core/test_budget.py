from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.budget import (
    OVERHEAD_LIMIT_NS,
    BudgetInputs,
    checkpoint_estimate_bytes,
    checkpoints_in_ten_minutes,
    compute_budget,
    disk_needed_bytes,
    overhead_per_ten_minutes,
)
from leadline.core.errors import UsageError

_S = 10**9


def _inputs(**changes):
    given = {"tok_s": 120_000, "window_hours": "8", "micro_batch": 64, "seq_len": 512}
    return BudgetInputs(**{**given, **changes})


def test_budget_of_the_worked_example_has_every_figure_of_the_seed():
    budget = compute_budget(_inputs())
    assert budget.productive_seconds == "26100"
    assert budget.training_seconds == "22185"
    assert budget.budget_tokens == 2_662_200_000
    assert budget.locked_budget_tokens == 2_662_200_000
    assert budget.total_steps == 81_243
    assert budget.tokens_in_steps == 2_662_170_624
    assert budget.limited_by == "window"


def test_budget_arithmetic_lists_every_step_with_its_numbers():
    steps = {step.name: step for step in compute_budget(_inputs()).steps}
    assert steps["productive seconds"].numbers == "(8 - 0.75) x 3600"
    assert steps["training seconds"].numbers == "26100 x 0.85"
    assert steps["budget tokens"].numbers == "floor(120,000 x 22185)"
    assert steps["budget tokens"].result == "2,662,200,000 tokens"
    assert steps["locked tokens"].numbers == "min(2,662,200,000, no limit)"
    assert steps["total steps"].numbers == "floor(2,662,200,000 / (64 x 512))"
    assert steps["tokens in steps"].result == "2,662,170,624 tokens"


def test_budget_with_less_data_than_window_is_limited_by_data():
    budget = compute_budget(_inputs(data_tokens=1_000_000))
    assert (budget.locked_budget_tokens, budget.limited_by) == (1_000_000, "data")
    assert budget.total_steps == 30


def test_budget_with_exactly_enough_data_is_limited_by_the_window():
    assert compute_budget(_inputs(data_tokens=2_662_200_000)).limited_by == "window"


def test_budget_of_a_decimal_a_float_cannot_hold_is_exact():
    # 1 tok/s x 0.1 h x 3600 s = 360; the float product 0.1 * 3 - 0.2 is not 0.1.
    exact = compute_budget(
        _inputs(
            tok_s=1, window_hours="0.3", reserve_hours="0.2", utilisation="1", micro_batch=1,
            seq_len=1,
        )
    )  # fmt: skip
    assert (exact.productive_seconds, exact.budget_tokens) == ("360", 360)


@pytest.mark.parametrize("window", ["8", Decimal("8.0"), 8, Decimal("0.8E1")])
def test_budget_of_the_same_window_written_differently_is_the_same(window):
    assert compute_budget(_inputs(window_hours=window)).budget_tokens == 2_662_200_000


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window_hours": "0.75"}, "0.75 h is not longer than its reserve of 0.75 h"),
        ({"window_hours": "0.5"}, "0.5 h"),
        ({"window_hours": "-8"}, "-8"),
        ({"window_hours": 8.0}, "not a float"),
        ({"window_hours": "nan"}, "nan"),
        ({"window_hours": Decimal("Infinity")}, "Infinity"),
        ({"window_hours": "1/3"}, "1/3"),
        ({"window_hours": "\u0668"}, "give a decimal"),
        ({"window_hours": True}, "True"),
        ({"utilisation": "0"}, "utilisation is 0"),
        ({"utilisation": "1.01"}, "1.01"),
        ({"tok_s": 0}, "tok_s is 0"),
        ({"tok_s": 120_000.0}, "120000.0"),
        ({"tok_s": True}, "True"),
        ({"micro_batch": -1}, "micro_batch is -1"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"data_tokens": 0}, "data_tokens is 0"),
        ({"data_tokens": 32_767}, "32,767 tokens are less than one step of 64x512 = 32,768"),
        ({"tok_s": 10**15}, "more than a lock can hold"),
    ],
)
def test_budget_of_unusable_figures_is_refused_with_the_figure(changes, named):
    with pytest.raises(UsageError) as caught:
        compute_budget(_inputs(**changes))
    assert named in str(caught.value)


_HOURS = st.decimals("0.76", "200", places=3)


@given(tok_s=st.integers(1000, 10**7), hours=_HOURS, share=st.decimals("0.1", "1", places=4))
@settings(max_examples=60, deadline=None)
def test_budget_is_the_floor_of_the_exact_product(tok_s, hours, share):
    inputs = _inputs(tok_s=tok_s, window_hours=hours, utilisation=share, micro_batch=1, seq_len=1)
    exact = tok_s * (Fraction(hours) - Fraction("0.75")) * 3600 * Fraction(share)
    tokens = compute_budget(inputs).budget_tokens
    assert tokens <= exact < tokens + 1
    assert type(tokens) is int


@given(tok_s=st.integers(1000, 10**6), more=st.integers(0, 10**6), hours=_HOURS)
@settings(max_examples=60, deadline=None)
def test_budget_never_shrinks_when_the_rate_grows(tok_s, more, hours):
    slow, fast = (
        compute_budget(_inputs(tok_s=rate, window_hours=hours, micro_batch=1, seq_len=1))
        for rate in (tok_s, tok_s + more)
    )
    assert slow.locked_budget_tokens <= fast.locked_budget_tokens
    assert slow.total_steps <= fast.total_steps


@given(data=st.integers(4096, 10**10), batch=st.integers(1, 64), seq=st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_budget_steps_never_exceed_data_and_waste_less_than_a_batch(data, batch, seq):
    budget = compute_budget(_inputs(data_tokens=data, micro_batch=batch, seq_len=seq))
    assert budget.locked_budget_tokens <= data
    left = budget.locked_budget_tokens - budget.tokens_in_steps
    assert 0 <= left < batch * seq


@given(hours=st.decimals("0.8", "100", places=6))
@settings(max_examples=40, deadline=None)
def test_productive_seconds_text_is_exact(hours):
    text = compute_budget(_inputs(window_hours=hours)).productive_seconds
    assert Fraction(text) == (Fraction(hours) - Fraction("0.75")) * 3600


@pytest.mark.parametrize(
    ("model_bytes", "estimate"), [(0, 0), (1, 4), (2, 7), (558_800_000, 1_955_800_000)]
)
def test_checkpoint_estimate_is_three_and_a_half_times_rounded_up(model_bytes, estimate):
    assert checkpoint_estimate_bytes(model_bytes) == estimate


def test_disk_needed_is_six_checkpoints():
    assert disk_needed_bytes(7) == 42


@pytest.mark.parametrize(
    ("step_ns", "count"),
    [
        (_S, 2 + 1),  # 500 s apart: a stretch of 600 s can meet two
        (1_200_000_000, 1 + 1),  # exactly 600 s apart
        (73_000_000, 17 + 1),  # 36.5 s apart
        (3600 * _S, 1 + 1),
    ],
)
def test_checkpoints_in_ten_minutes_adds_both_cadences(step_ns, count):
    assert checkpoints_in_ten_minutes(step_ns) == count


def test_checkpoints_in_ten_minutes_with_a_longer_time_cadence_still_counts_one():
    assert checkpoints_in_ten_minutes(3600 * _S, every_seconds=7200) == 2


def test_overhead_counts_checkpoint_and_eval_each_time():
    assert overhead_per_ten_minutes(_S, 4 * _S, 2 * _S) == 3 * 6 * _S


def test_overhead_limit_is_what_the_utilisation_leaves_of_ten_minutes():
    assert Fraction("0.15") * 600 * _S == OVERHEAD_LIMIT_NS


@pytest.mark.parametrize("costs", [(0, 1, 1), (1, -1, 1), (1, 1, -1), (1.5, 1, 1), (1, 1.0, 1)])
def test_overhead_of_unusable_figures_is_refused(costs):
    with pytest.raises(UsageError):
        overhead_per_ten_minutes(*costs)


@given(step=st.integers(1, 10**13), cost=st.integers(0, 10**12))
@settings(max_examples=50, deadline=None)
def test_overhead_is_never_below_the_exact_average(step, cost):
    exact = Fraction(600 * _S, 500 * step) * cost + cost
    assert exact <= overhead_per_ten_minutes(step, cost, 0)
