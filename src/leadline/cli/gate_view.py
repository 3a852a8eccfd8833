"""What a gate looks like in a terminal: one line a phase, a bar for the one at work."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from leadline.cli.output import talk
from leadline.core.evidence import Evidence
from leadline.core.gate import GateStatus, requirements
from leadline.gate.runner import GateEvents
from leadline.probe.progress import Progress as ProbeProgress

_STATE_STYLES: Mapping[str, str] = {"green": "green", "red": "bold red", "missing": "yellow"}


class GateView(GateEvents):
    """Prints phases as they end and shows the progress of the one at work."""

    def __init__(self) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[step]}"),
            TimeElapsedColumn(),
            console=talk,
            transient=True,
            disable=not talk.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, step="", visible=False)
        self._title = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def phase_started(self, title: str) -> None:
        """Show the phase as being at work."""
        self._title = title
        self._bar.reset(self._task, description=title, total=None, step="", visible=True)

    def progress(self, progress: ProbeProgress) -> None:
        """Move the bar."""
        step = f"{progress.phase}"
        if progress.total:
            step = f"{progress.phase} {progress.done}/{progress.total}"
        elif progress.done:
            step = f"{progress.phase} {progress.done}"
        self._bar.update(self._task, completed=progress.done, total=progress.total, step=step)

    def ledger_mended(self, line: int) -> None:
        """Say which line a crash had torn."""
        talk.print(f"  [yellow]mended[/]  ledger line {line} was torn by a crash and filed away")

    def phase_ended(self, phase: str, title: str, evidence: Evidence, reused: bool) -> None:
        """Print the phase's line, and for the budget its arithmetic before the lock is written."""
        self._bar.update(self._task, visible=False)
        mark = "[green]green[/]" if evidence.green else "[bold red]red  [/]"
        tail = " [dim](evidence of an earlier attempt)[/]" if reused else ""
        talk.print(f"  {mark}  {title:24}  {_told(phase, evidence)}{tail}")
        if phase == "budget" and evidence.green:
            talk.print(arithmetic_lines(evidence.data["arithmetic"]))


def status_lines(status: GateStatus) -> str:
    """The evidence table: every line with its state, and why where it is not green."""
    width = max(len(line.title) for line in status.lines)
    told = []
    for line in status.lines:
        parts = (line.value,) if line.state == "green" else (line.value, line.reason)
        text = "; ".join(part for part in parts if part)
        style = _STATE_STYLES[line.state]
        told.append(f"[{style}]{line.state:7}[/]  {line.title:{width}}  {escape(text)}")
    return "\n".join(told)


def arithmetic_lines(lines: list[Mapping[str, Any]]) -> str:
    """The budget, step by step, one line each."""
    width = max(len(line["name"]) for line in lines)
    told = [
        f"         {line['name']:{width}}  "
        + " = ".join((line["formula"], line["numbers"], line["result"]))
        for line in lines
    ]
    return escape("\n".join(told))


def status_json(status: GateStatus, lock_path: str | None) -> dict[str, Any]:
    """The result of `gate run` and `gate show`."""
    return {
        "green": status.green,
        "missing": [*status.missing],
        "red": [*status.red],
        "evidence": {
            line.key: {"state": line.state, "value": line.value, "reason": line.reason}
            for line in status.lines
        },
        "lock_path": lock_path,
    }


def _told(phase: str, evidence: Evidence) -> str:
    for need in requirements([phase.partition(".")[2]] if "." in phase else []):
        if need.evidence == phase:
            try:
                value = need.value(evidence.data)
            except (KeyError, TypeError):
                break  # a phase that failed early holds its reason and little else
            # A green line says in its value what there is to say.
            reason = "" if evidence.green else evidence.reason
            return escape("; ".join(part for part in (value, reason) if part))
    return escape(evidence.reason)
