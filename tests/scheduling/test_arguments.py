"""What is given is taken as people write it, and said by its name where it is of a wrong kind."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import autosched as asc

TWO_GPUS = asc.Machine.emulated(gpus=2)
GPU = torch.device("cuda:0")


def layers() -> asc.Graph:
    graph = asc.Graph("layers")
    x, w1, w2 = graph.inputs("x", "w1", "w2")
    graph.output(h=(h := x @ w1), y=h @ w2)
    return graph


# ---- names of devices


@pytest.mark.parametrize("name", ["cuda:0", GPU, 0], ids=repr)
def test_a_device_may_be_given_as_torch_takes_one(name: Any) -> None:
    graph = asc.Graph()
    with graph.on(name):
        x = graph.input("x")
    y = graph.add(torch.exp, x, on=name, name="y", seconds={name: 2.0, "cpu": 1.0})
    z = graph.add(torch.exp, y, name="z")
    graph.output(z=z)
    schedule = asc.schedule(
        graph,
        TWO_GPUS,
        place={"z": name},
        inputs={"x": name},
        outputs={"z": name},
        backend="virtual",
    )
    assert schedule.placement.device == {"y": "cuda:0", "z": "cuda:0"}
    assert schedule.program.inputs == (("x", "cuda:0"),)
    assert schedule.program.outputs == (("z", "cuda:0"),)
    assert asc.schedule(graph, TWO_GPUS, inputs=name, outputs=name).program == schedule.program
    assert schedule.costs.task_seconds(schedule.graph.task("y"), TWO_GPUS.device(name)) == 2.0
    twice = asc.Graph()
    twice.include(graph, {"x": twice.input("x")}, on=name)
    assert twice.task("z").device == "cuda:0"


@pytest.mark.parametrize("name", ["cuda:0", GPU, 0], ids=repr)
def test_costs_may_name_devices_as_torch_does(name: Any) -> None:
    expected = asc.Costs.table(seconds={"a": {"cuda:0": 1.0}, "b": 2.0})
    assert asc.Costs.table(seconds={"a": {name: 1.0}, "b": 2.0}) == expected
    assert asc.Costs(seconds={"b": 2.0}).override(seconds={"a": {name: 1.0}}) == expected


@pytest.mark.parametrize("name", [-1, 1.5, True, ["cuda:0"]])
def test_what_names_no_device_is_refused(name: Any) -> None:
    with pytest.raises(asc.GraphError, match="a device is a name such as"), asc.Graph().on(name):
        pass


# ---- patterns


def test_inputs_and_outputs_are_named_by_patterns_too() -> None:
    schedule = asc.schedule(
        layers(),
        TWO_GPUS,
        inputs={"w*": "cuda:1", "*": "cuda:0", "w2": "cpu"},
        outputs={"?": "cpu"},
    )
    assert dict(schedule.program.inputs) == {"x": "cuda:0", "w1": "cuda:1", "w2": "cpu"}
    assert dict(schedule.program.outputs) == {"h": "cpu", "y": "cpu"}
    with pytest.raises(
        asc.GraphError, match=r"inputs= names 'v\*', which is no input; inputs are 'x', 'w1', 'w2'"
    ):
        asc.schedule(layers(), TWO_GPUS, inputs={"v*": "cuda:0"})
    with pytest.raises(
        asc.ScheduleError, match=r"outputs= names 'v\*', which is no output; outputs are 'h', 'y'"
    ):
        asc.schedule(layers(), TWO_GPUS, outputs={"v*": "cuda:0"})


# ---- what is of a wrong kind


def test_a_module_that_is_scheduled_is_pointed_to_capture() -> None:
    hint = re.escape(
        "graph must be a Graph, got Linear; autosched.capture(fn, *args) makes one of it"
    )
    with pytest.raises(asc.ScheduleError, match=f"^{hint}$"):
        asc.schedule(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_what_cannot_be_compiled_is_refused_at_once() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(asc.ScheduleError, match=r"compile takes a function of tensors, .* got 3"):
        asc.compile(3)  # type: ignore[arg-type]
    with pytest.raises(asc.ScheduleError, match="is compiled already; compile the function itself"):
        asc.compile(asc.compile(model))
    with pytest.raises(
        asc.ScheduleError,
        match=r"compile takes .*autosched.schedule\(graph, machine\) takes a graph",
    ):
        asc.compile(asc.Graph())  # type: ignore[arg-type]
    with pytest.raises(asc.ScheduleError, match="compile takes a function"):
        asc.compile(asc.schedule(layers(), TWO_GPUS))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda graph: asc.schedule(graph, "cuda:0"), "machine must be a Machine, got 'cuda:0'"),
        (lambda graph: asc.fuse(graph, 2), "machine must be a Machine, got 2"),
        (lambda graph: asc.compile(abs, 2), "machine must be a Machine, got 2"),
        (lambda graph: asc.measure_machine(2), "machine must be a Machine, got 2"),
        (lambda graph: asc.parallel.data_parallel(*trained(), 2), "machine must be a Machine"),
        (lambda graph: asc.in_order({"cpu": "matmul"}), "sequences must be a mapping of devices"),
        (lambda graph: asc.in_order(["matmul"]), "sequences must be a mapping of devices"),
        (lambda graph: asc.merge(graph, None), "groups must be 'op', 'module' or a mapping"),
        (lambda graph: asc.Costs.estimate(graph, None), "takes inputs as a mapping by name"),
        (lambda graph: asc.schedule(graph, TWO_GPUS, place={1: "cpu"}), "pattern 1 in place= fits"),
        (
            lambda graph: asc.schedule(graph, TWO_GPUS, policy=with_streams(0)),
            "streams of a placement are None or a whole number, 1 or more, got 0",
        ),
    ],
)
def test_what_is_of_a_wrong_kind_is_named(call: Any, error: str) -> None:
    with pytest.raises(asc.AutoschedError, match=error):
        call(layers())


def with_streams(count: int) -> Any:
    names = ("matmul", "matmul_1")
    return lambda problem: asc.Placement(dict.fromkeys(names, "cpu"), names, streams=count)


def trained() -> Any:
    model = nn.Linear(2, 2)
    return model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1)
