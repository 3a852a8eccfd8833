"""Tiny checkpoints, each built once a session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .families import build_checkpoint

Checkpoints = Callable[..., Path]
"""`checkpoints(family, **build_checkpoint's own)`: a folder that is read and never changed."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Build a checkpoint on first use and give the same folder afterwards."""
    built: dict[tuple[str, str], Path] = {}

    def get(family: str, **settings: Any) -> Path:
        key = (family, repr(sorted(settings.items())))
        if key not in built:
            path = tmp_path_factory.mktemp(family)
            built[key] = build_checkpoint(family, path, **settings)
        return built[key]

    return get
