"""The page of a schedule: its size, and the times of writing, opening and rendering it.

The graphs are random ones in layers. If `make browser` has installed a browser, it measures
the time until the page is ready, and the median times of rendering the whole timeline and a
hundredth of it, with the layout of its elements.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from _report import options, publish, table
from torch import Tensor

import autosched as asc
from autosched.viz import page_html

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.viz.looking import INSTALLED, look

SCRIPT = """
await autosched.ready;
const view = autosched.view, middle = (view.start + view.end) / 2;
const median = () => Array.from({ length: 41 }, autosched.drawNow).sort((a, b) => a - b)[20];
const whole = median();
autosched.zoom(0.01, middle);
return [autosched.readyMs, whole, median()];
"""


def mixed(*tensors: Tensor) -> Tensor:
    """The function of all tasks."""
    return torch.stack(tensors).sum(0)


def layered(tasks: int, seed: int = 0) -> asc.Graph:
    """Return a random graph of about as many layers as a layer has tasks."""
    rng = random.Random(seed)
    graph = asc.Graph(f"{tasks} tasks")
    layer: list[asc.Value] = list(graph.inputs("x", "y", "z"))
    values = layer.copy()
    while len(graph) < tasks:
        made: list[asc.Value] = []
        for _ in range(min(round(tasks**0.5), tasks - len(graph))):
            read = rng.sample(layer, min(rng.choice((2, 3, 3, 4)), len(layer)))
            if rng.random() < 0.2:
                read[-1] = rng.choice(values)
            written = read[:1] if rng.random() < 0.1 else []
            facts = {"seconds": rng.uniform(1e-5, 1e-3), "nbytes": rng.randrange(10**4, 10**6)}
            made.append(graph.add(mixed, *read, writes=written, **facts))
        values += made
        layer = made
    graph.output(*layer)
    return graph


def measured(tasks: int, runs: int) -> list[str]:
    """Return a row of the table: of a graph spread over a CPU and three GPUs without regard to copies."""
    schedule = asc.schedule(layered(tasks), asc.Machine.emulated(gpus=3), policy="round_robin")
    timeline, code, took = schedule.simulate(), str(schedule.code), []
    for _ in range(runs):
        start = time.perf_counter()
        page = page_html(schedule.graph, schedule.program, timeline, code=code)
        took.append(time.perf_counter() - start)
    row = [
        f"{tasks:,}",
        f"{len(timeline.spans):,}",
        f"{len(page) / 1e3:,.0f} kB",
        f"{statistics.median(took):.2f} s",
    ]
    return row + (_in_browser(page, runs) if INSTALLED else ["-"] * 3)


def _in_browser(page: str, runs: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page, encoding="utf-8")
        columns = zip(*(look(path, SCRIPT) for _ in range(runs)), strict=True)
        return [f"{statistics.median(column):,.1f} ms" for column in columns]


def main() -> None:
    chosen = options(__doc__)
    sizes = (1000, 4000) if chosen.quick else (100, 1000, 4000, 10_000)
    rows = [measured(tasks, 1 if chosen.quick else 3) for tasks in sizes]
    head = [
        "tasks",
        "spans",
        "size",
        "to make it",
        "to open it",
        "to draw all",
        "to draw a hundredth",
    ]
    parts = [
        "The page contains the first 6,000 lines of the program and of the code.",
        table(head, rows),
    ]
    publish("page", "The page of a schedule", parts, chosen)


if __name__ == "__main__":
    main()
