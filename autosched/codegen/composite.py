"""Run several calls as one task.

A merged task calls a ``Composite``. It knows the tasks that it was made from, with the values of
the graph that they came from, and nothing else of that graph. A program that contains it has the
statements of its parts in its own functions; called by itself, it is a function of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from autosched._lib.tree import flatten
from autosched.codegen.calls import Statements, numbered
from autosched.codegen.functions import Bound
from autosched.codegen.threads import Line, Module, add_notes
from autosched.graph.task import Here, Task


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

    def __call__(self, *args: Any) -> Any:
        """Call the tasks. An error that a call raises has a note that names its task."""
        module = self._module
        try:
            return module["composite"](*args)
        except Exception as error:
            within = next((line.within for line, _ in module.lines(error.__traceback__)), ())
            add_notes(error, within)
            raise

    @cached_property
    def _module(self) -> Module:
        variable = numbered()
        made = {value: variable("") for value in self.takes}
        here = {leaf: variable("") for leaf in self.heres}
        parameters = [*made.values(), *here.values()]
        bound = Bound()
        statements = Statements(bound, variable)
        texts = statements.parts(self, made, here.__getitem__)
        lines = [Line(text, -1, within=statements.within) for text in texts]
        lines.append(Line(f"return {', '.join(made[value] for value in self.gives) or '()'}", -1))
        module = Module("a merged task", bound.means)
        module.define("composite", parameters, lines)
        module.load()
        return module

    def __getstate__(self) -> Any:
        """Return the arguments, from which copies and pickles are made."""
        return self.tasks, self.takes, self.gives

    def __setstate__(self, state: Any) -> None:
        Composite.__init__(self, *state)

    def __repr__(self) -> str:
        return f"<Composite of {len(self.tasks)} tasks>"


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
