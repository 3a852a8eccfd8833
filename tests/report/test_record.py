"""A run directory as found: whole, half-finished, edited, torn."""

from pathlib import Path

import pytest

from leadline.core.errors import UsageError
from leadline.report.record import read_run


def test_record_of_a_whole_run_is_green_and_locked(make_run) -> None:
    record = read_run(make_run("green").path)
    assert record.status.green
    assert record.ledger.ok
    assert record.lock.present
    assert record.lock.problem == ""
    assert record.points == ("P1", "P2", "P3")


def test_record_of_an_edited_evidence_file_turns_its_line_red(make_run) -> None:
    run = make_run("green")
    path = run.path / "evidence" / "twin.json"
    path.write_text(path.read_text().replace('"tolerance": 0.05', '"tolerance": 0.5'))
    record = read_run(run.path)
    assert record.status.red == ("twin_delta",)
    assert "changed" in record.evidence["twin"].reason


def test_record_of_evidence_without_a_ledger_line_counts_as_missing(make_run) -> None:
    run = make_run("partial")
    (run.path / "evidence" / "choice.json").write_text('{"green": true, "data": {}}')
    record = read_run(run.path)
    assert record.unvouched == ("choice",)
    assert "best_cfg" in record.status.missing


def test_record_of_a_torn_ledger_keeps_the_data_and_turns_all_red(make_run) -> None:
    run = make_run("partial")
    ledger = run.path / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-40])
    record = read_run(run.path)
    assert not record.ledger.ok
    assert record.data("twin").number("worst_delta") is not None
    assert not any(evidence.green for evidence in record.evidence.values())
    assert "torn" in record.evidence["twin"].reason


def test_record_of_a_cut_ledger_is_red_by_the_locks_anchor(make_run) -> None:
    run = make_run("green")
    ledger = run.path / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-3]))
    record = read_run(run.path)
    assert not record.ledger.ok
    assert record.ledger.reason != ""


def test_record_of_an_edited_lock_says_so(make_run) -> None:
    run = make_run("green")
    lock = run.path / "config.lock.json"
    lock.chmod(0o644)
    lock.write_text(lock.read_text().replace('"best_cfg":"P2"', '"best_cfg":"P1"'))
    assert "sha256" in read_run(run.path).lock.problem


def test_record_of_a_lost_lock_says_so(make_run) -> None:
    run = make_run("green")
    (run.path / "config.lock.json").unlink()
    assert "gone" in read_run(run.path).lock.problem


def test_record_of_evidence_recorded_after_the_lock_says_so(make_run) -> None:
    run = make_run("green")
    run.record("budget", {"locked_budget_tokens": 1, "total_steps": 1})
    assert "evidence/budget.json is not what was locked" in read_run(run.path).lock.problem


def test_record_of_values_that_cannot_be_judged_is_red_with_the_reason(make_run) -> None:
    run = make_run("partial")
    run.record("twin", {"worst_delta": "much", "worst_step": 3, "tolerance": 0.05})
    record = read_run(run.path)
    assert "twin_delta" in record.status.red
    (line,) = [line for line in record.status.lines if line.key == "twin_delta"]
    assert "cannot read" in line.reason


@pytest.mark.parametrize("kind", ["absent", "file", "stranger"])
def test_record_of_what_is_no_run_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("text")
    if kind == "stranger":
        path.mkdir()
        (path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(UsageError, match="leadline gate run"):
        read_run(path)
