"""Steps do in captures what they do eagerly, also where torch or a library would choose otherwise."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import autosched as asc
from autosched.testing.comparing import difference

MACHINE = asc.Machine.emulated(gpus=1)


# ---- functions that choose other operators while they are traced


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


# ---- kernels that depend on more than their arguments

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


# ---- transformer modules take the fast path where autograd does not record

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
            "encoder, padded": lambda: DENSE(x, src_key_padding_mask=padded),
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


def test_an_encoder_that_would_read_its_padding_mask_is_refused_with_advice() -> None:
    with torch.no_grad():
        with pytest.raises(asc.CaptureError, match="enable_nested_tensor=False"):
            asc.capture(ENCODER, torch.randn(2, 5, 8), src_key_padding_mask=PADDED)
        with compiled(DENSE) as run:
            for mask in (PADDED, SCATTERED, torch.zeros_like(PADDED)):
                x = torch.randn(2, 5, 8)
                assert torch.equal(
                    run(x, src_key_padding_mask=mask), DENSE(x, src_key_padding_mask=mask)
                )
            assert run.cache_info().misses == 1


# ---- code that asks whether it is captured goes its eager way, if that is one without a look at data

QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "is_compiling": lambda x: torch.compiler.is_compiling(),
    "is_dynamo_compiling": lambda x: torch.compiler.is_dynamo_compiling(),
    "is_exporting": lambda x: torch.compiler.is_exporting(),
    "torch._dynamo.is_compiling": lambda x: torch._dynamo.is_compiling(),
    "torch.jit.is_tracing": lambda x: torch.jit.is_tracing(),
    "torch.jit.is_scripting": lambda x: torch.jit.is_scripting(),
    "in_onnx_export": lambda x: torch.onnx.is_in_onnx_export(),
    "a proxy": lambda x: isinstance(x, torch.fx.Proxy),
    "a fake tensor": lambda x: isinstance(x, torch._subclasses.FakeTensor),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_whoever_asks_is_told_that_nothing_is_captured(name: str) -> None:
    def step(x: Tensor) -> Tensor:
        return x * 2 if QUESTIONS[name](x) else x + 1

    with (
        warnings.catch_warnings(),
        asc.compile(step, asc.Machine.emulated(gpus=1), backend="host") as run,
    ):
        warnings.simplefilter("error")
        assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0))


def test_what_would_look_at_data_otherwise_is_told_of() -> None:
    def step(x: Tensor, mask: Tensor) -> Tensor:
        if not isinstance(mask, torch._subclasses.FakeTensor) and mask.all():
            return x
        return x * mask

    x, mask = torch.ones(3), torch.tensor([True, True, False])
    with (
        pytest.warns(
            RuntimeWarning,
            match=r"test_replacements.*checks whether a tensor .*\n    at .*: if not isinstance",
        ),
        asc.compile(step, asc.Machine.emulated(gpus=1), backend="host") as run,
    ):
        assert torch.equal(run(x, mask), step(x, mask))
    assert torch._subclasses.FakeTensor is torch._subclasses.fake_tensor.FakeTensor


# ---- what older versions of torch lack: ours says the same as torch's own in later versions


def step_of(model: nn.Sequential, reentrant: bool):
    """Return a step whose backward adds up gradients, runs parts of forward again, and is run through itself."""

    def step(x: Tensor) -> Tensor:
        h = model[0](x)
        part = torch.utils.checkpoint.checkpoint(model[1:], h, use_reentrant=reentrant)
        loss = (part * h.sum()).sum() + (h * h).sum()
        if not reentrant:
            (slope,) = torch.autograd.grad(loss, h, create_graph=True)
            loss = loss + slope.pow(2).sum()
        loss.backward()
        return loss

    return step


@pytest.mark.parametrize("reentrant", [False, True])
def test_tasks_come_from_the_same_module_phase_and_line(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    step, x = step_of(model, reentrant), torch.ones(3, 2)
    graph = asc.capture(step, x)
    monkeypatch.delattr(torch.compiler, "_patch_engine_backward", raising=False)
    older = asc.capture(step, x)
    assert {task.origin.module for task in older.tasks if task.origin.phase == "backward"} >= {
        "0",
        "1",
    }
    assert [(task.name, task.origin) for task in older.tasks] == [
        (task.name, task.origin) for task in graph.tasks
    ]


def test_a_generator_that_is_drawn_from_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.randn(2, generator=generator) * torch.rand(2, generator=generator)

    monkeypatch.delattr(torch.compiler, "_patch_engine_backward", raising=False)
    mine, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    graph = asc.capture(noisy, torch.ones(2), mine)
    for _ in range(2):
        out = graph.finish(graph.run_serial(**graph.feed(torch.ones(2), mine)))
        assert torch.equal(out, noisy(torch.ones(2), theirs))
