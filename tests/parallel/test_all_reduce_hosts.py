"""Sums over emulated hosts by the library: the values, who waits for whom, the bytes and the time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autosched as asc
from autosched.parallel import all_reduce as module
from autosched.parallel.all_reduce import all_reduce
from autosched.program.program import Copy, Run, Stream, Wait
from autosched.testing import run_parts, scattered, uniform
from autosched.testing.wire import MODES, Mode
from tests.parallel.test_all_reduce import DTYPES, in_order, numbers, summing, traffic


def hosts(count: int, gpus: int = 0) -> tuple[asc.Machine, Sequence[str]]:
    """Return emulated hosts, and the devices that hold gradients."""
    machine = asc.Machine.emulated(gpus=gpus, hosts=count)
    return machine, machine.accelerators or machine.names


@given(
    count=st.integers(2, 4),
    gpus=st.integers(0, 2),
    numel=st.integers(0, 24),
    dtype=st.sampled_from(DTYPES),
)
def test_one_process_adds_the_sums_of_ranks_in_order(
    count: int, gpus: int, numel: int, dtype: torch.dtype
) -> None:
    machine, devices = hosts(count, gpus)
    each = len(devices) // count
    given = numbers(len(devices), numel, dtype)
    flats = [-tensor for tensor in given.values()]
    graph = summing("library", machine, numel, dtype.itemsize, devices)
    expected = in_order([in_order(flats[i : i + each]) for i in range(0, len(flats), each)])
    with asc.schedule(graph, machine, policy="heft", backend="virtual") as schedule:
        assert all(torch.equal(total, expected) for total in schedule(**given).values())
    assert all(torch.equal(total, expected) for total in graph.run_serial(**given).values())


class Watched(module._InOneProcess):
    """Notes who has started, and finishes only when all have."""

    made: ClassVar[dict[str, list[Watched]]] = {}  # by sum
    started: ClassVar[dict[str, list[Watched]]] = {}
    order: ClassVar[dict[int, list[str]]] = {}  # of sums, by rank

    def __init__(self, name: str):
        super().__init__(name)
        own = self.made.setdefault(name, [])
        self.rank = len(own)
        own.append(self)

    def start(self, row: Tensor) -> Tensor:
        self.started.setdefault(self.name, []).append(self)
        self.order.setdefault(self.rank, []).append(self.name)
        return super().start(row)

    def finish(self, row: Tensor, marks: Sequence[Tensor]) -> None:
        assert len(self.started[self.name]) == len(self.made[self.name])
        super().finish(row, marks)


def two_sums(machine: asc.Machine) -> tuple[asc.Graph, dict[str, Tensor]]:
    """Add two tensors over ranks; on some ranks the second is there first."""
    graph = asc.Graph("two sums")
    given: dict[str, Tensor] = {}
    cost: dict[str, Any] = {"seconds": 1.0, "nbytes": 24}
    for number in range(2):
        flats = []
        for rank, device in enumerate(machine.names):
            with graph.on(device):
                value = graph.input(name := f"b{number}.r{rank}", nbytes=24)
                given[name] = torch.full((6,), 10.0**rank)
                for _ in range(1 + 2 * (number != rank % 2)):
                    value = graph.add(torch.neg, value, **cost)
                flats.append(value)
        totals = all_reduce(
            graph, flats, machine.names, "library", machine=machine, numel=6, itemsize=4,
            name=f"b{number}",
        )  # fmt: skip
        for rank, (device, total) in enumerate(zip(machine.names, totals, strict=True)):
            clone = graph.add(torch.neg, total, on=device, **cost)
            graph.output(**{f"t{number}.r{rank}": clone})
    return graph, given


@given(seed=st.integers(0, 2**32), mode=st.sampled_from(MODES))
def test_ranks_start_sums_in_one_order_and_wait_only_for_those_that_have_started(
    seed: int, mode: Mode
) -> None:
    machine, _ = hosts(3)
    for noted in (Watched.made, Watched.started, Watched.order):
        noted.clear()
    with mock.patch.object(module, "_InOneProcess", Watched):
        graph, given = two_sums(machine)
    with asc.schedule(graph, machine, policy=scattered(seed)) as schedule:
        parts = [schedule.program.part(rank) for rank in range(3)]
    found = run_parts(parts, graph, given, mode, uniform(seed))
    assert Watched.order == {rank: ["b0", "b1"] for rank in range(3)}
    assert all(torch.equal(total, torch.full((6,), 111.0)) for total in found.values())


def test_sums_without_a_wait_or_a_mark_or_in_another_order_are_refused() -> None:
    machine, _ = hosts(3)
    graph, _ = two_sums(machine)
    with asc.schedule(graph, machine, policy="heft") as schedule:
        program = schedule.program
    lines = list(program.instructions)
    copies = [i for i, item in enumerate(lines) if isinstance(item, Copy)]
    waits = [i for i, item in enumerate(lines) if isinstance(item, Wait)]
    assert len(copies) == 2 * 3 * 2
    mutants = [lines[:i] + lines[i + 1 :] for i in (*copies, *waits)]
    for device in machine.names:
        stream = Stream(device, "compute")
        a, b = (lines.index(Run(stream, f"b{number}.mark.{device}")) for number in range(2))
        mutants.append(list(lines))
        mutants[-1][a], mutants[-1][b] = lines[b], lines[a]
    asc.verify(program, graph, machine)
    for mutant in mutants:
        with pytest.raises(asc.ProgramError):
            asc.verify(replace(program, instructions=tuple(mutant)), graph, machine)


def planned(machine: asc.Machine, numel: int) -> asc.Schedule:
    graph = summing("library", machine, numel, devices=machine.names)
    return asc.schedule(graph, machine, policy="round_robin")  # in the order of the graph


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_next_rank_gets_the_bytes_of_a_ring_and_others_a_mark(count: int) -> None:
    machine, devices = hosts(count)
    with planned(machine, count * 100) as schedule:
        assert traffic(schedule) == {
            (a, b): 2 * (count - 1) / count * count * 400 if (i + 1) % count == j else 1
            for (i, a), (j, b) in itertools.permutations(enumerate(devices), 2)
        }


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("numel", [2**8, 2**22])
def test_a_sum_takes_as_long_as_a_ring(count: int, numel: int) -> None:
    machine, devices = hosts(count)
    nbytes = 4 * numel
    hop = machine.copy_seconds(devices[0], devices[1], nbytes / count)
    adding = 3 * (count - 1) / count * nbytes / machine.device("cpu:0").bytes_per_second
    ring = 2 * (count - 1) * hop + adding
    small = 2 * (count - 1) * (machine.copy_seconds(devices[0], devices[1], 1) + 5e-6)
    with planned(machine, numel) as schedule:
        assert ring < schedule.makespan < ring + small


def test_where_a_rank_has_nothing_to_add_the_others_add_without_it() -> None:
    machine, devices = hosts(3)
    given = numbers(2, 8, torch.float32)
    graph = summing("library", machine, 8, devices=devices[:2])
    with asc.schedule(graph, machine, policy="heft", backend="virtual") as schedule:
        assert all(torch.equal(t, -given["r0"] - given["r1"]) for t in schedule(**given).values())


# ---- training


def reduction(machine: asc.Machine, **options: Any) -> str:
    """Return how a step of large gradients on a slow network is reduced."""
    model = nn.Linear(256, 512)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    make = asc.parallel.data_parallel
    with make(model, nn.functional.mse_loss, optimizer, machine, **options) as step:
        found: str = step.notes(torch.ones(8, 256), torch.ones(8, 512))["reduction"]
    return found


def test_a_step_uses_the_library_only_where_that_is_permitted() -> None:
    slow = asc.Machine.emulated(gpus=0, hosts=4, network=asc.Network(1e8, 1e-4))
    assert reduction(slow) != "library"
    assert reduction(slow, exact=False) == "library"
    assert reduction(asc.Machine.emulated(gpus=2), exact=False) != "library"
    with pytest.raises(asc.ScheduleError, match="permit that by exact=False"):
        reduction(slow, reduction="library")


def test_replicas_of_pipelines_use_the_library_where_all_ranks_have_a_stage() -> None:
    machine = asc.Machine.emulated(gpus=2, hosts=2)
    found = []
    for how in ({"reduction": "library", "exact": False}, {"reduction": "sum"}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        trained = model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1)
        options = {"replicas": 2, "chunks": 2, "schedule": "gpipe", "backend": "host", **how}
        with asc.parallel.pipeline(*trained, machine, **options) as step:
            batch = torch.ones(8, 8), torch.zeros(8, 8)
            losses = torch.stack([step(*batch), step(*batch)])
            names = [task.name for task in step.schedule(*batch).graph.tasks]
        assert any("finish" in name for name in names) == ("exact" in how)
        found.append([losses, *model.state_dict().values()])
    assert all(map(torch.equal, *found))
