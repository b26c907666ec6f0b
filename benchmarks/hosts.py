"""Copies between ranks, and failures of a rank, on one host over gloo.

Two processes send a tensor to and fro. In turn, in the same processes, a program of
torch.distributed does so by isend and irecv, into the same memory at each hop; another one into
memory of its own for each hop, where receives begin ahead; and a schedule, which has such memory,
and whose ranks compare their inputs before each call. A row has what a hop adds to the least time of
each, and what the ranks of a schedule need for a call beside its hops. Idle cores of virtual machines
take a millisecond to wake, so only the ratio is of use.

Then processes run a step in a loop, one of them is killed at a random moment, and the others
must end with an error that names it. Torch's import and the end of the process are not in
their time.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _ranks import launch
from _report import options, publish, table

import autosched as asc

HOPS = 20, 80  # in two calls; their difference has no more than hops
SIZES = {"64 B": 64, "1 MiB": 1 << 20, "16 MiB": 1 << 24}

# ---- copies


def touch(x: torch.Tensor) -> None:
    """Change a tensor, in no time."""
    x[:1].add_(1)


def to_and_fro(hops: int) -> asc.Graph:
    """Return a graph whose value is changed on one rank after the other."""
    graph = asc.Graph("to and fro")
    with graph.on("cpu:0"):
        value = graph.input("x").clone()
    for hop in range(hops):
        with graph.on(f"cpu:{(hop + 1) % 2}"):
            graph.add(touch, value, writes=[value], outputs=(), name=f"hop{hop}")
    graph.output(y=value)
    return graph


def by_hand(x: torch.Tensor, buffer: torch.Tensor, hops: int, rank: int) -> torch.Tensor:
    """Send, receive and change as the graph does."""
    y = x.clone() if rank == 0 else buffer
    for hop in range(hops):
        if hop % 2 == rank:
            work = dist.isend(y, 1 - rank)
        else:
            work = dist.irecv(y, 1 - rank)
        assert work is not None
        work.wait()
        if hop % 2 != rank:
            touch(y)
    return y


def ahead(x: torch.Tensor, buffers: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Do so with receives that begin ahead, each in memory of its own."""
    hops = len(buffers)
    received = [hop for hop in range(hops) if hop % 2 != rank]
    works = {hop: dist.irecv(buffers[hop], 1 - rank, tag=hop) for hop in received}
    y = x.clone() if rank == 0 else buffers[0]
    for hop in range(hops):
        work = works[hop] if hop in works else dist.isend(y, 1 - rank, tag=hop)
        assert work is not None
        work.wait()
        if hop in works:
            y = buffers[hop]
            touch(y)
    return y


def compare(
    machine: asc.Machine, _: Any, nbytes: int, rounds: int
) -> list[tuple[float, float, float]] | None:
    """Return the least seconds by hand, ahead, and of a schedule, by number of hops, on rank 0."""
    x = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    found = [least(machine, x, hops, rounds) for hops in HOPS]
    return found if machine.rank == 0 else None


def least(
    machine: asc.Machine, x: torch.Tensor, hops: int, rounds: int
) -> tuple[float, float, float]:
    """Return the least seconds of so many hops by hand, ahead, and of a schedule."""
    buffer = torch.empty_like(x)
    buffers = [torch.empty_like(x) for _ in range(hops)]
    seconds = [float("inf")] * 3
    rank = machine.rank
    assert rank is not None
    with asc.schedule(to_and_fro(hops), machine) as schedule:
        given = {"x": x} if rank == 0 else {}
        schedule(**given)
        for _ in range(rounds):
            for number, call in enumerate(
                (
                    lambda: by_hand(x, buffer, hops, rank),
                    lambda: ahead(x, buffers, rank),
                    lambda: schedule(**given),
                )
            ):
                call()
                dist.barrier()
                begun = time.perf_counter()
                call()
                seconds[number] = min(seconds[number], time.perf_counter() - begun)
        found = schedule(**given)
        assert rank or torch.equal(found["y"], by_hand(x, buffer, hops, 0))
        assert not rank or by_hand(x, buffer, hops, 1) is buffer
    return seconds[0], seconds[1], seconds[2]


def per_hop(few: Sequence[float], many: Sequence[float]) -> list[float]:
    """Return what one hop adds."""
    return [(b - a) / (HOPS[1] - HOPS[0]) for a, b in zip(few, many, strict=True)]


# ---- failures


def loop(machine: asc.Machine, results: Any) -> tuple[int, float, str]:
    """Run a step until it fails; return the rank, when it failed, and the message."""
    graph = asc.Graph("loop")
    value = graph.input("x")
    for _ in range(3):
        for name in machine.names:
            with graph.on(name):
                value = torch.tanh(value @ value)
    graph.output(y=value)
    assert machine.rank is not None
    try:
        with asc.schedule(graph, machine) as schedule:
            given = {"x": torch.rand(64, 64)} if machine.rank == 0 else {}
            schedule(**given)
            results.put("runs")
            while True:
                schedule(**given)
    except asc.RankError as error:
        return machine.rank, time.time(), str(error)


def fail(size: int, seed: int) -> list[float]:
    """Kill a rank at a random moment; return after how many seconds each other one failed.

    Rank 0 has the store, which belongs to torchrun otherwise.
    """
    rng = random.Random(seed)
    processes, results = launch(size, loop)
    for _ in processes:
        assert results.get(timeout=60) == "runs"
    time.sleep(rng.uniform(0.0, 0.3))
    victim = rng.randrange(size)
    moment = time.time()
    os.kill(processes[victim].pid or 0, signal.SIGKILL)
    found = [results.get(timeout=10) for _ in range(size - 1)]
    for rank, process in enumerate(processes):
        process.join(10)
        assert process.exitcode is not None, f"rank {rank} hangs"
    for _, _, message in found:
        assert message.startswith(f"rank {victim} has gone"), message
    return [end - moment for _, end, _ in found]


def main() -> None:
    chosen = options(__doc__)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    rows = []
    for name, nbytes in SIZES.items():
        ratios = []
        shortest = [[float("inf")] * 3 for _ in HOPS]
        for _ in range(1 if chosen.quick else 5):
            processes, results = launch(2, compare, nbytes, 10 if chosen.quick else 50)
            found = results.get(timeout=300)
            hand, _, ours = per_hop(*found)
            ratios.append(ours / hand)
            shortest = [
                [min(pair) for pair in zip(*times, strict=True)]
                for times in zip(shortest, found, strict=True)
            ]
            for process in processes:
                process.join()
        hops = per_hop(*shortest)
        call = shortest[0][2] - HOPS[0] * hops[2]
        facts = [f"{seconds * 1e6:,.0f}" for seconds in (*hops, call)]
        rows.append([name, *facts, f"{hops[2] / hops[0]:.2f}", f"{median(ratios):.2f}"])
    moments = range(2 if chosen.quick else 20)
    latest = max(max(fail(3, seed)) for seed in moments)
    failures = (
        f"A rank was killed at {len(moments)} random moments: all others ended with an error "
        f"that names it, the last {latest * 1e3:.0f} ms after."
    )
    times = ["isend, irecv (us)", "ahead (us)", "schedule (us)", "a call of it (us)"]
    head = ["a hop of", *times, "schedule / isend, irecv", "median launch"]
    publish(
        "hosts",
        "Copies between ranks, and killed ranks",
        [
            table(head, rows),
            "Target: 1.2 from 1 MiB. A call is what is left of it without hops: the ranks compare "
            "their inputs.",
            failures,
        ],
        chosen,
    )


if __name__ == "__main__":
    main()
