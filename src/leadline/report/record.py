"""A run directory as the report finds it: complete, half-finished or damaged.

Nothing here raises for what a run holds; a fault becomes a sentence the page shows.
Evidence counts only while the ledger vouches for it: when the ledger does not verify,
its files are still shown, and every one of them is red.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leadline.core.chain import Entry, Head, read_chain
from leadline.core.errors import LeadlineError, LockError, UsageError
from leadline.core.evidence import FOLDER, LEDGER_FILE, Evidence, EvidenceStore
from leadline.core.gate import (
    PROBE_PREFIX,
    STARTED_KIND,
    GateStatus,
    judge,
    planned_points,
)
from leadline.core.ledger import verify_ledger
from leadline.core.lockfile import LOCK_FILE, WRITTEN_KIND, ConfigLock, read_lock
from leadline.report.facts import Facts

CONFIG_FILE = "gate.toml"
_DEFAULT_POINTS = ("P1", "P2", "P3")


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRecord:
    """The ledger's good lines and what verifying found."""

    present: bool
    ok: bool
    reason: str
    num_lines: int
    head: str
    repairs: tuple[int, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LockRecord:
    """The lock file, if one was written."""

    present: bool
    problem: str
    """Empty when the lock reads and a ledger line vouches for exactly these bytes."""
    sha256: str
    content: Facts


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Everything the page is made from."""

    name: str
    points: tuple[str, ...]
    evidence: Mapping[str, Evidence]
    unvouched: tuple[str, ...]
    """Evidence files that no ledger line names; they count as missing."""
    status: GateStatus
    ledger: LedgerRecord
    lock: LockRecord
    config_text: str
    config: Facts

    def data(self, name: str) -> Facts:
        """The data of one piece of evidence; empty facts where there is none."""
        found = self.evidence.get(name)
        return Facts(found.data if found is not None else None)

    def started(self) -> Facts:
        """The data of the last `gate.started` line."""
        found = [entry.data for entry in self.ledger.entries if entry.kind == STARTED_KIND]
        return Facts(found[-1] if found else None)


def read_run(run_dir: Path) -> RunRecord:
    """Gather what *run_dir* holds.

    Raises:
        UsageError: it is not a folder, or holds nothing a gate writes.
    """
    _refuse_strangers(run_dir)
    locked, lock_problem = _read_lock(run_dir)
    ledger = _ledger(run_dir, locked.anchor if locked is not None else None)
    points, found = _evidence(run_dir, ledger)
    lock = _lock(locked, lock_problem, ledger, found)
    config_text = (_read_bytes(run_dir / CONFIG_FILE) or b"").decode("utf-8", errors="replace")
    return RunRecord(
        name=run_dir.resolve().name,
        points=points,
        evidence=found,
        unvouched=tuple(sorted(set(_evidence_files(run_dir)) - set(found))),
        status=judge(points, found),
        ledger=ledger,
        lock=lock,
        config_text=config_text,
        config=_config(config_text),
    )


def _refuse_strangers(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise UsageError(
            f"{run_dir} is not a folder; give the run directory that `leadline gate run` wrote"
        )
    written_by_gate = (LEDGER_FILE, FOLDER, LOCK_FILE, CONFIG_FILE)
    if not any((run_dir / name).exists() for name in written_by_gate):
        raise UsageError(
            f"{run_dir} holds none of {', '.join(written_by_gate)}; "
            "give the run directory that `leadline gate run` wrote"
        )


def _read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        # Absent and unreadable look the same here; the page says which line is missing.
        return None


def _ledger(run_dir: Path, anchor: Head | None) -> LedgerRecord:
    path = run_dir / LEDGER_FILE
    content = _read_bytes(path)
    chain = read_chain(content or b"")
    ok, reason = False, "there is no ledger"
    repairs: tuple[int, ...] = ()
    if content is not None:
        try:
            check = verify_ledger(path, anchor)
            ok, reason, repairs = check.ok, check.reason, check.repairs
        except LeadlineError as error:
            reason = str(error)
    return LedgerRecord(
        present=content is not None,
        ok=ok,
        reason=reason,
        num_lines=chain.num_lines,
        head=chain.head.hash,
        repairs=repairs,
        entries=chain.entries,
    )


def _json(content: bytes | None) -> Facts:
    try:
        return Facts(json.loads(content)) if content is not None else Facts(None)
    except (ValueError, RecursionError):
        return Facts(None)


def _read_lock(run_dir: Path) -> tuple[ConfigLock | None, str]:
    """The lock, or None and why it does not read; no reason when there is none."""
    if not (run_dir / LOCK_FILE).exists():
        return None, ""
    try:
        return read_lock(run_dir), ""
    except (LockError, OSError) as error:
        return None, str(error)


def _lock(
    locked: ConfigLock | None, problem: str, ledger: LedgerRecord, found: Mapping[str, Evidence]
) -> LockRecord:
    recorded = [
        str(entry.data.get("sha256", "")) for entry in ledger.entries if entry.kind == WRITTEN_KIND
    ]
    if locked is None:
        if not problem and recorded:
            problem = f"the ledger records a lock and {LOCK_FILE} is gone"
        return LockRecord(present=False, problem=problem, sha256="", content=Facts(None))
    if locked.sha256 not in recorded:
        problem = f"no ledger line holds the sha256 of {LOCK_FILE}; it was changed or not finished"
    else:
        problem = "; ".join(_differences(locked, found))
    return LockRecord(
        present=True, problem=problem, sha256=locked.sha256, content=Facts(locked.payload)
    )


def _differences(locked: ConfigLock, found: Mapping[str, Evidence]) -> list[str]:
    """Evidence that is no longer what the lock was made from."""
    return [
        f"evidence/{name}.json is not what was locked; `leadline lock verify` says more"
        for name, sha256 in Facts(locked.payload).pairs("evidence")
        if name not in found or found[name].sha256 != sha256.text()
    ]


def _evidence(run_dir: Path, ledger: LedgerRecord) -> tuple[tuple[str, ...], dict[str, Evidence]]:
    store = EvidenceStore(run_dir)
    try:
        return planned_points(store), store.read()
    except (LeadlineError, OSError, KeyError, TypeError) as error:
        # Not ignored: every line turns red with this reason.
        reason = ledger.reason or str(error)
    names = _evidence_files(run_dir)
    probed = [name.removeprefix(PROBE_PREFIX) for name in names if name.startswith(PROBE_PREFIX)]
    found = {
        name: Evidence(
            name=name,
            green=False,
            reason=f"the ledger no longer vouches for evidence/{name}.json: {reason}",
            inputs="",
            sha256="",
            time="",
            data=_mapping(_json(_read_bytes(run_dir / FOLDER / f"{name}.json")).at("data")),
        )
        for name in names
    }
    return tuple(sorted({*probed, *_DEFAULT_POINTS})), found


def _evidence_files(run_dir: Path) -> list[str]:
    folder = run_dir / FOLDER
    return sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []


def _mapping(facts: Facts) -> Mapping[str, object]:
    return facts.value if isinstance(facts.value, Mapping) else {}


def _config(text: str) -> Facts:
    try:
        return Facts(tomllib.loads(text))
    except tomllib.TOMLDecodeError:
        return Facts(None)  # the text itself is shown as it stands
