"""Say what limits of memory cost, and which limit suffices where none of the plans fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from autosched._lib.text import duration, percent
from autosched.errors import MemoryLimitError, ScheduleError
from autosched.lowering.resident_state import keeping
from autosched.placement import Placement
from autosched.problem import Problem, least_bytes
from autosched.scheduling.plans import best_plan
from autosched.simulation.footprint import peaks
from autosched.simulation.plan import Plan

_TRIES = 4  # to halve the gap between a limit that is too low and one that suffices


def limit_note(plan: Plan) -> tuple[str, ...]:
    """Say what limited memory costs a plan, and what 10% more would bring, by the same placement."""
    problem = plan.problem.original or plan.problem
    if not problem.is_limited:
        return ()
    names = {task.name for task in problem.graph.tasks}
    order = tuple(name for name in plan.placement.order if name in names)
    placement = replace(plan.placement, order=order, copies=())
    problem = keeping(problem, problem.constraints.resident)
    free = _planned(_with_memory(problem, math.inf), placement)
    if free is None or free.makespan >= plan.makespan * (1 - 1e-9):
        return ()
    more = _planned(_with_memory(problem, 1.1), placement)
    then = plan.makespan if more is None else min(plan.makespan, more.makespan)
    cost = percent(plan.makespan / free.makespan - 1)
    without = f"without limits it would take {duration(free.makespan)}"
    return (f"limits of memory cost {cost}: {without}, and {duration(then)} with 10% more memory",)


def refusal(problem: Problem, error: MemoryLimitError, make: Callable[[Problem], Plan]) -> str:
    """Return why no plan fits, a limit with which one was made, and what any plan needs.

    ``make`` returns a plan. Limits are raised on the devices where one without limits exceeds them.
    """
    free = make(_with_memory(problem, math.inf))
    limits = {device.name: device.nbytes for device in problem.machine.devices}
    needed = peaks(free.program, free.problem)
    short = {name: peak for name, peak in needed.items() if peak > limits[name]}
    if not short:
        return str(error)
    least = least_bytes(_with_memory(problem, math.inf), short)

    def limited(part: float) -> dict[str, float]:
        """Return the limits where all lie between what is needed at least and the peaks."""
        lows = {name: max(limits[name], min(least, peak)) for name, peak in short.items()}
        return {n: math.ceil(low + part * (short[n] - low)) for n, low in lows.items()}

    low, high = -1.0, 1.0
    for part in (0.0, *[None] * _TRIES):
        middle = (low + high) / 2 if part is None else part
        fits = _planned(_with_memory(problem, 1.0, limited(middle)), free.placement) is not None
        low, high = (low, middle) if fits else (middle, high)
        if high == 0.0:
            break
    enough = ", ".join(f"{nbytes:,.0f} B on {name}" for name, nbytes in limited(high).items())
    return f"{error}. A plan exists with {enough}; none needs less than {least:,.0f} B"


def _planned(problem: Problem, placement: Placement) -> Plan | None:
    """Return the best plan of a placement, or None if none fits."""
    try:
        return best_plan(problem, [lambda _: placement])
    except ScheduleError:
        return None


def _with_memory(
    problem: Problem, factor: float, nbytes: Mapping[str, float] | None = None
) -> Problem:
    """Return a problem with so many times the memory, or with the bytes that are given."""
    given = nbytes or {}
    machine = problem.machine
    devices = (replace(d, nbytes=given.get(d.name, d.nbytes * factor)) for d in machine.devices)
    return replace(problem, machine=replace(machine, devices=tuple(devices)))
