"""The ledger file: append under a lock, verify, and repair what a crash tore.

- The lock `<ledger>.lock` is held from reading the head until the new line is on disk,
  so two processes make one chain.
- Every append verifies the whole chain first. That is linear in the file, and a ledger
  holds decisions, not steps.
- A torn last line is replaced by an entry `ledger.repaired` that keeps the fragment, in
  one rename; a last line that only lacks its newline gets it. A bad line anywhere else
  is never repaired: append refuses.
- An append that fails (full disk) takes its partial line away again.
- A clock that went backwards is told, not hidden: an entry `clock.backwards` with both
  times goes first, and the entry keeps the time its own clock showed.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from leadline.core.atomic import explained_os_errors, fsync_folder, write_bytes
from leadline.core.canonical import sha256_bytes
from leadline.core.chain import (
    CLOCK_KIND,
    GENESIS,
    REPAIRED_KIND,
    Chain,
    Entry,
    Head,
    check_anchor,
    line_bytes,
    read_chain,
    seal,
)
from leadline.core.errors import IntegrityError, LeadlineError, UsageError

__all__ = ["GENESIS", "Entry", "Head", "Ledger", "LedgerCheck", "utc_now", "verify_ledger"]

_LOCK_TIMEOUT_S = 60.0  # an append takes milliseconds; a minute means its holder hangs
_LOCK_POLL_S = 0.005
_EPOCH = "1970-01-01T00:00:00.000000Z"
_FRAGMENT_LIMIT_BYTES = 4096  # of a torn line kept in the repair entry; its sha256 covers all


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCheck:
    """What verifying a ledger found."""

    ok: bool
    lines: int
    """Lines in the file, a torn last one included."""
    first_bad: int | None
    """Number of the first line that is not good, from 1."""
    reason: str
    """Empty when ok."""
    head: Head
    """Head of the good lines."""
    torn: bool
    """True when the fault is an unterminated last line, which the next append repairs."""
    repairs: tuple[int, ...]
    """Lines where a torn line was filed away; ok all the same."""
    clock_backwards: tuple[int, ...]
    """Lines written when the clock stood before that of the line above; ok all the same."""


def utc_now() -> str:
    """The time as ledgers write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Ledger:
    """One ledger file, which need not exist yet."""

    def __init__(self, path: Path, now: Callable[[], str] = utc_now) -> None:
        self.path = path
        self._now = now

    def append(self, kind: str, data: Mapping[str, Any]) -> Entry:
        """Add one entry; when this returns it is on the disk.

        Raises:
            UsageError: a kind or data that a ledger cannot hold.
            IntegrityError: the existing ledger holds a bad line, which is named.
            DiskSpaceError: the disk is full; the ledger is as it was before.
            LeadlineError: the folder cannot be written, or another process holds the lock.
        """
        if kind in (REPAIRED_KIND, CLOCK_KIND):
            raise UsageError(
                f"ledger kind {kind!r} is written by the ledger itself; choose another"
            )
        # Refuse unusable data before the file or its folder is touched.
        seal(head=Head(lines=0, hash=GENESIS), time=_EPOCH, kind=kind, data=data)
        with explained_os_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path):
                return self._append_locked(kind, data)

    def entries(self) -> list[Entry]:
        """All entries, verified.

        Raises:
            IntegrityError: no such file, or a line is bad; the line is named.
        """
        chain = _read(self.path)
        if chain.first_bad is not None:
            raise IntegrityError(f"ledger {self.path}: {chain.reason}")
        return list(chain.entries)

    def head(self) -> Head:
        """Line count and hash to copy into a lock or a checkpoint.

        Raises:
            IntegrityError: as `entries`.
        """
        entries = self.entries()
        return Head(lines=len(entries), hash=entries[-1].hash if entries else GENESIS)

    def _append_locked(self, kind: str, data: Mapping[str, Any]) -> Entry:
        content = self.path.read_bytes() if self.path.exists() else None
        chain = read_chain(content or b"")
        if chain.first_bad is not None and not chain.torn:
            raise IntegrityError(
                f"ledger {self.path}: {chain.reason}; nothing was appended, "
                "because only a torn last line is ever repaired"
            )
        torn = chain.tail if chain.tail_entry is None else b""
        wanted = [(kind, data)]
        if torn:
            wanted.insert(0, (REPAIRED_KIND, _fragment_facts(chain.num_lines, torn)))
        before = [*chain.entries, chain.tail_entry] if chain.tail_entry else [*chain.entries]
        new = _continue(before, wanted, self._now())
        lines = b"".join(line_bytes(entry) for entry in new)
        if torn:
            write_bytes(self.path, (content or b"").removesuffix(torn) + lines)
        else:
            newline = b"\n" if chain.tail_entry else b""
            _append_bytes(self.path, newline + lines, existing=content)
        return new[-1]


def verify_ledger(path: Path, anchor: Head | None = None) -> LedgerCheck:
    """Check every line, and that the chain still runs through *anchor* if one is given.

    Raises:
        IntegrityError: there is no ledger at *path*.
    """
    chain = _read(path)
    first_bad, reason = chain.first_bad, chain.reason
    if first_bad is None and anchor is not None:
        first_bad, reason = check_anchor(chain, anchor) or (None, "")
    return LedgerCheck(
        ok=first_bad is None,
        lines=chain.num_lines,
        first_bad=first_bad,
        reason=reason,
        head=chain.head,
        torn=chain.torn,
        repairs=chain.lines_of(REPAIRED_KIND),
        clock_backwards=chain.lines_of(CLOCK_KIND),
    )


def _read(path: Path) -> Chain:
    if not path.is_file():
        raise IntegrityError(f"there is no ledger at {path}; give a ledger file or a run directory")
    with explained_os_errors(path, "read"):
        content = path.read_bytes()
        if content and not content.endswith(b"\n") and os.access(path.parent, os.W_OK):
            # Half a line may be another process in the middle of an append: wait for it.
            with _locked(path):
                content = path.read_bytes()
    return read_chain(content)


def _continue(before: Sequence[Entry], wanted: list[tuple[str, Any]], now: str) -> list[Entry]:
    """Seal *wanted* onto *before*, with a `clock.backwards` entry first where one is due."""
    last = before[-1] if before else None
    if last is not None and now < last.time:
        wanted = [(CLOCK_KIND, {"before": last.time, "now": now}), *wanted]
    head = Head(lines=len(before), hash=last.hash if last else GENESIS)
    new: list[Entry] = []
    for kind, data in wanted:
        new.append(seal(head=head, time=now, kind=kind, data=data))
        head = Head(lines=head.lines + 1, hash=new[-1].hash)
    return new


def _fragment_facts(line: int, fragment: bytes) -> dict[str, Any]:
    return {
        "line": line,
        "bytes": len(fragment),
        "fragment_hex": fragment[:_FRAGMENT_LIMIT_BYTES].hex(),
        "fragment_sha256": sha256_bytes(fragment),
    }


def _append_bytes(path: Path, data: bytes, existing: bytes | None) -> None:
    """Append and fsync; on any failure the file is as before, or absent if it was absent."""
    with path.open("ab", buffering=0) as stream:
        try:
            written = 0
            while written < len(data):
                written += stream.write(data[written:])
            os.fsync(stream.fileno())
            if existing is None:
                fsync_folder(path.parent)
        except BaseException as error:
            try:
                _take_back(path, existing)
            except OSError as second:
                error.add_note(f"the partial line could not be taken away again: {second}")
            raise


def _take_back(path: Path, existing: bytes | None) -> None:
    """Undo a partial append."""
    if existing is None:
        path.unlink()
    else:
        os.truncate(path, len(existing))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S)
    try:
        lock.acquire(poll_interval=_LOCK_POLL_S)
    except Timeout as error:
        raise LeadlineError(
            f"ledger {path} has been locked by another process for {_LOCK_TIMEOUT_S:.0f} s; "
            "end that process and run the command again"
        ) from error
    try:
        yield
    finally:
        lock.release()
