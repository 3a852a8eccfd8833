"""The procedure's threat matrix: each row red with its threat, green without it, and green
with the threat once the armour is taken out, which shows that the armour is what stops it.

Twin and points are the real measurements, run in this process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadline.core.errors import ProbeError, UsageError
from leadline.core.gate import requirements

from .double import GIB, GateDouble


class FixedMemory:
    """A device of 80 GiB of which one share is in use."""

    total_bytes = 80 * GIB
    noise_bytes = 1 << 30

    def __init__(self, percent: int) -> None:
        self._used_bytes = self.total_bytes * percent // 100

    def used_bytes(self) -> int:
        return self._used_bytes

    def allocated_bytes(self) -> int:
        return self._used_bytes

    def allocator_peak_bytes(self) -> int:
        return self._used_bytes

    def allocator_retries(self) -> int:
        return 0


@pytest.fixture
def real(
    gate: GateDouble, workloads_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], GateDouble]:
    """The gate with a tiny workload, its twin and points really measured."""
    from leadline.probe.point import run_point
    from leadline.probe.twin import run_twin

    def quiet(*_: Any) -> None:
        """Progress nobody watches."""

    monkeypatch.setattr("leadline.probe.point.memory_of", lambda _: FixedMemory(50))
    gate.probes.serves["twin"] = lambda request: run_twin(request, quiet)
    for name in ("P1", "P2", "P3"):
        gate.probes.serves[f"probe-{name}"] = lambda request: run_point(request, quiet)
    gate.tables["twin"] = {"steps": 40, "settle_steps": 5, "micro_batch": 4, "seq_len": 128}
    gate.tables["optimizer"] = {"warmup_steps": 20}
    gate.tables["sweep"] |= {"steps": 16, "steady_percent": "100"}

    def of(variant: str) -> GateDouble:
        gate.tables["workload"] = {
            "kind": "python",
            "object": f"{workloads_dir / 'tiny.py'}:{variant}",
        }
        return gate

    return of


def test_threat_bf16_numerics_that_mask_a_divergence_turn_the_gate_red(
    real: Callable[[str], GateDouble],
) -> None:
    outcome = real("faulty_mean").run()
    twin = real("faulty_mean").store.read()["twin"]
    assert (outcome.status.green, twin.green, outcome.lock_path) == (False, False, None)
    assert "pool" in twin.reason
    assert real("clean").run().status.green


def test_threat_bf16_numerics_pass_once_the_twins_verdict_is_taken_out(
    real: Callable[[str], GateDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    from leadline.probe import twin

    judged = twin.judge_twin

    def blind(fp32: Any, bf16: Any, **limits: Any) -> Any:
        return judged(fp32, fp32, **limits)

    monkeypatch.setattr(twin, "judge_twin", blind)
    assert real("faulty_mean").run().status.green


def test_threat_first_configuration_bias_is_refused_below_three_points(gate: GateDouble) -> None:
    three = gate.tables["sweep"]["points"]
    gate.tables["sweep"]["points"] = three[:1]
    with pytest.raises(UsageError, match="1 points; at least 3"):
        gate.run()
    assert gate.probes.calls == []
    gate.tables["sweep"]["points"] = three
    assert gate.run().status.green


def test_threat_first_configuration_bias_passes_once_the_count_is_taken_out(
    gate: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.tables["sweep"]["points"] = gate.tables["sweep"]["points"][:1]
    monkeypatch.setattr("leadline.gate.config.MIN_POINTS", 1)
    assert gate.run().status.green


def test_threat_first_configuration_bias_is_red_while_a_point_is_unmeasured(
    gate: GateDouble,
) -> None:
    gate.probes.raises["probe-P3"] = ProbeError("the point process probe-P3 was killed")
    outcome = gate.run()
    assert outcome.lock_path is None
    assert {"tok_s.P3", "best_cfg"} <= {*outcome.status.red, *outcome.status.missing}
    assert "probe-P1" in gate.probes.calls  # all are tried all the same
    del gate.probes.raises["probe-P3"]
    assert gate.run().status.green


def test_threat_memory_near_capacity_turns_the_gate_red(
    real: Callable[[str], GateDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as near:
        near.setattr("leadline.probe.point.memory_of", lambda _: FixedMemory(80))
        outcome = real("clean").run()
    choice = real("clean").store.read()["choice"]
    assert (outcome.status.green, outcome.lock_path) == (False, None)
    assert "peak is 80.00 % of the device, limit 80 %" in choice.reason
    assert real("clean").run().status.green


def test_threat_memory_near_capacity_passes_once_the_headroom_rule_is_taken_out(
    real: Callable[[str], GateDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    from leadline.probe.memory import MemoryVerdict

    monkeypatch.setattr("leadline.probe.point.memory_of", lambda _: FixedMemory(80))
    verdict = MemoryVerdict(fits=True, percent="80.00", why="")
    monkeypatch.setattr("leadline.probe.point.judge_memory", lambda *_: verdict)
    assert real("clean").run().status.green


def test_threat_forgotten_instance_turns_a_gate_without_disposition_red(gate: GateDouble) -> None:
    disposition = gate.tables.pop("disposition")
    outcome = gate.run()
    assert (outcome.status.red, outcome.lock_path) == (("disposition",), None)
    gate.tables["disposition"] = disposition
    assert gate.run().status.green


def test_threat_forgotten_instance_turns_a_long_pause_red_unless_nobody_is_billed(
    gate: GateDouble,
) -> None:
    gate.tables["disposition"] = {"next": "pause", "pause_minutes": 31}
    assert gate.run().status.red == ("disposition",)
    gate.tables["disposition"]["rented"] = False
    assert gate.run().status.green


def test_threat_forgotten_instance_passes_once_the_disposition_line_is_taken_out(
    gate: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(points: Any) -> Any:
        return tuple(need for need in requirements(points) if need.key != "disposition")

    monkeypatch.setattr("leadline.core.gate.requirements", without)
    del gate.tables["disposition"]
    assert gate.run().status.green


def test_threat_eval_out_of_memory_turns_the_gate_red_and_keeps_the_training_batch(
    real: Callable[[str], GateDouble],
) -> None:
    outcome = real("oom_in_eval").run()
    found = real("oom_in_eval").store.read()
    assert (outcome.status.green, outcome.lock_path) == (False, None)
    assert "eval does not fit" in found["choice"].reason
    assert [found[f"probe.{name}"].data["micro_batch"] for name in ("P1", "P2")] == [4, 8]
    assert real("clean").run().status.green


def test_threat_eval_out_of_memory_passes_once_the_eval_batches_are_taken_out(
    real: Callable[[str], GateDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    def skipped(request: Any, step: Any, record: Any, watch: Any, progress: Any) -> None:
        record.data["eval"] = {"batch": request.eval_batch, "batches": 0, "seconds": 0.0}

    monkeypatch.setattr("leadline.probe.point._evaluate", skipped)
    assert real("oom_in_eval").run().status.green
