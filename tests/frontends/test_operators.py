"""Operators of captures compute the bits of eager calls, also where a kernel depends on more than its arguments."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import autosched as asc

MACHINE = asc.Machine.emulated(gpus=1)
X = torch.linspace(-1, 1, 120).view(5, 3, 8)


def test_recurrent_layers_have_the_bits_of_their_grad_mode() -> None:
    """The LSTM's kernel for inference rounds differently, and a step may contain both."""
    torch.manual_seed(0)
    model = nn.LSTM(8, 16, 2)
    twin = copy.deepcopy(model)

    def step(model: nn.RNNBase, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = model(x)[0]
        out = model(x)[0]
        (out - target * 2).square().sum().backward()
        return target, out.detach()

    with asc.compile(step, MACHINE, policy="single") as run:
        found = run(twin, X)
    assert all(map(torch.equal, found, step(model, X)))
    grads = [[item.grad for item in each.parameters()] for each in (twin, model)]
    assert all(map(torch.equal, *grads))
    with torch.no_grad(), asc.compile(model, MACHINE, policy="single") as infer:
        assert torch.equal(infer(X)[0], model(X)[0])
