"""One point of the sweep, in a process of its own: train, evaluate, checkpoint.

A point is judged over all three, because a run does all three: memory is the device's
peak from the first batch to the checkpoint's last byte. Out of memory is a result,
with the phase it happened in; the process ends and the driver gets everything back.
"""

import os
import shutil
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadline.core.errors import NonFiniteStateError
from leadline.core.peaks import utilisation
from leadline.core.rate import interval_95, timing_problems, tok_s_floor
from leadline.data.loader import TokenLoader
from leadline.models.workload import num_parameters, parameter_bytes
from leadline.probe import throttle
from leadline.probe.clock import clock_for
from leadline.probe.environment import device_name
from leadline.probe.failure import first_line, is_out_of_memory
from leadline.probe.memory import MemoryWatch, growth_problem, judge_memory, memory_of
from leadline.probe.progress import ProgressPipe
from leadline.probe.request import PointRequest
from leadline.probe.subject import open_subject, to_device
from leadline.probe.timing import Span, measure
from leadline.probe.verdict import finite_or_none, mean_loss
from leadline.train.checkpoint import write_checkpoint
from leadline.train.precision import Precision
from leadline.train.settings import settings_from
from leadline.train.step import TrainStep


@dataclass(slots=True)
class _Record:
    """What has been found so far; survives the phase that failed."""

    phase: str = "build"
    losses: list[Tensor] = field(default_factory=list)
    grad_norms: list[Tensor] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def run_point(request: PointRequest, progress: ProgressPipe) -> dict[str, Any]:
    """Measure one point; returns the data of its evidence (docs/formats.md)."""
    device = torch.device(request.subject.device)
    memory = memory_of(device)
    record = _Record()
    status = "ok"
    with MemoryWatch(memory) as watch:
        try:
            _measure_all(request, device, record, watch, progress)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            status = "oom"
            record.problems.append(_oom_sentence(request, record.phase, error))
    verdict = judge_memory(watch.peak_bytes, memory.total_bytes, request.memory_limit_percent)
    retries = memory.allocator_retries()
    if status == "ok":
        if not verdict.fits:
            record.problems.append(verdict.why)
        if retries:
            record.problems.append(
                f"the allocator had to retry {retries} times: memory is too tight to run in"
            )
        if record.problems:
            status = "rejected"
    return {
        "name": request.name,
        "micro_batch": request.micro_batch,
        "seq_len": request.seq_len,
        "status": status,
        "failed_phase": record.phase if status == "oom" else None,
        "why": "; ".join(record.problems),
        "pid": os.getpid(),
        **record.data,
        "memory": {
            "allocator_peak_bytes": memory.allocator_peak_bytes(),
            "device_peak_bytes": watch.peak_bytes,
            "device_start_bytes": watch.start_bytes,
            "device_total_bytes": memory.total_bytes,
            "percent": verdict.percent,
            "allocator_retries": retries,
        },
    }


def _measure_all(
    request: PointRequest,
    device: torch.device,
    record: _Record,
    watch: MemoryWatch,
    progress: ProgressPipe,
) -> None:
    subject = request.subject
    workload = open_subject(subject)
    loader = TokenLoader(
        Path(subject.shards),
        batch_size=request.micro_batch,
        seq_len=request.seq_len,
        seed=subject.seed,
        repeat=True,  # a fast card reads a small corpus more than once in a minute
    )
    progress("build model", 0)
    step = TrainStep(
        workload,
        device=device,
        precision=Precision.BF16,
        settings=settings_from(subject.optimizer),
        seed=subject.seed,
    )
    record.data["parameters"] = num_parameters(step.model)
    record.data["parameter_bytes"] = parameter_bytes(step.model)
    record.phase = "train"
    _train(request, step, loader, record, progress)
    watch.sample()
    record.phase = "eval"
    _evaluate(request, step, record, watch, progress)
    record.phase = "checkpoint"
    progress("checkpoint", 0)
    folder = Path(request.checkpoint_dir) / f"trial-{request.name}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        written = write_checkpoint(folder, step, loader.state())
    except NonFiniteStateError as error:  # a finding about the point, not a failed measurement
        record.problems.append(str(error))
        return
    watch.sample()
    shutil.rmtree(folder)
    record.data["checkpoint"] = {"bytes": written.bytes, "seconds": written.wall_ns / 1e9}


def _train(
    request: PointRequest,
    step: TrainStep,
    loader: TokenLoader,
    record: _Record,
    progress: ProgressPipe,
) -> None:
    device = step.device
    clock = clock_for(device)
    compiled = Counter[str]()

    def take() -> int:
        batch = next(loader)
        loss, norm = step(to_device(batch.inputs, device), to_device(batch.targets, device))
        record.losses.append(loss)
        record.grad_norms.append(norm)
        return batch.tokens

    def begin_window() -> None:
        watcher.restart()
        compiled.update(compile_counts())
        record.losses.clear()
        record.grad_norms.clear()

    watcher = throttle.watch(device)

    def tell(phase: str, done: int) -> None:
        progress(phase, done, request.warmup_steps if phase == "warm-up" else request.steps)
        watcher.sample()

    timing = measure(
        take,
        clock,
        warmup_steps=request.warmup_steps,
        span=Span(steps=request.steps, seconds=request.seconds),
        on_step=tell,
        before_window=begin_window,
    )
    recompiles = sum((Counter(compile_counts()) - compiled).values())
    losses = torch.stack(record.losses).tolist()
    norms = torch.stack(record.grad_norms).tolist()
    whole = timing.whole
    low, high = interval_95(timing)
    record.data.update(
        {
            "steps": whole.steps,
            "tokens": whole.tokens,
            "wall_ns": whole.wall_ns,
            "tok_s": tok_s_floor(whole),
            "tok_s_low": finite_or_none(low),
            "tok_s_high": finite_or_none(high),
            "halves": [float(half.tok_s) for half in timing.halves],
            "step_ns": list(timing.step_ns),
            "warmup_steps": timing.warmup_steps,
            "warmup_seconds": timing.warmup_ns / 1e9,
            "recompiles": recompiles,
            "throttled": list(watcher.reasons),
            "clock_notes": list(watcher.notes),
            "epochs": loader.epoch,
            "mfu": asdict(
                utilisation(device_name(device), tok_s_floor(whole), record.data["parameters"])
            ),
            "loss": {"first": finite_or_none(losses[0]), "last": finite_or_none(losses[-1])},
            "grad_norm": _spread(norms),
        }
    )
    record.problems += timing_problems(timing, steady_percent=Fraction(request.steady_percent))
    if recompiles:
        record.problems.append(f"{recompiles} graphs were compiled inside the timed window")
    if watcher.reasons:
        record.problems.append(f"clocks were throttled: {', '.join(watcher.reasons)}")
    if any(finite_or_none(value) is None for value in losses + norms):
        record.problems.append("a loss or gradient norm is NaN or Inf")


def _evaluate(
    request: PointRequest,
    step: TrainStep,
    record: _Record,
    watch: MemoryWatch,
    progress: ProgressPipe,
) -> None:
    loader = TokenLoader(
        Path(request.subject.shards),
        split="eval",
        batch_size=request.eval_batch,
        seq_len=request.seq_len,
        seed=request.subject.seed,
        repeat=True,
    )
    memory = memory_of(step.device)
    clock = clock_for(step.device)
    held: list[int] = []
    seconds: list[float] = []
    losses: list[float] = []
    for number in range(request.eval_batches):
        progress("eval", number, request.eval_batches)
        batch = next(loader)
        start = time.perf_counter()
        loss = step.evaluate(
            to_device(batch.inputs, step.device), to_device(batch.targets, step.device)
        )
        losses.append(loss.item())
        clock.sync()
        seconds.append(time.perf_counter() - start)
        held.append(memory.allocated_bytes())
        watch.sample()
    growth = growth_problem(held, memory.noise_bytes)
    if growth:
        record.problems.append(growth)
    if any(finite_or_none(loss) is None for loss in losses):
        record.problems.append("the eval loss is NaN or Inf")
    record.data["eval"] = {
        "batch": request.eval_batch,
        "batches": request.eval_batches,
        # The first batch compiles; a run pays that once, not at every evaluation.
        "seconds": min(seconds),
        "first_seconds": seconds[0],
        "held_bytes": held,
        "loss": finite_or_none(mean_loss(losses)),
        "status": "grows" if growth else "ok",
    }


def compile_counts() -> Counter[str]:
    """How many graphs dynamo has compiled so far in this process."""
    from torch._dynamo.utils import counters

    return Counter({"graphs": int(counters["stats"]["unique_graphs"])})


def _oom_sentence(request: PointRequest, phase: str, error: BaseException) -> str:
    subject = "eval" if phase == "eval" else f"the {phase} phase"
    batch = request.eval_batch if phase == "eval" else request.micro_batch
    return (
        f"{subject} does not fit: out of memory at batch {batch} x {request.seq_len} "
        f"({first_line(error)})"
    )


def _spread(values: list[float]) -> dict[str, float | None]:
    finite = [value for value in values if finite_or_none(value) is not None]
    if len(finite) < len(values) or len(finite) < 2:
        return {"mean": None, "std": None, "max": None}
    return {
        "mean": statistics.fmean(finite),
        "std": statistics.stdev(finite),
        "max": max(finite),
    }
