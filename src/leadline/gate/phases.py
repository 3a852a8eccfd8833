"""The phases of a gate, in order: what each depends on and what it records.

A phase runs when no green evidence of the same inputs is there. Environment, pack and
checkpoint always run: machine, data and free disk are what a resumed gate has to be sure of.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from leadline.cloud.disposition import LocalProvider
from leadline.core.canonical import sha256_json
from leadline.core.evidence import Evidence
from leadline.core.gate import PROBE_PREFIX
from leadline.gate.arithmetic import ALL_BUT_FREE_DISK, budget_finding, checkpoint_finding
from leadline.gate.choice import choose
from leadline.gate.config import PointTable
from leadline.gate.context import Finding, GateContext, exact_json, plain
from leadline.gate.data_source import hash_gate_inputs, known_vocab_size
from leadline.gate.hash_gate import run_hash_gate
from leadline.probe.process import run_probe
from leadline.probe.request import EnvironmentRequest, PointRequest, TwinRequest

_BACK_TO_START_PERCENT = 1
"""Of the device: what the points may differ by in memory used before they begin."""


def _never(ctx: GateContext, there: Evidence) -> bool:
    """Evidence of the same inputs stands."""
    del ctx, there
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One step of the gate; its name is the name of its evidence."""

    name: str
    title: str
    inputs: Callable[[GateContext], str]
    run: Callable[[GateContext], Finding]
    same: tuple[str, ...] = ()
    """Set on phases that always run: keys whose equality keeps the evidence already there."""
    goes_on: bool = False
    """True where a red finding does not make the next phase pointless."""
    again: Callable[[GateContext, Evidence], bool] = _never
    """Whether evidence that is there, green and of the same inputs is still found anew."""


def phases_of(points: tuple[PointTable, ...]) -> tuple[Phase, ...]:
    """All phases of a gate over *points*."""
    return (
        Phase(
            name="environment",
            title="Environment",
            inputs=lambda ctx: sha256_json(ctx.section("environment")),
            run=_environment,
            same=("fingerprint", "problems"),
        ),
        Phase(
            name="pack",
            title="Hash gate",
            inputs=hash_gate_inputs,
            run=run_hash_gate,
            same=("manifest_sha256", "shards_dir", "train_tokens", "eval_tokens"),
        ),
        Phase(
            name="twin",
            title="fp32 twin",
            inputs=lambda ctx: ctx.measured_inputs("twin", "twin"),
            run=_twin,
        ),
        *(_probe_phase(point) for point in points),
        Phase(name="choice", title="Choice", inputs=_choice_inputs, run=_choice),
        Phase(
            name="checkpoint",
            title="Checkpoint",
            inputs=lambda ctx: sha256_json(
                {"choice": ctx.evidence("choice").sha256, **ctx.section("checkpoint")}
            ),
            run=checkpoint_finding,
            same=ALL_BUT_FREE_DISK,
        ),
        Phase(
            name="budget",
            title="Budget",
            inputs=lambda ctx: sha256_json(
                {
                    "choice": ctx.evidence("choice").sha256,
                    "data": ctx.evidence("pack").data["manifest_sha256"],
                    **ctx.section("budget", "data", "optimizer"),
                }
            ),
            run=budget_finding,
        ),
        Phase(
            name="disposition",
            title="Disposition",
            inputs=lambda ctx: sha256_json(ctx.section("disposition")),
            run=_disposition,
        ),
    )


def _environment(ctx: GateContext) -> Finding:
    table, config = ctx.config.environment, ctx.config
    requirements = None if table.requirements is None else str(ctx.base_dir / table.requirements)
    data = run_probe(
        EnvironmentRequest(
            device=table.device,
            requirements=requirements,
            workload=plain(config.workload),
            base_dir=str(ctx.base_dir),
            seq_lens=(config.twin.seq_len, *(point.seq_len for point in config.sweep.points)),
            vocab_size=known_vocab_size(ctx),
        ),
        ctx.work_dir,
        "environment",
        ctx.on_progress,
    )
    return Finding(green=not data["problems"], reason="; ".join(data["problems"]), data=data)


def _twin(ctx: GateContext) -> Finding:
    table = ctx.config.twin
    data = run_probe(
        TwinRequest(
            subject=ctx.subject(),
            steps=table.steps,
            micro_batch=table.micro_batch,
            seq_len=table.seq_len,
            tolerance=float(table.tolerance),
            settle_steps=table.settle_steps,
        ),
        ctx.work_dir,
        "twin",
        ctx.on_progress,
    )
    reason = "; ".join(data["problems"])
    if data["accused"]:
        named = ", ".join(f"{item['module']} ({item['rule']})" for item in data["accused"])
        reason += f"; the lanes part in {named}"
    return Finding(green=data["green"], reason=reason, data=data)


def _probe_phase(point: PointTable) -> Phase:
    return Phase(
        name=f"{PROBE_PREFIX}{point.name}",
        title=f"Sweep {point.name} ({point.micro_batch}x{point.seq_len})",
        inputs=lambda ctx: _probe_inputs(ctx, point),
        run=lambda ctx: _probe(ctx, point),
        goes_on=True,
        again=_deserves_another_try,
    )


def _probe_inputs(ctx: GateContext, point: PointTable) -> str:
    """The point's own row and what the sweep says of every point; other rows do not touch it."""
    sweep = ctx.section("sweep")["sweep"]
    del sweep["points"]
    return ctx.measured_inputs(
        "probe",
        sweep=sweep,
        point=exact_json(point),
        # The trial checkpoint is part of the measurement, and so is the disk it goes to.
        checkpoint_dir=str(ctx.checkpoint_dir),
    )


def _deserves_another_try(ctx: GateContext, there: Evidence) -> bool:
    """True for an unusable point of a sweep that left nothing to choose.

    Running the gate again is what its owner does after freeing or cooling the card.
    """
    choice = ctx.store.read().get("choice")
    nothing_left = choice is not None and not choice.green and "reasons" in choice.data
    return nothing_left and there.data["status"] != "ok"


def _probe(ctx: GateContext, point: PointTable) -> Finding:
    """Measure one point. Any result that was taken is green evidence, out of memory too."""
    data = run_probe(
        point_request(ctx, point), ctx.work_dir, f"probe-{point.name}", ctx.on_progress
    )
    left_over = _memory_left_over(ctx, data["memory"]["device_start_bytes"])
    if left_over:
        return Finding(green=False, reason=left_over, data=data)
    return Finding(green=True, reason=data["why"], data=data)


def point_request(ctx: GateContext, point: PointTable) -> PointRequest:
    """The request that measures *point* under the gate's configuration."""
    sweep = ctx.config.sweep
    return PointRequest(
        subject=ctx.subject(),
        name=point.name,
        micro_batch=point.micro_batch,
        seq_len=point.seq_len,
        eval_batch=point.eval_batch or point.micro_batch,
        eval_batches=sweep.eval_batches,
        warmup_steps=sweep.warmup_steps,
        steps=sweep.steps,
        seconds=sweep.window_seconds,
        memory_limit_percent=sweep.memory_limit_percent,
        steady_percent=str(sweep.steady_percent),
        checkpoint_dir=str(ctx.checkpoint_dir),
    )


def _memory_left_over(ctx: GateContext, start_bytes: int) -> str:
    """Say if this point began with memory that the one before it should have returned."""
    if ctx.evidence("environment").data["device"]["kind"] == "cpu":
        return ""  # the machine's free memory moves with everything else that runs on it
    earlier = [
        evidence.data["memory"]["device_start_bytes"]
        for name, evidence in ctx.store.read().items()
        if name.startswith(PROBE_PREFIX) and evidence.green
    ]
    total = ctx.evidence("environment").data["device"]["memory_bytes"]
    if earlier and (start_bytes - min(earlier)) * 100 > total * _BACK_TO_START_PERCENT:
        return (
            f"{start_bytes} bytes of the device were in use before this point, {min(earlier)} "
            "before another; end what else runs on the card and run the gate again"
        )
    return ""


def _point_names(ctx: GateContext) -> list[str]:
    return [f"{PROBE_PREFIX}{point.name}" for point in ctx.config.sweep.points]


def _choice_inputs(ctx: GateContext) -> str:
    return sha256_json({name: ctx.evidence(name).sha256 for name in _point_names(ctx)})


def _choice(ctx: GateContext) -> Finding:
    return choose([ctx.evidence(name) for name in _point_names(ctx)])


def _disposition(ctx: GateContext) -> Finding:
    table = ctx.config.disposition
    if table is None:
        return Finding(
            green=False,
            reason="[disposition] is missing from the configuration; say next = 'continue', "
            "or 'pause' with pause_minutes",
            data={},
        )
    done = LocalProvider(table.rented).dispose(table.pause_minutes)
    time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    data = {"provider": done.provider, "decision": done.decision, "why": done.why, "time": time}
    return Finding(green=not done.problem, reason=done.problem, data=data)
