"""A9: the gate is red while any evidence line is missing; complete, it is green."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from leadline.core.evidence import EvidenceStore
from leadline.core.gate import gate_status
from leadline.gate.runner import STARTED_KIND

from .double import GateDouble

NAMES = {
    "environment": ["environment"],
    "pack": ["hash_gate"],
    "twin": ["twin_delta"],
    "probe.P1": ["tok_s.P1"],
    "probe.P2": ["tok_s.P2"],
    "probe.P3": ["tok_s.P3"],
    "choice": ["best_cfg", "peak_vram", "eval_batch"],
    "checkpoint": ["checkpoint"],
    "budget": ["budget"],
    "disposition": ["disposition"],
}
KEYS = [
    ("twin", "worst_delta", "twin_delta"),
    ("probe.P1", "tok_s", "tok_s.P1"),
    ("probe.P2", "tok_s", "tok_s.P2"),
    ("probe.P3", "tok_s", "tok_s.P3"),
    ("choice", "best_cfg", "best_cfg"),
    ("choice", "memory", "peak_vram"),
    ("choice", "eval", "eval_batch"),
    ("checkpoint", "cadence_steps", "checkpoint"),
    ("checkpoint", "free_bytes", "checkpoint"),
    ("budget", "locked_budget_tokens", "budget"),
    ("budget", "total_steps", "budget"),
    ("disposition", "decision", "disposition"),
    ("disposition", "time", "disposition"),
]


def copy_without(gate: GateDouble, name: str, key: str | None = None) -> Path:
    """The same evidence in a fresh run directory, all of it vouched for, but for one piece."""
    out = gate.folder / "copy"
    store = EvidenceStore(out)
    store.ledger.append(STARTED_KIND, {"points": ["P1", "P2", "P3"]})
    for evidence in gate.store.read().values():
        data: dict[str, Any] = dict(evidence.data)
        if evidence.name == name:
            if key is None:
                continue
            del data[key]
        store.record(evidence.name, green=True, reason="", inputs=evidence.inputs, data=data)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_missing_piece_of_evidence_is_listed_as_missing(gate: GateDouble, name: str) -> None:
    gate.run()
    status = gate_status(copy_without(gate, name))
    assert not status.green
    assert [*status.missing] == [*NAMES[name], "lock"]


@pytest.mark.parametrize(("name", "key", "line"), KEYS)
def test_evidence_without_its_figure_is_never_green(
    gate: GateDouble, name: str, key: str, line: str
) -> None:
    gate.run()
    status = gate_status(copy_without(gate, name, key))
    assert not status.green
    assert line in (*status.missing, *status.red)


def test_complete_evidence_with_its_lock_is_green(gate: GateDouble) -> None:
    gate.run()
    status = gate_status(gate.out)
    assert (status.green, status.missing, status.red) == (True, (), ())


def test_complete_evidence_without_a_lock_is_not_gated(gate: GateDouble) -> None:
    gate.run()
    assert gate_status(copy_without(gate, "none")).missing == ("lock",)


def test_lock_of_another_run_is_red(gate: GateDouble) -> None:
    gate.run()
    path = gate.out / "config.lock.json"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content.replace(b'"seed":0', b'"seed":1'))
    assert gate_status(gate.out).red == ("lock",)


def test_evidence_folder_removed_is_red_in_every_line(gate: GateDouble) -> None:
    gate.run()
    shutil.rmtree(gate.out / "evidence")
    status = gate_status(gate.out)
    assert len(status.red) == len(status.lines) - 1  # the lock itself is there
