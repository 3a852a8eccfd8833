"""A run's ledger held against the run's lock.

A ledger alone cannot show that its tail was cut off or rewritten. The lock holds the
ledger's length and head at the moment of locking, and the ledger's next words record the
lock's own hash, so that neither can be changed alone.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from leadline.core.canonical import sha256_file
from leadline.core.errors import LockError
from leadline.core.evidence import LEDGER_FILE
from leadline.core.ledger import Ledger, LedgerCheck, verify_ledger
from leadline.core.lockfile import LOCK_FILE, WRITTEN_KIND, read_lock

LockRecord = Literal["absent", "unrecorded", "recorded", "lost"]

LOST_LOCK = (
    f"the ledger records a lock and {LOCK_FILE} is gone or is not that one: the lock was "
    "replaced; put back the one that was recorded"
)


def ledger_path(path: Path) -> Path:
    """The ledger of a run directory, or *path* itself."""
    return path / LEDGER_FILE if path.is_dir() else path


def lock_record(run_dir: Path) -> LockRecord:
    """How a run's lock stands to its ledger.

    `absent`: neither knows of a lock. `unrecorded`: a lock lies there and no line speaks of one,
    because its writing was cut off. `recorded`: a line holds the sha256 of the lock that lies
    there. `lost`: the ledger records a lock, and it is gone or another lies in its place.

    Raises:
        IntegrityError: the ledger does not verify.
    """
    ledger, lock = Ledger(run_dir / LEDGER_FILE), run_dir / LOCK_FILE
    entries = ledger.entries() if ledger.path.exists() else []
    written = [entry.data.get("sha256") for entry in entries if entry.kind == WRITTEN_KIND]
    there = lock.is_file()
    if there and sha256_file(lock) in written:
        return "recorded"
    if written:
        return "lost"
    return "unrecorded" if there else "absent"


def verify_lineage(path: Path) -> LedgerCheck:
    """Verify a ledger, and against the lock where *path* is a run directory that has one.

    Raises:
        IntegrityError: there is no ledger.
    """
    check = verify_ledger(ledger_path(path))
    if not check.ok or not path.is_dir():
        return check
    record = lock_record(path)
    if record == "absent":
        return check
    if record == "lost":
        return replace(check, ok=False, reason=LOST_LOCK)
    try:
        anchor = read_lock(path).anchor
    except LockError as error:
        return replace(check, ok=False, reason=str(error))
    check = verify_ledger(ledger_path(path), anchor)
    if check.ok and record == "unrecorded":
        reason = (
            f"no {WRITTEN_KIND} entry after line {anchor.lines} has the sha256 of {LOCK_FILE}: "
            "writing it was interrupted, or the ledger's end was cut; run the gate again"
        )
        return replace(check, ok=False, reason=reason)
    return check
