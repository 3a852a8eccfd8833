"""Running a gate: one phase after another, resumable after a kill at any moment.

- One gate at a time in a run directory (a file lock held for the whole run).
- Evidence is written before its ledger line; a phase whose line is missing runs again.
- A finished lock ends the matter: the same configuration says "already locked", another
  is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leadline._version import __version__
from leadline.core import atomic, canonical
from leadline.core.errors import (
    DataError,
    EnvironmentUnfitError,
    IntegrityError,
    LockError,
    ProbeError,
    UnsafePackError,
)
from leadline.core.evidence import Evidence, EvidenceStore
from leadline.core.gate import STARTED_KIND, GateStatus, gate_status, judge
from leadline.core.ledger import verify_ledger
from leadline.core.lineage import LOST_LOCK, lock_record
from leadline.core.lockfile import LOCK_FILE, read_lock
from leadline.core.source import source_sha256
from leadline.gate.config import GateConfig, load_config
from leadline.gate.context import Finding, GateContext
from leadline.gate.lock import finish_lock, lock_problems
from leadline.gate.phases import Phase, phases_of
from leadline.gate.run_folder import alone_in, refuse_inside_data
from leadline.gate.workload_files import workload_files
from leadline.probe.progress import Progress
from leadline.report.build import build_report

CONFIG_FILE = "gate.toml"
RESUMED_KIND = "gate.resumed"
# What a phase may find wrong with the world; a wrong request (UsageError) or a full disk
# ends the command instead and leaves no evidence.
_FINDINGS = (DataError, EnvironmentUnfitError, IntegrityError, ProbeError, UnsafePackError)


class GateEvents:
    """What a caller may want to show; every method does nothing unless overridden."""

    def phase_started(self, title: str) -> None:
        """A phase begins."""

    def progress(self, progress: Progress) -> None:
        """A probe process has got on."""

    def ledger_mended(self, line: int) -> None:
        """A crash had torn the ledger's last line, number *line*; it was filed away."""

    def phase_ended(self, phase: str, title: str, evidence: Evidence, reused: bool) -> None:
        """A phase has recorded its evidence, or found it there already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateOutcome:
    """How a gate ended."""

    status: GateStatus
    lock_path: Path | None
    """None while the gate is red."""
    report_path: Path
    already_locked: bool


def run_gate(config_path: Path, run_dir: Path, events: GateEvents) -> GateOutcome:
    """Run or resume the gate of *config_path* in *run_dir*.

    Raises:
        UsageError: the configuration is wrong, or *run_dir* holds what no gate made.
        LockError: the run holds a lock for something else, or another gate is at work here.
        IntegrityError: the ledger of an earlier attempt does not verify.
    """
    config, content = load_config(config_path)
    base_dir = config_path.resolve().parent
    files = workload_files(config.workload, base_dir)  # a missing one is told before all else
    points = tuple(point.name for point in config.sweep.points)
    refuse_inside_data(run_dir, config, base_dir)
    with alone_in(run_dir):
        store = EvidenceStore(run_dir)
        _mend(store, events)
        if _already_locked(run_dir, content):
            return GateOutcome(
                status=gate_status(run_dir),
                lock_path=run_dir / LOCK_FILE,
                report_path=build_report(run_dir),
                already_locked=True,
            )
        atomic.write_bytes(run_dir / CONFIG_FILE, content)
        ctx = GateContext(
            config=config,
            base_dir=base_dir,
            run_dir=run_dir.resolve(),
            store=store,
            code_sha256=source_sha256(),
            workload_files=files,
            on_progress=events.progress,
        )
        store.ledger.append(
            STARTED_KIND,
            {
                "config_sha256": canonical.sha256_bytes(content),
                "points": list(points),
                "leadline": __version__,
                "code_sha256": ctx.code_sha256,
                "workload_files": files,
            },
        )
        _run_phases(ctx, config, events)
        green = judge(points, store.read()).green
        if green:
            finish_lock(ctx)
        return GateOutcome(
            status=gate_status(run_dir),
            lock_path=run_dir / LOCK_FILE if green else None,
            report_path=build_report(run_dir),
            already_locked=False,
        )


def _run_phases(ctx: GateContext, config: GateConfig, events: GateEvents) -> None:
    for phase in phases_of(config.sweep.points):
        events.phase_started(phase.title)
        evidence, reused = _run_phase(ctx, phase)
        events.phase_ended(phase.name, phase.title, evidence, reused)
        if not evidence.green and not phase.goes_on:
            return


def _run_phase(ctx: GateContext, phase: Phase) -> tuple[Evidence, bool]:
    try:
        inputs = phase.inputs(ctx)
    except _FINDINGS as error:  # what the phase would be given cannot be read
        red = ctx.store.record(phase.name, green=False, reason=str(error), inputs="", data={})
        return red, False
    there = ctx.store.reusable(phase.name, inputs)
    if there is not None and not phase.same and not phase.again(ctx, there):
        return there, True
    finding = _found(ctx, phase.run)
    ctx.refuse_changed_workload()
    if there is not None and phase.same and finding.green and _agree(there, finding, phase.same):
        return there, True
    recorded = ctx.store.record(
        phase.name,
        green=finding.green,
        reason=finding.reason,
        inputs=inputs,
        data=finding.data,
    )
    return recorded, False


def _found(ctx: GateContext, run: Callable[[GateContext], Finding]) -> Finding:
    try:
        return run(ctx)
    except _FINDINGS as error:
        return Finding(green=False, reason=str(error), data={})


def _agree(there: Evidence, finding: Finding, keys: tuple[str, ...]) -> bool:
    return all(there.data.get(key) == finding.data[key] for key in keys)


def _mend(store: EvidenceStore, events: GateEvents) -> None:
    """Let an append file away the line that a kill tore, whatever it was going to say."""
    if not store.ledger.path.exists():
        return
    check = verify_ledger(store.ledger.path)
    if check.torn:
        store.ledger.append(RESUMED_KIND, {"torn_line": check.lines})
        events.ledger_mended(check.lines)


def _already_locked(run_dir: Path, content: bytes) -> bool:
    """True when a lock of this configuration stands; False when none does, or none quite yet.

    Raises:
        LockError: the lock is gone, is of another configuration, or does not verify.
    """
    record = lock_record(run_dir)
    if record == "lost":
        raise LockError(f"{run_dir}: {LOST_LOCK}, or choose another --out")
    if record == "absent":
        return False
    if read_lock(run_dir).payload.get("config_sha256") != canonical.sha256_bytes(content):
        raise LockError(
            f"{run_dir} is locked for another configuration; a lock is never overwritten, "
            "choose another --out"
        )
    if record == "unrecorded":
        return False  # killed between the lock and its ledger line; finish_lock completes it
    problems = lock_problems(run_dir)
    if problems:
        raise LockError(
            f"{run_dir / LOCK_FILE} does not verify: {'; '.join(problems)}. For a new gate give "
            f"another --out, or remove {run_dir} if nothing needs this lock any more"
        )
    return True
