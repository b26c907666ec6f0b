"""Describe what a region does by a text that is valid in other processes."""

from __future__ import annotations

from typing import Any

from autosched.graph.composite import Composite
from autosched.graph.task import Here, Task
from autosched.graph.value import Value
from autosched.measurement.signatures import function_text, literal_text

__all__ = ["structure_of"]


def structure_of(composite: Composite) -> str | None:
    """Return the operators and constants of a merged task, and how values go between them.

    Values have numbers in place of names. The result is None if a function is not one of torch's,
    or a constant has no literal.

    >>> from autosched.graph.graph import Graph
    >>> graph = Graph()
    >>> x = graph.input("x")
    >>> y = (x + 1) * x
    >>> structure_of(Composite(graph.tasks, [x.index], [y.index]))
    '%0 -> %1 = _operator.add(%0, 1); %2 = _operator.mul(%1, %0) -> %2'
    """
    try:
        return _text(composite)
    except _UnnamedError:
        return None


class _UnnamedError(Exception):
    """Something has no text."""


def _text(composite: Composite) -> str:
    names = _Names()
    takes = [names.of(value) for value in composite.takes]
    calls = [names.call(task) for task in composite.tasks]
    gives = [names.of(value) for value in composite.gives]
    return " -> ".join([", ".join(takes), "; ".join(calls), ", ".join(gives)])


class _Names:
    """Numbers values in the order in which they appear."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def of(self, value: int) -> str:
        return self._known.setdefault(value, f"%{len(self._known)}")

    def call(self, task: Task) -> str:
        """Write a call."""
        whole = task.composite
        function = function_text(task.fn) if whole is None else f"[{_text(whole)}]"
        if function is None:
            raise _UnnamedError
        args = [self._argument(arg) for arg in task.args]
        args += [f"{key}={self._argument(arg)}" for key, arg in task.kwargs.items()]
        results = ", ".join(self.of(use.value) for use in task.outputs)
        return f"{results} = {function}({', '.join(args)})".lstrip(" =")

    def _argument(self, item: Any) -> str:
        if isinstance(item, Value):
            return self.of(item.index)
        if isinstance(item, Here):
            return "here"
        if isinstance(item, (tuple, list)):
            return f"({', '.join(map(self._argument, item))})"
        if isinstance(item, slice):
            return ":".join(map(self._argument, (item.start, item.stop, item.step)))
        text = literal_text(item)
        if text is None:
            raise _UnnamedError
        return text
