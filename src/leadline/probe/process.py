"""Running one probe in a process of its own, and telling how it ended."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from leadline.core import errors
from leadline.core.atomic import explained_os_errors
from leadline.core.errors import LeadlineError, ProbeError
from leadline.probe.progress import Progress, parse_progress
from leadline.probe.request import Request, kind_of, write_request

OnProgress = Callable[[Progress], None]
_EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")


def run_probe(
    request: Request, work_dir: Path, name: str, on_progress: OnProgress
) -> dict[str, Any]:
    """Serve *request* in a fresh process and return its data.

    Request, result and log stay in *work_dir* under *name*.

    Raises:
        ProbeError: the process crashed or was killed; the message holds the log's end.
        LeadlineError: the probe refused for a reason of its own.
    """
    request_path = work_dir / f"{name}.request.json"
    result_path = work_dir / f"{name}.result.json"
    log_path = work_dir / f"{name}.log"
    write_request(request_path, request)
    with explained_os_errors(result_path):
        result_path.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-P",  # or a statistics.py in the caller's folder would be part of the measurement
        "-m",
        "leadline.probe.worker",
        str(request_path),
        str(result_path),
        str(os.getpid()),
    ]
    with (
        _log(log_path) as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            errors="replace",  # a library may print anything
            # OpenMP's spinning threads, when anything else wants a core, made a small CPU step
            # 20 times slower; waiting costs nothing measurable. The caller's choice stands.
            env={"OMP_WAIT_POLICY": "passive", **os.environ},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                progress = parse_progress(line)
                if progress is not None:
                    on_progress(progress)
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    if code != 0 or not result_path.exists():
        raise ProbeError(_ending(kind_of(request), name, code, log_path))
    result = json.loads(result_path.read_bytes())
    if not result["ok"]:
        raise _rebuilt(result["kind"], result["message"])
    data: dict[str, Any] = result["data"]
    return data


def _log(path: Path) -> BinaryIO:
    with explained_os_errors(path):
        return path.open("wb")


def _ending(kind: str, name: str, code: int, log_path: Path) -> str:
    if code < 0:
        cause = signal.Signals(-code).name
        hint = " (the host ran out of memory, or someone ended it)" if code == -9 else ""
        return f"the {kind} process {name} was killed by {cause}{hint}; see {log_path}"
    return f"the {kind} process {name} ended with code {code}: {_cause(log_path)}; see {log_path}"


def _cause(log_path: Path) -> str:
    """The exception's own line, which a compiler may bury under the user's source, else the end."""
    lines = [line for line in log_path.read_text("utf-8", "replace").splitlines() if line.strip()]
    raised = [line for line in lines if _EXCEPTION_LINE.match(line)]
    return (raised or lines or ["it said nothing"])[-1].strip()


def _rebuilt(kind: str, message: str) -> LeadlineError:
    cls = getattr(errors, kind, LeadlineError)
    error: LeadlineError = cls(message)
    return error
