"""Learning: costs from what was measured, on top of what was known before.

Reads a timeline, a graph, a machine and costs; runs nothing and plans nothing. Seconds of copies are no costs: those
are rates of the machine's links.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

from autosched.costs import Costs
from autosched.graph import Graph, Task
from autosched.machine import Device, Machine
from autosched.timeline import Timeline

__all__ = ["learn"]


def learn(timeline: Timeline, graph: Graph, machine: Machine, costs: Costs) -> Costs:
    """Return costs with the measured seconds of tasks, medians over runs, and the bytes of values that were copied.

    A task takes on a device like that where it ran what it took there. On any other it takes what was known, times how
    much longer than known it took where it ran, so that what was known of speeds stays; what was measured, where
    nothing was known. Where it cannot run it still cannot, and views stay free. A reading that is no time, or 0, is not
    believed. Raises GraphError and MachineError for a timeline of another graph or machine.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=asc.Costs.table({"add": 1.0}))
    >>> learn(schedule.simulate(), graph, schedule.machine, asc.Costs()).seconds
    {'add': 1.0}
    """
    runs = timeline.runs or (timeline,)
    device: dict[str, str] = {}
    seconds: dict[str, list[float]] = {}
    nbytes: dict[str, float] = {}
    for span in (span for run in runs for span in run.spans):
        if span.kind == "run":
            device[span.name] = span.streams[0].device
            seconds.setdefault(span.name, []).append(span.seconds)
        elif 0 < span.nbytes < math.inf:
            nbytes[span.name] = max(nbytes.get(span.name, 0.0), float(span.nbytes))
    learnt: dict[str, float | dict[str, float]] = {}
    for name, readings in seconds.items():
        task = graph.task(name)
        believed = [reading for reading in readings if 0 < reading < math.inf]
        if believed and not task.view:
            learnt[name] = _everywhere(task, machine.device(device[name]), statistics.median(believed), machine, costs)
    return costs.override(learnt, nbytes)


def _everywhere(
    task: Task, device: Device, measured: float, machine: Machine, costs: Costs
) -> float | dict[str, float]:
    """Return the seconds of a task on each device, or one number where that is the same on all of them."""
    table = dict(_by_device(task, device, measured, machine, costs))
    return measured if set(table.values()) == {measured} else table


def _by_device(
    task: Task, device: Device, measured: float, machine: Machine, costs: Costs
) -> Iterator[tuple[str, float]]:
    known = costs.task_seconds(task, device)
    for other in machine.devices:
        there = costs.task_seconds(task, other)
        if other.name == device.name or (_alike(device, other) and not math.isinf(there)):
            yield other.name, measured
        elif math.isinf(there):
            yield other.name, math.inf
        else:
            # The quotient first: it may be out of a float's range, and then nothing is known of speeds.
            scaled = measured * (there / known) if 0 < known < math.inf else 0.0
            yield other.name, scaled if 0 < scaled < math.inf else measured


def _alike(one: Device, other: Device) -> bool:
    return replace(one, name=other.name, physical=other.physical) == other
