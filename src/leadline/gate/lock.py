"""Making the lock from green evidence, and holding a lock against everything it locks."""

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leadline._version import __version__
from leadline.core import canonical
from leadline.core.budget import BudgetInputs, compute_budget
from leadline.core.errors import DataError, LeadlineError, LockError
from leadline.core.evidence import Evidence, EvidenceStore
from leadline.core.gate import PROBE_PREFIX, gate_status
from leadline.core.ledger import verify_ledger
from leadline.core.lockfile import (
    LOCK_FILE,
    SCHEMA,
    WRITTEN_KIND,
    ConfigLock,
    read_lock,
    write_lock,
)
from leadline.core.source import source_sha256
from leadline.data import check_shards, load_manifest
from leadline.gate.context import GateContext, exact_json

ARITHMETIC_KIND = "budget.arithmetic"


def finish_lock(ctx: GateContext) -> Path:
    """Write the arithmetic to the ledger, then the lock, then its hash to the ledger.

    A kill between any two of the three is completed by the next call: the arithmetic may
    stand twice, the lock and its line never do.
    """
    path = ctx.run_dir / LOCK_FILE
    ledger = ctx.store.ledger
    if path.exists():
        lock = read_lock(ctx.run_dir)
        if any(entry.kind == WRITTEN_KIND for entry in ledger.entries()):
            raise LockError(f"{path} exists; a lock is never overwritten")
        if not _is_made_of(lock, ctx.store.read()):
            raise LockError(
                f"{path} was left by a gate that was cut off and no longer matches the evidence; "
                "move it away and run the gate again"
            )
    else:
        found = ctx.store.read()
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


def lock_problems(run_dir: Path, *, deep: bool = False) -> list[str]:
    """Everything in which a run differs from its lock; empty when all holds.

    Checked: the lock's form, the ledger's chain with the lock's anchor, the ledger line that
    holds the lock's hash, every piece of evidence, the arithmetic, the data's manifest and
    the code. With *deep* every token shard is read and hashed too.

    Raises:
        LockError: there is no lock to check.
    """
    lock = read_lock(run_dir)
    store = EvidenceStore(run_dir)
    check = verify_ledger(store.ledger.path, anchor=lock.anchor)
    if not check.ok:
        return [f"ledger: {check.reason}"]
    problems = []
    written = [entry for entry in store.ledger.entries() if entry.kind == WRITTEN_KIND]
    if not any(entry.data.get("sha256") == lock.sha256 for entry in written):
        problems.append(
            "ledger: no line holds this lock's sha256; the lock or the tail was changed"
        )
    found = store.read()
    problems += _evidence_problems(lock, found)
    status = gate_status(run_dir)
    if not status.green:
        problems.append(f"gate: red or missing {', '.join((*status.missing, *status.red))}")
    problems += _arithmetic_problems(lock)
    problems += _data_problems(run_dir, lock, found, deep)
    if source_sha256() != lock.payload["code_sha256"]:
        problems.append(
            f"code: leadline's source is not what was locked (leadline {__version__} now, "
            f"{lock.payload.get('leadline')} then); run the version that locked, or a new gate"
        )
    return problems


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
        "optimizer": exact_json(config.optimizer),
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


def _is_made_of(lock: ConfigLock, found: Mapping[str, Evidence]) -> bool:
    return dict(lock.payload["evidence"]) == {name: item.sha256 for name, item in found.items()}


def _evidence_problems(lock: ConfigLock, found: Mapping[str, Evidence]) -> list[str]:
    problems = []
    for name, sha256 in lock.payload["evidence"].items():
        evidence = found.get(name)
        if evidence is None:
            problems.append(f"evidence: {name} is not in the ledger")
        elif evidence.sha256 != sha256:
            reason = evidence.reason or "it was recorded again after the lock"
            problems.append(f"evidence: {name} is not what was locked: {reason}")
    return problems


def _arithmetic_problems(lock: ConfigLock) -> list[str]:
    payload, inputs = lock.payload, lock.payload["budget"]
    try:
        budget = compute_budget(
            BudgetInputs(
                tok_s=payload["tok_s"],
                window_hours=inputs["window_hours"],
                reserve_hours=inputs["reserve_hours"],
                utilisation=inputs["utilisation"],
                micro_batch=payload["micro_batch"],
                seq_len=payload["seq_len"],
                data_tokens=inputs["data_tokens"],
            )
        )
    except LeadlineError as error:
        return [f"arithmetic: {error}"]
    wanted = {
        "locked_budget_tokens": budget.locked_budget_tokens,
        "total_steps": budget.total_steps,
        "tokens_in_steps": budget.tokens_in_steps,
    }
    return [
        f"arithmetic: {key} is {payload[key]}, its inputs give {value}"
        for key, value in wanted.items()
        if payload[key] != value
    ]


def _data_problems(
    run_dir: Path, lock: ConfigLock, found: Mapping[str, Evidence], deep: bool
) -> list[str]:
    pack = found.get("pack")
    if pack is None or "shards_dir" not in pack.data:
        return []  # told by _evidence_problems
    root = run_dir / pack.data["shards_dir"]  # relative where it lies inside the run
    try:
        manifest = load_manifest(root)
    except DataError as error:
        return [f"data: {error}"]
    if manifest.sha256 != lock.payload["manifest_sha256"]:
        return [f"data: the manifest at {root} is not the one that was locked"]
    return [f"data: {problem}" for problem in check_shards(root)] if deep else []
