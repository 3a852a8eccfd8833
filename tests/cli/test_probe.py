"""`leadline probe`: one point, its JSON, its exit codes."""

import json

import pytest

from leadline.cli.app import main

from ..gate.double import GateDouble, out_of_memory


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def probe(
    gate: GateDouble, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    return command(capsys, "probe", "--config", gate.write(), "--out", gate.out, *words)


def test_probe_json_holds_rate_memory_and_grad_norm(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = probe(gate, capsys, "--cfg", "P2", "--json")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert (result["name"], result["status"], result["tok_s"]) == ("P2", "ok", 60_000)
    assert result["memory"]["percent"] == "40.00"
    assert set(result["grad_norm"]) == {"mean", "std", "max"}


def test_probe_prints_its_result_as_one_line_on_stdout(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = probe(gate, capsys, "--cfg", "P1")
    assert code == 0
    assert out == "P1 4x64: ok, 40,000 tok/s, peak 32.0 GiB, 40.00 % of the device\n"
    assert "tok/s" not in err


def test_probe_out_of_memory_exits_one_with_the_reason(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.probes.points["P3"] = {**out_of_memory("train"), "why": "does not fit [/x] [1]"}
    code, out, _ = probe(gate, capsys, "--cfg", "P3")
    assert code == 1
    assert "P3 4x128: oom, no rate" in out
    assert "does not fit [/x] [1]" in out


def test_probe_of_an_unknown_point_is_a_usage_error(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = probe(gate, capsys, "--cfg", "P7")
    assert code == 2
    assert err == "leadline: no point 'P7' in gate.toml; it has P1, P2, P3\n"


def test_probe_of_one_step_is_a_usage_error(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe(gate, capsys, "--cfg", "P1", "--steps", 1)[0] == 2


def test_probe_into_a_file_is_refused_in_one_sentence(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.out.write_bytes(b"")
    code, _, err = probe(gate, capsys, "--cfg", "P1")
    assert (code, err.count("\n")) == (1, 1)
    assert "unexpected" not in err


def test_probe_into_a_locked_run_is_refused(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.run()
    code, _, err = probe(gate, capsys, "--cfg", "P1")
    assert code == 1
    assert "is a locked run" in err


def test_probe_with_a_red_environment_exits_one_with_json_error(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.probes.environment["problems"] = ["capability 7.5 is below 8.0"]
    code, out, _ = probe(gate, capsys, "--cfg", "P1", "--json")
    assert code == 1
    assert "capability 7.5" in json.loads(out)["error"]["message"]
