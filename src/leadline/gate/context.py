"""What every phase of a gate is given, and what it hands back."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from leadline.core.canonical import sha256_json
from leadline.core.errors import IntegrityError
from leadline.core.evidence import Evidence, EvidenceStore
from leadline.gate.config import GateConfig
from leadline.gate.workload_files import workload_files
from leadline.probe.progress import Progress
from leadline.probe.request import Subject


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a phase found; becomes evidence."""

    green: bool
    reason: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class GateContext:
    """One gate: its configuration, its folders and the evidence so far."""

    config: GateConfig
    base_dir: Path
    """Folder of the configuration; relative paths start here."""
    run_dir: Path
    store: EvidenceStore
    code_sha256: str
    workload_files: Mapping[str, str]
    """Sha256 of the files the workload is made from, by path, as they were at the start."""
    on_progress: Callable[[Progress], None]
    read_once: dict[str, str] = field(default_factory=dict)
    """Hashes of what takes minutes to read, kept for as long as this gate runs."""

    @property
    def work_dir(self) -> Path:
        """Requests, results and logs of the probe processes."""
        return self.run_dir / "work"

    @property
    def checkpoint_dir(self) -> Path:
        """Where trial checkpoints go, on the disk that the run's will be on."""
        chosen = self.config.checkpoint.dir
        return self.run_dir / "checkpoints" if chosen is None else self.base_dir / chosen

    def evidence(self, name: str) -> Evidence:
        """What an earlier phase of this run has recorded."""
        found = self.store.read().get(name)
        assert found is not None, f"phase order: {name} is used before it was recorded"
        return found

    def section(self, *names: str) -> dict[str, Any]:
        """Tables of the configuration as JSON without floats, for hashing."""
        return {name: exact_json(getattr(self.config, name)) for name in names}

    def refuse_changed_workload(self) -> None:
        """Hold the workload's files against what they were when this gate began.

        Raises:
            IntegrityError: they changed; what was measured since is of neither version.
        """
        now = workload_files(self.config.workload, self.base_dir)
        changed = {name for name, _ in now.items() ^ self.workload_files.items()}
        if changed:
            raise IntegrityError(
                f"{', '.join(sorted(changed))} changed while the gate ran, so what was measured "
                "is not what is there; leave the workload alone and run the gate again"
            )

    def measured_inputs(self, phase: str, *sections: str, **more: Any) -> str:
        """Hash of what a measurement depends on: code, device, data and its own tables."""
        return sha256_json(
            {
                "phase": phase,
                "code": self.code_sha256,
                "environment": self.evidence("environment").data["fingerprint"],
                "data": self.evidence("pack").data["manifest_sha256"],
                "seed": self.config.seed,
                "workload_files": dict(self.workload_files),
                "sections": self.section("workload", "optimizer", *sections),
                "more": more,
            }
        )

    def subject(self) -> Subject:
        """Model, data and device for a probe process."""
        return Subject(
            workload=plain(self.config.workload),
            base_dir=str(self.base_dir),
            shards=str(self.run_dir / self.evidence("pack").data["shards_dir"]),
            device=self.evidence("environment").data["device"]["kind"],
            seed=self.config.seed,
            optimizer=plain(self.config.optimizer),
        )


def plain(value: Any) -> Any:
    """Decimals of a TOML file as floats, for a JSON request."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def exact_json(value: Any) -> Any:
    """A table of the configuration with decimals as strings, so that it can be hashed."""
    content = value.model_dump() if hasattr(value, "model_dump") else value
    return json.loads(json.dumps(content, default=str))
