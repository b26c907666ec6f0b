"""A team in one thread: an instruction at a time, of whichever thread it plays is chosen.

Knows no program and no device, as ``workers`` does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from autosched.workers import Fault, Late, Place, Step, Tape, lock_awaited

__all__ = ["Choose", "Interleaver"]

Choose = Callable[[list[str]], str]  # of the threads that could go on, the one that does


class Interleaver:
    """Runs tapes in the calling thread, an instruction at a time, of whichever thread ``choose`` picks.

    >>> tape, said = Tape(), []
    >>> lock = tape.lock()
    >>> tape.add("a", 0, lambda: said.append("first"), lock.release)
    >>> tape.add("b", 1, lock.acquire, lambda: said.append("second"))
    >>> Interleaver(max).run(tape), said
    (None, ['first', 'second'])
    """

    def __init__(self, choose: Choose):
        self.choose = choose
        self.stopped = False
        self.threads: frozenset[int] = frozenset()

    def settle(self, deadline: float | None = None) -> None:
        """Wait for nobody: there are no threads."""
        self.stopped = False

    def run(self, tape: Tape, deadline: float | None = None) -> Fault | Late | None:
        """Drain a tape; return the fault of the step that raised, or where all stood when it was late."""
        self.stopped = False
        try:
            end = self._interleave(tape, deadline)
            self.stopped = end is not None
            return end
        finally:
            for lock in tape.locks:
                lock.acquire(blocking=False)

    def _interleave(self, tape: Tape, deadline: float | None) -> Fault | Late | None:
        at = {name: 0 for name in tape.steps if name is not None}
        while ready := [name for name in at if _can_go_on(tape, name, at[name])]:
            if deadline is not None and time.perf_counter() > deadline:
                return Late({name: _place(tape, name, at[name]) for name in at})
            name = self.choose(ready)
            position, _ = tape.steps[name][at[name]]
            while _can_go_on(tape, name, at[name]) and tape.steps[name][at[name]][0] == position:
                try:
                    tape.steps[name][at[name]][1]()
                except BaseException as error:
                    return Fault(position, error)
                at[name] += 1
        return None

    def afterwards(self, step: Step) -> bool:
        """Call a step now."""
        step()
        return True

    def close(self) -> None:
        """End nothing: there are no threads."""


def _can_go_on(tape: Tape, name: str, at: int) -> bool:
    """Whether a thread has a next step that would not wait for another thread."""
    return at < len(tape.steps[name]) and not lock_awaited(tape.steps[name][at][1])


def _place(tape: Tape, name: str, at: int) -> Place | None:
    if at == len(tape.steps[name]):
        return None
    position, step = tape.steps[name][at]
    return Place(position, "waiting" if lock_awaited(step) else "before")
