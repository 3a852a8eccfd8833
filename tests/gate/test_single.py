"""One point by itself: environment and data first, one probe, nothing of a locked run touched."""

from typing import Any

import pytest

from leadline.core.errors import DataError, LeadlineError, LockError, UsageError
from leadline.gate.lock import lock_problems
from leadline.gate.run_folder import alone_in
from leadline.gate.single import probe_once

from .double import GateDouble


def probe(gate: GateDouble, name: str, steps: int | None = None) -> dict[str, Any]:
    return probe_once(
        name, steps=steps, config_path=gate.write(), out=gate.out, on_progress=lambda _: None
    )


def test_probe_measures_environment_data_and_one_point(gate: GateDouble) -> None:
    data = probe(gate, "P2")
    assert (data["name"], data["tok_s"]) == ("P2", 60_000)
    assert gate.probes.calls == ["environment", "probe-P2"]


def test_steps_given_take_the_place_of_the_configurations_span(gate: GateDouble) -> None:
    asked: list[Any] = []

    def answer(request: Any) -> dict[str, Any]:
        asked.append(request)
        return {}

    gate.tables["sweep"] |= {"seconds": 60}
    del gate.tables["sweep"]["steps"]
    gate.probes.serves["probe-P1"] = answer
    probe(gate, "P1", steps=7)
    probe(gate, "P1")
    assert [(item.steps, item.seconds) for item in asked] == [(7, None), (None, 60.0)]


def test_unknown_point_is_refused_with_the_known_ones(gate: GateDouble) -> None:
    with pytest.raises(UsageError, match=r"no point 'P9' in gate\.toml; it has P1, P2, P3"):
        probe(gate, "P9")
    assert not gate.out.exists()


def test_probe_into_a_locked_run_is_refused_and_leaves_the_lock_valid(gate: GateDouble) -> None:
    gate.run()
    with pytest.raises(LockError, match="is a locked run"):
        probe(gate, "P1")
    assert lock_problems(gate.out) == []


def test_probe_into_the_directory_of_a_gate_at_work_is_refused(gate: GateDouble) -> None:
    gate.out.mkdir()
    with alone_in(gate.out), pytest.raises(LockError, match="another gate is at work"):
        probe(gate, "P1")


def test_red_environment_ends_the_probe(gate: GateDouble) -> None:
    gate.probes.environment["problems"] = ["capability 7.5 is below 8.0"]
    with pytest.raises(LeadlineError, match=r"Environment is red: capability 7\.5"):
        probe(gate, "P1")
    assert gate.probes.measured == []


def test_probe_that_refuses_the_data_is_told(gate: GateDouble) -> None:
    gate.probes.raises["probe-P1"] = DataError("the shards use a vocabulary of 257 ids")
    with pytest.raises(DataError, match="vocabulary of 257"):
        probe(gate, "P1")


def test_gate_in_the_directory_of_an_earlier_probe_measures_all_points(gate: GateDouble) -> None:
    probe(gate, "P1")
    gate.probes.calls.clear()
    assert gate.run().status.green
    assert gate.probes.measured == ["twin", "probe-P1", "probe-P2", "probe-P3"]
