"""Tolerant, typed reading of evidence: what is absent or of the wrong kind is `None`.

A report must come out of every run, half-finished and damaged ones included, so no
view may trust the shape of an evidence file. Rules:
- numbers are finite: NaN and Inf read as absent; decimal strings count as numbers;
- booleans are not numbers;
- text is any scalar, shown as it stands.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAX_DIGITS = 400  # beyond any float; a longer "number" in a file is noise


@dataclass(frozen=True, slots=True)
class Facts:
    """A JSON value and the ways to ask it for something."""

    value: Any

    def at(self, *keys: str) -> "Facts":
        """The value under nested *keys*; empty facts where the path breaks off."""
        value = self.value
        for key in keys:
            if not isinstance(value, Mapping):
                return Facts(None)
            value = value.get(key)
        return Facts(value)

    def number(self, *keys: str) -> float | None:
        """A finite float."""
        return _finite(self.at(*keys).value)

    def integer(self, *keys: str) -> int | None:
        """A whole number, exact however large."""
        value = self.at(*keys).value
        if isinstance(value, int) and not isinstance(value, bool):
            return value if abs(value) < 10**_MAX_DIGITS else None
        number = _finite(value)
        return int(number) if number is not None and number.is_integer() else None

    def flag(self, *keys: str) -> bool | None:
        """True, false, or not said."""
        value = self.at(*keys).value
        return value if isinstance(value, bool) else None

    def text(self, *keys: str) -> str:
        """A scalar as text; empty where there is none."""
        value = self.at(*keys).value
        if value is None or isinstance(value, (Mapping, list)):
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float) and not math.isfinite(value):
            return ""
        if isinstance(value, int) and abs(value) >= 10**_MAX_DIGITS:
            return ""
        return str(value)

    def items(self, *keys: str) -> "list[Facts]":
        """The elements of a list."""
        value = self.at(*keys).value
        return [Facts(item) for item in value] if isinstance(value, list) else []

    def series(self, *keys: str) -> list[float | None]:
        """A list of numbers; `None` holds the place of one that is not finite."""
        return [_finite(item.value) for item in self.items(*keys)]

    def pairs(self, *keys: str) -> "list[tuple[str, Facts]]":
        """The entries of an object, sorted by key."""
        value = self.at(*keys).value
        if not isinstance(value, Mapping):
            return []
        return [(str(key), Facts(value[key])) for key in sorted(value, key=str)]


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and (len(value) > _MAX_DIGITS or not value.strip()):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
