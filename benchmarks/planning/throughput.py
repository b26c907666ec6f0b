"""Pipelines of networks: periods, beside optimal contiguous splits of layer and operator graphs.

The graphs are those of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS
2020, read from the folder ``dnn_placement`` of ``--data``, with the devices and copies of their experiments on
throughput: one CPU core and accelerators; copies of layer graphs take a thousandth of what the files say. Their cost of
a split is its greatest load: an accelerator's seconds of computing and of copies from and to the host's memory, added.
The optimum of contiguous splits is what their program finds by dynamic programming over all ideals
(``throughput-dp/dp.cpp`` of github.com/msr-fiddle/dnn-partitioning); "-" where it took too long.

``in their model`` is the greatest load of our split for that model. ``period`` is that of a schedule with
``objective="period"``: there copy streams work while devices compute, so it may be below that optimum; its bound holds
for all schedules.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from _graphs import network_file
from _instances import Instance
from _ours import timed
from _report import table

import autosched as asc
from autosched.policies.local_search.splitting import split

HEAD = (
    "",
    "accelerators",
    "optimum, ms",
    "in their model",
    "period, ms",
    "of optimum",
    "bound, ms",
)
HEAD = (*HEAD, "in flight", "plan: s", "target")

# By folder and network: accelerators, and the optimum of contiguous splits in milliseconds.
KNOWN: Mapping[tuple[str, str], tuple[int, float | None]] = {
    ("LayerGraphs", "bert24"): (6, 17.7899),
    ("LayerGraphs", "gnmt"): (6, 32.9107),
    ("LayerGraphs", "inceptionv3"): (6, None),
    ("LayerGraphs", "resnet50"): (6, 33.7747),
    ("OperatorGraphs", "bert_l-3"): (3, 27.9186),
    ("OperatorGraphs", "bert_l-6"): (3, 29.5795),
    ("OperatorGraphs", "bert_l-12"): (6, 147.478),
    ("OperatorGraphs", "resnet50"): (6, 124.349),
}
COPIES = {"LayerGraphs": 1e-3, "OperatorGraphs": 1.0}  # times what the files say
QUICK = ("LayerGraphs", "bert24"), ("OperatorGraphs", "bert_l-3")


def report(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the table, where there is data."""
    folder = chosen.data / "dnn_placement" if chosen.data else None
    if folder is None or not folder.exists():
        yield "No data was given."
        return
    yield table(HEAD, [_row(folder, *name) for name in (QUICK if chosen.quick else KNOWN)])


def _row(folder: Path, kind: str, name: str) -> tuple[str, ...]:
    accelerators, optimum = KNOWN[kind, name]
    read = network_file(folder / kind / f"{name}_inference.json", accelerators, together=True)
    edges = [(u, v, size * COPIES[kind]) for u, v, size in read.edges]
    instance = dataclasses.replace(read, edges=edges)
    graph, machine = instance.graph(one_value=True), instance.machine(contention=True)
    theirs = load(instance, split(overlap=False)(asc.Problem(graph, machine)))
    schedule, seconds = timed(graph, machine, "auto", objective="period")
    return (
        f"{name}, {'layers' if kind == 'LayerGraphs' else 'operators'}",
        str(accelerators),
        "-" if optimum is None else f"{optimum:.2f}",
        f"{theirs:.2f}" + ("" if optimum is None else f" ({theirs / optimum:.3f})"),
        f"{schedule.period:.2f}",
        "-" if optimum is None else f"{schedule.period / optimum:.3f}",
        f"{schedule.period_bound:.2f}",
        str(schedule.program.in_flight),
        f"{seconds:.1f}",
        "at most 1.02, 5 s",
    )


def load(instance: Instance, placement: asc.Placement) -> float:
    """Return the greatest load of a placement in the model of the paper.

    The output of a task is copied to the host's memory once, and from there once to each accelerator that reads it.
    """
    names = instance.device_names
    where = [names.index(placement.device[f"t{task}"]) for task in range(len(instance))]
    found: dict[int, float] = defaultdict(float)
    for task, device in enumerate(where):
        found[device] += instance.seconds[task][device]
    host = names.index("cpu")
    copies: dict[tuple[int, int, bool], float] = {}
    for u, v, size in instance.edges:
        if where[u] != where[v]:
            copies[u, where[u], False] = size
            copies[u, where[v], True] = size
    for (_, device, _), size in copies.items():
        found[device] += size if device != host else 0.0
    return max(found.values())
