"""Exact: the best placement there is, with proof, by constraint programming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from autosched.bounds import bounds
from autosched.costs import Costs
from autosched.errors import ScheduleError
from autosched.graph import Graph
from autosched.machine import Machine
from autosched.placement import Placement
from autosched.policies.heft import heft
from autosched.policies.possible import Possible
from autosched.policies.problem import Policy, Problem
from autosched.policies.search import Progress, quick, search
from autosched.policies.whole import Times, Whole

__all__ = ["exact"]

_WORK = 3.0  # of a search that is given no time, in units of the solver, each some seconds
_START = 0.2  # of the time, for where to begin
_ORDERED = 40  # tasks, up to which it is told the order of issue, in pairs
_SURE = {"data", "order"}  # kinds of dependencies that no choice of devices makes less strict


class _Found(NamedTuple):
    """A placement, and what happens when."""

    device: Sequence[int]
    order: Sequence[int]
    times: Times


def exact(seconds: float | None = None, seed: int = 0, *, progress: Progress | None = None) -> Policy:
    """Return the policy that finds the best placement and proves it, by CP-SAT, as far as there is time for that.

    It works for ``seconds`` at most, or else for so much work, about 20 s, that it gives the same placement each time,
    and ends with the best so far at ctrl-C. As it reckons, that is never worse than HEFT's. ``Placement.bound`` is what
    it proved: the makespan, up to rounding, of a placement that is optimal; 0 where tasks write in place or data would
    have to travel by way of another device, for then there may be placements that it does not look at. Of a device
    with several compute streams it takes that a task gets the one that is free first. ``progress`` is called with the
    part of the time that is gone, 0 to 1, and the best makespan. The policy raises ScheduleError where OR-Tools is not
    installed, or tasks cannot all be placed.

    >>> graph = Graph()
    >>> tasks = [graph.add(int, name=name, seconds=s) for name, s in (("a", 3), ("b", 3), ("c", 2), ("d", 2), ("e", 2))]
    >>> placement = exact()(graph, Machine.emulated(gpus=1), Costs())  # where HEFT needs 7 s
    >>> placement.device["a"] == placement.device["b"], placement.bound
    (True, 6.0)
    """

    def policy(graph: Graph, machine: Machine, costs: Costs) -> Placement:
        began = perf_counter()
        _check_installed()
        from autosched.policies.cpsat import Limits, Model, solve
        from autosched.policies.issuing import add_issue_order

        problem = Problem.of(graph, machine, costs)
        starts, stopped = _starts(graph, machine, costs, seconds, seed)
        whole, found = _counted(problem, starts)
        least = max(bounds(graph, machine, costs).values()) / whole.unit
        model = Model(whole, min(int(least), found.times.makespan), found.times.makespan)
        if whole.contended and len(graph) <= _ORDERED:
            add_issue_order(model)
        model.hint(found.device, found.times)
        report = None if progress is None else (lambda end: progress(_part(began, seconds), end * whole.unit))
        answer = solve(model, Limits(0.0 if stopped else _left(began, seconds), _WORK, seed), report)
        if answer.device is not None:
            device = [answer.device[task] for task in range(len(graph))]
            better = _Found(device, answer.order, whole.times(device, answer.order))
            found = min(found, better, key=lambda plan: plan.times.makespan)
        proved = max(answer.bound, int(least)) if _is_sure(graph, machine) else 0.0
        bound = min(proved, found.times.makespan) * whole.unit
        return replace(problem.placement(found.device, found.order), bound=bound)

    return policy


def _starts(
    graph: Graph, machine: Machine, costs: Costs, seconds: float | None, seed: int
) -> tuple[list[Placement], bool]:
    """Return placements to begin with, the best last, and whether ctrl-C came, which ends a search before its time."""
    first = heft(graph, machine, costs)
    if seconds is None or Possible(Problem.of(graph, machine, costs)).partial:
        return [first, quick(graph, machine, costs)], False
    began, budget = perf_counter(), min(_START * seconds, 3.0)
    found = search(budget, seed)(graph, machine, costs)
    return [first, found], perf_counter() - began < budget  # or it met a bound, and nothing is left to do either


def _left(began: float, seconds: float | None) -> float | None:
    return None if seconds is None else max(seconds - (perf_counter() - began), 0.0)


def _part(began: float, seconds: float | None) -> float:
    return min((perf_counter() - began) / (seconds or _WORK * 8), 1.0)


def _check_installed() -> None:
    """Raise ScheduleError if OR-Tools is not there."""
    try:
        import ortools.sat.python.cp_model  # noqa: F401
    except ImportError as error:
        raise ScheduleError(
            'policy "exact" needs OR-Tools, which is not installed: pip install autosched[exact]'
        ) from error


def _counted(problem: Problem, starts: Sequence[Placement]) -> tuple[Whole, _Found]:
    """Return the problem in whole units, and the best of some placements."""
    number = {name: p for p, name in enumerate(problem.devices)}
    index = {name: task for task, name in enumerate(problem.tasks)}
    plans = [
        ([number[start.device[name]] for name in problem.tasks], [index[name] for name in start.order])
        for start in starts
    ]
    whole = Whole.fitting(problem, *plans[-1])
    return whole, min((_Found(*plan, whole.times(*plan)) for plan in plans), key=lambda found: found.times.makespan)


def _is_sure(graph: Graph, machine: Machine) -> bool:
    """Return whether nothing that the model forbids can be: in-place writes that overtake, and data sent on."""
    linked = {q: {p for p in machine.names if q == p or machine.link(q, p) is not None} for q in machine.names}
    direct = all(linked[p] <= linked[q] for q in linked for p in linked[q])
    return direct and all(d.kind in _SURE for task in graph.tasks for d in task.dependencies)
