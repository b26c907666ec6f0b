"""Trace convolutions with arguments in the layout in which Inductor computes them.

On a CPU Inductor calls convolutions with arguments in channels-last layout. In a graph with their
gradients, too, it takes the layout of what lies between them from the traced graph. For a training
step, which is one graph, that is the layout of eager mode: each activation would be written once in
that layout, and copied for the convolution and again for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LayoutError", "Operators", "in_channels_last", "is_costly"]

aten = torch.ops.aten
_GRADIENT = aten.convolution_backward.default
# The number of arguments, from the first one, that have channels.
_CONVOLUTIONS = {aten.convolution.default: 2, _GRADIENT: 3}


def is_costly(traced: torch.fx.GraphModule) -> bool:
    """Whether layouts of a traced graph lead to copies: it has gradients of CPU convolutions."""
    return torch._C._has_mkldnn and any(
        node.target is _GRADIENT and _is_image(node.args[0].meta["val"])
        for node in traced.graph.nodes
    )


def in_channels_last(
    fn: Callable[..., list[Any]], results: Sequence[torch.Tensor], called: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Return ``fn`` with convolutions in channels-last layout.

    ``results`` are like its own, and ``called`` its operators. Raises what operators raise that
    need another layout, such as a view, and LayoutError where results or operators differ:
    ``reshape`` and ``contiguous`` copy in one layout, and share memory in another.
    """

    def converted(*args: Any) -> list[Any]:
        with _ChannelsLast() as operators:
            made = fn(*args)
        pairs = list(zip(made, results, strict=True))
        made = [item.contiguous() if before.is_contiguous() else item for item, before in pairs]
        strides = [item.stride() for item in results]
        if operators.called != called or [item.stride() for item in made] != strides:
            raise LayoutError("it depends on the layout of eager mode")
        return made

    return converted


class LayoutError(Exception):
    """The reason why a function cannot be traced in another layout."""


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[Any] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


class _ChannelsLast(Operators):  # type: ignore[no-untyped-call]
    """Converts arguments of convolutions, each version of a tensor once."""

    def __init__(self) -> None:
        super().__init__()
        # The tensors are kept, so that no id is used again.
        self.converted: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        count = _CONVOLUTIONS.get(func, 0)
        converted = *map(self._convert, args[:count]), *args[count:]
        return super().__torch_dispatch__(func, types, converted, kwargs)

    def _convert(self, tensor: torch.Tensor) -> torch.Tensor:
        layout = torch.channels_last
        if not _is_image(tensor) or tensor.is_contiguous(memory_format=layout):
            return tensor
        key = id(tensor), tensor._version
        if key not in self.converted:
            self.converted[key] = tensor, tensor.clone(memory_format=layout)
        return self.converted[key][1]


def _is_image(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.device.type == "cpu"
