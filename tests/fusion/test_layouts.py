"""Layouts of convolutions in regions with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autosched.fusion.inductor import results_of, trace
from tests.fusion.regions import call, compiled_by, region

aten = torch.ops.aten
LAYOUT = (1, 1), (1, 1), (1, 1), False, (0, 0), 1  # arguments of a convolution
MASK = True, True, False


def gradients(between: Callable[[Tensor], Tensor]) -> Callable[..., list[Tensor]]:
    """Return a function of an image and two filters: their gradients, of a network of two layers."""

    def step(x: Tensor, *filters: Tensor) -> list[Tensor]:
        first, second = [each.detach().requires_grad_() for each in filters]
        with torch.enable_grad():
            h = functional.relu(functional.conv2d(x, first, padding=1))
            loss = functional.conv2d(between(h), second, padding=1).square().sum()
            return [h.detach(), *torch.autograd.grad(loss, (first, second))]

    return step


def arguments() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 6, 6), (4, 3, 3, 3), (5, 4, 3, 3)
    return [torch.rand(s, generator=generator, dtype=torch.float64) for s in shapes]


def is_channels_last(node: torch.fx.Node) -> bool:
    made: Tensor = node.meta["val"]
    return made.is_contiguous(memory_format=torch.channels_last)


def test_activations_are_converted_once() -> None:
    traced, _ = trace(gradients(lambda h: h), arguments())
    used = [
        arg
        for node in traced.graph.nodes
        if node.target in (aten.convolution.default, aten.convolution_backward.default)
        for arg in node.args[:2]
    ]
    assert len(used) == 8
    assert all(map(is_channels_last, used))
    copies = [node for node in traced.graph.nodes if node.target is aten.clone.default]
    converted = [node for node in copies if is_channels_last(node)]
    assert len(converted) == 3  # the image and both filters, and no activation
    assert [each.stride() for each in results_of(traced)] == [
        each.stride() for each in gradients(lambda h: h)(*arguments())
    ]


def test_an_image_that_is_written_is_converted_again() -> None:
    def written(x: Tensor, first: Tensor, _: Tensor) -> list[Tensor]:
        made = aten.convolution(x, first, None, *LAYOUT)
        x.add_(1)
        grads = aten.convolution_backward(made, x, first, None, *LAYOUT, MASK)
        return [made, *grads[:2]]

    expected = written(*arguments())
    traced, _ = trace(written, arguments())
    for made, each in zip(traced(*arguments()), expected, strict=True):
        torch.testing.assert_close(made, each, rtol=1e-12, atol=1e-12)


def test_a_view_that_needs_another_layout_is_traced_as_it_is() -> None:
    traced, _ = trace(gradients(lambda h: h.view(2, 144).view(2, 4, 6, 6)), arguments())
    assert not any(node.target is aten.clone.default for node in traced.graph.nodes)


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h.reshape(-1).add_(1),
        lambda h: h.contiguous().add_(1),
        lambda h: h.permute(0, 2, 3, 1).contiguous().add_(1),
    ],
    ids=["reshape", "contiguous", "permuted"],
)
def test_writes_go_where_they_go_in_the_layout_of_eager_mode(
    write: Callable[[Tensor], Tensor],
) -> None:
    def written(x: Tensor, first: Tensor, _: Tensor) -> list[Tensor]:
        made = aten.convolution(x, first, None, *LAYOUT)
        write(made)
        return [made, *aten.convolution_backward(made, x, first, None, *LAYOUT, MASK)[:2]]

    traced, _ = trace(written, arguments())
    for made, each in zip(traced(*arguments()), written(*arguments()), strict=True):
        torch.testing.assert_close(made, each, rtol=1e-12, atol=1e-12)


def test_results_that_are_not_contiguous_have_the_layout_of_eager_mode() -> None:
    def permuted(x: Tensor, first: Tensor, _: Tensor) -> list[Tensor]:
        made = aten.convolution(x, first, None, *LAYOUT)
        grads = aten.convolution_backward(made, x, first, None, *LAYOUT, MASK)
        return [made.permute(0, 2, 3, 1), *grads[:2]]

    traced, _ = trace(permuted, arguments())
    expected = [each.stride() for each in permuted(*arguments())]
    assert [each.stride() for each in results_of(traced)] == expected


def test_results_of_a_region_have_the_layout_of_eager_mode() -> None:
    step = gradients(torch.tanh)
    with compiled_by() as graphs:
        made = region(step, inputs=3, outputs=3)
        results = call(made, *arguments())
    assert any(node.target is aten.clone.default for node in graphs[0].graph.nodes)
    for found, expected in zip(results, step(*arguments()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert found.stride() == expected.stride()
