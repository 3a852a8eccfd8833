"""`leadline tap record`: a checkpoint and a corpus in, sealed Grams out."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leadline.cli.output import JsonOption, data, print_json, talk
from leadline.core.errors import LeadlineError
from leadline.core.units import format_bytes

if TYPE_CHECKING:
    from leadline.tap.progress import TapProgress


def record(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a BF16 Hugging Face checkpoint.")],
    corpus: Annotated[Path, typer.Option(help="JSONL, text folder, .npy or token shards.")],
    out: Annotated[Path, typer.Option(help="Folder of the Grams; an unfinished tap goes on.")],
    schedule: Annotated[str, typer.Option(help="wave | step")] = "wave",
    dtype: Annotated[str, typer.Option(help="bfloat16 | float32")] = "bfloat16",
    targets: Annotated[str, typer.Option(help="experts | linear | all | none")] = "experts",
    gate_up_gram: Annotated[str, typer.Option(help="pooled | expert")] = "pooled",
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N")] = "auto",
    vram_mib: Annotated[int | None, typer.Option(help="Device budget.")] = None,
    host_pool_mib: Annotated[int | None, typer.Option(help="Pinned host memory.")] = None,
    ngram_placement: Annotated[str, typer.Option(help="Gather tables: disk | ram")] = "disk",
    micro_batch_tokens: Annotated[int | None, typer.Option(help="Tokens computed at once.")] = None,
    max_document_tokens: Annotated[int | None, typer.Option(help="Cut longer documents.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Step width.")] = 8_192,
    max_num_seqs: Annotated[int, typer.Option(help="Documents in a step.")] = 16,
    kv_tokens: Annotated[int | None, typer.Option(help="KV pool of a step schedule.")] = None,
    threads: Annotated[int, typer.Option(help="Reading threads.")] = 8,
    text_field: Annotated[str | None, typer.Option(help="JSONL field to read.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 3 when anything was not done the ordinary way.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tap a checkpoint larger than memory: stream its layers, accumulate, seal."""
    # Before torch starts: blocks that grow in place keep a budget that is nearly full usable.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from leadline.tap.options import RecordOptions
    from leadline.tap.record import record as run

    options = RecordOptions(
        checkpoint=checkpoint,
        corpus=corpus,
        out=out,
        schedule=schedule,
        dtype=dtype,
        targets=targets,
        gate_up=gate_up_gram,
        device=device,
        vram_mib=vram_mib,
        host_pool_mib=host_pool_mib,
        ngram_placement=ngram_placement,
        micro_batch_tokens=micro_batch_tokens,
        max_document_tokens=max_document_tokens,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        kv_tokens=kv_tokens,
        threads=threads,
        text_field=text_field,
    )
    with tap_bar() as show, memory_named():
        result = run(options, show)
    if as_json:
        print_json(result)
    else:
        tell(result)
    if strict and result["notes"]:
        raise typer.Exit(3)


@contextmanager
def memory_named() -> Iterator[None]:
    """Turn a device's "out of memory" into what to do about it."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LeadlineError(
            "the tap needed more device memory than its plan counted and --vram-mib allows; what "
            "is sealed stays: run again with a smaller --micro-batch-tokens or a larger --vram-mib"
        ) from error


def tell(result: dict[str, Any]) -> None:
    """A tap's result in four lines, and its notes."""
    multiple = result["bytes_read"] / result["checkpoint_bytes"]
    data.print(
        f"tapped {result['tokens']:,} tokens of {result['documents']:,} documents through "
        f"{result['layers']} layers in {float(result['seconds']):.1f} s "
        f"({float(result['tok_s']):,.0f} tok/s)"
    )
    data.print(
        f"read {format_bytes(result['bytes_read'])} of {format_bytes(result['checkpoint_bytes'])} "
        f"({multiple:.3f} x), {result['steps']} {result['schedule']}s, "
        + ("past the page cache" if result["direct_io"] else "through the page cache, released")
    )
    data.print(
        f"peak memory: host {format_bytes(result['peak_host_bytes'])}, "
        f"device {format_bytes(result['peak_vram_bytes'])}"
    )
    data.print(f"Grams: {result['tap_dir']}")
    for note in result["notes"]:
        talk.print(f"[yellow]{note['kind']}[/] ({note['count']}): {note['detail']}")


@contextmanager
def tap_bar() -> Iterator[Callable[["TapProgress"], None]]:
    """A bar on stderr: layer, tokens/s, disk GB/s, bytes against the plan, time left."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as bar:
        task = bar.add_task("opening", total=None, told="")

        def show(at: "TapProgress") -> None:
            seconds = max(at.seconds, 1e-9)
            wave = f"wave {at.wave + 1}/{at.num_waves} " if at.num_waves > 1 else ""
            bar.update(
                task,
                description=f"{wave}layer {at.layer + 1}/{at.num_layers}",
                total=at.tokens * at.num_layers,
                completed=at.token_layers,
                told=f"{at.token_layers / at.num_layers / seconds:,.0f} tok/s  "
                f"{at.bytes_read / seconds / 1e9:.2f} GB/s  {format_bytes(at.bytes_read)} of "
                f"{format_bytes(at.bytes_to_read)}",
            )

        yield show
