"""Repetitions as constraints for OR-Tools CP-SAT, with an interval for each run of a step.

The model is that of MOCCASIN (Bartan et al., "Moccasin: efficient tensor rematerialization for neural
networks", ICML 2023, arXiv 2304.14463): each step runs up to a number of times, at an event (slot,
step) before the first run of a later step, and is in memory to the end of its interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from autosched.recomputation.sequence import Step


class Solved(NamedTuple):
    """Seconds of the plan that was found, infinite if none was, and those that all plans take."""

    seconds: float
    bound: float


def solved(
    steps: Sequence[Step], room: int, limit: float, hint: Sequence[int] = (), runs: int = 3
) -> Solved:
    """Return what CP-SAT finds within a time limit for steps of whole seconds and bytes.

    ``hint`` is an order to begin with; each step runs up to ``runs`` times.
    """
    model = cp_model.CpModel()
    count = len(steps)
    end = _event(count, count)
    starts: list[list[Any]] = []
    ends: list[list[Any]] = []
    active: list[list[Any]] = []
    intervals = []
    for i, step in enumerate(steps):
        events = [_event(slot, i) for slot in range(i + 1, min(step.last_repeat, count) + 1)]
        own = [model.new_constant(_event(i, i))]
        own += [
            model.new_int_var_from_domain(cp_model.Domain.from_values(events), "")
            for _ in range(runs - 1 if events else 0)
        ]
        is_run = [model.new_constant(1), *(model.new_bool_var("") for _ in own[1:])]
        until = [model.new_int_var(_event(i, i), end, "") for _ in own]
        for k, start in enumerate(own):
            size = model.new_int_var(1, end + 1, "")
            interval = model.new_optional_interval_var(start, size, until[k] + 1, is_run[k], "")
            intervals.append((interval, int(step.nbytes)))
            if k:
                model.add(start > until[k - 1]).only_enforce_if(is_run[k])
                model.add_implication(is_run[k], is_run[k - 1])
        starts.append(own)
        ends.append(until)
        active.append(is_run)
    for i, step in enumerate(steps):
        for start, is_run in zip(starts[i], active[i], strict=True):
            for read in {*step.reads}:
                from_run = [model.new_bool_var("") for _ in starts[read]]
                for k, here in enumerate(from_run):
                    model.add_implication(here, active[read][k])
                    model.add(starts[read][k] < start).only_enforce_if(here)
                    model.add(start <= ends[read][k]).only_enforce_if(here)
                model.add_exactly_one(from_run).only_enforce_if(is_run)
    model.add_cumulative([one for one, _ in intervals], [nbytes for _, nbytes in intervals], room)
    repeated = [
        int(step.seconds) * one for step, own in zip(steps, active, strict=True) for one in own[1:]
    ]
    model.minimize(sum(repeated))
    if hint:
        _give(model, steps, hint, (starts, ends, active))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    once = sum(step.seconds for step in steps)
    is_found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    more = solver.objective_value if is_found else float("inf")
    return Solved(once + more, once + solver.best_objective_bound)


def _event(slot: int, step: int) -> int:
    return slot * (slot + 1) // 2 + step


def _give(
    model: Any, steps: Sequence[Step], order: Sequence[int], variables: Sequence[list[list[Any]]]
) -> None:
    starts, ends, active = variables
    following = 0
    runs: list[list[list[int]]] = [[] for _ in steps]  # first and last event of each
    for i in order:
        event = _event(following, i)
        for read in steps[i].reads:
            runs[read][-1][1] = event
        runs[i].append([event, event])
        following += i == following
    for i, own in enumerate(runs):
        for k, start in enumerate(starts[i]):
            if k < len(own):
                model.add_hint(ends[i][k], own[k][1])
            if k:
                model.add_hint(active[i][k], k < len(own))
                if k < len(own):
                    model.add_hint(start, own[k][0])
