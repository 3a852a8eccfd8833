"""Budget arithmetic and checkpoint cost as the report shows them."""

from collections.abc import Callable
from dataclasses import dataclass

from leadline.report import numerals
from leadline.report.facts import Facts

Figure = tuple[str, str, str]
"""Label, value, remark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticLine:
    """One step of the derivation."""

    name: str
    formula: str
    numbers: str
    result: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetView:
    """The derivation and what came out of it."""

    lines: tuple[ArithmeticLine, ...]
    figures: tuple[Figure, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """A share of a limit, drawn as a bar."""

    label: str
    text: str
    percent: float
    over: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointView:
    """Cadence, size and what saving costs."""

    figures: tuple[Figure, ...]
    meters: tuple[Meter, ...]


def budget_view(data: Facts) -> BudgetView:
    """Read the evidence `budget`."""
    lines = tuple(
        ArithmeticLine(
            name=item.text("name") or numerals.DASH,
            formula=item.text("formula"),
            numbers=item.text("numbers"),
            result=item.text("result") or numerals.DASH,
        )
        for item in data.items("arithmetic")
    )
    available = numerals.count(data.number("data_tokens"))
    figures = (
        (
            "Locked tokens",
            numerals.count(data.number("locked_budget_tokens")),
            f"limited by {data.text('limited_by') or numerals.DASH}",
        ),
        (
            "Total steps",
            numerals.count(data.number("total_steps")),
            f"{numerals.count(data.number('tokens_in_steps'))} tokens in whole steps",
        ),
        ("Tokens the data holds", available, "from the manifest"),
        (
            "Window",
            f"{data.text('window_hours') or numerals.DASH} h",
            f"{data.text('reserve_hours') or numerals.DASH} h reserved, "
            f"utilisation {data.text('utilisation') or numerals.DASH}",
        ),
    )
    return BudgetView(lines=lines, figures=figures)


def checkpoint_view(data: Facts) -> CheckpointView:
    """Read the evidence `checkpoint`."""
    measured, estimated = data.number("measured_bytes"), data.number("estimated_bytes")
    free, needed = data.number("free_bytes"), data.number("needed_bytes")
    overhead, limit = data.number("overhead_seconds_per_10min"), data.number("limit_seconds")
    figures = (
        (
            "Cadence",
            f"{numerals.count(data.number('cadence_steps'))} steps",
            f"and every {numerals.seconds(data.number('cadence_seconds'))}",
        ),
        (
            "Checkpoint",
            numerals.size(measured),
            f"measured; first estimate {numerals.size(estimated)}",
        ),
        ("Time to write", numerals.seconds(data.number("measured_seconds")), "measured"),
        ("Free disk", numerals.size(free), f"needed {numerals.size(needed)}"),
        (
            "Cost per 10 min",
            numerals.seconds(overhead),
            f"limit {numerals.seconds(limit)}, checkpoints and eval",
        ),
    )
    meters = (
        _meter("Disk needed of disk free", needed, free, numerals.size),
        _meter("Saving and eval of the time allowed", overhead, limit, numerals.seconds),
    )
    return CheckpointView(figures=figures, meters=tuple(m for m in meters if m is not None))


def _meter(
    label: str, part: float | None, whole: float | None, show: Callable[[float], str]
) -> Meter | None:
    if part is None or whole is None or whole <= 0 or part < 0:
        return None
    percent = 100 * part / whole
    return Meter(
        label=label,
        text=f"{show(part)} of {show(whole)}",
        percent=min(percent, 100.0),
        over=percent > 100,
    )
