"""Faithful: functions of torch that choose other operators while they are traced do as they do eagerly."""

import pytest
import torch

import autosched as asc
from autosched.testing.comparing import difference


@pytest.mark.parametrize(
    "fn",
    [
        torch.linalg.svdvals,
        torch.linalg.cond,
        lambda x: torch.linalg.matrix_norm(x, "nuc"),
        lambda x: torch.linalg.eigvalsh(x + x.T),
        lambda x: torch.linalg.svd(x).S,
        lambda x: x.expand(4, 5, 5).contiguous() @ (x + 1)[None],
        lambda x: (x + 1)[None].__rmatmul__(x.expand(4, 5, 5).contiguous()),
    ],
)
@pytest.mark.parametrize("recording", [False, True])
def test_values_are_those_of_eager(fn, recording):
    torch.manual_seed(0)
    x = (torch.randn(5, 5) * 10).requires_grad_(recording)
    graph = asc.capture(lambda x: fn(x).detach(), x)
    assert difference(fn(x).detach(), graph.finish(graph.run_serial(**graph.feed(x)))) is None


@pytest.mark.parametrize(
    "fn", [torch.prod, lambda x: x.cumprod(0), lambda x: torch.ones(3).masked_fill(x > 0, x[0])]
)
def test_a_backward_that_looks_at_data_is_refused(fn):
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(asc.errors.CaptureError, match="reads elements to choose how it computes"):
        asc.capture(lambda x: torch.autograd.grad(fn(x).sum(), x), x)
    asc.capture(lambda x: fn(x).detach(), x)
