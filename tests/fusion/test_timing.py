"""Schedules that are compared by running them leave inputs and random numbers as they were."""

from __future__ import annotations

import torch

import autosched as asc
from autosched.fusion.fusing import run_times


def test_inputs_and_random_numbers_stay_as_they_are() -> None:
    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    x.add_(torch.rand_like(y))
    x[:1].mul_(2)
    graph.output(z=x * y)
    inputs = {"x": torch.ones(3), "y": torch.ones(3)}
    state = torch.random.get_rng_state()
    machine = asc.Machine.local(gpus=0)
    with (
        asc.schedule(graph, machine, policy="single") as one,
        asc.schedule(graph, machine, policy="heft") as other,
    ):
        taken = run_times([one, other], inputs)
    assert len(taken) == 2
    assert all(seconds > 0 for seconds in taken)
    assert inputs["x"].tolist() == inputs["y"].tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_copies_of_parameters_require_gradients() -> None:
    seen: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.requires_grad)
        return x.detach() * 2

    graph = asc.Graph()
    weight = graph.input("weight")
    weight.add_(1)
    graph.output(y=graph.add(note, weight))
    with asc.schedule(graph, asc.Machine.local(gpus=0)) as made:
        run_times([made], {"weight": torch.nn.Parameter(torch.ones(3))})
    assert all(seen)


def test_each_run_begins_with_the_same_state() -> None:
    seen: list[float] = []

    def note(counter: torch.Tensor) -> torch.Tensor:
        seen.append(counter.item())
        return counter + 1

    graph = asc.Graph()
    counter = graph.input("counter")
    counter.add_(1)
    graph.output(y=graph.add(note, counter))
    with asc.schedule(graph, asc.Machine.local(gpus=0)) as made:
        run_times([made], {"counter": torch.zeros(())})
    assert len(seen) > 3
    assert set(seen) == {1.0}
