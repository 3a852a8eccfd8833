"""Bad input to the gate, through the command line: exit code, one sentence, nothing left half.

A row bends a green gate. A wrong request exits 2 and a failure 1, each with one sentence; what
the gate finds wrong with the world is evidence, and exits 3 with the line that is red.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadline.cli.app import main
from leadline.core.errors import DataError, EnvironmentUnfitError
from leadline.gate.run_folder import alone_in
from leadline.pack.build import build_pack
from leadline.probe.environment import device_facts
from leadline.probe.subject import open_subject

from ..gate.double import GateDouble, memory, out_of_memory

Bend = Callable[[GateDouble], None]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
SMALL_VOCABULARY = """
class Small:
    name = "small"
    vocab_size = 100
    def build(self): ...
    def loss(self, model, inputs, targets): ...
    def compile(self, model): ...
    def identity(self): return {}
small = Small()
number = 3
"""


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".partial"))]


def put(table: str, **values: Any) -> Bend:
    def bend(gate: GateDouble) -> None:
        gate.tables[table] = {**gate.tables.get(table, {}), **values}

    return bend


def point(**values: Any) -> Bend:
    return lambda gate: gate.tables["sweep"]["points"][0].update(values)


def opening(**workload: Any) -> Bend:
    """A workload that the probe's own code opens, in this process."""

    def bend(gate: GateDouble) -> None:
        (gate.folder / "model.py").write_text(SMALL_VOCABULARY, encoding="utf-8")
        gate.tables["workload"] = workload
        gate.probes.serves["twin"] = lambda request: open_subject(request.subject)

    return bend


def two_points(gate: GateDouble) -> None:
    del gate.tables["sweep"]["points"][2]


def refuses(message: str) -> Bend:
    """A twin whose process hands back a typed refusal."""

    def bend(gate: GateDouble) -> None:
        gate.probes.raises["twin"] = DataError(message)

    return bend


USAGE = {
    "unknown key": (put("twin", step=3), ["unknown key twin.step (did you mean steps?)"]),
    "two data sources": (put("data", text="stdlib"), ["exactly one of text, shards and pack"]),
    "no such text": (
        lambda gate: gate.tables.update(data={"text": "none"}),
        ["no text at", "none"],
    ),
    "no such shards": (put("data", shards="none"), ["there is no folder at", "none"]),
    "no such pack": (
        lambda gate: gate.tables.update(data={"pack": "none.tar"}),
        ["there is no pack at", "none.tar"],
    ),
    "two spans": (put("sweep", seconds="60"), ["seconds or steps, not both"]),
    "two points": (two_points, ["2 points; at least 3"]),
    "duplicate names": (point(name="P2"), ["two points of one name", "P2"]),
    "narrow eval batch": (point(eval_batch=1), ["eval_batch 1 below micro_batch 4"]),
    "window within reserve": (put("budget", window_hours="0.75"), ["nothing is left to train in"]),
    "no steps": (put("sweep", steps=0), ["sweep.steps is 0"]),
    "unknown optimiser setting": (put("optimizer", learning_rat=1), ["learning_rat"]),
    "pause without length": (put("disposition", next="pause"), ["pause_minutes"]),
    "missing workload file": (
        put("workload", object="none.py:model"),
        ["there is no file at", "none.py"],
    ),
    "missing model config": (
        lambda gate: gate.tables.update(workload={"kind": "transformers", "config": "none.json"}),
        ["there is no file at", "none.json"],
    ),
    "no such name": (opening(kind="python", object="model.py:none"), ["defines no 'none'"]),
    "no workload": (
        opening(kind="python", object="model.py:number"),
        ["int, not a workload", "it needs name, vocab_size"],
    ),
    "unknown kind": (opening(kind="magic"), ["kind is 'magic'", "dual-mind, transformers, python"]),
    "unknown architecture": (
        opening(kind="transformers", model_type="llamma"),
        ["'llamma' is no causal LM here; supported:", "llama", "qwen3_moe"],
    ),
    "dual-mind too large": (
        opening(kind="dual-mind", vocab_size=60_000),
        ["parameters, over the limit of 139,700,000"],
    ),
    "unknown preset": (opening(kind="dual-mind", preset="7b"), ["preset '7b' is unknown"]),
    "unknown workload key": (opening(kind="dual-mind", widht=3), ["widht"]),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_request_exits_two_with_one_sentence(
    gate: GateDouble, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    bend, words = USAGE[name]
    bend(gate)
    code, out, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    sentences = [line for line in err.splitlines() if line.startswith("leadline: ")]
    assert (code, out, len(sentences)) == (2, "", 1)
    assert err.splitlines()[-1] == sentences[0]
    assert "Traceback" not in err
    assert not sentences[0].startswith("leadline: unexpected")
    for word in words:
        assert word in sentences[0]
    assert not (gate.out / "config.lock.json").exists()
    assert temporaries(gate.folder) == []


def cut_shard(gate: GateDouble) -> None:
    path = own_shard(gate)
    path.write_bytes(path.read_bytes()[:-100])


def own_shard(gate: GateDouble) -> Path:
    shutil.copytree(gate.tables["data"]["shards"], gate.folder / "shards")
    gate.tables["data"]["shards"] = "shards"
    return next((gate.folder / "shards" / "train").glob("*.bin"))


def point_shard_to_lfs(gate: GateDouble) -> None:
    own_shard(gate).write_bytes(POINTER)


def tampered_pack(gate: GateDouble) -> None:
    build_pack(Path(gate.tables["data"]["shards"]), gate.folder / "packs", "corpus")
    gate.tables["data"] = {"pack": "packs/corpus.tar"}
    path = gate.folder / "packs" / "corpus.tar"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)


def no_cuda(gate: GateDouble) -> None:
    gate.tables["environment"] = {"device": "cuda"}

    def without_a_card(request: Any) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.cuda.is_available", lambda: False)
            return device_facts(request.device)

    gate.probes.serves["environment"] = without_a_card


def no_requirements(gate: GateDouble) -> None:
    gate.probes.raises["environment"] = EnvironmentUnfitError(
        "the pinned requirements none.lock cannot be read: No such file or directory"
    )


def everywhere(data: dict[str, Any]) -> Bend:
    def bend(gate: GateDouble) -> None:
        gate.probes.points = dict.fromkeys(("P1", "P2", "P3"), data)

    return bend


RED: dict[str, tuple[Bend, str, str]] = {
    "vocabulary above the model's": (
        opening(kind="python", object="model.py:small"),
        "twin_delta",
        "use a vocabulary of 257 ids and small has 100",
    ),
    "corpus smaller than one batch": (
        point(micro_batch=9000),
        "hash_gate",
        "fewer than one batch of 9000",
    ),
    "truncated shard": (cut_shard, "hash_gate", "train/"),
    "git-lfs pointer": (point_shard_to_lfs, "hash_gate", "train/"),
    "tampered pack": (tampered_pack, "hash_gate", "is not whole"),
    "cuda on a machine without": (no_cuda, "environment", "torch sees no CUDA device"),
    "requirements unreadable": (no_requirements, "environment", "cannot be read"),
    "no disposition": (lambda gate: gate.tables.pop("disposition"), "disposition", "is missing"),
    "a long pause of a machine that may be rented": (
        put("disposition", next="pause", pause_minutes=120),
        "disposition",
        "a pause of 120 min stops a rented machine and leadline cannot stop this machine",
    ),
    "out of memory everywhere": (
        everywhere(out_of_memory("train")),
        "best_cfg",
        "the train phase does not fit",
    ),
    "eval out of memory everywhere": (
        everywhere(out_of_memory("eval")),
        "best_cfg",
        "eval does not fit",
    ),
    "too big everywhere": (
        everywhere(
            {
                "status": "rejected",
                "why": "peak is 80.00 % of the device, limit 80 %",
                "memory": memory(80),
            }
        ),
        "best_cfg",
        "peak is 80.00 % of the device, limit 80 %",
    ),
    "slow checkpoints": (
        everywhere({"checkpoint": {"bytes": 14_000, "seconds": 100.0}}),
        "checkpoint",
        "of every 10 min",
    ),
    "huge checkpoints": (
        everywhere({"checkpoint": {"bytes": 1 << 60, "seconds": 0.1}}),
        "checkpoint",
        "are needed for six checkpoints",
    ),
    "a token id the loader refuses": (
        refuses("shard train/shard-00000.bin holds id 50300 at 12, vocabulary 50257"),
        "twin_delta",
        "id 50300 at 12",
    ),
}


@pytest.mark.parametrize("name", RED)
def test_unfit_world_exits_three_with_its_line_and_reason(
    gate: GateDouble, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    bend, line, words = RED[name]
    bend(gate)
    code, out, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out, "--json")
    result = json.loads(out)
    assert (code, result["green"], result["lock_path"]) == (3, False, None)
    assert line in result["red"]
    assert words in result["evidence"][line]["reason"]
    assert "Traceback" not in err
    assert not (gate.out / "config.lock.json").exists()
    assert temporaries(gate.folder) == []


@pytest.mark.parametrize("content", [None, b"[[", b"\xff\xfe\x00"])
def test_configuration_that_does_not_read_exits_two(
    gate: GateDouble, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    if content is not None:
        gate.config.write_bytes(content)
    code, _, err = command(capsys, "gate", "run", gate.config, "--out", gate.out)
    assert code == 2
    assert err.splitlines()[-1].startswith("leadline: configuration ")
    assert not gate.out.exists()


def test_two_gates_in_one_directory_exit_one(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.out.mkdir()
    with alone_in(gate.out):
        code, _, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    assert code == 1
    assert "another gate is at work in" in err
    assert gate.probes.calls == []


def test_interrupted_gate_exits_130_and_goes_on_the_next_time(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.probes.raises["probe-P2"] = KeyboardInterrupt()
    code, _, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    assert (code, err.splitlines()[-1]) == (130, "leadline: stopped")
    gate.probes.raises.clear()
    gate.probes.calls.clear()
    assert command(capsys, "gate", "run", gate.config, "--out", gate.out)[0] == 0
    assert gate.probes.measured == ["probe-P2", "probe-P3"]


def test_changed_configuration_on_a_locked_run_exits_one(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.run()
    lock = (gate.out / "config.lock.json").read_bytes()
    gate.tables["budget"]["window_hours"] = "9"
    code, _, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    assert code == 1
    assert "a lock is never overwritten" in err
    assert (gate.out / "config.lock.json").read_bytes() == lock


def test_torn_ledger_is_repaired_and_told(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    disposition = gate.tables.pop("disposition")
    gate.run()
    path = gate.store.ledger.path
    os.truncate(path, path.stat().st_size - 20)
    gate.tables["disposition"] = disposition
    code, _, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    assert code == 0
    assert "was torn by a crash and filed away" in err


def test_broken_ledger_exits_one_and_names_the_line(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.tables.pop("disposition")
    gate.run()
    path = gate.store.ledger.path
    path.write_bytes(path.read_bytes().replace(b'"prev"', b'"perv"', 1))
    for words in (("run", gate.config, "--out", gate.out), ("show", gate.out)):
        code, _, err = command(capsys, "gate", *words)
        assert code == 1
        assert "line 1 " in err.splitlines()[-1]
