"""How far a long pack operation has come."""

from collections.abc import Callable

OnProgress = Callable[[str, int, int], object]
"""Told the stage, bytes done and bytes in all; for a progress bar."""


class Meter:
    """Counts the bytes of one stage and reports each step."""

    def __init__(self, stage: str, total_bytes: int, report: OnProgress | None) -> None:
        self._stage = stage
        self._total_bytes = total_bytes
        self._report = report
        self._done_bytes = 0

    def __call__(self, num_bytes: int) -> None:
        """Count bytes as done."""
        self._done_bytes += num_bytes
        if self._report is not None:
            self._report(self._stage, self._done_bytes, self._total_bytes)
