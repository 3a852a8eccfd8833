"""Making the lock from green evidence; `gate/lock_check.py` holds it against what it locks."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leadline.core.errors import DiskSpaceError, LockError
from leadline.core.ledger import verify_ledger
from leadline.core.lineage import lock_record
from leadline.core.lockfile import LOCK_FILE, WRITTEN_KIND, ConfigLock, read_lock, write_lock
from leadline.gate.arithmetic import checkpoint_finding
from leadline.gate.context import GateContext
from leadline.gate.lock_check import lock_problems
from leadline.gate.lock_payload import LOCK_VALUES, LockSources, needed_evidence, started_line

__all__ = ["ARITHMETIC_KIND", "finish_lock", "lock_problems"]

ARITHMETIC_KIND = "budget.arithmetic"


def finish_lock(ctx: GateContext) -> Path:
    """Write the arithmetic to the ledger, then the lock, then its hash to the ledger.

    A kill between any two of the three is completed by the next call: the arithmetic may
    stand twice, the lock and its line never do.

    Raises:
        LockError: a finished lock is there, or an unfinished one of other evidence.
        IntegrityError: the workload's files are not what was measured.
        DiskSpaceError: the disk no longer holds the run's checkpoints.
    """
    path = ctx.run_dir / LOCK_FILE
    ledger = ctx.store.ledger
    ctx.refuse_changed_workload()
    _refuse_full_disk(ctx)
    record = lock_record(ctx.run_dir)
    if record in ("recorded", "lost"):
        raise LockError(f"{path} was written before; a lock is never overwritten")
    if record == "unrecorded":
        lock = read_lock(ctx.run_dir)
        if not _is_made_of(lock, ctx):
            raise LockError(
                f"{path} was left by a gate that was cut off and no longer matches the evidence; "
                "move it away and run the gate again"
            )
    else:
        _log_arithmetic(ctx)
        lock = ConfigLock(payload=_payload(ctx))
        write_lock(ctx.run_dir, lock)
    ledger.append(
        WRITTEN_KIND,
        {
            "sha256": lock.sha256,
            "locked_budget_tokens": lock.payload["locked_budget_tokens"],
            "total_steps": lock.payload["total_steps"],
        },
    )
    return path


def _refuse_full_disk(ctx: GateContext) -> None:
    """The sweep's other phases, and other people, have written since the disk was judged."""
    finding = checkpoint_finding(ctx)
    if not finding.green:
        raise DiskSpaceError(f"the lock is not written: {finding.reason}")


def _log_arithmetic(ctx: GateContext) -> None:
    lines = [
        f"{line['name']}: {line['formula']} = {line['numbers']} = {line['result']}"
        for line in ctx.evidence("budget").data["arithmetic"]
    ]
    ctx.store.ledger.append(ARITHMETIC_KIND, {"lines": lines})


def _payload(ctx: GateContext) -> dict[str, Any]:
    head = ctx.store.ledger.head()
    sources = LockSources(
        config=ctx.config,
        started=started_line(ctx.store.ledger.entries()),
        found=needed_evidence(ctx.config, ctx.store.read()),
    )
    return {
        **{key: value(sources) for key, value in LOCK_VALUES.items()},
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "ledger_head": head.hash,
        "ledger_lines": head.lines,
    }


def _is_made_of(lock: ConfigLock, ctx: GateContext) -> bool:
    """True when a lock left without its ledger line is the one this evidence gives."""
    anchored = verify_ledger(ctx.store.ledger.path, anchor=lock.anchor).ok
    own = {key: lock.payload.get(key) for key in ("created", "ledger_head", "ledger_lines")}
    return anchored and dict(lock.payload) == {**_payload(ctx), **own}
