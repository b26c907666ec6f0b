"""A lower bound from the time that threads need to issue all tasks.

One thread issues all streams that do not wait for a CPU. If no task can run on a CPU, it issues
every task. Otherwise each stream may have a thread of its own.
"""

from __future__ import annotations

import math

import numpy as np

from autosched.bounds.load import gathered, shared
from autosched.bounds.relaxation import Relaxation
from autosched.costs.costs import Costs
from autosched.machine.machine import Machine

__all__ = ["host"]


def host(relaxed: Relaxation, machine: Machine, costs: Costs) -> float:
    """Return the time that threads need at least to issue all tasks; 0 if issuing is free."""
    if not len(relaxed.seconds) or not costs.has_issuing(machine.devices):
        return 0.0
    begin = 0.0 if costs.replay is None else costs.replay.call
    on_cpu = np.array([not device.is_accelerator for device in machine.devices])
    possible = np.isfinite(relaxed.seconds)
    issue = relaxed.problem.by_task(relaxed.problem.tables.issue)
    cpus = on_cpu.sum() - len(machine.storage)
    if cpus <= 1 and not possible[:, on_cpu].any():  # two CPUs may copy to each other
        each = np.where(possible, issue, math.inf).min(axis=1, initial=math.inf)
        graph = 0.0 if costs.replay is None or not each.any() else costs.replay.graph
        return float(begin + graph + each.sum())
    if costs.replay is not None:  # one thread may issue what runs on several streams
        return begin
    # A thread of a CPU or of storage is busy with the tasks, others with issuing them.
    busy = np.where(on_cpu, relaxed.seconds, np.where(possible, issue, math.inf))
    return shared(gathered(busy, relaxed.group), relaxed.streams)
