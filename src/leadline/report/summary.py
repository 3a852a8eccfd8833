"""The top of the page: the verdict, the figures people came for, the evidence table."""

from dataclasses import dataclass
from typing import Literal

from leadline.core.gate import PROBE_PREFIX, Line
from leadline.report import numerals
from leadline.report.record import RunRecord

Tone = Literal["green", "red", "open"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryView:
    """Verdict, headline and key figures."""

    title: str
    workload: str
    device: str
    first_time: str
    last_time: str
    tone: Tone
    verdict: str
    sentence: str
    faults: tuple[tuple[str, str], ...]
    """What stands between this run and green: title and reason."""
    tiles: tuple[tuple[str, str, str], ...]
    """Label, value, remark."""
    lines: tuple[Line, ...]
    unvouched: tuple[str, ...]


def summary_view(record: RunRecord) -> SummaryView:
    """Judge the run as a reader should see it: evidence, ledger and lock together."""
    faults = _faults(record)
    tone, verdict = _verdict(record, faults)
    times = [entry.time for entry in record.ledger.entries]
    return SummaryView(
        title=record.name,
        workload=_workload(record),
        device=record.data("environment").text("device", "name"),
        first_time=times[0] if times else "",
        last_time=times[-1] if times else "",
        tone=tone,
        verdict=verdict,
        sentence=_sentence(record, tone),
        faults=tuple(faults),
        tiles=_tiles(record),
        lines=record.status.lines,
        unvouched=record.unvouched,
    )


def _faults(record: RunRecord) -> list[tuple[str, str]]:
    faults = []
    if not record.ledger.ok:
        faults.append(("Ledger", record.ledger.reason))
    if record.lock.problem:
        faults.append(("Lock", record.lock.problem))
    faults += [(line.title, line.reason) for line in record.status.lines if line.state == "red"]
    return faults


def _verdict(record: RunRecord, faults: list[tuple[str, str]]) -> tuple[Tone, str]:
    num_lines, num_missing = len(record.status.lines), len(record.status.missing)
    if faults:
        return "red", "Gate red"
    if num_missing:
        return "red", f"Gate red: {num_missing} of {num_lines} lines missing"
    if not record.lock.present:
        return "open", "Evidence complete, not locked yet"
    return "green", "Gate green"


def _sentence(record: RunRecord, tone: Tone) -> str:
    budget = record.data("budget")
    if tone == "green":
        shape = f"{budget.text('micro_batch')} {numerals.TIMES} {budget.text('seq_len')}"
        return (
            f"{numerals.count(budget.number('locked_budget_tokens'))} tokens are locked: "
            f"{numerals.count(budget.number('total_steps'))} steps of "
            f"{record.data('choice').text('best_cfg')} ({shape})."
        )
    if tone == "open":
        return "Every line is green; run `leadline gate run` once more to write the lock."
    if record.status.missing and not record.status.red and record.ledger.ok:
        return "Nothing measured so far is red; `leadline gate run` continues from what is here."
    return "Do not start the expensive run. What stands in the way:"


def _workload(record: RunRecord) -> str:
    """Name and size of the model, as far as configuration and probes tell."""
    table = record.config.at("workload")
    name = table.text("name") or " ".join(
        word for word in (table.text("kind"), table.text("preset")) if word
    )
    counted = (
        record.data(f"{PROBE_PREFIX}{point}").number("parameters") for point in record.points
    )
    parameters = next((count for count in counted if count is not None), None)
    if parameters is None:
        return name
    return f"{name}, {numerals.short_count(parameters)} parameters".removeprefix(", ")


def _tiles(record: RunRecord) -> tuple[tuple[str, str, str], ...]:
    budget, choice, twin = record.data("budget"), record.data("choice"), record.data("twin")
    best = choice.text("best_cfg")
    chosen = record.data(f"{PROBE_PREFIX}{best}")
    tok_s = budget.number("tok_s")
    hours = budget.text("window_hours")
    return (
        (
            "Locked tokens" if record.lock.present else "Token budget",
            numerals.count(budget.number("locked_budget_tokens")),
            f"{hours} h window" if hours else "",
        ),
        (
            "Steps",
            numerals.count(budget.number("total_steps")),
            f"limited by {budget.text('limited_by')}" if budget.text("limited_by") else "",
        ),
        (
            "Throughput",
            numerals.rate(tok_s if tok_s is not None else choice.number("tok_s")),
            f"tok/s at {best}" if best else "tok/s",
        ),
        (
            "Twin distance",
            numerals.decimal(twin.number("worst_delta")),
            f"limit {numerals.decimal(twin.number('tolerance'), 2)}",
        ),
        (
            "Peak memory",
            numerals.percent(chosen.number("memory", "percent")),
            f"{numerals.size(chosen.number('memory', 'device_peak_bytes'))} of "
            f"{numerals.size(chosen.number('memory', 'device_total_bytes'))}",
        ),
    )
