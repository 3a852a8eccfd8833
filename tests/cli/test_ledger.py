import json

import pytest

from leadline.cli.app import main
from leadline.core.ledger import Ledger


def _run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.fixture
def path(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for number in range(12):
        ledger.append("even" if number % 2 == 0 else "odd", {"number": number})
    return ledger.path


def test_ledger_verify_of_a_sound_ledger_exits_zero(path, capsys):
    code, out, err = _run(capsys, "ledger", "verify", path)
    assert (code, err) == (0, "")
    assert "12 lines" in out


def test_ledger_verify_json_holds_the_agreed_fields(path, capsys):
    code, out, _ = _run(capsys, "ledger", "verify", path, "--json")
    result = json.loads(out)
    assert (code, result["ok"], result["lines"], result["first_bad"]) == (0, True, 12, None)
    assert result["reason"] == ""
    assert result["head"] == {"lines": 12, "hash": Ledger(path).entries()[-1].hash}


def test_ledger_verify_of_an_edited_ledger_exits_one_and_names_the_line(path, capsys):
    path.write_bytes(path.read_bytes().replace(b'"number":7', b'"number":8'))
    code, out, _ = _run(capsys, "ledger", "verify", path, "--json")
    result = json.loads(out)
    assert (code, result["ok"], result["first_bad"]) == (1, False, 8)


def test_ledger_verify_of_a_run_directory_reads_its_ledger(path, capsys):
    assert _run(capsys, "ledger", "verify", path.parent)[0] == 0


def test_g54_ledger_verify_of_a_torn_ledger_is_red_and_tells_the_repair_later(path, capsys):
    path.write_bytes(path.read_bytes()[:-50])
    code, out, _ = _run(capsys, "ledger", "verify", path)
    assert code == 1
    assert "line 12 is torn" in out
    Ledger(path).append("after", {})
    code, out, _ = _run(capsys, "ledger", "verify", path)
    assert code == 0
    assert "line 12 files away" in out


def test_ledger_verify_tells_a_clock_that_went_backwards_and_stays_green(path, capsys):
    Ledger(path, lambda: "2001-01-01T00:00:00.000000Z").append("late", {})
    code, out, _ = _run(capsys, "ledger", "verify", path)
    assert code == 0
    assert "line 13 tells that the clock went backwards" in out


@pytest.mark.parametrize("command", ["verify", "show"])
def test_ledger_of_a_missing_path_exits_one_with_one_sentence(tmp_path, capsys, command):
    code, out, err = _run(capsys, "ledger", command, tmp_path / "nowhere")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "there is no ledger at" in err


def test_ledger_error_with_json_is_json_on_stdout(tmp_path, capsys):
    code, out, _ = _run(capsys, "ledger", "verify", tmp_path / "nowhere", "--json")
    assert code == 1
    assert json.loads(out)["error"]["kind"] == "IntegrityError"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000 + b"\n", b"\0" * 4096])
def test_ledger_verify_of_rubbish_is_red_without_a_crash(tmp_path, capsys, content):
    (tmp_path / "x").write_bytes(content)
    code, _, err = _run(capsys, "ledger", "verify", tmp_path / "x")
    assert (code, err) == (1, "")


def test_ledger_show_json_lists_every_entry(path, capsys):
    code, out, _ = _run(capsys, "ledger", "show", path, "--json")
    assert code == 0
    assert [entry["data"]["number"] for entry in json.loads(out)] == list(range(12))


def test_ledger_show_of_one_kind_leaves_out_the_others(path, capsys):
    _, out, _ = _run(capsys, "ledger", "show", path, "--kind", "odd", "--json")
    assert {entry["kind"] for entry in json.loads(out)} == {"odd"}


def test_ledger_show_prints_one_row_an_entry(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = _run(capsys, "ledger", "show", path)
    assert code == 0
    assert len(out.splitlines()) == 12
    assert "number 3" in out.splitlines()[3]


def test_ledger_show_prints_markup_in_data_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    Ledger(tmp_path / "ledger.jsonl").append("note", {"text": "[bold red]boo[/]"})
    assert "[bold red]boo[/]" in _run(capsys, "ledger", "show", tmp_path)[1]


def test_ledger_show_of_a_broken_ledger_exits_one(path, capsys):
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, out, err = _run(capsys, "ledger", "show", path)
    assert (code, out) == (1, "")
    assert "line 12" in err
