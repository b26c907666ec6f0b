"""What a step looks up at each call."""

import copy

import pytest
import torch
from torch import nn

from tests.serial import data_parallel, pipeline


def double(tensor):
    tensor.mul_(2)


HOOKS = {
    "parameter": lambda model, optimizer: model[0].weight.register_hook(lambda grad: 2 * grad),
    "module": lambda model, optimizer: model[1].register_forward_hook(lambda *given: 2 * given[2]),
    "backward": lambda model, optimizer: model[2].register_full_backward_pre_hook(
        lambda module, grads: (2 * grads[0],)
    ),
    "before": lambda model, optimizer: optimizer.register_step_pre_hook(
        lambda *_: double(model[0].weight.grad)
    ),
    "after": lambda model, optimizer: optimizer.register_step_post_hook(
        lambda *_: double(model[0].weight.data)
    ),
}


@pytest.mark.parametrize(
    "make", [data_parallel(1), pipeline(2, chunks=1)], ids=["data", "pipeline"]
)
@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_that_come_and_go_run(make, register):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    twin = copy.deepcopy(model)
    x, y = torch.randn(2, 4, 1)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, twin)]

    def train():
        nn.functional.mse_loss(model(x), y).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        step(x, y)
        assert all(map(torch.allclose, model.parameters(), twin.parameters()))

    with make(twin, nn.functional.mse_loss, optimizers[1]) as step:
        train()
        handles = [register(model, optimizers[0]), register(twin, optimizers[1])]
        train()
        for handle in handles:
            handle.remove()
        train()
