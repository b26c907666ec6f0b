"""Execute the steps of one thread, and show how far it is.

Knows no team: whatever can be stopped is a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from operator import length_hint, setitem
from typing import Any, Protocol

from autosched.runtime.threads.tapes import Call, Fault, Place, Step, Stretch, Tape, lock_awaited

__all__ = ["Progress", "Steps", "Stoppable", "drain", "straightened"]

# ---- the steps of one thread as a function without loops
#
# Used from the second run on, for lists of steps that one thread executes alone and that issue work
# to devices: there the host's work is to issue, and a loop over steps costs as much again as the
# calls in it. CPU tasks are not compiled in this way, because a run that is aborted must be able to
# stop between two of them. Knows no program: each line is mapped to its step, which names a fault.

_LINES = 2_000  # of one function: Python takes much memory to compile longer ones


class Straight:
    """Steps, compiled into one step.

    >>> data = [None, 2, 3, None]
    >>> Straight([(7, Stretch(data, [(7, pow, 3, 1, 2, 1)])), (8, partial(data.append, 4))])()
    >>> data
    [None, None, 3, 8, 4]
    """

    def __init__(self, steps: Sequence[tuple[int, Step]]) -> None:
        self._names: dict[int, str] = {}  # of objects, by identity
        self._means: dict[str, Any] = {}
        # Of each part, by the identity of its code: equal texts are equal code.
        self._positions: dict[int, list[int]] = {}
        self._parts = []
        lines = self._lines(steps)
        while part := list(islice(lines, _LINES)):
            given = ", ".join(f"{name}={name}" for name in self._means)
            text = "\n    ".join([f"def part({given}):", *(line for _, line in part)])
            exec(compile(text, "<steps of an autosched schedule>", "exec"), self._means)
            self._parts.append(self._means["part"])
            self._means = {}
            self._positions[id(self._parts[-1].__code__)] = [position for position, _ in part]

    def __call__(self) -> None:
        """Execute them all."""
        for part in self._parts:
            part()

    def position(self, error: BaseException) -> int:
        """Return the position of the step that raised an error; -1 if none did."""
        trace = error.__traceback__
        while trace is not None:
            positions = self._positions.get(id(trace.tb_frame.f_code))
            if positions is not None:
                return positions[max(trace.tb_lineno - 2, 0)]
            trace = trace.tb_next
        return -1

    def _lines(self, steps: Sequence[tuple[int, Step]]) -> Iterator[tuple[int, str]]:
        """Yield each line, with the position of its step."""
        for position, step in steps:
            if isinstance(step, Stretch):
                for at, fn, target, first, second, dropped in step.calls:
                    data = self._name(step.data)  # it may be the first use in this part
                    arguments = [f"{data}[{slot}]" for slot in (first, second) if slot >= 0]
                    drop = f"; {data}[{dropped}] = None" if dropped else ""
                    yield at, f"{data}[{target}] = {self._name(fn)}({', '.join(arguments)}){drop}"
            elif type(step) is partial and step.func is setitem:
                items, slot, item = step.args
                yield position, f"{self._name(items)}[{slot!r}] = {self._name(item)}"
            elif type(step) is partial and not step.keywords:
                yield position, f"{self._name(step.func)}({', '.join(map(self._name, step.args))})"
            else:
                yield position, f"{self._name(step)}()"

    def _name(self, item: Any) -> str:
        """Return the name of an object in the generated code.

        ``self._means`` keeps the object alive.
        """
        name = self._names.setdefault(id(item), f"_{len(self._names)}")
        self._means[name] = item
        return name


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
