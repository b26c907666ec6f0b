"""A gradient that autograd cannot follow through a schedule is an error, and never missing without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc

HERE = asc.Machine([asc.Device("cpu")])
LOST = "a gradient would be lost"


@pytest.fixture
def backbone() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 4)


@pytest.fixture
def x() -> Tensor:
    return torch.arange(6.0).view(2, 3)


def scheduled_capture(fn: Callable[..., Any], *args: Tensor) -> Callable[..., Any]:
    graph = asc.capture(fn, *args)
    run = asc.schedule(graph, HERE)
    return lambda *given: graph.finish(run(**graph.feed(*given)))


def serial_capture(fn: Callable[..., Any], *args: Tensor) -> Callable[..., Any]:
    graph = asc.capture(fn, *args)
    return lambda *given: graph.finish(graph.run_serial(**graph.feed(*given)))


def compiled_function(fn: Callable[..., Any], *_: Tensor) -> Callable[..., Any]:
    return asc.compile(getattr(fn, "forward", fn), HERE)


WAYS = [compiled_function, scheduled_capture, serial_capture]


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_for_what_was_scheduled_raises(way: Any, backbone: nn.Linear, x: Tensor) -> None:
    """``head(compiled(x)).mean().backward()`` left no gradient at the compiled part, and did not say so."""
    head, run = nn.Linear(4, 1), way(backbone, x)
    for _ in range(2):  # the first run is watched, the second one is not
        found = run(x)
        assert torch.equal(found, backbone(x))
        assert found.requires_grad
        with pytest.raises(asc.GradientError, match=LOST) as error:
            head(found).mean().backward()
    assert "'result'" in str(error.value)
    assert "torch.compile" in str(error.value)
    with pytest.raises(asc.GradientError, match=LOST):
        torch.autograd.grad(run(x).sum(), backbone.weight, allow_unused=True)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_are_not_lost_are_there(way: Any, backbone: nn.Linear, x: Tensor) -> None:
    head, run = nn.Linear(4, 1), way(backbone, x)
    loss = head(run(x)).mean()
    (found,) = torch.autograd.grad(loss, head.weight)
    assert torch.equal(found, torch.autograd.grad(head(backbone(x)).mean(), head.weight)[0])
    head(run(x).detach()).mean().backward()
    assert head.weight.grad is not None
    assert torch.equal(head.weight.grad, found)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_requires_grad_where_it_would_not_in_torch(
    way: Any, backbone: nn.Linear, x: Tensor
) -> None:
    def cut(x: Tensor) -> Any:
        out = backbone(x)
        return out, out.detach(), out.argmax(1), x, x * 2

    assert [item.requires_grad for item in way(cut, x)(x)] == [
        item.requires_grad for item in cut(x)
    ]
    run = way(backbone, x)
    with torch.no_grad():
        assert not run(x).requires_grad
    with torch.inference_mode():
        assert not run(x).requires_grad
    assert way(cut, x)(x)[3] is x


def test_compiled_parts_that_follow_each_other_raise_too(backbone: nn.Linear, x: Tensor) -> None:
    """The input of the second part is no leaf; its own gradient would be lost."""
    second = asc.compile(nn.Linear(4, 2).forward, HERE)
    trained = nn.Linear(3, 4)
    with pytest.raises(asc.GradientError, match=LOST):
        second(trained(x)).sum().backward()
    assert trained.weight.grad is None
    hidden = trained(x)
    with pytest.raises(asc.GradientError, match=LOST):
        torch.autograd.grad(second(hidden).sum(), hidden, allow_unused=True)


def test_losses_of_training_steps_are_differentiated_once(backbone: nn.Linear, x: Tensor) -> None:
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = backbone(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = asc.compile(step, HERE)
    losses = [run(x) for _ in range(3)]
    assert losses[2].item() < losses[0].item()
    assert run.cache_info().misses == 1
    with pytest.raises(asc.GradientError, match=LOST):
        losses[0].backward()


def test_inputs_written_where_autograd_would_note_it_raise(backbone: nn.Linear, x: Tensor) -> None:
    def scale(x: Tensor) -> None:
        x.mul_(backbone.weight)

    run, given, expected = asc.compile(scale, HERE), torch.ones(4, 3), torch.ones(4, 3)
    run(given)
    scale(expected)
    assert torch.equal(given, expected)
    assert given.requires_grad
    assert expected.requires_grad
    with pytest.raises(asc.GradientError, match="'x', to which"):
        given.sum().backward()
    base = torch.ones(4, 3, requires_grad=True)
    run(view := base * 1)
    with pytest.raises(asc.GradientError, match=LOST):
        view.sum().backward()


def test_tensors_left_in_modules_raise(x: Tensor) -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(3, 4), torch.zeros(2, 4)

        def forward(self, x: Tensor) -> None:
            self.last = self.inner(x)

    model = Remembers()
    with asc.compile(model.forward, HERE) as run:
        for _ in range(4):
            run(x)
            assert torch.equal(model.last, model.inner(x))
            assert model.last.requires_grad
        assert run.cache_info().misses == 2  # what is remembered at first requires no grad
    with pytest.raises(asc.GradientError, match="'last'"):
        model.last.sum().backward()


# ---- graphs that were not captured: what functions do is not known, so all that they compute counts


def built() -> asc.Graph:
    graph = asc.Graph("built")
    x, w, b = graph.inputs("x", "w", "b")
    graph.output(y=x @ w, z=b + 1, count=(x @ w).argmax(), cut=(x @ w).detach(), w=w)
    return graph


@pytest.mark.parametrize("gpus", [0, 2])
def test_outputs_of_graphs_raise(gpus: int) -> None:
    graph = built()
    given = {"x": torch.ones(2, 3), "w": torch.ones(3, 4, requires_grad=True), "b": torch.ones(1)}
    for backend in ("host", "virtual"):
        machine = asc.Machine.emulated(gpus=gpus)
        with asc.schedule(graph, machine, policy="round_robin", backend=backend) as schedule:
            for run in (schedule, schedule, schedule.run_serial, graph.run_serial):
                out = run(**given)
                assert torch.equal(out["y"], given["x"] @ given["w"])
                assert {name: item.requires_grad for name, item in out.items()} == {
                    "y": True, "z": False, "count": False, "cut": False, "w": True,
                }  # fmt: skip
                with pytest.raises(
                    asc.GradientError, match=r"output 'y' of graph 'built' \(computed at .*'w'"
                ):
                    out["y"].sum().backward()
                assert given["w"].grad is None
    with torch.no_grad():
        assert not graph.run_serial(**given)["y"].requires_grad


def test_an_input_that_comes_back_as_a_copy_raises() -> None:
    graph = asc.Graph()
    w = graph.input("w")
    graph.output(w=w)
    given = torch.ones(2, requires_grad=True)
    with asc.schedule(
        graph, asc.Machine.emulated(gpus=1), outputs="cuda:0", backend="virtual"
    ) as schedule:
        found = schedule(w=given)["w"]
    with pytest.raises(asc.GradientError, match=LOST):
        found.sum().backward()
    same = graph.run_serial(w=given)["w"]
    same.sum().backward()
    assert same is given
    assert given.grad is not None


def test_constants_and_modules_of_tasks_count(backbone: nn.Linear, x: Tensor) -> None:
    for task in (backbone, lambda x: x @ backbone.weight.T):
        graph = asc.Graph()
        graph.output(y=graph.add(task, graph.input("x")))
        with pytest.raises(asc.GradientError, match=LOST):
            asc.schedule(graph, HERE)(x=x)["y"].sum().backward()
    graph = asc.Graph()
    graph.output(y=graph.input("x") @ graph.constant(backbone.weight).T)
    with pytest.raises(asc.GradientError, match=LOST):
        graph.run_serial(x=x)["y"].sum().backward()


def test_gradients_taken_within_a_task_are_as_before(backbone: nn.Linear, x: Tensor) -> None:
    def trained(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return backbone(x)

    graph = asc.Graph()
    graph.output(y=graph.add(trained, graph.input("x")))
    graph.run_serial(x=x)["y"].sum().backward()
    assert backbone.weight.grad is not None


def test_an_input_that_did_not_require_grad_when_it_was_captured_counts(x: Tensor) -> None:
    graph = asc.capture(torch.exp, x)
    with pytest.raises(asc.GradientError, match=LOST):
        graph.finish(graph.run_serial(**graph.feed(x.clone().requires_grad_()))).sum().backward()
