"""Training for a given time, by the step that twin and sweep take.

For showing a model that has learned something, within a minute. It writes nothing, keeps no
checkpoint and holds nothing against a lock; the run under a lock is another matter.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leadline.core.errors import NonFiniteStateError, UsageError
from leadline.data.loader import Batch, TokenLoader
from leadline.data.manifest import SplitName
from leadline.models.workload import Workload
from leadline.train.precision import Precision
from leadline.train.settings import StepSettings
from leadline.train.step import TrainStep

_EVAL_BATCHES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortRun:
    """What is trained, on what, and for how long."""

    workload: Workload
    shards: Path
    device: torch.device
    settings: StepSettings
    seed: int
    micro_batch: int
    seq_len: int
    seconds: float
    """No step begins after this time; building and compiling the model count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortRunProgress:
    """After each step."""

    step: int
    tokens: int
    loss: float
    elapsed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A model that was trained, with what it took."""

    model: nn.Module
    """fp32, in eval mode."""
    steps: int
    tokens: int
    seconds: float
    """From the first step to the end of the last."""
    first_loss: float
    last_loss: float
    """Of single batches."""
    eval_loss: float
    """Mean over the first held-out batches, after the last step."""


def train_briefly(run: ShortRun, on_step: Callable[[ShortRunProgress], None]) -> Trained:
    """Train in bf16 until the time is over; at least one step.

    Raises:
        UsageError: a time that cannot be.
        DataError: fewer windows of text, or held-out ones, than one batch.
        NonFiniteStateError: a loss is NaN or Inf.
    """
    if not 0 < run.seconds < math.inf:
        raise UsageError(f"training for {run.seconds} s was asked for; give more than 0")
    deadline = time.monotonic() + run.seconds
    held_out = _batches(run, "eval")
    loader = _batches(run, "train")
    step = TrainStep(
        run.workload,
        device=run.device,
        precision=Precision.BF16,
        settings=run.settings,
        seed=run.seed,
    )
    started = time.monotonic()
    first_loss = last_loss = math.nan
    tokens = 0
    while not step.steps_done or time.monotonic() < deadline:
        batch = next(loader)
        # Read on every step: the host must not run ahead of a time that is measured here.
        last_loss = _finite(step(*_on_device(batch, run.device))[0], step.steps_done)
        first_loss = last_loss if step.steps_done == 1 else first_loss
        tokens += batch.tokens
        elapsed = time.monotonic() - started
        on_step(
            ShortRunProgress(step=step.steps_done, tokens=tokens, loss=last_loss, elapsed_s=elapsed)
        )
    seconds = time.monotonic() - started
    losses = [
        step.evaluate(*_on_device(batch, run.device)) for batch in islice(held_out, _EVAL_BATCHES)
    ]
    return Trained(
        model=step.model.eval(),
        steps=step.steps_done,
        tokens=tokens,
        seconds=seconds,
        first_loss=first_loss,
        last_loss=last_loss,
        eval_loss=_finite(torch.stack(losses).mean(), step.steps_done),
    )


def _batches(run: ShortRun, split: SplitName) -> TokenLoader:
    return TokenLoader(
        run.shards,
        split=split,
        batch_size=run.micro_batch,
        seq_len=run.seq_len,
        seed=run.seed,
        repeat=True,
    )


def _on_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    arrays: tuple[Any, Any] = (batch.inputs, batch.targets)
    inputs, targets = (torch.from_numpy(ids).to(device) for ids in arrays)
    return inputs, targets


def _finite(loss: Tensor, step: int) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise NonFiniteStateError(
            f"the loss after step {step} is {value}, a finite number is wanted; lower "
            "[optimizer] learning_rate or lengthen warmup_steps"
        )
    return value
