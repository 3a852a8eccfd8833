"""`leadline pack`: build a tarball with its manifest, and verify one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leadline.cli.output import JsonOption, print_json, talk
from leadline.cli.progress import byte_bar

if TYPE_CHECKING:
    from leadline.pack.build import PackResult
    from leadline.pack.report import PackReport

app = typer.Typer(
    help="Pack a folder for another machine and verify it there.", no_args_is_help=True
)


@app.command()
def build(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Folder whose files to pack.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the pack.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="N", help="Name (default: the folder's).")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another pack of that name.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Make NAME.tar and NAME.manifest.json; the same files always give the same bytes."""
    from leadline.pack.build import build_pack

    with byte_bar() as on_progress:
        result = build_pack(source, out, name, overwrite=overwrite, on_progress=on_progress)
    _warn(result)
    if json_output:
        print_json(result.document)
        return
    state = "was already there" if result.already_there else "is written"
    typer.echo(
        f"green  {result.tarball} {state}: {result.files} files, {result.tarball_bytes:,} bytes, "
        f"sha256 {result.tarball_sha256[:12]}, {result.train_tokens:,} train tokens"
    )


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="TARBALL|DIR", help="NAME.tar or a folder.")],
    unpack: Annotated[
        Path | None, typer.Option("--unpack", metavar="DIR", help="Unpack here when all is well.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Hold every byte against the manifest and run the negative control; exit 1 when red."""
    from leadline.core.errors import UsageError
    from leadline.pack.tree import verify_folder
    from leadline.pack.verify import verify_pack

    if path.is_dir() and unpack is not None:
        raise UsageError(f"{path} is a folder; --unpack goes with a tarball")
    with byte_bar() as on_progress:
        if path.is_dir():
            report = verify_folder(path, on_progress=on_progress)
        else:
            report = verify_pack(path, unpack, on_progress=on_progress)
    if json_output:
        print_json(report.document)
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(1)


def _print_report(report: "PackReport") -> None:
    for problem in report.problems:
        typer.echo(f"red    {problem}")
    control = report.negative_control
    if control is not None:
        typer.echo(f"green  planted byte flip at {control.offset} of {control.file} was found")
    if report.ok:
        typer.echo(
            f"green  {report.source}: {report.files} files, {report.bytes:,} bytes, "
            f"{report.train_tokens:,} train and {report.eval_tokens:,} eval tokens"
        )
    if report.unpacked_to is not None:
        typer.echo(f"green  unpacked to {report.unpacked_to}")


def _warn(result: "PackResult") -> None:
    for finding in result.scan.allowed:
        talk.print(f"note   .leadlineallow lets through {finding}", markup=False)
    for rule in result.scan.unused_allowances:
        talk.print(f"note   .leadlineallow: {rule!r} lets nothing through", markup=False)
    for path in result.scan.cut_short:
        talk.print(f"note   only the first 64 MiB of {path} were scanned", markup=False)
