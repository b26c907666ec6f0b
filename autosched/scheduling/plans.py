"""Make plans of placements, and choose the best.

A plan is a placement with its program, which fits into memory, and with its predicted makespan, or
its period if that is the objective. The number of runs in flight is limited by memory, too: each
run has buffers of its own. More runs in flight never make the period longer, and from some number
on not shorter either. Where no plan fits, a limit is found that suffices.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter

from autosched._lib.text import duration, percent
from autosched.errors import MemoryLimitError, ScheduleError
from autosched.lowering import fits, fitted, lower
from autosched.lowering.resident_state import keeping, with_resident_state, within
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.problem import Goal, Objective, Policy, Problem, least_bytes
from autosched.program.program import Copy, Program
from autosched.recomputation.repeats import repeated, with_repeats
from autosched.scheduling.arguments import check_arguments
from autosched.simulation.footprint import needs_of_runs, peaks
from autosched.simulation.periods import fewest_in_flight
from autosched.simulation.plan import Plan

_MOST = 64  # runs in flight that are chosen
# Of the memory of a device, how much state may take if not all of it fits.
_PARTS = (0.75, 0.5, 0.25, 0.0)
# Of what exceeds the memory, for how much tasks are repeated; the rest is spilled.
_REPEATED_PARTS = (1.0, 0.5)
_MOST_REPEATED = 2  # placements of which tasks are repeated
_TRIES = 4  # to halve the gap between a limit that is too low and one that suffices

Length = tuple[float, float]


def goal_of(objective: Objective, in_flight: int | None, machine: Machine) -> Goal:
    """Return the goal that is asked for. Raises ScheduleError for other words and numbers."""
    check_arguments(in_flight=in_flight, objective=objective)
    if in_flight is None and objective == "makespan":
        in_flight = 1
    if machine.ranks and in_flight != 1:
        raise ScheduleError(
            "several ranks execute one run at a time; use in_flight=1 and objective='makespan'"
        )
    return Goal(objective, in_flight)


def best_plan(
    problem: Problem,
    policies: Iterable[Policy],
    limits: Iterable[int | None] = (None,),
    tried: list[Placement] | None = None,
) -> Plan:
    """Return the plan of least period or makespan, of equal ones that with the fewest copies.

    Each placement is tried with each of these limits on streams that it does not have itself, and
    added to ``tried``, if it is not there. Where the fastest ones exceed the memory, plans spill
    values, repeat tasks, or both.
    """
    tried = [] if tried is None else tried
    confined = problem.confined
    plans: list[Plan] = []
    tight: list[tuple[Length, Placement]] = []
    refusal = ScheduleError(f"graph {problem.graph.name!r} cannot run on this machine")
    for policy in policies:
        try:
            placement = policy(confined)
            if not isinstance(placement, Placement):
                raise ScheduleError(f"policy {policy!r} must return a Placement, got {placement!r}")
            if placement not in tried:
                tried.append(placement)
                best = None
                for most in limits if placement.streams is None else (placement.streams,):
                    plan = _lowered(problem, replace(placement, streams=most), tight)
                    if best is None or _is_shorter(plan, best):  # more streams that bring something
                        best = plan
                        plans.append(plan)
        except ScheduleError as error:
            refusal = error
    best = min(plans, key=merit, default=None)
    for length, placement in sorted(tight, key=itemgetter(0))[:_MOST_REPEATED]:
        if best is None or length < _length(best):
            plans += _repeated(problem, placement)
            best = min(plans, key=merit, default=None)
    if best is None:
        raise refusal
    return best


def _is_shorter(plan: Plan, other: Plan) -> bool:
    """Whether the period or makespan of a plan is less than another's, by more than rounding."""
    mine, others = _length(plan), _length(other)
    return mine < others and not all(map(partial(math.isclose, rel_tol=1e-9), mine, others))


def _length(plan: Plan) -> Length:
    """Return the period, if that is the objective, and the makespan."""
    is_loop = plan.problem.goal.objective == "period"
    return (plan.period if is_loop else 0.0), plan.makespan


def merit(plan: Plan) -> tuple[float, float, int]:
    """Return what the best plan has least of: the period or makespan, then copies."""
    copies = sum(isinstance(instruction, Copy) for instruction in plan.program)
    return *_length(plan), copies


def _lowered(problem: Problem, placement: Placement, tight: list[tuple[Length, Placement]]) -> Plan:
    """Lower a placement to a program that fits into memory, and predict its times.

    It is the best of those that keep more or less state on devices. A placement that would exceed
    the memory is added to ``tight``, with its times then. Raises ScheduleError for instructions
    that the machine cannot execute.
    """
    plans: list[Plan] = []
    refusal = MemoryLimitError("memory does not suffice")
    for i, (own, placed) in enumerate(_with_state(problem, placement)):
        program = lower(own, placed)
        if own.is_limited and not fits(program, own):
            if i == 0:
                tight.append((_length(Plan(own, placed, program)), placement))
            try:
                program = lower(own, placed, limited=True)
            except MemoryLimitError as error:
                refusal = error
                continue
        if problem.goal.objective == "period":
            program = _looped(own, placed, program)
        plans.append(Plan(own, placed, program))
    if not plans:
        raise refusal
    return min(plans, key=_length)


def _repeated(problem: Problem, placement: Placement) -> Iterator[Plan]:
    """Yield plans of a placement in which tasks are repeated, for all that exceeds memory or a part."""
    own, placed = with_resident_state(problem, placement)
    for part in _REPEATED_PARTS:
        with suppress(ScheduleError):  # as for any other plan
            order = repeated(own, placed, part)
            if order is not None:
                changed = with_resident_state(*with_repeats(problem, placement, order))
                yield Plan(*changed, fitted(*changed))


def _with_state(problem: Problem, placement: Placement) -> Iterator[tuple[Problem, Placement]]:
    """Yield the problem with state on its devices; with less and less, where memory is limited."""
    found = with_resident_state(problem, placement)
    yield found
    kept = list(problem.constraints.resident)
    if kept and problem.is_limited:
        for part in _PARTS:
            fewer = within(found[0], part)
            if fewer != kept:
                kept = fewer
                yield with_resident_state(keeping(problem, kept), placement)


def with_runs_in_flight(problem: Problem, plan: Plan) -> Plan:
    """Return a plan with the runs in flight that are wanted, and warn if they do not fit."""
    own = plan.problem
    goal = problem.goal
    program = plan.program
    if goal.objective == "makespan":
        program = _looped(own, plan.placement, program)
    elif goal.in_flight is None:
        count = fewest_in_flight(program, plan.seconds, plan.issuing, program.in_flight)
        one = count == 1  # run that reaches the period
        program = fitted(own, plan.placement) if one else replace(program, in_flight=count)
    if goal.in_flight is not None and program.in_flight < goal.in_flight:
        needs = needs_of_runs(program, own)
        name = min(needs, key=lambda device: needs[device].most)
        needed = needs[name].shared + goal.in_flight * needs[name].each
        warnings.warn(
            f"{goal.in_flight} runs in flight need {needed:,.0f} B of memory on {name!r}, which has "
            f"{own.machine.device(name).nbytes:,.0f} B; {program.in_flight} will be in flight",
            RuntimeWarning,
            stacklevel=5,
        )
    return plan if program is plan.program else replace(plan, program=program)


def _looped(problem: Problem, placement: Placement, program: Program) -> Program:
    """Return the loop with the runs in flight of the goal, as far as they fit into memory.

    ``program`` is that of one run, which is returned if two runs do not fit.
    """
    most = problem.goal.in_flight or _MOST
    if most == 1:
        return program
    loop = lower(problem, placement, in_flight=2)
    needs = needs_of_runs(loop, problem)
    fitting = min(need.most for need in needs.values())
    count = int(min(most, fitting))
    return program if count < 2 else replace(loop, in_flight=count)


# ---- what limits of memory cost, and which suffice


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
    machine = problem.machine.with_devices(
        lambda device: replace(device, nbytes=given.get(device.name, device.nbytes * factor))
    )
    return replace(problem, machine=machine)
