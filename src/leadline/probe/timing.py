"""The timed loop: warm-up apart, two half windows, synchronised at every border.

The host may run two steps ahead of the device, as a training loop that logs the loss
of the step before last does; it then neither starves the device nor fills the launch
queue with minutes of work that a deadline could not stop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from leadline.core.errors import UsageError
from leadline.core.rate import Timing, Window
from leadline.probe.clock import Clock

Step = Callable[[], int]
"""Takes one step and returns the tokens of the batch it really consumed."""
_STEPS_AHEAD = 2
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """How long to measure: a number of steps or of seconds, exactly one of them."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Refuse both, neither, or a span without two halves."""
        if (self.steps is None) == (self.seconds is None):
            raise UsageError("a probe is timed by steps or by seconds: give exactly one of them")
        if self.steps is not None and self.steps < 2:
            raise UsageError(f"a probe of {self.steps} steps has no two halves; give at least 2")
        if self.seconds is not None and self.seconds <= 0:
            raise UsageError(f"a probe of {self.seconds} seconds is empty; give more than 0")


def measure(
    step: Step,
    clock: Clock,
    *,
    warmup_steps: int,
    span: Span,
    on_step: Callable[[str, int], None] = lambda _phase, _done: None,
    before_window: Callable[[], None] = lambda: None,
) -> Timing:
    """Run *step* through warm-up and window, and return what was measured.

    Args:
        step: one optimiser step.
        clock: the device's clock.
        warmup_steps: left out of the rate and reported apart; compilation falls in here.
        span: length of the window.
        on_step: told the phase and the steps done in it; must not touch the device.
        before_window: called between warm-up and window, to reset counters.
    """
    clock.sync()
    start_ns = clock.now_ns()
    for done in range(warmup_steps):
        step()
        on_step("warm-up", done + 1)
    clock.sync()
    warmup_ns = clock.now_ns() - start_ns
    before_window()

    total = span.steps or 0
    counts = (total // 2, total - total // 2)
    half_ns = None if span.seconds is None else round(span.seconds * _NS_PER_S / 2)
    first, first_steps = _half(step, clock, counts[0], half_ns, on_step, 0)
    second, second_steps = _half(step, clock, counts[1], half_ns, on_step, first.steps)
    return Timing(
        warmup_steps=warmup_steps,
        warmup_ns=warmup_ns,
        halves=(first, second),
        step_ns=(*first_steps, *second_steps),
    )


def _half(
    step: Step,
    clock: Clock,
    steps: int,
    half_ns: int | None,
    on_step: Callable[[str, int], None],
    done_before: int,
) -> tuple[Window, list[int]]:
    clock.sync()
    start_ns = clock.now_ns()
    marks: list[Any] = [clock.mark()]
    tokens = 0
    while _goes_on(len(marks) - 1, steps, clock.now_ns() - start_ns, half_ns):
        tokens += step()
        marks.append(clock.mark())
        if len(marks) > _STEPS_AHEAD:
            clock.wait(marks[-1 - _STEPS_AHEAD])
        on_step("timed", done_before + len(marks) - 1)
    clock.sync()
    wall_ns = clock.now_ns() - start_ns
    each = [clock.between_ns(a, b) for a, b in pairwise(marks)]
    window = Window(tokens=tokens, steps=len(each), wall_ns=wall_ns, device_ns=sum(each))
    return window, each


def _goes_on(done: int, steps: int, elapsed_ns: int, half_ns: int | None) -> bool:
    if half_ns is None:
        return done < steps
    return done == 0 or elapsed_ns < half_ns
