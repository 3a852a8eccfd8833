"""`leadline tap`: Grams of a model's inputs, from recording to other programs."""

import typer

from leadline.cli import tap_record, tap_store

app = typer.Typer(
    help="Record, verify, merge and export the Grams that GPTQ needs.", no_args_is_help=True
)

app.command()(tap_record.record)
app.command()(tap_store.verify)
app.command()(tap_store.export)
app.command()(tap_store.merge)
