"""The calibration tap: Grams of a model's inputs, sealed on disk layer by layer.

`GramReader` is the public door for other programs; it needs numpy only.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leadline.tap.reader import GramReader as GramReader

__all__ = ["GramReader"]


def __getattr__(name: str) -> Any:
    """Load the reader when it is asked for, so that `--help` loads no numpy."""
    if name == "GramReader":
        from leadline.tap.reader import GramReader

        return GramReader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
