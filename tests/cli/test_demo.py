"""`leadline demo`: its logic over canned probes; `make demo` runs the real one."""

import json

import pytest

from leadline.cli.app import main

from ..gate.double import GateDouble


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.fixture
def demo(gate: GateDouble, monkeypatch: pytest.MonkeyPatch) -> GateDouble:
    """The demo with the double's configuration in place of the embedded one."""
    monkeypatch.setattr("leadline.gate.defaults.demo_config_path", gate.write)
    return gate


def test_demo_ends_with_a_verified_ledger_and_lock_and_the_reports_path(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(capsys, "demo", "--out", demo.out)
    assert (code, out) == (0, "")
    assert "ledger: verified" in err
    assert "lock: verified" in err
    assert f"report: {demo.out / 'report.html'}" in err
    assert "gate: green, locked" in err


def test_demo_run_twice_says_already_locked(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, "demo", "--out", demo.out)
    code, _, err = command(capsys, "demo", "--out", demo.out)
    assert code == 0
    assert "already locked" in err


def test_demo_json_is_the_gates_result(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(capsys, "demo", "--out", demo.out, "--json")
    result = json.loads(out)
    assert (code, result["green"]) == (0, True)
    assert result["lock_path"] == str(demo.out / "config.lock.json")


def test_demo_that_ends_red_exits_three(
    demo: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.probes.environment["problems"] = ["bf16 does not run on this CPU"]
    code, _, err = command(capsys, "demo", "--out", demo.out)
    assert code == 3
    assert "bf16 does not run on this CPU" in err
    assert "lock: verified" not in err


def test_demo_whose_lock_does_not_verify_fails_with_one_json_document(
    demo: GateDouble, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: object, **__: object) -> list[str]:
        return ["data: a shard was changed"]

    monkeypatch.setattr("leadline.gate.lock.lock_problems", changed)
    code, out, _ = command(capsys, "demo", "--out", demo.out, "--json")
    assert code == 1
    assert "a shard was changed" in json.loads(out)["error"]["message"]
