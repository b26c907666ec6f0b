"""Run several calls as one task.

A merged task calls a ``Composite``. It knows the tasks that it was made from, with the values of
the graph that they came from, and nothing else of that graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autosched._lib.tree import flatten, transform
from autosched.graph.task import Here, Task
from autosched.graph.value import Value

__all__ = ["Composite"]

_Step = Callable[[list[Any]], None]
_Slots = dict["int | Here", int]  # by value, or by placeholder for the device


class Composite:
    """Call ``tasks`` in order, and return the results that are needed outside.

    ``takes`` and ``gives`` are the values (indices) of its arguments and of its results, in order.
    ``dead`` are by task the values that nothing needs afterwards; they are released immediately.
    ``heres`` are further arguments, after the values: placeholders for the device.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> x = graph.input("x")
    >>> y = -(x + 1)
    >>> Composite(graph.tasks, [x.index], [y.index])(1)
    -2
    """

    def __init__(self, tasks: Sequence[Task], takes: Sequence[int], gives: Sequence[int]):
        self.tasks = tuple(tasks)
        self.takes = tuple(takes)
        self.gives = tuple(gives)
        self.dead = _dead(self.tasks, self.gives)
        leaves = (leaf for task in tasks for leaf in flatten((task.args, task.kwargs)))
        self.heres = tuple(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Here)))
        given: list[int | Here] = [*self.takes, *self.heres]
        slots: _Slots = {value: slot for slot, value in enumerate(given)}
        for use in (use for task in tasks for use in task.outputs):
            slots[use.value] = len(slots)
        self._blank: list[Any] = [None] * (len(slots) - len(given))
        self._steps = [
            self._step(task, slots, dead) for task, dead in zip(tasks, self.dead, strict=True)
        ]
        self._given = [slots[value] for value in gives]

    def __call__(self, *args: Any) -> Any:
        """Call the tasks. An error that a call raises has a note that names its task."""
        data = [*args, *self._blank]
        for task, step in zip(self.tasks, self._steps, strict=True):
            try:
                step(data)
            except Exception as error:
                error.add_note(f"in {task.name!r}, a part of the task, added at {task.source}")
                raise
        found = [data[slot] for slot in self._given]
        return found[0] if len(found) == 1 else tuple(found)

    def __getstate__(self) -> Any:
        """Return the arguments, from which copies and pickles are made."""
        return self.tasks, self.takes, self.gives

    def __setstate__(self, state: Any) -> None:
        Composite.__init__(self, *state)

    def __repr__(self) -> str:
        return f"<Composite of {len(self.tasks)} tasks>"

    def _step(self, task: Task, slots: _Slots, dead: Sequence[int]) -> _Step:
        """Return a function that runs a task on numbered slots."""
        fn = task.fn
        drop = [slots[value] for value in dead]
        nested = any(
            _key(leaf) is not None
            for arg in task.args
            if _key(arg) is None
            for leaf in flatten(arg)
        )
        result = task.result
        several = isinstance(result, tuple) and all(isinstance(leaf, Value) for leaf in result)
        if fn is None or task.kwargs or nested or not (several or isinstance(result, Value)):
            return _general(task, slots, drop)
        gather = [
            self._constant(arg) if (key := _key(arg)) is None else slots[key] for arg in task.args
        ]
        if several:
            targets = [slots[leaf.index] for leaf in result]

            def unpacking(data: list[Any]) -> None:
                found = fn(*map(data.__getitem__, gather))
                if targets and (not isinstance(found, (tuple, list)) or len(found) != len(targets)):
                    list(task.results(found))  # raises an error about its shape
                for target, item in zip(targets, found, strict=True) if targets else ():
                    data[target] = item
                for slot in drop:
                    data[slot] = None

            return unpacking
        target = slots[result.index]

        def single(data: list[Any]) -> None:
            data[target] = fn(*map(data.__getitem__, gather))
            for slot in drop:
                data[slot] = None

        return single

    def _constant(self, item: Any) -> int:
        """Give an argument that is not a value a permanent slot of its own."""
        self._blank.append(item)
        return len(self.takes) + len(self.heres) + len(self._blank) - 1


def _key(leaf: Any) -> int | Here | None:
    return leaf.index if isinstance(leaf, Value) else leaf if isinstance(leaf, Here) else None


def _general(task: Task, slots: _Slots, drop: Sequence[int]) -> _Step:
    def step(data: list[Any]) -> None:
        args, kwargs = transform(
            lambda leaf: leaf if (key := _key(leaf)) is None else data[slots[key]],
            (task.args, task.kwargs),
        )
        assert task.fn is not None
        for value, item in task.results(task.fn(*args, **kwargs)):
            data[slots[value]] = item
        for slot in drop:
            data[slot] = None

    return step


def _dead(tasks: Sequence[Task], gives: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return by task the values made by these tasks that nothing needs afterwards."""
    made = {use.value for task in tasks for use in task.outputs}
    needed = set(gives)
    found: list[tuple[int, ...]] = []
    for task in reversed(tasks):
        here = dict.fromkeys(use.value for use in (*task.reads, *task.outputs) if use.value in made)
        found.append(tuple(value for value in here if value not in needed))
        needed.update(here)
    return tuple(reversed(found))
