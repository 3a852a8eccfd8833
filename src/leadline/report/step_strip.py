"""The step-time strip of a sweep point, which shows whether the timed part is steady.

Every timed step is there. Where there are more steps than columns, a column covers
several steps and spans their fastest to slowest; the line is their median.
"""

from collections.abc import Sequence
from statistics import median

from markupsafe import Markup

from leadline.report.numerals import seconds, ticks
from leadline.report.svg import Scale, box, chart, hover, label, polyline, segment

_WIDTH, _HEIGHT = 300.0, 108.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 2.0, 22.0, 86.0
_MAX_COLUMNS = 120


def draw_strip(step_ns: Sequence[float | None], key: str, name: str) -> Markup:
    """Step times from the first timed step to the last; empty without any."""
    times = [value / 1e9 for value in step_ns if value is not None and value >= 0]
    if not times:
        return Markup()
    stride = -(-len(times) // _MAX_COLUMNS)
    groups = [times[start : start + stride] for start in range(0, len(times), stride)]
    x = Scale(0, len(groups), _LEFT, _WIDTH - _RIGHT)
    y = Scale(0.0, max(times) * 1.08 or 1.0, _BOTTOM, _TOP)
    middle = median(times)
    parts = _axes(y, x, len(times))
    parts += [_under(index, group, x, y) for index, group in enumerate(groups)]
    parts += [_column(index, group, x, y) for index, group in enumerate(groups)]
    centers = [(index + 0.5, median(group)) for index, group in enumerate(groups)]
    parts.append(polyline(centers, x, y, "line step"))
    half = x(len(groups) / 2)
    parts.append(segment("half", half, _TOP, half, _BOTTOM))
    pitch = x(1) - x(0)
    for index, group in enumerate(groups):
        text = _column_text(index * stride, group)
        parts.append(hover(x(index), _TOP, pitch, _BOTTOM - _TOP, text))
    return chart(
        parts,
        key=key,
        title=f"Time of each timed step at {name}",
        description=(
            f"{len(times)} steps, median {seconds(middle)}, from {seconds(min(times))} "
            f"to {seconds(max(times))}."
        ),
        width=_WIDTH,
        height=_HEIGHT,
    )


def _axes(y: Scale, x: Scale, num_steps: int) -> list[str]:
    parts = [label(0, 10, "step time", cls="tick")]
    for value in ticks(y.low, y.high, 2):
        place = y(value)
        parts.append(segment("grid", x.start, place, x.end, place))
        text = "0" if value == 0 else seconds(value)
        parts.append(label(x.start - 6, place + 4, text, cls="tick", anchor="end"))
    parts.append(label(x.start, _HEIGHT - 8, "first", cls="tick"))
    parts.append(label(x.end, _HEIGHT - 8, f"step {num_steps:,}", cls="tick", anchor="end"))
    parts.append(
        label((x.start + x.end) / 2, _HEIGHT - 8, "half window", cls="tick", anchor="middle")
    )
    return parts


def _under(index: int, group: Sequence[float], x: Scale, y: Scale) -> str:
    top = y(min(group))
    return box("step-under", x(index), top, x(index + 1) - x(index), _BOTTOM - top)


def _column(index: int, group: Sequence[float], x: Scale, y: Scale) -> str:
    left, right = x(index), x(index + 1)
    top, bottom = y(max(group)), y(min(group))
    width, height = max((right - left) * 0.8, 0.6), max(bottom - top, 1.5)
    return box("step-range", left + (right - left) * 0.1, top, width, height)


def _column_text(first: int, group: Sequence[float]) -> str:
    if len(group) == 1:
        return f"step {first + 1}: {seconds(group[0])}"
    return (
        f"steps {first + 1} to {first + len(group)}: median {seconds(median(group))}, "
        f"{seconds(min(group))} to {seconds(max(group))}"
    )
