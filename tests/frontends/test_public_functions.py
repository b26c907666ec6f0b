"""Captured operators are called by the functions that people know, where these do the very same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autosched.frontends.operators import public_function

aten = torch.ops.aten


def fakes(*shapes: tuple[int, ...]) -> list[Tensor]:
    with FakeTensorMode():
        return [torch.ones(shape) for shape in shapes]


A, B, ROW = fakes((2, 3), (3, 4), (3,))


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "expected"),
    [
        (aten.mm.default, (A, B), {}, Tensor.mm),
        (aten.t.default, (A,), {}, Tensor.t),
        (aten.addmm.default, (B[0], A, B), {}, Tensor.addmm),
        (aten.add_.Tensor, (A, ROW), {"alpha": 2}, Tensor.add_),
        (aten.add.Tensor, (A, 1.0), {}, Tensor.add),
        (aten.sum.dim_IntList, (A, (0,), True), {}, Tensor.sum),
        (aten.cat.default, ((A, A), 1), {}, torch.cat),
        (aten.convolution.default, (A[None, None], A[None, None], None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1), {},
         torch.convolution),
        # another overload, or other arguments, than Python would choose
        (aten.where.self, (A > 0, A, A), {}, torch.where),
        (aten.adaptive_max_pool2d.default, (A[None], (1, 1)), {}, aten.adaptive_max_pool2d.default),
        (aten.topk.default, (A, 2), {}, Tensor.topk),
        (aten.add.Scalar, (A, 1.0), {}, aten.add.Scalar),
        (aten.threshold_backward.default, (A, A, 0), {}, aten.threshold_backward.default),
        (aten.zeros.default, ((2,),), {}, aten.zeros.default),
        (aten.rand.default, ((2,),), {}, aten.rand.default),
        (aten._to_copy.default, (A,), {"dtype": torch.float64}, aten._to_copy.default),
        (torch.relu, (A,), {}, torch.relu),
    ],
)  # fmt: skip
def test_an_operator_is_spelled_as_people_do(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any
) -> None:
    assert public_function(target, args, kwargs) is expected


def test_spelling_changes_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    (x,) = fakes((2, 3))
    public_function(aten.t_.default, (x,), {})
    public_function(aten.bernoulli_.float, (x, 0.5), {})
    public_function(aten.bernoulli.default, (x,), {})
    assert x.shape == (2, 3)
    assert torch.equal(torch.get_rng_state(), before)
