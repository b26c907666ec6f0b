"""Stream batches through a model whose halves are on two processes, on one host or two.

Run it with ``torchrun --nproc-per-node=2 examples/infer_hosts.py``. Batches begin on rank 0, and
results come back to it. Called one after another, each process waits for the other; with three runs
in flight, both compute all the time. Results are those of the serial model, bit for bit: exit code
1 if they are not.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor, nn

import autosched as asc

WIDTH = 1024
ROWS = 64


def half(seed: int) -> nn.Module:
    """Return half of the model, the same on every rank."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=50)
    count = parser.parse_args().batches
    torch.set_num_threads(1)

    machine = asc.Machine.cluster()  # joins the processes that torchrun started
    front, back = half(0), half(1)
    graph = asc.Graph("two halves")
    x = graph.input("x")
    with graph.on("cpu:0"):
        h = graph.add(front, x, name="front")
    with graph.on("cpu:1"):
        graph.output(y=graph.add(back, h, name="back"))

    batches = [torch.rand(ROWS, WIDTH) for _ in range(count)]
    given: list[dict[str, Tensor]] = [{"x": batch} for batch in batches]
    if machine.rank != 0:
        given = [{} for _ in batches]  # x lives on rank 0; all ranks submit as many runs
    seconds = {}
    found = []
    for in_flight in (1, 3):
        with asc.schedule(graph, machine, outputs="cpu:0", in_flight=in_flight) as schedule:
            for inputs in given[:5]:
                schedule(**inputs)
            begun = time.perf_counter()
            if in_flight == 1:
                found.append([schedule(**inputs) for inputs in given])
            else:
                found.append([*schedule.map(given)])
            seconds[in_flight] = (time.perf_counter() - begun) / count
    if machine.rank == 0:
        for in_flight, taken in seconds.items():
            print(f"{in_flight} in flight: {1e3 * taken:6.2f} ms a batch")
        with torch.no_grad():
            right = [back(front(batch)) for batch in batches]
        for results in found:
            if not all(map(torch.equal, (item["y"] for item in results), right)):
                sys.exit("results differ from those of the serial model")


if __name__ == "__main__":
    main()
