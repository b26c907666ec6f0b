"""Runs of a loop: one for each time that a team executes emitted functions.

Threads take part in every run, in the order of the runs, and go on with the next one without
waiting for each other. A run has ended when all threads have left it. Knows no program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from autosched.codegen.threads import Emitted
from autosched.runtime.threads.team import Fault, Place, Step

__all__ = ["Line", "LoopRun", "LoopTeam", "unlock"]


class Line:
    """The runs of a loop, in order.

    If runs ``carry`` state to later ones, a run that is aborted breaks the line: later runs that
    were started before the line is mended are aborted, too.
    """

    def __init__(self, carries: bool):
        self.guard = threading.RLock()
        self.broken: LoopRun | None = None
        self._carries = carries

    def break_at(self, run: LoopRun) -> None:
        """Note that a run was aborted."""
        if self._carries and (self.broken is None or run.number < self.broken.number):
            self.broken = run

    def mend(self) -> None:
        """Go on after all runs have ended."""
        self.broken = None


class LoopRun:
    """One run of emitted functions.

    ``locks`` are those that its threads wait for; ``ended`` is called with it by the last thread.
    """

    fault: Fault | None = None
    cause: LoopRun | None = None  # the run whose abortion aborted this one
    reason = ""  # why it was aborted, in words

    def __init__(
        self,
        number: int,
        emitted: Emitted,
        locks: Sequence[threading.Lock],
        line: Line,
        ended: Callable[[Any], None],
    ):
        self.number = number
        self.emitted = emitted
        self.aborted: list[bool] = []
        self.left: set[str | None] = set()  # the threads that have left it
        self._locks = locks
        self._line = line
        self._ended = ended

    @property
    def stopped(self) -> bool:
        """Whether the run was aborted."""
        return bool(self.aborted)

    def enter(self) -> None:
        """Begin in a thread. Aborts the run if an earlier one broke the line."""
        broken = self._line.broken
        if broken is not None and broken.number < self.number and not self.stopped:
            self.cause = broken
            self.stop()

    def stop(self, fault: Fault | None = None) -> None:
        """Abort the run. Only the first fault counts; waiting threads are released."""
        with self._line.guard:
            if self.stopped:
                return
            self.fault = fault
            # First, because a thread that leaves this run goes on with the next one.
            self._line.break_at(self)
            self.aborted.append(True)
        for lock in self._locks:
            unlock(lock)

    def leave(self, thread: str | None) -> None:
        """Note that a thread has nothing left to do; the last one ends the run."""
        with self._line.guard:
            self.left.add(thread)
            if len(self.left) < max(1, len(self.emitted.threads)):
                return
        self._ended(self)


class LoopTeam(Protocol):
    """Executes the runs of a loop."""

    @property
    def threads(self) -> frozenset[int]:
        """The identities of its own threads."""

    def start(self, run: LoopRun, *others: Step) -> None:
        """Call ``others``, and queue a run for all threads; no interrupt comes in between."""

    def drive(self, run: LoopRun) -> None:
        """Execute steps until a run has ended, if this is the caller's task, and not threads'."""

    def places(self, run: LoopRun) -> Mapping[str | None, Place | None]:
        """Return where each thread is in a run; None if it has left it."""

    def close(self) -> None:
        """End all threads, after the runs that were started."""


def unlock(lock: threading.Lock) -> None:
    """Release a lock, which may be released already, as those of an aborted run are."""
    try:  # noqa: SIM105 - each run comes here: ``suppress`` is slower
        lock.release()
    except RuntimeError:
        pass
