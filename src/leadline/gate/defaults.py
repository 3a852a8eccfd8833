"""The configuration that ships inside the package, for `demo` and `probe` without a file."""

from importlib.resources import files
from pathlib import Path

DEMO_TRAIN_SECONDS = 60.0
"""Enough for a tiny model to learn something that its loss shows, on two cores."""


def demo_config_path() -> Path:
    """Path of the embedded demo configuration."""
    return Path(str(files("leadline.gate") / "demo.toml"))
