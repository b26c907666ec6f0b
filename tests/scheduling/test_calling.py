"""Schedules are called as one would: by position, by name, and captured ones as the function that was captured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc

HERE = asc.Machine([asc.Device("cpu")])


class Item(nn.Module):
    """Two towers and a bias, as a recommender has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, u: Tensor, i: Tensor, scale: float = 1.0) -> Tensor:
        return (self.user(u) * self.item(i)).sum(1) * scale


@pytest.fixture
def u() -> Tensor:
    return torch.arange(6.0).view(2, 3)


@pytest.fixture
def i() -> Tensor:
    return torch.arange(4.0).view(2, 2)


def test_inputs_may_be_given_by_position(u: Tensor, i: Tensor) -> None:
    graph = asc.Graph("sums")
    x, y, z = graph.inputs("x", "y", "z")
    graph.output(s=(x + y) * z)
    schedule = asc.schedule(graph, HERE)
    one, two, three = (torch.full((2,), float(n)) for n in (1, 2, 3))
    for run in (schedule, schedule.run_serial, graph.run_serial):
        assert (
            run(one, two, three)["s"].tolist()
            == run(one, z=three, y=two)["s"].tolist()
            == [9.0, 9.0]
        )
        with pytest.raises(
            asc.GraphError, match="graph 'sums' was given 4 inputs; it has 3: 'x', 'y', 'z'"
        ):
            run(one, two, three, one)
        with pytest.raises(
            asc.GraphError, match="was given input 'x' twice, by position and by name"
        ):
            run(one, x=one)
        with pytest.raises(asc.GraphError, match="graph 'sums' misses input 'z'"):
            run(one, two)
    assert schedule.profile(one, two, three, repeat=2).makespan > 0


def test_the_schedule_of_a_capture_is_called_as_its_function(u: Tensor, i: Tensor) -> None:
    """It missed input 'item.bias', though the module was at hand."""
    model = Item()
    graph = asc.capture(model, u, i)
    schedule = asc.schedule(graph, HERE)
    for run in (schedule, schedule.run_serial, graph.run_serial):
        for out in (run(u=u, i=i), run(u, i), run(u, i=i), run(u, i, scale=1.0), run(u, i, 1.0)):
            assert torch.equal(out["result"], model(u, i))
            assert torch.equal(graph.finish(out), model(u, i))
    with torch.no_grad():
        model.user.weight.mul_(2)
    assert torch.equal(schedule(u, i)["result"], model(u, i))
    assert schedule.profile(u, i).makespan > 0


def test_all_inputs_may_still_be_named(u: Tensor, i: Tensor) -> None:
    model = Item()
    schedule = asc.schedule(asc.capture(model, u, i), HERE)
    others = {name: torch.ones_like(item) for name, item in model.state_dict().items()}
    found = schedule(u=u, i=i, **others)["result"]
    assert torch.equal(found, torch.func.functional_call(model, others, (u, i)))
    with pytest.raises(asc.GraphError, match=r"misses input 'user.bias'"):
        schedule(u=u, i=i, **{name: item for name, item in others.items() if name != "user.bias"})


def test_arguments_that_fit_no_parameter_are_refused(u: Tensor, i: Tensor) -> None:
    graph = asc.capture(Item(), u, i, 2.0)
    schedule = asc.schedule(graph, HERE)
    assert torch.equal(schedule(u, i)["result"], schedule(u, i, 2.0)["result"])
    with pytest.raises(
        asc.GraphError, match=r"'scale' is 3.0, but it was 2.0 when 'Item' was captured"
    ):
        schedule(u, i, scale=3.0)
    with pytest.raises(asc.GraphError, match=r"'scale' is 3.0, but it was 2.0"):
        graph.feed(u, i, 3.0)
    with pytest.raises(asc.AutoschedError, match=r"misses input 'i'|cannot be called like that"):
        schedule(u)
    with pytest.raises(asc.GraphError, match="misses input 'i'"):
        schedule(u=u)
    with pytest.raises(asc.CaptureError, match="cannot be called like that"):
        schedule(u=u, j=i)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(u: Tensor, i: Tensor) -> Tensor:
        loss = model(u, i).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_a_captured_step_trains_its_model(u: Tensor, i: Tensor) -> None:
    eager = Item()
    model = copy.deepcopy(eager)
    step = step_of(eager, torch.optim.SGD(eager.parameters(), lr=1e-3))
    twin = step_of(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    schedule = asc.schedule(asc.capture(twin, u, i), HERE)
    for run in (schedule, schedule, schedule.run_serial):
        assert torch.equal(run(u, i)["result"], step(u, i))
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_new_state_is_put_back_and_a_capture_without_it_is_refused_then(
    u: Tensor, i: Tensor
) -> None:
    """Run again, it would make new moments, and forget those that are there."""
    eager = Item()
    model = copy.deepcopy(eager)
    ours, theirs = (torch.optim.Adam(item.parameters()) for item in (model, eager))
    schedule = asc.schedule(asc.capture(step_of(model, ours), u, i), HERE)
    schedule(u, i)
    step_of(eager, theirs)(u, i)
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.state[mine]["exp_avg"], theirs.state[other]["exp_avg"])
    with pytest.raises(
        asc.GraphError, match=r"'optimizer.*' did not exist yet when 'step' was captured; capture"
    ):
        schedule(u, i)
    again = asc.schedule(asc.capture(step_of(model, ours), u, i), HERE)
    assert torch.equal(again(u, i)["result"], step_of(eager, theirs)(u, i))
    ours.state.clear()
    with pytest.raises(
        asc.GraphError, match=r"'optimizer.*' no longer exists, as it did when 'step' was captured"
    ):
        again(u, i)


def test_nested_arguments_are_given_as_they_are(u: Tensor, i: Tensor) -> None:
    def total(batch: dict[str, Any], extra: tuple[Tensor, ...]) -> Tensor:
        return batch["u"].sum() + batch["more"][0].sum() + extra[0].sum()

    batch, extra = {"u": u, "more": [i]}, (u,)
    extra = (u.clone(),)
    graph = asc.capture(total, batch, extra)
    schedule = asc.schedule(graph, HERE)
    expected = total(batch, extra)
    assert torch.equal(schedule(batch, extra)["result"], expected)
    assert torch.equal(schedule(batch=batch, extra=extra)["result"], expected)
    assert torch.equal(schedule(**graph.feed(batch, extra))["result"], expected)
