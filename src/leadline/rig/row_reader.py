"""Rows of a gather table that stays on disk: only the pages they lie in are read.

A table is one or more stretches of files, one behind the other (checkpoints cut large
tables into parts). Each call reads every page it needs once, however often a row is asked
for, with several threads and past the page cache, so that the host budget holds and
streamed weights cannot push rows out. Staging memory is a fixed number of blocks;
any number of rows may be asked for at once.
"""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import DataError, IntegrityError, UsageError
from leadline.rig.direct_file import PAGE_BYTES, DirectFile, page_ceil, page_floor
from leadline.rig.host_pool import HostPool

BLOCK_BYTES = 256 * 1024
"""The most one thread reads at once, up to a row more."""
_RUNS_PER_TASK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPart:
    """Consecutive rows of a table, from byte *begin* of a file."""

    path: Path
    begin: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStats:
    """What a reader has done so far."""

    rows_asked: int
    rows_read: int
    """Each once a call."""
    bytes_read: int
    """Of those rows."""
    bytes_from_disk: int
    """With the rest of the pages they lie in."""
    direct: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Runs:
    """Wanted rows, sorted, cut into stretches of pages that are read in one go."""

    begins: NDArray[np.int64]
    """Byte in its file where each row begins."""
    bounds: NDArray[np.int64]
    """First row of each run, then the number of rows."""
    parts: NDArray[np.int64]
    """Part of each run."""


class RowReader:
    """`gather` may be called from several threads."""

    def __init__(
        self,
        parts: Sequence[RowPart],
        *,
        row_bytes: int,
        threads: int = 8,
        max_gap: int = 0,
        direct: bool = True,
    ) -> None:
        """Open the files of *parts*; rows are numbered through all of them in order.

        Pages at most *max_gap* bytes apart are read in one go, with what lies between.

        Raises:
            UsageError: a size that cannot be.
            IntegrityError: a part reaches over the end of its file.
            LeadlineError: a file cannot be opened.
        """
        if row_bytes < 1 or threads < 1 or max_gap < 0 or not parts:
            raise UsageError(
                f"a table of {len(parts)} parts with rows of {row_bytes} bytes cannot be read by "
                f"{threads} threads over gaps of {max_gap} bytes; give at least one of each"
            )
        for part in parts:
            _refuse_part(part, row_bytes)
        self._parts = tuple(parts)
        self._row_bytes = row_bytes
        self._gap_pages = max_gap // PAGE_BYTES
        counts = np.array([part.num_rows for part in parts], dtype=np.int64)
        self._first_rows = np.concatenate(([0], np.cumsum(counts)))
        self._begins = np.array([part.begin for part in parts], dtype=np.int64)
        self._lock = threading.Lock()
        self._asked = self._read = self._from_disk = 0
        self._threads = threads
        self._staging: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        room = BLOCK_BYTES + page_ceil(row_bytes) + PAGE_BYTES
        memory = HostPool(threads * room, pinned=False)
        for _ in range(threads):
            self._staging.put(memory.take(room).numpy().data)
        self._files: dict[Path, DirectFile] = {}
        try:
            for part in parts:
                if part.path not in self._files:
                    self._files[part.path] = DirectFile(part.path, direct=direct)
        except BaseException:
            self._close_files()
            raise
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="leadline-rows")

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return int(self._first_rows[-1])

    @property
    def row_bytes(self) -> int:
        """Length of a row."""
        return self._row_bytes

    @property
    def stats(self) -> RowStats:
        """So far; from any thread."""
        with self._lock:
            return RowStats(
                rows_asked=self._asked,
                rows_read=self._read,
                bytes_read=self._read * self._row_bytes,
                bytes_from_disk=self._from_disk,
                direct=all(file.is_direct for file in self._files.values()),
            )

    def gather(self, row_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Rows [n, row_bytes] of *row_ids* [n], in their order; new memory.

        Raises:
            DataError: an id outside the table.
            IntegrityError: a file was cut meanwhile.
        """
        self._refuse_ids(row_ids)
        distinct, places = np.unique(row_ids.astype(np.int64, copy=False), return_inverse=True)
        rows = np.empty((distinct.size, self._row_bytes), dtype=np.uint8)
        runs = self._runs(distinct)
        num_runs = runs.parts.size
        step = min(max(num_runs // (4 * self._threads), 1), _RUNS_PER_TASK)
        tasks = [
            self._pool.submit(self._read_runs, runs, range(low, min(low + step, num_runs)), rows)
            for low in range(0, num_runs, step)
        ]
        try:
            from_disk = sum(task.result() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
        with self._lock:
            self._asked += row_ids.size
            self._read += distinct.size
            self._from_disk += from_disk
        return rows[places]

    def close(self) -> None:
        """Wait for running reads and close the files."""
        self._pool.shutdown()
        self._close_files()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()

    def _refuse_ids(self, row_ids: NDArray[np.int64]) -> None:
        if row_ids.ndim != 1 or row_ids.dtype.kind not in "iu":
            raise UsageError(
                f"row ids are {row_ids.dtype} of shape {row_ids.shape}; give integers of shape [n]"
            )
        if row_ids.size and (row_ids.min() < 0 or row_ids.max() >= self.num_rows):
            where = int(np.flatnonzero((row_ids < 0) | (row_ids >= self.num_rows))[0])
            raise DataError(
                f"row id {int(row_ids[where]):,} at place {where:,} lies outside the table of "
                f"{self.num_rows:,} rows in {self._parts[0].path.name}; check the ids' heads and "
                "offsets against the table"
            )

    def _runs(self, distinct: NDArray[np.int64]) -> _Runs:
        """Cut *distinct* (sorted) into runs, none over a block and a row."""
        part = np.searchsorted(self._first_rows, distinct, side="right") - 1
        begins = self._begins[part] + (distinct - self._first_rows[part]) * self._row_bytes
        first_page = begins // PAGE_BYTES
        last_page = (begins + self._row_bytes - 1) // PAGE_BYTES
        block = begins // BLOCK_BYTES
        breaks = (
            (np.diff(part) != 0)
            | (np.diff(block) != 0)
            | (first_page[1:] > last_page[:-1] + 1 + self._gap_pages)
        )
        starts = np.flatnonzero(np.concatenate((np.ones(min(distinct.size, 1), bool), breaks)))
        bounds = np.concatenate((starts, [distinct.size]))
        return _Runs(begins=begins, bounds=bounds, parts=part[starts])

    def _read_runs(self, runs: _Runs, numbers: range, rows: NDArray[np.uint8]) -> int:
        """Read the runs *numbers* and copy their rows out; bytes read from disk."""
        bounds = runs.bounds[numbers.start : numbers.stop + 1].tolist()
        parts = runs.parts[numbers.start : numbers.stop].tolist()
        staging = self._staging.get()
        try:
            return sum(
                self._read_run(
                    self._files[self._parts[part].path], runs.begins[low:high], low, staging, rows
                )
                for part, low, high in zip(parts, bounds, bounds[1:], strict=False)
            )
        finally:
            self._staging.put(staging)

    def _read_run(
        self,
        file: DirectFile,
        begins: NDArray[np.int64],
        first: int,
        staging: memoryview,
        rows: NDArray[np.uint8],
    ) -> int:
        begin, end = int(begins[0]), int(begins[-1]) + self._row_bytes
        start = page_floor(begin)
        from_disk = file.read(staging[: page_ceil(end) - start], begin, end)
        # Every window of a row's length, so that one index takes all rows out.
        raw = np.frombuffer(staging, dtype=np.uint8)
        windows = as_strided(
            raw, (raw.size - self._row_bytes + 1, self._row_bytes), (1, 1), writeable=False
        )
        rows[first : first + begins.size] = windows[begins - start]
        return from_disk


def _refuse_part(part: RowPart, row_bytes: int) -> None:
    if part.begin < 0 or part.num_rows < 0:
        raise UsageError(
            f"{part.num_rows} rows from byte {part.begin} of {part.path} cannot be; give 0 or more"
        )
    with explained_os_errors(part.path, "read"):
        found = part.path.stat().st_size
    end = part.begin + part.num_rows * row_bytes
    if end > found:
        raise IntegrityError(
            f"{part.num_rows:,} rows of {row_bytes} bytes from byte {part.begin:,} of {part.path} "
            f"end at byte {end:,} where the file has {found:,}; the table's metadata or the file "
            "is wrong: fetch both again"
        )
