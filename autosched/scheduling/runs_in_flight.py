"""Choose how many runs of a placement are in flight, and predict the period.

The number is limited by memory: each run has buffers of its own. More runs in flight never make the
period longer, and from some number on not shorter either.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Literal, NamedTuple

from autosched.costs.costs import Costs
from autosched.errors import ScheduleError, shown
from autosched.graph.graph import Graph
from autosched.lowering import lower
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.program.program import Program
from autosched.simulation.footprint import needs_of_runs
from autosched.simulation.issuing import issuing
from autosched.simulation.periods import fewest_in_flight, period
from autosched.simulation.simulate import durations

__all__ = ["Goal", "Objective", "fewest_runs", "goal_of", "looped", "period_of", "warn_of_memory"]

Objective = Literal["makespan", "period"]

_MOST = 64  # runs in flight that are chosen


class Goal(NamedTuple):
    """What a plan minimizes, and the runs in flight; None: as many as the period gains from."""

    objective: Objective
    in_flight: int | None

    @property
    def most(self) -> int:
        """The most runs in flight."""
        return self.in_flight or _MOST


class Parts(NamedTuple):
    """What a program is lowered from."""

    graph: Graph
    machine: Machine
    costs: Costs
    outputs: Mapping[str, str]


def goal_of(objective: Objective, in_flight: int | None) -> Goal:
    """Return the goal that is asked for. Raises ScheduleError for other words and numbers."""
    if objective not in ("makespan", "period"):
        raise ScheduleError(f"objective must be 'makespan' or 'period', got {shown(objective)}")
    if in_flight is None and objective == "makespan":
        return Goal(objective, 1)
    return Goal(objective, in_flight)


def looped(parts: Parts, placement: Placement, program: Program, most: int) -> Program:
    """Return the loop with up to ``most`` runs in flight, as far as they fit into memory.

    ``program`` is that of one run, which is returned if two runs do not fit.
    """
    if most == 1:
        return program
    loop = lower(parts.graph, parts.machine, placement, parts.outputs, in_flight=2)
    needs = needs_of_runs(loop, parts.graph, parts.machine, parts.costs)
    fitting = min(need.most for need in needs.values())
    count = int(min(most, fitting))
    return program if count < 2 else dataclasses.replace(loop, in_flight=count)


def period_of(parts: Parts, program: Program) -> float:
    """Return the predicted period of a program."""
    known = program, parts.graph, parts.machine, parts.costs
    return period(program, durations(*known), issuing(*known)).seconds


def fewest_runs(parts: Parts, program: Program) -> Program | None:
    """Return the loop with the fewest runs in flight that reach its period; None if one run does."""
    known = program, parts.graph, parts.machine, parts.costs
    count = fewest_in_flight(program, durations(*known), issuing(*known), program.in_flight)
    return None if count == 1 else dataclasses.replace(program, in_flight=count)


def warn_of_memory(parts: Parts, goal: Goal, program: Program, level: int = 3) -> None:
    """Warn if fewer runs are in flight than wanted; the caller is that many frames up."""
    wanted = goal.in_flight
    if wanted is None or program.in_flight >= wanted:
        return
    needs = needs_of_runs(program, parts.graph, parts.machine, parts.costs)
    name = min(needs, key=lambda device: needs[device].most)
    needed = needs[name].shared + wanted * needs[name].each
    warnings.warn(
        f"{wanted} runs in flight need {needed:,.0f} B of memory on {name!r}, which has "
        f"{parts.machine.device(name).nbytes:,.0f} B; {program.in_flight} will be in flight",
        RuntimeWarning,
        stacklevel=level,
    )
