"""Bars over the sweep: tokens per second with their interval, and peak memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from leadline.report import numerals
from leadline.report.svg import Scale, box, chart, element, label, segment

_WIDTH, _LEFT, _RIGHT = 470.0, 84.0, 96.0
_TOP, _ROW, _BAR = 22.0, 46.0, 22.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Throughput of one point; `value` is None where none was measured."""

    name: str
    shape: str
    value: float | None
    low: float | None
    high: float | None
    chosen: bool
    status: str
    """Empty when the point is fine, else why it is not, in a few words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBar:
    """Peak memory of one point."""

    name: str
    percent: float | None
    allocator_bytes: float | None
    device_bytes: float | None
    total_bytes: float | None
    out_of_memory: bool


def draw_throughput(bars: Sequence[Bar]) -> Markup:
    """Horizontal bars from zero, whiskers at the 95 % interval."""
    top_value = max((max(bar.value or 0.0, bar.high or 0.0) for bar in bars), default=0.0)
    scale = Scale(0.0, top_value or 1.0, _LEFT, _WIDTH - _RIGHT)
    parts = _axis(scale, len(bars), [numerals.short_count(v) for v in _axis_values(scale)])
    for row, bar in enumerate(bars):
        parts += _throughput_row(bar, _TOP + row * _ROW, scale)
    told = "; ".join(f"{bar.name} {numerals.rate(bar.value)} tok/s {bar.status}" for bar in bars)
    return chart(
        parts,
        key="throughput",
        title="Tokens per second of each sweep point, with its 95 % interval",
        description=told,
        width=_WIDTH,
        height=_TOP + len(bars) * _ROW + 24,
    )


def draw_memory(bars: Sequence[MemoryBar], limit_percent: float) -> Markup:
    """Peak of the device as a share of its memory, the allocator's part inside it."""
    scale = Scale(0.0, 100.0, _LEFT, _WIDTH - _RIGHT)
    bottom = _TOP + len(bars) * _ROW
    parts = _axis(scale, len(bars), [f"{value:.0f}" for value in _axis_values(scale)])
    for row, bar in enumerate(bars):
        parts += _memory_row(bar, _TOP + row * _ROW, scale, limit_percent)
    x = scale(limit_percent)
    parts.append(segment("limit", x, _TOP - 4, x, bottom))
    text = f"{limit_percent:g} % limit"
    parts.append(label(x, _TOP - 9, text, cls="limit-text", anchor="middle"))
    told = "; ".join(f"{bar.name} {_memory_text(bar)}" for bar in bars)
    return chart(
        parts,
        key="memory",
        title="Peak device memory of each sweep point, in percent",
        description=told,
        width=_WIDTH,
        height=bottom + 24,
    )


def _axis_values(scale: Scale) -> list[float]:
    return numerals.ticks(scale.low, scale.high, 4)


def _axis(scale: Scale, num_rows: int, texts: list[str]) -> list[str]:
    bottom = _TOP + num_rows * _ROW
    parts = []
    for value, text in zip(_axis_values(scale), texts, strict=True):
        x = scale(value)
        parts.append(segment("grid", x, _TOP - 4, x, bottom))
        parts.append(label(x, bottom + 15, text, cls="tick", anchor="middle"))
    return parts


def _names(name: str, below: str, y: float, *, chosen: bool) -> list[str]:
    shown = name if len(name) <= 11 else name[:10] + "..."
    title = element("title", text=name)
    strong = "label strong chosen-text" if chosen else "label strong"
    return [
        element("text", title, text=shown, x=0, y=y + (10 if below else 18), cls=strong),
        label(0, y + 26, below, cls="tick") if below else "",
    ]


def _throughput_row(bar: Bar, y: float, scale: Scale) -> list[str]:
    parts = _names(bar.name, bar.shape, y, chosen=bar.chosen)
    if bar.value is None:
        parts.append(label(_LEFT + 6, y + 20, bar.status or "not measured", cls="bad-text"))
        return parts
    width = scale(bar.value) - _LEFT
    kind = "bar chosen" if bar.chosen else "bar refused" if bar.status else "bar"
    text = _throughput_text(bar)
    parts.append(box(kind, _LEFT, y + 4, max(width, 1.0), _BAR, rx=3, title=text))
    end = scale(bar.value)
    if bar.low is not None and bar.high is not None:
        parts += _whisker(scale(bar.low), scale(bar.high), y + 4 + _BAR / 2)
        end = max(end, scale(bar.high))
    strong = "value chosen-text" if bar.chosen else "value"
    parts.append(label(end + 8, y + 15, numerals.rate(bar.value), cls=strong))
    below = "chosen" if bar.chosen else bar.status
    tone = "chosen-text" if bar.chosen else "bad-text"
    parts.append(label(end + 8, y + 28, below, cls=f"tick {tone}") if below else "")
    return parts


def _whisker(low: float, high: float, y: float) -> list[str]:
    lines = [(low, high, y, y), (low, low, y - 5, y + 5), (high, high, y - 5, y + 5)]
    return [segment("whisker", x1, y1, x2, y2) for x1, x2, y1, y2 in lines]


def _memory_row(bar: MemoryBar, y: float, scale: Scale, limit_percent: float) -> list[str]:
    parts = _names(bar.name, "", y, chosen=False)
    full, top, text = scale.end - scale.start, y + 4, _memory_text(bar)
    parts.append(box("track", _LEFT, top, full, _BAR, rx=3))
    if bar.out_of_memory:
        parts.append(box("bar refused", _LEFT, top, full, _BAR, rx=3, title=text))
    if bar.out_of_memory or bar.percent is None:
        word = "out of memory" if bar.out_of_memory else "not measured"
        parts.append(label(scale.end + 8, y + 20, word, cls="tick bad-text"))
        return parts
    over = bar.percent >= limit_percent
    width = max(scale(bar.percent) - _LEFT, 1.0)
    kind = "bar refused" if over else "bar"
    parts.append(box(kind, _LEFT, top, width, _BAR, rx=3, title=text))
    if bar.allocator_bytes is not None and bar.total_bytes:
        inner = min(max(scale(100 * bar.allocator_bytes / bar.total_bytes) - _LEFT, 1.0), width)
        parts.append(box("inner", _LEFT, top + _BAR - 6, inner, 6, rx=2))
    tone = "value bad-text" if over else "value"
    parts.append(label(scale.end + 8, y + 15, numerals.percent(bar.percent), cls=tone))
    parts.append(label(scale.end + 8, y + 28, numerals.size(bar.device_bytes), cls="tick"))
    return parts


def _throughput_text(bar: Bar) -> str:
    interval = f" ({numerals.rate(bar.low)} to {numerals.rate(bar.high)})"
    return f"{bar.name}: {numerals.rate(bar.value)} tok/s{interval if bar.low else ''}"


def _memory_text(bar: MemoryBar) -> str:
    if bar.percent is None:
        return "out of memory" if bar.out_of_memory else "not measured"
    state = "out of memory at " if bar.out_of_memory else ""
    return (
        f"{state}{numerals.percent(bar.percent)}: {numerals.size(bar.device_bytes)} of "
        f"{numerals.size(bar.total_bytes)}, allocator {numerals.size(bar.allocator_bytes)}"
    )
