"""Gradients of convolutions on a CPU: images have the channels last, and results lie as before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autosched.fusion.tracing import Traced, trace
from tests.serial import some

CHANNELS = 4
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3),
    "strided": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1),
    "grouped": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, groups=2, bias=False),
    "dilated": lambda: nn.Conv2d(CHANNELS, CHANNELS, 2, dilation=2, padding="same"),
    "transposed": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, output_padding=1, stride=2),
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "group norm": lambda: nn.GroupNorm(2, CHANNELS),
    "response norm": lambda: nn.LocalResponseNorm(2),
    "max pool": lambda: nn.MaxPool2d(2),
    "average pool": lambda: nn.AvgPool2d(2, padding=1),
    "adaptive pool": lambda: nn.AdaptiveAvgPool2d((3, 2)),
    "power pool": lambda: nn.LPPool2d(2, 2),
    "upsampling": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "shuffle": lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2)),
    "channel shuffle": lambda: nn.ChannelShuffle(2),
    "fold": lambda: nn.Sequential(nn.Unfold(2), nn.Fold((8, 8), 2)),
    "writing": lambda: nn.ReLU(inplace=True),
    "padding": lambda: nn.ReflectionPad2d(1),
}  # fmt: skip


class Whole(nn.Module):
    """A layer between two convolutions, its images flattened at the end."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.first, self.layer = nn.Conv2d(2, CHANNELS, 3, padding=1), layer
        self.last = nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 3 * width * height) for images of shape (n, 2, 8, 8)."""
        return self.last(self.layer(self.first(x))).flatten(1)


def gradients(model: nn.Module, x: Tensor) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """Return a function of operators that computes results and gradients, and its arguments."""
    names = [name for name, _ in model.named_parameters()]

    def compute(x: Tensor, *parameters: Tensor) -> list[Tensor]:
        params = dict(zip(names, parameters, strict=True))
        y = torch.func.functional_call(model, params, (x,))
        return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]

    args = [x.requires_grad_(), *model.parameters()]
    operators = make_fx(compute)(*args)
    return lambda *args: list(operators(*args)), [arg.detach() for arg in args]


def in_channels_last(graph: torch.fx.GraphModule) -> list[bool]:
    """Whether the images that each convolution's gradients take have the channels last."""
    found = graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution_backward.default
    )
    images = [node.args[i].meta["val"] for node in found for i in (0, 1)]
    return [image.is_contiguous(memory_format=torch.channels_last) for image in images]


def assert_equal(traced: Traced, fn: Callable[..., list[Tensor]], args: list[Tensor]) -> None:
    """Compare results and how they lie in memory."""
    made = traced.graph(*args)
    for expected, (strides, _), found in zip(fn(*args), traced.results, made, strict=True):
        assert strides == found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)


QUICK = "conv", "transposed", "batch norm", "max pool", "upsampling", "fold", "writing"


@pytest.mark.parametrize("layer", some(LAYERS, *QUICK))
def test_images_have_the_channels_last(layer: str) -> None:
    torch.manual_seed(0)
    images = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    fn, args = gradients(Whole(LAYERS[layer]()).double(), images)
    traced = trace(fn, args)
    assert all(in_channels_last(traced.graph))
    assert_equal(traced, fn, args)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_only_images_have_the_channels_last(dimensions: int) -> None:
    conv = (nn.Conv1d if dimensions == 1 else nn.Conv3d)(2, 3, 2)
    fn, args = gradients(conv, torch.randn(2, 2, *[4] * dimensions))
    assert_equal(trace(fn, args), fn, args)
