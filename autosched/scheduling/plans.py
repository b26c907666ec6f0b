"""Choose among placements: lower each to a program that fits, and predict its times.

State that may stay on devices does so as far as memory suffices. Of a loop, the period is predicted
for as many runs in flight as fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from autosched.costs.costs import Costs
from autosched.errors import MemoryLimitError, ScheduleError
from autosched.graph.graph import Graph
from autosched.lowering.fitting import confined, fitted, is_limited
from autosched.lowering.resident_state import keepable, keeping, with_resident_state, within
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.policies import Policy
from autosched.program.program import Copy, Program
from autosched.scheduling.runs_in_flight import (
    Goal,
    Parts,
    fewest_runs,
    looped,
    period_of,
    warn_of_memory,
)
from autosched.simulation.issuing import issuing
from autosched.simulation.simulate import durations
from autosched.simulation.simulate import makespan as predict_makespan

__all__ = ["Plan", "Problem", "best_plan", "merit", "problem_of", "with_runs_in_flight"]

# Of the memory of a device, how much state may take if not all of it fits.
_PARTS = (0.75, 0.5, 0.25, 0.0)


class Problem(NamedTuple):
    """The input of planning; ``confined`` costs are infinite where tasks do not fit."""

    graph: Graph
    machine: Machine
    costs: Costs
    confined: Costs
    outputs: Mapping[str, str]
    goal: Goal


def problem_of(
    graph: Graph, machine: Machine, costs: Costs, outputs: Mapping[str, str], goal: Goal
) -> Problem:
    """Return what is to be planned, with the state that may stay on devices."""
    state = keepable(graph, machine)
    if state or graph.kept:
        graph = keeping(graph, state)
    return Problem(graph, machine, costs, confined(graph, machine, costs, outputs), outputs, goal)


class Plan(NamedTuple):
    """A placement, its program, the makespan, and the period if that is the objective, else 0.

    In ``graph`` state is on the devices that read it.
    """

    graph: Graph
    placement: Placement
    program: Program
    makespan: float
    period: float = 0.0


def best_plan(
    problem: Problem,
    policies: Iterable[Policy],
    limits: Iterable[int | None] = (None,),
    tried: list[Placement] | None = None,
) -> Plan:
    """Return the plan of least period or makespan, of equal ones that with the fewest copies.

    Each placement is tried with each of these limits on streams that it does not have itself, and
    added to ``tried``, if it is not there.
    """
    tried = [] if tried is None else tried
    plans: list[Plan] = []
    refusal = ScheduleError(f"graph {problem.graph.name!r} cannot run on this machine")
    for policy in policies:
        try:
            placement = policy(problem.graph, problem.machine, problem.confined)
            if not isinstance(placement, Placement):
                raise ScheduleError(f"policy {policy!r} must return a Placement, got {placement!r}")
            if placement not in tried:
                tried.append(placement)
                for most in limits if placement.streams is None else (placement.streams,):
                    limited = dataclasses.replace(placement, streams=most)
                    plans.append(_lowered(problem, limited))
        except ScheduleError as error:
            refusal = error
    if not plans:
        raise refusal
    return min(plans, key=merit)


def merit(plan: Plan) -> tuple[float, float, int]:
    """Return what the best plan has least of: the period or makespan, then copies."""
    copies = sum(isinstance(instruction, Copy) for instruction in plan.program)
    return plan.period, plan.makespan, copies


def _lowered(problem: Problem, placement: Placement) -> Plan:
    """Lower a placement to a program that fits into memory, and predict its times.

    It is the best of those that keep more or less state on devices. Raises ScheduleError for
    instructions that the machine cannot execute.
    """
    machine = problem.machine
    costs = problem.costs
    plans: list[Plan] = []
    refusal = MemoryLimitError("memory does not suffice")
    for graph, placed in _with_state(problem, placement):
        try:
            program = fitted(graph, machine, costs, placed, problem.outputs)
        except MemoryLimitError as error:
            refusal = error
            continue
        seconds = durations(program, graph, machine, costs)
        makespan = predict_makespan(program, seconds, issuing(program, graph, machine, costs))
        plan = Plan(graph, placed, program, makespan)
        if problem.goal.objective == "period":
            parts = Parts(graph, machine, costs, problem.outputs)
            loop = looped(parts, placed, program, problem.goal.most)
            plan = plan._replace(program=loop, period=period_of(parts, loop))
        plans.append(plan)
    if not plans:
        raise refusal
    return min(plans, key=lambda plan: (plan.period, plan.makespan))


def _with_state(problem: Problem, placement: Placement) -> Iterator[tuple[Graph, Placement]]:
    """Yield the graph with state on its devices; with less and less, where memory is limited."""
    graph, machine, costs = problem[:3]
    found = with_resident_state(graph, machine, costs, placement)
    yield found
    kept = list(graph.kept)
    if kept and is_limited(graph, machine, costs):
        for part in _PARTS:
            fewer = within(found[0], machine, costs, part)
            if fewer != kept:
                kept = fewer
                yield with_resident_state(keeping(graph, kept), machine, costs, placement)


def with_runs_in_flight(problem: Problem, plan: Plan) -> Plan:
    """Return a plan with the runs in flight that are wanted, and warn if they do not fit."""
    parts = Parts(plan.graph, problem.machine, problem.costs, problem.outputs)
    goal = problem.goal
    program = plan.program
    if goal.objective == "makespan":
        program = looped(parts, plan.placement, program, goal.most)
    elif goal.in_flight is None:
        fewest = fewest_runs(parts, program)
        program = fewest or fitted(*parts[:3], plan.placement, parts.outputs)
    warn_of_memory(parts, goal, program, level=5)
    return plan._replace(program=program)
