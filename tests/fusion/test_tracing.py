"""Regions as graphs of operators: what cannot be one, and in which order values are copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autosched.fusion.inductor import unavailable
from autosched.fusion.tracing import NotTraceableError, trace
from tests.fusion.regions import call, compiled_by, region

# ---- what cannot be traced


def drawing(x: Tensor) -> Tensor:
    return x + torch.rand(3)


def dropping(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x)


constant = torch.ones(3)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (drawing, "aten.rand.default draws random numbers"),
        (dropping, "aten.bernoulli_.float draws random numbers"),
        (lambda x: x[x > 0], "returns a tensor whose size depends on data"),
        (lambda x: x * int(x.sum()), "data-dependent"),
        (lambda x: x * 2 if x.sum() > 0 else x, "data-dependent"),
        (lambda x: torch.from_numpy(x.numpy() * 2), ".numpy() is not supported"),
        (lambda x: x.to_sparse().to_dense(), "returns a tensor that is not dense"),
        (lambda x: x + constant, "Please convert all Tensors to FakeTensors"),
        (lambda x: x + torch.tensor([1.0, 2, 3]), "which is no argument"),
        (lambda x: x.as_strided((2,), (1,), 1) + 1, "depends on the memory around its argument"),
    ],
)  # fmt: skip
def test_what_a_graph_cannot_express_runs_unfused(
    fn: Callable[[Tensor], Tensor], reason: str
) -> None:
    made = region(fn)
    x = torch.rand(5)[2:]  # not at the beginning of its memory
    torch.manual_seed(0)
    expected = fn(x)
    torch.manual_seed(0)
    assert torch.equal(call(made, x), expected)
    if unavailable("cpu") is None:
        assert made.failure is not None
        assert reason in made.failure
        assert "\n" not in made.failure


def test_arguments_that_get_another_shape_are_not_compiled_for() -> None:
    made = region(lambda x: x.mul_(2).unsqueeze_(0) + 1)
    with compiled_by():
        for _ in range(2):
            x = torch.ones(3)
            assert call(made, x).tolist() == [[3.0] * 3]
            assert x.shape == (1, 3)
    assert made.failure == "an argument gets another shape"


@pytest.mark.parametrize("fn", [torch.var_mean, torch.std_mean])
def test_the_mean_of_an_empty_tensor_is_not_compiled(fn: Callable[[Tensor], Any]) -> None:
    trace(lambda x: [*fn(x)], [torch.ones(2)])
    with pytest.raises(NotTraceableError, match="the mean 0 of an empty tensor"):
        trace(lambda x: [*fn(x)], [torch.ones(0)])


# ---- the order of copies


@pytest.mark.parametrize(
    ("steps", "copied"),
    [
        (lambda x, y, old: (x.copy_(y), y.copy_(old)), [0, 1]),
        (lambda x, y, old: (x.mul_(2), y.copy_(old)), [1]),
        (lambda x, y, old: (x.copy_(old.t().t()), y.copy_(old.double())), [0, 1]),
        (lambda x, y, old: (x.mul_(2), y.copy_(old + 1)), []),
    ],
    ids=["swap", "history", "views and casts", "computed"],
)
def test_values_that_other_arguments_had_are_copied_outside_of_the_graph(
    steps: Callable[..., Any], copied: list[int]
) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        steps(x, y, x.clone())
        return x + y

    def given() -> list[Tensor]:
        return [torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)]

    traced = trace(lambda *args: [fn(*args)], given())
    assert traced.written == [0, 1]
    assert traced.copied == copied
    own, found = given(), given()
    expected = call(fn, *own)
    made = region(fn, inputs=2)
    with compiled_by():
        assert torch.equal(call(made, *found), expected)
    assert made.failure is None
    assert all(map(torch.equal, found, own))
