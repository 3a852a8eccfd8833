"""Drawing of the twin: losses, their distance against the limit, gradient norms.

One horizontal axis, three panels. The fp32 lane is a broad pale line and the bf16 lane a
fine one on top, so that agreement looks like agreement. Steps that are still settling are
shaded, since the verdict does not judge them. A step without a finite loss gets a red tick.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from leadline.report.numerals import DASH, decimal, ticks
from leadline.report.svg import (
    Point,
    Scale,
    box,
    chart,
    element,
    hover,
    label,
    polyline,
    segment,
)

Series = tuple[float | None, ...]

_LEFT, _RIGHT = 52.0, 16.0
_TOP, _GAP = 26.0, 46.0
_HEIGHTS = (200.0, 120.0, 90.0)
_MAX_HOVERS = 240
_MAX_POINTS = 2000  # a path longer than this shows nothing more on a screen


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinCurves:
    """What the drawing needs, step by step from step 1."""

    fp32_losses: Series
    bf16_losses: Series
    fp32_norms: Series
    bf16_norms: Series
    tolerance: float | None
    settle_steps: int
    worst_step: int | None
    worst_delta: float | None

    @property
    def deltas(self) -> Series:
        """|bf16 - fp32| of the losses; missing where either lane is."""
        lanes = zip(self.fp32_losses, self.bf16_losses, strict=False)
        return tuple(None if a is None or b is None else abs(b - a) for a, b in lanes)

    @property
    def num_steps(self) -> int:
        """Length of the longer lane."""
        return max(len(self.fp32_losses), len(self.bf16_losses), 1)


@dataclass(frozen=True, slots=True)
class _Panel:
    """Where one panel lies and how it maps."""

    name: str
    top: float
    height: float
    x: Scale
    y: Scale

    @property
    def bottom(self) -> float:
        return self.top + self.height


def draw_twin(curves: TwinCurves, width: float, key: str, cls: str) -> Markup:
    """The three panels at *width* pixels; *key* keeps ids apart when drawn twice."""
    loss, delta, norm = _panels(curves, width)
    parts: list[str] = []
    for panel in (loss, delta, norm):
        parts += _frame(panel, curves)
    parts += _lanes(loss, curves.fp32_losses, curves.bf16_losses)
    parts += _delta_band(delta, curves)
    parts.append(polyline(_points(curves.deltas), delta.x, delta.y, "line delta"))
    parts += _lanes(norm, curves.fp32_norms, curves.bf16_norms)
    parts += _worst(delta, curves)
    parts += _hovers(loss, norm.bottom, curves)
    parts += _not_finite(loss, curves)
    parts.append(label(0, norm.bottom + 16, "step", cls="tick"))
    return chart(
        parts,
        key=key,
        title="Loss of the fp32 and the bf16 lane, their distance, and gradient norms, by step",
        description=_description(curves),
        width=width,
        height=norm.bottom + 34,
        cls=cls,
    )


def _panels(curves: TwinCurves, width: float) -> tuple[_Panel, _Panel, _Panel]:
    x = Scale(1, max(curves.num_steps, 2), _LEFT, width - _RIGHT)
    limit = curves.tolerance or 0.0
    largest = max((value for value in curves.deltas if value is not None), default=0.0)
    ranges = (
        _range((*curves.fp32_losses, *curves.bf16_losses)),
        (0.0, max(limit * 1.35, min(largest * 1.1, 1e300)) or 1.0),
        (0.0, _range((*curves.fp32_norms, *curves.bf16_norms))[1]),
    )
    names = ("Loss", "|bf16 - fp32|", "Gradient norm")
    panels = []
    top = _TOP
    for name, height, (low, high) in zip(names, _HEIGHTS, ranges, strict=True):
        panels.append(_Panel(name, top, height, x, Scale(low, high, top + height, top)))
        top += height + _GAP
    return panels[0], panels[1], panels[2]


def _range(values: Series) -> tuple[float, float]:
    known = [min(max(value, -1e300), 1e300) for value in values if value is not None]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    margin = (high - low) * 0.06 or max(abs(high) * 0.1, 1e-9)
    return low - margin, high + margin


def _frame(panel: _Panel, curves: TwinCurves) -> list[str]:
    left, right = panel.x.start, panel.x.end
    parts = [label(0, panel.top - 10, panel.name, cls="strong")]
    if curves.settle_steps > 1 and curves.num_steps > curves.settle_steps:
        edge = panel.x(curves.settle_steps)
        parts.append(box("settling", left, panel.top, edge - left, panel.height))
    for value in ticks(panel.y.low, panel.y.high, 4 if panel.height > 100 else 3):
        y = panel.y(value)
        parts.append(segment("grid", left, y, right, y))
        parts.append(label(left - 7, y + 4, f"{value:.4g}", cls="tick", anchor="end"))
    for value in ticks(1, curves.num_steps, 8 if right > 600 else 4):
        if value >= 1:
            text = f"{value:.0f}"
            parts.append(
                label(panel.x(value), panel.bottom + 16, text, cls="tick", anchor="middle")
            )
    return parts


def _lanes(panel: _Panel, fp32: Series, bf16: Series) -> list[str]:
    return [
        polyline(_points(fp32), panel.x, panel.y, "line fp32"),
        polyline(_points(bf16), panel.x, panel.y, "line bf16"),
    ]


def _points(values: Series) -> list[Point]:
    stride = -(-len(values) // _MAX_POINTS) or 1
    return [(float(i + 1), values[i]) for i in range(0, len(values), stride)]


def _delta_band(panel: _Panel, curves: TwinCurves) -> list[str]:
    if curves.tolerance is None:
        return []
    y = panel.y(curves.tolerance)
    left, right = panel.x.start, panel.x.end
    return [
        box("band", left, y, right - left, max(panel.bottom - y, 0.0)),
        segment("limit", left, y, right, y),
        label(left + 6, y - 5, f"limit {curves.tolerance:g}", cls="limit-text halo"),
    ]


def _worst(panel: _Panel, curves: TwinCurves) -> list[str]:
    """A ring at the worst step; its words stand above the panel, where no curve runs."""
    step, value = curves.worst_step, curves.worst_delta
    if step is None or value is None or not 1 <= step <= curves.num_steps:
        return []
    bad = curves.tolerance is not None and value > curves.tolerance
    text = f"worst {value:.4f} at step {step}"
    tone = "strong bad-text" if bad else "strong"
    ring = "worst bad" if bad else "worst"
    return [
        element("circle", cx=panel.x(step), cy=panel.y(value), r=5, cls=ring),
        label(panel.x.end, panel.top - 10, text, cls=tone, anchor="end"),
    ]


def _not_finite(panel: _Panel, curves: TwinCurves) -> list[str]:
    parts: list[str] = []
    for name, losses in (("fp32", curves.fp32_losses), ("bf16", curves.bf16_losses)):
        for step, value in enumerate(losses, start=1):
            if value is None and len(parts) < _MAX_HOVERS:
                x = panel.x(step)
                text = f"{name} loss at step {step} is not finite"
                parts.append(segment("not-finite", x, panel.top, x, panel.top + 14, title=text))
    return parts


def _hovers(panel: _Panel, bottom: float, curves: TwinCurves) -> list[str]:
    stride = -(-curves.num_steps // _MAX_HOVERS)
    pitch = (panel.x.end - panel.x.start) / max(curves.num_steps - 1, 1) * stride
    parts = []
    for step in range(1, curves.num_steps + 1, stride):
        text = (
            f"step {step}: fp32 {_at(curves.fp32_losses, step)}, "
            f"bf16 {_at(curves.bf16_losses, step)}, |delta| {_at(curves.deltas, step)}"
        )
        parts.append(hover(panel.x(step) - pitch / 2, panel.top, pitch, bottom - panel.top, text))
    return parts


def _at(values: Sequence[float | None], step: int) -> str:
    return decimal(values[step - 1]) if step <= len(values) else DASH


def _description(curves: TwinCurves) -> str:
    text = f"{curves.num_steps} steps."
    if curves.worst_delta is not None and curves.tolerance is not None:
        text += (
            f" The losses are at most {curves.worst_delta:.4f} apart (step {curves.worst_step}), "
            f"and {curves.tolerance:g} is allowed."
        )
    return text
