"""Simulate a team of threads in one thread, in a chosen interleaving.

Emitted functions are generators here, which yield before each instruction. A chooser decides which
of the simulated threads continues. Knows no program and no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

from autosched._lib.forks import rlock
from autosched.codegen.threads import Emitted
from autosched.runtime.threads.loop_runs import LoopRun
from autosched.runtime.threads.loop_team import at_once
from autosched.runtime.threads.team import Fault, Late, Place, Step, Stoppable
from autosched.runtime.threads.thread_team import ThreadTeam

__all__ = ["Choose", "Interleaver", "QueueInterleaver"]

_END: Any = object()  # of a generator
Choose = Callable[[list[str]], str]  # of the threads that could go on, the one that does


class _Simulated:
    """A simulated thread in a run."""

    def __init__(self, emitted: Emitted, name: str | None, run: Stoppable):
        self._emitted = emitted
        self._run = run
        function = emitted.threads.get(name)
        self._parts = iter(() if function is None else function.parts)
        self._steps: Any = iter(())  # the generator of the current part
        self._awaited: Lock | None = None
        self._inside = False
        self.has_ended = False
        self.advance()  # to the first instruction

    @property
    def can_go_on(self) -> bool:
        """Whether there is a next instruction that would not wait for another thread."""
        waits = self._awaited is not None and self._awaited.locked()
        return not self.has_ended and (not waits or bool(self._run.aborted))

    def advance(self) -> None:
        """Execute the next instruction; abort the run if it raises."""
        self._inside = True
        try:
            while (awaited := next(self._steps, _END)) is _END:
                self._steps = next(self._parts)(self._run.aborted)
            self._awaited = awaited
        except StopIteration:
            self.has_ended = True
        except BaseException as error:
            self.has_ended = True
            raised = _of_task(error)
            self._run.stop(Fault(self._emitted.fault(raised), raised))
        self._inside = False

    @property
    def place(self) -> Place | None:
        """Where the thread is; None if it has ended."""
        if self.has_ended:
            return None
        line = self._emitted.place(getattr(self._steps, "gi_frame", None))
        if line is None:
            return Place(-1, "before")
        return Place(line.position, "in" if self._inside else line.how)


class Interleaver(ThreadTeam):
    """Executes functions in one thread, an instruction at a time, of whichever ``choose`` picks.

    >>> said, emitted = [], Emitted(yields="instruction")
    >>> lock = emitted.lock()
    >>> emitted.add("a", 0, partial(said.append, "first"), lock.release)
    >>> emitted.acquire("b", 1, lock)
    >>> emitted.add("b", 1, partial(said.append, "second"))
    >>> emitted.load()
    >>> Interleaver(max).run(emitted), said
    (None, ['first', 'second'])
    """

    def __init__(self, choose: Choose, prepare: Step | None = None):
        super().__init__([], prepare or _nothing)
        self.choose = choose
        self._simulated: dict[str | None, _Simulated] = {}

    def settle(self, deadline: float | None = None) -> Late | None:
        """Wait for a run that was abandoned, if any."""
        late = super().settle(deadline)
        return None if late is None else Late(self._simulated_places())

    def run(self, emitted: Emitted, deadline: float | None = None) -> Fault | Late | None:
        """Execute functions.

        Return the fault of the instruction that raised, or all positions when it was late. With a
        deadline a spare thread executes it, so that an instruction that hangs does not block the
        caller.
        """
        whole = Emitted(stops=False)
        whole.locks = emitted.locks
        whole.add(None, -1, partial(self._interleave, emitted))
        whole.load()
        end = super().run(whole, deadline)
        if isinstance(end, Late):
            return Late(self._simulated_places())
        if end is not None and end.position < 0:  # raised by ``choose``: no instruction is to blame
            raise end.error
        return end

    def _interleave(self, emitted: Emitted) -> None:
        """Execute instructions until none can continue, one raises, or the run is aborted."""
        simulated = {name: _Simulated(emitted, name, self) for name in emitted.threads}
        self._simulated = simulated
        try:
            while (ready := _ready(simulated)) and not self.stopped:
                simulated[self.choose(ready)].advance()
        finally:
            self._simulated = {}
            for lock in emitted.locks:
                lock.acquire(blocking=False)

    def _simulated_places(self) -> dict[str | None, Place | None]:
        return {name: each.place for name, each in self._simulated.items()}


def _of_task(error: BaseException) -> BaseException:
    """Return the StopIteration that a generator replaced by a RuntimeError; any other as it is."""
    cause = error.__cause__
    is_replaced = isinstance(error, RuntimeError) and isinstance(cause, StopIteration)
    return cause if is_replaced and cause is not None else error


def _ready(simulated: Mapping[str | None, _Simulated]) -> list[str]:
    return [name or "" for name, each in simulated.items() if each.can_go_on]


def _nothing() -> None:
    pass


# ---- runs in flight
#
# Nothing is executed before somebody asks for the end of a run.


class QueueInterleaver:
    """Executes runs in the calling thread, an instruction at a time, of the thread chosen.

    >>> from autosched.runtime.threads.loop_runs import Line
    >>> said, emitted, line = [], Emitted(yields="instruction"), Line(False)
    >>> emitted.add("a", 0, partial(said.append, "a"))
    >>> emitted.add("b", 1, partial(said.append, "b"))
    >>> emitted.load()
    >>> runs = [LoopRun(i, emitted, [], line, lambda run: None) for i in range(2)]
    >>> team = QueueInterleaver(["a", "b"], max)
    >>> team.start(runs[0]), team.start(runs[1]), team.drive(runs[0]), said
    (None, None, None, ['b', 'b', 'a'])
    """

    threads: frozenset[int] = frozenset()

    def __init__(self, names: Sequence[str | None], choose: Choose):
        self._choose = choose
        self._queues: dict[str, deque[LoopRun]] = {name or "": deque() for name in names}
        self._simulated: dict[str | None, _Simulated] = {}  # in the first run of each queue
        self._guard = rlock()

    def start(self, run: LoopRun, *others: Step) -> None:
        """Call ``others``, and queue a run for all threads; no interrupt comes in between."""
        at_once(*others, *(partial(queue.append, run) for queue in self._queues.values()))

    def drive(self, run: LoopRun) -> None:
        """Execute instructions until a run has ended."""
        with self._guard:
            while any(run in queue for queue in self._queues.values()):
                for name in self._queues:
                    self._enter(name)
                if any(run in queue for queue in self._queues.values()):
                    name = self._choose(_ready(self._simulated))
                    self._simulated[name].advance()
                    self._leave_if_ended(name)

    def places(self, run: LoopRun) -> Mapping[str | None, Place | None]:
        """Return where each thread is in a run; None if it has left it."""
        return {name: self._place(name, run) for name in self._queues}

    def close(self) -> None:
        """Execute what is left: only runs that were aborted are left then."""
        with self._guard:
            self._simulated.clear()
            for name, queue in self._queues.items():
                while queue:
                    queue.popleft().leave(name)

    def _enter(self, name: str) -> None:
        """Let a thread begin with the first run of its queue that has something for it."""
        queue = self._queues[name]
        while queue and name not in self._simulated:
            queue[0].enter()
            self._simulated[name] = _Simulated(queue[0].emitted, name, queue[0])
            self._leave_if_ended(name)

    def _leave_if_ended(self, name: str) -> None:
        if self._simulated[name].has_ended:
            del self._simulated[name]
            self._queues[name].popleft().leave(name)

    def _place(self, name: str, run: LoopRun) -> Place | None:
        if name in run.left:
            return None
        queue = self._queues[name]
        is_in = bool(queue) and queue[0] is run and name in self._simulated
        return self._simulated[name].place if is_in else Place(-1, "before")
