"""Compile the steps of one thread into a function without loops.

Used from the second run on, for lists of steps that one thread executes alone and that issue work
to devices: there the host's work is to issue, and a loop over steps costs as much again as the
calls in it. CPU tasks are not compiled in this way, because a run that is aborted must be able to
stop between two of them. Knows no program: each line is mapped to its step, which names a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from operator import setitem
from typing import Any

from autosched.runtime.threads.tapes import Step, Stretch

__all__ = ["Straight"]

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
