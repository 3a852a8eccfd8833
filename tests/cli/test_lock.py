"""`leadline lock verify`: exit code, names of what differs, JSON."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from leadline.cli.app import main

from ..gate.double import GateDouble


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_lock_verify_of_a_sound_lock_exits_zero(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.run()
    code, out, err = command(capsys, "lock", "verify", gate.out, "--deep")
    assert (code, err) == (0, "")
    assert out.startswith("lock verified: 45,900,000 tokens, 89,648 steps at P2; sha256 ")


def test_deep_lock_verify_shows_how_far_it_is(
    gate: GateDouble, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.run()
    shown: list[tuple[str, int, int]] = []

    @contextmanager
    def recorded() -> Iterator[Callable[[str, int, int], None]]:
        yield lambda stage, done, total: shown.append((stage, done, total))

    monkeypatch.setattr("leadline.cli.progress.byte_bar", recorded)
    command(capsys, "lock", "verify", gate.out)
    assert shown == []
    command(capsys, "lock", "verify", gate.out, "--deep")
    stage, done, total = shown[-1]
    assert (stage, done) == ("check shards", total)


def test_lock_verify_json_holds_the_agreed_fields(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.run()
    code, out, err = command(capsys, "lock", "verify", gate.out, "--json")
    result = json.loads(out)
    assert (code, result["ok"], result["problems"], err) == (0, True, [], "")
    assert (result["best_cfg"], result["total_steps"]) == ("P2", 89_648)
    assert result["locked_budget_tokens"] == 45_900_000
    assert result["sha256"] == gate.store.ledger.entries()[-1].data["sha256"]


def test_lock_verify_of_a_changed_run_exits_one_and_names_all(
    gate: GateDouble, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.run()
    gate.store.path("twin").write_bytes(b"[/bold] [x]")
    monkeypatch.setattr("leadline.gate.lock_check.source_sha256", lambda: "0" * 64)
    code, out, err = command(capsys, "lock", "verify", gate.out)
    assert (code, err) == (1, "")
    for named in ("evidence: twin is not what was locked", "gate: red", "code: leadline's source"):
        assert named in out


def test_lock_verify_json_of_a_changed_run_lists_the_problems(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.run()
    path = gate.out / "config.lock.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"total_steps":89648', b'"total_steps":99999'))
    code, out, _ = command(capsys, "lock", "verify", gate.out, "--json")
    result = json.loads(out)
    assert (code, result["ok"]) == (1, False)
    assert any("total_steps is 99999, its inputs give 89648" in item for item in result["problems"])


def test_lock_verify_of_a_cut_ledger_exits_one(
    gate: GateDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.run()
    path = gate.store.ledger.path
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-3]))
    code, out, _ = command(capsys, "lock", "verify", gate.out)
    assert code == 1
    assert "cut off its end" in out


@pytest.mark.parametrize("content", [b"", b"{", b"[]\n", b"\xff", b"{}\n"])
def test_lock_that_does_not_read_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "config.lock.json").write_bytes(content)
    code, _, err = command(capsys, "lock", "verify", tmp_path)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("leadline: ")
    assert "unexpected" not in err


def test_lock_verify_without_a_lock_says_what_writes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "none"):
        code, _, err = command(capsys, "lock", "verify", place)
        assert code == 1
        assert "`leadline gate run` writes it" in err


def test_lock_verify_of_a_file_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    code, _, err = command(capsys, "lock", "verify", tmp_path / "file")
    assert code == 1
    assert "unexpected" not in err
