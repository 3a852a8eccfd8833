"""A tap killed, signalled or out of space at any of its steps: sealed, or no trace.

Kills are real: the tap runs in a forked process that ends with `os._exit` or SIGKILL.
"""

import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leadline.core.errors import DiskSpaceError, LeadlineError
from leadline.tap import layer_file
from leadline.tap.manifest import read_manifest
from leadline.tap.store import TapStore
from leadline.tap.verify import verify_tap

from .taps import ToyRows, layer_files, toy_key, write_tap

KILLED = 9
ROWS = ToyRows(layers=2)
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def record_waves(path: Path, num_waves: int) -> None:
    """A tap of several waves, from wherever it stands to its end."""
    key = toy_key(num_waves=num_waves, end_layer=2)
    with TapStore.open(path, key, ROWS.plan) as store:
        for wave in range(num_waves):
            for layer in range(ROWS.layers):
                part = slice(wave, None, num_waves)
                if store.waves_sealed(layer) <= wave:
                    store.seal(layer, *ROWS.grams(layer, part), wave=wave)
        if not store.complete:
            store.finish({"tokens": 40})


class Killer:
    """Ends the process before its nth step that changes what is on the disk."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.steps = 0

    def hook(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            if self.steps == self.at:
                os._exit(KILLED)
            return operation(*args, **kwargs)

        return counted

    def pieces(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """Half of a layer's pieces are in the file when the kill comes."""

        def torn(*args: Any, **kwargs: Any) -> Iterator[Any]:
            yield from (self.hook(lambda piece: piece)(piece) for piece in operation(*args))

        return torn

    def arm(self) -> None:
        os.fsync = self.hook(os.fsync)
        for name in ("open", "replace", "unlink"):
            setattr(Path, name, self.hook(getattr(Path, name)))
        layer_file._pieces = self.pieces(layer_file._pieces)


def run_killed(work: Callable[[], object], at: int | None) -> tuple[int, int]:
    """Exit status and steps of *work* in a forked process that dies at step *at*."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            killer = Killer(at)
            killer.arm()
            work()
            os.write(writer, str(killer.steps).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    _, ended = os.waitpid(child, 0)
    told = os.read(reader, 16)
    os.close(reader)
    return os.waitstatus_to_exitcode(ended), int(told or b"0")


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killing a process loses nothing the kernel holds, so no disk has to be waited for."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.parametrize("num_waves", [1, 2])
def test_t74_tap_killed_at_any_step_goes_on_to_the_same_files(
    tmp_path: Path, no_waiting: None, num_waves: int
) -> None:
    status, steps = run_killed(lambda: record_waves(tmp_path / "whole", num_waves), None)
    assert (status, steps >= 20) == (0, True)
    whole = layer_files(tmp_path / "whole")
    for at in range(1, steps + 1):
        path = tmp_path / f"killed-{at}"
        assert run_killed(lambda path=path: record_waves(path, num_waves), at)[0] == KILLED, at
        if (path / "grams.json").exists():
            assert verify_tap(path, allow_partial=True).problems == (), at
        record_waves(path, num_waves)
        assert layer_files(path) == whole, at
        assert not list(path.glob("*.tmp")), at


def test_t74_tap_killed_again_and_again_goes_on_to_the_same_files(
    tmp_path: Path, no_waiting: None
) -> None:
    path = tmp_path / "tap"
    for at in (23, 17, 12, 9, 4, 13):
        assert run_killed(lambda: record_waves(path, 2), at)[0] == KILLED
    record_waves(path, 2)
    record_waves(tmp_path / "whole", 2)
    assert layer_files(path) == layer_files(tmp_path / "whole")


class FullDisk:
    """The disk is full at the nth fsync, and free again afterwards."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.writes = 0

    def fsync(self, handle: int) -> None:
        self.writes += 1
        if self.writes == self.at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("num_waves", [1, 2])
def test_t92_disk_full_at_any_write_is_told_and_the_next_run_ends_with_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_waves: int
) -> None:
    whole = FullDisk(None)
    monkeypatch.setattr(os, "fsync", whole.fsync)
    record_waves(tmp_path / "whole", num_waves)
    assert whole.writes >= 12
    for at in range(1, whole.writes + 1):
        path = tmp_path / f"full-{at}"
        monkeypatch.setattr(os, "fsync", FullDisk(at).fsync)
        with pytest.raises(DiskSpaceError, match="the disk is full"):
            record_waves(path, num_waves)
        assert not list(path.glob("*.tmp")), at
        if (path / "grams.json").exists():
            assert verify_tap(path, allow_partial=True).problems == (), at
        record_waves(path, num_waves)
        assert layer_files(path) == layer_files(tmp_path / "whole"), at


def test_t92_full_disk_in_a_seal_names_path_needed_and_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TapStore.open(tmp_path / "tap", toy_key(end_layer=2), ROWS.plan) as store:
        monkeypatch.setattr(os, "fsync", FullDisk(1).fsync)
        with pytest.raises(
            DiskSpaceError, match=r"layer_00000\.safetensors needs \d+ bytes, \d+ are free"
        ):
            store.seal(0, *ROWS.grams(0))
        store.seal(0, *ROWS.grams(0))  # space was made: the same store goes on
        assert store.sealed == {0}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 10 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("no right to mount a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_t92_real_disk_that_fills_in_the_middle_of_a_seal_keeps_the_layers_before(
    small_disk: Path,
) -> None:
    with TapStore.open(small_disk / "tap", toy_key(end_layer=2), ROWS.plan) as store:
        store.seal(0, *ROWS.grams(0))
        filler = small_disk / "filler"
        with filler.open("wb") as stream, pytest.raises(OSError):  # noqa: PT012
            while True:
                stream.write(bytes(1 << 16))
                stream.flush()
        with pytest.raises(DiskSpaceError, match="needs"):
            store.seal(1, *ROWS.grams(1))
        assert verify_tap(small_disk / "tap", allow_partial=True).problems == ()
        assert read_manifest(small_disk / "tap").sealed == {0}
        filler.unlink()
        store.seal(1, *ROWS.grams(1))
    write_tap(small_disk / "tap", ROWS)
    assert verify_tap(small_disk / "tap").ok


def test_t92_plan_larger_than_a_real_disk_is_refused_at_the_start(small_disk: Path) -> None:
    wide = ToyRows(layers=60)
    with pytest.raises(DiskSpaceError, match="free and the tap needs"):
        TapStore.open(small_disk / "tap", toy_key(), wide.plan)
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("limit_bytes", [0, 100, 700, 900, 1200])
def test_t92_largest_file_met_is_one_sentence_and_the_next_run_is_whole(
    tmp_path: Path, limit_bytes: int
) -> None:
    path = tmp_path / "tap"
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
        status = 77
        try:
            write_tap(path, ROWS)
        except DiskSpaceError:
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended) == 0
    assert not list(path.glob("*.tmp"))
    write_tap(path, ROWS)
    assert layer_files(path) == layer_files(write_tap(tmp_path / "whole", ROWS))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("target", ["mkdir", "lock"])
def test_folder_that_may_not_be_written_to_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, target: str
) -> None:
    """Root may write into a folder without rights, so the disk's refusal is played."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    where = "filelock.FileLock.acquire" if target == "lock" else "pathlib.Path.mkdir"
    monkeypatch.setattr(where, refuse)
    with pytest.raises(LeadlineError, match="choose a folder you may write to"):
        TapStore.open(tmp_path / "tap", toy_key(end_layer=2), ROWS.plan)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def test_t93_stop_signal_at_any_moment_leaves_layers_sealed_or_without_a_trace(
    tmp_path: Path,
) -> None:
    """The handler of the command line raises wherever the process is; a kill follows."""
    path, chance = tmp_path / "tap", np.random.default_rng(93)
    for _ in range(20):
        child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGTERM, _stop)
                write_tap(path, ROWS)
            except SystemExit:
                pass  # lets go of the frames, and they of what they hold, as an ordinary end does
            finally:
                os._exit(0)
        time.sleep(float(chance.uniform(0, 0.02)))  # the moment is the test's subject
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        if (path / "grams.json").exists():
            assert verify_tap(path, allow_partial=True).problems == ()
        if path.exists():
            assert not list(path.glob("*.tmp"))
            if read_complete(path):
                break
    write_tap(path, ROWS)
    assert layer_files(path) == layer_files(write_tap(tmp_path / "whole", ROWS))


def read_complete(path: Path) -> bool:
    return (path / "grams.json").exists() and read_manifest(path).complete


def test_killed_holder_lets_the_folder_go(tmp_path: Path) -> None:
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store = TapStore.open(tmp_path / "tap", toy_key(end_layer=2), ROWS.plan)
            os.write(told, b"x")
            signal.pause()
            store.close()
        finally:
            os._exit(0)
    os.read(ready, 1)
    with pytest.raises(LeadlineError, match=f"process {child} on"):
        TapStore.open(tmp_path / "tap", toy_key(end_layer=2), ROWS.plan)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    TapStore.open(tmp_path / "tap", toy_key(end_layer=2), ROWS.plan).close()
    os.close(ready)
    os.close(told)
