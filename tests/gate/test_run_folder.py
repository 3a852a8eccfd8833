"""A gate or probe works in a folder of its own and touches no other."""

from pathlib import Path

import pytest

from leadline.core.errors import UsageError
from leadline.gate.run_folder import alone_in
from leadline.gate.runner import GateEvents, run_gate
from leadline.gate.single import probe_once

from .double import GateDouble


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def project(gate: GateDouble) -> GateDouble:
    """A project of the user's with names that a gate uses too."""
    gate.write()
    for name in ("data/corpus.txt", "build/object.o", "pack/parcel", "work/notes.md"):
        path = gate.folder / name
        path.parent.mkdir()
        path.write_text("mine", encoding="utf-8")
    return gate


def test_gate_into_a_folder_of_others_is_refused_and_touches_nothing(project: GateDouble) -> None:
    before = contents(project.folder)
    with pytest.raises(UsageError, match="and no gate's ledger"):
        run_gate(project.config, project.folder, GateEvents())
    assert contents(project.folder) == before
    assert project.probes.calls == []


def test_probe_into_a_folder_of_others_is_refused_and_touches_nothing(project: GateDouble) -> None:
    before = contents(project.folder)
    with pytest.raises(UsageError, match="and no gate's ledger"):
        probe_once(
            "P1",
            steps=None,
            config_path=project.config,
            out=project.folder,
            on_progress=lambda _: None,
        )
    assert contents(project.folder) == before


def test_empty_folder_is_taken(gate: GateDouble) -> None:
    gate.out.mkdir()
    assert gate.run().status.green


@pytest.mark.parametrize("mark", ["ledger.jsonl", ".gate.guard"])
def test_folder_marked_by_an_earlier_gate_is_taken(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).touch()
    (tmp_path / "data").mkdir()
    with alone_in(tmp_path):
        assert (tmp_path / "work").is_dir()


@pytest.mark.parametrize("key", ["text", "shards"])
def test_run_directory_inside_the_data_is_refused_before_anything_is_written(
    tmp_path: Path, key: str
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("words", encoding="utf-8")
    config = tmp_path / "gate.toml"
    config.write_text(
        f"""
[workload]
kind = "dual-mind"
[data]
{key} = "corpus"
[budget]
window_hours = 8
""",
        encoding="utf-8",
    )
    with pytest.raises(UsageError, match="lies inside"):
        run_gate(config, tmp_path / "corpus" / "run", GateEvents())
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["a.txt"]
