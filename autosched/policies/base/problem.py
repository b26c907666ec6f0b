"""Tabulate graph, machine and costs for policies.

Tasks, devices and data become numbers. The tables hold durations of single tasks and copies, and no
start times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.gc_pause import without_collecting
from autosched.costs.costs import Costs
from autosched.graph.flow import flow
from autosched.graph.graph import Dependency, Graph, Use
from autosched.machine.machine import Device, Machine
from autosched.placement import Placement, Send, choices, home

__all__ = ["Data", "Path", "Policy", "Problem"]

Policy = Callable[[Graph, Machine, Costs], Placement]


@dataclass(frozen=True)
class Data:
    """The data that tasks read. A datum is a version of a value.

    ``maker`` is the task that produces it, on the device of that task. If ``maker`` is -1, the
    datum is on device ``home`` from the beginning; its paths are those of row ``row``: that of its
    device, or that of pageable memory there.
    """

    names: Sequence[str]
    versions: Sequence[int]
    nbytes: Sequence[float]
    maker: Sequence[int]
    home: Sequence[int]
    row: Sequence[int]


class Path(NamedTuple):
    """The duration of copies between two devices: ``latency + nbytes / rate``.

    Infinite without a link.

    ``holds_out`` and ``holds_in``: whether a copy occupies the copy-out stream of the source, and
    the copy-in stream of the destination.
    """

    latency: float
    rate: float
    holds_out: bool
    holds_in: bool

    @classmethod
    def between(
        cls, machine: Machine, source: Device, destination: Device, pageable: bool = False
    ) -> Path:
        """Return the path from a device, or its pageable memory, to another.

        To itself it takes no time.
        """
        if source.name == destination.name:
            return cls(0.0, math.inf, False, False)
        link = machine.link(source.name, destination.name)
        latency, rate = (
            (link.latency, link.bytes_per_second) if link is not None else (math.inf, math.inf)
        )
        # A copy between a CPU and an accelerator occupies a stream of the accelerator alone.
        out = source.kind != "cpu"
        into = destination.kind != "cpu"
        if link is not None and pageable and into and not out:
            rate = link.pageable_bytes_per_second or rate
        # Converted to floats: NumPy makes objects of integers above 2**63, which no
        # kernel accepts.
        latency = float(latency)
        rate = float(rate)
        return cls(
            latency,
            rate,
            machine.contention and (out or not into),
            machine.contention and (into or not out),
        )

    def seconds(self, nbytes: float) -> float:
        """Return how long a copy takes."""
        return self.latency + nbytes / self.rate


@dataclass(frozen=True)
class Problem:
    """Tables of a graph on a machine; tasks, devices and data are numbers.

    >>> graph = Graph()
    >>> y = graph.add(abs, graph.input("x"), name="y", seconds={"cuda:0": 2.0})
    >>> problem = Problem.of(graph, Machine.emulated(gpus=1), Costs())
    >>> problem.seconds, problem.reads, problem.data.names
    ([[inf, 2.0]], [[0]], ['x'])
    """

    tasks: Sequence[str]
    devices: Sequence[str]
    streams: Sequence[int]  # compute streams, by device
    paths: Sequence[
        Sequence[Path]
    ]  # [source][destination]; then the rows of pageable memory of each source
    data: Data
    table: NDArray[np.float64]  # seconds, [task, device]
    allowed: Sequence[Sequence[str]]  # devices, by task
    group: Sequence[int]  # by task; those of one group share a device
    dependencies: Sequence[Sequence[Dependency]]  # by task
    others: Sequence[Sequence[int]]  # by task, the predecessors that produce nothing that it reads
    reads: Sequence[Sequence[int]]  # by task, the data that must be on its device
    returns: Sequence[
        tuple[int, int]
    ]  # (datum, device): an input that tasks write is copied back to its home

    @classmethod
    @without_collecting()
    def of(cls, graph: Graph, machine: Machine, costs: Costs) -> Problem:
        """Tabulate a graph on a machine. Raises ScheduleError for contradictory constraints."""
        allowed = choices(graph, machine)
        data, reads, returns = (_plain_data if graph.is_plain else _data)(graph, machine, costs)
        return cls(
            tasks=[task.name for task in graph.tasks],
            devices=machine.names,
            streams=[device.streams for device in machine.devices],
            paths=[
                [Path.between(machine, q, p, pageable) for p in machine.devices]
                for pageable in ((False, True) if costs.pageable else (False,))
                for q in machine.devices
            ],
            data=data,
            table=_seconds(graph, machine, costs),
            allowed=allowed.devices,
            group=allowed.group,
            dependencies=[task.dependencies for task in graph.tasks],
            others=_others(graph, reads, data.maker),
            reads=reads,
            returns=returns,
        )

    @cached_property
    def before(self) -> list[list[int]]:
        """The predecessors of each task."""
        return [[other for other, _ in dependencies] for dependencies in self.dependencies]

    @cached_property
    def seconds(self) -> list[list[float]]:
        """The durations as lists ``[task][device]``, which Python reads faster than arrays."""
        rows: list[list[float]] = self.table.tolist()
        return rows

    def placement(self, device: Any, order: Any, copies: tuple[Send, ...] = ()) -> Placement:
        """Return a placement by names, given ``device`` and ``order`` as numbers."""
        where = map(self.devices.__getitem__, np.asarray(device, np.int64).tolist())
        names = map(self.tasks.__getitem__, np.asarray(order, np.int64).tolist())
        return Placement(dict(zip(self.tasks, where, strict=True)), tuple(names), copies)


def _others(graph: Graph, reads: Sequence[Sequence[int]], maker: Sequence[int]) -> list[list[int]]:
    """Return the predecessors of each task that produce none of the data that it reads."""
    flown = flow(graph)
    if graph.is_plain and not len(flown.after):  # then all dependencies are for data
        return [[]] * len(reads)
    found = []
    for task, row in zip(graph.tasks, reads, strict=True):
        makers = [maker[datum] for datum in row]
        found.append([other for other, _ in task.dependencies if other not in makers])
    return found


def _seconds(graph: Graph, machine: Machine, costs: Costs) -> NDArray[np.float64]:
    """Return the duration of each task on each device."""
    rows = [costs.everywhere(task, machine.devices) for task in graph.tasks]
    table = np.empty((len(rows), len(machine.devices)))
    table[:] = np.array([row if isinstance(row, float) else 0.0 for row in rows])[:, np.newaxis]
    for task, row in enumerate(rows):
        if not isinstance(row, float):
            table[task] = row
    return table


def _data(
    graph: Graph, machine: Machine, costs: Costs
) -> tuple[Data, list[list[int]], list[tuple[int, int]]]:
    """Number the data that tasks read, and the data that are copied back to their home."""
    number = {name: p for p, name in enumerate(machine.names)}
    known: dict[Use, int] = {}
    reads = []
    for task in graph.tasks:
        row = []
        for use in task.reads if task.region is None else graph.needs(task):
            if use not in known:
                known[use] = len(known)
            row.append(known[use])
        reads.append(row)
    returned = [value for value in graph.sources if graph.last_version(value.index)]
    back = [Use(value.index, graph.last_version(value.index)) for value in returned]
    returns = [
        (known.setdefault(use, len(known)), number[home(graph, machine, value)])
        for use, value in zip(back, returned, strict=True)
    ]
    values = [graph.values[index] for index, _ in known]
    makers = [
        value.producer if not use[1] else graph.maker(use)
        for use, value in zip(known, values, strict=True)
    ]
    homes = [
        number[home(graph, machine, value)] if maker is None else -1
        for maker, value in zip(makers, values, strict=True)
    ]
    rows = [
        place + (len(number) if maker is None and value.name in costs.pageable else 0)
        for place, maker, value in zip(homes, makers, values, strict=True)
    ]
    data = Data(
        names=[value.name for value in values],
        versions=[version for _, version in known],
        nbytes=list(map(costs.value_nbytes, values)),
        maker=[-1 if maker is None else maker for maker in makers],
        home=homes,
        row=rows,
    )
    return data, reads, returns


def _plain_data(
    graph: Graph, machine: Machine, costs: Costs
) -> tuple[Data, list[list[int]], list[tuple[int, int]]]:
    """Return what ``_data`` returns, for a graph without in-place writes."""
    number = {name: p for p, name in enumerate(machine.names)}
    flown = flow(graph)
    known, first, datum = np.unique(flown.reads, return_index=True, return_inverse=True)
    by_first = np.argsort(first)
    rank = np.argsort(by_first)
    values = [graph.values[index] for index in known[by_first].tolist()]
    homes = [
        number[home(graph, machine, value)] if value.producer is None else -1 for value in values
    ]
    rows = homes
    if costs.pageable:
        slow = [
            len(number) if value.producer is None and value.name in costs.pageable else 0
            for value in values
        ]
        rows = [place + more for place, more in zip(homes, slow, strict=True)]
    data = Data(
        names=[value.name for value in values],
        versions=[0] * len(values),
        nbytes=list(map(costs.value_nbytes, values)),
        maker=[-1 if value.producer is None else value.producer for value in values],
        home=homes,
        row=rows,
    )
    reads = rank[datum.reshape(-1)].tolist()
    at = flown.reads_at.tolist()
    return data, [reads[a:b] for a, b in pairwise(at)], []
