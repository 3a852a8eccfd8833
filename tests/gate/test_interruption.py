"""A gate killed at any of its writes: the next run ends with one valid lock.

The kill is real: the gate runs in a forked process that ends with `os._exit`, so no handler
of ours gets to tidy up. Only the probes are canned.
"""

import errno
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from leadline.core import ledger
from leadline.core.errors import DiskSpaceError, LockError
from leadline.core.lineage import verify_lineage
from leadline.gate.lock import lock_problems
from leadline.gate.runner import GateEvents, run_gate

from .double import GateDouble

KILLED = 9
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Killer:
    """Ends the process at its nth write, or before the ledger line that holds some bytes."""

    def __init__(self, at: int | bytes | None) -> None:
        self.at = at
        self.writes = 0

    def strikes(self) -> bool:
        self.writes += 1
        return self.writes == self.at

    def hook(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.strikes():
                os._exit(KILLED)
            return operation(*args, **kwargs)

        return counted

    def tear(self, append: Callable[..., None]) -> Callable[..., None]:
        """Half of the line is on the disk when the kill comes."""

        def torn(path: Path, data: bytes, existing: bytes | None) -> None:
            if isinstance(self.at, bytes) and self.at in data:
                os._exit(KILLED)
            if self.strikes():
                append(path, data[: len(data) // 2], existing)
                os._exit(KILLED)
            append(path, data, existing)

        return torn

    def arm(self) -> None:
        """Hook every operation by which a gate puts bytes or names on the disk."""
        os.fsync = self.hook(os.fsync)
        os.link = self.hook(os.link)
        Path.replace = self.hook(Path.replace)  # type: ignore[method-assign]
        ledger._append_bytes = self.tear(ledger._append_bytes)


def run_killed(gate: GateDouble, out: Path, at: int | bytes | None) -> tuple[int, int]:
    """Run in a forked process that dies at *at*; its exit status and its writes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            killer = Killer(at)
            killer.arm()
            run_gate(gate.config, out, GateEvents())
            os.write(writer, str(killer.writes).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    _, ended = os.waitpid(child, 0)
    told = os.read(reader, 16)
    os.close(reader)
    return os.waitstatus_to_exitcode(ended), int(told or b"0")


@pytest.fixture
def light(gate: GateDouble, monkeypatch: pytest.MonkeyPatch) -> GateDouble:
    """Without the report, the hash over the sources and reading one ledger again and again."""
    monkeypatch.setattr("leadline.gate.runner.build_report", lambda run: run / "report.html")
    # Killing a process loses nothing the kernel already holds, so no disk has to be waited for.
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(ledger, "read_chain", lru_cache(maxsize=8)(ledger.read_chain))
    for module in ("runner", "lock_check"):
        monkeypatch.setattr(f"leadline.gate.{module}.source_sha256", lambda: "c0" * 32)
    gate.write()
    return gate


def evidence_lines(gate: GateDouble, out: Path) -> list[str]:
    entries = ledger.Ledger(out / "ledger.jsonl").entries()
    return [str(entry.data["name"]) for entry in entries if entry.kind == "evidence"]


def written_locks(out: Path) -> int:
    entries = ledger.Ledger(out / "ledger.jsonl").entries()
    return [entry.kind for entry in entries].count("lock.written")


def test_gate_killed_at_any_write_goes_on_to_one_valid_lock(light: GateDouble) -> None:
    status, writes = run_killed(light, light.folder / "whole", None)
    assert (status, writes > 60) == (0, True)
    for at in range(1, writes + 1):
        out = light.folder / f"killed-{at}"
        assert run_killed(light, out, at)[0] == KILLED, at
        outcome = run_gate(light.config, out, GateEvents())
        assert outcome.status.green, at
        assert lock_problems(out) == [], at
        assert verify_lineage(out).ok, at
        assert written_locks(out) == 1, at
        lines = evidence_lines(light, out)
        assert len(lines) == len(set(lines)) == 10, (at, lines)  # nothing was found twice


def test_gate_killed_twice_and_twice_again_goes_on_to_one_valid_lock(light: GateDouble) -> None:
    out = light.out
    for at in (30, 12, 9, 6):
        assert run_killed(light, out, at)[0] == KILLED
    assert run_gate(light.config, out, GateEvents()).status.green
    assert (lock_problems(out), written_locks(out)) == ([], 1)


def test_kill_between_lock_and_its_line_keeps_the_lock_that_is_there(light: GateDouble) -> None:
    assert run_killed(light, light.out, b'"lock.written"')[0] == KILLED
    lock = (light.out / "config.lock.json").read_bytes()
    assert written_locks(light.out) == 0
    assert run_gate(light.config, light.out, GateEvents()).status.green
    assert (light.out / "config.lock.json").read_bytes() == lock
    assert (lock_problems(light.out), written_locks(light.out)) == ([], 1)


def test_lock_edited_between_its_writing_and_its_line_is_refused(light: GateDouble) -> None:
    assert run_killed(light, light.out, b'"lock.written"')[0] == KILLED
    path = light.out / "config.lock.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"tok_s":60000', b'"tok_s":90000'))
    with pytest.raises(LockError, match="no longer matches the evidence"):
        run_gate(light.config, light.out, GateEvents())
    assert written_locks(light.out) == 0


def test_kill_between_evidence_and_its_line_measures_that_phase_again(light: GateDouble) -> None:
    assert run_killed(light, light.out, b'"name":"probe.P2"')[0] == KILLED
    assert light.store.path("probe.P2").is_file()
    assert "probe.P2" not in light.store.read()
    assert run_gate(light.config, light.out, GateEvents()).status.green
    assert light.probes.measured == ["probe-P2", "probe-P3"]


class FullDisk:
    """The disk is full at the nth fsync, and free again afterwards."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.writes = 0
        self._fsync = os.fsync

    def fsync(self, handle: int) -> None:
        self.writes += 1
        if self.writes == self.at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(handle)


def test_disk_full_at_any_write_is_told_and_the_next_run_ends_with_one_lock(
    light: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FullDisk(None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", whole.fsync)
        run_gate(light.config, light.folder / "whole", GateEvents())
    assert whole.writes > 30
    for at in range(1, whole.writes + 1):
        out = light.folder / f"full-{at}"
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", FullDisk(at).fsync)
            with pytest.raises(DiskSpaceError, match="the disk is full"):
                run_gate(light.config, out, GateEvents())
        assert [path for path in out.rglob("*.tmp") if path.is_file()] == [], at
        assert run_gate(light.config, out, GateEvents()).status.green, at
        assert (lock_problems(out), written_locks(out)) == ([], 1), at
