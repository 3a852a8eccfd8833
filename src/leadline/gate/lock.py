"""Making the lock from green evidence; `gate/lock_check.py` holds it against what it locks."""

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leadline._version import __version__
from leadline.core import canonical
from leadline.core.errors import LockError
from leadline.core.evidence import Evidence
from leadline.core.gate import PROBE_PREFIX, requirements
from leadline.core.ledger import verify_ledger
from leadline.core.lockfile import (
    LOCK_FILE,
    SCHEMA,
    WRITTEN_KIND,
    ConfigLock,
    read_lock,
    write_lock,
)
from leadline.gate.context import GateContext, exact_json
from leadline.gate.lock_check import lock_problems
from leadline.train.settings import exact_settings, settings_from

__all__ = ["ARITHMETIC_KIND", "finish_lock", "lock_problems"]

ARITHMETIC_KIND = "budget.arithmetic"


def finish_lock(ctx: GateContext) -> Path:
    """Write the arithmetic to the ledger, then the lock, then its hash to the ledger.

    A kill between any two of the three is completed by the next call: the arithmetic may
    stand twice, the lock and its line never do.

    Raises:
        LockError: a finished lock is there, or an unfinished one of other evidence.
        IntegrityError: the workload's files are not what was measured.
    """
    path = ctx.run_dir / LOCK_FILE
    ledger = ctx.store.ledger
    ctx.refuse_changed_workload()
    found = _needed(ctx)
    if path.exists():
        if any(entry.kind == WRITTEN_KIND for entry in ledger.entries()):
            raise LockError(f"{path} exists; a lock is never overwritten")
        lock = read_lock(ctx.run_dir)
        if not _is_made_of(lock, ctx, found):
            raise LockError(
                f"{path} was left by a gate that was cut off and no longer matches the evidence; "
                "move it away and run the gate again"
            )
    else:
        budget = found["budget"].data
        ledger.append(
            ARITHMETIC_KIND,
            {
                "lines": [
                    f"{line['name']}: {line['formula']} = {line['numbers']} = {line['result']}"
                    for line in budget["arithmetic"]
                ]
            },
        )
        lock = ConfigLock(payload=_payload(ctx, found))
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


def _needed(ctx: GateContext) -> dict[str, Evidence]:
    """The evidence this gate asks for; an earlier attempt with other points may have left more."""
    points = [point.name for point in ctx.config.sweep.points]
    names = {need.evidence for need in requirements(points)}
    return {name: item for name, item in ctx.store.read().items() if name in names}


def _payload(ctx: GateContext, found: Mapping[str, Evidence]) -> dict[str, Any]:
    head = ctx.store.ledger.head()
    environment, pack = found["environment"].data, found["pack"].data
    choice, budget, twin = found["choice"].data, found["budget"].data, found["twin"].data
    checkpoint = found["checkpoint"].data
    config = ctx.config
    points = [name for name in found if name.startswith(PROBE_PREFIX)]
    return {
        "schema": SCHEMA,
        "leadline": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "locked_budget_tokens": budget["locked_budget_tokens"],
        "best_cfg": choice["best_cfg"],
        "tok_s": choice["tok_s"],
        "total_steps": budget["total_steps"],
        "tokens_in_steps": budget["tokens_in_steps"],
        "micro_batch": choice["micro_batch"],
        "seq_len": choice["seq_len"],
        "eval_batch": choice["eval"]["batch"],
        "seed": config.seed,
        "limited_by": budget["limited_by"],
        "budget": {
            "window_hours": budget["window_hours"],
            "reserve_hours": budget["reserve_hours"],
            "utilisation": budget["utilisation"],
            "epochs": config.data.epochs,
            "data_tokens": budget["data_tokens"],
        },
        "checkpoint": {
            "every_steps": checkpoint["cadence_steps"],
            "every_seconds": checkpoint["cadence_seconds"],
            "bytes": checkpoint["measured_bytes"],
        },
        "probes": {
            name.removeprefix(PROBE_PREFIX): _probe_summary(found[name].data) for name in points
        },
        "peak_device_bytes": choice["memory"]["device_peak_bytes"],
        "twin_worst_delta": f"{twin['worst_delta']:.6f}",
        "workload": exact_json(config.workload),
        "workload_files": dict(ctx.workload_files),
        "optimizer": exact_settings(settings_from(config.optimizer)),
        "manifest_sha256": pack["manifest_sha256"],
        "train_tokens": pack["train_tokens"],
        "environment_fingerprint": environment["fingerprint"],
        "environment": {
            "torch": environment["torch"],
            "cuda": environment["cuda"],
            "device": environment["device"]["name"],
            "device_kind": environment["device"]["kind"],
            "python": platform.python_version(),
        },
        "code_sha256": ctx.code_sha256,
        "config_sha256": canonical.sha256_file(ctx.run_dir / "gate.toml"),
        "evidence": {name: evidence.sha256 for name, evidence in sorted(found.items())},
        "ledger_head": head.hash,
        "ledger_lines": head.lines,
    }


def _probe_summary(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "status": data["status"],
        "micro_batch": data["micro_batch"],
        "seq_len": data["seq_len"],
        "tok_s": data.get("tok_s"),
        "device_peak_bytes": data["memory"]["device_peak_bytes"],
    }


def _is_made_of(lock: ConfigLock, ctx: GateContext, found: Mapping[str, Evidence]) -> bool:
    """True when a lock left without its ledger line is the one this evidence gives."""
    anchored = verify_ledger(ctx.store.ledger.path, anchor=lock.anchor).ok
    own = {key: lock.payload.get(key) for key in ("created", "ledger_head", "ledger_lines")}
    return anchored and dict(lock.payload) == {**_payload(ctx, found), **own}
