"""Several runs in flight on played GPUs, whose streams go on in the worst order that events allow."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.simulated_gpus import playing
from tests import strategies
from tests.gpu.for_gpus import on_gpus, physical, there
from tests.sample_policies import policies
from tests.strategies import graphs, inputs_for, machines

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
Tensors = dict[str, torch.Tensor]


def given_to(machine: asc.Machine, graph: asc.Graph, runs: int) -> list[Tensors]:
    """Inputs of each run, where they must live."""
    return strategies.given_to(graph, runs, there(machine, graph, inputs_for(graph)))


def on_host(tensors: Tensors) -> Tensors:
    return {name: item.cpu().clone() for name, item in tensors.items()}


@settings(max_examples=settings().max_examples * 3 // 5)
@given(
    policy=policies,
    machine=machines(),
    gpus=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    in_flight=st.integers(2, 4),
    data=st.data(),
)
def test_runs_in_flight_equal_serial_runs_on_played_gpus(
    policy: str,
    machine: asc.Machine,
    gpus: int,
    seed: int,
    in_flight: int,
    data: st.DataObject,
) -> None:
    machine = physical(machine, gpus)
    graph = on_gpus(data.draw(graphs(machine.names)))
    runs = in_flight + 2
    with (
        playing(gpus, seed),
        asc.schedule(graph, machine, policy=policy, costs=COSTS, in_flight=in_flight) as schedule,
    ):
        torch.manual_seed(3)
        serial = given_to(machine, schedule.graph, runs)
        expected = [on_host(schedule.run_serial(**inputs)) for inputs in serial]
        torch.manual_seed(3)
        given = given_to(machine, schedule.graph, runs)
        futures = [schedule.submit(**inputs) for inputs in given]
        outputs = [future.result() for future in futures]
        theirs = {item.untyped_storage().data_ptr() for each in given for item in each.values()}
        for found, wanted in zip(outputs, expected, strict=True):
            for label, item in found.items():
                if item.untyped_storage().data_ptr() not in theirs:
                    assert torch.equal(item.cpu(), wanted[label]), f"{graph}\n{schedule}"
        for one, other in zip(given, serial, strict=True):
            for name, item in on_host(one).items():
                assert torch.equal(item, other[name].cpu()), f"{graph}\n{schedule}"


def two_stages() -> asc.Graph:
    graph = asc.Graph()
    h = graph.add(torch.exp, graph.input("x"), on="cuda:0")
    graph.output(y=graph.add(torch.neg, h, on="cuda:1"))
    return graph


def test_inputs_made_on_the_callers_stream_are_waited_for_and_may_be_dropped() -> None:
    machine = physical(asc.Machine.emulated(gpus=2), 2)
    for seed in range(5):
        with (
            playing(2, seed),
            asc.schedule(two_stages(), machine, inputs="cuda:0", in_flight=3) as schedule,
        ):
            futures = []
            for i in range(6):
                side = torch.Stream("cuda:0")
                with side:
                    x = torch.full((4,), float(i), device="cuda:0") * 2
                    futures.append(schedule.submit(x=x))
                del x
            for i, future in enumerate(futures):
                assert torch.equal(
                    future.result()["y"].cpu(), -torch.exp(torch.full((4,), 2.0 * i))
                )


def test_a_failed_run_leaves_no_work_behind() -> None:
    machine = physical(asc.Machine.emulated(gpus=2), 2)

    def fail(x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 3:
            raise ValueError("three")
        return x + 1

    graph = asc.Graph()
    h = graph.add(torch.exp, graph.input("x"), on="cuda:0")
    graph.output(y=graph.add(fail, h, on="cuda:1"))
    with playing(2, 4), asc.schedule(graph, machine, in_flight=3) as schedule:
        futures = [schedule.submit(x=torch.zeros(n)) for n in (1, 2, 3, 4, 3, 5)]
        failed = [isinstance(future.exception(), asc.TaskError) for future in futures]
        assert failed == [False, False, True, False, True, False]
        assert all(
            torch.equal(future.result()["y"].cpu(), torch.full((n,), 2.0))
            for n, future in zip((1, 2, 3, 4, 3, 5), futures, strict=True)
            if n != 3
        )


def test_loops_are_not_replayed() -> None:
    machine = physical(asc.Machine.emulated(gpus=2), 2)
    with (
        playing(2, 4),
        asc.schedule(two_stages(), machine, in_flight=2, replay=True) as schedule,
    ):
        assert schedule(x=torch.zeros(2))["y"].cpu()[0] == -1
        assert "several runs" in str(schedule.not_replayed)
