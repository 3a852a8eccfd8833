"""`leadline --help` and every `--help` below it answer without loading a heavy library."""

import subprocess
import sys

HEAVY = ["torch", "transformers", "numpy", "pydantic", "matplotlib", "tokenizers", "jinja2"]

ASK_EVERY_HELP = """
import sys
import click, typer
from leadline.cli.app import app, main

def ask(command, words):
    try:
        main([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0, words
    for name, child in getattr(command, "commands", {}).items():
        ask(child, [*words, name])

ask(typer.main.get_command(app), [])
heavy = [name for name in sys.argv[1].split(",") if name in sys.modules]
print("HEAVY:", ",".join(heavy))
"""


def test_help_of_every_command_loads_no_heavy_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK_EVERY_HELP, ",".join(HEAVY)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1].strip() == "HEAVY:"


def test_module_entry_point_prints_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "leadline", "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage: leadline" in done.stdout
