"""Tiny checkpoints, each built once a session, and a server of forked commands."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .families import build_checkpoint
from .processes import CommandServer

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


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    """Runs `leadline` in processes of its own."""
    with CommandServer(tmp_path_factory.mktemp("commands")) as running:
        yield running
