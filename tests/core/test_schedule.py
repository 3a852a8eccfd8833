"""The learning rate depends on the step alone, and ends where the lock ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.core.errors import LockError, UsageError
from leadline.core.schedule import Schedule


def test_g31_a_step_beyond_the_lock_has_no_rate() -> None:
    locked = Schedule(peak=6e-4, warmup_steps=100, total_steps=900)
    locked.rate(900)
    with pytest.raises(LockError, match=r"step 901.*locked 900"):
        locked.rate(901)


def test_g31_a_resumed_run_gets_the_first_runs_rate_to_the_last_bit() -> None:
    first = Schedule(peak=6e-4, warmup_steps=100, total_steps=900)
    seen = [first.rate(step) for step in range(1, 901)]
    resumed = Schedule(peak=6e-4, warmup_steps=100, total_steps=900)
    assert [resumed.rate(step) for step in range(600, 901)] == seen[599:]


def test_g31_another_horizon_is_another_schedule() -> None:
    short = Schedule(peak=6e-4, warmup_steps=100, total_steps=900)
    long = Schedule(peak=6e-4, warmup_steps=100, total_steps=1_500)
    assert short.rate(600) != long.rate(600)


def test_warm_up_is_linear_from_the_first_step_to_the_peak() -> None:
    schedule = Schedule(peak=1.0, warmup_steps=4)
    assert [schedule.rate(step) for step in (1, 2, 3, 4, 5, 9)] == [0.25, 0.5, 0.75, 1, 1, 1]


def test_no_warm_up_starts_at_the_peak() -> None:
    assert Schedule(peak=0.5, warmup_steps=0).rate(1) == 0.5


@given(total=st.integers(2, 5_000), data=st.data())
def test_rate_never_rises_after_the_warm_up_and_ends_at_the_final_share(
    total: int, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, total - 1))
    schedule = Schedule(peak=1.0, warmup_steps=warmup, total_steps=total)
    step = data.draw(st.integers(warmup + 1, total))
    assert schedule.rate(total) == pytest.approx(0.1)
    assert schedule.rate(total) <= schedule.rate(step) <= 1.0


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(UsageError, match="900 steps does not end within 900"):
        Schedule(peak=1.0, warmup_steps=900, total_steps=900)


def test_step_zero_does_not_exist() -> None:
    with pytest.raises(UsageError, match="steps start at 1"):
        Schedule(peak=1.0, warmup_steps=1).rate(0)
