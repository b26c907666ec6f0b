"""Plan for clusters: the time of planning for 1,000 ranks, and training on up to 1,024 hosts.

**Planning.** 1,000 ranks with a CPU each run 16 tasks each; every fourth value goes to the next
rank. Each figure is of a process of its own: the CPU seconds of lowering, of verification and of
simulation, after kernels were loaded, and the peak of memory after lowering.

**Weak scaling.** A data-parallel training step, predicted: each host has one GPU and its own batch,
so more hosts do more work in the same time, at best. Efficiency is the time on one host over that
on n. The assumptions:

* forward takes 20 ms, the backward pass of each of two buckets of gradients 20 ms, and the update
  1 ms. A bucket has 50 MB. Its all-reduce begins when its backward pass has ended, so the first is
  hidden behind the second as far as possible;
* all-reduce halves recursively (reduce-scatter: each GPU sends half of what it has, adds what it
  receives) and doubles recursively (all-gather), in 2 log2(n) steps. Additions take the time of
  three accesses to memory at 2.5 TB/s, joining two halves that of two;
* *direct*: each GPU is on a network of 40 GB/s and 20 us in each direction; *staged*: GPUs reach it
  by way of their hosts, 25 GB/s and 10 us to the host and then 40 GB/s and 20 us between hosts;
* any two hosts reach each other at the same rate, whatever others do, as on a network of full
  bisection bandwidth. There is no noise and there are no stragglers; each step of one run waits for
  all hosts, so both would cost more the more hosts there are.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from _report import options, publish, table

import autosched as asc
from autosched.graph.graph import Value
from autosched.lowering import lower
from autosched.verification.verify import verify

RANKS, TASKS = 1000, 16
HOSTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STAGED = 256  # the most hosts of the staged network, whose programs are three times as long
BUCKETS, BUCKET = 2, 50e6
FORWARD, BACKWARD, UPDATE = 20e-3, 20e-3, 1e-3
MEMORY = 2.5e12  # bytes per second
COSTS = asc.Costs(default_seconds=1e-4, default_nbytes=1e6)


def nothing(*_: object) -> None:
    """Stand for any function; nothing runs."""


def placed(graph: asc.Graph) -> asc.Placement:
    """Return the placement of a graph in which every task says its device."""
    where = {task.name: str(task.device) for task in graph.tasks}
    return asc.Placement(where, tuple(where))


# ---- planning


def many_ranks(ranks: int, tasks: int) -> asc.Graph:
    """Return a graph in which each rank has a chain, and sends some of its values on."""
    graph = asc.Graph("many ranks")
    own: list[Value] = []
    for rank in range(ranks):
        with graph.on(f"cpu:{rank}"):
            own.append(graph.input(f"x{rank}"))
    for step in range(tasks):
        reads = [[value] for value in own]
        if step % 4 == 3:
            for rank, row in enumerate(reads):
                row.append(own[rank - 1])
        own = [graph.add(nothing, *row, on=f"cpu:{rank}") for rank, row in enumerate(reads)]
    graph.output(*own)
    return graph


def planning(ranks: int) -> str:
    """Return the figures of one process, as a line of numbers."""
    for size in (32, ranks):  # the first loads kernels
        graph = many_ranks(size, TASKS)
        machine = asc.Machine.emulated(gpus=0, hosts=size)
        placement = placed(graph)
        before = _memory()
        times = [time.process_time()]
        program = lower(asc.Problem(graph, machine), placement)
        times.append(time.process_time())
        peak = _memory()
        verify(program, graph, machine)
        times.append(time.process_time())
        asc.simulate(program, asc.Problem(graph, machine, COSTS))
        times.append(time.process_time())
        program.part(0)
        times.append(time.process_time())
    seconds = [later - earlier for earlier, later in pairwise(times)]
    return " ".join(map(str, [len(graph), len(program), *seconds, before, peak]))


def _memory() -> float:
    """Return the most bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def planning_rows(quick: bool) -> Iterator[Sequence[str]]:
    """Yield a row for each number of ranks; each is the best of some processes."""
    for ranks in (64, 256, RANKS):
        found = []
        for _ in range(1 if quick else 3):
            command = [sys.executable, __file__, "--planning", str(ranks)]
            line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found.append([float(number) for number in line.split()])
        tasks, instructions, *rest = map(min, zip(*found, strict=True))
        lowering, proof, simulation, cut, before, peak = rest
        yield (
            f"{ranks:,}",
            f"{tasks:,.0f}",
            f"{instructions:,.0f}",
            *(f"{seconds:.2f}" for seconds in (lowering, proof, simulation, cut)),
            f"{peak / 1e9:.2f}",
            f"{(peak - before) / 1e9:.2f}",
        )


# ---- weak scaling


def training(hosts: int) -> asc.Graph:
    """Return a data-parallel step on this number of hosts, a power of two."""
    graph = asc.Graph(f"data-parallel step on {hosts} hosts")
    gpus = [f"cuda:{i}" for i in range(hosts)]
    last: list[Value] = []
    for gpu in gpus:
        with graph.on(gpu):
            batch = graph.input(f"batch.{gpu}")
            last.append(graph.add(nothing, batch, seconds=FORWARD, nbytes=1))
    sums: list[list[Value]] = [[] for _ in gpus]
    for _ in range(BUCKETS):
        pieces = []
        for i, gpu in enumerate(gpus):
            size = int(BUCKET / (2 if hosts > 1 else 1))
            made = graph.add(nothing, last[i], on=gpu, outputs=3, seconds=BACKWARD, nbytes=size)
            last[i] = made[2]
            pieces.append(made[:2])
        for i, value in enumerate(reduced(graph, gpus, pieces)):
            sums[i].append(value)
    for i, gpu in enumerate(gpus):
        graph.output(**{f"w{i}": graph.add(nothing, *sums[i], on=gpu, seconds=UPDATE, nbytes=1)})
    return graph


def reduced(
    graph: asc.Graph, gpus: Sequence[str], pieces: Sequence[Sequence[Value]]
) -> list[Value]:
    """Return the sum of a bucket on each GPU; each has it in two pieces, low and high."""
    size = BUCKET / 2
    away = 1
    halves = [list(pair) for pair in pieces]
    whole = [pair[0] for pair in halves]
    # 1. Reduce-scatter: keep one half and add the partner's; the last sum has one piece.
    while away < len(gpus):
        sums = []
        for i, gpu in enumerate(gpus):
            bit = bool(i & away)
            reads = halves[i][bit], halves[i ^ away][bit]
            is_last = 2 * away == len(gpus)
            made = graph.add(
                nothing,
                *reads,
                on=gpu,
                outputs=1 if is_last else 2,
                seconds=3 * size / MEMORY,
                nbytes=int(size if is_last else size / 2),
            )
            sums.append(list(made) if isinstance(made, list | tuple) else [made])
        halves = sums
        whole = [made[0] for made in sums]
        size /= 2
        away *= 2
    # 2. All-gather: join the partner's piece to the own one.
    size *= 2
    while away > 1:
        away //= 2
        size *= 2
        whole = [
            graph.add(
                nothing,
                whole[i],
                whole[i ^ away],
                on=gpu,
                seconds=2 * size / MEMORY,
                nbytes=int(size),
            )
            for i, gpu in enumerate(gpus)
        ]
    return whole


def makespan(hosts: int, direct: bool) -> tuple[float, float]:
    """Return the predicted seconds of a step, and the seconds to plan it."""
    begun = time.process_time()
    network = asc.Network(40e9, 2e-5, direct)
    machine = asc.Machine.emulated(gpus=1, hosts=hosts, network=network)
    graph = training(hosts)
    homes = {f"batch.cuda:{i}": f"cuda:{i}" for i in range(hosts)}
    assert all(graph.value(name).home == device for name, device in homes.items())
    program = lower(asc.Problem(graph, machine), placed(graph))
    seconds = asc.simulate(program, asc.Problem(graph, machine, COSTS)).makespan
    return seconds, time.process_time() - begun


def scaling_rows(quick: bool) -> Iterator[Sequence[str]]:
    """Yield a row for each number of hosts."""
    alone = makespan(1, True)[0]
    for hosts in HOSTS[: 7 if quick else None]:
        seconds, planned = makespan(hosts, True)
        staged = makespan(hosts, False)[0] if hosts <= STAGED else None
        yield (
            f"{hosts:,}",
            f"{seconds * 1e3:.1f}",
            f"{alone / seconds:.0%}",
            "-" if staged is None else f"{staged * 1e3:.1f}",
            "-" if staged is None else f"{alone / staged:.0%}",
            f"{planned:.1f}",
        )


def main() -> None:
    if "--planning" in sys.argv:
        print(planning(int(sys.argv[-1])))
        return
    chosen = options(__doc__)
    head = [
        *("ranks", "tasks", "instructions", "lower s", "verify s", "simulate s", "all parts s"),
        *("peak GB", "of which lowering"),
    ]
    first = table(head, planning_rows(chosen.quick))
    head = ["hosts", "direct ms", "efficiency", "staged ms", "efficiency", "planning s"]
    second = table(head, scaling_rows(chosen.quick))
    parts = [str(__doc__).partition("\n\n")[2], "## Planning", first]
    publish(
        "cluster_planning",
        "Clusters: planning and weak scaling, predicted",
        [*parts, "## Weak scaling", second],
        chosen,
        ("numpy",),
    )


if __name__ == "__main__":
    main()
