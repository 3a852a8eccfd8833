"""Progress of a probe process: one JSON line on its stdout, read by the one that waits."""

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import TextIO

_EVERY_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a probe is."""

    phase: str
    done: int
    total: int | None
    """None where the end is not a count."""


class ProgressPipe:
    """Writes progress, a few lines a second at most."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._last = 0.0

    def __call__(self, phase: str, done: int, total: int | None = None) -> None:
        """Report, unless a report of the last moment stands."""
        now = time.monotonic()
        if now - self._last < _EVERY_SECONDS and done != total:
            return
        self._last = now
        line = json.dumps(asdict(Progress(phase=phase, done=done, total=total)))
        self._stream.write(line + "\n")
        self._stream.flush()


def parse_progress(line: str) -> Progress | None:
    """The progress in *line*, or None for anything else a library may print."""
    try:
        content = json.loads(line)
        return Progress(phase=content["phase"], done=content["done"], total=content["total"])
    except (ValueError, KeyError, TypeError):
        return None
