"""A probe process: `python -P -m leadline.probe.worker REQUEST RESULT PARENT`.

Reads one request, measures, writes one result, ends. Being a process of its own is
the point: nothing it leaves in the allocator, the compiler or the driver can reach
the next measurement.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from leadline.core import atomic
from leadline.core.errors import LeadlineError
from leadline.probe.progress import ProgressPipe
from leadline.probe.request import (
    EnvironmentRequest,
    PointRequest,
    Request,
    TwinRequest,
    read_request,
)

_PR_SET_PDEATHSIG = 1


def main(request_path: str, result_path: str, parent: int) -> None:
    """Serve one request of the process *parent*, and end with it."""
    started = time.perf_counter()
    _die_with_parent(parent)
    result: dict[str, Any]
    try:
        result = {"ok": True, "data": _serve(read_request(Path(request_path)))}
    except LeadlineError as error:
        result = {"ok": False, "kind": type(error).__name__, "message": str(error)}
    if result["ok"]:
        result["data"]["process_seconds"] = time.perf_counter() - started
    atomic.write_json(Path(result_path), result)


def _serve(request: Request) -> dict[str, Any]:
    progress = ProgressPipe(_own_stdout())
    progress("start", 0)
    if isinstance(request, EnvironmentRequest):
        from leadline.probe.environment import run_environment

        return run_environment(request)
    if isinstance(request, TwinRequest):
        from leadline.probe.twin import run_twin

        return run_twin(request, progress)
    assert isinstance(request, PointRequest)
    from leadline.probe.point import run_point

    return run_point(request, progress)


def _own_stdout() -> TextIO:
    """Keep stdout for progress alone, and give what the model starts or prints the log.

    A process that the model leaves behind would otherwise hold the pipe open, and whoever
    reads it would wait for that process to end.
    """
    progress = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")  # not inherited
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return progress


def _die_with_parent(parent: int) -> None:
    """Make the kernel end this process with its parent: an orphan would keep the card busy."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call took effect
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
