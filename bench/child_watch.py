"""Run a command and read from outside what it took: time, bytes from disk, memory.

What a program says of itself is one figure; what the kernel and the driver say is the
other, and a benchmark shows both. Memory is sampled every 20 ms. A figure that this
machine does not give is None.
"""

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildRun:
    """A finished command."""

    exit_code: int
    stdout: str
    stderr: str
    wall_seconds: float
    """Process start and imports included."""
    disk_read_bytes: int | None
    """Fetched from storage on its behalf."""
    disk_written_bytes: int | None
    peak_resident_bytes: int | None
    """High-water mark, mapped library files included."""
    peak_anonymous_bytes: int | None
    """Largest sample without mapped files."""
    peak_device_bytes: int | None
    """Largest sample of the card's memory in use, less what was in use before."""


def run_watched(command: Sequence[str], *, log: Path) -> ChildRun:
    """Run *command*; its stderr goes to the file *log* as it comes."""
    device = _DeviceMemory()
    with log.open("wb") as errors:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        watch = _Watch(child.pid, device)
        try:
            assert child.stdout is not None
            stdout = child.stdout.read()
            # Not reaped yet: the kernel still tells what the process has read.
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            wall = time.perf_counter() - start
            counted = _fields(Path(f"/proc/{child.pid}/io"))
        finally:
            watch.stop()
            if child.poll() is None:
                child.kill()
            code = child.wait()
    return ChildRun(
        exit_code=code,
        stdout=stdout.decode(errors="replace"),
        stderr=log.read_text("utf-8", errors="replace"),
        wall_seconds=wall,
        disk_read_bytes=counted.get("read_bytes"),
        disk_written_bytes=counted.get("write_bytes"),
        peak_resident_bytes=watch.resident,
        peak_anonymous_bytes=watch.anonymous,
        peak_device_bytes=watch.device_bytes,
    )


class _Watch:
    def __init__(self, pid: int, device: "_DeviceMemory") -> None:
        self.resident: int | None = None
        self.anonymous: int | None = None
        self.device_bytes: int | None = None
        self._status = Path(f"/proc/{pid}/status")
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="child-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            fields = _fields(self._status)
            if "VmHWM" in fields:
                self.resident = max(self.resident or 0, fields["VmHWM"] * 1024)
            if "RssAnon" in fields:
                held = (fields["RssAnon"] + fields.get("RssShmem", 0)) * 1024
                self.anonymous = max(self.anonymous or 0, held)
            taken = self._device.taken_bytes()
            if taken is not None:
                self.device_bytes = max(self.device_bytes or 0, taken)


class _DeviceMemory:
    """The first card's memory in use, through the driver; makes no context of its own."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._before = 0
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._before = self._used()
        except Exception:  # no driver library, or no card: the figure is then None
            self._handle = None

    def taken_bytes(self) -> int | None:
        return None if self._handle is None else max(self._used() - self._before, 0)

    def _used(self) -> int:
        import pynvml

        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)


def _fields(path: Path) -> dict[str, int]:
    """Whole numbers of a `name: value` file of the kernel; empty where there is none."""
    try:
        lines = path.read_text("ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    words = ((name, value.split()) for name, _, value in pairs)
    return {name: int(value[0]) for name, value in words if value and value[0].isdigit()}
