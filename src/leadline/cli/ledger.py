"""`leadline ledger`: read and verify a hash-chained ledger."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from leadline.cli.output import JsonOption, print_json

app = typer.Typer(help="Read and verify a hash-chained ledger.", no_args_is_help=True)

PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="Ledger file, or a run directory that holds one.")
]
_SECONDS_CHARACTERS = 19  # of 2026-01-02T03:04:05.678901Z


@app.command()
def show(
    path: PathArgument,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="K", help="Only entries of this kind.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Print the entries of a ledger that verifies."""
    from leadline.core.ledger import Ledger
    from leadline.core.lineage import ledger_path

    entries = [
        asdict(entry)
        for entry in Ledger(ledger_path(path)).entries()
        if kind is None or entry.kind == kind
    ]
    if json_output:
        print_json(entries)
    else:
        _print_lines(entries)


@app.command()
def verify(path: PathArgument, json_output: JsonOption = False) -> None:
    """Check every line, and the lock's anchor in a run directory; exit 1 when not ok."""
    from leadline.core.lineage import verify_lineage

    check = verify_lineage(path)
    if json_output:
        print_json(asdict(check))
    elif check.ok:
        typer.echo(f"green  {path}: {check.lines} lines, head {check.head.hash[:12]}")
    else:
        typer.echo(f"red    {path}: {check.reason}")
    if not json_output:
        for line in check.repairs:
            typer.echo(f"note   line {line} files away a line that a crash tore")
        for line in check.clock_backwards:
            typer.echo(f"note   line {line} tells that the clock went backwards")
    if not check.ok:
        raise typer.Exit(1)


def _print_lines(entries: list[dict[str, Any]]) -> None:
    """One line an entry; cut to the terminal's width, whole where the output goes elsewhere."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    kinds = max((len(entry["kind"]) for entry in entries), default=0)
    for entry in entries:
        time = entry["time"][:_SECONDS_CHARACTERS]
        line = f"{entry['seq']:>4}  {time}  {entry['kind']:{kinds}}  {entry['hash'][:12]}  "
        typer.echo((line + _told(entry["data"]))[:width])


def _told(data: Mapping[str, Any]) -> str:
    """The data on one line, what a reader looks for first; --json has all of it."""
    first = [str(data[key]) for key in ("name", "verdict") if key in data]
    rest = [
        f"{key} {value if not isinstance(value, (list, dict)) else json.dumps(value)}"
        for key, value in sorted(data.items(), key=lambda item: "sha256" in item[0])
        if key not in ("name", "verdict", "inputs") and value != ""
    ]
    return ", ".join([" ".join(first), *rest] if first else rest)
