"""Where the figures come from: machine, pack, lock, disposition, ledger."""

import json
from dataclasses import dataclass

from leadline.core.chain import Entry
from leadline.report import numerals
from leadline.report.facts import Facts
from leadline.report.record import LockRecord, RunRecord

Figure = tuple[str, str, str]
"""Label, value, remark."""

MAX_LEDGER_ROWS = 200
_SHORT_DATA_CHARS = 150
_FULL_DATA_CHARS = 2000
_HASH_CHARS = 12
_FIRST_KEYS = ("name", "verdict", "reason")


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRow:
    """One ledger line."""

    seq: int
    time: str
    kind: str
    data: str
    full_data: str
    hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerView:
    """The chain and whether it holds."""

    present: bool
    ok: bool
    reason: str
    num_lines: int
    head: str
    repairs: tuple[int, ...]
    rows: tuple[LedgerRow, ...]
    num_left_out: int


def environment_figures(data: Facts) -> tuple[Figure, ...]:
    """Read the evidence `environment`."""
    device, cpu, kernel = data.at("device"), data.at("cpu"), data.at("attention_kernel")
    cores = f"{numerals.count(cpu.number('cores'))} cores"
    return (
        (
            "Device",
            device.text("name"),
            _joined(device.text("kind"), _named("capability", device.text("capability"))),
        ),
        (
            "Device memory",
            numerals.size(device.number("memory_bytes")),
            _named("devices:", device.text("count")),
        ),
        ("Driver", device.text("driver"), _named("MIG", device.text("mig"))),
        (
            "torch",
            data.text("torch"),
            _joined(_named("CUDA", data.text("cuda")), _listed(device, "arch_list")),
        ),
        (
            "bf16",
            _either(data.flag("bf16", "legal"), "legal", "not legal"),
            data.text("bf16", "why"),
        ),
        (
            "Attention kernel",
            _either(kernel.flag("ran"), "ran", "did not run"),
            kernel.text("name"),
        ),
        ("Python", data.text("python"), ""),
        (
            "Processor",
            cpu.text("name"),
            _joined(cores, numerals.size(cpu.number("memory_bytes"))),
        ),
        ("Other processes on the device", _other_processes(data), ""),
        ("Unpinned packages", _unpinned(data), ""),
        ("Code sha256", data.text("code_sha256"), ""),
        ("Packages sha256", data.text("distributions_sha256"), ""),
        ("Fingerprint", data.text("fingerprint"), ""),
    )


def distributions(data: Facts) -> tuple[tuple[str, str], ...]:
    """Installed packages and their versions."""
    return tuple((name, version.text()) for name, version in data.pairs("distributions"))


def pack_figures(data: Facts) -> tuple[Figure, ...]:
    """Read the evidence `pack`."""
    control = data.at("negative_control")
    found = _either(control.flag("found"), "found", "NOT found")
    offset = control.text("offset")
    place = f"byte {offset} flipped in a copy" if offset else ""
    return (
        ("Files", numerals.count(data.number("files")), numerals.size(data.number("bytes"))),
        ("Train tokens", numerals.count(data.number("train_tokens")), "counted from the shards"),
        ("Eval tokens", numerals.count(data.number("eval_tokens")), "held out"),
        ("Vocabulary", numerals.count(data.number("vocab_size")), data.text("dtype")),
        (
            "Left out of the text",
            ", ".join(f"{count.text()} {why}" for why, count in data.pairs("skipped")) or "nothing",
            "by reason",
        ),
        (
            "Planted byte flip",
            found,
            "; ".join(word for word in (place, control.text("said")) if word),
        ),
        ("Secrets found", numerals.count(data.number("secrets_found")), ""),
        (
            "Free disk",
            numerals.size(data.number("free_bytes")),
            f"needed {numerals.size(data.number('needed_bytes'))}",
        ),
        ("Manifest sha256", data.text("manifest_sha256"), ""),
        ("Tarball sha256", data.text("tarball_sha256"), ""),
    )


def disposition_figures(data: Facts) -> tuple[Figure, ...]:
    """Read the evidence `disposition`."""
    return (
        ("Decision", data.text("decision"), data.text("why")),
        ("Provider", data.text("provider"), ""),
        ("Time", data.text("time"), ""),
    )


def lock_figures(lock: LockRecord) -> tuple[Figure, ...]:
    """The lock's scalars, its own sha256 first."""
    figures = [("sha256", lock.sha256, "" if lock.problem else "recorded in the ledger")]
    figures += [(name, value.text(), "") for name, value in lock.content.pairs() if value.text()]
    return tuple(figures)


def ledger_view(record: RunRecord) -> LedgerView:
    """The newest lines of the ledger, oldest first."""
    ledger = record.ledger
    shown = ledger.entries[-MAX_LEDGER_ROWS:]
    return LedgerView(
        present=ledger.present,
        ok=ledger.ok,
        reason=ledger.reason,
        num_lines=ledger.num_lines,
        head=ledger.head,
        repairs=ledger.repairs,
        rows=tuple(_row(entry) for entry in shown),
        num_left_out=len(ledger.entries) - len(shown),
    )


def _row(entry: Entry) -> LedgerRow:
    full = json.dumps(entry.data, ensure_ascii=False, sort_keys=True)[:_FULL_DATA_CHARS]
    words = []
    for key in sorted(entry.data, key=lambda key: (key not in _FIRST_KEYS, key)):
        value = entry.data[key]
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        is_digest = len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
        if text:
            words.append(f"{key}={text[:_HASH_CHARS]}..." if is_digest else f"{key}={text}")
    short = "  ".join(words)
    if len(short) > _SHORT_DATA_CHARS:
        short = short[: _SHORT_DATA_CHARS - 3] + "..."
    return LedgerRow(
        seq=entry.seq,
        time=entry.time.replace("T", " ")[:19],
        kind=entry.kind,
        data=short,
        full_data=full,
        hash=entry.hash[:_HASH_CHARS],
    )


def _other_processes(data: Facts) -> str:
    if not isinstance(data.at("other_processes").value, list):
        return ""
    words = [
        f"{item.text('name') or 'process'} {item.text('pid')} "
        f"({numerals.size(item.number('bytes'))})"
        for item in data.items("other_processes")
    ]
    return ", ".join(words) or "none"


def _either(flag: bool | None, yes: str, no: str) -> str:
    return "" if flag is None else yes if flag else no


def _unpinned(data: Facts) -> str:
    known = isinstance(data.at("unpinned").value, list)
    return (_listed(data, "unpinned") or "none") if known else ""


def _listed(data: Facts, key: str) -> str:
    return ", ".join(item.text() for item in data.items(key) if item.text())


def _named(name: str, value: str) -> str:
    return f"{name} {value}" if value else ""


def _joined(*words: str) -> str:
    return ", ".join(word for word in words if word)
