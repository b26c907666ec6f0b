"""Learn costs from measured timelines.

Learnt costs override earlier costs. This module reads timelines, a graph, a machine and costs. It
runs nothing and plans nothing. Seconds of copies are not costs; the rates of links belong to the
machine.

* A measurement on one device scales the earlier estimates of the other devices: an estimate may be
  wrong by a factor of ten and still be right about which device is faster. Readings of 0 or less
  are rejected.
* All profiles count, and none replaces another. Costs that are learnt from the latest profile
  alone forget the seconds of a task on other devices, and plans then oscillate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autosched.costs.costs import Costs
from autosched.graph.graph import Graph, Task
from autosched.machine.machine import Device, Machine
from autosched.timeline.timeline import Timeline


def learn(
    timeline: Timeline | Iterable[Timeline], graph: Graph, machine: Machine, costs: Costs
) -> Costs:
    """Return costs with measured seconds of tasks (medians over runs) and bytes of copied values.

    Several timelines, also of different placements, are combined: all readings count, so a
    measurement on one device still counts when the next plan moves the task to another. ``costs``
    are the earlier costs, before the first timeline. The seconds of a task on a device are, in this
    order:

    1. the measured seconds on this device;
    2. infinity, if the task cannot run there by ``costs``;
    3. the measured seconds on a device with the same rates;
    4. the earlier seconds, scaled by the ratio of measured to earlier seconds on the last measured
       device; if there are none, the measured seconds.

    Views stay free. A reading that is not a positive finite number is ignored. Raises GraphError
    and MachineError for a timeline of another graph or machine.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> costs = asc.Costs.table({"add": 1.0})
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
    >>> learn(schedule.simulate(), graph, schedule.machine, asc.Costs()).seconds
    {'add': 1.0}
    """
    timelines = [timeline] if isinstance(timeline, Timeline) else timeline
    runs = [run for each in timelines for run in each.runs or (each,)]
    # By task and device; the device of the last run comes last.
    readings: dict[str, dict[str, list[float]]] = {}
    nbytes: dict[str, float] = {}
    for span in (span for run in runs for span in run.spans):
        if span.kind == "run":
            device = span.streams[0].device
            table = readings.setdefault(span.name, {})
            table[device] = table.pop(device, [])
            if 0 < span.seconds < math.inf:
                table[device].append(span.seconds)
        elif 0 < span.nbytes < math.inf:
            nbytes[span.name] = max(nbytes.get(span.name, 0.0), float(span.nbytes))
    learnt: dict[str, float | dict[str, float]] = {}
    for name, table in readings.items():
        task = graph.task(name)
        medians = {name: statistics.median(some) for name, some in table.items() if some}
        measured = {machine.device(device): median for device, median in medians.items()}
        if measured and not task.view:
            seconds = dict(_by_device(task, measured, machine, costs))
            numbers = set(seconds.values())
            learnt[name] = numbers.pop() if len(numbers) == 1 else seconds
    return costs.override(learnt, nbytes)


def _by_device(
    task: Task, measured: Mapping[Device, float], machine: Machine, costs: Costs
) -> Iterator[tuple[str, float]]:
    device, last = list(measured.items())[-1]
    known = costs.task_seconds(task, device)
    for other in machine.devices:
        there = costs.task_seconds(task, other)
        alike = [seconds for ran, seconds in measured.items() if _alike(ran, other)]
        if other in measured:
            yield other.name, measured[other]
        elif math.isinf(there):
            yield other.name, math.inf
        elif alike:
            yield other.name, alike[-1]
        else:
            # The quotient may overflow or underflow; then the ratio of speeds is unknown.
            scaled = last * (there / known) if 0 < known < math.inf else 0.0
            yield other.name, scaled if 0 < scaled < math.inf else last


def _alike(one: Device, other: Device) -> bool:
    return replace(one, name=other.name, physical=other.physical) == other
