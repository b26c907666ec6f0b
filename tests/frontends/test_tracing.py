"""Transforms of torch.func, and modules without data, are captured as they run eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap

import autosched as asc

MACHINE = asc.Machine.emulated(gpus=2)
X = torch.linspace(-1, 1, 12).view(3, 4)


def cubes(x: Tensor) -> Tensor:
    return x.pow(3).sum()


def spectrum(x: Tensor) -> Tensor:
    return torch.linalg.norm(x, 2) + torch.linalg.svdvals(x).sum()


def dual(x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        made = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(cubes(made) + spectrum(made)).tangent


TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "hessian": lambda x: hessian(cubes)(x),
    "forward over forward": lambda x: jacfwd(jacfwd(cubes))(x),
    "backward over backward": lambda x: jacrev(jacrev(cubes))(x),
    "tangent": lambda x: jvp(lambda v: torch.cat([v, v.new_zeros(1, 4)]).sin(), (x,), (x,))[1],
    "tangent of singular values": lambda x: jvp(spectrum, (x,), (x,))[1],
    "singular values of a batch": lambda x: vmap(spectrum)(torch.stack([x, x * 2])),
    "dual tensors": dual,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_run_as_they_do_eagerly(name: str) -> None:
    fn = TRANSFORMS[name]
    graph = asc.capture(fn, X)
    assert not [task.name for task in graph.tasks if task.device == "meta"]
    assert torch.equal(asc.schedule(graph, MACHINE, policy="round_robin")(X)["result"], fn(X))


def models() -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """A module without data, and the parameters and buffers of three of its kind."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).eval()
    given = stack_module_state([first, copy.deepcopy(first), copy.deepcopy(first)])
    return first.to("meta"), *(
        {name: item.detach() for name, item in part.items()} for part in given
    )


def test_a_module_without_data_is_called_with_other_parameters() -> None:
    skeleton, parameters, buffers = models()

    def step(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Any:
        def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
            return functional_call(skeleton, (parameters, buffers), (x,)).square().mean()

        grads = vmap(grad(loss))(parameters, buffers)
        return [item - 0.1 * grads[name] for name, item in parameters.items()]

    with asc.compile(step, MACHINE, policy="round_robin") as run:
        for _ in range(2):
            found = run(parameters, buffers, X)
        assert run.cache_info().misses == 1
    assert all(map(torch.equal, found, step(parameters, buffers, X)))


def test_a_module_without_data_that_computes_is_refused() -> None:
    skeleton, *_ = models()
    with pytest.raises(asc.CaptureError, match="on one device, with data"):
        asc.capture(skeleton, X)
