"""Random numbers of emulated hosts in one process: each rank has its own, as in its own process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched import errors
from autosched.machine.machine import Device
from autosched.runtime.execute import _check_generators

HOSTS = asc.Machine.emulated(gpus=0, hosts=2)


def draws_on(ranks: list[int]) -> asc.Graph:
    """Return a graph in which each of these ranks draws in turn, one after another."""
    graph = asc.Graph("draws", generators={"cpu:0": "rank 0", "cpu:1": "rank 1"})
    values = [
        graph.add(torch.rand, 2, name=f"t{number}", on=f"cpu:{rank}")
        for number, rank in enumerate(ranks)
    ]
    graph.output(**{f"y{number}": value for number, value in enumerate(values)})
    return graph


def drawn(ranks: list[int], states: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what processes draw whose generators have these states, which are left behind."""
    found = {}
    for number, rank in enumerate(ranks):
        generator = torch.Generator()
        generator.set_state(states[rank])
        found[f"y{number}"] = torch.rand(2, generator=generator)
        states[rank] = generator.get_state()
    return found


@given(
    runs=st.lists(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4), max_size=3),
    backend=st.sampled_from(["host", "virtual"]),
)
def test_each_rank_draws_as_its_own_process_does_that_is_seeded_alike(
    runs: list[list[int]], backend: str
) -> None:
    """In runs of several graphs, also where one rank draws nothing, and after the same seed."""
    for _ in range(2):
        torch.manual_seed(1)
        states = [torch.get_rng_state(), torch.get_rng_state()]
        for ranks in runs:
            with asc.schedule(draws_on(ranks), HOSTS, backend=backend) as schedule:
                expected = drawn(ranks, states)
                found = schedule()
                assert all(torch.equal(found[name], expected[name]) for name in expected)
    if runs:
        left = states[min(runs[-1])]
        assert torch.equal(torch.get_rng_state(), left), "of the first rank that draws"


def test_ranks_begin_anew_where_something_else_draws_between_runs() -> None:
    with asc.schedule(draws_on([0, 1]), HOSTS, backend="host") as schedule:
        torch.manual_seed(0)
        schedule()
        torch.rand(1)
        state = torch.get_rng_state()
        found = schedule()
    expected = drawn([0, 1], [state, state])
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_accelerators_that_one_process_has_for_several_ranks_are_refused() -> None:
    graph = asc.Graph("draws", generators={"cuda:0": "rank 0", "cuda:1": "rank 1"})
    for number in range(2):
        graph.add(torch.rand, 2, name=f"t{number}", on=f"cuda:{number}")
    program = asc.schedule(graph, asc.Machine.emulated(gpus=1, hosts=2)).program
    devices = [
        Device(f"{kind}:{rank}", rank=rank, host="a")
        for rank in range(2)
        for kind in ("cpu", "cuda")
    ]
    machine = asc.Machine(devices, network=asc.Network(1e9))
    with pytest.raises(errors.ScheduleError, match="task 't0' of rank 0 and task 't1' of rank 1"):
        _check_generators(program, graph, machine)
