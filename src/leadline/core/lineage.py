"""A run's ledger held against the run's lock.

A ledger alone cannot show that its tail was cut off or rewritten. The lock holds the
ledger's length and head at the moment of locking, and the ledger's next words record the
lock's own hash, so that neither can be changed alone.
"""

from dataclasses import replace
from pathlib import Path

from leadline.core.canonical import sha256_file
from leadline.core.errors import LockError
from leadline.core.evidence import LEDGER_FILE
from leadline.core.ledger import Ledger, LedgerCheck, verify_ledger
from leadline.core.lockfile import LOCK_FILE, WRITTEN_KIND, read_lock


def ledger_path(path: Path) -> Path:
    """The ledger of a run directory, or *path* itself."""
    return path / LEDGER_FILE if path.is_dir() else path


def verify_lineage(path: Path) -> LedgerCheck:
    """Verify a ledger, and against the lock where *path* is a run directory that has one.

    Raises:
        IntegrityError: there is no ledger.
    """
    ledger = ledger_path(path)
    if not path.is_dir() or not (path / LOCK_FILE).exists():
        return verify_ledger(ledger)
    try:
        anchor = read_lock(path).anchor
    except LockError as error:
        check = verify_ledger(ledger)
        return check if not check.ok else replace(check, ok=False, reason=str(error))
    check = verify_ledger(ledger, anchor)
    if not check.ok:
        return check
    locked = sha256_file(path / LOCK_FILE)
    recorded = any(
        entry.kind == WRITTEN_KIND and entry.data.get("sha256") == locked
        for entry in Ledger(ledger).entries()[anchor.lines :]
    )
    if recorded:
        return check
    reason = (
        f"no {WRITTEN_KIND} entry after line {anchor.lines} has the sha256 {locked[:12]}... of "
        f"{LOCK_FILE}: the lock was replaced, or writing it was interrupted"
    )
    return replace(check, ok=False, reason=reason)
