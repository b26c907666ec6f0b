"""Rewrite a graph so that tasks are repeated, and what they make need not be kept until its last use.

The new graph has the tasks in an order of issue, and repetitions among them, ``mul.again``. Later
tasks read what was made last. A view is repeated where it is read, after the memory that it views.
Repeated are only tasks whose result is then the same, bit for bit: without effects, and before
anything that they read is written in place. A task that draws random numbers gets those of its
first run: the state of the generator is kept, and set while it is repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

from autosched._lib.tree import flatten
from autosched.errors import ScheduleError
from autosched.graph.effects import effects_of
from autosched.graph.graph import Graph, Task
from autosched.graph.including import Copying
from autosched.graph.recorder import Generator

AGAIN = ".again"


def rewritten(graph: Graph, order: Sequence[str]) -> Graph:
    """Return the graph with its tasks in an order, in which a name that comes again is repeated.

    Raises ScheduleError for tasks that are left out, or before what they depend on, and for
    repetitions that would have other results.

    >>> graph = Graph()
    >>> y = graph.input("x").abs()
    >>> graph.output(z=y.exp() * y)
    >>> print(rewritten(graph, ["abs", "exp", "abs", "mul"]))
    graph graph
      input x
      abs(x)
      exp(abs)
      abs.again(x)
      mul(exp, abs.again)
      output z = mul
    """
    names = list(dict.fromkeys(order))
    tasks = [graph.task(name) for name in names]
    if len(tasks) != len(graph):
        raise ScheduleError(f"the order has {len(tasks)} tasks, the graph has {len(graph)}")
    last = dict(zip(names, last_repeats(graph, tasks), strict=True))
    several = {name for name, count in Counter(order).items() if count > 1}
    functions: dict[str, _Repeatable] = {}
    copying = Copying(graph)
    stale: dict[int, Task] = {}  # by value: the task that views memory which was made again since
    added: set[int] = set()

    def add(task: Task, is_again: bool) -> None:
        for use in task.reads:
            if use.value in stale:
                add(stale[use.value], True)
        if task.random and task.name in several and task.fn is not None:
            first = functions.setdefault(task.name, _Repeatable(task.fn))
            task = replace(task, fn=first.again if is_again else first)
        copying.repeat(task, suffix=AGAIN if is_again else "")
        made = [use.value for use in task.outputs]
        if is_again:
            for member in (other for value in made for other in graph.members(value)):
                producer = graph.values[member].producer
                if producer not in (None, task.index) and graph.values[member].root in made:
                    stale[member] = graph.tasks[producer or 0]
        for value in made:
            stale.pop(value, None)
        added.add(task.index)

    for name in order:
        task = graph.task(name)
        if task.index in added and last[name] < len(added):
            raise ScheduleError(f"task {name!r} cannot be repeated there with the same result")
        if not added.issuperset(before.task for before in task.dependencies):
            raise ScheduleError(f"task {name!r} is ordered before a task that it depends on")
        add(task, task.index in added)
    for index in graph.outputs.values():
        if index in stale:
            add(stale[index], True)
    return copying.finish().snapshot()


def without_unread(graph: Graph, order: Sequence[str]) -> tuple[str, ...]:
    """Return an order without those runs of repeated tasks that nothing reads before the next one.

    Draws of random numbers keep their places.

    >>> graph = Graph()
    >>> y = graph.input("x").abs()
    >>> graph.output(z=graph.input("w").exp() * y)
    >>> without_unread(graph, ["abs", "exp", "abs", "mul"])
    ('exp', 'abs', 'mul')
    """
    values = graph.values
    left = Counter(order)
    read = {values[values[index].root].producer for index in graph.outputs.values()}
    found = []
    for name in reversed(order):
        task = graph.task(name)
        if left[name] == 1 or task.random or task.index in read:
            found.append(name)
            read.discard(task.index)
            read.update(values[values[use.value].root].producer for use in task.reads)
        else:
            left[name] -= 1
    return tuple(reversed(found))


def first_name(graph: Graph, name: str) -> str:
    """Return the task of a graph that a task of the rewritten one is, or repeats."""
    return name if name in graph.names else name.rpartition(AGAIN)[0]


def last_repeats(graph: Graph, tasks: Sequence[Task]) -> list[int]:
    """Return the last position among tasks before which each can be repeated; -1: it never can.

    ``tasks`` are all tasks of the graph, in an order of issue.
    """
    count = len(tasks)
    ordered = {d.task for task in tasks for d in task.dependencies if d.kind == "order"}
    written: dict[int, int] = {}  # root -> the next task that writes its memory
    found = [-1] * count
    for at in reversed(range(count)):
        task = tasks[at]
        roots = {graph.values[use.value].root for use in (*task.reads, *task.outputs)}
        if is_view(graph, task):
            found[at] = count
        elif _is_repeatable(graph, task, ordered):
            found[at] = min(written.get(root, count) for root in roots)
        written.update((graph.values[use.value].root, at) for use in task.changes)
    return found


def is_view(graph: Graph, task: Task) -> bool:
    """Whether a task only gives another view of some memory, and can be repeated with that.

    What may be a copy instead, as of ``reshape``, must not be repeated after a write.
    """
    values = graph.values
    roots = {values[use.value].root for use in (*task.reads, *task.outputs)}
    own = any(values[use.value].root == use.value for use in task.outputs)
    orders = any(before.kind == "order" for before in task.dependencies)
    effects = task.changes or task.random or task.shared or orders
    if len(roots) != 1 or not task.outputs or own or effects:
        return False
    return task.view or not any(map(graph.last_version, graph.members(task.outputs[0].value)))


def _is_repeatable(graph: Graph, task: Task, ordered: Container[int]) -> bool:
    """Whether a task has no effects, and is the only one to give access to the memory that it makes."""
    values = graph.values
    if task.changes or task.reads_file or not task.outputs:
        return False
    if task.random:
        if not _draws_as_torch(task):
            return False
    elif task.shared or task.index in ordered or any(d.kind == "order" for d in task.dependencies):
        return False
    elif not task.reads and task.fn and not effects_of(task.fn, task.args, task.kwargs).name:
        return False  # what it reads is not known, and may change
    return all(
        values[use.value].root == use.value
        and all(
            member == use.value or is_view(graph, graph.tasks[values[member].producer or 0])
            for member in graph.members(use.value)
        )
        for use in task.outputs
    )


def _draws_as_torch(task: Task) -> bool:
    """Whether a task draws from the generator of its argument's device alone."""
    if task.parts:
        return all(_draws_as_torch(part) for part in task.parts if part.random)
    if not all(isinstance(item, Generator) for item in task.shared):
        return False
    if task.fn is None or not task.reads or task.kwargs.get("generator") is not None:
        return False
    return effects_of(task.fn, task.args, task.kwargs).random


class _Repeatable:
    """A function that draws random numbers, and the generator's state before its last call.

    Runs that are in flight at a time draw one after another, so the state is that of the same run.
    """

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "draw")
        self._state: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Draw, and remember from where."""
        self._state = _generator(args, kwargs).get_state()
        return self.fn(*args, **kwargs)

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """Draw the same numbers again, and leave the generator as it is."""
        generator = _generator(args, kwargs)
        now = generator.get_state()
        generator.set_state(self._state)
        try:
            return self.fn(*args, **kwargs)
        finally:
            generator.set_state(now)


def _generator(args: Any, kwargs: Any) -> Any:
    """Return the random number generator of the device of the first tensor."""
    import torch

    devices = (leaf.device for leaf in flatten((args, kwargs)) if hasattr(leaf, "device"))
    device = next(devices, torch.device("cpu"))
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if getattr(module, "is_current_stream_capturing", bool)():
        raise RuntimeError(
            "a CUDA graph draws other numbers in each replay, and cannot repeat them"
        )
    return module.default_generators[device.index]
