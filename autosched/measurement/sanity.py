"""Reject impossible readings.

Such a reading is repeated, and then left out. Measures nothing.
"""

from __future__ import annotations

import math

from autosched.costs.costs import Costs, Work
from autosched.graph.graph import Task
from autosched.machine.machine import Device

__all__ = ["SLOW", "objection", "work_of"]

FAST = 10  # times a device's peak: beyond is no measurement of work that was done
SLOW = 1000  # times the roofline: so slow, a second reading must say the same

# Rates of the fastest existing devices, in FLOP and bytes per second. Rates of a machine may be
# rough defaults.
_PEAKS = {"cpu": (1e13, 1e12)}
_ACCELERATOR = 1e15, 1e13


def objection(seconds: float, work: Work | None, device: Device) -> str | None:
    """Return why a reading is impossible, or None: a task with this work took these seconds on a device.

    >>> objection(1e-9, Work(flops=2e12, nbytes=0), Device("cuda:0"))
    'would be 2,000,000 times the peak of such a device'
    """
    if not 0 <= seconds < math.inf:
        return "is no time"
    if work is None:
        return None
    flops, nbytes = _PEAKS.get(device.kind, _ACCELERATOR)
    least = max(
        work.flops / max(flops, device.flops_per_second),
        work.nbytes / max(nbytes, device.bytes_per_second),
    )  # at the peak
    if seconds == 0:
        return "is no time for work" if least else None
    if least > FAST * seconds:
        return f"would be {least / seconds:,.0f} times the peak of such a device"
    return None


def work_of(task: Task, costs: Costs) -> Work | None:
    """Return the work of a task, or of all its parts; None if some of it is unknown."""
    if not task.parts:
        return Work(0, 0, 0) if task.view else costs.work.get(task.name)
    parts = [work_of(part, costs) for part in task.parts]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return Work(
        sum(w.flops for w in known), sum(w.nbytes for w in known), sum(w.launches for w in known)
    )
