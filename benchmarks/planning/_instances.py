"""Instances: tasks, devices and edges as plain numbers, as papers give them; what is asked of a planner, and the check.

Knows nothing of where instances come from (``_graphs.py``), nor of any planner but autosched.
"""

from __future__ import annotations

import graphlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import autosched as asc

Edge = tuple[int, int, float]


class Placed(NamedTuple):
    """Where and when a task runs, by whomever it was planned."""

    device: int
    start: float
    end: float


@dataclass(frozen=True)
class Instance:
    """A task graph on devices in the classic model: copies take time and occupy nothing.

    ``seconds[task][device]``; ``edges`` are (from, to, size). A copy between devices takes ``size`` seconds, times
    ``pace[source][destination]`` where there is a ``pace``, which is the same both ways. ``together`` lists tasks that
    must share a device. No schedule ends before ``bound``, and ``best`` is what some schedule reaches, where known;
    ``plan`` is one that does, and is checked.
    """

    name: str
    seconds: Sequence[Sequence[float]]
    edges: Sequence[Edge]
    bound: float = 0.0
    best: float = math.inf
    pace: Sequence[Sequence[float]] = ()
    together: Sequence[Sequence[int]] = ()
    names: Sequence[str] = ()  # of devices
    facts: Mapping[str, float] = field(
        default_factory=dict
    )  # what a family says of itself: ratio, devices, ...
    plan: Sequence[Placed] = ()

    def __post_init__(self) -> None:
        if self.plan and checked(self, self.plan) > self.best:
            raise ValueError(
                f"{self.name}: the plan that it comes with takes more than {self.best}"
            )

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def devices(self) -> int:
        return len(self.seconds[0])

    @property
    def device_names(self) -> Sequence[str]:
        return self.names or [f"cuda:{p}" for p in range(self.devices)]

    def copy_seconds(self, size: float, source: int, destination: int) -> float:
        """Return what a copy takes."""
        if source == destination:
            return 0.0
        return size * self.pace[source][destination] if self.pace else size

    def machine(self, contention: bool = False) -> asc.Machine:
        """Return the devices; a byte takes a second of pace 1."""
        names = self.device_names
        links = [
            asc.Link(names[q], names[p], 1 / (self.pace[q][p] if self.pace else 1.0))
            for q in range(self.devices)
            for p in range(q)
        ]
        return asc.Machine(
            [asc.Device(name) for name in names], links, contention=contention, imagined=True
        )

    def graph(self, one_value: bool = False) -> asc.Graph:
        """Return the tasks. A task leaves a value for each size on its edges, or ``one_value``, of the largest.

        One for each size is the classic model, in which edges are independent; with ``one_value`` a datum is copied to
        a device once, as real ones are.
        """
        graph = asc.Graph(self.name)
        sizes: list[dict[float, None]] = [{} for _ in self.seconds]  # of what leaves a task
        entering: list[list[tuple[int, float]]] = [[] for _ in self.seconds]
        for u, v, size in self.edges:
            sizes[u][size] = None
            entering[v].append((u, size))
        made: list[dict[float, asc.Value]] = [{} for _ in self.seconds]
        for task in self.order():
            found = list(sizes[task]) or [0.0]
            values = self._add(
                graph, task, [made[u][size] for u, size in entering[task]], found, one_value
            )
            made[task] = dict(zip(found, values, strict=True))
            if not sizes[task]:
                graph.output(values[0])
        for tasks in self.together:
            graph.together(*(graph.value(f"t{task}.0") for task in tasks))
        return graph

    def _add(
        self,
        graph: asc.Graph,
        task: int,
        reads: Sequence[asc.Value],
        sizes: Sequence[float],
        one_value: bool,
    ) -> list[asc.Value]:
        """Add a task; return what it leaves for each size."""
        names = tuple(f"t{task}.{k}" for k in range(1 if one_value else len(sizes)))
        values = graph.add(
            _nothing, *reads, name=f"t{task}", outputs=names, seconds=self._seconds(task)
        )
        for value, size in zip(values, [max(sizes)] if one_value else sizes, strict=True):
            value.nbytes = size
        return list(values) * len(sizes) if one_value else list(values)

    def _seconds(self, task: int) -> float | dict[str, float]:
        row = self.seconds[task]
        return row[0] if min(row) == max(row) else dict(zip(self.device_names, row, strict=True))

    def order(self) -> list[int]:
        """Return the tasks in a topological order: that of their numbers, if it is one."""
        if all(u < v for u, v, _ in self.edges):
            return list(range(len(self)))
        sorter = graphlib.TopologicalSorter({task: [] for task in range(len(self))})
        for u, v, _ in self.edges:
            sorter.add(v, u)
        return list(sorter.static_order())


def _nothing(*_: object) -> None:
    """Stand for any task."""


def placed(instance: Instance, schedule: asc.Schedule) -> list[Placed]:
    """Read off a schedule of ours what ``checked`` wants: its prediction."""
    number = {name: p for p, name in enumerate(instance.device_names)}
    spans = {span.name: span for span in schedule.simulate().spans if span.kind == "run"}
    return [
        Placed(number[span.streams[0].device], span.start, span.end)
        for span in (spans[f"t{task}"] for task in range(len(instance)))
    ]


def checked(instance: Instance, plan: Sequence[Placed]) -> float:
    """Return the makespan of a plan, whoever made it. Raises ValueError where it breaks a rule of the classic model."""
    slack = 1e-6 * max(1.0, *(item.end for item in plan))
    for task, item in enumerate(plan):
        took = instance.seconds[task][item.device]
        if item.start < -slack or abs(item.end - item.start - took) > slack:
            raise ValueError(
                f"{instance.name}: task {task} takes {item.end - item.start}, not {took}"
            )
    for u, v, size in instance.edges:
        arrival = plan[u].end + instance.copy_seconds(size, plan[u].device, plan[v].device)
        if plan[v].start < arrival - slack:
            raise ValueError(
                f"{instance.name}: task {v} starts at {plan[v].start}, its input of {u} comes at {arrival}"
            )
    for one in instance.together:
        if len({plan[task].device for task in one}) > 1:
            raise ValueError(f"{instance.name}: tasks {one} do not share a device")
    for device in range(instance.devices):
        _check_apart(
            instance,
            [item for item in plan if item.device == device and item.end > item.start],
            slack,
        )
    return max(item.end for item in plan)


def _check_apart(instance: Instance, items: Iterable[Placed], slack: float) -> None:
    end = -math.inf
    for item in sorted(items, key=lambda item: (item.start, item.end)):
        if item.start < end - slack:
            raise ValueError(f"{instance.name}: two tasks at {item.start} on device {item.device}")
        end = max(end, item.end)
