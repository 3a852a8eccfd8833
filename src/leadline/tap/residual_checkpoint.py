"""Residual streams on disk, so that a tap broken off goes on without re-reading layers.

Kept in the tap's `work/` folder while a wave runs. Written only when the layers read
since the last one weigh many times the residuals: below that, reading the layers again
is cheaper. The state file is written last and names the data file's size and hash, so a
checkpoint is either whole or not there.
"""

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leadline.core.atomic import atomic_writer, explained_os_errors, write_bytes
from leadline.core.canonical import canonical_bytes, parse_canonical, sha256_file
from leadline.core.errors import LeadlineError

WORTH_FACTOR = 16
"""Written when the layers since the last one weigh so many times the residuals."""
STATE_FILE = "residuals.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedResiduals:
    """A whole checkpoint: residuals of every micro-batch of a wave behind a layer."""

    wave: int
    layer: int
    shapes: tuple[tuple[int, ...], ...]
    path: Path


class ResidualCheckpoints:
    """Writes and finds the newest checkpoint of one tap; *digest* is the tap key's."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder = folder
        self._digest = digest
        self._bytes_since = 0

    def is_worth_it(self, layer_bytes: int, residual_bytes: int) -> bool:
        """Whether to write now; call once a layer."""
        self._bytes_since += layer_bytes
        if self._bytes_since < WORTH_FACTOR * residual_bytes:
            return False
        self._bytes_since = 0
        return True

    def write(self, wave: int, layer: int, residuals: Iterator[Tensor]) -> None:
        """Write the residuals behind *layer*, one micro-batch after another.

        Raises:
            DiskSpaceError: the disk is full; the checkpoint before stays.
        """
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"residuals_{wave}_{layer}.bin"
        shapes, digest = [], hashlib.sha256()
        with atomic_writer(path) as stream:
            for hidden in residuals:
                data = as_bytes(hidden)
                stream.write(data)
                digest.update(data)
                shapes.append(list(hidden.shape))
        state = {
            "key": self._digest,
            "wave": wave,
            "layer": layer,
            "file": path.name,
            "shapes": shapes,
            "sha256": digest.hexdigest(),
        }
        write_bytes(self._folder / STATE_FILE, canonical_bytes(state))
        for old in self._folder.iterdir():
            if old.name not in (path.name, STATE_FILE):  # temporary files of killed runs too
                old.unlink()

    def find(self) -> SavedResiduals | None:
        """The newest checkpoint of this tap whose data is whole; None when there is none."""
        state_path = self._folder / STATE_FILE
        if not state_path.is_file():
            return None
        try:
            state: Any = parse_canonical(state_path.read_bytes())
            path = self._folder / str(state["file"])
            if state["key"] != self._digest or not path.is_file():
                return None
            if sha256_file(path) != state["sha256"]:
                return None
            return SavedResiduals(
                wave=int(state["wave"]),
                layer=int(state["layer"]),
                shapes=tuple(tuple(shape) for shape in state["shapes"]),
                path=path,
            )
        except (LeadlineError, KeyError, TypeError, ValueError):
            # A checkpoint only saves time: one that cannot be read is one that is not there.
            return None

    def clear(self) -> None:
        """Remove what a finished wave has no use for."""
        if self._folder.is_dir():
            shutil.rmtree(self._folder)


def read_residuals(saved: SavedResiduals, dtype: torch.dtype) -> Iterator[Tensor]:
    """Residuals of each micro-batch on the host, in order."""
    with explained_os_errors(saved.path, "read"), saved.path.open("rb") as stream:
        for shape in saved.shapes:
            count = int(np.prod(shape))
            data = bytearray(stream.read(count * dtype.itemsize))
            yield torch.frombuffer(data, dtype=dtype).view(shape)


def as_bytes(hidden: Tensor) -> memoryview:
    """The tensor's numbers as they lie in memory."""
    raw = hidden.detach().cpu().contiguous().view(torch.uint8)
    return memoryview(raw.flatten().numpy().data)
