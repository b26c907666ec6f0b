"""Predict makespans with random deviations from the predicted durations.

Draws factors for tasks and copies and simulates programs with them. The same seed draws the same
factor for each task and each value in all placements, so plans of a graph are compared under the
same deviations.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autosched._lib.allowed import is_number
from autosched.costs.costs import Costs
from autosched.errors import ScheduleError, shown
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, Run
from autosched.simulation.issuing import issuing
from autosched.simulation.simulate import durations, makespan

__all__ = ["checked_noise", "noisy_costs", "noisy_makespans"]

_TRIALS = 100


def noisy_makespans(
    program: Program, graph: Graph, machine: Machine, costs: Costs, noise: float, *, seed: int = 0
) -> tuple[float, float]:
    """Return the median and the 95th percentile of 100 noisy makespans.

    In each, the durations of all tasks and copies are multiplied by uniform random numbers from 1
    - noise to 1 + noise; copies of one value share one number. Issuing takes as long as always.
    Raises ScheduleError as ``simulate`` does, and for noise that is not from 0 to 1.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.add(abs, graph.input("x"), seconds=1.0))
    >>> s = asc.schedule(graph, asc.Machine.emulated(gpus=0))
    >>> median, worst = noisy_makespans(s.program, graph, s.machine, s.costs, 0.2)
    >>> round(median, 1), round(worst, 1)
    (1.0, 1.2)
    """
    checked_noise(noise)
    seconds = np.array(durations(program, graph, machine, costs), float)
    names = [task.name for task in graph.tasks], [value.name for value in graph.values]
    tasks, values = ({name: i for i, name in enumerate(some)} for some in names)
    # The index among tasks, then values; 0 for instructions that take no time.
    index = np.zeros(len(program), int)
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            index[i] = tasks[instruction.task]
        elif isinstance(instruction, Copy):
            index[i] = len(tasks) + values[instruction.value]
    threads = issuing(program, graph, machine, costs)
    factors = np.random.default_rng(seed).uniform(
        1 - noise, 1 + noise, (_TRIALS, len(tasks) + len(values))
    )
    ends = sorted(makespan(program, (seconds * luck[index]).tolist(), threads) for luck in factors)
    return float(np.median(ends)), ends[_TRIALS * 95 // 100 - 1]


def noisy_costs(graph: Graph, machine: Machine, costs: Costs, noise: float, *, seed: int) -> Costs:
    """Return noisy costs: the durations of each task on all devices times one random number."""
    factors = np.random.default_rng(seed).uniform(1 - noise, 1 + noise, len(graph)).tolist()
    return costs.override(
        {
            task.name: {
                device.name: costs.task_seconds(task, device) * luck for device in machine.devices
            }
            for task, luck in zip(graph.tasks, factors, strict=True)
        }
    )


def checked_noise(noise: Any) -> float:
    """Return noise as a number. Raises ScheduleError if it is not from 0 to 1."""
    if not is_number(noise) or noise > 1:
        raise ScheduleError(
            "noise must be a share from 0 to 1, such as 0.2 for 20% more or less; "
            f"got {shown(noise)}"
        )
    return float(noise)
