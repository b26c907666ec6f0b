"""What compiled regions store, because others broadcast it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autosched.fusion import broadcasts
from autosched.fusion.broadcasts import StoreBroadcasts
from tests.fusion.regions import call, needs_compiler, region


def stored(fn: Callable[..., Tensor], *args: Tensor) -> list[str]:
    """Return the names of the nodes that the pass marks, of a function of tensors."""
    traced = make_fx(fn, tracing_mode="fake")(*args)
    StoreBroadcasts()(traced.graph)
    return [node.name for node in traced.graph.nodes if node.meta.get(broadcasts._STORED)]


ROWS = torch.rand(3, 4)
ROW = torch.rand(4)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, v: x * (v + 1).rsqrt(), ["rsqrt"]),
        (lambda x, v: x * (v.sqrt().neg() + 1).view(1, 4), ["view"]),  # the last one before
        (lambda x, v: x * v.exp().expand(3, 4) + v.exp(), ["exp", "exp_1"]),
        (lambda x, v: x * (v + 1), []),  # not costly
        (lambda x, v: x.exp() * x, []),  # no broadcast
        (lambda x, v: x * (x.exp() @ v).sum(), []),  # stored anyway
    ],
)
def test_costly_results_that_are_broadcast_are_stored(
    fn: Callable[..., Tensor], expected: list[str]
) -> None:
    assert stored(fn, ROWS, ROW) == expected
    assert stored(fn, ROWS.to("meta"), ROW.to("meta")) == []


@needs_compiler
@pytest.mark.slow
def test_inductor_stores_it_as_a_result_of_its_own() -> None:
    from torch._inductor import metrics

    made = region(lambda x, v: x * (v + 1).rsqrt(), inputs=2)
    metrics.reset()
    torch.testing.assert_close(call(made, ROWS, ROW), call(made.composite, ROWS, ROW))
    assert made.failure is None
    assert metrics.ir_nodes_pre_fusion == 2
