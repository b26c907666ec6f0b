"""Store what costly operators compute and others broadcast.

Inductor inlines an elementwise operator where its result is read. So a kernel of a batch norm
takes the root of the variance of a channel again for each element of the channel.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

__all__ = ["StoreBroadcasts"]

# Elementwise operators that take much longer than reading their result.
_COSTLY = frozenset(
    getattr(torch.ops.aten, name)
    for name in "div erf exp log pow reciprocal rsqrt sigmoid sqrt tanh".split()
)
_STORED = "inductor_realize_to_strides"  # how Inductor marks a node that is not inlined


class StoreBroadcasts(CustomGraphPass):
    """Make Inductor store such results on a CPU, after its own passes.

    Inductor's cache does not return kernels that were made by other versions of this module, or of
    the ``others``, which change kernels without its knowledge.
    """

    def __init__(self, *others: ModuleType):
        self._others = others

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Mark the last node before each broadcast of a costly result."""
        costly: set[torch.fx.Node] = set()  # their loops contain a costly operator
        for node in graph.nodes:
            if (size := _cpu_size(node)) is None or not _is_inlined(node):
                continue
            sources = [source for source in node.all_input_nodes if source in costly]
            for source in sources:
                if (_cpu_size(source) or 0) < size:
                    source.meta[_STORED] = True
            if node.target.overloadpacket in _COSTLY or any(_STORED not in s.meta for s in sources):
                costly.add(node)

    def uuid(self) -> bytes:
        """Return what identifies these modules."""
        return get_hash_for_files((__file__, *(str(each.__file__) for each in self._others)))


def _cpu_size(node: torch.fx.Node) -> int | None:
    """Return the number of elements of a tensor on the CPU."""
    made = node.meta.get("val")
    if not isinstance(made, torch.Tensor) or made.device.type != "cpu":
        return None
    return math.prod(made.shape)


def _is_inlined(node: torch.fx.Node) -> bool:
    """Whether a node is a view, or an elementwise operator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.is_view
