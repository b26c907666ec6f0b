"""Find impossible readings, which are repeated and then left out."""

from __future__ import annotations

import math

from autosched.costs.costs import Costs, Work
from autosched.graph.graph import Task
from autosched.machine.machine import Device

__all__ = ["SLOW", "least_work", "objection", "work_of"]

FAST = 10  # times a device's peak: beyond is no measurement of work that was done
SLOW = 1000  # times the roofline: so slow, a second reading must say the same

# Rates of the fastest existing devices, in FLOP and bytes per second. Rates of a machine may be
# rough defaults.
_PEAKS = {"cpu": (1e13, 1e12)}
_ACCELERATOR = 1e15, 1e13


def objection(seconds: float, work: Work | None, device: Device) -> str | None:
    """Return why it is impossible that a task with this work took these seconds, or None.

    >>> objection(1e-9, Work(flops=2e12, nbytes=0), Device("cuda:0"))
    'would be 2,000,000 times the peak of such a device'
    """
    if not 0 <= seconds < math.inf:
        return "is no time"
    if work is None:
        return None
    flops, nbytes = _PEAKS.get(device.kind, _ACCELERATOR)
    # At the peak.
    least = max(
        work.flops / max(flops, device.flops_per_second),
        work.nbytes / max(nbytes, device.bytes_per_second),
    )
    if seconds == 0:
        return "is no time for work" if least else None
    if least > FAST * seconds:
        return f"would be {least / seconds:,.0f} times the peak of such a device"
    return None


def least_work(task: Task, costs: Costs) -> Work | None:
    """Return the work that a task does at least: kernels of a region keep what stays inside it."""
    work = work_of(task, costs)
    is_region = task.composite is not None and task.fn is not task.composite
    return work and (Work(work.flops, 0) if is_region else work)


def work_of(task: Task, costs: Costs) -> Work | None:
    """Return the work of a task and its parts; None if unknown."""
    if not task.parts:
        return Work(0, 0, 0) if task.view else costs.work.get(task.name)
    total = Work(0, 0, 0)
    for part in task.parts:
        work = work_of(part, costs)
        if work is None:
            return None
        launches = total.launches + work.launches
        total = Work(total.flops + work.flops, total.nbytes + work.nbytes, launches)
    return total
