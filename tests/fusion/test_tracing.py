"""Regions as graphs of operators: what cannot be one, and in which order values are copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autosched.fusion.inductor import unavailable
from autosched.fusion.tracing import NotTraceableError, trace
from tests.fusion.regions import call, compiled_by, needs_compiler, region

# ---- what cannot be traced


def drawing(x: Tensor) -> Tensor:
    return x + torch.rand(3)


def dropping(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x)


constant = torch.ones(3)
update_stats = torch.ops.aten.batch_norm_update_stats


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
        (lambda x: update_stats(x[:, None], x[:1] * 1, x[:1] + 1, 0.1)[0], "does not declare"),
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


# ---- copies into arguments


def swap(x: Tensor, y: Tensor) -> Tensor:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return x + y


def rotate(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    first = x.to(torch.float64)
    x.copy_(y)
    y.copy_(z.view(2, 3).view(6))
    z.copy_(first)
    return x - z


def shift(newest: Tensor, older: Tensor, x: Tensor) -> Tensor:
    change = x - newest + 0.5 * older
    older.copy_(newest)
    newest.copy_(x)
    return change * 2


def reverse(x: Tensor, y: Tensor) -> Tensor:
    parts = x.view(2, 3).t().contiguous().view(6)
    x.copy_(y.flip(0))
    y[:6].copy_(parts)
    return y * 2


def accumulate(x: Tensor, y: Tensor) -> Tensor:
    before = x.clone()
    x.add_(y)
    y.mul_(0.9).add_(before)
    return x * y


EXCHANGES: list[tuple[Callable[..., Tensor], int, list[int]]] = [
    (swap, 2, [0, 1]),
    (rotate, 3, [0, 1, 2]),
    (shift, 3, [0]),
    (reverse, 2, [0, 1]),
    (accumulate, 2, []),
]


@pytest.mark.parametrize(("fn", "count", "old"), EXCHANGES)
def test_values_that_arguments_exchange_are_read_from_copies(
    fn: Callable[..., Tensor], count: int, old: list[int]
) -> None:
    traced = trace(lambda *args: [fn(*args)], [torch.rand(6) for _ in range(count)])
    assert list(traced.old) == old
    inputs = traced.graph.graph.find_nodes(op="placeholder")
    written = [inputs[i] for i in old]
    assert all(user.args[0] is node for node in written for user in node.users)
    assert all(len(node.users) == 1 for node in written)


@needs_compiler
def test_arguments_exchange_values_as_in_eager_mode() -> None:
    def all_of(*tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        return tuple(fn(*(next(rest) for _ in range(count))) for fn, count, _ in EXCHANGES)

    total = sum(count for _, count, _ in EXCHANGES)
    generator = torch.Generator().manual_seed(0)
    given = [torch.rand(6, generator=generator) for _ in range(total)]
    twins = [each.clone() for each in given]
    made = region(all_of, inputs=total, outputs=len(EXCHANGES))
    for _ in range(5):  # also runs that are not compared
        found, expected = call(made, *given), all_of(*twins)
        assert made.failure is None
        for one, other in zip((*found, *given), (*expected, *twins), strict=True):
            torch.testing.assert_close(one, other)


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
