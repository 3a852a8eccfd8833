"""The import ladder of docs/architecture.md, read from the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "leadline"

RUNGS = {
    "core": 0,
    "models": 1,
    "data": 1,
    "pack": 1,
    "cloud": 1,
    "train": 2,
    "rig": 2,
    "probe": 3,
    "tap": 3,
    "gate": 4,
    "report": 4,
    "cli": 5,
}
LIGHT = ("core", "pack")
HEAVY = {"torch", "numpy", "pydantic", "transformers", "tokenizers", "matplotlib", "jinja2"}


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module is not None
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def _home(path: Path) -> str:
    inside = path.relative_to(PACKAGE).parts
    return inside[0] if len(inside) > 1 else ""


def _upward(path: Path) -> list[str]:
    rung = RUNGS[_home(path)]
    faults = []
    for line, name in _imported(path):
        package, _, inside = name.partition(".")
        above = package == "leadline" and RUNGS.get(inside.partition(".")[0], -1) > rung
        if above:
            faults.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return faults


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if _home(path))


def test_every_folder_of_the_package_has_a_rung() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(RUNGS)


@pytest.mark.parametrize("folder", sorted(RUNGS))
def test_folder_imports_nothing_above_itself(folder: str) -> None:
    faults = [fault for path in _modules() if _home(path) == folder for fault in _upward(path)]
    assert faults == []


@pytest.mark.parametrize("folder", LIGHT)
def test_light_folder_imports_no_heavy_library(folder: str) -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in _modules()
        if _home(path) == folder
        for line, name in _imported(path)
        if name.split(".")[0] in HEAVY
    ]
    assert faults == []


def test_upward_import_of_a_planted_module_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "src" / "leadline" / "core" / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("def f():\n    from leadline.cli.app import main\n", encoding="utf-8")
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path / "src" / "leadline")
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert _upward(planted) == ["src/leadline/core/planted.py:2 imports leadline.cli.app.main"]
