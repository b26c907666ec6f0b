"""What torch's ``activation_memory_budget`` repeats, in the terms of ``autosched.recomputation``.

Models are captured with AOTAutograd as one graph of forward and backward operators. Torch's
partitioner cuts it for several budgets; an operator that is in both parts is repeated. Seconds are
FLOPs, at least 1, which is what torch plans with, too. Bytes are those of new storages; parameters
and inputs are not counted, gradients are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._functorch import config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from autosched.recomputation.sequence import Step


class Captured(NamedTuple):
    """The steps of a training step, and torch's order of them for each budget."""

    steps: list[Step]
    orders: dict[float, list[int]]


def captured(model: nn.Module, x: Tensor, budgets: Sequence[float]) -> Captured:
    """Capture the mean of a model's squared outputs and its gradients, and let torch cut the graph."""
    parameters = dict(model.named_parameters())
    found: list[Captured] = []

    def loss(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(model, named, (x,)).square().mean()

    def partition(joint: fx.GraphModule, inputs: Any, **how: Any) -> Any:
        whole = copy.deepcopy(joint)
        whole.graph.eliminate_dead_code()
        steps, number = _steps(fx_graph_cse(whole.graph))
        orders = {}
        for budget in budgets:
            with config.patch(activation_memory_budget=budget):
                parts = min_cut_rematerialization_partition(copy.deepcopy(joint), inputs, **how)
            nodes = [node for part in parts for node in part.graph.nodes]
            names = [node.name for node in nodes if node.op == "call_function"]
            orders[budget] = [number[name] for name in names if name in number]
        found.append(Captured(steps, orders))
        return default_partition(joint, inputs, **how)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = aot_function(
            loss, lambda m, _: m, lambda m, _: m, partition, num_params_buffers=0
        )
        compiled(x, *parameters.values()).backward()
    return found[0]


def _storages(value: Any) -> dict[int, float]:
    tensors = [item for item in tree_leaves(value) if isinstance(item, Tensor)]
    return {t.untyped_storage()._cdata: float(t.untyped_storage().nbytes()) for t in tensors}


def _steps(graph: fx.Graph) -> tuple[list[Step], dict[str, int]]:
    """Return the steps of a graph, and the number of each by its operator's name; views are none."""
    maker: dict[int, int] = {}
    steps: list[Step] = []
    number: dict[str, int] = {}
    (output,) = (node for node in graph.nodes if node.op == "output")
    kept = {one for node in output.all_input_nodes for one in _storages(node.meta["val"])}
    for node in graph.nodes:
        made = {} if node.op == "output" else _storages(node.meta.get("val"))
        new = {one: nbytes for one, nbytes in made.items() if one not in maker}
        if node.op == "placeholder":
            maker.update(dict.fromkeys(made, -1))
        elif node.op == "call_function" and new:
            read = [one for other in node.all_input_nodes for one in _storages(other.meta["val"])]
            reads = tuple(sorted({maker[one] for one in read} - {-1}))
            number[node.name] = len(steps)
            maker.update(dict.fromkeys(new, len(steps)))
            is_kept = not kept.isdisjoint(new)
            steps.append(Step(_flops(node), sum(new.values()), reads, 0, is_kept))
    return [step._replace(last_repeat=len(steps)) for step in steps], number


def _flops(node: fx.Node) -> float:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
    with FlopCounterMode(display=False) as counter:
        node.target(*args, **kwargs)
    return max(1.0, float(counter.get_total_flops()))


# ---- models


class Attention(nn.Module):
    """A transformer block: attention, then a network of two layers; with gates as llama's, if asked."""

    def __init__(self, width: int, heads: int, causal: bool, gated: bool):
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 4 * width) if gated else None
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        three = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (y.view(n, length, self.heads, -1).transpose(1, 2) for y in three)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        if self.causal:
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, width))
        y = self.norm2(x)
        if self.gate is None:
            return x + self.down(functional.gelu(self.up(y)))
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def language(width: int, layers: int, words: int, gated: bool = False) -> nn.Module:
    """Return a GPT-2, or with gates a llama without rotations."""
    norm = nn.RMSNorm(width) if gated else nn.LayerNorm(width)
    blocks = [Attention(width, 4, True, gated) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(words, width), *blocks, norm, nn.Linear(width, words))


class Patches(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.cut = nn.Conv2d(3, width, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2).transpose(1, 2)


def vit(width: int, layers: int) -> nn.Module:
    blocks = [Attention(width, 4, False, False) for _ in range(layers)]
    return nn.Sequential(Patches(width), *blocks, nn.LayerNorm(width), nn.Linear(width, 10))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int):
        super().__init__()
        stride = 1 if inside == outside else 2

        def conv(inside: int, size: int, stride: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inside, outside, size, stride, size // 2, bias=False),
                nn.GroupNorm(8, outside),
            )

        self.first, self.second = conv(inside, 3, stride), conv(outside, 3, 1)
        self.past = conv(inside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(functional.relu(self.first(x)))
        return functional.relu(y + self.past(x))


def resnet(width: int) -> nn.Module:
    """Return a ResNet-18 with group norms, which are the same when they are repeated."""
    widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
    blocks = [Residual(a, b) for a, b in pairwise(widths)]
    stem = nn.Conv2d(3, width, 3, padding=1)
    return nn.Sequential(
        stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)
    )


def mlp(width: int, layers: int) -> nn.Module:
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*inner, nn.Linear(width, 10))


def models(quick: bool) -> Iterator[tuple[str, Callable[[], nn.Module], Tensor]]:
    """Yield the names of models, what makes them, and inputs."""
    words = torch.randint(256, (8, 64))
    yield "MLP, 12 layers", lambda: mlp(64, 12), torch.randn(4096, 64)
    yield "ResNet-18, 16 wide", lambda: resnet(16), torch.randn(16, 3, 32, 32)
    yield "GPT-2, 4 layers", lambda: language(64, 4, 256), words
    yield "ViT, 4 layers", lambda: vit(64, 4), torch.randn(8, 3, 64, 64)
    layers = 8 if quick else 32
    yield f"llama, {layers} layers", lambda: language(64, layers, 256, gated=True), words[:4]
