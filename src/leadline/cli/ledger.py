"""`leadline ledger`: read and verify a hash-chained ledger."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from leadline.cli.output import JsonOption, print_json

app = typer.Typer(help="Read and verify a hash-chained ledger.", no_args_is_help=True)

PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="Ledger file, or a run directory that holds one.")
]
_SHOWN_DATA_CHARACTERS = 200


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
        _print_table(entries)


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


def _print_table(entries: list[dict[str, object]]) -> None:
    import json

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("seq", justify="right")
    for name in ("time", "kind", "data", "hash"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        data = json.dumps(entry["data"], ensure_ascii=False, sort_keys=True)
        if len(data) > _SHOWN_DATA_CHARACTERS:
            data = data[:_SHOWN_DATA_CHARACTERS] + "..."
        cells = (entry["seq"], entry["time"], entry["kind"], data, str(entry["hash"])[:12])
        table.add_row(*(escape(str(cell)) for cell in cells))
    Console(highlight=False).print(table)
