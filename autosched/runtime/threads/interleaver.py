"""Simulate a team of threads in one thread, in a chosen interleaving.

Emitted functions are generators here, which yield before each instruction. A chooser decides which
of the simulated threads continues. Of runs in flight nothing is executed before somebody asks for
the end of one. Knows no program and no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

from autosched._lib.forks import rlock
from autosched.codegen.threads import Emitted
from autosched.runtime.threads.runs import Fault, Late, Loop, Place, Run, Step
from autosched.runtime.threads.team import ThreadTeam, at_once

_END: Any = object()  # of a generator
Choose = Callable[[list[str]], str]  # of the threads that could go on, the one that does


class Interleaver(ThreadTeam):
    """Executes functions in one thread, an instruction at a time, of whichever ``choose`` picks.

    >>> said, emitted = [], Emitted(yields="instruction")
    >>> lock = emitted.lock()
    >>> emitted.add("a", 0, partial(said.append, "first"), lock.release)
    >>> emitted.acquire("b", 1, lock)
    >>> emitted.add("b", 1, partial(said.append, "second"))
    >>> emitted.load()
    >>> Interleaver(["a", "b"], max, lambda: None).run(emitted), said
    (None, ['first', 'second'])
    """

    def __init__(self, names: Sequence[str | None], choose: Choose, prepare: Step):
        super().__init__([], prepare)
        self._choose = choose
        self._queues: dict[str, deque[Run]] = {name or "": deque() for name in names}
        self._simulated: dict[str, _Simulated] = {}  # in the first run of each queue
        self._driving = rlock()

    def settle(self, deadline: float | None = None) -> Late | None:
        """Wait for a call that was abandoned, if any."""
        self.clear()
        return super().settle(deadline)

    def _parts(self, emitted: Emitted) -> list[str | None]:
        return [None]  # the calling thread, or a spare one, executes all

    def _new_call(self, emitted: Emitted) -> Run:
        return _DrivenCall(emitted, self)

    def start(self, run: Run, *others: Step) -> None:
        """Call ``others``, and queue a run for all threads; no interrupt comes in between."""
        puts = (partial(queue.append, run) for queue in self._queues.values())
        at_once(partial(run.begun.append, True), *others, *puts)

    def drive(self, run: Run) -> None:
        """Execute instructions until a run has ended."""
        with self._driving:
            while not self.stopped:
                for name in self._queues:
                    self._enter(name)
                if not any(run in queue for queue in self._queues.values()):
                    return
                ready = [name for name, each in self._simulated.items() if each.can_go_on]
                name = self._choose(ready)
                self._simulated[name].advance()
                self._leave_if_ended(name)

    def places(self, run: Run) -> Mapping[str | None, Place | None]:
        """Return where each thread is in a run; None if it has left it."""
        return {
            name: self._place(name, run) for name in self._queues if name in run.emitted.threads
        }

    def close(self) -> None:
        """End the threads, and leave runs: only those that were aborted are left then."""
        super().close()
        self.clear()

    def clear(self, only: Run | None = None) -> None:
        """Leave all runs, or one, unless a thread is in one of their tasks, which goes on."""
        if not self._driving.acquire(blocking=False):
            return
        try:
            for name, queue in self._queues.items():
                while queue and only in (None, queue[0]):
                    self._simulated.pop(name, None)
                    queue.popleft().leave(name)
        finally:
            self._driving.release()

    def _enter(self, name: str) -> None:
        """Let a thread begin with the first run of its queue that has something for it."""
        queue = self._queues[name]
        while queue and name not in self._simulated:
            queue[0].enter()
            self._simulated[name] = _Simulated(queue[0], name)
            self._leave_if_ended(name)

    def _leave_if_ended(self, name: str) -> None:
        if self._simulated[name].has_ended:
            del self._simulated[name]
            self._queues[name].popleft().leave(name)

    def _place(self, name: str, run: Run) -> Place | None:
        if name in run.left:
            return None
        queue = self._queues[name]
        is_in = bool(queue) and queue[0] is run and name in self._simulated
        return self._simulated[name].place if is_in else Place(-1, "before")


class _DrivenCall(Run):
    """The run of a call, all of which one thread executes."""

    def __init__(self, emitted: Emitted, team: Interleaver):
        super().__init__(0, emitted, emitted.locks, Loop(False))
        self._team = team

    def execute(self, thread: str | None) -> None:
        """Execute all functions in this thread."""
        self._team.start(self)
        try:
            self._team.drive(self)
        except BaseException as error:  # of ``choose``, or an interrupt
            self.stop(Fault(-1, error))
        finally:
            self._team.clear(self)  # others may have begun the next one


class _Simulated:
    """A simulated thread in a run."""

    def __init__(self, run: Run, name: str):
        self._run = run
        self._parts = iter(run.emitted.threads.get(name, ()))
        self._steps: Any = iter(())  # the generator of the current part
        self._awaited: Lock | None = None
        self._inside = False
        self.has_ended = False
        self.advance()  # to the first instruction

    @property
    def can_go_on(self) -> bool:
        """Whether the next instruction would not wait for another thread."""
        waits = self._awaited is not None and self._awaited.locked()
        return not waits or bool(self._run.aborted)

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
            self._run.stop(Fault(self._run.emitted.fault(raised), raised))
        self._inside = False

    @property
    def place(self) -> Place:
        """Where the thread is."""
        line = self._run.emitted.module.line(getattr(self._steps, "gi_frame", None))
        if line is None:
            return Place(-1, "before")
        return Place(line.position, "in" if self._inside else line.how)


def _of_task(error: BaseException) -> BaseException:
    """Return the StopIteration that a generator replaced by a RuntimeError; any other as it is."""
    cause = error.__cause__
    is_replaced = isinstance(error, RuntimeError) and isinstance(cause, StopIteration)
    return cause if is_replaced and cause is not None else error
