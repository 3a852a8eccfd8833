"""What is done with a tap on the disk: `leadline tap verify`, `export` and `merge`."""

from pathlib import Path
from typing import Annotated

import typer

from leadline.cli.output import JsonOption, print_json, talk
from leadline.cli.progress import byte_bar

TapArgument = Annotated[Path, typer.Argument(metavar="TAP", help="Folder made by tap record.")]


def verify(
    tap: TapArgument,
    partial: Annotated[
        bool, typer.Option("--partial", help="Take a tap that is not complete as it is.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Read every byte of a tap and hold it against what was sealed; exit 1 when red."""
    from leadline.tap.verify import verify_tap

    with byte_bar() as on_progress:
        report = verify_tap(
            tap,
            allow_partial=partial,
            on_progress=lambda done, total: on_progress("verify", done, total),
        )
    if json_output:
        print_json(report.document)
    else:
        for problem in report.problems:
            typer.echo(f"red    {problem}")
        if report.ok:
            typer.echo(
                f"green  {tap}: {report.layers} layers, {report.grams:,} Grams of "
                f"{report.tokens:,} tokens, {report.num_bytes:,} bytes"
            )
    if not report.ok:
        raise typer.Exit(1)


def export(
    tap: TapArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to make.")],
    layout: Annotated[
        str, typer.Option("--format", metavar="radgram2", help="Layout of the files.")
    ] = "radgram2",
    rank: Annotated[int, typer.Option(help="Rank in the names and headers.")] = 0,
    domain: Annotated[int, typer.Option(help="Domain in the headers.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Write a tap's Grams as files of another program."""
    from leadline.core.errors import UsageError
    from leadline.tap.export import export_radgram2

    if layout != "radgram2":
        raise UsageError(f"--format {layout} is unknown; known: radgram2")
    with byte_bar() as on_progress:
        result = export_radgram2(
            tap,
            out,
            rank=rank,
            domain=domain,
            on_progress=lambda done, total: on_progress("export", done, total),
        )
    for target in result.left_out:
        talk.print(f"note   {target} has no name in {layout} and was left out", markup=False)
    if json_output:
        print_json(result.document)
    else:
        typer.echo(f"green  {out}: {result.files:,} files, {result.num_bytes:,} bytes")


def merge(
    taps: Annotated[list[Path], typer.Argument(metavar="TAP...", help="Two or more taps.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the merged tap.")],
    json_output: JsonOption = False,
) -> None:
    """Add taps of one model: other corpora are summed, other experts or layers are joined."""
    from leadline.tap.merge import merge_taps

    with byte_bar() as on_progress:
        result = merge_taps(
            taps, out, on_progress=lambda done, total: on_progress("merge", done, total)
        )
    if json_output:
        print_json(result.document)
    else:
        typer.echo(
            f"green  {out}: {result.taps} taps, {result.layers} layers, "
            f"{result.documents:,} documents, {result.tokens:,} tokens"
        )
