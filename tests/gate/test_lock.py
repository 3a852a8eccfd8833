"""`lock_problems`: every way a run can differ from its lock is found, named and told at once."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from leadline.core.canonical import canonical_bytes, sha256_file
from leadline.core.errors import LeadlineError, LockError
from leadline.core.ledger import Ledger
from leadline.gate.lock import lock_problems

from .double import GateDouble


@pytest.fixture
def locked(gate: GateDouble, tiny_shards: Path) -> GateDouble:
    """A locked gate over shards of its own."""
    shards = gate.folder / "shards"
    shutil.copytree(tiny_shards, shards)
    gate.tables["data"]["shards"] = str(shards)
    assert gate.run().status.green
    return gate


def rewrite(gate: GateDouble, payload: dict[str, Any]) -> None:
    path = gate.out / "config.lock.json"
    path.chmod(0o644)
    path.write_bytes(canonical_bytes(payload) + b"\n")


def found(gate: GateDouble, *, deep: bool = False) -> str:
    """All problems, or the refusal to read the lock at all."""
    try:
        return "\n".join(lock_problems(gate.out, deep=deep))
    except LockError as error:
        return str(error)


def test_fresh_lock_has_no_problem(locked: GateDouble) -> None:
    assert lock_problems(locked.out, deep=True) == []


def test_lock_holds_no_float_and_the_three_keys_at_its_top(locked: GateDouble) -> None:
    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is a float")

    content = (locked.out / "config.lock.json").read_bytes()
    lock = json.loads(content, parse_float=refuse)
    assert (lock["best_cfg"], lock["tok_s"]) == ("P2", 60_000)
    assert lock["locked_budget_tokens"] == 60_000 * 765
    assert lock["total_steps"] == 60_000 * 765 // (8 * 64)


def _changed(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    return f"{value}0" if isinstance(value, str) else {"changed": 1}


def test_edit_of_any_key_of_the_lock_is_found(locked: GateDouble) -> None:
    payload = locked.lock()
    for key, value in payload.items():
        rewrite(locked, {**payload, key: _changed(value)})
        assert found(locked) != "", key
        without = {name: item for name, item in payload.items() if name != key}
        rewrite(locked, without)
        assert found(locked) != "", key
    rewrite(locked, {**payload, "added": 1})
    assert found(locked) != ""


def test_edit_of_any_key_below_the_top_of_the_lock_is_found(locked: GateDouble) -> None:
    payload = locked.lock()
    for key, table in payload.items():
        for name, value in table.items() if isinstance(table, dict) else ():
            rewrite(locked, {**payload, key: {**table, name: _changed(value)}})
            assert found(locked) != "", (key, name)
            rewrite(locked, {**payload, key: {k: v for k, v in table.items() if k != name}})
            assert found(locked) != "", (key, name)


def test_wrong_type_at_any_key_of_the_lock_is_told_without_a_crash(locked: GateDouble) -> None:
    payload = locked.lock()
    for key in payload:
        for odd in (None, [], {}, "", -1, True):
            rewrite(locked, {**payload, key: odd})
            assert found(locked) != "", (key, odd)


def test_edited_budget_is_named_with_what_its_inputs_give(locked: GateDouble) -> None:
    rewrite(locked, {**locked.lock(), "locked_budget_tokens": 99_999_999, "total_steps": 7})
    told = found(locked)
    assert "locked_budget_tokens is 99999999, its inputs give 45900000" in told
    assert "total_steps is 7" in told
    assert "no line holds this lock's sha256" in told


def forge(gate: GateDouble, payload: dict[str, Any]) -> None:
    """Rewrite the lock, and the ledger's last line with the hash of the new one."""
    rewrite(gate, payload)
    path = gate.store.ledger.path
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    gate.store.ledger.append(
        "lock.written",
        {
            "sha256": sha256_file(gate.out / "config.lock.json"),
            "locked_budget_tokens": payload["locked_budget_tokens"],
            "total_steps": payload["total_steps"],
        },
    )


OWN = ("created", "ledger_head", "ledger_lines")


def test_lock_and_ledger_line_forged_alike_are_found_in_every_key(locked: GateDouble) -> None:
    payload = locked.lock()
    for key, value in payload.items():
        if key in (*OWN, "schema"):
            continue
        forge(locked, {**payload, key: _changed(value)})
        told = found(locked)
        assert f"lock: {key} is " in told, (key, told)
        assert "sha256; the lock or the ledger's end" not in told
    forge(locked, payload)
    assert lock_problems(locked.out) == []


def test_lock_forged_below_its_top_is_found(locked: GateDouble) -> None:
    payload = locked.lock()
    for key, table in payload.items():
        for name, value in table.items() if isinstance(table, dict) else ():
            forge(locked, {**payload, key: {**table, name: _changed(value)}})
            assert f"lock: {key} is " in found(locked), (key, name)


def test_consistent_forgery_of_rate_and_budget_is_found(locked: GateDouble) -> None:
    """Twice the rate with the arithmetic done right, and every hash renewed."""
    payload = locked.lock()
    tokens = 120_000 * 765
    steps = tokens // (8 * 64)
    forged = {
        "tok_s": 120_000,
        "locked_budget_tokens": tokens,
        "total_steps": steps,
        "tokens_in_steps": steps * 8 * 64,
    }
    forge(locked, {**payload, **forged})
    told = lock_problems(locked.out)
    assert {line.split()[1] for line in told} == set(forged)
    assert "lock: tok_s is 120000, what was measured gives 60000" in told


def test_lock_with_a_key_of_no_gate_is_found_when_forged(locked: GateDouble) -> None:
    forge(locked, {**locked.lock(), "added": 1})
    assert found(locked) == "lock: added is a key that no gate writes"


def test_configuration_swapped_together_with_the_lock_is_found(locked: GateDouble) -> None:
    path = locked.out / "gate.toml"
    path.write_bytes(path.read_bytes().replace(b"seed = 0", b"seed = 9"))
    forge(locked, {**locked.lock(), "seed": 9, "config_sha256": sha256_file(path)})
    assert "lock: config_sha256 is " in found(locked)


def test_g55_ledger_cut_at_its_end_is_found(locked: GateDouble) -> None:
    path = locked.store.ledger.path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))
    assert "lock" in found(locked)
    path.write_bytes(b"".join(lines[:-4]))
    assert "lines were cut off its end" in found(locked)


def test_g55_ledger_rewritten_with_fresh_hashes_is_found(locked: GateDouble) -> None:
    path = locked.store.ledger.path
    entries = Ledger(path).entries()
    path.unlink()
    for entry in entries:
        data = dict(entry.data)
        if data.get("name") == "twin":
            data["reason"] = "rewritten"
        Ledger(path).append(entry.kind, data)
    told = found(locked)
    assert "the ledger was rewritten up to there" in told


def test_edited_ledger_line_is_named(locked: GateDouble) -> None:
    path = locked.store.ledger.path
    path.write_bytes(path.read_bytes().replace(b'"leadline":', b'"leadlone":', 1))
    assert found(locked).startswith("ledger: line 1 ")


def test_missing_ledger_is_told(locked: GateDouble) -> None:
    locked.store.ledger.path.unlink()
    assert "there is no ledger" in found(locked)


@pytest.mark.parametrize("name", ["environment", "pack", "twin", "probe.P1", "choice", "budget"])
def test_edited_evidence_is_named(locked: GateDouble, name: str) -> None:
    path = locked.store.path(name)
    path.write_bytes(path.read_bytes() + b" ")
    assert f"evidence: {name} is not what was locked" in found(locked)


def test_deleted_evidence_is_named(locked: GateDouble) -> None:
    locked.store.path("probe.P3").unlink()
    assert "evidence: probe.P3 is not what was locked: evidence/probe.P3.json is gone" in found(
        locked
    )


def test_evidence_recorded_again_after_the_lock_is_named(locked: GateDouble) -> None:
    data = locked.store.read()["twin"].data
    locked.store.record("twin", green=True, reason="", inputs="0" * 64, data=data)
    assert "evidence: twin is not what was locked: it was recorded again" in found(locked)


def test_changed_shard_byte_is_found_by_a_deep_check_alone(locked: GateDouble) -> None:
    shard = next((locked.folder / "shards" / "train").glob("*.bin"))
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    assert found(locked) == ""
    assert shard.name in found(locked, deep=True)


def test_changed_data_manifest_is_named(locked: GateDouble) -> None:
    path = locked.folder / "shards" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"seed":0', b'"seed":1'))
    assert "data: the manifest at" in found(locked)


def test_missing_shards_are_named(locked: GateDouble) -> None:
    shutil.rmtree(locked.folder / "shards")
    assert found(locked).startswith("data: ")


def test_changed_code_is_named(locked: GateDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leadline.gate.lock_check.source_sha256", lambda: "0" * 64)
    assert found(locked).startswith("code: leadline's source is not what was locked")


def test_changed_workload_file_is_named(locked: GateDouble) -> None:
    path = locked.folder / "model.py"
    path.write_text("# another model\n", encoding="utf-8")
    assert f"workload: {path} is not what was locked" in found(locked)
    path.unlink()
    assert f"workload: {path} is gone" in found(locked)


def test_changed_configuration_copy_is_named(locked: GateDouble) -> None:
    path = locked.out / "gate.toml"
    path.write_bytes(path.read_bytes() + b"\n")
    assert found(locked) == "configuration: gate.toml is not what was locked"


def test_second_lock_line_is_named(locked: GateDouble) -> None:
    last = locked.store.ledger.entries()[-1]
    locked.store.ledger.append("lock.written", dict(last.data))
    assert "ledger: 2 locks were written here" in found(locked)


def test_all_differences_are_told_at_once(
    locked: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leadline.gate.lock_check.source_sha256", lambda: "0" * 64)
    (locked.folder / "model.py").unlink()
    locked.store.path("twin").unlink()
    manifest = locked.folder / "shards" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"seed":0', b'"seed":1'))
    rewrite(locked, {**locked.lock(), "total_steps": 1})
    kinds = {line.partition(":")[0] for line in lock_problems(locked.out)}
    assert kinds == {
        "ledger",
        "evidence",
        "lock",
        "gate",
        "arithmetic",
        "data",
        "workload",
        "code",
    }


def test_broken_ledger_does_not_hide_changed_code(
    locked: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leadline.gate.lock_check.source_sha256", lambda: "0" * 64)
    os.truncate(locked.store.ledger.path, 100)
    kinds = [line.partition(":")[0] for line in lock_problems(locked.out)]
    assert kinds == ["ledger", "code"]


def test_run_without_a_lock_is_refused(gate: GateDouble) -> None:
    with pytest.raises(LeadlineError, match="does not exist"):
        lock_problems(gate.out)
