"""`leadline --help` and every `--help` below it answer without loading a heavy library."""

import subprocess
import sys

HEAVY = ["torch", "transformers", "numpy", "matplotlib", "tokenizers", "jinja2"]

ASK_HELP = """
import sys
from leadline.cli.app import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
print("HEAVY:", ",".join(name for name in sys.argv[1].split(",") if name in sys.modules))
"""

ASK_EVERY_HELP = """
import sys
import typer
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


def _heavy_modules_after(script: str, names: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, ",".join(names)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1].strip()


def test_help_loads_no_heavy_library() -> None:
    assert _heavy_modules_after(ASK_HELP, [*HEAVY, "pydantic"]) == "HEAVY:"


def test_help_of_every_command_loads_no_heavy_library() -> None:
    # typer itself loads pydantic, where it is installed, as soon as a command has options.
    assert _heavy_modules_after(ASK_EVERY_HELP, HEAVY) == "HEAVY:"


def test_heavy_module_that_is_loaded_is_found() -> None:
    assert _heavy_modules_after("import numpy\n" + ASK_HELP, HEAVY) == "HEAVY: numpy"


def test_module_entry_point_prints_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "leadline", "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage: leadline" in done.stdout
