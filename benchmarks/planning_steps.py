"""Times of planning: ``schedule()`` of layered random graphs, by step.

The graphs have 1,000 and 10,000 tasks. Each task reads about three results, most of them of the
previous layer, and one in ten writes one of them in place. The steps of ``auto`` are those of all
the plans that it compares.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _report import options, publish, table
from torch import Tensor

import autosched as asc
from autosched.lowering import fitting

POLICIES = ("single", "round_robin", "heft", "auto")
# The steps, and the globals that contain them.
STEPS: dict[str, dict[str, Any]] = {
    "lower": vars(fitting),
    "durations": asc.Schedule.verify.__globals__,
    "last_end": asc.Schedule.verify.__globals__,
    "verify": asc.Schedule.verify.__globals__,
}


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


def machines() -> dict[str, asc.Machine]:
    whole = asc.Machine.emulated(gpus=8, link="nvlink4")
    gpus = [device for device in whole.devices if device.kind != "cpu"]
    links = [link for link in whole.links if "cpu" not in (link.source, link.destination)]
    return {
        "1 CPU + 3 GPUs": asc.Machine.emulated(gpus=3),
        "8 GPUs": asc.Machine(gpus, links, imagined=True),
    }


@contextlib.contextmanager
def stopwatch(seconds: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of the steps of ``schedule``."""

    def timed(step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start

        return wrapped

    originals = {step: (space, space[step]) for step, space in STEPS.items()}
    for step, (space, call) in originals.items():
        space[step] = timed(step, call)
    try:
        yield
    finally:
        for step, (space, call) in originals.items():
            space[step] = call


def measured(tasks: int, machine: asc.Machine, policy: str, runs: int) -> dict[str, float]:
    """Return median seconds of building, of each step, and of all; and the instructions."""
    found: list[dict[str, float]] = []
    for _ in range(runs):
        gc.collect()
        start = time.perf_counter()
        graph = layered(tasks)
        seconds = {"build": time.perf_counter() - start}
        with stopwatch(seconds):
            start = time.perf_counter()
            schedule = asc.schedule(graph, machine, policy=policy)
            seconds["in all"] = time.perf_counter() - start
        seconds["place"] = seconds["in all"] - sum(seconds[step] for step in STEPS)
        found.append(seconds)
    medians = {step: statistics.median(seconds[step] for seconds in found) for step in found[0]}
    return medians | {"instructions": len(schedule.program)}


def main() -> None:
    chosen = options(__doc__)
    parts = []
    for tasks, target in ((1_000, 0.5), (10_000, 5.0)):
        runs = (5 if chosen.quick else 21) if tasks < 10_000 else (1 if chosen.quick else 5)
        rows = []
        for name, machine in machines().items():
            for policy in POLICIES:
                seconds = measured(tasks, machine, policy, runs)
                figures = [f"{seconds[step]:.3f}" for step in ("build", "place", *STEPS, "in all")]
                rows.append([f"{name}, {policy}", *figures, f"{seconds['instructions']:,.0f}"])
        head = ["", "build", "place", *STEPS, "schedule() in all", "instructions"]
        title = f"## {tasks:,} tasks: seconds, median of {runs}"
        parts.append(
            f"{title}\n\n{table(head, rows)}\n\nTarget for `heft` and `auto`: below {target} s in all."
        )
    publish("planning_steps", "Planning, step by step", parts, chosen, ("torch", "networkx"))


if __name__ == "__main__":
    main()
