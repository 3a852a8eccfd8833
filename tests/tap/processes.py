"""Running `leadline` in processes of its own: killed, signalled, limited, watched.

Torch is imported once, by the server; every command is a fork of it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A command that came to its end, or was brought to it."""

    code: int
    """Exit code; minus the signal's number where one ended it."""
    stdout: str
    stderr: str
    told: dict[str, Any]
    """Seconds, the kernel's counters and what a fault told; empty after a kill."""

    @property
    def result(self) -> dict[str, Any]:
        """What `--json` printed, once the command went well."""
        assert self.code == 0, f"exit {self.code}: {self.stderr}"
        document: dict[str, Any] = json.loads(self.stdout)
        return document

    @property
    def counters(self) -> dict[str, int]:
        """`/proc/self/io` and `/proc/self/status` at the end; memory in KiB."""
        counters: dict[str, int] = self.told["counters"]
        return counters

    def refused(self, code: int) -> str:
        """The one sentence on stderr of a command that failed with *code* and no traceback."""
        assert self.code == code, f"exit {self.code}, wanted {code}: {self.stdout}{self.stderr}"
        lines = self.stderr.strip().splitlines()
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("leadline: ")
        assert "unexpected" not in lines[0]
        return lines[0].removeprefix("leadline: ")


class Running:
    """A command on its way."""

    def __init__(self, server: "CommandServer", pid: int, folder: Path) -> None:
        self.pid = pid
        self._server = server
        self._folder = folder

    def signal_after(self, seconds: float, number: int = signal.SIGKILL) -> None:
        """Send a signal in a while; the moment is the test's subject."""
        time.sleep(seconds)
        os.kill(self.pid, number)  # still there at least as a zombie: only `wait` reaps it

    def wait_for(self, path: Path) -> None:
        """Return once the command has made *path*."""
        until = time.monotonic() + TIMEOUT_S
        while not path.exists():
            assert time.monotonic() < until, f"no {path}"
            time.sleep(0.005)

    def wait(self) -> Ended:
        """The end of the command."""
        code = self._server.ask({"wait": self.pid})["status"]
        ended = self._folder / "ended.json"
        return Ended(
            code=code,
            stdout=(self._folder / "stdout").read_text(encoding="utf-8"),
            stderr=(self._folder / "stderr").read_text(encoding="utf-8"),
            told=json.loads(ended.read_text(encoding="utf-8")) if ended.exists() else {},
        )


class CommandServer:
    """The process that forks commands; close it, or use it in a `with` block."""

    def __init__(self, folder: Path) -> None:
        """*folder*: streams of the commands go below it."""
        self._folder = folder
        self._count = 0
        script = Path(__file__).with_name("fork_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "MALLOC_ARENA_MAX": "2", "COLUMNS": "200"},
        )

    def start(
        self, arguments: Sequence[str], *, fault: tuple[str, dict[str, Any]] | None = None
    ) -> Running:
        """Start `leadline ARGUMENTS`; *fault* is a function of `faults`, applied first."""
        self._count += 1
        folder = self._folder / f"{self._count:04d}"
        folder.mkdir()
        request = {"run": list(arguments), "folder": str(folder), "fault": fault}
        return Running(self, self.ask(request)["pid"], folder)

    def run(
        self, arguments: Sequence[str], *, fault: tuple[str, dict[str, Any]] | None = None
    ) -> Ended:
        """Run `leadline ARGUMENTS` to its end."""
        return self.start(arguments, fault=fault).wait()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, one reply."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write((json.dumps(request) + "\n").encode())
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._process.stdout.readline())
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
