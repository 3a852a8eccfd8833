"""Numbers as the report prints them; a value that is not there prints as `-`."""

import math

from leadline.core.units import format_bytes, format_count

DASH = "-"
TIMES = "\N{MULTIPLICATION SIGN}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
_SPACE = "\N{NO-BREAK SPACE}"  # between a figure and its unit


def count(value: float | None) -> str:
    """Whole number with thousands separators."""
    return DASH if value is None else format_count(round(value))


def rate(value: float | None) -> str:
    """Tokens per second: whole above a hundred, one decimal below."""
    if value is None:
        return DASH
    return format_count(round(value)) if abs(value) >= 100 else f"{value:.1f}"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    return DASH if value is None else format_bytes(round(value)).replace(" ", _SPACE)


def decimal(value: float | None, digits: int = 4) -> str:
    """Fixed decimals."""
    return DASH if value is None else f"{value:,.{digits}f}"


def scientific(value: float | None) -> str:
    """Two significant digits and an exponent."""
    return DASH if value is None else f"{value:.1e}"


def percent(value: float | None, digits: int = 1) -> str:
    """A figure that already is a percentage."""
    return DASH if value is None else f"{value:.{digits}f}{_SPACE}%"


def seconds(value: float | None) -> str:
    """A duration in the unit a reader thinks in, from milliseconds to hours."""
    if value is None:
        return DASH
    if abs(value) < 1:
        return f"{value * 1e3:.3g}{_SPACE}ms"
    if abs(value) < 120:
        return f"{value:.1f}{_SPACE}s"
    if abs(value) < 7200:
        return f"{value / 60:.1f}{_SPACE}min"
    return f"{value / 3600:.1f}{_SPACE}h"


def short_count(value: float) -> str:
    """Axis label: 1,500 as 1.5k, 2,000,000 as 2M."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round axis values from *low* to *high*, *about* as many as asked for."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / max(about, 1)
    if not math.isfinite(raw) or raw < 1e-300:
        return [low, high]
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * magnitude for unit in (1, 2, 2.5, 5, 10) if unit * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
