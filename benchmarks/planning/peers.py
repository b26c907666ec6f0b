"""Beside others that are free: HEFT over networkx as one writes it from the paper, and OR-Tools alone.

networkx has no scheduler, so the textbook's is here, as short as the paper lets it be. The CP-SAT model is the plain
one of the literature, without the bounds, the heads and tails and the first solution that ``exact`` gives it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import networkx
from _graphs import random_layered
from _instances import Instance, Placed, checked
from _ours import exact_is_there, planned
from _report import table


def report(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the tables."""
    yield _textbook(chosen)
    if exact_is_there():
        yield _solver(chosen)


# ---- networkx


def textbook_heft(instance: Instance) -> list[Placed]:
    """Plan by HEFT over a ``networkx.DiGraph``, looking at every gap (Topcuoglu, Hariri, Wu, 2002)."""
    dag: networkx.DiGraph[int] = networkx.DiGraph()
    dag.add_nodes_from(range(len(instance)))
    dag.add_weighted_edges_from(instance.edges)
    rank: dict[int, float] = {}
    for task in reversed(list(networkx.topological_sort(dag))):
        after = (dag.edges[task, child]["weight"] + rank[child] for child in dag.successors(task))
        rank[task] = statistics.fmean(instance.seconds[task]) + max(after, default=0.0)
    busy: list[list[Placed]] = [[] for _ in range(instance.devices)]
    plan: dict[int, Placed] = {}
    for task in sorted(rank, key=lambda task: -rank[task]):
        options = (
            _earliest(instance, dag, plan, busy[p], task, p) for p in range(instance.devices)
        )
        chosen = min(options, key=lambda option: option.end)
        plan[task] = chosen
        busy[chosen.device].append(chosen)
        busy[chosen.device].sort(key=lambda item: item.start)
    return [plan[task] for task in range(len(instance))]


def _earliest(
    instance: Instance,
    dag: networkx.DiGraph[int],
    plan: dict[int, Placed],
    busy: list[Placed],
    task: int,
    device: int,
) -> Placed:
    """Return where a task fits first on a device."""
    start = 0.0
    for parent in dag.predecessors(task):
        size = dag.edges[parent, task]["weight"]
        start = max(
            start, plan[parent].end + instance.copy_seconds(size, plan[parent].device, device)
        )
    took = instance.seconds[task][device]
    for item in busy:
        if start + took <= item.start:
            break
        start = max(start, item.end)
    return Placed(device, start, start + took)


def _textbook(chosen: argparse.Namespace) -> str:
    rows = []
    for n in (100, 300) if chosen.quick else (100, 1_000, 10_000):
        one = random_layered(n, 8, 1.0, 0)
        start = time.perf_counter()
        makespan = checked(one, textbook_heft(one))
        took = time.perf_counter() - start
        heft, auto = planned(one, "heft"), planned(one, "auto")
        ratios = (f"{outcome.makespan / makespan:.4f}" for outcome in (heft, auto))
        rows.append(
            (f"{n:,}", f"{took:.2f}", f"{heft.seconds:.2f}", f"{auto.seconds:.2f}", *ratios)
        )
    head = (
        "tasks",
        "networkx HEFT, s",
        "ours: heft, s",
        "auto, s",
        "makespan: heft / its",
        "auto / its",
    )
    note = "Ours with lowering and proof; a makespan of 1 is the textbook's."
    return f"## HEFT over networkx, 8 devices\n\n{table(head, rows)}\n\n{note}"


# ---- OR-Tools


def plain_solver(
    instance: Instance, seconds: float, workers: int = 2
) -> tuple[list[Placed] | None, float]:
    """Plan by CP-SAT, all numbers of the instance being whole; return the plan, if one was found, and the bound."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    tasks, devices = range(len(instance)), range(instance.devices)
    whole = [[round(w) for w in row] for row in instance.seconds]
    latest = sum(map(max, whole)) + sum(round(size) for *_, size in instance.edges)
    start = [model.new_int_var(0, latest, "") for _ in tasks]
    end = [model.new_int_var(0, latest, "") for _ in tasks]
    on = [[model.new_bool_var("") for _ in devices] for _ in tasks]
    for task in tasks:
        model.add_exactly_one(on[task])
    for p in devices:
        model.add_no_overlap(
            model.new_optional_interval_var(start[task], whole[task][p], end[task], on[task][p], "")
            for task in tasks
        )
    for u, v, size in instance.edges:
        model.add(start[v] >= end[u])
        for p in devices:
            model.add(start[v] >= end[u] + round(size)).only_enforce_if(
                on[u][p], on[v][p].negated()
            )
    makespan = model.new_int_var(0, latest, "")
    model.add_max_equality(makespan, end)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, workers
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, solver.best_objective_bound
    where = [next(p for p in devices if solver.boolean_value(on[task][p])) for task in tasks]
    plan = [
        Placed(where[task], float(solver.value(start[task])), float(solver.value(end[task])))
        for task in tasks
    ]
    return plan, solver.best_objective_bound


def _solver(chosen: argparse.Namespace) -> str:
    rows = []
    budget = 2.0 if chosen.quick else 10.0
    for n, devices, ratio in _cells(chosen.quick):
        one = random_layered(n, devices, ratio, 0)
        start = time.perf_counter()
        plan, bound = plain_solver(one, budget)
        took = time.perf_counter() - start
        theirs = f"{checked(one, plan):.0f}" if plan else "none"
        search, exact = planned(one, "search", budget), planned(one, "exact", budget)
        figures = [f"{bound:.0f}", theirs, f"{took:.1f}"]
        figures += [f"{search.makespan:.0f}", f"{search.seconds:.1f}"]
        figures += [f"{exact.makespan:.0f}", f"{exact.bound:.0f}", f"{exact.seconds:.1f}"]
        rows.append((f"{n:,} tasks, {devices} devices, ratio {ratio:g}", *figures))
    head = ("", "CP-SAT: bound", "makespan", "s", "search", "s", "exact", "its bound", "s")
    return f"## OR-Tools alone, {budget:g} s for each\n\n{table(head, rows)}"


def _cells(quick: bool) -> list[tuple[int, int, float]]:
    if quick:
        return [(20, 3, 1.0), (50, 8, 5.0)]
    return [
        (n, p, ratio) for n in (40, 100, 300, 1_000) for p in (3, 8) for ratio in (0.2, 1.0, 5.0)
    ]
