"""The command line is a promise: commands and options change only together with the golden file."""

import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent
REGENERATE = ".venv/bin/python tests/project/command_line.py"


def test_command_line_equals_the_frozen_list() -> None:
    current = runpy.run_path(str(HERE / "command_line.py"))["current"]()
    frozen = (HERE / "command_line.txt").read_text(encoding="utf-8")
    assert current == frozen, f"a command or option changed; if on purpose, run {REGENERATE}"


def test_every_command_takes_json() -> None:
    blocks: dict[str, list[str]] = {}
    for line in (HERE / "command_line.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("leadline"):
            blocks[line] = []
        else:
            blocks[[*blocks][-1]].append(line.strip())
    leaves = [name for name in blocks if not any(other.startswith(name + " ") for other in blocks)]
    assert len(leaves) > 8
    assert [name for name in leaves if "--json" not in blocks[name]] == []
