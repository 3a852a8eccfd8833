"""What a lock says and where each word of it comes from: evidence, configuration, ledger.

One table makes the lock and checks it, so a value that was edited afterwards is held
against its source, however well the lock, its hash and the ledger agree with each other.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from leadline.core.chain import Entry
from leadline.core.evidence import Evidence
from leadline.core.gate import PROBE_PREFIX, STARTED_KIND, requirements
from leadline.core.lockfile import SCHEMA
from leadline.gate.config import GateConfig
from leadline.gate.context import exact_json
from leadline.train.settings import exact_settings, settings_from


@dataclass(frozen=True, kw_only=True, slots=True)
class LockSources:
    """Everything a lock is made from."""

    config: GateConfig
    started: Mapping[str, Any]
    """Data of the ledger's `gate.started` line: versions and hashes the gate began with."""
    found: Mapping[str, Evidence]
    """The evidence this gate asks for."""

    def data(self, name: str) -> Mapping[str, Any]:
        """What the evidence *name* holds."""
        return self.found[name].data


def needed_evidence(config: GateConfig, found: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """The evidence this gate asks for; an earlier attempt with other points may have left more."""
    names = {need.evidence for need in requirements([point.name for point in config.sweep.points])}
    return {name: item for name, item in found.items() if name in names}


def started_line(entries: Iterable[Entry]) -> Mapping[str, Any]:
    """Data of the last `gate.started` line; empty when there is none."""
    lines = [entry.data for entry in entries if entry.kind == STARTED_KIND]
    return lines[-1] if lines else {}


def _of(evidence: str, *keys: str) -> Callable[[LockSources], Any]:
    def value(sources: LockSources) -> Any:
        found: Any = sources.data(evidence)
        for key in keys:
            found = found[key]
        return found

    return value


def _started(key: str) -> Callable[[LockSources], Any]:
    return lambda sources: sources.started[key]


def _budget(sources: LockSources) -> dict[str, Any]:
    budget = sources.data("budget")
    keys = ("window_hours", "reserve_hours", "utilisation", "data_tokens")
    return {**{key: budget[key] for key in keys}, "epochs": sources.config.data.epochs}


def _checkpoint(sources: LockSources) -> dict[str, Any]:
    measured = sources.data("checkpoint")
    return {
        "every_steps": measured["cadence_steps"],
        "every_seconds": measured["cadence_seconds"],
        "bytes": measured["measured_bytes"],
    }


def _probes(sources: LockSources) -> dict[str, Any]:
    return {
        name.removeprefix(PROBE_PREFIX): {
            "status": item.data["status"],
            "micro_batch": item.data["micro_batch"],
            "seq_len": item.data["seq_len"],
            "tok_s": item.data.get("tok_s"),
            "device_peak_bytes": item.data["memory"]["device_peak_bytes"],
        }
        for name, item in sources.found.items()
        if name.startswith(PROBE_PREFIX)
    }


def _environment(sources: LockSources) -> dict[str, Any]:
    found = sources.data("environment")
    return {
        "torch": found["torch"],
        "cuda": found["cuda"],
        "device": found["device"]["name"],
        "device_kind": found["device"]["kind"],
        "python": found["python"],
    }


LOCK_VALUES: Mapping[str, Callable[[LockSources], Any]] = {
    "schema": lambda _: SCHEMA,
    "leadline": _started("leadline"),
    "locked_budget_tokens": _of("budget", "locked_budget_tokens"),
    "best_cfg": _of("choice", "best_cfg"),
    "tok_s": _of("choice", "tok_s"),
    "total_steps": _of("budget", "total_steps"),
    "tokens_in_steps": _of("budget", "tokens_in_steps"),
    "micro_batch": _of("choice", "micro_batch"),
    "seq_len": _of("choice", "seq_len"),
    "eval_batch": _of("choice", "eval", "batch"),
    "seed": lambda sources: sources.config.seed,
    "limited_by": _of("budget", "limited_by"),
    "budget": _budget,
    "checkpoint": _checkpoint,
    "probes": _probes,
    "peak_device_bytes": _of("choice", "memory", "device_peak_bytes"),
    "twin_worst_delta": lambda sources: f"{sources.data('twin')['worst_delta']:.6f}",
    "workload": lambda sources: exact_json(sources.config.workload),
    "workload_files": _started("workload_files"),
    "optimizer": lambda sources: exact_settings(settings_from(sources.config.optimizer)),
    "manifest_sha256": _of("pack", "manifest_sha256"),
    "train_tokens": _of("pack", "train_tokens"),
    "environment_fingerprint": _of("environment", "fingerprint"),
    "environment": _environment,
    "code_sha256": _started("code_sha256"),
    "config_sha256": _started("config_sha256"),
    "evidence": lambda sources: {name: item.sha256 for name, item in sorted(sources.found.items())},
}
"""The lock's keys, all but `created` and the ledger's place, and how each is read."""
