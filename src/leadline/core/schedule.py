"""The learning rate as a function of the step and nothing else.

A rate that depends on how long a run happens to be resumed for is how a finished run
starts learning again with a schedule nobody chose. Under a lock the horizon is
`total_steps`, and a step beyond it has no rate.
"""

import math
from dataclasses import dataclass

from leadline.core.errors import LockError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear warm-up from zero, then cosine decay to `final_share` of the peak."""

    peak: float
    warmup_steps: int
    total_steps: int | None = None
    """Locked horizon; None for a measurement, which warms up and then holds the peak."""
    final_share: float = 0.1

    def __post_init__(self) -> None:
        """Refuse a warm-up that never ends."""
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise UsageError(
                f"warm-up of {self.warmup_steps} steps does not end within {self.total_steps} "
                "steps; shorten warmup_steps"
            )

    def rate(self, step: int) -> float:
        """Learning rate of *step*, from 1.

        Raises:
            LockError: *step* lies beyond the locked horizon.
        """
        if step < 1:
            raise UsageError(f"step {step} does not exist; steps start at 1")
        if self.total_steps is not None and step > self.total_steps:
            raise LockError(
                f"step {step} lies beyond the locked {self.total_steps} steps and has no learning "
                "rate; a longer run needs a new gate and a new lock"
            )
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.total_steps is None:
            return self.peak
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.peak * (self.final_share + (1 - self.final_share) * cosine)
