"""Seals layers on a thread of its own, one waiting at most.

The pass goes on with the next layer while the last one's Grams are hashed and written.
A bounded queue keeps memory flat however slow the disk is.
"""

import queue
import threading
from collections.abc import Callable

Seal = Callable[[], None]


class Sealer:
    """Runs `Seal` calls in order; a fault surfaces at the next `submit` or at `drain`."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Seal | None] = queue.Queue(maxsize=1)
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="leadline-sealer", daemon=True)
        self._thread.start()

    def submit(self, seal: Seal) -> None:
        """Queue a seal; waits while another one is waiting."""
        self.wait()
        self._queue.put(seal)

    def wait(self) -> None:
        """Wait until everything submitted is on disk.

        Raises:
            LeadlineError: what a seal raised.
        """
        self._queue.join()
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def close(self) -> None:
        """End the thread after what is queued."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            seal = self._queue.get()
            try:
                if seal is None:
                    return
                if self._fault is None:
                    seal()
            except BaseException as error:
                self._fault = error
            finally:
                self._queue.task_done()
