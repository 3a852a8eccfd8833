"""The rate meter: tokens over nanoseconds, and how far to trust the quotient.

Pure arithmetic. The rate is tokens really consumed over wall time between two device
synchronisations; the interval comes from batch means, because neighbouring steps are
not independent; steadiness compares the two halves of the window.
"""

import math
import statistics
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

_NS_PER_S = 1_000_000_000
_BATCHES = 10
# Student's t, two-sided 95 %, for 1 to 9 degrees of freedom (any table).
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One timed stretch between two synchronisations."""

    tokens: int
    steps: int
    wall_ns: int
    device_ns: int
    """The same stretch on the device's own clock."""

    @property
    def tok_s(self) -> Fraction:
        """Exact tokens per second."""
        return Fraction(self.tokens * _NS_PER_S, self.wall_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """A measured run: warm-up apart, two half windows, every step's time kept."""

    warmup_steps: int
    warmup_ns: int
    halves: tuple[Window, Window]
    step_ns: tuple[int, ...]
    """Device time of each timed step."""

    @property
    def whole(self) -> Window:
        """Both halves as one window."""
        first, second = self.halves
        return Window(
            tokens=first.tokens + second.tokens,
            steps=first.steps + second.steps,
            wall_ns=first.wall_ns + second.wall_ns,
            device_ns=first.device_ns + second.device_ns,
        )


def tok_s_floor(window: Window) -> int:
    """Whole tokens per second, rounded down: a budget may not be made of luck."""
    return math.floor(window.tok_s)


def interval_95(timing: Timing) -> tuple[float, float]:
    """95 % confidence interval of tok/s from the means of ten consecutive stretches."""
    rate = float(timing.whole.tok_s)
    count = len(timing.step_ns)
    stretches = min(_BATCHES, count)
    # Borders, not a size: the stretches cover the window to its last step.
    borders = [number * count // stretches for number in range(stretches + 1)]
    means = [statistics.fmean(timing.step_ns[a:b]) for a, b in pairwise(borders)]
    if len(means) < 2:
        return 0.0, math.inf
    centre = statistics.fmean(means)
    error = statistics.stdev(means) / math.sqrt(len(means)) * _T_95[len(means) - 2]
    share = error / centre
    return rate / (1 + share), rate / (1 - share) if share < 1 else math.inf


def difference_percent(first: Fraction | int, second: Fraction | int) -> Fraction:
    """|first - second| over the larger, in percent, exact."""
    larger = max(Fraction(first), Fraction(second))
    return Fraction(0) if larger == 0 else abs(Fraction(first) - second) * 100 / larger


def timing_problems(
    timing: Timing, *, steady_percent: Fraction, cross_check_percent: Fraction = Fraction(2)
) -> list[str]:
    """Why the rate must not be used; empty when it may.

    Args:
        timing: what was measured.
        steady_percent: the halves may differ by this much.
        cross_check_percent: wall clock and device clock may differ by this much; more
            means the clock was stopped before the work was done.
    """
    problems = []
    for name, half in zip(("first", "second"), timing.halves, strict=True):
        gap = difference_percent(half.wall_ns, half.device_ns)
        if gap > cross_check_percent:
            problems.append(
                f"wall and device clock differ by {float(gap):.1f} % in the {name} half "
                f"({half.wall_ns} ns against {half.device_ns} ns), above "
                f"{float(cross_check_percent):g} %: the clock was read before the work was done"
            )
    first, second = timing.halves
    drift = difference_percent(first.tok_s, second.tok_s)
    if drift > steady_percent:
        problems.append(
            f"the halves differ by {float(drift):.1f} % ({float(first.tok_s):.0f} and "
            f"{float(second.tok_s):.0f} tok/s), above {float(steady_percent):g} %: not steady"
        )
    return problems
