"""Which stretch of a ring is free: arithmetic only.

Regions are placed one behind the other, whole, and wrap to the start where the end has
no room. They may be released in any order; space is reused in the order of placing.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(eq=False, kw_only=True, slots=True)
class Region:
    """A stretch in use."""

    offset: int
    num_bytes: int
    released: bool = False


class RingSpace:
    """Places regions in *num_bytes*; not thread-safe, its owner holds a lock."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._head = 0
        self._live: deque[Region] = deque()

    @property
    def used_bytes(self) -> int:
        """In regions that are not reusable yet."""
        return sum(region.num_bytes for region in self._live)

    def place(self, num_bytes: int) -> Region | None:
        """Region of *num_bytes* > 0, or None while there is no room for it."""
        offset = self._find(num_bytes)
        if offset is None:
            return None
        self._head = offset + num_bytes
        region = Region(offset=offset, num_bytes=num_bytes)
        self._live.append(region)
        return region

    def release(self, region: Region) -> None:
        """Take *region* back; its space is free once all placed before it are back."""
        region.released = True
        while self._live and self._live[0].released:
            self._live.popleft()

    def _find(self, num_bytes: int) -> int | None:
        if not self._live:
            return 0 if num_bytes <= self._num_bytes else None
        tail = self._live[0].offset
        if self._head <= tail:  # wrapped, or full where they meet
            return self._head if self._head + num_bytes <= tail else None
        if self._head + num_bytes <= self._num_bytes:
            return self._head
        return 0 if num_bytes <= tail else None
