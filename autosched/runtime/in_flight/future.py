"""Futures of submitted runs.

A main thread that waits can be interrupted at any moment. So it waits for locks written in C, and
not for the condition of ``concurrent.futures``, which is not safe then. Few runs need the
condition, and it takes long to create, so it is created when something asks for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from typing import Any

from autosched._lib.forks import forks
from autosched.errors import ScheduleError
from autosched.runtime.execute import CALLS
from autosched.runtime.threads.runs import Flag

_SOON = 0.01  # seconds, within which short runs end
_LOOK = 1.0  # seconds after which a waiting thread looks again


class RunFuture(Future[Any]):
    """The future of a run: as ``concurrent.futures.Future``, and ``await`` works, too.

    A run is under way from its submission on, so ``cancel()`` returns False. Functions that were
    added with ``add_done_callback`` are called in a thread of the schedule; they must not submit
    runs of it. ``wrote`` is called before there is a result or an error.
    """

    # Executes the run, where nothing does so by itself.
    drive: Callable[[], object] | None = None
    hand_out: Callable[[], None] | None = None  # prepares the outputs for a thread

    def __init__(
        self,
        number: int,
        finish: Callable[[dict[str, Any]], Any],
        wrote: Callable[[], None] | None = None,
        waiting: Waiting | None = None,
    ):
        # As in ``Future``, without the condition.
        self._state = RUNNING
        self._result = None
        self._exception = None
        self._waiters = []
        self._done_callbacks: list[Callable[[Future[Any]], object]] = []
        self.number = number
        self._waiting = waiting
        self._finish: Callable[[dict[str, Any]], Any] | None = finish
        self._wrote = wrote
        self._done = Flag()  # it has a result
        self._over = Flag()  # no thread works on it

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """The condition of ``Future``, which all threads share: the first one that is created."""
        shared: threading.Condition = vars(self).setdefault("condition", threading.Condition())
        return shared

    # ---- for callers

    def result(self, timeout: float | None = None) -> Any:
        """Return the result, of a schedule the outputs by name; raise what the run raised.

        Raises TimeoutError if the run does not end within ``timeout`` seconds; it goes on.
        """
        self._await(timeout)
        if self._exception is not None:
            return super().result(0)
        if self.hand_out is not None:
            self.hand_out()
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the run raised, None if nothing. Raises TimeoutError as ``result`` does."""
        self._await(timeout)
        return self._exception

    def done(self) -> bool:
        """Return whether there is a result, or an error."""
        return self._done.is_set

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # nobody else needs it

        if self.drive is not None:
            self._await(None)
        return asyncio.wrap_future(self).__await__()

    # ---- for the runtime

    def wait(self, deadline: float | None = None) -> bool:
        """Wait until the run has ended; return whether that was in time."""
        return self._wait_for(self._over, deadline)

    def _await(self, timeout: float | None) -> None:
        """Wait until there is a result, or an error."""
        if self._done.is_set:
            return
        deadline = None if timeout is None else time.perf_counter() + timeout
        if not self._wait_for(self._done, deadline):
            raise TimeoutError(f"run {self.number} has not ended within {timeout} seconds")

    def _wait_for(self, flag: Flag, deadline: float | None) -> bool:
        """Wait for a flag. Raises ScheduleError if the run waits for this thread.

        Whether it does is asked after a moment: most runs have ended by then.
        """
        if self.drive is None:
            patience = _SOON if deadline is None else min(max(0.0, _left(deadline)), _SOON)
            if flag.wait(patience):
                return True
        waiting = self._waiting
        if waiting is None or flag.is_set:
            return self._block(flag, deadline)
        me = threading.get_ident()
        waiting.flags[me] = flag
        try:
            CALLS.enter(waiting)
            return self._block(flag, deadline)
        finally:
            CALLS.leave(waiting)
            waiting.flags.pop(me, None)

    def _block(self, flag: Flag, deadline: float | None) -> bool:
        drive = self.drive
        if drive is not None and not flag.is_set:
            drive()
        while not flag.is_set:
            if self._waiting is not None and self._waiting.process != forks():
                raise ScheduleError("the run belongs to the process that this one was forked from")
            left = _left(deadline)
            if not flag.wait(min(max(0.0, left), _LOOK)) and left <= 0:
                return flag.is_set
        return True

    def finish(self, outputs: dict[str, Any]) -> Any:
        """Return the result for the caller; called once, before ``end``."""
        assert self._finish is not None
        return self._finish(outputs)

    def settle(self, seconds: float) -> None:
        """Give the run a moment to end by itself."""
        self._over.wait(seconds)

    def fail(self, error: BaseException, abandoned: bool = False) -> None:
        """Set an error, before the run has ended; its result is dropped then.

        Nobody waits for the end of a run that is abandoned.
        """
        if (wrote := self._wrote) is not None:  # the run may end at any moment
            wrote()
        self._settle(None, error)
        if abandoned:
            self._over.set()

    def end(self, result: Any, error: BaseException | None) -> None:
        """Note that the run has ended."""
        self.drive = None
        self._finish = None
        if self._wrote is not None:
            self._wrote()
            self._wrote = None
        self._settle(result, error)
        self._over.set()

    def _settle(self, result: Any, error: BaseException | None) -> None:
        """Set the outcome; the first one counts.

        Who asks for the condition later finds the state that is set here.
        """
        outcome = result, error
        known = vars(self)
        first = known.setdefault("outcome", outcome)
        self._result, self._exception = first
        self._state = FINISHED
        self._done.set()
        condition = known.get("condition")
        if condition is None or first is not outcome:
            return
        with condition:
            for waiter in self._waiters:
                (waiter.add_result if error is None else waiter.add_exception)(self)
        self._invoke_callbacks()  # type: ignore[attr-defined]


def _left(deadline: float | None) -> float:
    return _LOOK if deadline is None else deadline - time.perf_counter()


class Waiting:
    """Who waits for the runs of a schedule, and who executes them: see ``Called``."""

    def __init__(self, name: str, executing: Callable[[], frozenset[int]]):
        self.name = name
        self.process = forks()
        self.flags: dict[int, Flag] = {}  # what each thread waits for
        self._executing = executing

    @property
    def threads(self) -> frozenset[int]:
        """The identities of the threads that execute runs."""
        return self._executing()

    def is_run_by(self, thread: int) -> bool:
        """Whether a thread waits for a run."""
        flag = self.flags.get(thread)
        return flag is not None and not flag.is_set
