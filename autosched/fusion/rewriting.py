"""Rewrite a graph of operators so that Inductor computes what they say.

Six kinds of operators are replaced by others with the same results:

* Arithmetic with factors. Inductor ignores ``alpha`` where it joins ``add(x, mm, alpha=a)`` into
  ``addmm``, so ``add``, ``sub``, ``addcmul``, ``addcdiv`` and ``lerp`` become multiplications and
  additions.
* Operators on lists (``_foreach_*``) become one operator for each tensor.
* Numbers that are read from tensors become tensors without dimensions, in double precision, as
  Python computes. Inductor would round them to single precision, or refuse them.
* Norms of half precision with parameters of single precision, as under autocast, compute their
  statistics in single precision. On a CPU, decompositions of torch round them.
* Batch norms that write running statistics return the new ones, which are copied: not all declare
  what they write, and other operators of the region would read the old ones.
* Splits that torch calls unsafe, as into the gates of recurrent cells, become ordinary ones, so that
  writes to a part change the whole.

In-place operators become others, whose results are copied.

On a CPU, Inductor lets images have the channels last, but those that ``convolution_backward`` takes
lie as the graph says. So ``ChannelsLast`` has the graph say so; otherwise such images are copied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from autosched._lib.aten import operators
from autosched._lib.tree import flatten, transform

aten = torch.ops.aten

# A number may be read, as long as no size and no decision depends on it.
READ_NUMBER = aten._local_scalar_dense.default

_FOREACH = "_foreach_"
_HALVES = (torch.float16, torch.bfloat16)


class Rewriter(torch.fx.Interpreter):
    """Calls the operators of a graph, some of them replaced.

    Raises ValueError for an operator that takes a number from a tensor and cannot be rewritten.
    """

    def run_node(self, n: torch.fx.Node) -> Any:
        """Call an operator, or what replaces it."""
        self._expected = n.meta.get("val")
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a call."""
        if target is READ_NUMBER:
            return _Number(args[0].to(kind_of(self._expected)[1]))
        if not isinstance(target, OpOverload):
            return _computed(target, args, kwargs, self._expected)
        if target._schema.name.startswith(f"aten::{_FOREACH}"):
            return _each(target, args, kwargs, self._expected)
        return _one(target, args, kwargs, self._expected)


class ChannelsLast(torch.fx.Interpreter):
    """Calls the operators of a graph; images that are convolved on a CPU have the channels last.

    The graph writes to nothing but its arguments, at its end. Results lie as before.
    """

    @staticmethod
    def pays(graph: torch.fx.GraphModule) -> bool:
        """Whether a graph has gradients of convolutions on a CPU."""
        found = graph.graph.find_nodes(op="call_function", target=_CONVOLUTIONS[1])
        return any(node.args[0].meta["val"].device.type == "cpu" for node in found)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a call."""
        if target in _CONVOLUTIONS:
            args = tuple(map(_with_channels_last, args))
        elif target in _RESHAPED:  # a view, where elements lie as before
            target = aten.reshape.default
        return super().call_function(target, args, kwargs)

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results."""
        nodes: Any = self.graph.output_node().args[0]
        expected = [node.meta["val"] for node in nodes]
        return [
            result if result.stride() == value.stride() else _like(result, value)
            for result, value in zip(args[0], expected, strict=True)
        ]


_CONVOLUTIONS = aten.convolution.default, aten.convolution_backward.default
_RESHAPED = aten.view.default, aten._unsafe_view.default


def _with_channels_last(arg: Any) -> Any:
    is_image = isinstance(arg, Tensor) and arg.dim() == 4 and arg.device.type == "cpu"
    return arg.contiguous(memory_format=torch.channels_last) if is_image else arg


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    return tensor.contiguous() if other.is_contiguous() else tensor


_VIEWS = {
    aten.unsafe_split: aten.split,
    aten.unsafe_split_with_sizes: aten.split_with_sizes,
}


class _Number:
    """A number that is read from a tensor, as a tensor without dimensions."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def takes_number(name: str) -> bool:
    """Whether a function of torch of this name can take a number that is read from a tensor.

    >>> takes_number("addcdiv_"), takes_number("_foreach_mul"), takes_number("topk")
    (True, True, False)
    """
    name = name.removeprefix(_FOREACH)
    packet = getattr(aten, name if name.startswith("_") else name.rstrip("_"), None)
    return packet in _FACTORS or packet in _FILLS or packet in _WITH_TENSORS


def kind_of(number: Any) -> tuple[type, torch.dtype]:
    """Return the type of a number, and the dtype of a tensor that holds it."""
    for kind, symbol, dtype in (
        (bool, torch.SymBool, torch.bool),
        (int, torch.SymInt, torch.int64),
        (float, torch.SymFloat, torch.float64),
    ):
        if isinstance(number, (kind, symbol)):
            return kind, dtype
    raise TypeError(f"a result is a {type(number).__name__}, neither a tensor nor a number")


def _has_numbers(*arguments: Any) -> bool:
    return any(isinstance(leaf, _Number) for leaf in flatten(arguments))


def _computed(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], number: Any
) -> Any:
    """Call a function of Python; compute a number from others as Python does."""
    if not _has_numbers(args, kwargs):
        return target(*args, **kwargs)
    _, dtype = kind_of(number)
    function = _PYTHON.get(target)
    if function is None or kwargs or dtype is torch.bool:
        name = getattr(target, "__name__", str(target))
        raise ValueError(f"{name!r} of Python takes a number that is read from a tensor")
    made = function(*(arg.tensor.to(dtype) if isinstance(arg, _Number) else arg for arg in args))
    return _Number(made.to(dtype))


# The functions that numbers are traced with, and what computes them if one is a tensor.
_PYTHON: dict[Any, Callable[..., Tensor]] = {
    **{
        function: function
        for function in map(
            operator.__dict__.__getitem__,
            "add sub mul truediv floordiv mod pow neg abs".split(),
        )
    },
    **{
        getattr(torch, f"_sym_{name}"): getattr(torch, name)
        for name in "sqrt cos cosh sin sinh tan tanh asin acos atan log2".split()
        if hasattr(torch, f"_sym_{name}")
    },
    torch.sym_float: torch.clone,
}


def _each(
    target: OpOverload[Any, Any], args: Sequence[Any], kwargs: dict[str, Any], expected: Any
) -> list[Any]:
    """Call an operator on lists for one element after the other."""
    name = target._schema.name.partition(_FOREACH)[2]
    given = {item.name: arg for item, arg in zip(target._schema.arguments, args, strict=False)}
    given.update(kwargs)
    lists = {item.name for item in target._schema.arguments if _is_list(item)}
    count = len(next(arg for key, arg in given.items() if key in lists))
    made = []
    for i in range(count):
        one = {key: arg[i] if key in lists else arg for key, arg in given.items()}
        packet, own, named = _single(name.rstrip("_"), one)
        like = one["self"] if name.endswith("_") else expected[i]
        result = _one(packet, own, named, like)
        made.append(one["self"].copy_(result) if name.endswith("_") else result)
    return made


def _is_list(item: Any) -> bool:
    """Whether an argument has an element for each tensor; scalars can be one tensor."""
    return isinstance(item.type, torch.ListType) or item.name == "scalars"


def _single(name: str, given: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the operator of one tensor, and its arguments."""
    if name in ("norm", "powsum"):
        packet = aten.linalg_vector_norm if name == "norm" else aten.linalg__powsum
        order, dtype = given.get("ord", 2), given.get("dtype")
        return packet, (given["self"], order), {"dtype": dtype}
    if name == "copy":
        return aten.copy, (given["self"], given["src"]), {}
    if name == "max":
        return aten.amax, (given["self"],), {}
    kwargs = {"alpha": given.pop("alpha")} if "alpha" in given else {}
    if name in ("addcmul", "addcdiv"):
        kwargs["value"] = given.pop("value" if "value" in given else "scalars", 1)
    args = tuple(given.values())
    if name in ("maximum", "minimum") and not isinstance(args[1], Tensor):
        name = "clamp_min" if name == "maximum" else "clamp_max"
    return getattr(aten, {"zero": "zeros_like"}.get(name, name)), args, kwargs


def _one(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], expected: Any) -> Any:
    """Call an operator on tensors, or what computes the same."""
    packet = getattr(target, "overloadpacket", target)
    name = packet._qualified_op_name.partition("::")[2]
    writes = name.endswith("_") and not name.endswith("__")
    packet = getattr(aten, name[:-1], packet) if writes else packet
    if packet in _VIEWS:
        return _VIEWS[packet](*args, **kwargs)
    if packet in _BATCH_NORMS and _writes_statistics(*args, **kwargs):
        return _normalized_batch(packet, *args, **kwargs)
    if packet in _NORMS:
        return _normalized(target, *args, **kwargs)
    if packet in _FACTORS and "out" not in kwargs:
        exact = partial(_exact, dtype=expected.dtype)
        given, named = transform(exact, (tuple(args), dict(kwargs)))
        made = _FACTORS[packet](*given, **named)
    elif not _has_numbers(args, kwargs):
        return target(*args, **kwargs)
    elif packet in _FILLS:
        made = _filled(expected, next(arg for arg in args if isinstance(arg, _Number)))
    elif packet in _WITH_TENSORS and "out" not in kwargs:
        made = _on_tensors(packet, args, kwargs)
    else:
        raise ValueError(f"{target} takes a number that is read from a tensor")
    made = made if made.dtype == expected.dtype else made.to(expected.dtype)
    return args[0].copy_(made) if writes else made


def _normalized(target: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a norm, or its gradient, in the precision of its parameters."""
    others = {arg.dtype for arg in args if isinstance(arg, Tensor)} - {x.dtype}
    if x.dtype not in _HALVES or x.device.type != "cpu" or not others:
        return target(x, *args, **kwargs)
    wide = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
    first, *rest = target(x.float(), *wide, **kwargs)
    return (first if first is None else first.to(x.dtype), *rest)


def rewrites(target: OpOverload[Any, Any]) -> bool:
    """Whether an operator that writes what it does not declare is replaced."""
    return target.overloadpacket in _BATCH_NORMS


def _writes_statistics(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any, **__: Any
) -> bool:
    return training and mean is not None and var is not None


def _normalized_batch(
    packet: Any, x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, *args: Any
) -> list[Any]:
    """Call a batch norm that writes running statistics."""
    function = aten._native_batch_norm_legit_functional
    made: list[Any]
    *made, new_mean, new_var = _normalized(function, x, weight, bias, mean, var, *args)
    mean.copy_(new_mean)
    var.copy_(new_var)
    if packet is aten.cudnn_batch_norm:  # its reserved memory, which no other operator reads
        made.append(x.new_empty(0, dtype=torch.uint8))
    return made


_BATCH_NORMS = operators(
    "native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm"
)
_NORMS = operators(
    "native_batch_norm _native_batch_norm_legit native_layer_norm native_group_norm "
    "native_batch_norm_backward native_layer_norm_backward native_group_norm_backward"
)


def _filled(expected: Tensor, number: _Number) -> Tensor:
    sizes = expected.shape, expected.stride()
    made = torch.empty_strided(*sizes, dtype=expected.dtype, device=expected.device)
    return aten.fill(made, number.tensor.to(expected.dtype))  # type: ignore[no-any-return]


def _on_tensors(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator with tensors in place of numbers."""
    # The last one: a condition comes before the tensors that it chooses from.
    *_, own = (leaf for leaf in flatten((args, kwargs)) if isinstance(leaf, Tensor))

    def on_tensor(leaf: Any) -> Any:
        if isinstance(leaf, _Number):
            sample = 0.5 if leaf.tensor.is_floating_point() else 1
            return _exact(leaf, torch.result_type(own, sample))
        if packet in _ALL_TENSORS and isinstance(leaf, (int, float)):
            return torch.full((), leaf, dtype=torch.result_type(own, leaf), device=own.device)
        return leaf

    given, named = transform(on_tensor, (tuple(args), dict(kwargs)))
    return packet(*given, **named)


_FILLS = frozenset((aten.full, aten.scalar_tensor, aten.fill, aten.full_like, aten.new_full))
# Operators that take a tensor in place of a number, and those of which then all must be tensors.
_ALL_TENSORS = frozenset((aten.clamp, aten.where))
_WITH_TENSORS = _ALL_TENSORS | operators(
    "rsub mul div true_divide divide multiply pow float_power clamp_min clamp_max masked_fill "
    "eq ne lt le gt ge fmod remainder floor_divide xlogy maximum minimum"
)


# ---- arithmetic with factors, on arguments that are exact


def _exact(leaf: Any, dtype: torch.dtype) -> Any:
    """Return an argument as operators with results of this dtype compute with it."""
    if isinstance(leaf, _Number):
        leaf = leaf.tensor
    wide = torch.float32 if dtype in _HALVES else dtype
    return leaf.to(wide) if isinstance(leaf, Tensor) else leaf


def _scaled(x: Any, factor: Any) -> Any:
    return x if not isinstance(factor, Tensor) and factor == 1 else x * factor


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    near = start + (end - start) * weight
    far = end - (end - start) * (1 - weight)
    if isinstance(weight, Tensor):
        return torch.where(weight.abs() < 0.5, near, far)
    return near if abs(weight) < 0.5 else far


_FACTORS: dict[Any, Callable[..., Any]] = {
    aten.add: lambda x, y, alpha=1: x + _scaled(y, alpha),
    aten.sub: lambda x, y, alpha=1: x - _scaled(y, alpha),
    aten.addcmul: lambda x, y, z, value=1: x + _scaled(y, value) * z,
    aten.addcdiv: lambda x, y, z, value=1: x + _scaled(y, value) / z,
    aten.lerp: _lerp,
}
