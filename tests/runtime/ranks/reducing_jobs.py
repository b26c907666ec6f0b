"""Sums over ranks in tests: each function runs in a process of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import autosched as asc
from autosched.parallel.all_reduce import all_reduce
from tests.runtime.ranks.gpu_jobs import gpus


def row(number: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of very different sizes, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    drawn = torch.randn(numel, dtype=wide, generator=generator)
    return (drawn * 10.0 ** torch.randint(-2, 3, (numel,), generator=generator)).to(dtype)


def ones(_: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a row that is made fast."""
    return torch.full((numel,), 10.0**rank, dtype=dtype)


def summing(
    dtypes: list[torch.dtype], numel: int, machine: asc.Machine, make: Any = row
) -> asc.Graph:
    """Return a graph that adds the rows of all ranks, of each dtype, by the library."""
    graph = asc.Graph("sums")
    cpus = machine.names
    for number, dtype in enumerate(dtypes):
        flats = []
        for rank, device in enumerate(cpus):
            with graph.on(device):
                flats.append(graph.add(partial(make, number, rank, numel, dtype), seconds=1.0))
        totals = all_reduce(
            graph, flats, cpus, "library",
            machine=machine, numel=numel, itemsize=dtype.itemsize, name=f"b{number}",
        )  # fmt: skip
        for rank, (device, total) in enumerate(zip(cpus, totals, strict=True)):
            clone = graph.add(torch.clone, total, on=device, seconds=1.0)
            graph.output(**{f"t{number}.r{rank}": clone})
    return graph


def add_on_gpus(seed: int) -> bool:
    """Return whether GPUs of all ranks, which are simulated, get the sum of what each of them has."""
    with gpus(seed):
        machine = asc.Machine.cluster()
        devices = machine.accelerators
        graph = asc.Graph("sum of GPUs")
        for number in range(2):
            cost: dict[str, Any] = {"seconds": 1.0, "nbytes": 400}
            flats = [
                graph.add(torch.neg, graph.input(f"x{number}.r{rank}"), on=device, **cost)
                for rank, device in enumerate(devices)
            ]
            totals = all_reduce(
                graph, flats, devices, "library",
                machine=machine, numel=100, itemsize=4, name=f"b{number}",
            )  # fmt: skip
            for rank, (device, total) in enumerate(zip(devices, totals, strict=True)):
                graph.output(
                    **{f"t{rank}.{number}": graph.add(torch.neg, total, on=device, **cost)}
                )
        with asc.schedule(graph, machine, policy="round_robin") as schedule:
            for run in range(3):
                given = {n: torch.full((100,), run + 10.0 ** int(n[-1])) for n in graph.input_names}
                found = schedule(**{name: given[name] for name in schedule.inputs_here})
                if not all(bool((total.cpu() == 2 * run + 11).all()) for total in found.values()):
                    return False
    return len(found) == 2


def add(dtypes: list[torch.dtype], numel: int) -> list[torch.Tensor]:
    """Return the sums of each dtype on this rank, by two runs that have the same bits."""
    machine = asc.Machine.cluster()
    graph = summing(dtypes, numel, machine)
    with asc.schedule(graph, machine, policy="round_robin") as schedule:
        first, second = schedule(), schedule()
    assert all(torch.equal(first[name], second[name]) for name in first)
    return [first[f"t{number}.r{machine.rank}"] for number in range(len(dtypes))]
