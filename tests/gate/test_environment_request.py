"""What the environment process is asked: a wrong request is told before money is spent."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from leadline.core.errors import UsageError
from leadline.gate.single import probe_once
from leadline.probe.request import EnvironmentRequest
from leadline.probe.subject import check_workload

from .double import GateDouble

MODEL = """
class Short:
    name = "short"
    vocab_size = 300
    max_seq_len = 128
    def build(self): ...
    def loss(self, model, inputs, targets): ...
    def compile(self, model): ...
    def identity(self): return {}
short = Short()
"""


@pytest.fixture
def asked(gate: GateDouble) -> list[EnvironmentRequest]:
    """Requests of the environment's process, each held against the workload as it would there."""
    requests: list[EnvironmentRequest] = []

    def answer(request: EnvironmentRequest) -> dict[str, Any]:
        requests.append(request)
        check_workload(request)
        return gate.probes.environment

    (gate.folder / "model.py").write_text(MODEL, encoding="utf-8")
    gate.tables["workload"] = {"kind": "python", "object": "model.py:short"}
    gate.probes.serves["environment"] = answer
    return requests


def test_environment_is_asked_about_workload_lengths_and_vocabulary(
    gate: GateDouble, asked: list[EnvironmentRequest]
) -> None:
    assert gate.run().status.green
    (request,) = asked
    assert request.workload == gate.tables["workload"]
    assert request.base_dir == str(gate.folder)
    assert set(request.seq_lens) == {64, 128}
    assert request.vocab_size == 257


def test_too_long_point_is_refused_before_anything_is_measured(
    gate: GateDouble, asked: list[EnvironmentRequest]
) -> None:
    gate.tables["sweep"]["points"][2]["seq_len"] = 256
    with pytest.raises(UsageError, match="a seq_len of 256 is asked of short"):
        gate.run()
    assert (len(asked), gate.probes.measured) == (1, [])


def test_too_large_vocabulary_of_text_is_refused_before_it_is_packed(
    gate: GateDouble, asked: list[EnvironmentRequest]
) -> None:
    gate.tables["data"] = {"text": "stdlib", "vocab_size": 512}
    with pytest.raises(UsageError, match="the data's vocabulary is 512"):
        gate.run()
    assert (len(asked), (gate.out / "build").exists()) == (1, False)


def test_single_probe_asks_the_same(gate: GateDouble, asked: list[EnvironmentRequest]) -> None:
    gate.tables["twin"]["seq_len"] = 4096
    with pytest.raises(UsageError, match="a seq_len of 4096"):
        probe_once(
            "P1", steps=2, config_path=gate.write(), out=gate.out, on_progress=lambda _: None
        )
    assert len(asked) == 1


def test_shards_that_do_not_read_are_left_to_the_hash_gate(
    gate: GateDouble, asked: list[EnvironmentRequest], tiny_shards: Path
) -> None:
    shutil.copytree(tiny_shards, gate.folder / "shards")
    (gate.folder / "shards" / "manifest.json").write_text("{", encoding="utf-8")
    gate.tables["data"]["shards"] = "shards"
    assert gate.run().status.red == ("hash_gate",)
    assert asked[0].vocab_size is None
