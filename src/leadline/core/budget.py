"""Token budget and checkpoint arithmetic: exact, and rounded in one place.

Rounding rule
- Rates, tokens, bytes and nanoseconds are integers; hours and utilisation are decimals
  given as text, so that 7.3 means 7.3. Floats are refused.
- Every product is an exact fraction. It is cut down to a whole number (floor, never to
  nearest) once, at the end: tokens once, steps once. The budget is therefore never more
  than what was measured. A checkpoint's size is the one figure rounded up, because it
  guards disk space.

The formulas are the seed's:

    productive seconds = (window - reserve) x 3600
    training seconds   = productive seconds x utilisation
    budget tokens      = floor(tok/s x training seconds)
    locked tokens      = min(budget tokens, tokens the data holds)
    total steps        = floor(locked tokens / (micro-batch x sequence length))
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import floor
from typing import Literal

from leadline.core.errors import UsageError
from leadline.core.units import format_count

CHECKPOINT_EVERY_STEPS = 500
CHECKPOINT_EVERY_S = 600
OVERHEAD_LIMIT_NS = 90_000_000_000
"""Per 600 s; derived: utilisation 0.85 leaves (1 - 0.85) x 600 s for checkpoints and eval."""
DISK_FACTOR = 6

_DECIMAL = re.compile(r"\d{1,9}(\.\d{1,18})?", re.ASCII)
_MAX_SAFE_INTEGER = 2**53 - 1  # what the lock, being canonical JSON, can hold
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetInputs:
    """What a budget is computed from."""

    tok_s: int
    """Measured tokens per second of the chosen configuration, already floored."""
    window_hours: Decimal | str | int
    reserve_hours: Decimal | str | int = "0.75"
    """Startup, packing and evaluation, taken off the window."""
    utilisation: Decimal | str | int = "0.85"
    """Share of productive time spent training; the rest is checkpoints and eval."""
    micro_batch: int
    seq_len: int
    data_tokens: int | None = None
    """Tokens the manifest holds times the epochs allowed; None when data cannot run out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticStep:
    """One line of the arithmetic, to be printed and logged before the lock is written."""

    name: str
    formula: str
    numbers: str
    result: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A token budget and how it came about."""

    productive_seconds: str
    """Window less reserve; exact decimal string."""
    training_seconds: str
    """What utilisation leaves of them; exact decimal string."""
    budget_tokens: int
    locked_budget_tokens: int
    total_steps: int
    tokens_in_steps: int
    """Tokens that total_steps really consume; at most one batch less than locked."""
    limited_by: Literal["window", "data"]
    steps: tuple[ArithmeticStep, ...]


def compute_budget(inputs: BudgetInputs) -> Budget:
    """Compute the budget of a run.

    Raises:
        UsageError: a figure that is not positive or not exact, a window no longer than its
            reserve, or a budget too small for one step.
    """
    window, reserve, utilisation = _checked_decimals(inputs)
    _refuse_unusable_counts(inputs)
    productive_s = (window - reserve) * 3600
    training_s = productive_s * utilisation
    budget_tokens = floor(inputs.tok_s * training_s)
    if budget_tokens > _MAX_SAFE_INTEGER:
        raise UsageError(
            f"{format_count(inputs.tok_s)} tok/s for {inputs.window_hours} h is "
            f"{format_count(budget_tokens)} tokens, more than a lock can hold; check both figures"
        )
    locked = budget_tokens
    if inputs.data_tokens is not None:
        locked = min(budget_tokens, inputs.data_tokens)
    batch_tokens = inputs.micro_batch * inputs.seq_len
    total_steps = locked // batch_tokens
    if total_steps == 0:
        raise UsageError(
            f"{format_count(locked)} tokens are less than one step of {inputs.micro_batch}x"
            f"{inputs.seq_len} = {format_count(batch_tokens)} tokens; "
            "give more data, a longer window or a smaller batch"
        )
    return Budget(
        productive_seconds=_decimal_text(productive_s),
        training_seconds=_decimal_text(training_s),
        budget_tokens=budget_tokens,
        locked_budget_tokens=locked,
        total_steps=total_steps,
        tokens_in_steps=total_steps * batch_tokens,
        limited_by="data" if locked < budget_tokens else "window",
        steps=_arithmetic(inputs, productive_s, training_s, budget_tokens, locked),
    )


def checkpoint_estimate_bytes(model_bytes: int) -> int:
    """First estimate of a checkpoint: model bytes x 3.5, rounded up.

    Weights, gradients and two optimiser states at the model's own precision, cited from
    the seed; one real checkpoint is measured before the lock is written.
    """
    return -(-model_bytes * 7 // 2)


def disk_needed_bytes(checkpoint_bytes: int) -> int:
    """Free disk a run must find: six checkpoints."""
    return DISK_FACTOR * checkpoint_bytes


def checkpoints_in_ten_minutes(
    step_ns: int,
    every_steps: int = CHECKPOINT_EVERY_STEPS,
    every_seconds: int = CHECKPOINT_EVERY_S,
) -> int:
    """Checkpoints that both cadences together can cause within 600 s of training.

    A stretch of 600 s meets at most ceil(600 s / period) ticks of a cadence. The two are
    counted apart and added, as if neither timer were reset by the other's checkpoint, and
    time spent saving is not taken off; both make the count an upper bound.

    Raises:
        UsageError: a figure that is not a positive integer.
    """
    _refuse_nonpositive(step_ns=step_ns, every_steps=every_steps, every_seconds=every_seconds)
    stretch_ns = 600 * _NS_PER_S
    by_steps = -(-stretch_ns // (every_steps * step_ns))
    by_time = -(-600 // every_seconds)
    return by_steps + by_time


def overhead_per_ten_minutes(
    step_ns: int,
    checkpoint_ns: int,
    eval_ns: int,
    every_steps: int = CHECKPOINT_EVERY_STEPS,
    every_seconds: int = CHECKPOINT_EVERY_S,
) -> int:
    """Nanoseconds that checkpoints, each with one eval, cost within 600 s of training.

    The utilisation of 0.85 holds only while this is below `OVERHEAD_LIMIT_NS`.

    Raises:
        UsageError: a negative cost, or a cadence that is not a positive integer.
    """
    for name, value in (("checkpoint_ns", checkpoint_ns), ("eval_ns", eval_ns)):
        if type(value) is not int or value < 0:
            raise UsageError(f"{name} is {value!r}; give a whole number of nanoseconds, 0 or more")
    count = checkpoints_in_ten_minutes(step_ns, every_steps, every_seconds)
    return count * (checkpoint_ns + eval_ns)


def _checked_decimals(inputs: BudgetInputs) -> tuple[Fraction, Fraction, Fraction]:
    window = exact_decimal("window_hours", inputs.window_hours)
    reserve = exact_decimal("reserve_hours", inputs.reserve_hours)
    utilisation = exact_decimal("utilisation", inputs.utilisation)
    if window <= reserve:
        raise UsageError(
            f"the window of {inputs.window_hours} h is not longer than its reserve of "
            f"{inputs.reserve_hours} h; nothing is left to train in, so give a longer window"
        )
    if not 0 < utilisation <= 1:
        raise UsageError(f"utilisation is {inputs.utilisation}; give more than 0 and at most 1")
    return window, reserve, utilisation


def _refuse_unusable_counts(inputs: BudgetInputs) -> None:
    _refuse_nonpositive(tok_s=inputs.tok_s, micro_batch=inputs.micro_batch, seq_len=inputs.seq_len)
    if inputs.data_tokens is not None:
        _refuse_nonpositive(data_tokens=inputs.data_tokens)


def _refuse_nonpositive(**counts: int) -> None:
    for name, value in counts.items():
        if type(value) is not int or value <= 0:
            raise UsageError(f"{name} is {value!r}; give a whole number above 0")


def exact_decimal(name: str, value: Decimal | str | int) -> Fraction:
    """The decimal as a fraction; what is written is what counts."""
    text = format(value, "f") if isinstance(value, Decimal) else value
    if type(value) is int:
        text = str(value)
    if not isinstance(text, str) or not _DECIMAL.fullmatch(text):
        raise UsageError(
            f"{name} is {value}; give a decimal as text, like 7.3, not negative and not a float"
        )
    return Fraction(text)


def _decimal_text(value: Fraction) -> str:
    """Exact decimal text of a fraction whose denominator divides a power of ten."""
    digits = 0
    while value.denominator != 1 and (value * 10**digits).denominator != 1:
        digits += 1
    scaled = int(value * 10**digits)
    if digits == 0:
        return str(scaled)
    whole, part = divmod(scaled, 10**digits)
    return f"{whole}.{part:0{digits}d}"


def _arithmetic(
    inputs: BudgetInputs,
    productive_s: Fraction,
    training_s: Fraction,
    budget_tokens: int,
    locked: int,
) -> tuple[ArithmeticStep, ...]:
    productive, training = _decimal_text(productive_s), _decimal_text(training_s)
    batch_tokens = inputs.micro_batch * inputs.seq_len
    total_steps = locked // batch_tokens
    data = "no limit" if inputs.data_tokens is None else format_count(inputs.data_tokens)
    rows = (
        (
            "productive seconds",
            "(window_hours - reserve_hours) x 3600",
            f"({inputs.window_hours} - {inputs.reserve_hours}) x 3600",
            f"{productive} s",
        ),
        (
            "training seconds",
            "productive_seconds x utilisation",
            f"{productive} x {inputs.utilisation}",
            f"{training} s",
        ),
        (
            "budget tokens",
            "floor(tok_s x training_seconds)",
            f"floor({format_count(inputs.tok_s)} x {training})",
            f"{format_count(budget_tokens)} tokens",
        ),
        (
            "locked tokens",
            "min(budget_tokens, data_tokens)",
            f"min({format_count(budget_tokens)}, {data})",
            f"{format_count(locked)} tokens",
        ),
        (
            "total steps",
            "floor(locked_budget_tokens / (micro_batch x seq_len))",
            f"floor({format_count(locked)} / ({inputs.micro_batch} x {inputs.seq_len}))",
            f"{format_count(total_steps)} steps",
        ),
        (
            "tokens in steps",
            "total_steps x micro_batch x seq_len",
            f"{format_count(total_steps)} x {inputs.micro_batch} x {inputs.seq_len}",
            f"{format_count(total_steps * batch_tokens)} tokens",
        ),
    )
    return tuple(
        ArithmeticStep(name=name, formula=formula, numbers=numbers, result=result)
        for name, formula, numbers, result in rows
    )
