"""How fast planning is: from a graph to a placement, to a whole schedule, and a million tasks with what that holds.

Layered graphs, as wide as they are long. Each policy is called once before, on a small graph, so that what is compiled
is compiled; that first call stands in a line of its own.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import random
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

from _report import table
from _shapes import layered

import autosched as asc
from autosched.lowering import lower
from autosched.policies import heft
from autosched.simulate import simulate

PLACING = {1_000: 0.010, 10_000: 0.1, 100_000: 1.0}  # the targets, in seconds
SCHEDULE, MILLION, MEMORY = 6.0, 40.0, 8.0  # seconds, seconds, GiB


def report(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the tables."""
    sizes = (1_000, 10_000) if chosen.quick else tuple(PLACING)
    runs = {n: 3 if chosen.quick or n > 10_000 else 11 for n in sizes}
    warm = _warmed()
    graphs = {n: built(n) for n in sizes}
    yield f"## HEFT on 8 devices, graph to placement\n\n{_placing(graphs, runs)}"
    yield f"The first call of all: {warm:.1f} s."
    yield f'## schedule(policy="heft"): place, lower, prove\n\n{_whole(graphs, runs)}'
    yield f"## Very many tasks on 64 devices, by HEFT\n\n{_many(20_000 if chosen.quick else 1_000_000)}"


def built(tasks: int) -> asc.Graph:
    """Return a layered graph whose copies take about as long as its tasks."""
    rng = random.Random(tasks)
    count, edges = layered(tasks, rng)
    reads: list[list[int]] = [[] for _ in range(count)]
    for u, v in edges:
        reads[v].append(u)
    graph = asc.Graph(f"{tasks} tasks")
    values: list[asc.Value] = []
    for task in range(count):
        arguments = [values[u] for u in reads[task]]
        seconds, nbytes = rng.uniform(1e-5, 1e-3), rng.randrange(10**6, 10**8)
        values.append(graph.add(_nothing, *arguments, name=f"t{task}", seconds=seconds, nbytes=nbytes))
    graph.output(values[-1])
    return graph


def _nothing(*_: object) -> None:
    """Stand for any task."""


def machine(devices: int, contention: bool = True) -> asc.Machine:
    """Return devices that are joined two by two, at the rate of PCIe 5."""
    names = [f"cuda:{p}" for p in range(devices)]
    links = [asc.Link(names[q], names[p], 50e9, 1e-5) for q in range(devices) for p in range(q)]
    return asc.Machine([asc.Device(name) for name in names], links, contention=contention, imagined=True)


def _warmed() -> float:
    """Return the seconds of the first call."""
    small = built(50)
    start = time.perf_counter()
    asc.schedule(small, machine(8), policy="heft")
    first = time.perf_counter() - start
    asc.schedule(small, machine(8, contention=False), policy="heft")
    return first


def _least(runs: int, call: Callable[[], object]) -> float:
    """Return the median seconds of several calls."""
    found = []
    for _ in range(runs):
        gc.collect()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 2]


def _placing(graphs: dict[int, asc.Graph], runs: dict[int, int]) -> str:
    rows = []
    for n, graph in graphs.items():
        figures = []
        for contention in (False, True):
            where = machine(8, contention)
            figures.append(_least(runs[n], lambda graph=graph, where=where: heft(graph, where, asc.Costs())))
        edges = sum(len(task.dependencies) for task in graph.tasks)
        rows.append((f"{n:,}", f"{edges:,}", *(f"{figure:.4f}" for figure in figures), f"{PLACING[n]:g}"))
    head = ("tasks", "edges", "copies occupy nothing, s", "copies occupy streams, s", "target")
    return table(head, rows)


def _whole(graphs: dict[int, asc.Graph], runs: dict[int, int]) -> str:
    rows, each = [], math.nan
    for n, graph in graphs.items():
        where = machine(8)
        took = _least(min(3, runs[n]), lambda graph=graph, where=where: asc.schedule(graph, where, policy="heft"))
        before, each = each, took / n
        grown = "" if math.isnan(before) else f"{each / before:.2f}"
        target = f"{SCHEDULE:g} s, at most 1.3 times" if n == 100_000 else ""
        rows.append((f"{n:,}", f"{took:.3f}", f"{each * 1e6:.1f}", grown, target))
    return table(("tasks", "s", "us per task", "over that of a tenth", "target"), rows)


def _many(tasks: int) -> str:
    """Plan and predict in a process of its own, whose memory is that of this alone."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        steps, memory = pool.submit(_planned_and_predicted, tasks).result()
    rows = [(step, f"{seconds:.1f}", "") for step, seconds in steps.items()]
    planning = sum(seconds for step, seconds in steps.items() if step != "build")
    rows.append(("HEFT, lowering and prediction", f"{planning:.1f}", f"{MILLION:g} s for a million"))
    rows.append(("memory at most, GiB", f"{memory:.1f}", f"{MEMORY:g} GiB for a million"))
    return table((f"{tasks:,} tasks", "seconds", "target"), rows)


def _planned_and_predicted(tasks: int) -> tuple[dict[str, float], float]:
    """Return the seconds of each step, and the most GiB that the process held."""
    _warmed()
    where, costs, steps = machine(64), asc.Costs(), {}
    clock = time.perf_counter()

    def lap(step: str) -> None:
        nonlocal clock
        steps[step], clock = time.perf_counter() - clock, time.perf_counter()

    graph = built(tasks)
    lap("build")
    gc.freeze()
    placement = heft(graph, where, costs)
    lap("HEFT")
    program = lower(graph, where, placement)
    lap("lower")
    simulate(program, graph, where, costs)
    lap("simulate")
    return steps, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
