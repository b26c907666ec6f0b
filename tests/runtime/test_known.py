"""What changes between two runs is noticed, though inputs that were seen before are recognized quickly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # or nothing is recognized
from torch import Tensor, nn

import autosched as asc
from autosched.errors import GraphError, HazardError
from autosched.runtime.memory import recognizing
from autosched.simulated_gpus import playing

MANY = 20
HERE = asc.Machine([asc.Device("cpu")])
Inputs = dict[str, Tensor]


def some() -> Inputs:
    """Return weights, of which only the first is looked at, and an image."""
    weights = {f"w{i}": nn.Parameter(torch.rand(3, 3)) for i in range(MANY)}
    return {**weights, "x": torch.rand(3, 3)}


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], None]:
    def applied(inputs: Inputs) -> None:
        inputs[name] = change(inputs[name])

    return applied


def test_what_moves_keeps_away_from_constants_and_from_what_moves() -> None:
    table = torch.rand(8)
    inputs = {**some(), "y": torch.rand(3, 3)}
    names = [*inputs]
    recognizes = recognizing(inputs, inputs.keys() - {"x", "y"}, [table], apart=names)
    assert recognizes is not None
    part = table.as_strided((2, 2), (2, 1))
    assert recognizes({**inputs, "x": inputs["y"], "y": inputs["x"]})
    assert not recognizes({**inputs, "x": inputs["y"]})
    assert not recognizes({**inputs, "x": inputs["w1"].detach()})
    small = recognizing({**inputs, "x": torch.rand(2, 2)}, set(), [table], apart=names)
    assert small is not None
    assert small({**inputs, "x": torch.rand(2, 2)})
    assert not small({**inputs, "x": part})


def adding() -> asc.Graph:
    """Return a graph that adds an image to a weight, in place."""
    graph = asc.Graph()
    weight, *_, x = graph.inputs(*some())
    graph.add(Tensor.add_, weight, x, writes=[weight])
    graph.output(y=weight * 2)
    return graph


def test_memory_that_is_shared_later_is_found_on_the_cpu() -> None:
    with torch.no_grad(), asc.schedule(adding(), HERE, policy="single") as schedule:
        inputs = {name: item.detach() for name, item in some().items()}
        for _ in range(4):
            wanted = (inputs["w0"] + inputs["x"]) * 2
            assert torch.equal(schedule(**inputs)["y"], wanted)
            inputs["x"] = torch.rand(3, 3)
        with pytest.raises(HazardError, match="share memory"):
            schedule(**{**inputs, "x": inputs["w0"].view(3, 3)})
        wanted = (inputs["w0"] + inputs["x"]) * 2
        unused = {"w1": inputs["w0"]}  # no task reads or writes it
        assert torch.equal(schedule(**inputs | unused)["y"], wanted)
        with pytest.raises(GraphError, match="misses input 'x'"):
            schedule(**{name: item for name, item in inputs.items() if name != "x"})
        backwards = dict(reversed(inputs.items()))
        wanted = (inputs["w0"] + inputs["x"]) * 2
        assert torch.equal(schedule(**backwards)["y"], wanted)


def test_memory_of_a_constant_that_is_shared_later_is_found() -> None:
    table = torch.rand(3, 3)
    graph = asc.Graph()
    weight, *_ = graph.inputs(*some())
    graph.add(Tensor.add_, weight, graph.constant(table), writes=[weight])
    graph.output(y=weight * 2)
    with torch.no_grad(), asc.schedule(graph, HERE, policy="single") as schedule:
        inputs = {name: item.detach() for name, item in some().items()}
        for _ in range(4):
            schedule(**inputs)
            inputs["w0"] = torch.rand_like(
                inputs["w0"]
            )  # it moves, so it is compared with the table
        inputs["w0"] = table.view(inputs["w0"].shape)
        with pytest.raises(HazardError, match="share memory"):
            schedule(**inputs)


def product(*given: Tensor) -> Tensor:
    return given[0] @ given[-1]


def multiplying() -> asc.Graph:
    graph = asc.Graph()
    graph.output(y=graph.add(product, *graph.inputs(*some())))
    return graph


def transposed(weight: Tensor) -> Tensor:
    """Return the transpose of a weight, on its memory, and no view of it."""
    turned, blank = weight.t(), torch.empty(0, device=weight.device)
    return blank.set_(weight.untyped_storage(), 0, turned.shape, turned.stride())


REPLACED: dict[str, Callable[[Inputs], object]] = {
    "address": put("w0", torch.clone),
    "strides": put("w0", lambda w: w.t()),
    "dtype": lambda inputs: inputs.update((name, i.double()) for name, i in inputs.items()),
    "shape": put("x", lambda x: x[:, :2].clone()),
    "requires_grad": put("w0", lambda w: w.detach().requires_grad_()),
    # Of the identical object:
    "swapped": lambda inputs: torch.utils.swap_tensors(inputs["w0"], inputs["w1"]),
    "transposed": lambda inputs: torch.utils.swap_tensors(inputs["w0"], transposed(inputs["w0"])),
    "memory": lambda inputs: setattr(inputs["w0"], "data", inputs["w0"] + 1),
}


@contextlib.contextmanager
def replayed(graph: asc.Graph) -> Iterator[tuple[asc.Schedule, Inputs]]:
    """Replay a graph on a simulated GPU; yield the schedule and inputs for it."""
    options: dict[str, Any] = {"policy": "single", "inputs": "cuda:0", "replay": True}
    with (
        torch.no_grad(),
        playing(1, seed=2),
        asc.schedule(graph, asc.Machine.local(gpus=1), **options) as schedule,
    ):
        yield schedule, {name: item.detach().to("cuda:0") for name, item in some().items()}


@pytest.mark.parametrize("what", REPLACED)
def test_a_replay_notices_what_was_replaced(what: str) -> None:
    with replayed(multiplying()) as (schedule, inputs):
        for number in range(8):
            inputs["x"] = inputs["x"] + number
            if number == 5:
                REPLACED[what](inputs)
            found = schedule(**inputs)["y"]
            assert torch.equal(found.cpu(), inputs["w0"].cpu() @ inputs["x"].cpu()), number
        assert schedule.not_replayed is None


@pytest.mark.parametrize("graph", [adding, multiplying])
def test_replays_recognize_a_new_image(graph: Callable[[], asc.Graph]) -> None:
    with replayed(graph()) as (schedule, inputs):
        for _ in range(4):
            inputs["x"] = inputs["x"] + 1
            schedule(**inputs)
        known = schedule._executor.recordings.last.known
        assert known is not None
        assert known({**inputs, "x": inputs["x"] * 2})
        assert not known({**inputs, "x": inputs["x"].t()})
        assert not known({**inputs, "w0": inputs["w0"].clone()})
        if graph is adding:
            assert not known({**inputs, "x": inputs["w0"]})
            with pytest.raises(HazardError, match="share memory"):
                schedule(**{**inputs, "x": inputs["w0"]})
