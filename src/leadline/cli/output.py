"""What every command prints: data to stdout, talk to stderr."""

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON document on stdout.")
]

talk = Console(stderr=True, highlight=False, soft_wrap=True)
"""Progress and hints; never data."""

data = Console(highlight=False, soft_wrap=True)
"""A result for people, where no --json was asked for."""


def print_json(value: object) -> None:
    """Write *value* as one JSON document to stdout; NaN and Inf are refused."""
    sys.stdout.write(json.dumps(value, ensure_ascii=True, allow_nan=False, indent=2) + "\n")
