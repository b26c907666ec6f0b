"""How fast planning is: from a graph to a placement, to a whole schedule, and a million tasks with what that holds.

Layered graphs, as wide as they are long. The largest is scheduled twice before, so that what is to be compiled is
compiled: for good if it never was, or else read from disk. The first plan of a new environment is made in a process of
its own, for which nothing was compiled.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from _report import picture, table
from _shapes import layered

import autosched as asc
from autosched.lowering import lower
from autosched.policies import heft
from autosched.simulation.simulate import simulate
from autosched.viz import charts

PLACING = {1_000: 0.010, 10_000: 0.1, 100_000: 1.0}  # the targets, in seconds
SCHEDULE = {10_000: 0.6, 100_000: 6.0}  # seconds of heft; auto may take four times as long
FIRST, MILLION, MEMORY = 2.0, 40.0, 8.0  # seconds, seconds, GiB


def report(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the tables, and a picture of seconds per task."""
    sizes = (1_000, 10_000) if chosen.quick else tuple(PLACING)
    alone = _in_a_new_environment()
    _warmed(sizes[-1])
    graphs = {n: built(n) for n in sizes}
    runs = {n: 3 if chosen.quick or n > 10_000 else 11 for n in sizes}
    free = {n: _median(runs[n], partial(_placed, graphs[n], machine(8, False))) for n in sizes}
    aware = {n: _median(runs[n], partial(_placed, graphs[n], machine(8))) for n in sizes}
    whole = {
        n: _median(3, partial(asc.schedule, graphs[n], machine(8), policy="heft")) for n in sizes
    }
    yield f"## HEFT on 8 devices, graph to placement\n\n{_placing(graphs, free, aware)}"
    yield f"The first schedule of 1,000 tasks in a new environment took {alone:.2f} s, of at most {FIRST:g} s."
    yield f'## schedule(policy="heft"): place, lower, prove\n\n{_whole(whole)}'
    if not chosen.quick:
        auto = _median(3, partial(asc.schedule, graphs[10_000], machine(8), policy="auto"))
        times = auto / whole[10_000]
        yield f"With `auto`, 10,000 tasks take {auto:.2f} s, {times:.1f} times as long, of at most 4."
    yield f"## Very many tasks on 64 devices, by HEFT\n\n{_many(20_000 if chosen.quick else 1_000_000)}"
    lines = {
        name: [(n, seconds / n) for n, seconds in found.items()]
        for name, found in (
            ("HEFT, copies occupy nothing", free),
            ("HEFT", aware),
            ("schedule()", whole),
        )
    }
    axes = {"x": "tasks", "y": "time per task", "unit": "s", "log_x": True}
    svg = charts.lines(lines, title="Planning", **axes)
    yield from picture("planning_speed", "time per task by number of tasks", svg, chosen)


def _placed(graph: asc.Graph, machine: asc.Machine) -> asc.Placement:
    return heft(asc.Problem(graph, machine))


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
        values.append(
            graph.add(_nothing, *arguments, name=f"t{task}", seconds=seconds, nbytes=nbytes)
        )
    graph.output(values[-1])
    return graph


def _nothing(*_: object) -> None:
    """Stand for any task."""


def machine(devices: int, contention: bool = True) -> asc.Machine:
    """Return devices that are joined two by two, at the rate of PCIe 5."""
    names = [f"cuda:{p}" for p in range(devices)]
    links = [asc.Link(names[q], names[p], 50e9, 1e-5) for q in range(devices) for p in range(q)]
    return asc.Machine(
        [asc.Device(name) for name in names], links, contention=contention, imagined=True
    )


def _warmed(tasks: int) -> None:
    """Schedule often enough that all that is worth it is compiled."""
    some = built(tasks)
    for _ in range(2):
        asc.schedule(some, machine(8), policy="heft")
    heft(asc.Problem(some, machine(8, contention=False)))


def _in_a_new_environment() -> float:
    """Return the seconds of the first schedule of a process for which nothing was compiled."""
    with tempfile.TemporaryDirectory() as cache:
        where = os.environ | {"NUMBA_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", "import speed; print(speed.first())"]
        found = subprocess.run(command, env=where, check=True, capture_output=True, text=True)
    return float(found.stdout)


def first() -> float:
    """Return the seconds of a schedule of 1,000 tasks."""
    return _median(1, partial(asc.schedule, built(1_000), machine(8), policy="heft"))


def _median(runs: int, call: Callable[[], object]) -> float:
    """Return the median seconds of several calls."""
    found = []
    for _ in range(runs):
        gc.collect()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _placing(graphs: dict[int, asc.Graph], free: dict[int, float], aware: dict[int, float]) -> str:
    edges = {n: sum(len(task.dependencies) for task in graph.tasks) for n, graph in graphs.items()}
    rows = [
        (f"{n:,}", f"{edges[n]:,}", f"{free[n]:.4f}", f"{aware[n]:.4f}", f"{PLACING[n]:g}")
        for n in graphs
    ]
    return table(
        ("tasks", "edges", "copies occupy nothing, s", "copies occupy streams, s", "target"), rows
    )


def _whole(seconds: dict[int, float]) -> str:
    rows = []
    for n, took in seconds.items():
        grown = f"{took / 10 / seconds[n // 10]:.2f}" if n // 10 in seconds else ""
        target = f"{SCHEDULE[n]:g} s, at most 1.3 times" if n in SCHEDULE else ""
        rows.append((f"{n:,}", f"{took:.3f}", f"{took / n * 1e6:.1f}", grown, target))
    return table(("tasks", "s", "us per task", "over that of a tenth", "target"), rows)


def _many(tasks: int) -> str:
    """Plan and predict in a process of its own, whose memory is that of this alone."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        steps, memory = pool.submit(_planned_and_predicted, tasks).result()
    rows = [(step, f"{seconds:.1f}", "") for step, seconds in steps.items()]
    planning = sum(seconds for step, seconds in steps.items() if step != "build")
    rows.append(
        ("HEFT, lowering and prediction", f"{planning:.1f}", f"{MILLION:g} s for a million")
    )
    rows.append(("memory at most, GiB", f"{memory:.1f}", f"{MEMORY:g} GiB for a million"))
    return table((f"{tasks:,} tasks", "seconds", "target"), rows)


def _planned_and_predicted(tasks: int) -> tuple[dict[str, float], float]:
    """Return the seconds of each step, and the most GiB that the process held."""
    _warmed(min(tasks, 100_000))
    where, costs, steps = machine(64), asc.Costs(), {}
    clock = time.perf_counter()

    def lap(step: str) -> None:
        nonlocal clock
        steps[step], clock = time.perf_counter() - clock, time.perf_counter()

    graph = built(tasks)
    lap("build")
    gc.freeze()
    placement = heft(asc.Problem(graph, where, costs))
    lap("HEFT")
    program = lower(asc.Problem(graph, where), placement)
    lap("lower")
    simulate(program, asc.Problem(graph, where, costs))
    lap("simulate")
    return steps, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
