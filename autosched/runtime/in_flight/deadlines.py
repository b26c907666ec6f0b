"""Call functions at deadlines, in a thread of their own."""

from __future__ import annotations

import heapq
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

from autosched.runtime.threads.thread_team import end_threads

__all__ = ["Deadlines"]

_Alarm = tuple[float, int]  # a moment of ``time.perf_counter``, and the number of a run


class Deadlines:
    """A thread that calls ``late`` with the number of a run at its deadline.

    The thread is started at the first deadline; ``close()`` ends it, and so does garbage collection.
    """

    def __init__(self, late: Callable[[int], None]):
        self._queue: SimpleQueue[_Alarm | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._queue, late), name="autosched deadlines", daemon=True
        )
        self.close = weakref.finalize(self, _end, self._queue, self._thread)

    def add(self, deadline: float, number: int) -> None:
        """Call ``late`` with a number at a moment."""
        self._queue.put((deadline, number))
        if not self._thread.is_alive():
            self._thread.start()


def _end(queue: SimpleQueue[_Alarm | None], thread: threading.Thread) -> None:
    queue.put(None)
    if thread.ident:
        end_threads([thread])


def _serve(queue: SimpleQueue[_Alarm | None], late: Callable[[int], None]) -> None:
    alarms: list[_Alarm] = []
    while True:
        now = time.perf_counter()
        while alarms and alarms[0][0] <= now:
            late(heapq.heappop(alarms)[1])
        patience = min(alarms[0][0] - now, threading.TIMEOUT_MAX) if alarms else None
        try:
            alarm = queue.get(timeout=patience)
        except Empty:
            continue
        if alarm is None:
            return
        heapq.heappush(alarms, alarm)
