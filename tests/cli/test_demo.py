"""`leadline demo`: its logic over canned probes; `make demo` runs the real one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from leadline.cli.app import main
from leadline.core.ledger import LedgerCheck, verify_ledger
from leadline.tap import GramReader

from ..gate.double import GateDouble


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


TINY_MOE = {
    "vocab_size": 257,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 512,
}


@pytest.fixture
def demo(gate: GateDouble, monkeypatch: pytest.MonkeyPatch) -> GateDouble:
    """The demo with the double's probes and a smaller model, really trained for a step."""
    (gate.folder / "config.json").write_text(json.dumps(TINY_MOE), encoding="utf-8")
    gate.tables["workload"] = {
        "kind": "transformers",
        "model_type": "qwen3_moe",
        "config": "config.json",
    }
    monkeypatch.setattr("leadline.gate.defaults.demo_config_path", gate.write)
    monkeypatch.setattr("leadline.gate.defaults.DEMO_TRAIN_SECONDS", 1e-3)
    return gate


def test_demo_ends_with_a_verified_ledger_and_lock_and_the_reports_path(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(capsys, "demo", "--out", demo.out)
    assert code == 0
    assert "ledger: verified" in err
    assert "lock: verified" in err
    assert f"report: {demo.out / 'report.html'}" in out
    assert "gate: green, locked" in out


def test_demo_run_twice_says_already_locked(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, "demo", "--out", demo.out)
    code, out, _ = command(capsys, "demo", "--out", demo.out)
    assert code == 0
    assert "already locked" in out


def test_demo_run_again_after_an_update_says_what_to_do(
    demo: GateDouble, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(capsys, "demo", "--out", demo.out)
    monkeypatch.setattr("leadline.gate.lock_check.source_sha256", lambda: "0" * 64)
    code, _, err = command(capsys, "demo", "--out", demo.out)
    assert code == 1
    assert f"give another --out, or remove {demo.out}" in err


def test_demo_whose_ledger_does_not_verify_fails(
    demo: GateDouble, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def red(run_dir: Path) -> LedgerCheck:
        return replace(verify_ledger(run_dir / "ledger.jsonl"), ok=False, reason="line 3 is bad")

    monkeypatch.setattr("leadline.core.lineage.verify_lineage", red)
    code, _, err = command(capsys, "demo", "--out", demo.out)
    assert code == 1
    assert "ledger: verified" not in err
    assert "the ledger just written does not verify: line 3 is bad" in err


def test_demo_json_is_the_gates_result(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(capsys, "demo", "--out", demo.out, "--json")
    result = json.loads(out)
    assert (code, result["green"]) == (0, True)
    assert result["lock_path"] == str(demo.out / "config.lock.json")


def test_demo_trains_the_locked_shape_and_taps_the_model_from_disk(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = command(capsys, "demo", "--out", demo.out, "--json")
    result = json.loads(out)
    lock = demo.lock()
    shape = lock["micro_batch"] * lock["seq_len"]
    assert result["trained"]["tokens"] == result["trained"]["steps"] * shape
    tap = result["tap"]
    assert (tap["layers"], tap["experts"]) == (2, 8)
    assert 1 <= tap["experts_reached"] <= 8
    assert 0 < tap["bytes_read"] <= tap["checkpoint_bytes"]
    with GramReader(demo.out / "tap") as grams:
        assert [int(grams.rows(layer).sum()) for layer in (0, 1)] == [2 * tap["tokens"]] * 2
        grams.verify()


def test_demo_tells_people_what_was_trained_and_tapped(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, err = command(capsys, "demo", "--out", demo.out)
    assert "trained: 1 steps, 512 tokens" in out
    assert "tapped: 2 layers" in out
    assert f"Grams: {demo.out / 'tap'}" in out
    assert "document_truncated" in err


def test_demo_run_again_trains_and_taps_no_second_time(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    first = json.loads(command(capsys, "demo", "--out", demo.out, "--json")[1])
    again = json.loads(command(capsys, "demo", "--out", demo.out, "--json")[1])
    assert again["trained"] == first["trained"]
    assert again["tap"] == first["tap"]


def test_demo_killed_before_its_training_was_recorded_trains_anew(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, "demo", "--out", demo.out)
    (demo.out / "training.json").unlink()
    (demo.out / "model" / "model.safetensors").write_bytes(b"half a model")
    code, _, err = command(capsys, "demo", "--out", demo.out)
    assert (code, "half" in err) == (0, False)
    GramReader(demo.out / "tap").verify()


def test_demo_that_ends_red_exits_three(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.probes.environment["problems"] = ["bf16 does not run on this CPU"]
    code, _, err = command(capsys, "demo", "--out", demo.out)
    assert code == 3
    assert "bf16 does not run on this CPU" in err
    assert "lock: verified" not in err
    assert not (demo.out / "model").exists()


def test_demo_whose_lock_does_not_verify_fails_with_one_json_document(
    demo: GateDouble, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: object, **__: object) -> list[str]:
        return ["data: a shard was changed"]

    monkeypatch.setattr("leadline.gate.lock.lock_problems", changed)
    code, out, _ = command(capsys, "demo", "--out", demo.out, "--json")
    assert code == 1
    assert "a shard was changed" in json.loads(out)["error"]["message"]
