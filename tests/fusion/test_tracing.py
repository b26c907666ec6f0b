"""Regions as graphs of operators: what cannot be one, and in which order values are copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autosched.fusion.inductor import unavailable
from autosched.fusion.tracing import NotTraceableError, trace
from tests.fusion.regions import call, region

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


@pytest.mark.parametrize("fn", [torch.var_mean, torch.std_mean])
def test_the_mean_of_an_empty_tensor_is_not_compiled(fn: Callable[[Tensor], Any]) -> None:
    trace(lambda x: [*fn(x)], [torch.ones(2)])
    with pytest.raises(NotTraceableError, match="the mean 0 of an empty tensor"):
        trace(lambda x: [*fn(x)], [torch.ones(0)])


# ---- views


def splitting(x: Tensor) -> Tensor:
    y = x * 2
    torch.unsafe_split(y, 2)[0].sigmoid_()
    return y


def splitting_by_sizes(x: Tensor) -> Tensor:
    y = x * 2
    torch.unsafe_split_with_sizes(y, [1, 3])[1].sigmoid_()
    return y


@pytest.mark.parametrize("fn", [splitting, splitting_by_sizes])
def test_writes_to_views_that_torch_calls_unsafe_change_their_base(
    fn: Callable[[Tensor], Tensor],
) -> None:
    x = torch.arange(4.0)
    (found,) = trace(lambda x: [fn(x)], [x]).graph(x)
    assert torch.equal(found, fn(x))
