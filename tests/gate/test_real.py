"""Gates in real processes on the tiny workload: whole, killed with SIGKILL, and with a fault."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from leadline.core.evidence import EvidenceStore
from leadline.core.ledger import verify_ledger
from leadline.core.lineage import verify_lineage
from leadline.gate.lock import lock_problems

from .double import make_double, to_toml

pytestmark = pytest.mark.slow
PATIENCE_SECONDS = 120
GATE = 0
"""Named as the victim: the gate itself, not a probe."""


@dataclass(kw_only=True)
class RealGate:
    """A run directory and the processes that worked on it."""

    config: Path
    out: Path
    pids: dict[str, list[int]] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)

    def command(self, *words: object) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "leadline", *map(str, words)]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    def start(self) -> "subprocess.Popen[bytes]":
        line = [sys.executable, "-m", "leadline", "gate", "run", self.config, "--out", self.out]
        return subprocess.Popen(
            [*map(str, line)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def run_until(self, ready: Callable[[], int | None]) -> None:
        """Start the gate, and kill -9 the process that *ready* names as soon as it does."""
        process = self.start()
        victim = None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while victim is None and process.poll() is None and time.monotonic() < deadline:
            named = ready()
            victim = process.pid if named == GATE else named
            time.sleep(0.02)
        assert victim is not None, "the moment to kill never came"
        os.kill(victim, signal.SIGKILL)
        self.codes.append(process.wait(PATIENCE_SECONDS))

    def asked(self, name: str) -> bool:
        """Whether the probe *name* is at work: asked, and not answered yet."""
        work = self.out / "work"
        request, result = work / f"{name}.request.json", work / f"{name}.result.json"
        return request.exists() and not result.exists()

    def child(self, name: str) -> int | None:
        """Process id of the probe *name*."""
        wanted = f"work/{name}.request.json"
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().decode().split("\0")
            except OSError:
                continue  # it ended while we looked
            if any(word.endswith(wanted) and str(self.out) in word for word in words):
                return int(entry.parent.name)
        return None

    def note_pids(self) -> None:
        """Remember which process measured each point that is on the record."""
        for name, item in EvidenceStore(self.out).read().items():
            if "pid" in item.data:
                self.pids.setdefault(name, []).append(item.data["pid"])


def real_gate(folder: Path, shards: Path, workload: str) -> RealGate:
    tables: dict[str, Any] = make_double(folder, shards).tables
    tables["workload"] = {"kind": "python", "object": workload}
    tables["twin"] = {"steps": 40, "settle_steps": 5, "micro_batch": 4, "seq_len": 128}
    tables["optimizer"] = {"warmup_steps": 20}
    # A machine that others use too is neither steady nor empty; progress costs a millisecond, so
    # that a window has to be longer than a few steps to agree with the device within 2 %.
    tables["sweep"] |= {"steps": 160, "steady_percent": "100", "memory_limit_percent": 100}
    config = folder / "real.toml"
    config.write_text(to_toml(tables), encoding="utf-8")
    return RealGate(config=config, out=folder / "run")


@pytest.fixture(scope="module")
def interrupted(
    tmp_path_factory: pytest.TempPathFactory, tiny_shards: Path, workloads_dir: Path
) -> RealGate:
    """Killed in the twin, then in P1, then P2's own process killed; then run to its end."""
    folder = tmp_path_factory.mktemp("real")
    gate = real_gate(folder, tiny_shards, f"{workloads_dir / 'tiny.py'}:clean")
    gate.run_until(lambda: GATE if gate.asked("twin") else None)
    gate.run_until(lambda: GATE if gate.asked("probe-P1") else None)
    gate.run_until(lambda: gate.child("probe-P2"))
    gate.note_pids()
    gate.codes.append(gate.start().wait(PATIENCE_SECONDS))
    gate.note_pids()
    return gate


def test_killed_gates_end_by_the_signal_and_the_last_one_green(interrupted: RealGate) -> None:
    assert interrupted.codes == [-signal.SIGKILL, -signal.SIGKILL, 3, 0]


def test_killed_gate_ends_with_one_lock_that_verifies_deep(interrupted: RealGate) -> None:
    kinds = [entry.kind for entry in EvidenceStore(interrupted.out).ledger.entries()]
    assert kinds.count("lock.written") == 1
    assert lock_problems(interrupted.out, deep=True) == []
    assert verify_ledger(interrupted.out / "ledger.jsonl").ok
    assert verify_lineage(interrupted.out).ok


def test_killed_probe_is_on_the_record_with_its_signal(interrupted: RealGate) -> None:
    entries = EvidenceStore(interrupted.out).ledger.entries()
    red = [entry.data for entry in entries if entry.data.get("verdict") == "red"]
    assert [item["name"] for item in red] == ["probe.P2", "choice"]
    assert "probe-P2 was killed by SIGKILL" in red[0]["reason"]


def test_measured_phases_are_not_measured_again_after_a_kill(interrupted: RealGate) -> None:
    assert [len(set(interrupted.pids[f"probe.{name}"])) for name in ("P1", "P3")] == [1, 1]
    names = [
        entry.data["name"]
        for entry in EvidenceStore(interrupted.out).ledger.entries()
        if entry.kind == "evidence"
    ]
    assert (names.count("twin"), names.count("probe.P1"), names.count("probe.P3")) == (1, 1, 1)


def test_points_were_measured_in_processes_of_their_own(interrupted: RealGate) -> None:
    pids = [interrupted.pids[f"probe.{name}"][-1] for name in ("P1", "P2", "P3")]
    assert len(set(pids)) == 3


def test_real_gate_leaves_a_report_and_a_complete_table(interrupted: RealGate) -> None:
    report = (interrupted.out / "report.html").read_text("utf-8")
    assert "P2" in report
    shown = interrupted.command("gate", "show", interrupted.out, "--json")
    result = json.loads(shown.stdout)
    assert (shown.returncode, result["green"], result["missing"]) == (0, True, [])


def test_lock_of_a_real_gate_verifies_through_the_command(interrupted: RealGate) -> None:
    done = interrupted.command("lock", "verify", interrupted.out, "--deep", "--json")
    assert (done.returncode, json.loads(done.stdout)["problems"]) == (0, [])


def test_no_probe_outlives_its_gate(interrupted: RealGate) -> None:
    names = ("environment", "twin", "probe-P1", "probe-P2", "probe-P3")
    assert [interrupted.child(name) for name in names] == [None] * 5


def test_real_gate_with_a_planted_precision_fault_names_the_module(
    tmp_path: Path, tiny_shards: Path, workloads_dir: Path
) -> None:
    gate = real_gate(tmp_path, tiny_shards, f"{workloads_dir / 'tiny.py'}:faulty_mean")
    done = gate.command("gate", "run", gate.config, "--out", gate.out, "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["red"], result["lock_path"]) == (3, ["twin_delta"], None)
    assert "the lanes part in pool" in result["evidence"]["twin_delta"]["reason"]
    assert "tok_s.P1" in result["missing"]
