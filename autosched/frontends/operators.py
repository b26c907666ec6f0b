"""Convert nodes of a traced ATen graph to tasks.

An operator writes what its schema declares or what ``effects`` knows. The storages of the fake
tensors show which results share memory. Does not know what was traced, or why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import zip_longest
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autosched._lib.tree import flatten
from autosched.frontends.random_state import FUNCTIONS, SEEDING
from autosched.frontends.unsupported import check_collective
from autosched.graph.effects import COUNTS_IN_MEMORY, effects_of, function_name
from autosched.graph.graph import HOST, Graph, Value
from autosched.graph.task import Here, Origin


class Operators:
    """Adds tasks to a graph, node by node.

    ``values`` are the values of nodes, at first those of the placeholders. ``device`` is the one
    whose name in an argument means the device of the task.
    """

    def __init__(
        self,
        graph: Graph,
        origins: Mapping[torch.fx.Node, Origin],
        device: torch.device | None,
        on_host: Set[torch.fx.Node] = frozenset(),
    ):
        self.graph = graph
        self.origins = origins
        self.device = device
        self.on_host = on_host
        self.values: dict[torch.fx.Node, Any] = {}
        self.impure: tuple[str, ...] = ()  # the last task that has effects other than on tensors

    def add(self, node: torch.fx.Node, random: bool = False) -> None:
        """Add the task of a node; ``random``: it may draw numbers, whatever its schema says."""
        first = node.args[0] if node.args else None
        source: Any = self.values[first] if isinstance(first, torch.fx.Node) else None
        if node.target is operator.getitem and isinstance(source, (tuple, list)):
            self.values[node] = operator.getitem(source, *node.args[1:])
        elif str(node.target).startswith("profiler."):
            self.values[node] = None
        elif node.target in _IDENTITIES:
            self.values[node] = source
        else:
            self.values[node] = self._task(node, random)

    def _task(self, node: torch.fx.Node, random: bool) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        args = _used(node.target, _as_tuples(args))
        kwargs = _as_tuples(kwargs)
        origin = self.origins[node]
        phase = origin.phase if origin.phase != "forward" else ""
        label = self.graph.fresh(".".join(filter(None, (origin.module, phase, _label(node)))))
        assert callable(node.target)
        effects = effects_of(node.target, args, kwargs)
        facts: dict[str, Any] = {"on": HOST} if node in self.on_host else {}
        if random:
            facts["random"] = True
        device = kwargs.get("device")
        if isinstance(device, torch.device):
            if self.device is not None and _same(device, self.device):
                kwargs["device"] = Here(device)
            else:
                facts["on"] = HOST if device.type == "cpu" else str(device)
        if not effects.in_place:
            facts["outputs"] = _names(node.meta.get("val"), label)
            facts["aliases"] = self._aliased(node)
        if node.is_impure() and not effects.writes and not effects.random and not random:
            facts["after"] = self.impure
            self.impure = (label,)
        facts["by"] = _callable_for(node)
        if node.target in FUNCTIONS:
            facts["seconds"] = SEEDING
        return self.graph.record(node.target, args, kwargs, name=label, origin=origin, **facts)

    def _aliased(self, node: torch.fx.Node) -> Value | None:
        """Return the argument whose memory a node's results share."""
        found = storages(node)
        for argument in node.all_input_nodes:
            value = self.values[argument]
            if isinstance(value, Value) and found & storages(argument):
                return value
        return None


def common_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the one device of all tensors except CPU tensors of one number, or None."""
    everywhere = [(item.device, item.dim() or item.device.type != "cpu") for item in tensors]
    counted = dict.fromkeys(device for device, counts in everywhere if counts)
    found = [*counted] or [device for device, _ in everywhere[:1]] or [torch.get_default_device()]
    return found[0] if len(found) == 1 else None


# No operation, because autograd does not record across tasks anyway.
_IDENTITIES = frozenset((torch.ops.aten.detach.default, torch.ops.aten.alias.default))

# Kernels that compute otherwise, and a workspace for backward, where autograd is enabled.
_DEPEND_ON_GRAD_MODE = frozenset(("mkldnn_rnn_layer",))

# Backward of batch norms is given the running statistics, which it reads in evaluation only: (their
# positions, position of the flag for training). Otherwise backward would have to come before the
# next batch's forward, which writes them.
_STATISTICS: Mapping[str, tuple[tuple[int, int], int | None]] = {
    "native_batch_norm_backward": ((3, 4), 7),
    "batch_norm_backward": ((3, 4), 7),
    "cudnn_batch_norm_backward": ((3, 4), None),
    "miopen_batch_norm_backward": ((3, 4), None),
}


def _used(target: Any, args: Any) -> Any:
    """Return arguments without those that an operator ignores."""
    positions, training = _STATISTICS.get(function_name(target), ((), None))
    if training is not None and args[training] is not True:
        return args
    return tuple(None if i in positions else item for i, item in enumerate(args))


def _callable_for(node: torch.fx.Node) -> Callable[..., Any]:
    target: Any = node.target
    if _label(node) in _DEPEND_ON_GRAD_MODE:
        return _in_grad_mode(target, (node.meta.get("custom") or {}).get("grad_mode", True))
    if target in FUNCTIONS:
        return FUNCTIONS[target]
    check_collective(node)
    found = public_function(target, *torch.fx.map_arg((node.args, node.kwargs), _fake))
    return _checking_layout(found, node) if _raw_label(node) in COUNTS_IN_MEMORY else found


def _in_grad_mode(op: Any, enabled: bool) -> Callable[..., Any]:

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(enabled), torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    call.__wrapped__ = op  # type: ignore[attr-defined]
    return call


def _checking_layout(op: Callable[..., Any], node: torch.fx.Node) -> Callable[..., Any]:
    """Return an operator that raises for a tensor with other strides."""
    target: Any = node.target
    fake = _fake(node.args[0])  # type: ignore[arg-type]
    names = (argument.name for argument in target._schema.arguments)
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    is_absolute = given.get("storage_offset") is not None  # default: that of the tensor
    captured = tuple(fake.stride())
    offset = fake.storage_offset()
    layout = _layout(fake)

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, FakeTensor):
            return op(tensor, *args, **kwargs)
        if _layout(tensor) != layout:
            raise ValueError(
                f"as_strided addresses memory, and its argument has strides "
                f"{tuple(tensor.stride())}, but had {captured} when this was captured; call "
                "contiguous() before, or use another function than as_strided"
            )
        if is_absolute and tensor.storage_offset() != offset:
            raise ValueError(
                "as_strided with a storage_offset counts from the beginning of memory, and its "
                f"argument begins at element {tensor.storage_offset()}, but began at {offset} when "
                "this was captured; leave storage_offset out, or pass clones instead of slices"
            )
        return op(tensor, *args, **kwargs)

    call.__name__ = _raw_label(node)
    return call


def _layout(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return sizes and strides of the dimensions with more than one element."""
    return [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def _same(named: torch.device, device: torch.device) -> bool:
    """Whether a name, which may have no number, means a device."""
    return named.type == device.type and named.index in (None, device.index)


def _fake(node: torch.fx.Node) -> Any:
    """Return the fake tensor, or the random number generator, of a node."""
    if "val" in node.meta:
        return node.meta["val"]
    return getattr(node.graph.owning_module, str(node.target))


def _as_tuples(tree: Any) -> Any:
    """Return arguments in Python's own types: lists of numbers become tuples."""
    if isinstance(tree, dict):
        return {key: _as_tuples(item) for key, item in tree.items()}
    if not isinstance(tree, (tuple, list)):
        return tree
    items = [_as_tuples(item) for item in tree]
    has_values = any(isinstance(item, Value) for item in items)
    return items if isinstance(tree, list) and has_values else tuple(items)


def storages(node: torch.fx.Node) -> set[int]:
    """Return numbers that identify the memory of a node's results."""
    tensors = [leaf for leaf in flatten(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
    return {int(tensor.untyped_storage()._cdata) for tensor in tensors}


def _names(val: Any, label: str) -> Any:
    """Return ``outputs=`` for a node's results; None for a single one."""
    if val is None:
        return ()
    return _nested(val, label) if isinstance(val, (tuple, list)) else None


def _nested(val: Any, label: str) -> Any:
    if isinstance(val, (tuple, list)):
        return tuple(_nested(item, f"{label}.{i}") for i, item in enumerate(val))
    return label


def _label(node: torch.fx.Node) -> str:
    return _raw_label(node).strip("_")


def _raw_label(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


# ---- public functions
#
# ``torch.ops.aten.mm.default(x, w)`` is ``torch.mm(x, w)``, which is easier to read and a microsecond
# faster.


def public_function(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function that calls an operator for such (fake) arguments.

    1. Candidates are the public functions with the operator's name.
    2. Call each on the fake arguments, under a mode that allows one call of this operator, with
       the same arguments, and raises for everything else.
    3. Return the first candidate that makes this call and returns its result; if there is none,
       the operator.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode():
    ...     x = torch.ones(2, 2)
    >>> public_function(torch.ops.aten.mm.default, (x, x), {}).__name__
    'mm'
    """
    own: Callable[..., Any] = target
    known = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    if not known or not any(isinstance(leaf, FakeTensor) for leaf in flatten((args, kwargs))):
        return own  # without fake tensors it would make, or draw, real ones
    name = target._schema.name.partition("::")[2]
    homes = [torch.Tensor] if args and isinstance(args[0], torch.Tensor) else []
    for home in (*homes, torch, torch.nn.functional) if not name.startswith("_") else ():
        candidate = getattr(home, name, None)
        if not callable(candidate):
            continue
        once = _Once(target, _bound(target, args, kwargs))
        try:
            with torch.no_grad(), once:
                result = candidate(*args, **kwargs)
        except Exception:  # torch has many errors for invalid arguments
            continue
        if once.done and _same_leaves(result, once.result):
            found: Callable[..., Any] = candidate
            return found
    return own


class _Once(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allows one call of one operator, with these arguments; one that writes is not executed."""

    def __init__(self, target: Any, wanted: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.target = target
        self.wanted = wanted
        self.done = False
        self.result = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # which queries the device of a fake tensor
            return func(*args, **kwargs)
        expected = func is self.target and _same_leaves(_bound(func, args, kwargs), self.wanted)
        if self.done or not expected:
            raise RuntimeError("another call")
        self.done = True
        self.result = args[0] if func._schema.is_mutable else func(*args, **kwargs)
        return self.result


def _bound(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    known = target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in known}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def _same_leaves(one: Any, other: Any) -> bool:
    """Whether two trees have identical tensors and equal other leaves."""
    pairs = zip_longest(flatten(one), flatten(other))
    return all(
        a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b))
        for a, b in pairs
    )
