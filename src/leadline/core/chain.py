"""The ledger's format and its rules, over bytes in memory; no file is touched here.

A ledger is a text file of entries, one canonical-JSON object a line, each naming the
hash of the line before it. A line is good only when

- it is the canonical form of what it parses to, so that no byte can differ unseen;
- it holds exactly `data, hash, kind, prev, seq, time`, and `seq` is its line number;
- `prev` is the hash of the line before (64 zeros for line 1);
- `hash` is the sha256 of the canonical object without `hash`.

Bytes after the last newline are a *tail*: a crash leaves one. A tail that is a good
line only lacks its newline; any other tail is *torn*.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leadline.core.canonical import canonical_bytes, parse_canonical, sha256_bytes
from leadline.core.errors import IntegrityError, UsageError

GENESIS = "0" * 64
REPAIRED_KIND = "ledger.repaired"
CLOCK_KIND = "clock.backwards"

_FIELDS = ["data", "hash", "kind", "prev", "seq", "time"]
_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{6}Z", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of a ledger."""

    seq: int
    """Line number, from 1."""
    time: str
    """UTC with microseconds, `2026-01-02T03:04:05.678901Z`, as the writer's clock said."""
    kind: str
    data: Mapping[str, Any]
    """Integers, strings, booleans, null, lists and objects; no float anywhere."""
    prev: str
    hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Where a ledger ends: copied into lock and checkpoints, it makes a cut tail show."""

    lines: int
    hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A ledger's bytes, read up to the first line that is not good."""

    entries: tuple[Entry, ...]
    num_lines: int
    """Lines in the file, an unterminated last one included."""
    tail: bytes
    """What follows the last newline; empty in a healthy file."""
    tail_entry: Entry | None
    """The tail as an entry, when it lacks nothing but its newline."""
    first_bad: int | None
    reason: str

    @property
    def torn(self) -> bool:
        """True when the only fault is an unterminated last line."""
        return bool(self.tail) and self.first_bad == self.num_lines

    @property
    def head(self) -> Head:
        """Head of the good lines."""
        last = self.entries[-1].hash if self.entries else GENESIS
        return Head(lines=len(self.entries), hash=last)

    def lines_of(self, kind: str) -> tuple[int, ...]:
        """Line numbers of the good entries of one kind."""
        return tuple(entry.seq for entry in self.entries if entry.kind == kind)


def seal(*, head: Head, time: str, kind: str, data: Mapping[str, Any]) -> Entry:
    """Make the entry that follows *head*.

    Raises:
        UsageError: a kind, time or data that a ledger cannot hold.
    """
    if not _KIND.fullmatch(kind):
        raise UsageError(f"ledger kind {kind!r} is not 1-100 letters, digits, dots, '-' or '_'")
    if not _TIME.fullmatch(time):
        raise UsageError(f"ledger time {time!r} is not like 2026-01-02T03:04:05.678901Z")
    body = {
        "seq": head.lines + 1,
        "time": time,
        "kind": kind,
        "data": dict(data),
        "prev": head.hash,
    }
    digest = sha256_bytes(canonical_bytes(body))
    # Read back, so that the entry shares nothing with the caller's lists and dicts.
    return _entry(parse_canonical(canonical_bytes({**body, "hash": digest})))


def line_bytes(entry: Entry) -> bytes:
    """The line of *entry*, its newline included."""
    return canonical_bytes({name: getattr(entry, name) for name in _FIELDS}) + b"\n"


def read_chain(content: bytes) -> Chain:
    """Read a ledger's bytes, stopping at the first line that is not good."""
    *lines, tail = content.split(b"\n")
    num_lines = len(lines) + (1 if tail else 0)
    entries: list[Entry] = []
    first_bad: int | None = None
    reason = ""
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(_check_line(line, entries))
        except IntegrityError as error:
            first_bad, reason = number, f"line {number} {error}"
            break
    tail_entry = None
    if tail and first_bad is None:
        first_bad = num_lines
        try:
            tail_entry = _check_line(tail, entries)
            reason = f"line {num_lines} lacks its newline; the next append adds it"
        except IntegrityError:
            reason = (
                f"line {num_lines} is torn: {len(tail)} bytes without a newline, "
                "as a crash leaves them; the next append files them away"
            )
    return Chain(
        entries=tuple(entries),
        num_lines=num_lines,
        tail=tail,
        tail_entry=tail_entry,
        first_bad=first_bad,
        reason=reason,
    )


def check_anchor(chain: Chain, anchor: Head) -> tuple[int, str] | None:
    """First bad line and reason when a good chain does not run through *anchor*."""
    have = len(chain.entries)
    if have < anchor.lines:
        return have + 1, (
            f"the ledger ends at line {have} and its anchor at line {anchor.lines}: "
            f"{anchor.lines - have} lines were cut off its end"
        )
    there = chain.entries[anchor.lines - 1].hash if anchor.lines else GENESIS
    if there != anchor.hash:
        return anchor.lines, (
            f"line {anchor.lines} has the hash {there[:12]} and its anchor {anchor.hash[:12]}: "
            "the ledger was rewritten up to there"
        )
    return None


def _check_line(line: bytes, before: list[Entry]) -> Entry:
    """Parse one line; the error's text continues a sentence that begins with `line N`."""
    entry = _entry(parse_canonical(line))
    prev = before[-1].hash if before else GENESIS
    if entry.seq != len(before) + 1:
        raise IntegrityError(f"says it is number {entry.seq}: a line was removed, added or moved")
    if entry.prev != prev:
        raise IntegrityError(
            f"follows the hash {entry.prev[:12]} where the line before has {prev[:12]}"
        )
    body = {name: getattr(entry, name) for name in _FIELDS if name != "hash"}
    digest = sha256_bytes(canonical_bytes(body))
    if entry.hash != digest:
        raise IntegrityError(f"hashes to {digest[:12]} where it says {entry.hash[:12]}: edited")
    return entry


def _entry(value: object) -> Entry:
    if not isinstance(value, dict) or sorted(value) != _FIELDS:
        raise IntegrityError(f"is not an object with the keys {', '.join(_FIELDS)}")
    checks = {
        "seq": type(value["seq"]) is int,
        "time": isinstance(value["time"], str) and bool(_TIME.fullmatch(value["time"])),
        "kind": isinstance(value["kind"], str) and bool(_KIND.fullmatch(value["kind"])),
        "data": isinstance(value["data"], dict),
        "prev": isinstance(value["prev"], str) and bool(_SHA256.fullmatch(value["prev"])),
        "hash": isinstance(value["hash"], str) and bool(_SHA256.fullmatch(value["hash"])),
    }
    wrong = [name for name, fine in checks.items() if not fine]
    if wrong:
        raise IntegrityError(f"holds an unusable value for {', '.join(wrong)}")
    return Entry(**value)
