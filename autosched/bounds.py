"""Lower bounds: seconds that no schedule of a graph on a machine can beat, whatever its policy.

Knows no placement and no program. Bounds hold up to the rounding of floating point sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import product
from operator import add
from typing import NamedTuple

from autosched.collecting import without_collecting
from autosched.costs import Costs
from autosched.graph import Graph
from autosched.machine import Machine
from autosched.placement import choices, home

__all__ = ["bounds"]

_Table = Sequence[Sequence[float]]  # [task][device], or [destination][source]
_Edges = dict[int, float | None]  # tasks next to this one, and the most bytes that travel; None where nothing does


@without_collecting()
def bounds(graph: Graph, machine: Machine, costs: Costs) -> dict[str, float]:
    """Return named lower bounds on the makespan, in seconds; infinity where a task can run nowhere.

    * ``critical_path``: the longest chain of tasks and of copies that no choice of devices avoids.
    * ``work``: what compute streams need for the cheapest seconds of their tasks when they are never idle.
    * ``copies``: what constraints force through one copy stream; 0 without contention.

    >>> graph = Graph()
    >>> y = graph.add(abs, graph.add(abs, graph.input("x"), seconds=1.0), seconds=2.0)
    >>> bounds(graph, Machine.emulated(gpus=1), Costs())
    {'critical_path': 3.0, 'work': 1.5, 'copies': 0.0}
    """
    allowed = choices(graph, machine)
    seconds = [
        [costs.task_seconds(task, device) if device.name in names else math.inf for device in machine.devices]
        for task, names in zip(graph.tasks, allowed.devices, strict=True)
    ]
    reads = _reads(graph, machine, costs)
    return {
        "critical_path": _critical_path(graph, machine, seconds, reads, allowed.group),
        "work": _work(machine, seconds),
        "copies": _copies(machine, seconds, reads) if machine.contention else 0.0,
    }


class _Read(NamedTuple):
    """A task needs a value in one version, which ``maker`` leaves on its device, or which lives on device ``home``."""

    task: int
    value: int
    version: int
    maker: int | None
    home: int
    nbytes: float


def _reads(graph: Graph, machine: Machine, costs: Costs) -> list[_Read]:
    """Return what tasks read, in insertion order."""
    number = {name: p for p, name in enumerate(machine.names)}
    found = []
    for task in graph.tasks:
        for use in graph.needs(task):
            value, maker = graph.values[use.value], graph.maker(use)
            where = number[home(graph, machine, value)] if maker is None else -1
            found.append(_Read(task.index, *use, maker, where, costs.value_nbytes(value)))
    return found


def _critical_path(
    graph: Graph, machine: Machine, seconds: _Table, reads: Sequence[_Read], group: Sequence[int]
) -> float:
    """Bound the makespan by chains: of all tasks, on its best device, the longest path to it and from it.

    A task on device p starts after each task before it has ended on some device q, and after each single datum has
    come from q to p; the cheapest q bounds both. An in-place write need not wait for readers of copies elsewhere, so
    anti dependencies do not count. Copies only wait longer under contention, and never leave earlier.
    Source: the optimistic cost table of Arabnejad, Barbosa, IEEE TPDS 25(3), 2014, from both ends.
    """
    tasks, devices = range(len(graph.tasks)), range(len(machine.devices))
    copy_seconds = cache(partial(_copy_seconds, machine))
    before: list[_Edges] = [{d.task: None for d in task.dependencies if d.kind != "anti"} for task in graph.tasks]
    ready = [[0.0 for _ in devices] for _ in tasks]
    for read in reads:
        if read.maker is None:
            arrival = [row[read.home] for row in copy_seconds(read.nbytes)]
            ready[read.task] = list(map(max, ready[read.task], arrival))
        else:
            before[read.task][read.maker] = max(read.nbytes, before[read.task][read.maker] or 0.0)
    after: list[_Edges] = [{} for _ in tasks]
    for task in tasks:
        for other, nbytes in before[task].items():
            after[other][task] = nbytes
    head = _longest(tasks, before, ready, seconds, group, copy_seconds)
    tail = _longest(reversed(tasks), after, [[0.0 for _ in devices]] * len(tasks), seconds, group, copy_seconds)
    through = (
        min(h + t - s if s < math.inf else math.inf for h, t, s in zip(*rows, strict=True))
        for rows in zip(head, tail, seconds, strict=True)
    )
    return max(through, default=0.0)


def _copy_seconds(machine: Machine, nbytes: float) -> _Table:
    """Return the seconds from device q to device p as ``[p][q]``, where no link joins them by way of others."""
    direct = [[machine.copy_seconds(q, p, nbytes) for q in machine.names] for p in machine.names]
    if all(math.inf not in row for row in direct):
        return direct
    relayed = [row.copy() for row in direct]
    for via in range(len(direct)):  # Floyd, CACM 5(6), 1962
        for p, q in product(range(len(direct)), repeat=2):
            relayed[p][q] = min(relayed[p][q], relayed[p][via] + relayed[via][q])
    return [
        [d if d < math.inf else r for d, r in zip(*rows, strict=True)] for rows in zip(direct, relayed, strict=True)
    ]


def _longest(
    tasks: Iterable[int],
    edges: Sequence[_Edges],
    ready: _Table,
    seconds: _Table,
    group: Sequence[int],
    copy_seconds: Callable[[float], _Table],
) -> _Table:
    """Return by task and device the seconds that pass at least until its end, or in reverse order from its start."""
    passed: list[list[float]] = [[] for _ in seconds]
    only = [_only(row) for row in seconds]

    @cache
    def arrival(other: int, nbytes: float | None) -> list[float]:
        if nbytes is None:
            return [min(passed[other])] * len(passed[other])
        if only[other] >= 0:  # most tasks of large machines: one column instead of all
            since = passed[other][only[other]]
            return [since + row[only[other]] for row in copy_seconds(nbytes)]
        return [min(map(add, passed[other], row)) for row in copy_seconds(nbytes)]

    for task in tasks:
        begin = ready[task]
        for other, nbytes in edges[task].items():
            together = group[other] == group[task]
            begin = list(map(max, begin, passed[other] if together else arrival(other, nbytes)))
        passed[task] = list(map(add, begin, seconds[task]))
    return passed


def _work(machine: Machine, seconds: _Table) -> float:
    """Bound the makespan by the load of streams: all of them, and those of each set of devices that tasks need.

    The streams of some devices together do at most their number of seconds of work per second, and must do, at its
    cheapest, each task that can run nowhere else.
    """
    load: dict[int, float] = {(1 << len(machine.devices)) - 1: 0.0}  # by set of devices, as bits
    for row in seconds:
        devices = sum(1 << p for p, number in enumerate(row) if number < math.inf)
        load[devices] = load.get(devices, 0.0) + min(row)
    return max(
        sum(load[inner] for inner in load if inner | devices == devices) / streams
        for devices in load
        if (streams := sum(device.streams for p, device in enumerate(machine.devices) if devices >> p & 1))
    )


def _copies(machine: Machine, seconds: _Table, reads: Iterable[_Read]) -> float:
    """Bound the makespan by the copies that constraints force through one copy stream, one after another.

    A copy is forced where maker and reader have one possible device each; between a CPU and an accelerator it holds
    a copy stream of the accelerator only.
    """
    only = [_only(row) for row in seconds]
    busy: dict[tuple[str, str], float] = {}
    seen: set[tuple[int, int, int]] = set()
    for read in reads:
        source, destination = read.home if read.maker is None else only[read.maker], only[read.task]
        copy = read.value, read.version, destination
        if -1 in (source, destination) or source == destination or copy in seen:
            continue
        seen.add(copy)
        out, into = machine.devices[source], machine.devices[destination]
        taken = machine.copy_seconds(out.name, into.name, read.nbytes)
        if math.isinf(taken):
            continue  # it may come by way of another device
        for device, stream in ((out, "copy-out"), (into, "copy-in")):
            if device.kind != "cpu" or out.kind == into.kind:
                busy[device.name, stream] = busy.get((device.name, stream), 0.0) + taken
    return max(busy.values(), default=0.0)


def _only(row: Sequence[float]) -> int:
    """Return the one device where a task's seconds are finite, or -1 if there are several."""
    devices = [p for p, number in enumerate(row) if number < math.inf]
    return devices[0] if len(devices) == 1 else -1
