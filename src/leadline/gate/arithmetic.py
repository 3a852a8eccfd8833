"""From measurements to the two sums the lock rests on: checkpoints and tokens."""

from dataclasses import asdict

from leadline.core.atomic import explained_os_errors
from leadline.core.budget import (
    OVERHEAD_LIMIT_NS,
    BudgetInputs,
    checkpoint_estimate_bytes,
    compute_budget,
    disk_needed_bytes,
    overhead_per_ten_minutes,
)
from leadline.core.errors import UsageError
from leadline.core.gate import PROBE_PREFIX
from leadline.core.units import format_bytes
from leadline.gate.config import MAX_INTEGER
from leadline.gate.context import Finding, GateContext
from leadline.pack.space import disk_free_bytes
from leadline.train.settings import settings_from

_NS_PER_S = 1_000_000_000
_LIMIT_SECONDS = OVERHEAD_LIMIT_NS // _NS_PER_S
ALL_BUT_FREE_DISK = (
    "cadence_steps",
    "cadence_seconds",
    "parameter_bytes",
    "estimated_bytes",
    "measured_bytes",
    "measured_seconds",
    "needed_bytes",
    "step_seconds",
    "eval_seconds",
    "overhead_seconds_per_10min",
    "limit_seconds",
)
"""Keys of the checkpoint's evidence that a disk filling up does not move."""


def checkpoint_finding(ctx: GateContext) -> Finding:
    """Hold the measured checkpoint against the free disk and the 0.85 against its cost."""
    table = ctx.config.checkpoint
    point = ctx.evidence(PROBE_PREFIX + ctx.evidence("choice").data["best_cfg"]).data
    measured = point["checkpoint"]
    estimated = checkpoint_estimate_bytes(point["parameter_bytes"])
    needed = disk_needed_bytes(max(estimated, measured["bytes"]))
    folder = ctx.checkpoint_dir
    with explained_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = disk_free_bytes(folder)
    step_ns = point["wall_ns"] // point["steps"]
    overhead_ns = overhead_per_ten_minutes(
        step_ns=step_ns,
        checkpoint_ns=round(measured["seconds"] * _NS_PER_S),
        eval_ns=round(point["eval"]["seconds"] * table.eval_batches * _NS_PER_S),
        every_steps=table.every_steps,
        every_seconds=table.every_seconds,
    )
    overhead = overhead_ns / _NS_PER_S
    problems = []
    if free < needed:
        problems.append(
            f"{format_bytes(free)} are free in {folder}, {format_bytes(needed)} are needed for six "
            "checkpoints; free space or set [checkpoint] dir"
        )
    if overhead_ns >= OVERHEAD_LIMIT_NS:
        problems.append(
            f"checkpoints and evals take {overhead:.1f} s of every 10 min, the limit behind the "
            f"utilisation factor is {_LIMIT_SECONDS} s; raise every_steps or use a faster disk"
        )
    return Finding(
        green=not problems,
        reason="; ".join(problems),
        data={
            "cadence_steps": table.every_steps,
            "cadence_seconds": table.every_seconds,
            "parameter_bytes": point["parameter_bytes"],
            "estimated_bytes": estimated,
            "measured_bytes": measured["bytes"],
            "measured_seconds": measured["seconds"],
            "free_bytes": free,
            "needed_bytes": needed,
            "step_seconds": step_ns / _NS_PER_S,
            "eval_seconds": point["eval"]["seconds"] * table.eval_batches,
            "overhead_seconds_per_10min": overhead,
            "limit_seconds": _LIMIT_SECONDS,
        },
    )


def budget_finding(ctx: GateContext) -> Finding:
    """Compute the token budget from the chosen point's measured rate."""
    choice = ctx.evidence("choice").data
    table = ctx.config.budget
    # Only whole windows are trained on, and a window needs the token after its last.
    seq_len = choice["seq_len"]
    windows = (ctx.evidence("pack").data["train_tokens"] - 1) // seq_len
    # Beyond what a lock can hold there is no difference to a budget.
    data_tokens = min(windows * seq_len * ctx.config.data.epochs, MAX_INTEGER)
    inputs = BudgetInputs(
        tok_s=choice["tok_s"],
        window_hours=table.window_hours,
        reserve_hours=table.reserve_hours,
        utilisation=table.utilisation,
        micro_batch=choice["micro_batch"],
        seq_len=choice["seq_len"],
        data_tokens=data_tokens,
    )
    try:
        budget = compute_budget(inputs)
    except UsageError as error:
        # The measured rate or the data is too small for one step: a verdict on the run.
        return Finding(green=False, reason=str(error), data={})
    problem = _warmup_problem(ctx, budget.total_steps)
    return Finding(
        green=not problem,
        reason=problem,
        data={
            "arithmetic": [asdict(line) for line in budget.steps],
            "tok_s": choice["tok_s"],
            "window_hours": str(table.window_hours),
            "reserve_hours": str(table.reserve_hours),
            "utilisation": str(table.utilisation),
            "productive_seconds": budget.productive_seconds,
            "budget_tokens": budget.budget_tokens,
            "data_tokens": data_tokens,
            "locked_budget_tokens": budget.locked_budget_tokens,
            "limited_by": budget.limited_by,
            "micro_batch": choice["micro_batch"],
            "seq_len": choice["seq_len"],
            "total_steps": budget.total_steps,
            "tokens_in_steps": budget.tokens_in_steps,
        },
    )


def _warmup_problem(ctx: GateContext, total_steps: int) -> str:
    """A run whose warm-up never ends is refused by its schedule: said before it is locked."""
    warmup_steps = settings_from(ctx.config.optimizer).warmup_steps
    if warmup_steps < total_steps:
        return ""
    return (
        f"the warm-up of {warmup_steps:,} steps does not end within the {total_steps:,} steps of "
        "the budget; make [optimizer] warmup_steps smaller, or the window or epochs larger"
    )
