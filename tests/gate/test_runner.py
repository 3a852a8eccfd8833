"""Running a gate: what is measured, what is reused, and what is never written twice."""

import os
from pathlib import Path
from typing import Any

import pytest

from leadline.core.errors import DiskSpaceError, IntegrityError, LockError, UsageError
from leadline.core.ledger import Ledger, verify_ledger
from leadline.core.lineage import verify_lineage
from leadline.gate.context import GateContext
from leadline.gate.lock import finish_lock, lock_problems
from leadline.gate.run_folder import alone_in
from leadline.gate.runner import GateEvents, run_gate

from .double import GateDouble, measured, memory, out_of_memory

ALL = ["environment", "twin", "probe-P1", "probe-P2", "probe-P3"]


def test_gate_of_green_probes_ends_green_with_one_lock(gate: GateDouble) -> None:
    outcome = gate.run()
    assert (outcome.status.green, outcome.already_locked) == (True, False)
    assert outcome.lock_path == gate.out / "config.lock.json"
    assert gate.kinds().count("lock.written") == 1
    assert gate.probes.calls == ALL


def test_gate_logs_its_arithmetic_before_the_lock_is_written(gate: GateDouble) -> None:
    gate.run()
    assert gate.kinds()[-2:] == ["budget.arithmetic", "lock.written"]
    lines = gate.store.ledger.entries()[-2].data["lines"]
    assert any("floor(60,000 x 765)" in line for line in lines)


def test_gate_run_again_with_the_same_configuration_says_already_locked(gate: GateDouble) -> None:
    """G30: a resume never probes again."""
    gate.run()
    before = (gate.out / "config.lock.json").read_bytes()
    ledger = gate.store.ledger.path.read_bytes()
    gate.probes.calls.clear()
    outcome = gate.run()
    assert (outcome.already_locked, outcome.status.green) == (True, True)
    assert gate.probes.calls == []
    assert (gate.out / "config.lock.json").read_bytes() == before
    assert gate.store.ledger.path.read_bytes() == ledger


def test_g30_locked_gate_is_not_probed_again_even_when_the_card_got_faster(
    gate: GateDouble,
) -> None:
    gate.run()
    gate.probes.rates["P2"] = 900_000
    gate.run()
    assert gate.probes.calls == ALL
    assert gate.lock()["tok_s"] == 60_000


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("budget", "window_hours", "2"),
        ("data", "epochs", 200),
        ("sweep", "steps", 30),
        ("checkpoint", "every_steps", 50),
        ("optimizer", "learning_rate", 1),
    ],
)
def test_g31_changed_configuration_on_a_locked_run_is_refused(
    gate: GateDouble, table: str, key: str, value: object
) -> None:
    """A longer window asks for more steps than were locked; so do more data and so on."""
    gate.run()
    files = {path: path.read_bytes() for path in gate.out.rglob("*") if path.is_file()}
    gate.tables.setdefault(table, {})[key] = value
    with pytest.raises(LockError, match="locked for another configuration"):
        gate.run()
    assert {path: path.read_bytes() for path in gate.out.rglob("*") if path.is_file()} == files
    assert gate.probes.calls == ALL


def test_gate_with_other_points_on_a_locked_run_is_refused(gate: GateDouble) -> None:
    gate.run()
    gate.tables["sweep"]["points"][0]["micro_batch"] = 2
    with pytest.raises(LockError, match="never overwritten"):
        gate.run()


def test_gate_whose_lock_was_removed_does_not_write_another(gate: GateDouble) -> None:
    gate.run()
    (gate.out / "config.lock.json").unlink()
    gate.tables["budget"]["window_hours"] = "2"
    with pytest.raises(LockError, match=r"records a lock and config\.lock\.json is gone"):
        gate.run()
    assert gate.kinds().count("lock.written") == 1


def test_gate_with_an_edited_lock_is_refused_and_measures_nothing(gate: GateDouble) -> None:
    gate.run()
    path = gate.out / "config.lock.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"tok_s":60000', b'"tok_s":70000'))
    with pytest.raises(LockError, match="is gone or is not that one"):
        gate.run()
    assert gate.probes.calls == ALL


def test_gate_locked_by_another_version_says_what_to_do(
    gate: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.run()
    monkeypatch.setattr("leadline.gate.lock_check.source_sha256", lambda: "0" * 64)
    with pytest.raises(LockError, match=rf"give another --out, or remove {gate.out}"):
        gate.run()
    assert gate.probes.calls == ALL


def test_gate_whose_workload_is_edited_during_the_sweep_is_refused(gate: GateDouble) -> None:
    path = gate.folder / "model.py"

    def edit(request: Any) -> dict[str, Any]:
        path.write_text("# edited while P2 was measured\n", encoding="utf-8")
        return measured(request.name, request.micro_batch, request.seq_len, 60_000)

    gate.probes.serves["probe-P2"] = edit
    with pytest.raises(IntegrityError, match=r"model\.py changed while the gate ran"):
        gate.run()
    assert "probe.P2" not in gate.store.read()
    assert not (gate.out / "config.lock.json").exists()


def test_gate_whose_workload_is_edited_before_the_lock_is_refused(
    gate: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(ctx: GateContext) -> Path:
        (gate.folder / "model.py").write_text("# edited at the last moment\n", encoding="utf-8")
        return finish_lock(ctx)

    monkeypatch.setattr("leadline.gate.runner.finish_lock", edit)
    with pytest.raises(IntegrityError, match="changed while the gate ran"):
        gate.run()
    assert not (gate.out / "config.lock.json").exists()


def test_lock_leaves_out_points_of_an_earlier_configuration(gate: GateDouble) -> None:
    del gate.tables["disposition"]
    gate.run()
    gate.tables["sweep"]["points"][0]["name"] = "small"
    gate.tables["disposition"] = {"next": "continue"}
    assert gate.run().status.green
    assert sorted(gate.lock()["probes"]) == ["P2", "P3", "small"]
    assert "probe.P1" not in gate.lock()["evidence"]
    assert lock_problems(gate.out) == []


def test_unusable_points_of_a_red_sweep_are_measured_again(gate: GateDouble) -> None:
    tight = {"status": "rejected", "why": "peak is 85.00 %", "memory": memory(85)}
    gate.probes.points = dict.fromkeys(("P1", "P2", "P3"), tight)
    assert not gate.run().status.green
    gate.probes.points.clear()
    gate.probes.calls.clear()
    assert gate.run().status.green
    assert gate.probes.measured == ["probe-P1", "probe-P2", "probe-P3"]


def test_unusable_point_of_a_sweep_with_a_choice_is_kept(gate: GateDouble) -> None:
    gate.probes.points["P1"] = out_of_memory("train")
    del gate.tables["disposition"]
    gate.run()
    gate.probes.calls.clear()
    gate.run()
    assert gate.probes.measured == []


def test_second_gate_in_one_directory_is_refused_while_the_first_is_at_work(
    gate: GateDouble,
) -> None:
    gate.out.mkdir()
    with alone_in(gate.out), pytest.raises(LockError, match="another gate is at work"):
        gate.run()
    assert gate.run().status.green


class Mended(GateEvents):
    """Remembers what the gate said of its ledger."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def ledger_mended(self, line: int) -> None:
        self.lines.append(line)


@pytest.mark.parametrize("cut", [1, 40])
def test_gate_with_a_torn_ledger_goes_on_and_tells(gate: GateDouble, cut: int) -> None:
    del gate.tables["disposition"]
    gate.run()
    path = gate.store.ledger.path
    lines = path.read_bytes().count(b"\n")
    os.truncate(path, path.stat().st_size - cut)
    gate.tables["disposition"] = {"next": "continue"}
    events = Mended()
    assert run_gate(gate.write(), gate.out, events).status.green
    assert events.lines == [lines]
    assert verify_lineage(gate.out).ok


def test_locked_gate_whose_last_line_is_torn_finishes_the_same_lock(gate: GateDouble) -> None:
    gate.run()
    lock = (gate.out / "config.lock.json").read_bytes()
    os.truncate(gate.store.ledger.path, gate.store.ledger.path.stat().st_size - 30)
    outcome = gate.run()
    assert (outcome.status.green, gate.probes.measured) == (True, ALL[1:])
    assert (gate.out / "config.lock.json").read_bytes() == lock
    assert gate.kinds().count("lock.written") == 1
    assert verify_ledger(gate.store.ledger.path).repairs != ()
    assert lock_problems(gate.out) == []


def test_gate_with_a_broken_ledger_is_refused_and_measures_nothing(gate: GateDouble) -> None:
    del gate.tables["disposition"]
    gate.run()
    path = gate.store.ledger.path
    content = path.read_bytes().replace(b'"verdict":"green"', b'"verdict":"grean"', 1)
    path.write_bytes(content)
    gate.probes.calls.clear()
    with pytest.raises(IntegrityError, match="line 2 hashes to"):
        gate.run()
    assert gate.probes.calls == []
    assert path.read_bytes() == content


def test_gate_whose_clock_goes_backwards_records_it_and_goes_on(
    gate: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([f"2026-01-02T03:04:{59 - second:02d}.000000Z" for second in range(50)])

    class Backwards(Ledger):
        def __init__(self, path: Path) -> None:
            super().__init__(path, now=lambda: next(times))

    monkeypatch.setattr("leadline.core.evidence.Ledger", Backwards)
    assert gate.run().status.green
    check = verify_ledger(gate.out / "ledger.jsonl")
    assert check.ok
    assert check.clock_backwards != ()


def test_disk_that_filled_up_at_the_last_moment_is_not_locked(
    gate: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(ctx: GateContext) -> Path:
        monkeypatch.setattr("leadline.gate.arithmetic.disk_free_bytes", lambda _: 10)
        return finish_lock(ctx)

    monkeypatch.setattr("leadline.gate.runner.finish_lock", fill_up)
    with pytest.raises(DiskSpaceError, match="the lock is not written: 10 B are free"):
        gate.run()
    assert not (gate.out / "config.lock.json").exists()


def test_full_disk_in_a_probe_ends_the_gate_and_leaves_no_evidence(gate: GateDouble) -> None:
    gate.probes.raises["probe-P2"] = DiskSpaceError("the disk is full")
    with pytest.raises(DiskSpaceError):
        gate.run()
    assert "probe.P2" not in gate.store.read()
    gate.probes.raises.clear()
    assert gate.run().status.green


def test_gate_with_a_missing_workload_file_makes_no_run_directory(gate: GateDouble) -> None:
    gate.tables["workload"]["object"] = "nowhere.py:model"
    with pytest.raises(UsageError, match=r"no file at .*nowhere\.py"):
        gate.run()
    assert not gate.out.exists()


def test_memory_left_over_from_the_point_before_is_red(gate: GateDouble) -> None:
    gate.probes.environment["device"]["kind"] = "cuda"
    held = memory(40) | {"device_start_bytes": 5 << 30}
    gate.probes.points["P2"] = {"memory": held}
    outcome = gate.run()
    assert "tok_s.P2" in outcome.status.red
    assert "in use before this point" in gate.store.read()["probe.P2"].reason
