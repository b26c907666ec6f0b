"""Small depthwise convolutions are computed by elementwise kernels, close to those of the library."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from autosched.fusion.depthwise import _convolution
from autosched.fusion.inductor import results_of, trace
from tests.fusion.regions import call, needs_compiler, region

CONVOLUTION = torch.ops.aten.convolution.default
numbers = st.integers(0, 3)


def convolved() -> list[Tensor]:
    """Return the arguments of a depthwise convolution: an image of four channels, and filters."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((2, 4, 6, 6), (4, 1, 3, 3))]


def calls(fn: object, args: list[Tensor]) -> int:
    """Return how many convolutions a traced function calls."""
    traced, _ = trace(fn, args)  # type: ignore[arg-type]
    return sum(node.target is CONVOLUTION for node in traced.graph.nodes)


@given(
    dims=st.integers(1, 3),
    batch=st.integers(1, 2),
    channels=st.integers(2, 3),
    sizes=st.lists(st.integers(1, 7), min_size=3, max_size=3),
    kernel=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    padding=st.lists(numbers, min_size=3, max_size=3),
    dilation=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_decomposition_equals_the_convolution(
    dims: int,
    batch: int,
    channels: int,
    sizes: list[int],
    kernel: list[int],
    padding: list[int],
    dilation: list[int],
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    padding, dilation = padding[:dims], dilation[:dims]
    x = torch.randn(batch, channels, *sizes[:dims], dtype=dtype)
    weight = torch.randn(channels, 1, *kernel[:dims], dtype=dtype)
    bias = torch.randn(channels, dtype=dtype) if has_bias else None
    given = x, weight, bias, [1] * dims, padding, dilation, False, [0] * dims, channels
    made = _convolution(*given)
    if made is NotImplemented:  # the kernel is larger than the image, or that is one pixel
        extents = zip(sizes, padding, kernel, dilation, strict=False)
        is_pixel = dims == 2 and sizes[:2] == [1, 1]
        assert is_pixel or any(n + 2 * p < d * (k - 1) + 1 for n, p, k, d in extents)
        return
    expected = CONVOLUTION(*given)
    assert made.shape == expected.shape
    assert made.stride() == expected.contiguous().stride()
    error = 1e-4 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(made, expected, rtol=error, atol=error)


def test_one_number_stands_for_all_dimensions() -> None:
    x, weight = convolved()
    given = x, weight, None, [1], [1], [1], False, [0], 4
    torch.testing.assert_close(_convolution(*given), CONVOLUTION(*given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_region_with_one_has_no_call_of_a_library(dtype: torch.dtype) -> None:
    args = [arg.to(dtype) for arg in convolved()]

    def fn(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [functional.conv2d(functional.relu(x), weight, padding=1, groups=4)]

    assert calls(fn, args) == 0
    (node,) = results_of(trace(fn, args)[0])
    assert node.stride() == fn(*args)[0].stride()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_compiled_region_is_close_to_eager_mode(dtype: torch.dtype) -> None:
    x, weight = (arg.to(dtype) for arg in convolved())
    bias = torch.arange(4, dtype=dtype)

    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.relu(functional.conv2d(x.exp(), weight, bias, padding=2, groups=4))

    made = region(fn, inputs=3)
    error = 1e-5 if dtype is torch.float32 else 1e-12
    found = call(made, x, weight, bias)
    assert made.failure is None
    torch.testing.assert_close(found, fn(x, weight, bias), rtol=error, atol=error)


def test_what_eager_mode_refuses_is_refused() -> None:
    x, weight = convolved()
    for other in (weight.double(), weight.expand(4, 2, 3, 3).contiguous()):
        assert _convolution(x, other, None, [1], [0], [1], False, [0], 4) is NotImplemented


OTHERS = {
    "stride": lambda x, w: functional.conv2d(x, w, stride=2, groups=4),
    "groups of two": lambda x, w: functional.conv2d(x, w.expand(4, 2, 3, 3), groups=2),
    "two filters": lambda x, w: functional.conv2d(x, torch.cat([w, w]), groups=4),
    "transposed": lambda x, w: functional.conv_transpose2d(x, w, groups=4),
    "one channel": lambda x, w: functional.conv2d(x[:, :1], w[:1]),
    "channels last": lambda x, w: functional.conv2d(
        x.contiguous(memory_format=torch.channels_last), w, groups=4
    ),
    "other strides": lambda x, w: functional.conv2d(x.transpose(2, 3), w, groups=4),
    "half precision": lambda x, w: functional.conv2d(x.bfloat16(), w.bfloat16(), groups=4),
    "one pixel": lambda x, w: functional.conv2d(
        x[:, :, :1, :1].contiguous(memory_format=torch.channels_last), w, padding=1, groups=4
    ),
    "many weights": lambda x, w: functional.conv2d(x, w.repeat(1, 1, 3, 3), padding=4, groups=4),
    "large": lambda x, w: functional.conv2d(x.repeat(40, 1, 5, 5), w, groups=4),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_convolutions_are_called(what: str) -> None:
    assert calls(lambda x, w: [OTHERS[what](x, w)], convolved()) == 1
