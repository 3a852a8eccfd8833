"""The numerics twin: the same batches through fp32 and bf16, and who is to blame if they part.

Both lanes run in one process, one after the other: same weights by seed, same batches
by hash, losses reduced in fp32. The fp32 lane is proven fp32 by a product against
float64 inside its own setting. On red the divergence locator replays single modules
and names the first whose bf16 output leaves its error band.
"""

import hashlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leadline.core.errors import ProbeError
from leadline.data.loader import Batch, TokenLoader
from leadline.models.workload import Workload
from leadline.probe.locator import LocatorReport, locate_divergence
from leadline.probe.progress import ProgressPipe
from leadline.probe.request import Subject, TwinRequest
from leadline.probe.subject import open_subject, to_device
from leadline.probe.verdict import (
    MATMUL_ERROR_LIMIT,
    Lane,
    TwinVerdict,
    finite_or_none,
    judge_twin,
)
from leadline.train.precision import Precision, matmul_error, precision_context
from leadline.train.settings import settings_from
from leadline.train.step import TrainStep

_LOCATE_ROWS = 2
"""Sequences the locator replays: it keeps every module's inputs, and two show a module's error."""


@dataclass(slots=True)
class _Run:
    """A finished lane with the model it ended with."""

    lane: Lane
    seconds: float
    model: nn.Module
    last_learning_rate: float


def run_twin(request: TwinRequest, progress: ProgressPipe) -> dict[str, Any]:
    """Run both lanes and judge them; returns the data of the twin's evidence."""
    subject = request.subject
    device = torch.device(subject.device)
    workload = open_subject(subject)
    runs = {
        precision: _run_lane(request, workload, device, precision, progress)
        for precision in (Precision.FP32, Precision.BF16)
    }
    fp32, bf16 = runs[Precision.FP32], runs[Precision.BF16]
    verdict = judge_twin(
        fp32.lane, bf16.lane, tolerance=request.tolerance, settle_steps=request.settle_steps
    )
    problems = list(verdict.problems)
    inquiry = None
    if not verdict.green:
        progress("locate divergence", 0)
        try:
            inquiry = _locate(request, workload, device, fp32, verdict, progress)
        except ProbeError as error:
            # The lanes are measured and red either way; what they showed must not be lost.
            problems.append(f"the divergence could not be located: {error}")
    return {
        "steps": request.steps,
        "seq_len": request.seq_len,
        "micro_batch": request.micro_batch,
        "settle_steps": request.settle_steps,
        "tolerance": request.tolerance,
        "green": verdict.green,
        "worst_step": verdict.worst_step,
        "worst_delta": verdict.worst_delta,
        "final_delta": verdict.final_delta,
        "problems": problems,
        "last_learning_rate": bf16.last_learning_rate,
        "peak_learning_rate": settings_from(subject.optimizer).learning_rate,
        "matmul_error": fp32.lane.matmul_error,
        "matmul_limit": MATMUL_ERROR_LIMIT,
        "batches_sha256": _joined(fp32.lane.batch_hashes),
        "initial_weights_sha256": fp32.lane.initial_weights_sha256,
        "fp32": _told(fp32),
        "bf16": _told(bf16),
        "accused": [asdict(accusation) for accusation in inquiry.accused] if inquiry else [],
        "modules_checked": inquiry.modules_checked if inquiry else 0,
        "modules_skipped": [list(item) for item in inquiry.skipped] if inquiry else [],
    }


def _run_lane(
    request: TwinRequest,
    workload: Workload,
    device: torch.device,
    precision: Precision,
    progress: ProgressPipe,
) -> _Run:
    progress(f"{precision} lane", 0, request.steps)
    started = time.perf_counter()
    step = _new_step(request.subject, workload, device, precision)
    weights_sha256 = weights_hash(step.model)
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    hashes: list[str] = []
    loader = _loader(request)
    for number in range(request.steps):
        batch = next(loader)
        hashes.append(batch.sha256)
        loss, norm = step(to_device(batch.inputs, device), to_device(batch.targets, device))
        losses.append(loss)
        norms.append(norm)
        progress(f"{precision} lane", number + 1, request.steps)
    with precision_context(precision, device.type):
        error = matmul_error(device) if precision is Precision.FP32 else None
    lane = Lane(
        losses=torch.stack(losses).tolist(),
        grad_norms=torch.stack(norms).tolist(),
        batch_hashes=hashes,
        initial_weights_sha256=weights_sha256,
        low_precision_parameters=low_precision_parameters(step),
        matmul_error=error,
    )
    return _Run(
        lane=lane,
        seconds=time.perf_counter() - started,
        model=step.model,
        last_learning_rate=step.schedule.rate(request.steps),
    )


def _locate(
    request: TwinRequest,
    workload: Workload,
    device: torch.device,
    fp32: _Run,
    verdict: TwinVerdict,
    progress: ProgressPipe,
) -> LocatorReport:
    """Replay the worst step's batch at the fp32 lane's last weights, then at the first ones."""
    loader = _loader(request)
    batch: Batch = next(loader)
    for _ in range((verdict.worst_step or 1) - 1):
        batch = next(loader)
    inputs = to_device(batch.inputs[:_LOCATE_ROWS], device)
    targets = to_device(batch.targets[:_LOCATE_ROWS], device)

    def forward(model: nn.Module) -> Tensor:
        return workload.loss(model, inputs, targets)

    def inquire(model: nn.Module) -> LocatorReport:
        return locate_divergence(
            model,
            forward,
            device_type=device.type,
            seed=request.subject.seed,
            on_progress=lambda done, total: progress("locate divergence", done, total),
        )

    report = inquire(fp32.model)
    if report.accused:
        return report
    fresh = _new_step(request.subject, workload, device, Precision.FP32)
    return inquire(fresh.model)


def _new_step(
    subject: Subject, workload: Workload, device: torch.device, precision: Precision
) -> TrainStep:
    return TrainStep(
        workload,
        device=device,
        precision=precision,
        settings=settings_from(subject.optimizer),
        seed=subject.seed,
    )


def _loader(request: TwinRequest) -> TokenLoader:
    return TokenLoader(
        Path(request.subject.shards),
        batch_size=request.micro_batch,
        seq_len=request.seq_len,
        seed=request.subject.seed,
        repeat=True,
    )


def weights_hash(model: nn.Module) -> str:
    """Sha256 over names and bytes of every parameter, in order."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(name.encode())
        flat = weight.detach().contiguous().view(torch.uint8).cpu()
        digest.update(flat.numpy().tobytes())
    return digest.hexdigest()


def low_precision_parameters(step: TrainStep) -> tuple[str, ...]:
    """Trainable parameters, or their optimizer state, held in less than fp32."""
    wide = (torch.float32, torch.float64)
    found = []
    for name, weight in step.model.named_parameters():
        if not weight.requires_grad:
            continue
        state = step.optimizer.state.get(weight, {})
        held = [weight.dtype, *(v.dtype for v in state.values() if isinstance(v, Tensor))]
        if any(dtype not in wide for dtype in held):
            found.append(name)
    return tuple(found)


def _told(run: _Run) -> dict[str, Any]:
    return {
        "losses": [finite_or_none(value) for value in run.lane.losses],
        "grad_norms": [finite_or_none(value) for value in run.lane.grad_norms],
        "seconds": run.seconds,
    }


def _joined(hashes: list[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
