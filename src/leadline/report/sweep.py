"""The sweep as the report shows it: one card a point, bars over all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from leadline.report import numerals
from leadline.report.facts import Facts
from leadline.report.step_strip import draw_strip
from leadline.report.sweep_chart import Bar, MemoryBar, draw_memory, draw_throughput

State = Literal["chosen", "ok", "bad"]
_STATES_IN_WORDS = {"oom": "out of memory", "rejected": "rejected", "failed": "failed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PointView:
    """One sweep point."""

    name: str
    shape: str
    state: State
    status: str
    why: str
    tok_s: str
    interval: str
    figures: tuple[tuple[str, str], ...]
    strip: Markup


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepView:
    """Everything the template prints about the sweep."""

    points: tuple[PointView, ...]
    throughput_chart: Markup
    memory_chart: Markup
    limit_percent: float
    best_cfg: str
    reasons: tuple[tuple[str, str], ...]
    """Point and why it was taken or not, as the choice recorded it."""


def sweep_view(
    points: Mapping[str, Facts],
    choice: Facts,
    reasons: Mapping[str, str],
    limit_percent: float,
) -> SweepView:
    """Read the evidence of every point, in sweep order; *reasons* are their sentences."""
    best = choice.text("best_cfg")
    bars = [_bar(name, data, best) for name, data in points.items()]
    memory = [_memory_bar(name, data) for name, data in points.items()]
    return SweepView(
        points=tuple(
            _point(index, name, data, best, reasons.get(name, ""))
            for index, (name, data) in enumerate(points.items())
        ),
        throughput_chart=draw_throughput(bars) if bars else Markup(),
        memory_chart=draw_memory(memory, limit_percent) if memory else Markup(),
        limit_percent=limit_percent,
        best_cfg=best,
        reasons=tuple((name, reason.text()) for name, reason in choice.pairs("reasons")),
    )


def _shape(data: Facts) -> str:
    batch, length = data.integer("micro_batch"), data.integer("seq_len")
    return "" if batch is None or length is None else f"{batch} {numerals.TIMES} {length}"


def _status(data: Facts) -> str:
    return data.text("status") or "failed"


def _bar(name: str, data: Facts, best: str) -> Bar:
    return Bar(
        name=name,
        shape=_shape(data),
        value=data.number("tok_s"),
        low=data.number("tok_s_low"),
        high=data.number("tok_s_high"),
        chosen=bool(best) and name == best,
        status=_STATES_IN_WORDS.get(_status(data), ""),
    )


def _memory_bar(name: str, data: Facts) -> MemoryBar:
    return MemoryBar(
        name=name,
        percent=_memory_percent(data),
        allocator_bytes=data.number("memory", "allocator_peak_bytes"),
        device_bytes=data.number("memory", "device_peak_bytes"),
        total_bytes=data.number("memory", "device_total_bytes"),
        out_of_memory=_status(data) == "oom",
    )


def _memory_percent(data: Facts) -> float | None:
    percent = data.number("memory", "percent")
    if percent is not None:
        return percent
    peak = data.number("memory", "device_peak_bytes")
    total = data.number("memory", "device_total_bytes")
    return 100 * peak / total if peak is not None and total else None


def _point(index: int, name: str, data: Facts, best: str, reason: str) -> PointView:
    status = _status(data)
    state: State = "ok" if status == "ok" else "bad"
    if state == "ok" and name == best:
        state = "chosen"
    low, high = data.number("tok_s_low"), data.number("tok_s_high")
    interval = "" if low is None or high is None else f"{numerals.rate(low)} to "
    return PointView(
        name=name,
        shape=_shape(data),
        state=state,
        status="chosen" if state == "chosen" else _STATES_IN_WORDS.get(status, status),
        why=data.text("why") or reason,
        tok_s=numerals.rate(data.number("tok_s")),
        interval=interval and interval + numerals.rate(high),
        figures=_figures(data),
        strip=draw_strip(data.series("step_ns"), f"strip-{index}", name),
    )


def _figures(data: Facts) -> tuple[tuple[str, str], ...]:
    norm, memory, evaluation = data.at("grad_norm"), data.at("memory"), data.at("eval")
    lines = [
        ("Timed", _timed(data)),
        ("Tokens", _tokens(data)),
        ("Warm-up", _warm_up(data)),
        ("Half windows", _halves(data)),
        ("Utilisation", _utilisation(data)),
        ("Recompiles", numerals.count(data.number("recompiles"))),
        ("Throttled", ", ".join(item.text() for item in data.items("throttled")) or "no"),
        (
            "Gradient norm",
            f"{numerals.decimal(norm.number('mean'), 3)} {numerals.PLUS_MINUS} "
            f"{numerals.decimal(norm.number('std'), 3)}, "
            f"max {numerals.decimal(norm.number('max'), 3)}",
        ),
        (
            "Loss",
            f"{numerals.decimal(data.number('loss', 'first'), 3)} to "
            f"{numerals.decimal(data.number('loss', 'last'), 3)}",
        ),
        (
            "Peak memory",
            _peak_memory(memory),
        ),
        ("Allocator retries", numerals.count(memory.number("allocator_retries"))),
        ("Eval", _evaluation(evaluation)),
        (
            "Checkpoint",
            f"{numerals.size(data.number('checkpoint', 'bytes'))} in "
            f"{numerals.seconds(data.number('checkpoint', 'seconds'))}",
        ),
        (
            "Process",
            f"{data.text('pid') or numerals.DASH}, "
            f"{numerals.seconds(data.number('process_seconds'))} in all",
        ),
    ]
    if data.number("tok_s") is None:
        lines = [line for line in lines if line[0] in ("Peak memory", "Eval", "Process")]
    return tuple(lines)


def _peak_memory(memory: Facts) -> str:
    device, allocator = memory.number("device_peak_bytes"), memory.number("allocator_peak_bytes")
    if device is None and allocator is None:
        return numerals.DASH
    return f"{numerals.size(device)} device, {numerals.size(allocator)} allocator"


def _timed(data: Facts) -> str:
    wall_ns = data.number("wall_ns")
    wall_s = None if wall_ns is None else wall_ns / 1e9
    return f"{numerals.count(data.number('steps'))} steps, {numerals.seconds(wall_s)}"


def _tokens(data: Facts) -> str:
    pass_number = data.number("epochs") or 1
    again = f", into pass {numerals.count(pass_number)} over the data" if pass_number > 1 else ""
    return numerals.count(data.number("tokens")) + again


def _warm_up(data: Facts) -> str:
    steps = numerals.count(data.number("warmup_steps"))
    return f"{steps} steps, {numerals.seconds(data.number('warmup_seconds'))}, not counted"


def _utilisation(data: Facts) -> str:
    share = data.number("mfu", "percent")
    if share is None:
        return data.text("mfu", "why") or numerals.DASH
    return f"{numerals.percent(share)} of the datasheet peak"


def _halves(data: Facts) -> str:
    halves = data.series("halves")
    if len(halves) != 2 or halves[0] is None or halves[1] is None:
        return numerals.DASH
    mean = (halves[0] + halves[1]) / 2
    apart = abs(halves[0] - halves[1]) / abs(mean) * 100 if mean else None
    return (
        f"{numerals.rate(halves[0])} and {numerals.rate(halves[1])}, "
        f"{numerals.percent(apart)} apart"
    )


def _evaluation(evaluation: Facts) -> str:
    if evaluation.value is None:
        return numerals.DASH
    text = f"batch {numerals.count(evaluation.number('batch'))}, "
    text += f"{numerals.count(evaluation.number('batches'))} batches"
    status = evaluation.text("status")
    return text + (f", {status}" if status and status != "ok" else "")
