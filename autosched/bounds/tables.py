"""Store graph, machine and costs as arrays for bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched.costs.costs import Costs
from autosched.graph.graph import Graph, Use
from autosched.machine.machine import Machine
from autosched.placement import Choices, choices, home

__all__ = ["Array", "Datum", "Edges", "Tables", "links", "ways"]

Array = NDArray[np.float64]
_NO_DATA = -1.0  # bytes of an edge without data


class Edges(NamedTuple):
    """Pairs of predecessor and successor, with the largest bytes of data between them, or -1."""

    task: NDArray[np.int64]
    other: NDArray[np.int64]
    nbytes: Array


class Datum(NamedTuple):
    """A version of a value: produced by task ``maker``, or on device ``home`` if that is -1."""

    nbytes: float
    maker: int
    home: int
    pageable: bool
    ends: dict[int, None]  # the tasks that read it
    back: int  # the device to which it must be copied back in the end, or -1


class Tables(NamedTuple):
    """Tasks and devices are numbers, in insertion order.

    Durations are infinite where impossible.
    """

    seconds: Array  # [task, device]
    streams: Array  # by device
    group: NDArray[np.int64]  # by task; those of one group share a device
    edges: Edges
    ready: Array  # [task, device]: when the sources that it reads can be there
    after: Array  # [task, device]: how long copying written inputs back takes
    latency: Array  # [source, destination]
    per_byte: Array
    data: Sequence[Datum]

    @classmethod
    def of(cls, graph: Graph, machine: Machine, costs: Costs) -> Tables:
        """Tabulate a graph. Raises ScheduleError for contradictory constraints."""
        allowed = choices(graph, machine)
        data = _data(graph, machine, costs)
        latency, per_byte = ways(machine)
        ready, after = _ends(len(graph), machine, data, latency, per_byte)
        return cls(
            seconds=_seconds(graph, machine, costs, allowed),
            streams=np.array([device.streams for device in machine.devices], float),
            group=np.array(allowed.group, np.int64),
            edges=_edges(graph, data),
            ready=ready,
            after=after,
            latency=latency,
            per_byte=per_byte,
            data=data,
        )


def ways(machine: Machine, pageable: bool = False) -> tuple[Array, Array]:
    """Return latency and seconds per byte from each device, or its pageable memory, to each.

    They are minimized separately over all routes, so no route is faster. Without a route, the
    latency is infinite and the seconds per byte are 0.
    """
    latency, per_byte = links(machine)
    for via in range(len(latency)):  # Floyd, CACM 5(6), 1962
        for table in (latency, per_byte):
            np.minimum(table, table[:, via, None] + table[via], out=table)
    if pageable:
        _, first = links(machine, pageable=True)
        np.fill_diagonal(first, math.inf)
        per_byte = np.min(
            first[:, :, None] + per_byte, axis=1
        )  # every route begins in pageable memory
        np.fill_diagonal(per_byte, 0.0)
    return latency, np.where(np.isinf(per_byte), 0.0, per_byte)


def links(machine: Machine, pageable: bool = False) -> tuple[Array, Array]:
    """Return latency and seconds per byte of links: 0 on one device, infinite without a link."""
    count = len(machine.devices)
    latency, per_byte = np.full((2, count, count), math.inf)
    for q, source in enumerate(machine.devices):
        for p, destination in enumerate(machine.devices):
            link = machine.link(source.name, destination.name)
            if link is not None:
                slow = pageable and source.kind == "cpu" != destination.kind
                rate = link.pageable_bytes_per_second if slow else None
                latency[q, p] = link.latency
                per_byte[q, p] = 1 / (rate or link.bytes_per_second)
    for table in (latency, per_byte):
        np.fill_diagonal(table, 0.0)
    return latency, per_byte


def _seconds(graph: Graph, machine: Machine, costs: Costs, allowed: Choices) -> Array:
    rows = np.array(
        [[costs.task_seconds(task, device) for device in machine.devices] for task in graph.tasks],
        float,
    )
    rows = rows.reshape(len(graph), len(machine.devices))
    number = {name: p for p, name in enumerate(machine.names)}
    for task, names in enumerate(allowed.devices):
        if len(names) < len(number):
            here = [number[name] for name in names]
            kept = rows[task, here]
            rows[task] = math.inf
            rows[task, here] = kept
    return rows


def _data(graph: Graph, machine: Machine, costs: Costs) -> list[Datum]:
    """Return the data that tasks read, and the data that are copied back to their home."""
    number = {name: p for p, name in enumerate(machine.names)}
    found: dict[tuple[int, int], Datum] = {}

    def datum(index: int, version: int, maker: int | None, back: int = -1) -> Datum:
        value = graph.values[index]
        where = number[home(graph, machine, value)] if maker is None else -1
        pageable = maker is None and value.name in costs.pageable
        made = Datum(
            costs.value_nbytes(value), -1 if maker is None else maker, where, pageable, {}, back
        )
        return found.setdefault((index, version), made)

    for value in graph.sources:
        if last := graph.last_version(value.index):
            datum(
                value.index,
                last,
                graph.maker(Use(value.index, last)),
                number[home(graph, machine, value)],
            )
    for task in graph.tasks:
        for use in graph.needs(task):
            key = use.value, use.version
            (found.get(key) or datum(*key, graph.maker(use))).ends[task.index] = None
    return list(found.values())


def _ends(
    count: int, machine: Machine, data: Sequence[Datum], latency: Array, per_byte: Array
) -> tuple[Array, Array]:
    """Return when sources can arrive at tasks, and how long copying written inputs back takes."""
    ready, after = np.zeros((2, count, len(machine.devices)))
    slow = ways(machine, pageable=True)[1] if any(datum.pageable for datum in data) else per_byte
    for datum in data:
        if datum.maker < 0:
            arrival = (
                latency[datum.home]
                + datum.nbytes * (slow if datum.pageable else per_byte)[datum.home]
            )
            for task in datum.ends:
                np.maximum(ready[task], arrival, out=ready[task])
        elif datum.back >= 0:
            return_trip = latency[:, datum.back] + datum.nbytes * per_byte[:, datum.back]
            np.maximum(after[datum.maker], return_trip, out=after[datum.maker])
    return ready, after


def _edges(graph: Graph, data: Sequence[Datum]) -> Edges:
    """Return pairs of predecessor and successor, without anti-dependencies.

    An in-place write need not wait for readers of copies on other devices.
    """
    nbytes = {
        (task.index, d.task): _NO_DATA
        for task in graph.tasks
        for d in task.dependencies
        if d.kind != "anti"
    }
    for task, maker, travels in _travels(data):
        nbytes[task, maker] = max(nbytes.get((task, maker), _NO_DATA), travels)
    ends = np.array(list(nbytes), np.int64).reshape(len(nbytes), 2)
    return Edges(ends[:, 0], ends[:, 1], np.fromiter(nbytes.values(), float, len(nbytes)))


def _travels(data: Sequence[Datum]) -> Iterator[tuple[int, int, float]]:
    for datum in data:
        if datum.maker >= 0:
            for task in datum.ends:
                yield task, datum.maker, datum.nbytes
