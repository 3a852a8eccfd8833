"""SVG by hand: an element builder that escapes, a linear scale, a line with gaps.

Colours are classes of the page's style sheet, so a chart follows the light and the
dark scheme. Every chart carries a title and a description for those who hear it
rather than see it, and parts carry their own title for the pointer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear map from data to pixels, clamped to the pixel range."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Pixel of *value*."""
        span = self.high - self.low
        share = 0.5 if span <= 0 else (value - self.low) / span
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def element(name: str, *children: str, text: str = "", **attributes: object) -> str:
    """One element; underscores in attribute names become hyphens, `cls` becomes `class`."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            label = "class" if key == "cls" else key.replace("_", "-")
            words.append(f'{label}="{escape(_plain(value))}"')
    inner = escape(text) + "".join(children)
    head = " ".join(words)
    return f"<{head}>{inner}</{name}>" if inner else f"<{head}/>"


def chart(
    parts: Iterable[str],
    *,
    key: str,
    title: str,
    description: str,
    width: float,
    height: float,
    cls: str = "",
) -> Markup:
    """A whole drawing; *key* makes its ids unique on the page."""
    body = (
        element("title", text=title, id=f"{key}-t"),
        element("desc", text=description, id=f"{key}-d"),
        *parts,
    )
    # Every part was escaped by element().
    return Markup(
        element(
            "svg",
            *body,
            viewBox=f"0 0 {_plain(width)} {_plain(height)}",
            role="img",
            aria_labelledby=f"{key}-t {key}-d",
            cls=f"chart {cls}".strip(),
        )
    )


def label(x: float, y: float, text: str, *, cls: str = "", anchor: str = "start") -> str:
    """Text at a point."""
    return element("text", text=text, x=x, y=y, cls=f"label {cls}".strip(), text_anchor=anchor)


def box(
    cls: str, x: float, y: float, width: float, height: float, *, rx: float = 0, title: str = ""
) -> str:
    """A rectangle; *title* is said under the pointer."""
    inner = [element("title", text=title)] if title else []
    return element("rect", *inner, cls=cls, x=x, y=y, width=width, height=height, rx=rx or None)


def segment(cls: str, x1: float, y1: float, x2: float, y2: float, *, title: str = "") -> str:
    """A straight line; *title* is said under the pointer."""
    inner = [element("title", text=title)] if title else []
    return element("line", *inner, cls=cls, x1=x1, y1=y1, x2=x2, y2=y2)


def hover(x: float, y: float, width: float, height: float, text: str) -> str:
    """An invisible box that says *text* under the pointer."""
    return box("hover", x, y, max(width, 0.5), height, title=text)


def polyline(points: Sequence[Point], x: Scale, y: Scale, cls: str) -> str:
    """A line through *points* that breaks where a value is missing; dots for lone values."""
    commands: list[str] = []
    for run in _runs(points):
        places = [f"{_plain(x(at))} {_plain(y(value))}" for at, value in run]
        commands.append("M" + "L".join(places) + ("h0.01" if len(run) == 1 else ""))
    return element("path", d="".join(commands), cls=cls) if commands else ""


def _runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((at, value))
    return [run for run in runs if run]


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
