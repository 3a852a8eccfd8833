"""Reads that leave the page cache as they found it.

O_DIRECT where the file system takes it; else ordinary reads without read-ahead, whose
pages are given up right after use (`is_direct` tells). All reads cover whole pages.
"""

import errno
import os
import threading
from pathlib import Path

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import IntegrityError

PAGE_BYTES = 4096
"""What O_DIRECT wants offsets, lengths and addresses to be multiples of, or a multiple of it."""


def page_floor(offset: int) -> int:
    """First byte of the page that holds byte *offset*."""
    return offset // PAGE_BYTES * PAGE_BYTES


def page_ceil(offset: int) -> int:
    """*offset* if a page begins there, else where the next one begins."""
    return -(-offset // PAGE_BYTES) * PAGE_BYTES


class DirectFile:
    """A file open for reading; `read` may be called from several threads."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        """Open *path*; not *direct*: through the page cache in any case.

        Raises:
            LeadlineError: it cannot be opened.
        """
        self.path = path
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self.is_direct = direct and self._open_direct()
        if not self.is_direct:
            self._open_buffered()

    def read(self, into: memoryview, begin: int, end: int) -> int:
        """Fill *into* with the pages that hold bytes *begin* to *end*; bytes read from disk.

        *into* starts on a page of memory and is as long as those pages; what lies behind
        the file's last byte stays as it was.

        Raises:
            IntegrityError: the file ends before *end*.
            LeadlineError: the system refuses the read.
        """
        start = position = page_floor(begin)
        while position < end:
            direct = self.is_direct
            reached = position + self._read_once(into[position - start :], position)
            if reached < end:
                found = self._size()
                if found < end:
                    self._refuse_short(begin, end, found)
                if direct:
                    # O_DIRECT goes on from whole pages only; where that leads nowhere, give it up.
                    reached = page_floor(reached)
                    if reached <= position:
                        self._give_up_direct()
                elif reached == position:
                    self._refuse_short(begin, end, reached)
            position = reached
        if not self.is_direct:
            self._forget(start, position - start)
        return position - start

    def close(self) -> None:
        """Close the file; no read may be running."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _read_once(self, into: memoryview, position: int) -> int:
        direct = self.is_direct
        try:
            with explained_os_errors(self.path, "read"):
                try:
                    return os.preadv(self._descriptors[-1], [into], position)
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
        except IndexError:
            raise ValueError(f"{self.path} is closed") from None
        # Some file systems take the flag and refuse the read.
        self._give_up_direct()
        return self._read_once(into, position)

    def _give_up_direct(self) -> None:
        with self._lock:
            if self.is_direct:
                self._open_buffered()
                self.is_direct = False

    def _open_direct(self) -> bool:
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return False
        with explained_os_errors(self.path, "read"):
            try:
                self._descriptors.append(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | flag))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                return False
        return True

    def _open_buffered(self) -> None:
        with explained_os_errors(self.path, "read"):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        # A direct descriptor stays open behind it: other threads may be reading there.
        self._descriptors.append(descriptor)
        if hasattr(os, "posix_fadvise"):
            # Reading ahead would be faster in long runs, but it fetches what nobody asked for and
            # leaves it in the cache, where `_forget` does not reach.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def _forget(self, start: int, num_bytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(
                self._descriptors[-1], start, page_ceil(num_bytes), os.POSIX_FADV_DONTNEED
            )

    def _size(self) -> int:
        return os.fstat(self._descriptors[-1]).st_size

    def _refuse_short(self, begin: int, end: int, found: int) -> None:
        raise IntegrityError(
            f"{self.path} ends at byte {found:,} where bytes {begin:,} to {end:,} were to be read; "
            "it is shorter than its header says or was cut meanwhile: fetch it again"
        )
