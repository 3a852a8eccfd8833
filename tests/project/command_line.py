"""Every command and option of `leadline`, as text: the promise that command_line.txt freezes.

.venv/bin/python tests/project/command_line.py      writes command_line.txt anew
"""

from pathlib import Path
from typing import Any

import typer

GOLDEN = Path(__file__).with_name("command_line.txt")
SHELL = {"--install-completion", "--show-completion"}  # typer's own, not the same everywhere


def describe(command: Any, words: tuple[str, ...] = ("leadline",)) -> list[str]:
    """One line a command, then one for each argument and option, indented."""
    lines = [" ".join(words)]
    parameters = [_parameter(item) for item in command.params if not SHELL & set(item.opts)]
    lines += sorted(f"    {text}" for text in parameters if "--help" not in text)
    for name in sorted(getattr(command, "commands", {})):
        lines += describe(command.commands[name], (*words, name))
    return lines


def _parameter(item: Any) -> str:
    if item.param_type_name == "argument":
        return (item.metavar or item.name.upper()) + ("" if item.required else " (optional)")
    text = "/".join([*item.opts, *item.secondary_opts])
    if not item.is_flag:
        text += f" {item.metavar or 'VALUE'}"
    if item.required:
        return f"{text} (required)"
    plain = isinstance(item.default, (str, int, float)) and not item.is_flag
    return f"{text} = {item.default}" if plain else text


def current() -> str:
    """The command line as it is now."""
    from leadline.cli.app import app

    return "\n".join(describe(typer.main.get_command(app))) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(current(), encoding="utf-8")
    print(GOLDEN.name)
