"""Merged graphs do what the graphs do that they were made of; captures merged by module; functions that stay whole."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim

import autosched as asc
from autosched.costs.estimate import estimate
from tests.frontends.test_capture import OPTIMIZERS, stepper
from tests.models import mlp, vectors
from tests.strategies import graphs

GPU = asc.Device("cuda:0")
LONG = 1e-3

drawn_groups = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=60, max_size=60)


def grouped(graph: asc.Graph, drawn: list[str | None]) -> dict[str, str]:
    return {task.name: group for task, group in zip(graph.tasks, drawn, strict=False) if group}


def named(graph: asc.Graph) -> list[str]:
    return [task.name for task in graph.tasks]


# ---- the laws


@given(graph=graphs(), drawn=drawn_groups)
def test_a_merged_task_costs_its_parts(graph: asc.Graph, drawn: list[str | None]) -> None:
    costs = asc.Costs(default_seconds=LONG)
    for task in asc.merge(graph, grouped(graph, drawn)).tasks:
        count = sum(not part.view for part in task.parts)
        if count:
            assert costs.task_seconds(task, GPU) == pytest.approx(count * LONG)


# ---- what is merged, by hand


def layer() -> asc.Graph:
    graph = asc.Graph("layer")
    x, w, b = graph.inputs("x", "w", "b")
    hidden = torch.relu(x @ w.t() + b)
    low, high = graph.add(torch.aminmax, hidden, outputs=2)
    w.sub_(low, alpha=0.1)
    graph.output(high=high, half=hidden.t())
    return graph


def test_merged_tasks_make_their_views_and_return_what_others_need() -> None:
    merged = asc.merge(layer(), dict.fromkeys(["matmul", "add", "relu", "aminmax", "sub"], "layer"))
    assert named(merged) == ["layer", "t_1"]
    task = merged.task("layer")
    assert [merged.values[use.value].name for use in task.reads] == ["w", "x", "b"]
    assert [merged.values[use.value].name for use in task.writes] == ["w"]
    assert [merged.values[use.value].name for use in task.outputs] == ["relu", "aminmax.1"]


def test_who_comes_after_a_view_comes_after_what_it_is_a_view_of() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    made = x + 1
    view = made.t()
    graph.output(view=view, late=graph.add(torch.exp, x, after=view))
    merged = asc.merge(graph, {"exp": "late"})
    assert [merged.tasks[d.task].name for d in merged.task("late").dependencies] == ["add"]


def test_what_is_made_between_is_let_go_of_when_it_is_used_last() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def note(x: Tensor) -> Tensor:
        kept.append(weakref.ref(x))
        return x + 1

    def gone(x: Tensor) -> Tensor:
        gc.collect()
        assert kept[0]() is None
        return x

    graph = asc.Graph()
    graph.output(y=graph.add(gone, graph.add(note, graph.input("x") * 2) * 2) * 2)
    merged = asc.merge(graph, dict.fromkeys(named(graph), "all"))
    assert len(merged) == 1
    assert merged.run_serial(x=torch.ones(1))["y"].tolist() == [12]


def test_tasks_pinned_to_different_devices_are_not_merged() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:0"):
        x = x + 1 + 1
    with graph.on("cuda:1"):
        x = x + 1 + 1
    graph.output(y=x + 1)
    merged = asc.merge(graph, dict.fromkeys(named(graph), "all"))
    assert [task.device for task in merged.tasks] == ["cuda:0", "cuda:1", None]


def test_what_is_kept_together_stays_so_and_is_not_merged_with_what_is_kept_elsewhere() -> None:
    graph = asc.Graph()
    for i in range(2):
        w, gradient = (
            graph.input(f"w{i}"),
            graph.add(torch.exp, graph.input(f"x{i}"), on=f"cuda:{i}").t(),
        )
        graph.together(w, gradient)
        w.sub_(gradient)
    merged = asc.merge(graph, {"sub": "g", "sub_1": "g"})
    schedule = asc.schedule(merged, asc.Machine.emulated(gpus=2))
    assert (schedule.placement.device["g"], schedule.placement.device["g_1"]) == (
        "cuda:0",
        "cuda:1",
    )
    assert [[merged.values[i].name for i in bond] for bond in merged.kept_together] == [
        ["w0", "exp"],
        ["w1", "exp_1"],
    ]


def test_parts_make_tensors_where_the_merged_task_runs() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * (torch.ones(2, device=x.device) + 1)

    operators = asc.capture(fn, torch.ones(2))
    graph = asc.merge(operators, dict.fromkeys((task.name for task in operators.tasks), "whole"))
    assert len(graph) == 1
    assert len(graph.tasks[0].parts) == 3
    schedule = asc.schedule(
        graph, asc.Machine.emulated(gpus=1), place={"*": "cuda:0"}, backend="virtual"
    )
    assert (
        schedule(x=torch.ones(2))["result"].tolist()
        == [2, 2]
        == graph.run_serial(x=torch.ones(2))["result"].tolist()
    )
    assert re.search(r"ones.*device=cuda0", schedule.code)


def test_an_unknown_word_or_task_is_named() -> None:
    with pytest.raises(asc.GraphError, match="'op', 'module' or a mapping, got 'layer'"):
        asc.merge(layer(), "layer")  # type: ignore[arg-type]
    with pytest.raises(asc.GraphError, match="has no task 'nothing'"):
        asc.merge(layer(), {"nothing": "g"})


def test_a_failing_part_is_named_with_its_line() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("no")

    graph = asc.Graph()
    graph.output(y=graph.add(fails, graph.input("x") + 1) * 2)
    merged = asc.merge(graph, dict.fromkeys(named(graph), "all"))
    with pytest.raises(ValueError, match="no") as error:
        merged.run_serial(x=torch.ones(1))
    assert re.search(
        rf"in 'fails', a part of the task, added at {__file__}:\d+", "".join(error.value.__notes__)
    )


@pytest.mark.parametrize("backend", ["host", "threads", None])
def test_a_merged_task_that_fails_is_named(backend: str | None) -> None:
    def fails(x: Tensor) -> Tensor:
        if x.item() < 0:
            raise ValueError("no")
        return x

    graph = asc.Graph()
    graph.output(y=graph.add(fails, graph.input("x") + 1) * 2)
    merged = asc.merge(graph, dict.fromkeys(named(graph), "all"))
    with asc.schedule(merged, asc.Machine.local(gpus=0), backend=backend) as schedule:
        assert (
            schedule(x=torch.ones(1))["y"].item() == 4
        )  # the first run is watched, later ones are not
        with pytest.raises(asc.TaskError, match=r"task 'all' on cpu failed: ValueError: no"):
            schedule(x=-2 * torch.ones(1))


# ---- captures merged by module


def two_layers() -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("fc1", nn.Linear(8, 6))
    model.add_module("act", nn.ReLU())
    model.add_module("fc2", nn.Linear(6, 4))
    return model


def test_a_module_is_a_task_forward_and_one_backward() -> None:
    model = two_layers()
    step = stepper(model, optim.SGD(model.parameters(), lr=0.1))
    graph = asc.merge(asc.capture(step, *vectors(8)()), "module")
    assert named(graph) == [
        *(
            "fc1.forward",
            "act.forward",
            "fc2.forward",
            "forward",
            "backward",
            "fc2.backward",
            "act.backward",
        ),
        *("fc1.backward", "fc1.optimizer", "fc2.optimizer"),
    ]
    origin = graph.task("fc1.backward").origin
    assert (origin.module, origin.phase) == ("fc1", "backward")


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("no gradient")


def test_a_backward_pass_that_failed_leaves_the_phases_of_later_captures_alone() -> None:
    def phases() -> list[str]:
        model = two_layers()
        step = stepper(model, optim.SGD(model.parameters(), lr=0.1))
        return [task.origin.phase for task in asc.capture(step, *vectors(8)()).tasks]

    def failing(x: Tensor) -> Tensor:
        y = FailsInBackward.apply(x)
        (y * y).sum().backward()
        return y

    expected = phases()
    with pytest.raises(Exception, match="no gradient"):
        asc.capture(failing, torch.ones(3, requires_grad=True))
    assert phases() == expected
    assert expected[-1] == "optimizer"


def test_an_estimate_knows_the_parts_of_merged_tasks() -> None:
    torch.manual_seed(0)
    model = mlp()
    step, batch = stepper(model, OPTIMIZERS["adam"](model.parameters())), vectors(8)()
    step(*batch)  # from now on the optimizer asks for numbers
    operators = asc.capture(step, *batch)
    modules = asc.merge(operators, "module")
    plain, parts = (estimate(graph, graph.examples) for graph in (operators, modules))
    assert not plain.unknown
    assert not parts.unknown
    assert parts.costs.work == plain.costs.work
    for name, count in parts.costs.nbytes.items():
        assert plain.costs.nbytes[name] == count
    asc.schedule(modules, asc.Machine.emulated(gpus=1), costs=plain.costs)


# ---- functions that stay whole


@asc.task
def gelu(x: Tensor) -> Tensor:
    inner = 0.7978845608 * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


@asc.task(outputs=2)
def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.min(), x.max()


@asc.task(random=True)
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@asc.task(writes="weight")
def descend(gradient: Tensor, weight: Tensor) -> Tensor:
    weight.sub_(gradient)
    return weight.sum()


def test_a_marked_function_adds_itself_to_a_graph() -> None:
    graph = asc.Graph()
    x, w = graph.inputs("x", "w")
    low, high = extremes(noisy(gelu(x)))
    graph.output(low=low, high=high, total=descend(x, weight=w))
    assert named(graph) == ["gelu", "noisy", "extremes", "descend"]
    assert graph.task("noisy").random
    assert [graph.values[use.value].name for use in graph.task("descend").writes] == ["w"]
    assert graph.task("gelu").source.startswith(__file__)


def test_what_is_no_plain_function_can_be_marked() -> None:
    graph = asc.capture(lambda x: asc.task(torch.relu)(asc.task(nn.Softmax(0))(x)), torch.ones(3))
    assert named(graph) == ["Softmax", "relu"]
    assert graph.tasks[1].source.startswith(__file__)


def test_a_name_that_is_no_parameter_is_named() -> None:
    with pytest.raises(asc.GraphError, match=r"'fn' has no parameter 'y'; its parameters are 'x'"):

        @asc.task(aliases="y")
        def fn(x: Tensor) -> Tensor:
            return x


@pytest.mark.parametrize("granularity", ["op", "module"])
def test_a_call_of_a_marked_function_is_one_task_of_a_capture(granularity: str) -> None:
    model = two_layers()
    model.act.forward = gelu
    step = stepper(model, optim.SGD(model.parameters(), lr=0.1))
    graph = asc.merge(asc.capture(step, *vectors(8)()), granularity)
    whole, backward = graph.task("gelu"), graph.task("gelu.backward")
    assert {part.origin.whole for part in whole.parts} == {"gelu"}
    assert whole.origin.where == (__file__, gelu.__wrapped__.__code__.co_firstlineno)
    assert {part.origin.phase for part in backward.parts} == {"backward"}
    others = [
        part
        for task in graph.tasks
        for part in task.parts or [task]
        if task not in (whole, backward)
    ]
    assert not [part.name for part in others if part.origin.whole]
