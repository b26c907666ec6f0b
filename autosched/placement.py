"""Define placements, the results of policies, and check them.

A placement has the device of each task, and the order in which tasks are issued. It holds no times
and no streams. ``choices`` returns which tasks must share a device, and ``check`` raises an error
if a placement breaks a constraint.

A placement also has the order of its copies, because copy streams are first in, first out: a plan
that gives only the devices of tasks does not determine when copies take place. These copies are
hints. Lowering skips copies that nothing needs, and never issues a copy before its value exists or
after its first reader. So a program is correct whatever copies a policy asks for; only unknown
names are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autosched._lib.allowed import is_whole
from autosched.errors import ScheduleError, listed, shown
from autosched.graph.constraints import bonds
from autosched.graph.flow import flow, rows_of
from autosched.graph.graph import Graph, Task, Value
from autosched.machine.machine import Machine

if TYPE_CHECKING:
    from autosched.problem import Problem


class Send(NamedTuple):
    """A copy of a version to a device, issued before a task.

    It is made from ``source``, if given, to which the version is copied first if it is not there.
    """

    value: str
    version: int
    device: str
    before: str
    source: str | None = None


@dataclass(frozen=True)
class Placement:
    """The device of each task (by name), and the order in which tasks are issued.

    ``copies`` are hints for the order of copies that queue for copy streams. Each is issued
    immediately before the task that it names, but never before its value exists or after its first
    reader. Copies that are not listed are issued as early as possible. ``bound`` is a lower bound
    on the makespan of all placements, in seconds, as far as the policy has proved one. ``streams``
    limits the compute streams of each device that lowering uses; None: all that it has.

    >>> Placement({"a": "cuda:0", "b": "cpu"}, ("a", "b")).device["b"]
    'cpu'
    """

    device: Mapping[str, str]
    order: tuple[str, ...]
    copies: tuple[Send, ...] = field(default=(), repr=False)
    bound: float = field(default=0.0, compare=False, repr=False)
    streams: int | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Choices:
    """The devices on which each task may run, and which tasks must share a device.

    ``devices`` and ``group`` are by task index. The tasks of one group run on one device.
    """

    devices: Sequence[tuple[str, ...]]
    group: Sequence[int]
    open: bool = False  # every task may run on every device, without constraints


def choices(problem: Problem, homes: Mapping[int, str]) -> Choices:
    """Return where tasks may run: constraints, and which tasks must share a device.

    ``homes`` has the devices of inputs and constants, by value, as far as they are chosen.

    A view is on the device of its base. If a value that has views is written in place, the task
    that made it (if any), all views and all writers share a device. So do tasks that write parts of
    a value by an index, and tasks that make or write values of one ``Graph.together``. What is read
    from a file is copied to where it is needed, so views and writers of it share a device with each
    other, and not with the task that reads it. No other task is on a storage device. Raises
    ScheduleError naming the task whose constraints contradict each other.
    """
    graph = problem.graph
    machine = problem.machine
    count = len(graph.tasks)
    several = len(set(machine.ranks.values())) > 1
    ordered = list(_ordered(graph)) if several else []
    if graph.is_plain and not ordered and not any(problem.bound):
        return Choices([machine.computing] * count, list(range(count)), open=not machine.storage)
    group = joined(count, _pairs(problem))
    pinned: dict[int, tuple[str, str, int]] = {}
    for index, device, why in _pins(problem, homes):
        machine.device(device)
        required, reason, first = pinned.setdefault(group[index], (device, why, index))
        if required != device:
            members = (task for task in graph.tasks if group[task.index] == group[index])
            tied = [bond for task in members for bond in bonds(task, problem.kept)]
            together = listed(graph.values[value].name for value in dict.fromkeys(chain(*tied)))
            raise ScheduleError(
                f"these must share a device and cannot: {reason} {required!r}, but {why} {device!r}"
                + (f"; {together} are kept together" if tied else "")
                + _writers_between(problem, first, index)
            )
    where: dict[int, tuple[str, ...]] = {g: (pin[0],) for g, pin in pinned.items()}
    if ordered:
        group, within = _in_ranks(graph, machine, ordered, group, where)
        where = {**within, **where}
    return Choices([where.get(g, machine.computing) for g in group], group)


def joined(count: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Return for each of so many numbers the least with which pairs connect it."""
    parent = list(range(count))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for one, other in pairs:
        a, b = sorted((find(one), find(other)))
        parent[b] = a
    return [find(i) for i in range(count)]


def _ordered(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield pairs of tasks (indices) that ``after=`` orders, or that share state."""
    first: dict[int, int] = {}  # by state, the first task that has it
    for task in graph.tasks:
        for before, kind in task.dependencies:
            if kind == "order":
                yield before, task.index
        for item in task.shared:
            yield first.setdefault(id(item), task.index), task.index


def _in_ranks(
    graph: Graph,
    machine: Machine,
    ordered: Sequence[tuple[int, int]],
    group: Sequence[int],
    pinned: Mapping[int, tuple[str, ...]],
) -> tuple[list[int], dict[int, tuple[str, ...]]]:
    """Keep tasks on one rank that ``after=`` or shared state orders.

    Return the groups, and the devices of some of them. If one of these tasks has to be on a device,
    the others must be on its rank; else all of them share a device.
    """
    whole = joined(len(group), ((group[one], group[other]) for one, other in ordered))
    ranks = machine.ranks
    first: dict[int, int] = {}
    for g, (device, *_) in pinned.items():
        other = first.setdefault(whole[g], g)
        if ranks[pinned[other][0]] != ranks[device]:
            raise ScheduleError(
                f"tasks {graph.tasks[other].name!r} and {graph.tasks[g].name!r} must be on one "
                f"rank, because of after= or of state that tasks share, and are constrained to "
                f"{pinned[other][0]!r} and {device!r}"
            )
    rank = {root: ranks[pinned[g][0]] for root, g in first.items()}
    held: dict[int, tuple[str, ...]] = {}
    for name, number in ranks.items():
        held[number] = (*held.get(number, ()), name)
    within = {g: held[rank[whole[g]]] for g in group if whole[g] in rank}
    return [g if whole[g] in rank else whole[g] for g in group], within


def _writers_between(problem: Problem, first: int, last: int) -> str:
    """Describe the in-place writes that connect two tasks (indices), along a shortest path."""
    import networkx

    ties: networkx.Graph[int] = networkx.Graph([*_pairs(problem), (first, first)])
    path = networkx.shortest_path(ties, first, last)
    writers = [task for task in map(problem.graph.tasks.__getitem__, path) if task.writes]
    if not writers:
        return ""
    names = ", ".join(f"{task.name!r} at {task.source}" for task in writers[:_MOST_WRITERS])
    return (
        f". What writes memory of tasks before it ties them: {names}; "
        "write out of place to leave them apart"
    )


_MOST_WRITERS = 3  # that are named


def _pairs(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield pairs of tasks (indices) that must share a device."""
    graph = problem.graph
    # The first task by root of shared memory, or by set of values kept together.
    first: dict[int | tuple[int, ...], int] = {}
    for task in graph.tasks:
        for root in _bases(graph, task):
            stored = root.producer is not None and graph.tasks[root.producer].reads_file
            if root.producer is not None and not stored:
                yield root.producer, task.index
            if stored or graph.last_version(root.index):
                yield first.setdefault(root.index, task.index), task.index
        for use in task.writes:
            if graph.in_parts(use.value):
                yield first.setdefault(graph.values[use.value].root, task.index), task.index
        for bond in bonds(task, problem.kept):
            yield first.setdefault(bond, task.index), task.index


def _pins(problem: Problem, homes: Mapping[int, str]) -> Iterator[tuple[int, str, str]]:
    """Yield tasks (indices) with a required device, that device, and the reason."""
    graph = problem.graph
    for task, device in zip(graph.tasks, problem.bound, strict=True):
        if device:
            yield task.index, device, f"task {task.name!r} on"
    for task in graph.tasks:
        for root in _bases(graph, task):
            if root.index in homes and not graph.last_version(root.index):
                why = f"{root.name!r}, which {task.name!r} shares memory with, lives on"
                yield task.index, homes[root.index], why


def _bases(graph: Graph, task: Task) -> Sequence[Value]:
    """Return the roots whose device this task must share."""
    values = graph.values
    views = [use for use in task.outputs if values[use.value].root != use.value]
    if not views and not task.writes:
        return ()
    roots: dict[int, None] = {}
    for use in task.writes:
        if len(graph.members(use.value)) > 1:
            roots[values[use.value].root] = None
    for use in views:
        root = values[use.value].root
        # With several reads of the root, the right copy is ambiguous.
        several = sum(values[read.value].root == root for read in task.reads) > 1
        if task.view or several or graph.last_version(root):
            roots[root] = None
    return [values[root] for root in roots]


def check(placement: Placement, problem: Problem) -> None:
    """Raise ScheduleError if a placement is invalid.

    It is invalid if it leaves out a task, breaks a constraint, orders tasks against a dependency,
    or has copies with unknown names. Raises MachineError for unknown devices.
    """
    graph = problem.graph
    machine = problem.machine
    table = placement.device
    order = placement.order
    is_order = isinstance(order, Sequence) and all(isinstance(name, str) for name in order)
    if not isinstance(table, Mapping) or not is_order:
        what = "a placement is a table of devices by task, and a tuple of tasks"
        raise ScheduleError(f"{what}, got {placement!r}")
    limit = placement.streams
    if limit is not None and (not is_whole(limit) or limit < 1):
        what = "streams of a placement are None or a whole number, 1 or more"
        raise ScheduleError(f"{what}, got {shown(limit)}")
    tasks = len(graph.tasks)
    if len(order) != tasks or len(set(order)) != tasks:
        raise ScheduleError(f"a placement orders {len(set(order))} tasks, the graph has {tasks}")
    allowed = problem.choices
    position = {name: i for i, name in enumerate(order)}
    at = [position.get(task.name, -1) for task in graph.tasks]
    flown = flow(graph)
    places = np.array(at, np.int64)
    against = bool((places[flown.depends] > places[rows_of(flown.depends_at)]).any())
    devices = list(map(table.get, order))
    known = set(map(type, devices)) <= {str} and set(devices) <= set(machine.names)
    if against or not known or not allowed.open or min(at, default=0) < 0:
        _check_tasks(table, graph, machine, allowed, at)
    _check_copies(placement.copies, graph, machine, position)


def _check_tasks(
    table: Mapping[str, str], graph: Graph, machine: Machine, allowed: Choices, at: Sequence[int]
) -> None:
    """Raise ScheduleError for the first task that breaks a rule; ``at`` has its position."""
    chosen: dict[int, Task] = {}
    parts = zip(graph.tasks, at, allowed.group, allowed.devices, strict=True)
    for task, position, group, possible in parts:
        device = table.get(task.name)
        if position < 0 or device is None:
            raise ScheduleError(f"the placement leaves out task {task.name!r}")
        if device not in possible:
            machine.device(device)
            raise ScheduleError(
                f"task {task.name!r} is placed on {device!r} but must run on {possible[0]!r}"
            )
        first = chosen.setdefault(group, task)
        if first is not task and device != table[first.name]:
            raise ScheduleError(
                f"task {task.name!r} is placed on {device!r} but must be with {first.name!r} on "
                f"{table[first.name]!r}: they share memory, or are kept together"
            )
        for before, kind in task.dependencies:
            if at[before] > position:
                raise ScheduleError(
                    f"the placement orders {task.name!r} before {graph.tasks[before].name!r}, "
                    f"on which it depends ({kind})"
                )


def _check_copies(
    copies: Sequence[Send], graph: Graph, machine: Machine, tasks: Mapping[str, int]
) -> None:
    """Raise ScheduleError for a malformed copy. Lowering ignores copies that nothing needs."""
    if not isinstance(copies, Sequence) or not all(isinstance(send, Send) for send in copies):
        raise ScheduleError(f"copies of a placement are a tuple of Send, got {shown(copies)}")
    for send in copies:
        if not isinstance(graph.names.get(send.value), Value):
            raise ScheduleError(
                f"the placement copies {send.value!r}, which is no value of graph {graph.name!r}"
            )
        if send.before not in tasks:
            raise ScheduleError(
                f"the placement copies {send.value!r} before {send.before!r}, which is no task"
            )
        machine.device(send.device)
        if send.source is not None:
            machine.device(send.source)
