"""Execute the steps of one thread, and show how far it is.

Knows no team: whatever can be stopped is a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import length_hint
from typing import Protocol

from autosched.runtime.threads.straight_line import Straight
from autosched.runtime.threads.tapes import Call, Fault, Place, Step, Stretch, Tape, lock_awaited

__all__ = ["Progress", "Steps", "Stoppable", "drain", "straightened"]

_LONGEST = 50_000  # steps of a tape that are compiled, at some 10 microseconds each
Steps = Sequence[tuple[int, Step]]


class Stoppable(Protocol):
    """A run that steps belong to."""

    stopped: bool

    def stop(self, fault: Fault | None = None) -> None:
        """Abort the run."""


def drain(run: Stoppable, steps: Steps, progress: Progress) -> None:
    """Call steps one after another, until one raises or the run is aborted."""
    position = -1
    step: Step = _nothing
    try:
        for position, step in progress.of(steps):
            if run.stopped:
                return
            if not isinstance(step, Stretch):
                step()
                continue
            data = step.data
            calls = progress.within(step)
            for position, fn, target, first, second, dropped in calls:  # noqa: B007, PLW2901
                if run.stopped:
                    return
                data[target] = fn(data[first]) if second < 0 else fn(data[first], data[second])
                data[dropped] = None
    except BaseException as error:
        found = step.position(error) if isinstance(step, Straight) else position
        run.stop(Fault(found, error))


class Progress:
    """The position of a thread in its steps. The thread writes it, and others may read it.

    A list iterator knows how many items it has left. So the thread writes nothing at each step: it
    shows its iterators, of its steps and of the calls of the current stretch.
    """

    def __init__(self) -> None:
        self._all: Steps = ()
        self._left: Iterator[tuple[int, Step]] = iter(self._all)
        self._calls: tuple[Stretch, Iterator[Call]] | None = None

    def of(self, steps: Steps) -> Iterator[tuple[int, Step]]:
        """Return an iterator over steps, which are now those of the thread."""
        self._all = ()
        self._left = iter(steps)
        self._all = steps
        return self._left

    def within(self, stretch: Stretch) -> Iterator[Call]:
        """Return an iterator over the calls of a stretch, which is the current step."""
        calls = iter(stretch.calls)
        self._calls = stretch, calls
        return calls

    def clear(self) -> None:
        """Forget the steps, which keep tensors alive."""
        self._all = ()
        self._left = iter(self._all)
        self._calls = None

    def place(self) -> Place:
        """Return where the thread is now."""
        steps = self._all
        at = len(steps) - length_hint(self._left) - 1
        if at < 0:
            return Place(-1, "before")
        position, step = steps[at]
        inside = self._calls
        if inside is not None and inside[0] is step:
            begun = len(inside[0].calls) - length_hint(inside[1])
            position = inside[0].calls[max(begun - 1, 0)][0]
        return Place(position, "waiting" if lock_awaited(step) else "in")


def straightened(tape: Tape) -> Steps:
    """Return the calling thread's steps, compiled into one where that pays.

    Steps between which a run must be able to stop are not compiled.
    """
    steps = tape.steps.get(None, ())
    tape.runs += 1
    if not tape.quick or tape.runs == 1 or len(tape.steps) > 1 or len(steps) > _LONGEST:
        return steps
    if tape.straight is None:
        tape.straight = Straight(steps)
    return [(-1, tape.straight)]


def _nothing() -> None:
    pass
