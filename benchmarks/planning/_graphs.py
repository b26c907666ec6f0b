"""Families of instances: made here, by recipes of the literature, or read from folders that ``--data`` names.

Knows no planner. Everything random comes from a seed, so an instance's name says all of it.
"""

from __future__ import annotations

import csv
import json
import random
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from _instances import Edge, Instance, Placed
from _shapes import SHAPES, layered

_TOPCUOGLU = (
    "14 16 9; 13 19 18; 11 13 19; 13 8 17; 12 13 10; 13 16 9; 7 15 11; 5 11 14; 18 12 20; 21 7 16",
    "1-2 18, 1-3 12, 1-4 9, 1-5 11, 1-6 14, 2-8 19, 2-9 16, 3-7 23, 4-8 27, 4-9 23, 5-9 13, 6-8 15, 7-10 17, 8-10 11, "
    "9-10 13",
)
_ARABNEJAD = (
    "22 21 36; 22 18 18; 32 27 43; 7 10 4; 29 27 35; 26 17 24; 14 25 30; 29 23 36; 15 21 8; 13 16 33",
    "1-2 17, 1-3 31, 1-4 29, 1-5 13, 1-6 7, 2-8 3, 2-9 30, 3-7 16, 4-8 11, 4-9 7, 5-9 57, 6-8 5, 7-10 9, 8-10 42, "
    "9-10 7",
)


def examples() -> list[Instance]:
    """Return the worked examples of HEFT (Topcuoglu 2002) and PEFT (Arabnejad 2014), with proved optima."""
    return [_written("Topcuoglu", *_TOPCUOGLU, 73.0), _written("Arabnejad", *_ARABNEJAD, 113.0)]


def _written(name: str, seconds: str, edges: str, optimum: float) -> Instance:
    rows = [[float(item) for item in row.split()] for row in seconds.split(";")]
    pairs = (edge.replace("-", " ").split() for edge in edges.split(","))
    return Instance(
        name, rows, [(int(u) - 1, int(v) - 1, float(c)) for u, v, c in pairs], optimum, optimum
    )


# ---- made


def random_layered(
    tasks: int, devices: int, ratio: float, seed: int, width: int | None = None
) -> Instance:
    """Return a layered graph on unrelated devices: W = U(1, 100) U(0.5, 1.5), copies U(0, 2) ratio mean(W)."""
    rng = random.Random(f"layered {tasks} {devices} {ratio} {seed}")
    count, pairs = layered(tasks, rng, width)
    base = [rng.uniform(1, 100) for _ in range(count)]
    seconds = [
        [float(max(1, round(w * rng.uniform(0.5, 1.5)))) for _ in range(devices)] for w in base
    ]
    facts = {"ratio": ratio, "devices": devices}
    name = f"layered-{tasks}-{devices}-{ratio:g}-{seed}"
    return Instance(name, seconds, _sized(pairs, seconds, ratio, rng), facts=facts)


def _sized(
    pairs: Iterable[tuple[int, int]], seconds: Sequence[Sequence[float]], ratio: float, rng: Any
) -> list[Edge]:
    """Give each edge a size, uniform in [0, 2 ratio mean(W)], whole where tasks are."""
    mean = statistics.fmean(statistics.fmean(row) for row in seconds)
    whole = all(w == int(w) for w in seconds[0])
    sizes = ((u, v, rng.uniform(0, 2 * ratio * mean)) for u, v in pairs)
    return [(u, v, float(round(size)) if whole else size) for u, v, size in sizes]


def related(
    shape: str, tasks: int, devices: int, ratio: float, seed: int, even: bool = True
) -> Instance:
    """Return a graph on devices of different speeds, with links of one speed (``even``) or of many."""
    name = f"{shape}-{tasks}-{devices}-{ratio:g}-{seed}{'' if even else '-links'}"
    rng = random.Random(name)
    count, pairs = SHAPES[shape](tasks, rng)
    costs = [rng.uniform(1, 100) for _ in range(count)]
    speeds = [rng.uniform(0.5, 2.0) for _ in range(devices)]
    seconds = [[cost / speed for speed in speeds] for cost in costs]
    pace = [[0.0] * devices for _ in range(devices)]
    for q in range(devices):
        for p in range(q):
            pace[p][q] = pace[q][p] = 1.0 if even else rng.uniform(0.5, 2.0)
    facts = {f"speed {p}": speed for p, speed in enumerate(speeds)}
    return Instance(
        name,
        seconds,
        _sized(pairs, seconds, ratio, rng),
        pace=() if even else pace,
        facts={**facts, "ratio": ratio},
    )


def planted(tasks: int, devices: int, ratio: float, seed: int, unequal: bool = True) -> Instance:
    """Return a graph built around a schedule without idle time, which so is optimal.

    [0, 12 tasks / devices] is cut at random on each device; edges lead from what ends to what starts later, mostly
    soon, and a copy that would come too late is made to fit or left out. ``unequal``: other devices take 1 to 2 times
    longer.
    """
    name = f"planted-{tasks}-{devices}-{ratio:g}-{seed}{'' if unequal else '-same'}"
    rng = random.Random(name)
    total = 12 * tasks // devices
    spans = sorted(
        (start, end, p) for p in range(devices) for start, end in _cut(total, tasks // devices, rng)
    )
    mean = statistics.fmean(end - start for start, end, _ in spans)
    seconds = [
        [
            float(end - start) * (rng.uniform(1, 2) if unequal and p != own else 1.0)
            for p in range(devices)
        ]
        for start, end, own in spans
    ]
    edges = _fitting(spans, 2 * tasks, 2 * devices, 2 * ratio * mean, rng)
    plan = [Placed(own, float(start), float(end)) for start, end, own in spans]
    facts = {"ratio": ratio, "devices": devices}
    return Instance(name, seconds, edges, float(total), float(total), facts=facts, plan=plan)


def _cut(total: int, parts: int, rng: random.Random) -> Iterator[tuple[int, int]]:
    return pairwise([0, *sorted(rng.sample(range(1, total), parts - 1)), total])


def _fitting(
    spans: Sequence[tuple[int, int, int]], wanted: int, back: float, most: float, rng: random.Random
) -> list[Edge]:
    """Draw edges that the schedule ``spans`` keeps."""
    by_end = sorted(range(len(spans)), key=lambda task: spans[task][1])
    ends = [spans[task][1] for task in by_end]
    found: dict[tuple[int, int], float] = {}
    for _ in range(20 * wanted):
        if len(found) >= wanted:
            break
        v = rng.randrange(len(spans))
        start, _, device = spans[v]
        there = bisect_right(ends, start) - 1 - int(rng.expovariate(1 / back))
        if there < 0 or (by_end[there], v) in found:
            continue
        u = by_end[there]
        size, slack = float(round(rng.uniform(0, most))), float(start - spans[u][1])
        if spans[u][2] != device and size > slack:
            if rng.random() < 0.5:
                continue
            size = slack
        found[u, v] = size
    return sorted((u, v, size) for (u, v), size in found.items())


# ---- read


def layered_folder(folder: Path) -> list[Instance]:
    """Read JSON files of ``W``, ``edges``, and ``lower_bound`` and ``best``, or ``optimum`` and the plan planted."""
    made = []
    for path in sorted(folder.glob("*.json")):
        told = json.loads(path.read_text())
        bound, best = (
            told[key] if key in told else told["optimum"] for key in ("lower_bound", "best")
        )
        edges = [(u, v, float(size)) for u, v, size in told["edges"]]
        facts = {"ratio": _number_behind(path.stem, "ccr"), "devices": len(told["W"][0])}
        facts["unequal"] = float(any(min(row) < max(row) for row in told["W"]))
        where = zip(
            told["W"], told.get("planted_device", ()), told.get("planted_start", ()), strict=False
        )
        plan = [Placed(p, float(start), float(start + row[p])) for row, p, start in where]
        made.append(
            Instance(path.stem, told["W"], edges, float(bound), float(best), facts=facts, plan=plan)
        )
    return made


def _number_behind(name: str, word: str) -> float:
    return float(next(part[len(word) :] for part in name.split("_") if part.startswith(word)))


def stg_folder(folder: Path) -> list[Instance]:
    """Read Standard Task Graphs (``.stg``), once for each row of ``makespans.csv``: identical devices, no copies."""
    with (folder / "makespans.csv").open() as file:
        rows = list(csv.DictReader(file))
    made, known = [], dict[str, tuple[list[float], list[Edge]]]()
    for row in rows:
        if row["graph"] not in known:
            known[row["graph"]] = _stg((folder / row["graph"]).read_text())
        work, edges = known[row["graph"]]
        devices = int(row["processors"])
        facts = {"devices": devices, "tasks": len(work) - 2, "proved": float(row["proved_optimal"])}
        bound, best = float(row["lower_bound"]), float(row["best_known"])
        name = f"{row['graph']} on {devices}"
        made.append(Instance(name, [[w] * devices for w in work], edges, bound, best, facts=facts))
    return made


def _stg(text: str) -> tuple[list[float], list[Edge]]:
    lines = [[int(word) for word in line.split("#")[0].split()] for line in text.splitlines()]
    tasks = [line for line in lines[1:] if len(line) > 2]
    return [float(task[1]) for task in tasks], [
        (u, task[0], 0.0) for task in tasks for u in task[3:]
    ]


def network_file(path: Path, accelerators: int, together: bool = False) -> Instance:
    """Read a network of the ``dnn_placement`` set, in milliseconds, on one CPU and accelerators.

    An edge's cost is a copy between host and accelerator; ``together`` keeps the tasks of a colour on one device.
    """
    told = json.loads(path.read_text())
    number = {node["id"]: i for i, node in enumerate(told["nodes"])}
    seconds = [
        [
            float(node["cpuLatency"]),
            *[float(node["fpgaLatency"]) if node["supportedOnFpga"] else 1e9] * accelerators,
        ]
        for node in told["nodes"]
    ]
    edges = [(number[e["sourceId"]], number[e["destId"]], float(e["cost"])) for e in told["edges"]]
    groups: dict[Any, list[int]] = defaultdict(list)
    for node in told["nodes"]:
        if together and node.get("colorClass") is not None:
            groups[node["colorClass"]].append(number[node["id"]])
    names = ["cpu", *(f"cuda:{p}" for p in range(accelerators))]
    kept = [tasks for tasks in groups.values() if len(tasks) > 1]
    facts = {"devices": accelerators}
    return Instance(
        f"{path.stem} on {accelerators}", seconds, edges, together=kept, names=names, facts=facts
    )
