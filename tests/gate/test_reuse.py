"""What a gate that is run again measures anew, and what it keeps."""

import pytest

from leadline.core.errors import ProbeError

from .double import GateDouble

ALL = ["environment", "twin", "probe-P1", "probe-P2", "probe-P3"]


def test_gate_that_was_red_measures_only_what_is_missing(gate: GateDouble) -> None:
    gate.probes.raises["probe-P3"] = ProbeError("the point process probe-P3 was killed by SIGKILL")
    assert not gate.run().status.green
    gate.probes.raises.clear()
    gate.probes.calls.clear()
    outcome = gate.run()
    assert outcome.status.green
    assert gate.probes.measured == ["probe-P3"]


def test_gate_with_changed_seed_measures_everything_again(gate: GateDouble) -> None:
    del gate.tables["disposition"]
    gate.run()
    gate.tables["seed"] = 7
    gate.probes.calls.clear()
    gate.run()
    assert gate.probes.calls == ALL


def test_gate_with_changed_window_keeps_its_measurements(gate: GateDouble) -> None:
    del gate.tables["disposition"]
    gate.run()
    gate.tables["budget"]["window_hours"] = "2"
    gate.tables["disposition"] = {"next": "continue"}
    gate.probes.calls.clear()
    outcome = gate.run()
    assert gate.probes.calls == ["environment"]
    assert outcome.status.green
    assert gate.lock()["budget"]["window_hours"] == "2"


def test_gate_with_a_fourth_point_measures_that_point_alone(gate: GateDouble) -> None:
    del gate.tables["disposition"]
    gate.run()
    gate.tables["sweep"]["points"].append({"name": "P4", "micro_batch": 2, "seq_len": 64})
    gate.probes.calls.clear()
    gate.run()
    assert gate.probes.measured == ["probe-P4"]


@pytest.mark.parametrize("key", ["micro_batch", "seq_len"])
def test_gate_with_a_changed_point_measures_that_point_again(gate: GateDouble, key: str) -> None:
    del gate.tables["disposition"]
    gate.run()
    gate.tables["sweep"]["points"][0][key] = 3
    gate.probes.calls.clear()
    gate.run()
    assert gate.probes.measured == ["probe-P1"]


def test_gate_with_a_changed_sweep_measures_every_point_again(gate: GateDouble) -> None:
    del gate.tables["disposition"]
    gate.run()
    gate.tables["sweep"]["warmup_steps"] = 2
    gate.probes.calls.clear()
    gate.run()
    assert gate.probes.measured == ["probe-P1", "probe-P2", "probe-P3"]


def test_gate_whose_checkpoints_go_to_another_disk_measures_every_point_again(
    gate: GateDouble,
) -> None:
    del gate.tables["disposition"]
    gate.run()
    gate.tables["checkpoint"] = {"dir": "other-disk"}
    gate.probes.calls.clear()
    gate.run()
    assert gate.probes.measured == ["probe-P1", "probe-P2", "probe-P3"]


def test_gate_with_a_changed_workload_file_measures_everything_again(gate: GateDouble) -> None:
    del gate.tables["disposition"]
    gate.run()
    (gate.folder / "model.py").write_text("# another model\n", encoding="utf-8")
    gate.probes.calls.clear()
    gate.run()
    assert gate.probes.calls == ALL


def test_gate_on_another_environment_measures_everything_again(gate: GateDouble) -> None:
    del gate.tables["disposition"]
    gate.run()
    gate.probes.environment["fingerprint"] = "f2" * 32
    gate.probes.calls.clear()
    gate.run()
    assert gate.probes.calls == ALL


def test_gate_of_changed_code_measures_everything_again(
    gate: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    del gate.tables["disposition"]
    gate.run()
    monkeypatch.setattr("leadline.gate.runner.source_sha256", lambda: "dd" * 32)
    gate.probes.calls.clear()
    gate.run()
    assert gate.probes.calls == ALL


def test_gate_with_edited_evidence_measures_that_phase_again(gate: GateDouble) -> None:
    del gate.tables["disposition"]
    gate.run()
    path = gate.out / "evidence" / "probe.P2.json"
    path.write_bytes(path.read_bytes().replace(b"60000", b"90000"))
    gate.probes.calls.clear()
    gate.run()
    assert gate.probes.measured == ["probe-P2"]


def test_disk_that_filled_up_since_the_last_attempt_is_red(
    gate: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    disposition = gate.tables.pop("disposition")
    gate.run()
    gate.tables["disposition"] = disposition
    monkeypatch.setattr("leadline.gate.arithmetic.disk_free_bytes", lambda _: 10)
    outcome = gate.run()
    assert outcome.lock_path is None
    assert "checkpoint" in outcome.status.red
    assert "10 B are free" in gate.store.read()["checkpoint"].reason


def test_disk_with_other_room_than_last_time_keeps_its_evidence(
    gate: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    disposition = gate.tables.pop("disposition")
    gate.run()
    before = gate.store.read()["checkpoint"]
    gate.tables["disposition"] = disposition
    monkeypatch.setattr("leadline.gate.arithmetic.disk_free_bytes", lambda _: 1 << 50)
    assert gate.run().status.green
    assert gate.store.read()["checkpoint"] == before
