"""A gate whose probes answer at once: canned results where `run_probe` would start a process."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leadline.core.evidence import EvidenceStore
from leadline.gate.runner import GateEvents, GateOutcome, run_gate
from leadline.probe.progress import Progress

GIB = 1 << 30
POINTS = {"P1": (4, 64), "P2": (8, 64), "P3": (4, 128)}
RATES = {"P1": 40_000, "P2": 60_000, "P3": 50_000}

ENVIRONMENT: dict[str, Any] = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "cuda": "13.0",
    "device": {
        "kind": "cpu",
        "name": "a card of the test's own",
        "capability": None,
        "memory_bytes": 80 * GIB,
        "driver": None,
        "mig": None,
        "arch_list": [],
        "count": 1,
    },
    "cpu": {"name": "a CPU", "cores": 2, "memory_bytes": 8 * GIB},
    "bf16": {"legal": True, "why": "legal: runs on this CPU"},
    "attention_kernel": {"ran": True, "name": "sdpa"},
    "distributions_sha256": "5d" * 32,
    "distributions": {"torch": "2.13.0"},
    "unpinned": [],
    "code_sha256": "c0" * 32,
    "problems": [],
    "other_processes": [],
    "fingerprint": "f1" * 32,
}
LANE = {"losses": [5.0, 4.0, 3.0], "grad_norms": [1.0, 0.9, 0.8], "seconds": 0.1}
TWIN: dict[str, Any] = {
    "steps": 3,
    "seq_len": 64,
    "micro_batch": 4,
    "settle_steps": 1,
    "tolerance": 0.05,
    "green": True,
    "worst_step": 2,
    "worst_delta": 0.0123,
    "final_delta": 0.01,
    "problems": [],
    "matmul_error": 1e-7,
    "matmul_limit": 1e-5,
    "batches_sha256": "ba" * 32,
    "initial_weights_sha256": "e1" * 32,
    "fp32": LANE,
    "bf16": LANE,
    "accused": [],
    "modules_checked": 0,
    "modules_skipped": [],
}


def measured(name: str, batch: int, seq_len: int, tok_s: int) -> dict[str, Any]:
    """Data of a point that fits: 20 steps at exactly *tok_s*."""
    tokens = 20 * batch * seq_len
    return {
        "name": name,
        "micro_batch": batch,
        "seq_len": seq_len,
        "status": "ok",
        "failed_phase": None,
        "why": "",
        "parameters": 1000,
        "parameter_bytes": 4000,
        "steps": 20,
        "tokens": tokens,
        "wall_ns": tokens * 1_000_000_000 // tok_s,
        "tok_s": tok_s,
        "tok_s_low": tok_s * 0.99,
        "tok_s_high": tok_s * 1.01,
        "halves": [float(tok_s), float(tok_s)],
        "step_ns": [tokens * 50_000_000 // tok_s] * 20,
        "warmup_steps": 1,
        "warmup_seconds": 0.1,
        "recompiles": 0,
        "throttled": [],
        "epochs": 1,
        "loss": {"first": 5.0, "last": 4.0},
        "grad_norm": {"mean": 1.0, "std": 0.1, "max": 1.2},
        "eval": {
            "batch": batch,
            "batches": 3,
            "seconds": 0.01,
            "first_seconds": 0.02,
            "held_bytes": [1, 1, 1],
            "loss": 4.2,
            "status": "ok",
        },
        "checkpoint": {"bytes": 14_000, "seconds": 0.01},
        "memory": memory(40),
    }


def memory(percent: int) -> dict[str, Any]:
    """Memory readings of a point whose peak is *percent* of the device."""
    peak = 80 * GIB * percent // 100
    return {
        "allocator_peak_bytes": peak - GIB,
        "device_peak_bytes": peak,
        "device_start_bytes": GIB,
        "device_total_bytes": 80 * GIB,
        "percent": f"{percent}.00",
        "allocator_retries": 0,
    }


def out_of_memory(phase: str) -> dict[str, Any]:
    """What overrides a point's data when it ran out of memory in *phase*."""
    gone = dict.fromkeys(("tok_s", "steps", "tokens", "wall_ns", "eval", "checkpoint", "step_ns"))
    if phase == "eval":
        gone = dict.fromkeys(("eval", "checkpoint"))
    why = f"{'eval' if phase == 'eval' else f'the {phase} phase'} does not fit: out of memory"
    return {**gone, "status": "oom", "failed_phase": phase, "why": why}


class Probes:
    """Stands in for `run_probe`; `calls` names what a real gate would have measured."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.environment = copy.deepcopy(ENVIRONMENT)
        self.twin = copy.deepcopy(TWIN)
        self.points: dict[str, dict[str, Any]] = {}
        """Overrides of a point's data, by name; None takes a key away."""
        self.rates = dict(RATES)
        self.raises: dict[str, BaseException] = {}
        self.serves: dict[str, Callable[[Any], dict[str, Any]]] = {}
        """Real measurements to run in this process instead, by probe name."""

    def __call__(
        self, request: Any, work_dir: Path, name: str, on_progress: Callable[[Progress], None]
    ) -> dict[str, Any]:
        self.calls.append(name)
        on_progress(Progress(phase="double", done=1, total=2))
        if name in self.raises:
            raise self.raises[name]
        if name in self.serves:
            return self.serves[name](request)
        data = copy.deepcopy(self._canned(request, name))
        return {**data, "pid": 1000 + len(self.calls), "process_seconds": 0.5}

    @property
    def measured(self) -> list[str]:
        """Calls that take minutes on a real card."""
        return [name for name in self.calls if name != "environment"]

    def _canned(self, request: Any, name: str) -> dict[str, Any]:
        if name in ("environment", "twin"):
            return self.environment if name == "environment" else self.twin
        rate = self.rates.get(request.name, 30_000)
        data = measured(request.name, request.micro_batch, request.seq_len, rate)
        data["eval"]["batch"] = request.eval_batch
        data |= self.points.get(request.name, {})
        kept = ("failed_phase",)
        return {key: value for key, value in data.items() if value is not None or key in kept}


@dataclass(kw_only=True)
class GateDouble:
    """A configuration, a run directory and probes, each of which a test may bend."""

    folder: Path
    tables: dict[str, Any]
    probes: Probes = field(default_factory=Probes)

    @property
    def config(self) -> Path:
        return self.folder / "gate.toml"

    @property
    def out(self) -> Path:
        return self.folder / "run"

    @property
    def store(self) -> EvidenceStore:
        return EvidenceStore(self.out)

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.store.ledger.entries()]

    def write(self) -> Path:
        self.config.write_text(to_toml(self.tables), encoding="utf-8")
        return self.config

    def run(self) -> GateOutcome:
        """The gate through its library function."""
        return run_gate(self.write(), self.out, GateEvents())

    def lock(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.out / "config.lock.json").read_bytes())
        return content


def make_double(folder: Path, shards: Path) -> GateDouble:
    """A gate that is green: 257 byte ids, three points, a window of an hour."""
    points = [
        {"name": name, "micro_batch": batch, "seq_len": seq_len}
        for name, (batch, seq_len) in POINTS.items()
    ]
    (folder / "model.py").write_text("# stands for a model of the user's own\n", encoding="utf-8")
    tables: dict[str, Any] = {
        "seed": 0,
        "workload": {"kind": "python", "object": "model.py:clean"},
        "data": {"shards": str(shards), "epochs": 1000},
        "environment": {"device": "cpu"},
        "optimizer": {"warmup_steps": 20},
        "twin": {"steps": 3, "settle_steps": 1, "micro_batch": 4, "seq_len": 64},
        "sweep": {"steps": 20, "warmup_steps": 1, "points": points},
        "budget": {"window_hours": "1"},
        "disposition": {"next": "continue"},
    }
    return GateDouble(folder=folder, tables=tables)


def to_toml(tables: Mapping[str, Any]) -> str:
    """TOML of scalars, tables and one level of tables in lists; decimals given as text."""
    top = [f"{key} = {json.dumps(value)}" for key, value in tables.items() if not _is_table(value)]
    blocks = []
    for name, table in tables.items():
        if not _is_table(table):
            continue
        flat = {key: value for key, value in table.items() if not isinstance(value, list)}
        blocks.append("\n".join([f"[{name}]", *_lines(flat)]))
        for key, rows in table.items():
            if isinstance(rows, list):
                blocks += ["\n".join([f"[[{name}.{key}]]", *_lines(row)]) for row in rows]
    return "\n\n".join(["\n".join(top), *blocks]) + "\n"


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]
