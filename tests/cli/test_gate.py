"""`leadline gate`: exit codes, the JSON that programs rely on, and what is printed."""

import json
from pathlib import Path
from typing import Any

import pytest

from leadline.cli.app import main
from leadline.core.errors import DiskSpaceError
from leadline.core.evidence import EvidenceStore

from ..gate.double import GateDouble


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


LINES = {
    "environment",
    "hash_gate",
    "twin_delta",
    "tok_s.P1",
    "tok_s.P2",
    "tok_s.P3",
    "best_cfg",
    "peak_vram",
    "eval_batch",
    "checkpoint",
    "budget",
    "disposition",
    "lock",
}


def test_gate_run_json_holds_the_agreed_fields(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out, "--json")
    result = json.loads(out)
    assert (code, result["green"], result["missing"], result["red"]) == (0, True, [], [])
    assert set(result["evidence"]) == LINES
    assert result["evidence"]["twin_delta"]["value"] == "0.0123 at step 2, limit 0.05"
    assert result["lock_path"] == str(gate.out / "config.lock.json")
    assert Path(result["report"]).is_file()
    assert "gate: green, locked" in err


def test_gate_run_without_json_prints_its_verdict_to_stdout_and_its_phases_to_stderr(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    assert (code, out.splitlines()) == (
        0,
        [
            f"report: {gate.out / 'report.html'}",
            f"gate: green, locked: {gate.out / 'config.lock.json'}",
        ],
    )
    assert "gate: green" not in err
    for title in ("Environment", "Hash gate", "fp32 twin", "Sweep P1 (4x64)", "Disposition"):
        assert title in err


def test_gate_run_prints_the_whole_arithmetic(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    assert "floor(60,000 x 765) = 45,900,000 tokens" in err
    assert "floor(45,900,000 / (8 x 64)) = 89,648 steps" in err


def test_gate_run_again_says_already_locked(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    gate.probes.calls.clear()
    code, out, _ = command(capsys, "gate", "run", gate.config, "--out", gate.out)
    assert (code, gate.probes.calls) == (0, [])
    assert "already locked" in out


def test_gate_run_of_a_red_gate_exits_three_with_the_lines(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    del gate.tables["disposition"]
    code, out, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out, "--json")
    result = json.loads(out)
    assert (code, result["green"], result["lock_path"]) == (3, False, None)
    assert (result["red"], result["missing"]) == (["disposition"], ["lock"])
    assert "[disposition] is missing from the configuration" in err
    assert "gate: red, not locked; red or missing: disposition" in err


def test_resumed_phases_are_marked_as_an_earlier_attempts(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.probes.raises["probe-P2"] = DiskSpaceError("the disk is full while writing there")
    assert command(capsys, "gate", "run", gate.write(), "--out", gate.out)[0] == 1
    gate.probes.raises.clear()
    code, _, err = command(capsys, "gate", "run", gate.config, "--out", gate.out)
    reused = [line for line in err.splitlines() if "earlier attempt" in line]
    assert (code, len(reused)) == (0, 4)  # environment, hash gate, twin and P1


def test_gate_show_of_a_green_run_exits_zero(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.run()
    code, out, err = command(capsys, "gate", "show", gate.out)
    assert (code, err) == (0, "")
    assert f"lock: {gate.out / 'config.lock.json'}" in out
    (budget,) = [line for line in out.splitlines() if "Locked tokens" in line]
    assert budget.startswith("green ")
    assert budget.endswith("45,900,000 tokens, 89,648 steps")


def test_gate_show_json_holds_the_agreed_fields(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.run()
    code, out, _ = command(capsys, "gate", "show", gate.out, "--json")
    result = json.loads(out)
    assert (code, result["green"], result["missing"]) == (0, True, [])
    assert set(result["evidence"]) == LINES
    assert set(result["evidence"]["budget"]) == {"state", "value", "reason"}
    assert result["lock_path"] == str(gate.out / "config.lock.json")


REQUIRED = {
    "probe.P1": ["tok_s.P1"],
    "probe.P2": ["tok_s.P2"],
    "probe.P3": ["tok_s.P3"],
    "choice": ["best_cfg", "peak_vram", "eval_batch"],
    "twin": ["twin_delta"],
    "budget": ["budget"],
    "checkpoint": ["checkpoint"],
    "disposition": ["disposition"],
}


@pytest.mark.parametrize("name", REQUIRED)
def test_gate_show_with_a_required_line_missing_exits_three_and_lists_it(
    gate: GateDouble, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    gate.run()
    copy = EvidenceStore(gate.folder / "copy")
    copy.ledger.append("gate.started", {"points": ["P1", "P2", "P3"]})
    for item in gate.store.read().values():
        if item.name != name:
            copy.record(item.name, green=True, reason="", inputs=item.inputs, data=item.data)
    code, out, _ = command(capsys, "gate", "show", copy.run_dir, "--json")
    result = json.loads(out)
    assert (code, result["green"]) == (3, False)
    assert result["missing"] == [*REQUIRED[name], "lock"]


def test_gate_show_of_an_unfinished_run_exits_three(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.probes.raises["twin"] = DiskSpaceError("the disk is full while writing there")
    command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    code, out, _ = command(capsys, "gate", "show", gate.out, "--json")
    result = json.loads(out)
    assert (code, result["lock_path"]) == (3, None)
    assert "twin_delta" in result["missing"]
    assert result["evidence"]["environment"]["state"] == "green"


def test_gate_show_of_no_directory_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = command(capsys, "gate", "show", tmp_path / "none")
    assert code == 2
    assert "does not exist" in err


def test_gate_show_tells_red_lines_with_their_reason(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.probes.twin |= {"green": False, "problems": ["bf16 loss is 0.09 from fp32 at step 3"]}
    gate.probes.twin["accused"] = [{"module": "blocks.3.norm", "rule": "reduction in bfloat16"}]
    command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    code, out, _ = command(capsys, "gate", "show", gate.out)
    assert code == 3
    assert (
        "bf16 loss is 0.09 from fp32 at step 3; the lanes part in "
        "blocks.3.norm (reduction in bfloat16)" in out
    )


def test_text_in_brackets_is_printed_as_it_stands(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    odd: dict[str, Any] = {"status": "rejected", "why": "[/red] shape [1, 2] of [bold]x"}
    gate.probes.points = dict.fromkeys(("P1", "P2", "P3"), odd)
    out = gate.folder / "run[1][bold]"
    code, told, err = command(capsys, "gate", "run", gate.write(), "--out", out)
    assert code == 3
    assert "[/red] shape [1, 2] of [bold]x" in err
    assert f"report: {out / 'report.html'}" in told


def test_error_with_json_is_one_document_on_stdout(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(capsys, "gate", "run", "none.toml", "--out", gate.out, "--json")
    assert code == 2
    assert json.loads(out)["error"]["kind"] == "UsageError"
