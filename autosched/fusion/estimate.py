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
from autosched.measurement.sanity import work_of

__all__ = ["region_seconds"]


def region_seconds(
    composite: Composite, values: Sequence[Value], costs: Costs, device: Device
) -> float:
    """Return the seconds of a region on a device; ``values`` are those of its tasks' graph."""
    tasks = [task for task in composite.tasks if not task.view]
    work = {task.index: work_of(task, costs) for task in tasks}
    # Elementwise operators compute at most one operation per byte.
    heavy = [t for t in tasks if (found := work[t.index]) and found.flops > found.nbytes]
    light = [task for task in tasks if task not in heavy]
    launched = sum(max(1, len(task.operators)) for task in light)
    before = sum(costs.task_seconds(task, device) for task in light)
    busy = max(0.0, before - device.launch_seconds * launched)
    launches = device.launch_seconds * min(launched, len(heavy) + 1)
    moved = [0.0 if (found := work[task.index]) is None else found.nbytes for task in light]
    part = 1.0
    if all(moved) and moved:
        part = min(1.0, _outside(composite, light, values, costs) / sum(moved))
    rest = sum(costs.task_seconds(task, device) for task in heavy)
    return rest + min(before, launches + busy * part)


def _outside(
    composite: Composite, light: Sequence[Task], values: Sequence[Value], costs: Costs
) -> float:
    """Return the bytes that these tasks of a region read from others, or make for others."""
    own = {task.index for task in light}
    made = {use.value for task in light for use in task.outputs}
    read = {use.value for task in light for use in task.reads} - made
    others = (task for task in composite.tasks if task.index not in own)
    needed = {use.value for task in others for use in task.reads} | set(composite.gives)
    written = {use.value for task in light for use in task.writes}
    moved = [*read, *(made & needed), *written]
    return sum(costs.nbytes.get(values[value].name, 0.0) for value in moved)
