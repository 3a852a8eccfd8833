"""Sample runs, written through the real evidence store and ledger."""

import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadline.core import atomic
from leadline.core.budget import BudgetInputs, compute_budget
from leadline.core.evidence import EvidenceStore
from leadline.core.lockfile import ConfigLock, write_lock

GIB = 2**30
TOTAL_BYTES = 140 * GIB
POINTS = ("P1", "P2", "P3")


def environment() -> dict[str, Any]:
    return {
        "python": "3.11.7",
        "torch": "2.13.0",
        "cuda": "13.0",
        "device": {
            "kind": "cuda",
            "name": "NVIDIA H200",
            "capability": "9.0",
            "memory_bytes": TOTAL_BYTES,
            "driver": "580.65.06",
            "mig": "off",
            "arch_list": ["sm_80", "sm_90", "sm_100"],
            "count": 1,
        },
        "cpu": {"name": "Intel Xeon Platinum 8568Y+", "cores": 16, "memory_bytes": 128 * GIB},
        "bf16": {"legal": True, "why": "capability 9.0, at least 8.0"},
        "attention_kernel": {"ran": True, "name": "scaled_dot_product_attention, flash"},
        "other_processes": [],
        "distributions_sha256": "5d" * 32,
        "distributions": {"numpy": "2.4.6", "torch": "2.13.0", "transformers": "5.24.0"},
        "unpinned": [],
        "code_sha256": "c0" * 32,
        "fingerprint": "f1" * 32,
    }


def pack() -> dict[str, Any]:
    return {
        "tarball_sha256": None,
        "manifest_sha256": "ab" * 32,
        "files": 9,
        "bytes": 7_400_000_000,
        "train_tokens": 3_620_114_432,
        "eval_tokens": 73_881_600,
        "vocab_size": 50_257,
        "dtype": "uint16",
        "negative_control": {
            "file": "eval/shard-00000.idx",
            "offset": 4_117,
            "found": True,
            "said": "eval/shard-00000.idx has the sha256 26f0c8..., de22bf... is recorded",
        },
        "secrets_found": 0,
        "free_bytes": 900 * GIB,
        "needed_bytes": 15 * GIB,
    }


def _lane(seed: int, drift: float) -> dict[str, Any]:
    noise = random.Random(1)
    own = random.Random(seed)
    losses = [
        10.83 * math.exp(-step / 60) + 5.2 + noise.gauss(0, 0.05) + own.gauss(0, drift)
        for step in range(200)
    ]
    norms = [1.1 + 2.4 * math.exp(-step / 25) + noise.gauss(0, 0.08) for step in range(200)]
    return {"losses": losses, "grad_norms": norms, "seconds": 31.2 if drift == 0 else 14.8}


def twin() -> dict[str, Any]:
    fp32, bf16 = _lane(2, 0.0), _lane(3, 0.004)
    deltas = [abs(a - b) for a, b in zip(fp32["losses"], bf16["losses"], strict=True)]
    worst = max(range(20, 200), key=lambda index: deltas[index])
    return {
        "steps": 200,
        "seq_len": 512,
        "micro_batch": 16,
        "learning_rate": 6e-4,
        "fp32": fp32,
        "bf16": bf16,
        "worst_step": worst + 1,
        "worst_delta": deltas[worst],
        "final_delta": deltas[-1],
        "tolerance": 0.05,
        "settle_steps": 20,
        "matmul_error": 3.1e-7,
        "matmul_limit": 1e-5,
        "problems": [],
        "accused": [],
    }


def red_twin() -> dict[str, Any]:
    data = twin()
    losses = [
        loss + 0.0000045 * max(step - 60, 0) ** 2
        for step, loss in enumerate(data["bf16"]["losses"])
    ]
    losses[143] = None
    data["bf16"]["losses"] = losses
    data |= {"worst_step": 200, "worst_delta": 0.0901, "final_delta": 0.0901}
    data["problems"] = [
        "bf16 loss is 0.0901 from fp32 at step 200, 0.05 is allowed",
        "bf16 loss at step 144 is not finite",
    ]
    data["accused"] = [
        {
            "module": "blocks.3.attention.debate_gate.softmax",
            "module_class": "HandWrittenSoftmax",
            "rule": "reduction in bfloat16",
            "error": 0.0461,
            "band": 0.0078,
            "detail": "sum over an axis of 4096 with bfloat16 input and output",
        },
        {
            "module": "blocks.7.norm",
            "module_class": "PlainRMSNorm",
            "rule": "outside the error band",
            "error": 0.0193,
            "band": 0.0078,
            "detail": "",
        },
    ]
    return data


def probe(name: str, batch: int, length: int, tok_s: float, percent: float) -> dict[str, Any]:
    noise = random.Random(name)
    step_ns = batch * length / tok_s * 1e9
    steps = round(60e9 / step_ns)
    times = [round(step_ns * (1 + abs(noise.gauss(0, 0.01)))) for _ in range(steps)]
    peak = round(TOTAL_BYTES * percent / 100)
    return {
        "name": name,
        "micro_batch": batch,
        "seq_len": length,
        "status": "ok",
        "why": "",
        "parameters": 139_699_456,
        "steps": steps,
        "epochs": 1,
        "warmup_steps": 10,
        "warmup_seconds": 38.4,
        "tokens": steps * batch * length,
        "wall_ns": sum(times),
        "tok_s": tok_s,
        "tok_s_low": tok_s * 0.996,
        "tok_s_high": tok_s * 1.004,
        "halves": [tok_s * 1.002, tok_s * 0.998],
        "step_ns": times,
        "recompiles": 0,
        "throttled": [],
        "grad_norm": {"mean": 1.134, "std": 0.081, "max": 1.702},
        "loss": {"first": 10.91, "last": 6.02},
        "memory": {
            "allocator_peak_bytes": peak - 3 * GIB,
            "device_peak_bytes": peak,
            "device_total_bytes": TOTAL_BYTES,
            "device_start_bytes": GIB // 2,
            "percent": percent,
            "allocator_retries": 0,
        },
        "eval": {
            "batch": batch,
            "batches": 3,
            "seconds": 0.41,
            "peaks_bytes": [peak, peak, peak],
            "status": "ok",
        },
        "checkpoint": {"bytes": 1_676_412_000, "seconds": 1.9},
        "pid": 4242,
        "process_seconds": 112.3,
    }


def oom_probe(name: str, batch: int, length: int) -> dict[str, Any]:
    data: dict[str, Any] = dict.fromkeys(probe(name, batch, length, 1e5, 10.0))
    return data | {
        "name": name,
        "micro_batch": batch,
        "seq_len": length,
        "status": "oom",
        "failed_phase": "train",
        "why": "out of memory in training: 31.3 GiB asked for one tensor, 4.1 GiB free",
        "throttled": [],
        "pid": 4243,
        "process_seconds": 21.0,
    }


def sweep() -> dict[str, dict[str, Any]]:
    return {
        "P1": probe("P1", 16, 512, 379_700.0, 22.4),
        "P2": probe("P2", 64, 512, 478_000.0, 61.3),
        "P3": probe("P3", 32, 1024, 457_000.0, 63.9),
    }


def choice(points: dict[str, dict[str, Any]], best: str) -> dict[str, Any]:
    reasons = dict.fromkeys(points, f"slower than {best}")
    reasons[best] = "fastest below 80 % of device memory"
    keys = ("micro_batch", "seq_len", "tok_s", "memory", "eval")
    return {"best_cfg": best, "reasons": reasons} | {key: points[best][key] for key in keys}


def checkpoint() -> dict[str, Any]:
    return {
        "cadence_steps": 500,
        "cadence_seconds": 600,
        "estimated_bytes": 1_955_800_000,
        "measured_bytes": 1_676_412_000,
        "measured_seconds": 1.9,
        "free_bytes": 900 * GIB,
        "needed_bytes": 10_058_472_000,
        "overhead_seconds_per_10min": 36.1,
        "limit_seconds": 90,
    }


def budget(best: dict[str, Any]) -> dict[str, Any]:
    result = compute_budget(
        BudgetInputs(
            tok_s=int(best["tok_s"]),
            window_hours="8",
            micro_batch=best["micro_batch"],
            seq_len=best["seq_len"],
            data_tokens=3_620_114_432 * 4,
        )
    )
    return {
        "arithmetic": [
            {key: getattr(step, key) for key in ("name", "formula", "numbers", "result")}
            for step in result.steps
        ],
        "tok_s": int(best["tok_s"]),
        "window_hours": "8",
        "reserve_hours": "0.75",
        "utilisation": "0.85",
        "budget_tokens": result.budget_tokens,
        "data_tokens": 3_620_114_432 * 4,
        "locked_budget_tokens": result.locked_budget_tokens,
        "limited_by": result.limited_by,
        "micro_batch": best["micro_batch"],
        "seq_len": best["seq_len"],
        "total_steps": result.total_steps,
        "tokens_in_steps": result.tokens_in_steps,
    }


def disposition() -> dict[str, Any]:
    return {
        "provider": "local",
        "decision": "keep",
        "why": "training continues on this machine",
        "time": "2026-01-02T03:20:05Z",
    }


class Run:
    """Writes a run directory phase by phase, as the gate does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = EvidenceStore(path)
        path.mkdir(parents=True)
        atomic.write_text(path / "gate.toml", '[workload]\nkind = "dual-mind"\npreset = "139m"\n')
        self.store.ledger.append("gate.started", {"points": list(POINTS)})

    def record(self, name: str, data: dict[str, Any], reason: str = "") -> "Run":
        """Red when there is a reason, but for a probe: any result taken of one is green."""
        measured = name.startswith("probe.")
        self.store.record(
            name,
            green=measured or not reason,
            reason=reason or data["why"] if measured else reason,
            inputs="1a" * 32,
            data=copy.deepcopy(data),
        )
        return self

    def lock(self, best: str, facts: dict[str, Any]) -> "Run":
        head = self.store.ledger.head()
        keys = ("locked_budget_tokens", "tok_s", "total_steps", "tokens_in_steps")
        keys += ("micro_batch", "seq_len")
        lock = ConfigLock(
            payload={
                "schema": 1,
                "best_cfg": best,
                "code_sha256": "c0" * 32,
                "manifest_sha256": "ab" * 32,
                "environment_fingerprint": "f1" * 32,
                "evidence": {name: item.sha256 for name, item in self.store.read().items()},
                "ledger_lines": head.lines,
                "ledger_head": head.hash,
                **{key: facts[key] for key in keys},
            }
        )
        write_lock(self.path, lock)
        self.store.ledger.append("lock.written", {"sha256": lock.sha256})
        return self


def green_run(path: Path) -> Run:
    points = sweep()
    facts = budget(points["P2"])
    run = Run(path).record("environment", environment()).record("pack", pack())
    run.record("twin", twin())
    for name, data in points.items():
        run.record(f"probe.{name}", data)
    run.record("choice", choice(points, "P2")).record("checkpoint", checkpoint())
    run.record("budget", facts).record("disposition", disposition())
    return run.lock("P2", facts)


def red_twin_run(path: Path) -> Run:
    reason = "the bf16 lane leaves the fp32 lane: 0.0901 at step 200, 0.05 is allowed"
    run = Run(path).record("environment", environment()).record("pack", pack())
    return run.record("twin", red_twin(), reason)


def oom_run(path: Path) -> Run:
    points = sweep()
    points["P2"] = probe("P2", 64, 512, 478_000.0, 84.6) | {
        "status": "rejected",
        "why": "84.6 % of device memory, below 80 % is wanted",
        "throttled": ["thermal slowdown"],
    }
    points["P3"] = oom_probe("P3", 32, 1024)
    run = Run(path).record("environment", environment()).record("pack", pack())
    run.record("twin", twin())
    for name, data in points.items():
        run.record(f"probe.{name}", data)
    return run.record("choice", choice({"P1": points["P1"]}, "P1"))


def partial_run(path: Path) -> Run:
    run = Run(path).record("environment", environment()).record("pack", pack())
    return run.record("twin", twin()).record("probe.P1", sweep()["P1"])


SAMPLES: dict[str, Callable[[Path], Run]] = {
    "green": green_run,
    "red-twin": red_twin_run,
    "oom": oom_run,
    "partial": partial_run,
}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[str], Run]:
    """Build one of the sample runs by name."""
    return lambda name: SAMPLES[name](tmp_path / name)


@pytest.fixture(scope="session")
def sample_data() -> dict[str, dict[str, Any]]:
    """The data of every phase of a green run, and of a red twin."""
    points = {name: data | {"step_ns": data["step_ns"][:40]} for name, data in sweep().items()}
    return {
        "environment": environment(),
        "pack": pack(),
        "twin": red_twin(),
        "probe.P1": points["P1"],
        "choice": choice(points, "P2"),
        "checkpoint": checkpoint(),
        "budget": budget(points["P2"]),
        "disposition": disposition(),
    }
