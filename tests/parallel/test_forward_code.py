"""What models do in their forward: draw under checkpoints, differentiate, call functions of torch.func, cast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autosched as asc
from tests.serial import (
    among,
    assert_trains_as_serially,
    data_parallel,
    model_parallel,
    momentum,
    pipeline,
    some,
)


class Block(nn.Module):
    """Applies to its input what it is given, with its own layers."""

    def __init__(self, apply: Callable[[Block, Tensor], Tensor]):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.3)
        self.apply_to = apply

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def dropped(self, x: Tensor) -> Tensor:
        return self.drop(self.body(self.drop(x)))

    def twice(self, x: Tensor) -> Tensor:
        return self.drop(checkpoint(self.dropped, x, use_reentrant=False))

    def gumbel(self, x: Tensor) -> Tensor:
        return functional.gumbel_softmax(self.body(x)) + torch.rand_like(x) + torch.rand(8)

    def attended(self, x: Tensor) -> Tensor:
        q = self.body(x)[None]
        return functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2)[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(self, x)


def under_checkpoint(name: str, reentrant: bool = False) -> Callable[[Block, Tensor], Tensor]:
    return lambda block, x: checkpoint(getattr(block, name), x, use_reentrant=reentrant)


def differentiated(block: Block, x: Tensor) -> Tensor:
    """Return forces, as models of molecules do."""
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        (force,) = torch.autograd.grad(block.body(at).sum(), at, create_graph=True)
    return block.down(block.up(force))


def moved(block: Block, x: Tensor) -> Tensor:
    """Go down a gradient, which is constant for the outer backward."""
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(block.body(at).square().mean(), at)
    return block.body(x - gradient)


def cast(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(block.dropped, x, use_reentrant=False).float()


def called(block: Block, x: Tensor) -> Tensor:
    halved = {name: item * 0.5 for name, item in block.up.named_parameters()}
    return x + block.down(torch.func.functional_call(block.up, halved, (x,)))


FORWARDS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "dropout": lambda block, x: functional.dropout(block.body(x), 0.2, block.training),
    "checkpoint": under_checkpoint("dropped"),
    "reentrant": under_checkpoint("dropped", reentrant=True),
    "checkpoints": under_checkpoint("twice"),
    "gumbel": under_checkpoint("gumbel"),
    "attention": under_checkpoint("attended"),
    "cast": cast,
    "grad": differentiated,
    "constant grad": moved,
    "func.grad": lambda block, x: x + torch.func.grad(lambda y: block.body(y).tanh().sum())(x),
    "func.vmap": lambda block, x: torch.func.vmap(block.body)(x),
    "func.functional_call": called,
}


def model_of(forward: Callable[[Block, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(forward), Block(forward), nn.Linear(8, 4))


def batches(count: int = 1) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(count)]


ALL = {
    "gpipe": (pipeline(2, schedule="gpipe", chunks=3), among(1, 3)),
    "auto": (pipeline(2, chunks=2), among(1, 2)),
    "model parallel": (model_parallel(2), among(1)),
    "data parallel": (data_parallel(2), among(2)),
    "zb-v": (pipeline(schedule="zb-v"), among(1, 2)),
}


@pytest.mark.parametrize("system", some(ALL, "model parallel"))
@pytest.mark.parametrize("name", FORWARDS)
def test_models_train_as_serially(name: str, system: str) -> None:
    assert_trains_as_serially(*ALL[system], model_of(FORWARDS[name]), batches())


def test_a_loss_may_be_changed_by_gradients_that_it_computes() -> None:
    def penalised(out: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(out, y)
        (gradient,) = torch.autograd.grad(loss, out, create_graph=True)
        loss += gradient.square().sum()
        return loss

    model = model_of(FORWARDS["dropout"])
    assert_trains_as_serially(*ALL["model parallel"], model, batches(), loss_fn=penalised)


def test_other_numbers_may_be_drawn_in_backward_by_one_micro_batch() -> None:
    def forward(block: Block, x: Tensor) -> Tensor:
        return checkpoint(block.dropped, x, use_reentrant=False, preserve_rng_state=False)

    assert_trains_as_serially(*ALL["model parallel"], model_of(forward), batches())


def test_numbers_that_depend_on_data_are_refused_under_a_checkpoint() -> None:
    def sampled(block: Block, x: Tensor) -> Tensor:
        return checkpoint(lambda x: x * torch.bernoulli(torch.sigmoid(x)), x, use_reentrant=False)

    make, _ = ALL["model parallel"]
    model = model_of(sampled)
    with (
        make(model, functional.cross_entropy, momentum(model.parameters())) as step,
        pytest.raises(asc.ScheduleError, match="draws other numbers than forward did"),
    ):
        step(*batches()[0])
