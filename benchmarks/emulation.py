"""Accuracy of the emulated machine: measured over predicted makespan.

The graphs are the demo's step and random ones. Tasks do a little real work in the time of their
costs. Other load on the computer increases the measured times, but not those of the emulated
machine.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping

import torch
from _report import options, publish, table
from torch import Tensor

import autosched as asc
from autosched import demo

TASKS, GRAPHS = 50, 10


def total(*tensors: Tensor) -> Tensor:
    """Do a little work."""
    return torch.stack(tensors).sum(0)


def tangled(seed: int) -> asc.Graph:
    """Return a random graph of tasks of 2 to 10 ms whose results take 1 to 4 ms to copy."""
    rng = random.Random(seed)
    graph = asc.Graph(f"random {seed}")
    values = list(graph.inputs("x", "y"))
    for _ in range(TASKS):
        read = rng.sample(values[-12:], min(len(values), rng.randint(1, 3)))
        seconds, nbytes = rng.uniform(2e-3, 10e-3), rng.randrange(1_000_000, 4_000_000)
        values.append(
            graph.add(total, *read, name=f"task{len(graph)}", seconds=seconds, nbytes=nbytes)
        )
    graph.output(*values[-4:])
    return graph


def row(
    graph: asc.Graph, machine: asc.Machine, inputs: Mapping[str, Tensor], runs: int
) -> list[str]:
    """Run a graph several times, and return its line of the table."""
    estimate = graph.name == "two-layer MLP"
    with asc.schedule(graph, machine, examples=inputs if estimate else None) as schedule:
        schedule(**inputs)  # the first run is checked
        ratios = [schedule.profile(**inputs).makespan / schedule.makespan for _ in range(runs)]
        copies = sum(span.kind == "copy" for span in schedule.simulate().spans)
        devices = len(set(schedule.placement.device.values()))
    facts = [f"{len(graph)}", f"{copies}", f"{devices}", f"{schedule.makespan * 1e3:.2f}"]
    return [
        graph.name,
        *facts,
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f}",
        f"{max(ratios):.3f}",
    ]


def main() -> None:
    chosen = options(__doc__)
    torch.set_num_threads(1)
    two = asc.Machine.emulated(gpus=2, link="pcie4").slower(200)
    four = asc.Machine.emulated(gpus=3, bytes_per_second=1e9, latency=1e-4)
    generator = torch.Generator().manual_seed(0)
    batch = {
        "x": torch.rand(demo.BATCH, 64, generator=generator),
        "y": torch.randint(10, (demo.BATCH,), generator=generator),
    }
    step = demo.mlp_step()
    rows = [
        row(step, two, batch | demo.initial_weights(demo.GPUS, two), 9 if chosen.quick else 101)
    ]
    inputs = {"x": torch.rand(16), "y": torch.rand(16)}
    rows += [row(tangled(seed), four, inputs, 5 if chosen.quick else 31) for seed in range(GRAPHS)]
    head = [
        "graph",
        "tasks",
        "copies",
        "devices",
        "predicted ms",
        "measured / predicted, median",
        "least",
        "most",
    ]
    target = "Target: every median from 0.9 to 1.1."
    publish(
        "emulation",
        "Emulated machine: measured over predicted makespan",
        [table(head, rows), target],
        chosen,
    )


if __name__ == "__main__":
    main()
