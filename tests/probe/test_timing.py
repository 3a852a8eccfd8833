"""The timed loop on a fake device whose work is queued, not done, when a launch returns."""

from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import UsageError
from leadline.core.rate import timing_problems, tok_s_floor
from leadline.probe.timing import Span, measure

MS = 1_000_000
SECOND = 1000 * MS
BATCH_TOKENS = 64 * 512
STEADY = Fraction(3)


@dataclass
class FakeDevice:
    """A Clock and a step: launches take host time, work takes device time behind it."""

    launch_ns: int
    work_ns: list[int]
    """Of each step; the last one goes on for ever."""
    broken_syncs: tuple[int, ...] = ()
    """Numbers of the `sync` calls, from 1, that return at once."""
    host_ns: int = 0
    done_ns: int = 0
    steps: int = 0
    calls: list[str] = field(default_factory=list)

    def step(self):
        self.calls.append("step")
        self.host_ns += self.launch_ns
        work_ns = self.work_ns[min(self.steps, len(self.work_ns) - 1)]
        self.done_ns = max(self.done_ns, self.host_ns) + work_ns
        self.steps += 1
        return BATCH_TOKENS

    def now_ns(self):
        return self.host_ns

    def sync(self):
        self.calls.append("sync")
        if self.calls.count("sync") not in self.broken_syncs:
            self.host_ns = max(self.host_ns, self.done_ns)

    def mark(self):
        return max(self.host_ns, self.done_ns)

    def wait(self, mark):
        self.host_ns = max(self.host_ns, mark)

    def between_ns(self, start, end):
        return end - start


def _measure(device, warmup_steps=2, **span):
    return measure(device.step, device, warmup_steps=warmup_steps, span=Span(**span))


def test_g01_launches_that_return_at_once_are_timed_to_their_end():
    timing = _measure(FakeDevice(launch_ns=MS, work_ns=[50 * MS]), steps=20)
    assert tok_s_floor(timing.whole) == pytest.approx(655_360, rel=0.02)
    assert tok_s_floor(timing.whole) < 700_000
    assert timing_problems(timing, steady_percent=STEADY) == []


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 49), st.integers(50, 500), st.integers(2, 60))
def test_g01_no_queue_makes_a_rate_faster_than_the_device(launch_ms, work_ms, steps):
    timing = _measure(FakeDevice(launch_ns=launch_ms * MS, work_ns=[work_ms * MS]), steps=steps)
    assert timing.whole.tok_s <= Fraction(BATCH_TOKENS * 1000, work_ms)


@pytest.mark.parametrize("steps", [4, 20, 50])
def test_g02_clock_stopped_before_the_work_is_done_is_told(steps):
    # Calls 4 and 6 end the halves; the others begin something.
    device = FakeDevice(launch_ns=MS, work_ns=[50 * MS], broken_syncs=(4, 6))
    problems = timing_problems(_measure(device, steps=steps), steady_percent=STEADY)
    told = [text for text in problems if "the clock was read before the work was done" in text]
    assert ["first" in told[0], "second" in told[1]] == [True, True]


def test_g02_every_border_of_the_window_is_synchronised():
    device = FakeDevice(launch_ns=MS, work_ns=[50 * MS])
    _measure(device, warmup_steps=1, steps=4)
    half = ["sync", "step", "step", "sync"]
    assert device.calls == ["sync", "step", "sync", *half, *half]


def test_g03_warm_up_counts_in_neither_tokens_nor_time():
    device = FakeDevice(launch_ns=0, work_ns=[5 * SECOND] * 10 + [SECOND // 10])
    timing = _measure(device, warmup_steps=10, steps=50)
    assert timing.whole.tok_s == 327_680
    assert (timing.whole.tokens, timing.whole.steps) == (50 * BATCH_TOKENS, 50)
    assert timing.whole.wall_ns == 5 * SECOND


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 12), st.integers(2, 40), st.integers(1, 100))
def test_g03_any_warm_up_leaves_the_rate_alone(warmup_steps, steps, slow):
    device = FakeDevice(launch_ns=0, work_ns=[slow * SECOND] * warmup_steps + [SECOND // 10])
    timing = _measure(device, warmup_steps=warmup_steps, steps=steps)
    assert timing.whole.tok_s == 327_680
    assert timing.warmup_ns == warmup_steps * slow * SECOND


def test_g04_compilation_is_reported_apart_from_the_rate():
    work = [40 * SECOND] + [3 * SECOND // 10] * 9 + [SECOND // 10]
    timing = _measure(FakeDevice(launch_ns=0, work_ns=work), warmup_steps=10, seconds=60)
    assert timing.whole.tok_s == 327_680
    assert timing.warmup_ns == 40 * SECOND + 27 * SECOND // 10
    assert timing.warmup_steps == 10


def test_g04_two_runs_with_other_compile_times_agree():
    rates = [
        _measure(FakeDevice(launch_ns=MS, work_ns=[first * SECOND, 100 * MS]), seconds=60)
        for first in (5, 90)
    ]
    assert rates[0].whole.tok_s == pytest.approx(float(rates[1].whole.tok_s), rel=0.01)


def test_g04_warm_up_too_short_for_compilation_is_not_steady():
    work = [40 * SECOND, SECOND // 10]
    timing = _measure(FakeDevice(launch_ns=0, work_ns=work), warmup_steps=0, steps=20)
    (problem,) = timing_problems(timing, steady_percent=STEADY)
    assert "not steady" in problem


def test_timing_by_seconds_ends_each_half_after_its_share():
    timing = _measure(FakeDevice(launch_ns=MS, work_ns=[100 * MS]), seconds=10)
    assert [half.wall_ns for half in timing.halves] == [pytest.approx(5 * SECOND, abs=300 * MS)] * 2


def test_timing_by_seconds_takes_a_step_a_half_even_when_one_is_longer():
    timing = _measure(FakeDevice(launch_ns=7 * SECOND, work_ns=[0]), seconds=2)
    assert [half.steps for half in timing.halves] == [1, 1]


def test_timing_of_an_odd_count_takes_every_step():
    timing = _measure(FakeDevice(launch_ns=0, work_ns=[MS]), steps=7)
    assert [half.steps for half in timing.halves] == [3, 4]
    assert len(timing.step_ns) == 7


def test_timing_keeps_each_step_of_the_device():
    work = [10 * MS, 20 * MS, 30 * MS, 40 * MS]
    timing = _measure(FakeDevice(launch_ns=0, work_ns=work), warmup_steps=0, steps=4)
    assert timing.step_ns == tuple(work)


def test_host_runs_two_steps_ahead_of_the_device_at_most():
    device = FakeDevice(launch_ns=0, work_ns=[SECOND])
    behind = []
    measure(
        device.step,
        device,
        warmup_steps=0,
        span=Span(steps=20),
        on_step=lambda *_: behind.append(device.done_ns - device.host_ns),
    )
    assert max(behind) == 2 * SECOND


def test_tokens_are_those_the_steps_say_they_consumed():
    device = FakeDevice(launch_ns=0, work_ns=[MS])
    short = iter([100, 100, 100, 7])

    def step():
        device.step()
        return next(short)

    timing = measure(step, device, warmup_steps=0, span=Span(steps=4))
    assert timing.whole.tokens == 307


def test_progress_tells_warm_up_and_window_apart():
    device, told = FakeDevice(launch_ns=0, work_ns=[MS]), []
    measure(
        device.step,
        device,
        warmup_steps=2,
        span=Span(steps=3),
        on_step=lambda *item: told.append(item),
        before_window=lambda: told.append("window"),
    )
    warm = [("warm-up", 1), ("warm-up", 2), "window"]
    assert told == [*warm, ("timed", 1), ("timed", 2), ("timed", 3)]


@pytest.mark.parametrize(
    "span",
    [{}, {"steps": 2, "seconds": 1.0}, {"steps": 1}, {"steps": 0}, {"seconds": 0}, {"seconds": -1}],
)
def test_span_without_one_measure_of_two_halves_is_refused(span):
    with pytest.raises(UsageError, match="probe"):
        Span(**span)
