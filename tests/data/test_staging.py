"""A staged folder is whole under its name, or leaves no trace."""

import errno
import os
from pathlib import Path

import pytest

from leadline.core.errors import DiskSpaceError, LeadlineError, UsageError
from leadline.data.staging import staged_folder


def test_staged_folder_appears_with_its_content(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out") as folder:
        (folder / "a").write_bytes(b"1")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "a").read_bytes() == b"1"


def test_staged_folder_replaces_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with staged_folder(tmp_path / "out") as folder:
        (folder / "a").write_bytes(b"1")
    assert (tmp_path / "out" / "a").exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_staged_folder_of_a_failed_block_leaves_no_trace(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def fail_inside() -> None:
        with staged_folder(tmp_path / "deep" / "er" / "out") as folder:
            (folder / "a").write_bytes(b"1")
            raise error

    with pytest.raises(error):
        fail_inside()
    assert list(tmp_path.iterdir()) == []


def test_staged_folder_does_not_overwrite_what_appeared_meanwhile(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def lose_the_race() -> None:
        with staged_folder(out):
            out.mkdir()
            (out / "theirs").write_bytes(b"2")

    with pytest.raises(UsageError, match="appeared while"):
        lose_the_race()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "theirs").read_bytes() == b"2"


def test_staged_folder_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(UsageError, match="it is a file"),
        staged_folder(tmp_path / "file" / "out"),
    ):
        pass


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_staged_folder_in_a_read_only_place_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(LeadlineError, match=r"cannot write .*out: "),
        staged_folder(tmp_path / "out"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_staged_folder_that_cannot_be_synced_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr("leadline.data.staging.fsync_folder", refuse)
    with pytest.raises(DiskSpaceError), staged_folder(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []
