"""Transformer modules take the same path in captures as eagerly: torch's fast path where autograd does not record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import autosched as asc

MACHINE = asc.Machine.emulated(gpus=1)
PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
SCATTERED = torch.tensor([[False] * 5, [False, True, False, True, False]])


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, **{"batch_first": True, "dropout": 0.0, **options})


def compiled(fn: Callable[..., Any]) -> Any:
    return asc.compile(fn, MACHINE, policy="single", backend="host", check=True)


torch.manual_seed(0)
ENCODER = nn.TransformerEncoder(layer(), 2, norm=nn.LayerNorm(8)).eval()
ATTENTION = nn.MultiheadAttention(8, 2, batch_first=True).eval()
DENSE = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False).eval()
FROZEN = nn.TransformerEncoder(layer(), 2).eval().requires_grad_(False)
HALF = nn.TransformerEncoder(layer(), 2).eval()
HALF.layers[0].requires_grad_(False)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
NAMES = [
    "encoder", "encoder, padded", "encoder, causal", "layer", "layer, padded", "attention", "attention, weights",
    "attention, weights of each head", "attention, padded", "attention, another",
]  # fmt: skip


def leaves(tree: Any) -> list[Tensor]:
    return [item for item in tree if item is not None] if isinstance(tree, tuple) else [tree]


@pytest.mark.parametrize(
    ("name", "grad"), [*((name, False) for name in NAMES), ("layer", True), ("attention", True)]
)
def test_modules_take_the_path_that_they_take_eagerly(name: str, grad: bool) -> None:
    def fn(x: Tensor, padded: Tensor, causal: Tensor) -> Any:
        calls = {
            "encoder": lambda: ENCODER(x),
            "encoder, padded": lambda: ENCODER(x, src_key_padding_mask=padded),
            "encoder, causal": lambda: ENCODER(x, mask=causal, is_causal=True),
            "layer": lambda: ENCODER.layers[0](x),
            "layer, padded": lambda: ENCODER.layers[0](x, src_key_padding_mask=padded),
            "attention": lambda: ATTENTION(x, x, x, need_weights=False)[0],
            "attention, weights": lambda: ATTENTION(x, x, x),
            "attention, weights of each head": lambda: ATTENTION(
                x, x, x, average_attn_weights=False
            )[1],
            "attention, padded": lambda: ATTENTION(
                x, x, x, key_padding_mask=padded, need_weights=False
            )[0],
            "attention, another": lambda: ATTENTION(x, x + 1, x + 1, need_weights=False)[0],
        }
        with torch.set_grad_enabled(grad):
            return calls[name]()

    given = torch.randn(2, 5, 8), PADDED, CAUSAL
    eager = fn(*given)
    with compiled(fn) as run:
        ours = run(*given)
    assert all(map(torch.equal, leaves(eager), leaves(ours)))
    assert [item.stride() for item in leaves(eager)] == [item.stride() for item in leaves(ours)]


@pytest.mark.parametrize("encoder", [ENCODER, DENSE, FROZEN])
def test_an_encoder_decides_by_each_mask_whether_padding_is_zero(
    encoder: nn.TransformerEncoder,
) -> None:
    with torch.no_grad(), compiled(encoder) as run:
        for mask in (PADDED, SCATTERED, torch.zeros_like(PADDED)):
            x = torch.randn(2, 5, 8)
            assert torch.equal(
                run(x, src_key_padding_mask=mask), encoder(x, src_key_padding_mask=mask)
            )
        assert run.cache_info().misses == 1


def test_an_encoder_is_one_task_where_it_may_go_on_with_nested_tensors_and_reads_its_parameters() -> (
    None
):
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        graph = asc.capture(ENCODER, x, src_key_padding_mask=PADDED)
        assert [task.name for task in graph.tasks] == ["transformer_encoder"]
        weight = {"layers.1.linear1.weight": torch.randn(16, 8)}
        other = torch.func.functional_call(ENCODER, weight, (x,), {"src_key_padding_mask": PADDED})
        assert torch.equal(graph.run_serial(**{**graph.examples, **weight})["result"], other)
        with asc.schedule(graph, MACHINE, place={"transformer_encoder": "cuda:0"}) as schedule:
            assert torch.equal(schedule(**{**graph.examples, **weight})["result"], other)


def test_gradients_flow_through_an_encoder_whose_path_depends_on_no_mask() -> None:
    def step(x: Tensor, mask: Tensor) -> Tensor:
        loss = ENCODER(x, src_key_padding_mask=mask).square().mean()
        return torch.autograd.grad(loss, ENCODER.layers[0].linear1.weight)[0]

    given = torch.randn(2, 5, 8), PADDED
    with compiled(step) as run:
        assert torch.equal(run(*given), step(*given))


def test_an_encoder_of_which_only_the_first_layer_is_frozen_is_refused() -> None:
    with pytest.raises(
        asc.CaptureError, match=r"first layer require no.*enable_nested_tensor=False"
    ):
        asc.capture(HALF, torch.randn(2, 5, 8), src_key_padding_mask=PADDED)


def test_a_mode_within_the_step_keeps_modules_off_the_fast_path() -> None:
    class Passing(TorchFunctionMode):
        def __torch_function__(
            self, fn: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return fn(*args, **(kwargs or {}))

    def fn(x: Tensor) -> Tensor:
        with Passing():
            return ENCODER(x)  # type: ignore[no-any-return]

    x = torch.randn(2, 5, 8)
    with torch.no_grad(), compiled(fn) as run:
        assert torch.equal(run(x), fn(x))
