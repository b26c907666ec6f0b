"""Simulate a team of threads in one thread, in a chosen interleaving.

Executes one instruction at a time. A chooser decides which of the simulated threads continues.
Knows no program and no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from autosched._lib.forks import rlock
from autosched.runtime.threads.loop_runs import LoopRun
from autosched.runtime.threads.loop_team import at_once
from autosched.runtime.threads.tapes import Fault, Late, Place, Step, Tape, lock_awaited
from autosched.runtime.threads.thread_team import ThreadTeam

__all__ = ["Choose", "Interleaver", "QueueInterleaver"]

Choose = Callable[[list[str]], str]  # of the threads that could go on, the one that does


class Interleaver(ThreadTeam):
    """Executes tapes in one thread, an instruction at a time, of whichever thread ``choose`` picks.

    >>> tape, said = Tape(), []
    >>> lock = tape.lock()
    >>> tape.add("a", 0, lambda: said.append("first"), lock.release)
    >>> tape.add("b", 1, lock.acquire, lambda: said.append("second"))
    >>> Interleaver(max).run(tape), said
    (None, ['first', 'second'])
    """

    def __init__(self, choose: Choose, prepare: Step | None = None):
        super().__init__([], prepare or _nothing)
        self.choose = choose
        self._simulated = _Run(Tape())

    def settle(self, deadline: float | None = None) -> Late | None:
        """Wait for a run that was abandoned, if any."""
        late = super().settle(deadline)
        return None if late is None else Late(self._simulated.places())

    def run(self, tape: Tape, deadline: float | None = None) -> Fault | Late | None:
        """Execute a tape.

        Return the fault of the step that raised, or all positions when it was late. With a deadline
        a spare thread executes it, so that a step that hangs does not block the caller.
        """
        self._simulated = run = _Run(tape)
        found: list[Fault] = []
        if deadline is None:
            self._interleave(run, found)
        else:
            whole = Tape()
            whole.add(None, 0, lambda: self._interleave(run, found))
            end = super().run(whole, deadline)
            if isinstance(end, Late):
                return Late(run.places())
            if end is not None:  # raised by ``choose``: no step is to blame
                raise end.error
        if not found:
            return None
        self.stopped = True
        return found[0]

    def _interleave(self, run: _Run, found: list[Fault]) -> None:
        """Execute steps until none can continue, one raises, or the run is aborted."""
        try:
            while (ready := run.ready()) and not self.stopped:
                position, error = run.advance(self.choose(ready))
                if error is not None:
                    found.append(Fault(position, error))
                    return
        finally:
            for lock in run.tape.locks:
                lock.acquire(blocking=False)


class _Run:
    """The positions of the simulated threads in a tape."""

    def __init__(self, tape: Tape):
        self.tape = tape
        self.at = {name: 0 for name in tape.steps if name is not None}
        self.inside: str | None = None  # the one that is in a step

    def ready(self) -> list[str]:
        """Return the threads that can continue."""
        return [name for name in self.at if _can_go_on(self.tape, name, self.at[name])]

    def advance(self, name: str) -> tuple[int, BaseException | None]:
        """Execute a thread's next instruction; return its position, and what it raised."""
        steps = self.tape.steps[name]
        position = steps[self.at[name]][0]
        self.inside = name
        while _can_go_on(self.tape, name, self.at[name]) and steps[self.at[name]][0] == position:
            try:
                steps[self.at[name]][1]()
            except BaseException as error:
                return position, error
            self.at[name] += 1
        self.inside = None
        return position, None

    def places(self) -> dict[str | None, Place | None]:
        """Return where each thread is."""
        return {name: self._place(name) for name in self.at}

    def _place(self, name: str) -> Place | None:
        at = self.at[name]
        if at == len(self.tape.steps[name]):
            return None
        position, step = self.tape.steps[name][at]
        if name == self.inside:
            return Place(position, "in")
        return Place(position, "waiting" if lock_awaited(step) else "before")


def _can_go_on(tape: Tape, name: str, at: int) -> bool:
    """Whether a thread has a next step that would not wait for another thread."""
    return at < len(tape.steps[name]) and not lock_awaited(tape.steps[name][at][1])


def _nothing() -> None:
    pass


# ---- runs in flight
#
# One thread executes an instruction at a time, of whichever simulated thread a chooser picks. Nothing
# is executed before somebody asks for the end of a run.


class QueueInterleaver:
    """Executes runs in the calling thread, an instruction at a time, of the thread chosen.

    >>> from autosched.runtime.threads.loop_runs import Line
    >>> from autosched.runtime.threads.tapes import Tape
    >>> tape, said, line = Tape(), [], Line(False)
    >>> tape.add("a", 0, partial(said.append, "a"))
    >>> tape.add("b", 1, partial(said.append, "b"))
    >>> runs = [LoopRun(i, tape, [], line, lambda run: None) for i in range(2)]
    >>> team = QueueInterleaver(["a", "b"], max)
    >>> team.start(runs[0]), team.start(runs[1]), team.drive(runs[0]), said
    (None, None, None, ['b', 'b', 'a'])
    """

    threads: frozenset[int] = frozenset()

    def __init__(self, names: Sequence[str | None], choose: Choose):
        self._choose = choose
        self._queues: dict[str, deque[LoopRun]] = {name or "": deque() for name in names}
        self._at = dict.fromkeys(self._queues, 0)  # the next step of each thread
        self._inside: str | None = None  # the thread that is in a step
        self._guard = rlock()

    def start(self, run: LoopRun, *others: Step) -> None:
        """Call ``others``, and queue a run for all threads; no interrupt comes in between."""
        at_once(*others, *(partial(queue.append, run) for queue in self._queues.values()))

    def drive(self, run: LoopRun) -> None:
        """Execute instructions until a run has ended."""
        with self._guard:
            while self._takes_part(run):
                self._advance(self._choose(self._ready()))

    def places(self, run: LoopRun) -> Mapping[str | None, Place | None]:
        """Return where each thread is in a run; None if it has left it."""
        return {name: self._place(name, run) for name in self._queues}

    def close(self) -> None:
        """Execute what is left: only runs that were aborted are left then."""
        with self._guard:
            for name, queue in self._queues.items():
                while queue:
                    self._at[name] = 0
                    queue.popleft().leave(name)

    def _takes_part(self, run: LoopRun) -> bool:
        return any(run in queue for queue in self._queues.values())

    def _ready(self) -> list[str]:
        """Return the threads that can continue."""
        return [name for name, queue in self._queues.items() if queue and self._can_go_on(name)]

    def _can_go_on(self, name: str) -> bool:
        """Whether a thread has a next step that would not wait for another thread."""
        run = self._queues[name][0]
        steps = run.tape.steps.get(name, ())
        at = self._at[name]
        if not at:
            run.enter()
        return run.stopped or at >= len(steps) or not lock_awaited(steps[at][1])

    def _advance(self, name: str) -> None:
        """Execute a thread's next instruction, and leave the run after the last one."""
        queue = self._queues[name]
        run = queue[0]
        steps = run.tape.steps.get(name, ())
        at = self._at[name]
        position = steps[at][0] if at < len(steps) else -1
        self._inside = name
        while (
            at < len(steps)
            and steps[at][0] == position
            and not run.stopped
            and self._can_go_on(name)
        ):
            try:
                steps[at][1]()
            except BaseException as error:
                run.stop(Fault(position, error))
            at += 1
            self._at[name] = at
        self._inside = None
        if run.stopped or at >= len(steps):
            self._at[name] = 0
            queue.popleft()
            run.leave(name)

    def _place(self, name: str, run: LoopRun) -> Place | None:
        if name in run.left:
            return None
        at = self._at[name]
        if not self._queues[name] or self._queues[name][0] is not run or not at:
            return Place(-1, "before")
        position, step = run.tape.steps[name][at]
        if name == self._inside:
            return Place(position, "in")
        return Place(position, "waiting" if lock_awaited(step) else "before")
