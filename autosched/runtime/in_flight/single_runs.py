"""Execute one run at a time, in a thread of its own.

For schedules with one run in flight, and for runs that are checked: a check must see one run alone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from autosched._lib.forks import forks
from autosched.errors import ScheduleError
from autosched.runtime.execute import Executor
from autosched.runtime.in_flight.future import RunFuture, UnderWay
from autosched.runtime.in_flight.overlapping_runs import CLOSED, call_each
from autosched.runtime.threads.loop_team import at_once
from autosched.runtime.threads.thread_team import end_threads

__all__ = ["SingleRuns"]

_Work = Callable[[], None]


@dataclass(eq=False)
class Queued:
    """A run that waits for the thread, or is executed by it."""

    future: RunFuture
    inputs: Mapping[str, Any]

    def stop(self) -> None:
        """Do nothing: it cannot be aborted separately."""


class SingleRuns:
    """A thread that calls an executor. ``under_way`` are the runs that have not ended."""

    def __init__(self, executor: Executor, under_way: dict[int, UnderWay]):
        self.executor = executor
        self.under_way = under_way
        self._looping = executor.compiler.can.looping
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        name = "autosched submitted runs"
        thread = threading.Thread(target=call_each, args=(self._queue,), name=name, daemon=True)
        thread.start()
        self.threads = frozenset([thread.ident or 0])
        parts = self._queue, thread, executor.close, under_way, forks()
        self.close = weakref.finalize(self, _close, *parts)

    def start(self, future: RunFuture, inputs: Mapping[str, Any], deadline: float | None) -> None:
        """Start a run, for which there must be room."""
        adopt = _nothing if self._looping is None else self._looping.adopting()
        at_once(
            partial(self.under_way.__setitem__, future.number, Queued(future, inputs)),
            partial(self._queue.put, partial(self._run, future, inputs, deadline, adopt)),
        )

    def _run(
        self,
        future: RunFuture,
        inputs: Mapping[str, Any],
        deadline: float | None,
        adopt: _Work,
    ) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            adopt()
            left = None if deadline is None else max(0.0, deadline - time.perf_counter())
            result = future.finish(self.executor(inputs, left))
        except BaseException as raised:
            error = raised
        del self.under_way[future.number]
        future.end(result, error)


def _close(
    queue: SimpleQueue[_Work | None],
    thread: threading.Thread,
    abort: Callable[[], object],
    under_way: Mapping[int, UnderWay],
    process: int,
) -> None:
    """Abort the run, and end the thread."""
    if process != forks():  # it is the parent's
        return
    queue.put(None)
    if under_way:
        abort()
    end_threads([thread])
    for run in list(under_way.values()):
        run.future.fail(ScheduleError(CLOSED), abandoned=True)


def _nothing() -> None:
    pass
