"""`leadline report`: one self-contained page of a run's evidence."""

from pathlib import Path
from typing import Annotated

import typer

from leadline.cli.output import JsonOption, print_json, talk


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of a gate.")],
    as_json: JsonOption = False,
) -> None:
    """Write RUN/report.html; a half-finished run gives a page that says what is missing."""
    from leadline.report import build_report

    path = build_report(run)
    if as_json:
        print_json({"report": str(path), "bytes": path.stat().st_size})
        return
    talk.print("Open it in a browser; it needs no network:")
    typer.echo(path)
