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

__all__ = ["in_channels_last", "is_costly"]

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
    fn: Callable[..., list[Any]], results: Sequence[torch.Tensor]
) -> Callable[..., list[Any]]:
    """Return ``fn`` with convolutions in channels-last layout; ``results`` are like its own.

    Raises what operators raise that need another layout, such as a view.
    """

    def converted(*args: Any) -> list[Any]:
        with _ChannelsLast():
            made = fn(*args)
        pairs = zip(made, results, strict=True)
        return [item.contiguous() if before.is_contiguous() else item for item, before in pairs]

    return converted


class _ChannelsLast(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Converts arguments of convolutions, each version of a tensor once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        return func(*map(self._convert, args[:count]), *args[count:], **(kwargs or {}))

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
