import json

import pytest

from leadline.core.canonical import canonical_bytes, sha256_file
from leadline.core.errors import IntegrityError
from leadline.core.ledger import Ledger
from leadline.core.lineage import lock_record, verify_lineage
from leadline.core.lockfile import ConfigLock, write_lock


@pytest.fixture
def run(tmp_path):
    """A run directory: five ledger lines, a lock, and the line that records it."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for number in range(5):
        ledger.append("evidence", {"number": number})
    head = ledger.head()
    integers = ("locked_budget_tokens", "tok_s", "total_steps", "tokens_in_steps")
    strings = ("best_cfg", "code_sha256", "manifest_sha256", "environment_fingerprint")
    payload = {
        "schema": 1, "micro_batch": 1, "seq_len": 1,
        **dict.fromkeys(integers, 1), **dict.fromkeys(strings, "x"),
        "ledger_lines": head.lines, "ledger_head": head.hash,
    }  # fmt: skip
    lock = write_lock(tmp_path, ConfigLock(payload=payload))
    ledger.append("lock.written", {"sha256": sha256_file(lock)})
    return tmp_path


def _cut(run, lines):
    path = run / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))


def test_lineage_of_a_locked_run_is_ok(run):
    assert verify_lineage(run).ok


def test_lineage_of_a_run_that_never_had_a_lock_is_that_of_its_ledger(run):
    (run / "config.lock.json").unlink()
    _cut(run, 5)
    assert verify_lineage(run) == verify_lineage(run / "ledger.jsonl")
    assert lock_record(run) == "absent"


def test_lineage_of_a_run_whose_recorded_lock_is_gone_is_red(run):
    (run / "config.lock.json").unlink()
    check = verify_lineage(run)
    assert (check.ok, lock_record(run)) == (False, "lost")
    assert "config.lock.json is gone" in check.reason


def test_lock_with_its_line_is_recorded(run):
    assert lock_record(run) == "recorded"


def test_lock_without_its_line_is_unrecorded(run):
    _cut(run, 5)
    assert lock_record(run) == "unrecorded"


def test_lock_in_the_place_of_the_recorded_one_is_lost(run):
    path = run / "config.lock.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b" ")
    assert lock_record(run) == "lost"


def test_folder_without_ledger_or_lock_has_no_lock(tmp_path):
    assert lock_record(tmp_path) == "absent"


def test_g55_cut_tail_of_a_locked_run_is_red_by_the_lock(run):
    _cut(run, 4)
    assert verify_lineage(run / "ledger.jsonl").ok
    check = verify_lineage(run)
    assert (check.ok, check.first_bad) == (False, 5)


def test_g55_cutting_only_the_line_that_records_the_lock_is_red(run):
    _cut(run, 5)
    check = verify_lineage(run)
    assert not check.ok
    assert "no lock.written entry after line 5" in check.reason


def test_g55_rewritten_ledger_of_a_locked_run_is_red(run):
    _cut(run, 3)
    ledger = Ledger(run / "ledger.jsonl")
    for _ in range(2):
        ledger.append("evidence", {"another": "story"})
    ledger.append("lock.written", {"sha256": sha256_file(run / "config.lock.json")})
    check = verify_lineage(run)
    assert (check.ok, check.first_bad) == (False, 5)


def test_lineage_of_a_replaced_lock_is_red(run):
    path = run / "config.lock.json"
    payload = {**json.loads(path.read_bytes()), "tok_s": 2}
    path.chmod(0o644)
    path.write_bytes(canonical_bytes(payload) + b"\n")
    assert "the lock was replaced" in verify_lineage(run).reason


def test_lineage_of_an_unreadable_lock_is_red(run):
    path = run / "config.lock.json"
    path.chmod(0o644)
    path.write_bytes(b"{")
    check = verify_lineage(run)
    assert not check.ok
    assert "the lock was replaced" in check.reason
    _cut(run, 5)
    assert "is not a lock" in verify_lineage(run).reason


def test_lineage_of_a_broken_ledger_names_its_line_whatever_the_lock(run):
    path = run / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"number":2', b'"number":9'))
    (run / "config.lock.json").unlink()
    (run / "config.lock.json").write_bytes(b"{")
    assert verify_lineage(run).first_bad == 3


def test_lineage_of_a_folder_without_a_ledger_names_the_file_it_wants(tmp_path):
    with pytest.raises(IntegrityError, match=r"no ledger at .*ledger\.jsonl"):
        verify_lineage(tmp_path)
