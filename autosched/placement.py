"""Placement: the device of each task, and the order in which tasks are issued. What a policy returns.

Holds no times and no streams. ``groups`` says which tasks must go together, ``check`` whether a placement may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autosched.errors import ScheduleError
from autosched.graph import Graph, Task, Value
from autosched.machine import Machine

__all__ = ["Placement", "check", "choices", "home"]


@dataclass(frozen=True)
class Placement:
    """Where each task runs (by name), and in which order tasks are issued.

    >>> Placement({"a": "cuda:0", "b": "cpu"}, ("a", "b")).device["b"]
    'cpu'
    """

    device: Mapping[str, str]
    order: tuple[str, ...]


def home(graph: Graph, machine: Machine, value: Value) -> str:
    """Return where an input or constant lives: its own device, or the host."""
    return value.home or machine.host


@dataclass(frozen=True)
class Choices:
    """Which devices each task may run on, and which tasks must share one.

    ``devices`` and ``group`` are by task index; tasks of one group run on one device and share their devices.
    """

    devices: Sequence[tuple[str, ...]]
    group: Sequence[int]


def choices(graph: Graph, machine: Machine) -> Choices:
    """Return where tasks may run: constraints, and what must stay together.

    A view lives where its base lives. Where a value that has views is written in place, its maker, all views and all
    writers stay on one device; so do those who write parts of a value by an index. Raises ScheduleError naming the task
    whose constraints contradict each other.
    """
    parent = list(range(len(graph.tasks)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    pins: list[tuple[int, str, str]] = [(t.index, t.device, f"task {t.name!r} on") for t in graph.tasks if t.device]
    for task in graph.tasks:
        for root in _bases(graph, task):
            if root.producer is None:
                pins.append(
                    (
                        task.index,
                        home(graph, machine, root),
                        f"{root.name!r}, which {task.name!r} shares memory with, lives on",
                    )
                )
            else:
                a, b = sorted((find(root.producer), find(task.index)))
                parent[b] = a
    writer: dict[int, int] = {}  # of memory that is written in parts
    for task in graph.tasks:
        for use in task.writes:
            if graph.in_parts(use.value):
                a, b = sorted((find(writer.setdefault(graph.values[use.value].root, task.index)), find(task.index)))
                parent[b] = a
    pinned: dict[int, tuple[str, str]] = {}
    for index, device, why in pins:
        machine.device(device)
        before = pinned.setdefault(find(index), (device, why))
        if before[0] != device:
            raise ScheduleError(
                f"these must share a device and cannot: {before[1]} {before[0]!r}, but {why} {device!r}"
            )
    group = [find(i) for i in range(len(graph.tasks))]
    return Choices([(pinned[g][0],) if g in pinned else machine.names for g in group], group)


def _bases(graph: Graph, task: Task) -> list[Value]:
    """Return the roots whose device this task must share."""
    roots: dict[int, None] = {}
    for use in task.writes:
        if len(graph.members(use.value)) > 1:
            roots[graph.values[use.value].root] = None
    for use in task.outputs:
        root = graph.values[use.value].root
        many = sum(graph.values[read.value].root == root for read in task.reads) > 1  # apart if copied: which is it?
        if root != use.value and (task.view or many or graph.last_version(root)):
            roots[root] = None
    return [graph.values[root] for root in roots]


def check(placement: Placement, graph: Graph, machine: Machine) -> None:
    """Raise ScheduleError if a placement leaves out a task, breaks a constraint, or orders against a dependency."""
    table, order = placement.device, placement.order
    if not isinstance(table, Mapping) or not isinstance(order, Sequence) or not all(isinstance(n, str) for n in order):
        raise ScheduleError(f"a placement is a table of devices by task, and a tuple of tasks, got {placement!r}")
    if len(placement.order) != len(graph.tasks) or len(set(placement.order)) != len(graph.tasks):
        raise ScheduleError(f"a placement orders {len(set(placement.order))} tasks, the graph has {len(graph.tasks)}")
    allowed = choices(graph, machine)
    position = {name: i for i, name in enumerate(placement.order)}
    chosen: dict[int, Task] = {}
    for task in graph.tasks:
        device = placement.device.get(task.name)
        if task.name not in position or device is None:
            raise ScheduleError(f"the placement leaves out task {task.name!r}")
        machine.device(device)
        first = chosen.setdefault(allowed.group[task.index], task)
        if device not in allowed.devices[task.index]:
            raise ScheduleError(
                f"task {task.name!r} is placed on {device!r} but must run on {allowed.devices[task.index][0]!r}"
            )
        if device != placement.device[first.name]:
            raise ScheduleError(
                f"task {task.name!r} is placed on {device!r} but shares memory with {first.name!r} "
                f"on {placement.device[first.name]!r}: a view lives where its base lives"
            )
        for dependency in task.dependencies:
            before = graph.tasks[dependency.task]
            if position.get(before.name, -1) > position[task.name]:
                raise ScheduleError(
                    f"the placement orders {task.name!r} before {before.name!r}, "
                    f"on which it depends ({dependency.kind})"
                )
