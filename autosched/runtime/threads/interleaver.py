"""Simulate a team of threads in one thread, in a chosen interleaving.

Executes one instruction at a time. A chooser decides which of the simulated threads continues.
Knows no program and no device.
"""

from __future__ import annotations

from collections.abc import Callable

from autosched.runtime.threads.tapes import Fault, Late, Place, Step, Tape, lock_awaited
from autosched.runtime.threads.thread_team import ThreadTeam

__all__ = ["Choose", "Interleaver"]

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
