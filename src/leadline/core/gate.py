"""The verdict: which evidence lines a gate needs, and which are missing or red.

The seed's rule: missing any line means not gated. Red therefore always means a
list, each line with the value it holds or the command that would produce it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leadline.core.canonical import sha256_file
from leadline.core.evidence import Evidence, EvidenceStore
from leadline.core.lineage import LOST_LOCK, lock_record
from leadline.core.lockfile import LOCK_FILE
from leadline.core.units import format_bytes, format_count

State = Literal["green", "red", "missing"]
STARTED_KIND = "gate.started"
PROBE_PREFIX = "probe."


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """One line the gate must hold."""

    key: str
    title: str
    evidence: str
    """Name of the evidence file the line is read from."""
    value: Callable[[Mapping[str, Any]], str]
    """The line's text, from that evidence's data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One evidence line as it stands."""

    key: str
    title: str
    state: State
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GateStatus:
    """All lines of a run; green only when every one is."""

    lines: tuple[Line, ...]

    @property
    def green(self) -> bool:
        """True when no line is missing or red."""
        return all(line.state == "green" for line in self.lines)

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of the lines that nothing has produced yet."""
        return tuple(line.key for line in self.lines if line.state == "missing")

    @property
    def red(self) -> tuple[str, ...]:
        """Keys of the lines that were produced and are red."""
        return tuple(line.key for line in self.lines if line.state == "red")


def requirements(points: Sequence[str]) -> tuple[Requirement, ...]:
    """The lines of rows A2 to A9 for a sweep over *points*, in the order people read them."""
    return (
        Requirement(key="environment", title="Environment", evidence="environment", value=_device),
        Requirement(key="hash_gate", title="Hash gate", evidence="pack", value=_pack),
        Requirement(key="twin_delta", title="fp32 twin delta", evidence="twin", value=_twin),
        *(
            Requirement(
                key=f"tok_s.{point}",
                title=f"tok/s at {point}",
                evidence=f"{PROBE_PREFIX}{point}",
                value=_probe,
            )
            for point in points
        ),
        Requirement(key="best_cfg", title="Chosen configuration", evidence="choice", value=_choice),
        Requirement(
            key="peak_vram", title="Peak memory of the device", evidence="choice", value=_peak
        ),
        Requirement(key="eval_batch", title="Eval batch", evidence="choice", value=_eval),
        Requirement(
            key="checkpoint",
            title="Checkpoint cadence and disk",
            evidence="checkpoint",
            value=_checkpoint,
        ),
        Requirement(
            key="budget", title="Locked tokens and total steps", evidence="budget", value=_budget
        ),
        Requirement(
            key="disposition", title="Disposition", evidence="disposition", value=_disposition
        ),
    )


def gate_status(run_dir: Path) -> GateStatus:
    """Judge a run directory, complete or not; without a lock that the ledger holds it is not green.

    Raises:
        IntegrityError: the ledger does not verify.
    """
    store = EvidenceStore(run_dir)
    lines = judge(planned_points(store), store.read()).lines
    return GateStatus(lines=(*lines, _lock_line(run_dir)))


def _lock_line(run_dir: Path) -> Line:
    record, value, reason = lock_record(run_dir), "", ""
    state: State = "missing"
    if record == "recorded":
        state, value = "green", f"sha256 {sha256_file(run_dir / LOCK_FILE)}"
    elif record == "lost":
        state, reason = "red", LOST_LOCK
    else:
        reason = "`leadline gate run` writes it once every other line is green"
    return Line(key="lock", title="Lock", state=state, value=value, reason=reason)


def planned_points(store: EvidenceStore) -> tuple[str, ...]:
    """Names of the sweep's points, from the ledger's last `gate.started` line."""
    points: tuple[str, ...] = ("P1", "P2", "P3")
    if store.ledger.path.exists():
        for entry in store.ledger.entries():
            if entry.kind == STARTED_KIND:
                points = tuple(str(name) for name in entry.data["points"])
    return points


def judge(points: Sequence[str], found: Mapping[str, Evidence]) -> GateStatus:
    """Hold the evidence against the requirements."""
    return GateStatus(
        lines=tuple(_line(need, found.get(need.evidence)) for need in requirements(points))
    )


def _line(need: Requirement, evidence: Evidence | None) -> Line:
    if evidence is None:
        how = f"`leadline gate run` has not reached it (evidence/{need.evidence}.json)"
        return Line(key=need.key, title=need.title, state="missing", value="", reason=how)
    state: State = "green" if evidence.green else "red"
    reason = evidence.reason
    try:
        value = need.value(evidence.data)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # A phase that failed early holds its reason and little else; a green one may not.
        value = ""
        if evidence.green:
            state = "red"
            reason = (
                f"evidence/{need.evidence}.json holds a value this version cannot read "
                f"({type(error).__name__}: {error}); run the gate again with this version"
            )
    return Line(key=need.key, title=need.title, state=state, value=value, reason=reason)


def _device(data: Mapping[str, Any]) -> str:
    device = data["device"]
    pinned = data.get("requirements")
    packages = "not held against a requirements file" if pinned is None else f"held to {pinned}"
    return (
        f"{device['name']}, torch {data['torch']}, bf16 {data['bf16']['why']}; packages: {packages}"
    )


def _pack(data: Mapping[str, Any]) -> str:
    control = data["negative_control"]
    return (
        f"{format_count(data['train_tokens'])} train tokens in {data['files']} files; "
        f"planted byte flip in {control['file']} {'found' if control['found'] else 'NOT found'}"
    )


def _twin(data: Mapping[str, Any]) -> str:
    delta = f"{data['worst_delta']:.4f} at step {data['worst_step']}, limit {data['tolerance']}"
    if "peak_learning_rate" not in data:
        return delta
    # Lanes that never left the warm-up have not been seen to stay together at the run's rate.
    last, peak = data["last_learning_rate"], data["peak_learning_rate"]
    return f"{delta}; learning rate up to {last:.3g} of {peak:.3g}"


def _probe(data: Mapping[str, Any]) -> str:
    shape = f"{data['micro_batch']}x{data['seq_len']}"
    if data["status"] == "oom":
        return f"{shape}: out of memory in {data['failed_phase']}, not chosen"
    rate = f"{shape}: {format_count(round(data['tok_s']))} tok/s"
    if data["status"] == "ok":
        return rate
    # A rate that may not be used must not read like one that may; the evidence has every reason.
    return f"{rate}, not chosen: {data['why'].partition('; ')[0]}"


def _choice(data: Mapping[str, Any]) -> str:
    chosen = f"{data['best_cfg']} ({data['micro_batch']}x{data['seq_len']})"
    faster = [f"{name} was faster, {why}" for name, why in data.get("faster", {}).items()]
    return "; ".join((chosen, *faster))


def _peak(data: Mapping[str, Any]) -> str:
    memory = data["memory"]
    return (
        f"{format_bytes(memory['device_peak_bytes'])} of "
        f"{format_bytes(memory['device_total_bytes'])} ({memory['percent']} %)"
    )


def _eval(data: Mapping[str, Any]) -> str:
    return f"{data['eval']['batch']} >= {data['micro_batch']}, {data['eval']['batches']} batches"


def _checkpoint(data: Mapping[str, Any]) -> str:
    return (
        f"every {data['cadence_steps']} steps, {format_bytes(data['measured_bytes'])}, "
        f"{format_bytes(data['free_bytes'])} free, {format_bytes(data['needed_bytes'])} needed"
    )


def _budget(data: Mapping[str, Any]) -> str:
    tokens = format_count(data["locked_budget_tokens"])
    return f"{tokens} tokens, {format_count(data['total_steps'])} steps"


def _disposition(data: Mapping[str, Any]) -> str:
    return f"{data['decision']} ({data['provider']}) at {data['time']}"
