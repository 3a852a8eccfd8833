"""`leadline data`: text to token shards, and shards against their manifest."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leadline.cli.output import JsonOption, print_json, talk

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from leadline.data.manifest import ShardsManifest
    from leadline.data.scan import PackProgress

app = typer.Typer(help="Turn text into token shards and check them.", no_args_is_help=True)


def _bar() -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:16}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal)


def _result(manifest: "ShardsManifest", out: Path, *, already_there: bool) -> dict[str, Any]:
    return {
        "out": str(out),
        "already_there": already_there,
        "manifest_sha256": manifest.sha256,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "train_tokens": manifest.train.tokens,
        "eval_tokens": manifest.eval.tokens,
        "documents": manifest.source.files,
        "source_bytes": manifest.source.bytes,
        "skipped": dict(manifest.source.skipped),
    }


def _summary(result: dict[str, Any]) -> str:
    skipped = ", ".join(f"{count} {reason}" for reason, count in result["skipped"].items())
    return (
        f"{result['out']}{' was already there' if result['already_there'] else ''}: "
        f"{result['train_tokens']:,} train and {result['eval_tokens']:,} eval tokens "
        f"({result['dtype']}, vocabulary {result['vocab_size']:,}) from "
        f"{result['documents']:,} documents; skipped: {skipped or 'nothing'}"
    )


@app.command()
def pack(
    text: Annotated[
        str, typer.Argument(metavar="TEXT_DIR|stdlib", help="Folder of text, or .jsonl file.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="SHARDS", help="Folder to make.")],
    tokenizer: Annotated[str, typer.Option(help="bpe, bytes or a tokenizer.json.")] = "bpe",
    vocab_size: Annotated[int | None, typer.Option(help="Ids of the BPE to train (8192).")] = None,
    end_of_text: Annotated[
        str | None, typer.Option(help="Token of a given tokenizer that closes a document.")
    ] = None,
    eval_fraction: Annotated[str, typer.Option(help="Share of documents held out.")] = "0.02",
    seed: Annotated[int, typer.Option(help="Decides which documents are held out.")] = 0,
    max_bytes: Annotated[
        int | None, typer.Option(help="Take whole documents up to this many bytes.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Tokenize a tree of text into shards with a manifest and a held-out split."""
    from leadline.data.prepare import pack_text

    with _bar() as bar:
        tasks: dict[str, TaskID] = {}

        def show(progress: "PackProgress") -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bar.add_task(progress.stage, total=progress.total_bytes)
            bar.update(tasks[progress.stage], completed=progress.done_bytes)

        manifest = pack_text(
            text,
            out,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            end_of_text=end_of_text,
            seed=seed,
            eval_fraction=eval_fraction,
            max_bytes=max_bytes,
            on_progress=show,
        )
    result = _result(manifest, out, already_there="encode" not in tasks)
    if json_output:
        print_json(result)
    else:
        typer.echo(_summary(result))


@app.command()
def verify(
    shards: Annotated[Path, typer.Argument(metavar="SHARDS", help="Folder made by data pack.")],
    json_output: JsonOption = False,
) -> None:
    """Read every byte of the shards and hold it against the manifest."""
    from leadline.data.verify import check_shards

    with _bar() as bar:
        task = bar.add_task("check")
        problems = check_shards(
            shards, on_progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if json_output:
        print_json({"ok": not problems, "problems": problems})
    else:
        for problem in problems:
            typer.echo(f"red    {problem}")
        if not problems:
            typer.echo(f"green  {shards} holds exactly what its manifest lists")
    if problems:
        raise typer.Exit(1)
