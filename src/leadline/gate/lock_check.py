"""Holding a run against its lock: everything that differs is told at once.

Checked: the lock's form, the ledger's chain with the lock's anchor, the ledger line that
holds the lock's hash, every piece of evidence, each value of the lock against the evidence
and configuration it was read from, the verdict, the arithmetic, the data's manifest, the
workload's files and the code. One finding never hides another.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from leadline._version import __version__
from leadline.core.budget import BudgetInputs, compute_budget
from leadline.core.canonical import sha256_file
from leadline.core.errors import DataError, IntegrityError, LeadlineError, UsageError
from leadline.core.evidence import Evidence, EvidenceStore
from leadline.core.gate import judge, planned_points
from leadline.core.ledger import verify_ledger
from leadline.core.lineage import lock_record
from leadline.core.lockfile import WRITTEN_KIND, ConfigLock, read_lock
from leadline.core.source import source_sha256
from leadline.data import check_shards, load_manifest
from leadline.data.verify import OnChecked
from leadline.gate.config import load_config
from leadline.gate.lock_payload import LOCK_VALUES, LockSources, needed_evidence, started_line
from leadline.gate.workload_files import workload_problems

_CheckShards = Callable[[Path], list[str]]
_BUDGET_KEYS = ("window_hours", "reserve_hours", "utilisation", "data_tokens")
_OWN_KEYS = ("created", "ledger_head", "ledger_lines")
_CONFIG_FILE = "gate.toml"


def lock_problems(
    run_dir: Path, *, deep: bool = False, on_progress: OnChecked | None = None
) -> list[str]:
    """Everything in which a run differs from its lock; empty when all holds.

    With *deep* every token shard is read and hashed too, and *on_progress* told how far that is.

    Raises:
        LockError: there is no lock to check, or it does not read.
    """
    lock = read_lock(run_dir)
    check = partial(check_shards, on_progress=on_progress) if deep else None
    return [
        *_record_problems(run_dir, lock, check),
        *_arithmetic_problems(lock),
        *workload_problems(_table(lock, "workload_files")),
        *_config_problems(run_dir, lock),
        *_code_problems(lock),
    ]


def _record_problems(
    run_dir: Path, lock: ConfigLock, check_all: _CheckShards | None
) -> Iterator[str]:
    """Ledger, evidence and what only evidence leads to."""
    store = EvidenceStore(run_dir)
    try:
        check = verify_ledger(store.ledger.path, anchor=lock.anchor)
        whole = check.ok or verify_ledger(store.ledger.path).ok
    except IntegrityError as error:
        yield f"ledger: {error}"
        return
    if not check.ok:
        yield f"ledger: {check.reason}"
    if not whole:
        return  # a broken chain vouches for nothing
    if lock_record(run_dir) != "recorded":
        yield "ledger: no line holds this lock's sha256; the lock or the ledger's end was changed"
    entries = store.ledger.entries()
    written = [entry for entry in entries if entry.kind == WRITTEN_KIND]
    if len(written) > 1:
        yield f"ledger: {len(written)} locks were written here, 1 is wanted"
    found = store.read()
    yield from _evidence_problems(lock, found)
    yield from _value_problems(run_dir, lock, started_line(entries[: lock.anchor.lines]), found)
    status = judge(planned_points(store), found)
    if not status.green:
        yield f"gate: red or missing {', '.join((*status.missing, *status.red))}"
    yield from _data_problems(run_dir, lock, found, check_all)


def _evidence_problems(lock: ConfigLock, found: Mapping[str, Evidence]) -> Iterator[str]:
    locked = _table(lock, "evidence")
    if not locked:
        yield "evidence: the lock names none"
    for name, sha256 in locked.items():
        evidence = found.get(name)
        if evidence is None:
            yield f"evidence: {name} is not in the ledger"
        elif evidence.sha256 != sha256:
            reason = evidence.reason or "it was recorded again after the lock"
            yield f"evidence: {name} is not what was locked: {reason}"


def _value_problems(
    run_dir: Path, lock: ConfigLock, started: Mapping[str, Any], found: Mapping[str, Evidence]
) -> Iterator[str]:
    """Every key of the lock against what its source says, whatever hash the lock has now."""
    try:
        config, _ = load_config(run_dir / _CONFIG_FILE)
    except UsageError as error:
        yield f"configuration: {error}"
        return
    sources = LockSources(config=config, started=started, found=needed_evidence(config, found))
    for key, read in LOCK_VALUES.items():
        try:
            value = read(sources)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if all(item.sha256 for item in sources.found.values()):
                yield f"lock: {key} has no source any more ({type(error).__name__}: {error})"
            continue  # evidence that cannot be used has been told
        if lock.payload.get(key) != value:
            yield f"lock: {key} is {lock.payload.get(key)!r}, what was measured gives {value!r}"
    for key in sorted(lock.payload.keys() - {*LOCK_VALUES, *_OWN_KEYS}):
        yield f"lock: {key} is a key that no gate writes"


def _arithmetic_problems(lock: ConfigLock) -> list[str]:
    payload, inputs = lock.payload, _table(lock, "budget")
    absent = [key for key in _BUDGET_KEYS if key not in inputs]
    if absent:
        return [f"arithmetic: budget.{key} is missing from the lock" for key in absent]
    try:
        budget = compute_budget(
            BudgetInputs(
                tok_s=payload["tok_s"],
                window_hours=inputs["window_hours"],
                reserve_hours=inputs["reserve_hours"],
                utilisation=inputs["utilisation"],
                micro_batch=payload["micro_batch"],
                seq_len=payload["seq_len"],
                data_tokens=inputs["data_tokens"],
            )
        )
    except LeadlineError as error:
        return [f"arithmetic: {error}"]
    wanted = {
        "locked_budget_tokens": budget.locked_budget_tokens,
        "total_steps": budget.total_steps,
        "tokens_in_steps": budget.tokens_in_steps,
    }
    return [
        f"arithmetic: {key} is {payload[key]}, its inputs give {value}"
        for key, value in wanted.items()
        if payload[key] != value
    ]


def _data_problems(
    run_dir: Path, lock: ConfigLock, found: Mapping[str, Evidence], check_all: _CheckShards | None
) -> list[str]:
    pack = found.get("pack")
    if pack is None or "shards_dir" not in pack.data:
        return []  # told by _evidence_problems
    root = run_dir / pack.data["shards_dir"]  # relative where it lies inside the run
    try:
        manifest = load_manifest(root)
    except DataError as error:
        return [f"data: {error}"]
    if manifest.sha256 != lock.payload["manifest_sha256"]:
        return [f"data: the manifest at {root} is not the one that was locked"]
    return [f"data: {problem}" for problem in check_all(root)] if check_all else []


def _config_problems(run_dir: Path, lock: ConfigLock) -> list[str]:
    path = run_dir / _CONFIG_FILE
    if not path.is_file():
        return [f"configuration: {_CONFIG_FILE} is gone"]
    if sha256_file(path) != lock.payload.get("config_sha256"):
        return [f"configuration: {_CONFIG_FILE} is not what was locked"]
    return []


def _code_problems(lock: ConfigLock) -> list[str]:
    if source_sha256() == lock.payload["code_sha256"]:
        return []
    return [
        f"code: leadline's source is not what was locked (leadline {__version__} now, "
        f"{lock.payload.get('leadline')} then); run the version that locked, or a new gate"
    ]


def _table(lock: ConfigLock, key: str) -> Mapping[str, Any]:
    """A table of the lock; empty where an edit made it something else."""
    value = lock.payload.get(key)
    return value if isinstance(value, Mapping) else {}
