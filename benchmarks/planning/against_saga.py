"""Against SAGA (``anrg-saga``): graph by graph ``auto`` and the best of its schedulers; and the time of both's HEFT.

SAGA is not free software, so nothing here depends on it: where it is not installed a line says how to. It knows devices
of different speeds, not tasks that suit one device more than another, so these graphs are of that kind. Its sets make
it choose among equals by chance, anew in each process.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from _graphs import random_layered, related
from _instances import Instance, Placed, checked
from _ours import TINY, planned
from _report import picture, table
from _shapes import SHAPES

from autosched.problem import Problem
from autosched.viz import charts

INSTALL = """\
SAGA is not installed here. Into a folder of its own, without the packages that only its drawings and its exact
schedulers need:

    pip install --target FOLDER --no-deps anrg-saga==2.0.2 gitpython gitdb smmap pysmt
    pip install pydantic scipy pandas matplotlib
    PYTHONPATH=FOLDER python benchmarks/planning --only saga"""
NAMED = "BIL Cpop Duplex ETF FCP FLB FastestNode Hbmct Heft MCT MET MST MaxMin MinMin Msbc OLB Sufferage WBA".split()
LEFT_OUT = (
    "Left out: BruteForce and SMT (exact, for a handful of tasks), DPS (over a minute for 100 tasks), GDL (makespans "
    "ten times those of the others), Hybrid (the best of others). Of its 72 parametric schedulers all are tried up to "
    "60 tasks, up to 120 those that compare finish times. HBMCT raises AttributeError on most graphs, which counts as "
    "no plan."
)
HEAD = (
    "",
    "graphs",
    "better",
    "as good",
    "worse",
    "worse by 0.1%",
    "mean ratio",
    "worst",
    "seconds, most",
)


def report(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the tables, or how to install what they need."""
    if saga() is None:
        yield f"## SAGA\n\n{INSTALL}"
        return
    logging.getLogger().setLevel(logging.ERROR)  # it warns of sources and sinks that it adds
    yield from _makespans(chosen)
    yield _times(chosen)


@cache
def saga() -> ModuleType | None:
    """Return the package with its schedulers, if it is there."""
    try:
        import saga as package
        import saga.schedulers
        import saga.schedulers.parametric.components
    except ImportError:
        return None
    return package


def instances(quick: bool) -> list[Instance]:
    """Return graphs of eight shapes, at three ratios of copies to work; in every third links differ too."""
    sizes = ((20, 3), (50, 4)) if quick else ((20, 3), (50, 4), (100, 8), (200, 8))
    found = []
    for n, devices in sizes:
        for i, shape in enumerate(SHAPES):
            for k, ratio in enumerate((0.2, 1.0, 5.0)):
                if n < 200 or i % 3 == k:
                    found.append(
                        related(shape, n, devices, ratio, 0, even=(i + len(found)) % 3 != 2)
                    )
    return found[::6] if quick else found


def _makespans(chosen: argparse.Namespace) -> Iterator[str]:
    some = instances(chosen.quick)
    best = [best_of_saga(one) for one in some]
    rows, curves = [], {}
    policies = [("heft", None), ("auto", None), ("auto", 1.0)] + (
        [] if chosen.quick else [("search", 5.0)]
    )
    for policy, seconds in policies:
        ours = [planned(one, policy, seconds) for one in some]
        ratios = [
            outcome.makespan / theirs for outcome, (theirs, _) in zip(ours, best, strict=True)
        ]
        name = policy if seconds is None else f"{policy}, {seconds:g} s"
        shares = [100 * i / (len(ratios) - 1) for i in range(len(ratios))]
        curves[name] = list(zip(shares, sorted(ratios), strict=True))
        rows.append((name, *_figures(ratios), f"{max(outcome.seconds for outcome in ours):.2f}"))
    target = "Target for `auto`: better on at least 80%, never worse by more than 0.1%."
    winners = ", ".join(
        f"{name} {count}" for name, count in Counter(name for _, name in best).most_common()
    )
    yield f"## The best of SAGA, graph by graph\n\n{table(HEAD, rows)}\n\n{target}"
    yield f"Best of SAGA: {winners}. {LEFT_OUT}"
    axes = {"x": "graphs, by ratio (%)", "y": "ratio"}
    svg = charts.lines(curves, title="Makespan over the best of SAGA", **axes)
    yield from picture(
        "planning_saga", "makespan over the best of SAGA, graph by graph", svg, chosen
    )


def _figures(ratios: Sequence[float]) -> tuple[str, ...]:
    same = sum(abs(ratio - 1) <= TINY for ratio in ratios)
    better, worse = (
        sum(ratio < 1 - TINY for ratio in ratios),
        sum(ratio > 1.001 for ratio in ratios),
    )
    counts = (len(ratios), better, same, len(ratios) - better - same, worse)
    return (*map(str, counts), f"{statistics.fmean(ratios):.3f}", f"{max(ratios):.3f}")


# ---- theirs


def best_of_saga(instance: Instance) -> tuple[float, str]:
    """Return the least makespan of SAGA's schedulers by our rules, and whose it is."""
    network, graph = theirs(instance)
    found = []
    for name, scheduler in schedulers(len(instance)).items():
        try:
            plan = placed_by(instance, scheduler.schedule(network, graph))
            found.append((checked(instance, plan), name))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            continue  # no plan, or one that breaks a rule
    return min(found)


@cache
def schedulers(tasks: int) -> dict[str, Any]:
    """Return schedulers that can plan so many tasks."""
    package: Any = saga()
    found = {name: getattr(package.schedulers, f"{name}Scheduler")() for name in NAMED}
    parts = package.schedulers.parametric.components
    for insert, placing in parts.insert_funcs.items():
        for rank, ranking in parts.initial_priority_funcs.items():
            plain = parts.ParametricScheduler(initial_priority=ranking, insert_task=placing)
            if tasks <= 60 or (tasks <= 120 and insert.startswith("EFT")):
                found[f"{rank} {insert}"] = plain
            if tasks <= 60:
                found[f"{rank} {insert} sufferage"] = parts.ParametricSufferageScheduler(
                    scheduler=plain, top_n=2
                )
    return found


def theirs(instance: Instance) -> tuple[Any, Any]:
    """Return an instance as SAGA has it: a network and a task graph.

    It wants one source and one sink, and adds them of no cost, which makes ties; so here they cost next to nothing.
    """
    package: Any = saga()
    speeds = [instance.facts.get(f"speed {p}", 1.0) for p in range(instance.devices)]
    everyone = range(len(instance))
    tasks = [(f"t{i}", instance.seconds[i][0] * speeds[0]) for i in everyone]
    edges = [(f"t{u}", f"t{v}", size) for u, v, size in instance.edges]
    read, made = {u for u, _, _ in instance.edges}, {v for _, v, _ in instance.edges}
    edges += [("source", f"t{task}", 0.0) for task in everyone if task not in made]
    edges += [(f"t{task}", "sink", 0.0) for task in everyone if task not in read]
    links = [
        (f"d{q}", f"d{p}", 1 / instance.pace[q][p] if instance.pace else 1.0)
        for q in range(instance.devices)
        for p in range(q)
    ]
    network = package.Network.create([(f"d{p}", speed) for p, speed in enumerate(speeds)], links)
    return network, package.TaskGraph.create([*tasks, ("source", 1e-9), ("sink", 1e-9)], edges)


def placed_by(instance: Instance, schedule: Any) -> list[Placed]:
    """Read off one of SAGA's schedules what ``checked`` wants."""
    found = {
        int(task.name[1:]): Placed(int(node[1:]), task.start, task.end)
        for node, tasks in schedule.items()
        for task in tasks
        if task.name[0] == "t"
    }
    return [found[task] for task in range(len(instance))]


# ---- time


def _times(chosen: argparse.Namespace) -> str:
    """HEFT of both on the same layered graphs of 8 devices, and the makespans."""
    rows = []
    for n in (100, 300) if chosen.quick else (1_000, 10_000):
        one = _same_speeds(random_layered(n, 8, 1.0, 0))
        package: Any = saga()
        start = time.perf_counter()
        network, graph = theirs(one)
        built = time.perf_counter() - start
        start = time.perf_counter()
        plan = package.schedulers.HeftScheduler().schedule(network, graph)
        took = time.perf_counter() - start
        ours, placing = _our_heft(one)
        makespan = checked(one, placed_by(one, plan))
        figures = (
            f"{built:.2f}",
            f"{took:.2f}",
            f"{placing:.4f}",
            f"{took / placing:,.0f}",
            f"{ours / makespan:.4f}",
        )
        rows.append((f"{n:,}", *figures))
    head = (
        "tasks",
        "SAGA: build, s",
        "its HEFT, s",
        "ours, s",
        "times faster",
        "our makespan / its",
    )
    return f"## HEFT: graph to placement, 8 devices\n\n{table(head, rows)}"


def _same_speeds(one: Instance) -> Instance:
    """Return the instance with devices of speeds 1 to 1.5 instead: tasks take what they take on the first, over it."""
    speeds = [1 + p / 14 for p in range(one.devices)]
    seconds = [[row[0] / speed for speed in speeds] for row in one.seconds]
    return Instance(
        one.name, seconds, one.edges, facts={f"speed {p}": speed for p, speed in enumerate(speeds)}
    )


def _our_heft(one: Instance) -> tuple[float, float]:
    """Return the makespan, and the least seconds of three for the placement alone."""
    from autosched.policies import heft

    graph, machine, least = one.graph(), one.machine(), math.inf
    for _ in range(3):
        start = time.perf_counter()
        heft(Problem(graph, machine))
        least = min(least, time.perf_counter() - start)
    return planned(one, "heft").makespan, least
