"""`leadline gate`: measure, judge, lock."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leadline.cli.output import JsonOption, data, print_json, talk

if TYPE_CHECKING:
    from leadline.gate.runner import GateOutcome

app = typer.Typer(
    help="Measure on this machine, judge the evidence, lock a token budget.", no_args_is_help=True
)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="See docs/gate.md.")],
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="Run directory.")],
    json_output: JsonOption = False,
) -> None:
    """Run the gate, or go on where an earlier attempt stopped."""
    finish(run_and_show(config, out), json_output)


@app.command()
def show(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    json_output: JsonOption = False,
) -> None:
    """Print the evidence table; exit 3 while a line is missing or red."""
    from leadline.cli.gate_view import status_json, status_lines
    from leadline.core.errors import UsageError
    from leadline.core.gate import gate_status
    from leadline.core.lockfile import LOCK_FILE

    if not run_dir.is_dir():
        raise UsageError(f"run directory {run_dir} does not exist; `leadline gate run` makes one")
    status = gate_status(run_dir)
    lock_path = run_dir / LOCK_FILE
    if json_output:
        print_json(status_json(status, str(lock_path) if lock_path.exists() else None))
    else:
        data.print(status_lines(status))
        state = str(lock_path) if lock_path.exists() else "not written"
        data.print(f"lock: {state}", markup=False)
    if not status.green:
        raise typer.Exit(3)


def run_and_show(config: Path, out: Path) -> "GateOutcome":
    """Run the gate with its phases on stderr."""
    from leadline.cli.gate_view import GateView
    from leadline.gate.runner import run_gate

    talk.print(f"leadline gate: {config.name} -> {out}", markup=False)
    with GateView() as view:
        return run_gate(config, out, view)


def finish(
    outcome: "GateOutcome", json_output: bool, more: Mapping[str, object] | None = None
) -> None:
    """Say how it ended, and leave with the gate's exit code.

    The result goes to stdout: as JSON with *json_output*, *more* included, and then the words
    go to stderr.
    """
    from leadline.cli.gate_view import status_json

    if json_output:
        result = status_json(outcome.status, str(outcome.lock_path) if outcome.lock_path else None)
        print_json({**result, "report": str(outcome.report_path), **(more or {})})
    tell = talk if json_output else data
    tell.print(f"report: {outcome.report_path}", markup=False)
    if outcome.status.green:
        state = "already locked" if outcome.already_locked else "locked"
        tell.print(f"gate: [bold green]green[/], {state}:", end=" ")
        tell.print(str(outcome.lock_path), markup=False)
        return
    wanting = ", ".join((*outcome.status.red, *outcome.status.missing))
    tell.print(f"gate: [bold red]red[/], not locked; red or missing: {wanting}")
    raise typer.Exit(3)
