"""Checkpoints through torch.distributed.checkpoint, whole or absent.

A checkpoint holds what the next step needs: weights, optimizer state, random states,
the loader's position and the step. It is written to a temporary folder, fsynced and
renamed, so a folder under a final name is always complete. State that holds NaN or Inf
is refused before anything is written: the older checkpoint is the one worth having.
"""

import os
import random
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from leadline.core.atomic import explained_os_errors, fsync_folder
from leadline.core.errors import LeadlineError, NonFiniteStateError
from leadline.train.step import TrainStep


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint on disk, measured."""

    path: Path
    bytes: int
    wall_ns: int
    """From the check of the state to the folder's fsync."""


def write_checkpoint(
    path: Path, step: TrainStep, loader_state: Mapping[str, int | str]
) -> WrittenCheckpoint:
    """Write the state after the last finished step to the folder *path*, which must not exist.

    Raises:
        NonFiniteStateError: a weight or optimizer state holds NaN or Inf; nothing is written.
        LeadlineError: *path* exists or may not be written.
        DiskSpaceError: the disk is full; nothing is left behind.
    """
    if path.exists():
        raise LeadlineError(f"checkpoint {path} exists; a finished checkpoint is never replaced")
    temporary = path.with_name(f".{path.name}.tmp")
    start_ns = time.perf_counter_ns()
    state = _state_of(step, loader_state)
    _refuse_non_finite(state, step.steps_done)
    with explained_os_errors(path):
        shutil.rmtree(temporary, ignore_errors=True)  # a killed write left it
        temporary.mkdir(parents=True)
        try:
            _save(temporary, state)
            size = _sync_tree(temporary)
            temporary.replace(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_folder(path.parent)
    return WrittenCheckpoint(path=path, bytes=size, wall_ns=time.perf_counter_ns() - start_ns)


def _state_of(step: TrainStep, loader_state: Mapping[str, int | str]) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(step.model, step.optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "step": step.steps_done,
        "loader": dict(loader_state),
        "random": {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if step.device.type == "cuda" else [],
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        },
    }


def _refuse_non_finite(state: Mapping[str, Any], step: int) -> None:
    bad = [
        name
        for part in ("model", "optimizer")
        for name, tensor in _tensors(part, state[part])
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise NonFiniteStateError(
            f"no checkpoint is written after step {step}: NaN or Inf in {bad[0]}{more}; "
            "go on from the newest checkpoint, whose state is finite"
        )


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)


def _save(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        # One process is what we mean here; DCP warns that it assumes so.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(state, checkpoint_id=str(folder), no_dist=True)
        except CheckpointException as error:
            for cause in error.failures.values():
                refused = _os_error_behind(cause[0])
                if refused is not None:
                    raise refused from error
            raise


def _os_error_behind(error: BaseException | None) -> OSError | None:
    """The operating system's refusal that *error* was raised over: zip writing hides it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _sync_tree(folder: Path) -> int:
    total = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            total += path.stat().st_size
    fsync_folder(folder)
    return total
