"""Rules every file keeps: short, explained, and free of one machine's paths."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_LINES = 450

# Split, so that this file does not hold what it forbids.
MACHINE_WORDS = re.compile(
    "|".join(
        re.escape(head + tail)
        for head, tail in (
            ("/root", "/"),
            ("/home", "/"),
            ("/Users", "/"),
            ("/work", "/main"),
            ("/work", "/shared"),
            ("/tmp", "/venv"),
            ("pypi", ".org"),
            ("python", "hosted.org"),
        )
    )
)


@pytest.fixture(scope="module")
def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of tracked files")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_source_files_stay_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    too_long = [f"{path.relative_to(ROOT)}: {n}" for path, n in lengths.items() if n > MAX_LINES]
    assert too_long == []


def test_every_public_module_explains_itself() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.name in ("__init__.py", "__main__.py") or not path.name.startswith("_")
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_tracked_files_name_no_machine(tracked_files: list[Path]) -> None:
    found = []
    for path in tracked_files:
        if path.is_symlink() or not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_WORDS.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


def test_tracked_files_hold_no_build_output(tracked_files: list[Path]) -> None:
    suffixes = {".pyc", ".so", ".pt", ".safetensors", ".bin", ".tar"}
    assert [str(path) for path in tracked_files if path.suffix in suffixes] == []
