"""What it is worth to plan for a machine as it is: copies hold copy streams, and a datum goes to a device once.

Blind: planned by HEFT as if copies occupied nothing, then run where they do, in the same order. Aware: the same HEFT,
planned for that machine. Makespans are over the best bound of all plans. Small graphs are beside ``exact``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator

from _graphs import random_layered
from _instances import Instance
from _ours import exact_is_there, timed
from _report import table

import autosched as asc

HEAD = (
    "8 devices",
    "blind: claims",
    "blind: takes",
    "aware",
    "auto",
    "blind / auto",
    "auto: s",
    "target",
)
EXACT = ("", "graphs", "proved", "auto / exact, mean", "worst", "exact: s, most", "target")


def report(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the tables."""
    yield table(HEAD, _blind(chosen))
    if exact_is_there():
        yield f"## Beside exact\n\n{table(EXACT, _small(chosen))}"


def _blind(chosen: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    for n in (1_000,) if chosen.quick else (1_000, 10_000):
        for ratio in (0.2,) if chosen.quick else (0.2, 1.0, 3.0):
            one = random_layered(n, 8, ratio, 0, width=32)
            graph, machine = as_it_is(one)
            claimed, _ = timed(graph, one.machine(), "heft")
            blind, _ = timed(graph, machine, lambda *_, claimed=claimed: claimed.placement)
            aware, _ = timed(graph, machine, "heft")
            auto, took = timed(graph, machine, "auto")
            bound = max(plan.lower_bound for plan in (blind, aware, auto))
            figures = (f"{plan.makespan / bound:.2f}" for plan in (claimed, blind, aware, auto))
            gain = f"{blind.makespan / auto.makespan:.2f}"
            target = "at least 1.9 times better" if (n, ratio) == (10_000, 0.2) else ""
            yield (f"{n:,} tasks, ratio {ratio:g}", *figures, gain, f"{took:.1f}", target)


def as_it_is(one: Instance) -> tuple[asc.Graph, asc.Machine]:
    """Return a graph in which a task leaves one value, and a machine on which copies hold copy streams."""
    return one.graph(one_value=True), one.machine(contention=True)


def _small(chosen: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    seconds = 3.0 if chosen.quick else 30.0
    for n, p, ratio in itertools.product((20,) if chosen.quick else (20, 40), (3, 8), (0.2, 1.0)):
        over, proved, most = [], 0, 0.0
        for seed in range(1 if chosen.quick else 3):
            graph, machine = as_it_is(random_layered(n, p, ratio, seed))
            best, took = timed(graph, machine, "exact", seconds)
            auto, _ = timed(graph, machine, "auto")
            over.append(auto.makespan / best.makespan)
            proved += best.makespan <= best.lower_bound * (1 + 1e-6)
            most = max(most, took)
        figures = (
            str(len(over)),
            str(proved),
            f"{statistics.fmean(over):.3f}",
            f"{max(over):.3f}",
            f"{most:.1f}",
        )
        yield (f"{n} tasks, {p} devices, ratio {ratio:g}", *figures, "within 1.10")
