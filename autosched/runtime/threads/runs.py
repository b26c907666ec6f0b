"""Runs of emitted functions: their states, what their threads do, and where these are.

``TABLE`` has the states of a run and what changes them; ``drawing`` draws it:

    queued     started -> running; raised, interrupted, stopped -> aborting; all left -> ended
    running    raised, interrupted, stopped -> aborting; all left -> ended
    aborting   let go -> abandoned; all left -> ended
    abandoned  all left -> ended
    ended

1. A thread *starts* a run when it comes to it in its queue, and *leaves* it when its function has
   returned or raised. A run has ended when all its threads have left it.
2. A run is *stopped* at its deadline, when its team is closed, and when an earlier run was aborted
   that leaves state for it. Each thread leaves a run that is aborted before its next task.
3. The first fault is what the caller gets. An interrupt replaces a fault: it is no consequence of
   it. All other faults behind an abortion are consequences: of a lock that was released, or of a
   run that has ended.
4. A caller *lets go* of a run that does not end: nobody waits for it. The last thread that leaves it
   tidies up, so what a late task returns goes nowhere.
5. A run belongs to the process that began it. A forked one has none of its threads, and forgets it.

Knows no program and no device: positions name instructions.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from autosched.codegen.threads import Emitted

_LONGEST_WAIT = 0.25  # seconds in which a signal may be overlooked

Step = Callable[[], Any]
State = Literal["queued", "running", "aborting", "abandoned", "ended"]
Event = Literal["started", "raised", "interrupted", "stopped", "let go", "all left"]

# What an event that is not here leaves a run in the state that it is in.
TABLE: Mapping[State, Mapping[Event, State]] = {
    "queued": {
        "started": "running",
        "raised": "aborting",
        "interrupted": "aborting",
        "stopped": "aborting",
        "all left": "ended",
    },
    "running": {
        "raised": "aborting",
        "interrupted": "aborting",
        "stopped": "aborting",
        "all left": "ended",
    },
    "aborting": {"let go": "abandoned", "all left": "ended"},
    "abandoned": {"all left": "ended"},
    "ended": {},
}


def drawing() -> str:
    """Return the table as text: a line for each state."""
    width = max(map(len, TABLE)) + 2
    lines = []
    for state, changes in TABLE.items():
        targets = dict.fromkeys(changes.values())
        arrows = [
            f"{', '.join(event for event, to in changes.items() if to == target)} -> {target}"
            for target in targets
        ]
        lines.append(f"{state:{width}}{'; '.join(arrows)}".rstrip())
    return "\n".join(lines)


class Fault(NamedTuple):
    """The instruction (its position) that raised, and the exception."""

    position: int
    error: BaseException


class Place(NamedTuple):
    """The position of a thread: it is in this instruction, waiting there for another, or before it.

    Position -1 is before the first one; a thread that has ended has no place.
    """

    position: int
    how: Literal["in", "waiting", "before"] = "in"


class Late(NamedTuple):
    """A run that has not ended in time: the place of each thread, None if it has ended.

    ``elsewhere`` are lines about other processes.
    """

    places: Mapping[str | None, Place | None]
    elsewhere: str = ""


class Flag:
    """As ``threading.Event``, which is written in Python, and so is not safe from interrupts."""

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let all waiting threads go on."""
        self.is_set = True
        unlock(self._lock)

    def wait(self, seconds: float) -> bool:
        """Wait; return whether it is set. Others that wait get the lock in turn."""
        if self._lock.acquire(timeout=seconds):
            unlock(self._lock)
        return self.is_set


class Loop:
    """The runs of a loop, in order.

    If runs ``carry`` state to later ones, a run that is aborted breaks the loop: later runs that
    were started before it goes on are aborted, too.
    """

    def __init__(self, carries: bool):
        self.guard = threading.RLock()  # garbage collection may stop a run in a thread that has it
        self.broken: Run | None = None
        self._carries = carries

    def break_at(self, run: Run) -> None:
        """Note that a run was aborted."""
        if self._carries and (self.broken is None or run.number < self.broken.number):
            self.broken = run

    def go_on(self) -> None:
        """Go on after all runs have ended."""
        self.broken = None


class Run:
    """One run of emitted functions.

    ``locks`` are those that its threads wait for; ``ended`` is called with it by the last thread.
    """

    fault: Fault | None = None
    cause: Run | None = None  # the run whose abortion aborted this one
    reason = ""  # why it was aborted, in words
    tell: Callable[[Fault | None], object] | None = None  # is called when it is aborted
    _late: Step | None = None  # what the thread that leaves it last calls

    def __init__(
        self,
        number: int,
        emitted: Emitted,
        locks: Sequence[threading.Lock],
        loop: Loop,
        ended: Callable[[Any], None] | None = None,
    ):
        self.number = number
        self.state: State = "queued"
        self.emitted = emitted
        self.aborted: list[bool] = []  # has an item when it was: functions look at it
        self.begun: list[bool] = []  # has an item when threads have it in their queues
        self.left: set[str | None] = set()  # the threads that have left it
        self._locks = locks
        self._loop = loop
        self._ended = ended
        self._over = Flag()

    @property
    def has_ended(self) -> bool:
        """Whether no thread works on it."""
        return self.state == "ended" or not self.begun or not self.emitted.threads

    @property
    def is_interrupted(self) -> bool:
        """Whether a thread raised what is no task's fault, and the caller does not wait for."""
        return self.fault is not None and not isinstance(self.fault.error, Exception)

    def enter(self) -> None:
        """Begin in a thread. Aborts the run if an earlier one broke the loop."""
        with self._loop.guard:
            self._go("started")
        broken = self._loop.broken
        if broken is not None and broken.number < self.number and not self.aborted:
            self.cause = broken
            self.stop()

    def _go(self, event: Event) -> bool:
        """Change the state; return whether an event did. The guard is held."""
        before = self.state
        self.state = TABLE[before].get(event, before)
        return self.state != before

    def execute(self, thread: str | None) -> None:
        """Execute a thread's function in this thread, until it raises or the run is aborted."""
        try:
            for part in self.emitted.threads.get(thread, ()):
                part(self.aborted)
        except BaseException as error:
            self.stop(Fault(self.emitted.fault(error), error))

    def stop(self, fault: Fault | None = None) -> None:
        """Abort the run; waiting threads are released."""
        is_task = fault is not None and isinstance(fault.error, Exception)
        event: Event = "stopped" if fault is None else "raised" if is_task else "interrupted"
        with self._loop.guard:
            is_first = self._go(event)
            replaces = event == "interrupted" and self.fault is not None
            if is_first or (replaces and not self.is_interrupted):
                self.fault = fault
            if not is_first:
                return
            # Before, because a thread that leaves this run goes on with the next one.
            self._loop.break_at(self)
            self.aborted.append(True)
        for lock in self._locks:
            unlock(lock)
        if self.tell is not None:
            self.tell(fault)

    def let_go(self) -> None:
        """Note that nobody waits for its end."""
        with self._loop.guard:
            self._go("let go")

    def leave(self, thread: str | None) -> None:
        """Note that a thread has nothing left to do; the last one ends the run.

        Where an interrupt has come in between, the next call goes on.
        """
        with self._loop.guard:
            self.left.add(thread)
            if self.emitted.threads.keys() - self.left or self.state == "ended":
                return
            late, self._late = self._late, None
            if late is None:
                self._go("all left")
        if late is not None:  # it may take long
            self.lock_again()
            with contextlib.suppress(Exception):
                late()
            with self._loop.guard:
                self._go("all left")
        if self._ended is not None:
            self._ended(self)
        self._over.set()

    def afterwards(self, step: Step) -> bool:
        """Call a step when no thread works on it: now (True), or in the thread that leaves it last."""
        with self._loop.guard:
            if not self.has_ended:
                self._late = step
                return False
        self.lock_again()
        step()
        return True

    def lock_again(self) -> None:
        """Lock all locks that the abortion released, as they are before a run."""
        for lock in self._locks if self.aborted else ():
            lock.acquire(blocking=False)

    def wait(self, deadline: float | None) -> bool:
        """Wait until it has ended; return whether that was in time.

        A signal that comes just before a wait does not end it, so no wait is long.
        """
        while not self.has_ended:
            left = _LONGEST_WAIT
            if deadline is not None:
                left = min(max(0.0, deadline - time.perf_counter()), left)
            if not self._over.wait(left) and left < _LONGEST_WAIT:
                return self.has_ended
        return True

    def place(self, name: str | None, thread: threading.Thread) -> Place | None:
        """Return where a thread is; None if it has left."""
        if name in self.left:
            return None
        line = self.emitted.module.line(sys._current_frames().get(thread.ident or 0))
        return Place(-1, "before") if line is None else Place(line.position, line.how)


def unlock(lock: threading.Lock) -> None:
    """Release a lock, which may be released already, as those of an aborted run are."""
    try:  # noqa: SIM105 - each run comes here: ``suppress`` is slower
        lock.release()
    except RuntimeError:
        pass
