"""Convert nodes of a traced ATen graph to tasks.

An operator writes what its schema declares or what ``effects`` knows. The storages of the fake
tensors show which results share memory. Does not know what was traced, or why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosched._lib.tree import flatten
from autosched.frontends.seeds import SPELLED
from autosched.frontends.spelling import spelled
from autosched.graph.effects import COUNTS_IN_MEMORY, effects_of, function_name
from autosched.graph.graph import HOST, Graph, Value
from autosched.graph.task import Here, Origin

__all__ = ["Operators", "storages", "usual_device"]


class Operators:
    """Adds tasks to a graph, node by node.

    ``values`` are the values of nodes, at first those of the placeholders.
    """

    def __init__(
        self,
        graph: Graph,
        origins: Mapping[torch.fx.Node, Origin],
        usual: torch.device | None,
        on_host: Set[torch.fx.Node] = frozenset(),
    ):
        self.graph = graph
        self.origins = origins
        self.usual = usual
        self.on_host = on_host
        self.values: dict[torch.fx.Node, Any] = {}
        self.impure: list[str] = []  # the last task that has effects beside tensors

    def add(self, node: torch.fx.Node, random: bool = False) -> None:
        """Add the task of a node that calls an operator.

        ``random``: it may draw, whatever its schema says.
        """
        self.values[node] = self._call(node, random)

    def _call(self, node: torch.fx.Node, random: bool) -> Any:
        """Add the task of a node, unless it only selects one of several results.

        Return its values.
        """
        first = node.args[0] if node.args else None
        source: Any = self.values[first] if isinstance(first, torch.fx.Node) else None
        if node.target is operator.getitem and isinstance(source, (tuple, list)):
            return operator.getitem(source, *node.args[1:])
        if str(node.target).startswith("profiler."):
            return None
        if node.target in _SAME:
            return source
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        args = _needed(node.target, _plain(args))
        kwargs = _plain(kwargs)
        origin = self.origins[node]
        phase = origin.phase if origin.phase != "forward" else ""
        label = self.graph.fresh(".".join(filter(None, (origin.module, phase, _label(node)))))
        assert callable(node.target)
        effects = effects_of(node.target, args, kwargs)
        facts: dict[str, Any] = {"on": HOST} if node in self.on_host else {}
        if random:
            facts["random"] = True
        named = kwargs.get("device")
        if isinstance(named, torch.device) and self.usual is not None and _same(named, self.usual):
            kwargs["device"] = Here(named)
        elif isinstance(named, torch.device):
            facts["on"] = HOST if named.type == "cpu" else str(named)
        if not effects.in_place:
            facts["outputs"] = _names(node.meta.get("val"), label)
            facts["aliases"] = self._shared(node)
        if node.is_impure() and not effects.writes and not effects.random and not random:
            facts["after"] = tuple(self.impure)
            self.impure = [label]
        if _label(node) in _ASK_FOR_GRAD_MODE:
            facts["by"] = _as_if_recording(node.target)
        elif node.target in SPELLED:
            facts |= {"by": SPELLED[node.target], "seconds": _SEEDING}
        else:
            facts["by"] = spelled(node.target, *torch.fx.map_arg((node.args, node.kwargs), _fake))
        if _raw_label(node) in COUNTS_IN_MEMORY:
            facts["by"] = _laid_out_alike(facts["by"], node)
        return self.graph.record(node.target, args, kwargs, name=label, origin=origin, **facts)

    def _shared(self, node: torch.fx.Node) -> Value | None:
        """Return the argument whose memory a node's results share."""
        made = storages(node)
        for argument in node.all_input_nodes:
            value = self.values[argument]
            if isinstance(value, Value) and made & storages(argument):
                return value
        return None


def usual_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device of all tensors except CPU tensors of one number.

    None if there are several.
    """
    everywhere = [(item.device, item.dim() or item.device.type != "cpu") for item in tensors]
    counted = dict.fromkeys(device for device, counts in everywhere if counts)
    found = [*counted] or [device for device, _ in everywhere[:1]] or [torch.get_default_device()]
    return found[0] if len(found) == 1 else None


_SEEDING = 5e-6  # seconds that the state of a generator takes


# No operation, because autograd does not record across tasks anyway.
_SAME = frozenset((torch.ops.aten.detach.default, torch.ops.aten.alias.default))

# Kernels that do less where autograd does not record: the workspace for backward would be missing.
_ASK_FOR_GRAD_MODE = frozenset(("mkldnn_rnn_layer",))

# Backward of batch norms is given the running statistics, which it reads in evaluation only: (their
# positions, position of the flag for training). Otherwise backward would have to come before the
# next batch's forward, which writes them.
_STATISTICS: Mapping[str, tuple[tuple[int, int], int | None]] = {
    "native_batch_norm_backward": ((3, 4), 7),
    "batch_norm_backward": ((3, 4), 7),
    "cudnn_batch_norm_backward": ((3, 4), None),
    "miopen_batch_norm_backward": ((3, 4), None),
}


def _needed(target: Any, args: Any) -> Any:
    """Return arguments without those that an operator ignores."""
    places, training = _STATISTICS.get(function_name(target), ((), None))
    if not places or (training is not None and args[training] is not True):
        return args
    return tuple(None if i in places else item for i, item in enumerate(args))


def _as_if_recording(op: Any) -> Callable[..., Any]:
    """Return an operator that runs as if autograd recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return call


def _laid_out_alike(op: Callable[..., Any], node: torch.fx.Node) -> Callable[..., Any]:
    """Return an operator that raises for a tensor with other strides than the captured one."""
    fake = _fake(node.args[0])  # type: ignore[arg-type]
    absolute = _offset(node) is not None
    was = tuple(fake.stride())
    offset = fake.storage_offset()
    strides = _that_matter(fake)

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, FakeTensor):
            return op(tensor, *args, **kwargs)
        if _that_matter(tensor) != strides:
            raise ValueError(
                f"as_strided counts in memory, and its argument has strides {tuple(tensor.stride())}; it had "
                f"{was} when this was captured; call contiguous() before, or leave as_strided out"
            )
        if absolute and tensor.storage_offset() != offset:
            raise ValueError(
                f"as_strided counts from the beginning of memory, and its argument begins at element "
                f"{tensor.storage_offset()}; it began at {offset} when this was captured; leave storage_offset out, "
                f"or pass clones instead of slices"
            )
        return op(tensor, *args, **kwargs)

    call.__name__ = _raw_label(node)
    return call


def _that_matter(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return sizes and strides of the dimensions with more than one element."""
    return [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def _offset(node: torch.fx.Node) -> Any:
    """Return the storage offset that a node passes to ``as_strided``.

    None for that of its argument.
    """
    target: Any = node.target
    names = (argument.name for argument in target._schema.arguments)
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given.get("storage_offset")


def _same(named: torch.device, usual: torch.device) -> bool:
    """Whether a named device is the usual one.

    A device without a number stands for all of its kind.
    """
    return named.type == usual.type and named.index in (None, usual.index)


def _fake(node: torch.fx.Node) -> Any:
    """Return the fake tensor of a node; a random number generator is returned as it is."""
    return (
        node.meta["val"]
        if "val" in node.meta
        else getattr(node.graph.owning_module, str(node.target))
    )


def _plain(tree: Any) -> Any:
    """Return a tree of arguments in Python's own lists and dicts.

    Lists of numbers become tuples, which are immutable.
    """
    if isinstance(tree, (tuple, list)):
        items = [_plain(item) for item in tree]
        return (
            items
            if isinstance(tree, list) and any(isinstance(item, Value) for item in items)
            else tuple(items)
        )
    return {key: _plain(item) for key, item in tree.items()} if isinstance(tree, dict) else tree


def storages(node: torch.fx.Node) -> set[int]:
    """Return numbers that identify the memory of a node's results."""
    tensors = [leaf for leaf in flatten(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
    return {int(tensor.untyped_storage()._cdata) for tensor in tensors}


def _names(val: Any, label: str) -> Any:
    """Return ``outputs=`` for a node's results: None for a single one, no name for nothing."""
    if val is None:
        return ()
    return _named(val, label) if isinstance(val, (tuple, list)) else None


def _named(val: Any, label: str) -> Any:
    if isinstance(val, (tuple, list)):
        return tuple(_named(item, f"{label}.{i}") for i, item in enumerate(val))
    return label


def _label(node: torch.fx.Node) -> str:
    return _raw_label(node).strip("_")


def _raw_label(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]
