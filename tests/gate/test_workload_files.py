"""Which files a workload is made from, found without running any of them."""

from pathlib import Path

import pytest

from leadline.core.canonical import sha256_file
from leadline.core.errors import UsageError
from leadline.gate.workload_files import workload_files, workload_problems

SPEC = {"kind": "python", "object": "own.py:make"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(
        "import torch\nimport layers\nfrom blocks import wide\nfrom blocks.deep import Thing\n"
    )
    (tmp_path / "layers.py").write_text("from sizes import WIDTH\nraise SystemExit('never run')\n")
    (tmp_path / "sizes.py").write_text("WIDTH = 1\n")
    (tmp_path / "other.py").write_text("unrelated = True\n")
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "__init__.py").write_text("")
    (tmp_path / "blocks" / "wide.py").write_text("from . import narrow\nfrom ..sizes import x\n")
    (tmp_path / "blocks" / "narrow.py").write_text("import own\n")
    (tmp_path / "blocks" / "deep.py").write_text("class Thing: ...\n")
    return tmp_path


def names(folder: Path) -> list[str]:
    found = workload_files(SPEC, folder)
    return sorted(str(Path(path).relative_to(folder.resolve())) for path in found)


def test_files_are_the_one_named_and_all_it_imports_from_beside_it(folder: Path) -> None:
    assert names(folder) == [
        "blocks/__init__.py",
        "blocks/deep.py",
        "blocks/narrow.py",
        "blocks/wide.py",
        "layers.py",
        "own.py",
        "sizes.py",
    ]


def test_a_change_in_an_imported_file_is_named(folder: Path) -> None:
    locked = workload_files(SPEC, folder)
    (folder / "sizes.py").write_text("WIDTH = 2\n")
    (problem,) = workload_problems(locked)
    assert "sizes.py is not what was locked" in problem


def test_a_config_file_is_hashed_alone(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    spec = {"kind": "transformers", "config": "config.json"}
    assert workload_files(spec, tmp_path) == {str(config.resolve()): sha256_file(config)}


def test_a_file_that_is_no_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def (\n")
    with pytest.raises(UsageError, match=r"own\.py is not Python"):
        workload_files(SPEC, tmp_path)
