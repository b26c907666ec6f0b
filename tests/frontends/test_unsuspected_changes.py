"""What changes between two calls of a compiled function is noticed, also by guards that have seen many."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # or nothing is recognized
from torch import Tensor, nn

import autosched as asc

HERE = asc.Machine([asc.Device("cpu")])


class Layer(nn.Module):
    """Has parameters, a buffer, a number and a dropout, all of which it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.scale = 1
        self.register_buffer("shift", torch.rand(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.inner(x)) * self.scale + self.shift
        return y + 1 if self.inner.weight.requires_grad else y


def set_other(layer: Layer) -> None:
    layer.inner.weight.data.set_(torch.rand(3, 3))


def reallocate(layer: Layer) -> None:
    """Let another buffer have, most likely, the memory and the identity of one that went."""
    del layer.shift
    gc.collect()
    layer.register_buffer("shift", torch.rand(3, 1).expand(3, 3))


def alias(layer: Layer) -> None:
    layer.shift = layer.inner.weight.data


CHANGES: dict[str, Callable[[Layer], object]] = {
    "t_": lambda layer: layer.shift.t_(),
    "resize_": lambda layer: layer.shift.resize_(1, 3),
    "requires_grad_": lambda layer: layer.inner.weight.requires_grad_(False),
    "set_": set_other,
    "converted": lambda layer: layer.double(),
    "reallocated": reallocate,
    "alias": alias,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_unsuspected_is_noticed(change: Callable[[Layer], object]) -> None:
    torch.manual_seed(0)
    layer = Layer().eval()
    with torch.no_grad(), asc.compile(layer, HERE, policy="single") as run:
        x = torch.rand(3, 3)
        for _ in range(3):
            assert torch.equal(run(x), layer(x))
        assert run.cache_info().misses == 1
        change(layer)
        x = x.to(layer.shift.dtype)
        for _ in range(3):
            torch.manual_seed(1)
            wanted = layer(x)
            torch.manual_seed(1)
            assert torch.equal(run(x), wanted)


@pytest.mark.parametrize("is_buffer", [False, True], ids=["argument", "buffer"])
def test_a_hook_on_another_tensor_is_noticed(is_buffer: bool) -> None:
    layer = nn.Linear(3, 1)
    layer.register_buffer("shift", torch.zeros(3, requires_grad=True))

    def step(x: Tensor) -> Tensor:
        given = layer.shift if is_buffer else x
        return torch.autograd.grad(layer(x + layer.shift).sum(), given)[0]

    x = torch.rand(3, requires_grad=True)
    with asc.compile(step, HERE, policy="single") as run:
        assert torch.equal(run(x), layer.weight[0])
        handle = (layer.shift if is_buffer else x).register_hook(lambda grad: grad * 5)
        assert torch.equal(run(x), layer.weight[0] * 5)
        handle.remove()
        assert torch.equal(run(x), layer.weight[0])


def test_a_gradient_from_elsewhere_is_noticed() -> None:
    layer = nn.Linear(2, 1, bias=False)

    def step(x: Tensor) -> Tensor:
        layer(x).sum().backward()
        grad, layer.weight.grad = layer.weight.grad, None
        return grad.clone()

    with asc.compile(step, HERE, policy="single") as run:
        x = torch.tensor([1.0, 2.0])
        for before, after in ((0, [1, 2]), (0, [1, 2]), (5, [6, 7]), (0, [1, 2])):
            layer.weight.grad = torch.full((1, 2), 5.0) if before else None
            assert run(x).tolist() == [after]
