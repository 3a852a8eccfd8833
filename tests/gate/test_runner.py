"""Running a gate: what is measured, what is reused, and what is never written twice."""

import pytest

from leadline.core.errors import LockError

from .double import GateDouble


def test_gate_of_green_probes_ends_green_with_one_lock(gate: GateDouble) -> None:
    outcome = gate.run()
    assert outcome.status.green
    assert outcome.lock_path == gate.out / "config.lock.json"
    assert gate.kinds().count("lock.written") == 1


