"""`leadline rig`: the machine room of a tap."""

from pathlib import Path
from typing import Annotated, Any

import typer

from leadline.cli.output import JsonOption, data, print_json, talk
from leadline.core.errors import UsageError
from leadline.core.units import format_bytes

app = typer.Typer(help="Plan how a checkpoint larger than memory runs.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `plan` a subcommand while it is the only one."""


@app.command()
def plan(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a BF16 Hugging Face checkpoint.")],
    corpus: Annotated[Path | None, typer.Option(help="The corpus; else --tokens.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a corpus to come.")] = 1_048_576,
    document_tokens: Annotated[int, typer.Option(help="Length of its documents.")] = 2_048,
    out: Annotated[Path, typer.Option(help="Where the Grams would go.")] = Path(),
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
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Measure rates and predict the time.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Print what goes where, what will be read and how long it takes; loads no weight."""
    from leadline.tap.options import RecordOptions
    from leadline.tap.plan_report import plan_tap

    options = RecordOptions(
        checkpoint=checkpoint,
        corpus=corpus or Path(),
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
    )
    lengths = None if corpus is not None else _lengths(tokens, document_tokens)
    with talk.status("measuring" if probe else "planning"):
        result = plan_tap(options, lengths, probe=probe)
    if as_json:
        print_json(result)
    else:
        tell(result)
    if not result["fits"]:
        talk.print(f"[red]does not fit:[/] {result['refused_because']}", highlight=False)
        raise typer.Exit(UsageError.exit_code)


def _lengths(tokens: int, document_tokens: int) -> list[int]:
    if tokens < 1 or document_tokens < 1:
        raise UsageError(
            f"--tokens {tokens} and --document-tokens {document_tokens}: both must be 1 or more"
        )
    whole, rest = divmod(tokens, document_tokens)
    return [document_tokens] * whole + ([rest] if rest else [])


def tell(result: dict[str, Any]) -> None:
    """The plan as a table of what goes where."""
    from rich.table import Table

    layers = result["layers"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("model", f"{result['model_type']}, {format_bytes(result['checkpoint_bytes'])}")
    table.add_row(
        "layers",
        f"{layers['count']} ({layers['with_experts']} with {layers['experts']} experts), the "
        f"largest {format_bytes(layers['largest_bytes'])}",
    )
    for name, size in result["gather_tables"].items():
        table.add_row("gather table", f"{name}: {format_bytes(size)}, {result['gather_tables_on']}")
    strangers = result["not_in_model"]
    if strangers:
        told = f"{len(strangers):,} tensors, {strangers[0]} first: not read"
        table.add_row("not in the model", told)
    table.add_row("corpus", f"{result['tokens']:,} tokens, {result['documents']:,} documents")
    if result["fits"]:
        _tell_fit(table, result)
    table.add_row("Grams on disk", format_bytes(result["tap_bytes"]))
    data.print(table)


def _tell_fit(table: Any, result: dict[str, Any]) -> None:
    if result["schedule"] == "wave":
        table.add_row(
            "schedule",
            f"{result['waves']} wave(s) of {result['micro_batches']:,} micro-batches of at most "
            f"{result['micro_batch_tokens']:,} tokens",
        )
        table.add_row("residuals in pool", format_bytes(result["residual_bytes_on_host"]))
        if result["experts_per_group"]:
            table.add_row("layers are cut", f"groups of {result['experts_per_group']} experts")
    else:
        table.add_row(
            "schedule",
            f"{result['steps']:,} steps, KV pool of {result['kv_tokens_total']:,} tokens",
        )
        table.add_row(
            "not read again",
            f"{result['layers_on_device']} layers on the device, {result['layers_in_pool']} in "
            "the pool",
        )
    multiple = result["bytes_to_read"] / result["checkpoint_bytes"]
    table.add_row(
        "device memory",
        f"{format_bytes(result['vram_bytes'])} of {format_bytes(result['vram_budget_bytes'])}, "
        f"{result['slots']} slot(s) of {format_bytes(result['slot_bytes'])}",
    )
    table.add_row(
        "host pool",
        f"{format_bytes(result['host_bytes'])} of {format_bytes(result['host_pool_budget_bytes'])}"
        f", ring {format_bytes(result['ring_bytes'])}",
    )
    table.add_row("read from disk", f"{format_bytes(result['bytes_to_read'])} ({multiple:.2f} x)")
    if result["predicted_seconds"] is not None:
        table.add_row(
            "predicted",
            f"{result['predicted_seconds']:,.1f} s, {result['predicted_tok_s']:,.0f} tok/s (disk "
            f"{result['disk_bytes_s'] / 1e9:.2f} GB/s, compute {result['compute_tok_s']:,.0f} "
            "tok/s)",
        )
