"""A gate on a disk that refuses: exit code, one sentence, nothing left half."""

import errno
import os
import resource
from pathlib import Path

import pytest

from leadline.cli.app import main

from ..gate.double import GateDouble


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".partial"))]


@pytest.mark.parametrize("place", ["file", "file/below", "run/work"])
def test_out_that_is_no_folder_exits_one_with_one_sentence(
    gate: GateDouble, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (gate.folder / "file").write_bytes(b"mine")
    gate.out.mkdir()
    (gate.out / ".gate.guard").touch()
    (gate.out / "work").write_bytes(b"mine")
    out = gate.out if place == "run/work" else gate.folder / place
    code, _, err = command(capsys, "gate", "run", gate.write(), "--out", out)
    assert code == 1
    assert err.splitlines()[-1].startswith("leadline: cannot write ")
    assert (gate.folder / "file").read_bytes() == b"mine"


def test_read_only_disk_exits_one_with_one_sentence(
    gate: GateDouble, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write into a folder without rights, so the disk's refusal is played."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    assert code == 1
    assert "choose a folder you may write to" in err.splitlines()[-1]


@pytest.mark.parametrize("name", [".gate.guard", "gate.toml", "ledger.jsonl", "evidence"])
def test_run_directory_that_holds_something_else_exits_one(
    gate: GateDouble, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A folder where a file should be, or a file where a folder should be."""
    gate.out.mkdir()
    if name != ".gate.guard":
        (gate.out / ".gate.guard").touch()
    if name == "evidence":
        (gate.out / name).write_bytes(b"mine")
    else:
        (gate.out / name).mkdir()
    code, _, err = command(capsys, "gate", "run", gate.write(), "--out", gate.out)
    assert code == 1
    assert err.splitlines()[-1].startswith("leadline: ")
    assert "unexpected" not in err


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("limit_bytes", [0, 200, 1000, 1500, 3000, 5000])
def test_largest_file_met_exits_one_and_the_next_run_is_green(
    gate: GateDouble, capsys: pytest.CaptureFixture[str], limit_bytes: int
) -> None:
    """The kernel's own refusal, in a process of its own, wherever the limit strikes first."""
    gate.write()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
        code = 77
        try:
            main(["gate", "run", str(gate.config), "--out", str(gate.out)])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 78
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert not (gate.out / "config.lock.json").exists()
    assert temporaries(gate.out) == []
    assert command(capsys, "gate", "run", gate.config, "--out", gate.out)[0] == 0
