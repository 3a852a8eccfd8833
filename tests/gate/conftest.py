"""The gate with its probes replaced at the process seam."""

from pathlib import Path

import pytest

from .double import GateDouble, make_double


@pytest.fixture
def gate(tmp_path: Path, tiny_shards: Path, monkeypatch: pytest.MonkeyPatch) -> GateDouble:
    """A green gate of canned probes; a test bends what it is about."""
    made = make_double(tmp_path, tiny_shards)
    monkeypatch.setattr("leadline.gate.phases.run_probe", made.probes)
    monkeypatch.setattr("leadline.gate.single.run_probe", made.probes)
    return made
