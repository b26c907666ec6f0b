"""Estimate the seconds of a fused region, before it is compiled.

Inductor calls the library's kernel for a matrix product, a convolution or attention, as eager mode
does, and fuses the other operators around it. So the estimate keeps the time of operators that
compute more than they move. The others save the bytes that stay inside the region, and all launches
but one for each kernel of a library.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.costs.costs import Costs
from autosched.graph.composite import Composite
from autosched.graph.task import Task
from autosched.graph.value import Value
from autosched.machine.machine import Device

__all__ = ["region_seconds"]


def region_seconds(
    composite: Composite, values: Sequence[Value], costs: Costs, device: Device
) -> float:
    """Return the seconds of a region on a device; ``values`` are those of its tasks' graph."""
    tasks = [task for task in composite.tasks if not task.view]
    heavy = [task for task in tasks if _computes_most(task, costs)]
    light = [task for task in tasks if not _computes_most(task, costs)]
    launches = sum(_launches(task) for task in light)
    before = sum(costs.task_seconds(task, device) for task in light)
    busy = max(0.0, before - device.launch_seconds * launches)
    fewer = device.launch_seconds * min(launches, len(heavy) + 1)
    after = fewer + busy * _kept_part(composite, light, values, costs)
    return sum(costs.task_seconds(task, device) for task in heavy) + min(before, after)


def _computes_most(task: Task, costs: Costs) -> bool:
    """Whether a task computes more than one operation per byte, unlike elementwise operators."""
    work = costs.work.get(task.name)
    return work is not None and work.flops > work.nbytes


def _launches(task: Task) -> int:
    return sum(map(_launches, task.parts)) if task.parts else not task.view


def _kept_part(
    composite: Composite, light: Sequence[Task], values: Sequence[Value], costs: Costs
) -> float:
    """Return the part of the bytes that these tasks move that others make or need."""
    if not all(task.name in costs.work for task in light):
        return 1.0
    own = {task.index for task in light}
    made = {use.value for task in light for use in task.outputs}
    read = {use.value for task in light for use in task.reads} - made
    others = (task for task in composite.tasks if task.index not in own)
    needed = {use.value for task in others for use in task.reads} | set(composite.gives)
    written = {use.value for task in light for use in task.writes}
    kept = [*read, *(made & needed), *written]
    moved = sum(costs.work[task.name].nbytes for task in light)
    outside = sum(costs.nbytes.get(values[value].name, 0.0) for value in kept)
    return min(1.0, outside / moved) if moved else 1.0
