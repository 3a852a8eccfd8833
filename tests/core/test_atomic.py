import errno
import os

import pytest

from leadline.core.atomic import atomic_writer, explained_os_errors, write_json, write_text
from leadline.core.errors import DiskSpaceError, LeadlineError


def _fail_with(code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_write_text_replaces_the_whole_file(tmp_path):
    path = tmp_path / "new" / "f.txt"
    write_text(path, "a much longer first version")
    write_text(path, "b")
    assert path.read_text() == "b"


def test_atomic_writer_that_fails_inside_keeps_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(TypeError), atomic_writer(path) as stream:
        stream.writelines([b"half of the new", None])
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["f"]


def test_atomic_writer_stopped_as_soon_as_its_file_is_made_leaves_nothing(tmp_path, monkeypatch):
    made = type(tmp_path).open

    def stopped(path, mode):
        made(path, mode).close()
        raise SystemExit(143)

    monkeypatch.setattr("pathlib.Path.open", stopped)
    with pytest.raises(SystemExit), atomic_writer(tmp_path / "f"):
        pass
    assert _names(tmp_path) == []


def test_atomic_writer_before_its_end_shows_no_file(tmp_path):
    with atomic_writer(tmp_path / "f") as stream:
        stream.write(b"x")
        assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_atomic_writer_on_a_full_disk_names_the_file_and_leaves_nothing(
    tmp_path, monkeypatch, call
):
    target = os if call == "fsync" else type(tmp_path)
    monkeypatch.setattr(target, call, _fail_with(errno.ENOSPC))
    with pytest.raises(DiskSpaceError, match=r"disk is full while writing .*f\.txt"):
        write_text(tmp_path / "f.txt", "x")
    assert _names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_write_to_a_read_only_folder_says_to_choose_another(tmp_path, monkeypatch, code):
    monkeypatch.setattr("pathlib.Path.open", _fail_with(code))
    with pytest.raises(LeadlineError, match="choose a folder you may write to"):
        write_text(tmp_path / "f.txt", "x")


def test_write_below_a_file_used_as_a_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LeadlineError, match="cannot write"):
        write_text(tmp_path / "file" / "deeper" / "f.txt", "x")


def test_write_over_a_folder_is_one_sentence_and_leaves_no_temporary(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "kept").write_text("")
    with pytest.raises(LeadlineError, match="cannot write"):
        write_text(tmp_path / "f", "x")
    assert _names(tmp_path) == ["f"]


def test_explained_os_errors_past_a_file_size_limit_is_a_disk_space_error(tmp_path):
    with pytest.raises(DiskSpaceError, match="largest file"), explained_os_errors(tmp_path):
        raise OSError(errno.EFBIG, "File too large")


def test_explained_os_errors_from_another_file_names_both(tmp_path):
    with pytest.raises(LeadlineError) as caught, explained_os_errors(tmp_path / "out.tar"):
        (tmp_path / "gone.txt").read_bytes()
    assert "out.tar" in str(caught.value)
    assert "gone.txt: No such file" in str(caught.value)


def test_write_json_of_nan_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "f.json", {"loss": float("nan")})
    assert _names(tmp_path) == []
