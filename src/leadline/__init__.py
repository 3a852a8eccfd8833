"""leadline: measure first, lock, run once inside a window, prove it afterwards."""

from leadline._version import __version__

__all__ = ["__version__"]
