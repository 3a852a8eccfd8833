"""`leadline probe`: one point of the sweep, outside a gate."""

from pathlib import Path
from typing import Annotated

import typer

from leadline.cli import output
from leadline.cli.output import JsonOption, print_json


def probe(
    cfg: Annotated[str, typer.Option("--cfg", metavar="P1|P2|P3", help="Point of the sweep.")],
    steps: Annotated[
        int | None, typer.Option(min=2, help="Timed steps; left out, the configuration decides.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="CONFIG.toml", help="Left out: the demo's own."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where shards, log and result go.")
    ] = Path("probe-run"),
    json_output: JsonOption = False,
) -> None:
    """Measure one sweep point in a fresh process and print its tok/s."""
    from leadline.cli.gate_view import GateView
    from leadline.core.units import format_bytes
    from leadline.gate.single import probe_once

    with GateView() as view:
        view.phase_started(f"Probe {cfg}")
        data = probe_once(cfg, steps=steps, config_path=config, out=out, on_progress=view.progress)
    if json_output:
        print_json(data)
    else:
        rate = f"{data['tok_s']:,} tok/s" if data.get("tok_s") else "no rate"
        memory = data["memory"]
        output.data.print(
            f"{data['name']} {data['micro_batch']}x{data['seq_len']}: {data['status']}, {rate}, "
            f"peak {format_bytes(memory['device_peak_bytes'])}, {memory['percent']} % of the device"
        )
        if data["why"]:
            output.data.print(f"  {data['why']}", markup=False)
    if data["status"] != "ok":
        raise typer.Exit(1)
