"""Improve a placement with CP-SAT, and prove a lower bound.

The initial placement is an argument. OR-Tools is imported when it is needed.

With a limit in seconds, CP-SAT runs with and without linear relaxation side by side: conflict
learning without it mostly proves the same in half the time, because the relaxation sees little but
load. With a limit in deterministic work it runs without relaxation, on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from autosched._lib.jit import Mode
from autosched.placement import Placement
from autosched.policies.base.listing import Listed, Listing, timed
from autosched.policies.constraint_programming.integer_times import IntegerTimes
from autosched.problem import Problem

if TYPE_CHECKING:
    from autosched.policies.constraint_programming.cpsat import Answer

_WORK = 3.0  # deterministic work of a solver without a time limit; a unit takes some seconds
_MOST = 80  # tasks of a small problem
_SURE = {"data", "order"}  # kinds of dependencies that hold for any choice of devices


def can_solve() -> bool:
    """Return whether OR-Tools is installed."""
    try:
        return find_spec("ortools.sat.python.cp_model") is not None
    except (ImportError, ValueError):
        return False


def is_soon_solved(problem: Problem) -> bool:
    """Return whether CP-SAT, if installed, finds within seconds what annealing does not."""
    return len(problem.graph) <= _MOST and can_solve()


def solved(
    problem: Problem,
    start: Placement,
    until: float | None,
    seed: int = 0,
    improved: Callable[[float], None] | None = None,
) -> Placement:
    """Return the best placement found by a deadline or with limited work, and its proved bound.

    The deadline is a time of ``perf_counter``. If nothing better is found, the result is ``start``,
    whose bound is trusted. ``improved`` is called with each better makespan. Control-C stops the
    solver with the best solution so far.
    """
    plan = _planned(problem, start)
    integer = IntegerTimes.of(problem, plan.makespan)
    most = round(plan.makespan / integer.unit)
    least = min(int(start.bound / integer.unit), most)
    if least == most:
        return start
    from autosched.policies.constraint_programming.cpsat import Model, solve

    report = None if improved is None else (lambda end: improved(end * integer.unit))
    model = Model(integer, least, most)
    model.hint(plan)
    left = None if until is None else max(until - perf_counter(), 0.0)
    answer = solve(model, left, _WORK, seed, report)
    proved = min(answer.bound, answer.makespan, most) * integer.unit
    found = _placement(integer, answer) if answer.makespan < most else start
    return replace(found, bound=max(start.bound, proved if _is_sure(problem) else 0.0))


def _planned(problem: Problem, placement: Placement) -> Listed:
    """Return the times of a placement, as lists have them."""
    number = {name: p for p, name in enumerate(problem.devices)}
    index = {name: task for task, name in enumerate(problem.tasks)}
    device = [number[placement.device[name]] for name in problem.tasks]
    order = [index[name] for name in placement.order]
    return Listing(problem.tables, Mode(False)).placed(device, order)


def _placement(integer: IntegerTimes, answer: Answer) -> Placement:
    """Return a solution as a placement: tasks and copies by start, those of duration 0 first."""
    starts, ends = np.array(answer.tasks, np.int64).T
    copies = sorted(answer.copies, key=answer.copies.__getitem__)
    begins = np.array([answer.copies[copy][0] for copy in copies], float)
    codes = np.array([datum * len(integer.problem.devices) + p for datum, p in copies], np.int64)
    order: Any = np.lexsort((ends, starts))
    listed = Listed(answer.makespan, order, answer.device, starts, ends, codes, begins)
    return timed(integer.problem, listed, order)


def _is_sure(problem: Problem) -> bool:
    """Return whether the model admits all programs.

    It does not if in-place writes may overtake readers, or if data may be forwarded by other
    devices.
    """
    machine = problem.machine
    linked = {
        q: {p for p in machine.computing if q == p or machine.link(q, p) is not None}
        for q in machine.computing
    }
    direct = all(linked[p] <= linked[q] for q in linked for p in linked[q])
    return direct and all(
        d.kind in _SURE for task in problem.graph.tasks for d in task.dependencies
    )
