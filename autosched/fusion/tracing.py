"""Trace the tasks of a region as one graph of operators on tensors.

1. Trace with fake tensors that have the strides of eager mode.
2. Trace this graph again: without in-place operators, whose new values are copied into the
   arguments at the end, and without operators that Inductor computes otherwise (``rewriting``); and
   once more if images should lie otherwise.
3. Where what an argument had before it is written is copied into others, or is a result, as in a
   swap of two arguments or a history of buffers, let the graph read a copy of the argument, which
   is a further argument. Inductor removes copies that seem to change nothing, and would read what
   was written.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from autosched._lib.aten import operators
from autosched._lib.fake_tensors import Fakes, quiet
from autosched._lib.tree import flatten
from autosched.fusion.rewriting import READ_NUMBER, ChannelsLast, Rewriter, kind_of, rewrites
from autosched.graph.effects import effects_of

aten = torch.ops.aten

# Why operators with these tags cannot be part of a region.
TAGS = {
    torch.Tag.data_dependent_output: "returns what depends on data",
    torch.Tag.dynamic_output_shape: "returns a tensor whose size depends on data",
}
AS_STRIDED = (aten.as_strided, aten.as_strided_)
_MEANS = (aten.var_mean, aten.std_mean)
_MOVES = operators(
    "clone _to_copy lift_fresh_copy cat stack constant_pad_nd "
    "slice_scatter select_scatter diagonal_scatter as_strided_scatter"
)


class NotTraceableError(Exception):
    """The reason why a function cannot be traced."""


class Traced(NamedTuple):
    """A traced function.

    ``graph`` takes copies of the arguments at the positions ``old`` after all arguments. ``written``
    are the positions of those that get new values. ``results`` are the strides and bytes that results
    have in eager mode; ``numbers`` has the types of those that are numbers.
    """

    graph: torch.fx.GraphModule
    old: Sequence[int]
    written: Sequence[int]
    results: Sequence[tuple[Sequence[int], int]]
    numbers: dict[int, type]


def as_tensor(arg: Any) -> Any:
    """Return a float as a tensor without dimensions; other arguments pass.

    >>> as_tensor(0.5)
    tensor(0.5000, dtype=torch.float64)
    """
    return torch.tensor(arg, dtype=torch.float64) if type(arg) is float else arg


def trace(
    fn: Callable[..., list[Any]], args: Sequence[Any], written: Collection[int] = ()
) -> Traced:
    """Return a function of tensors and floats as a graph of ATen operators on tensors.

    The graph takes floats as tensors (``as_tensor``), so it does not contain their values, and
    returns numbers as tensors. ``written`` are the positions of the arguments to which ``fn``
    writes, including what operators do not declare. Raises NotTraceableError.
    """
    are_floats = [type(arg) is float for arg in args]
    numbers: dict[int, type] = {}

    def on_tensors(*tensors: Any) -> list[Any]:
        pairs = zip(tensors, are_floats, strict=True)
        made: list[Any] = fn(*(tensor.item() if is_float else tensor for tensor, is_float in pairs))
        numbers.clear()
        for i, item in enumerate(made):
            if not isinstance(item, torch.Tensor):
                numbers[i], dtype = kind_of(item)
                made[i] = torch.scalar_tensor(item, dtype=dtype)
        return made

    # Outside of the fake mode, in which a new tensor would remember its number.
    tensors = list(map(as_tensor, args))
    # A tensor that is given twice would be one argument of the graph, and need not be in each call.
    apart = {id(tensor): i for i, tensor in reversed([*enumerate(tensors)])}
    given = [each if apart[id(each)] == i else each.detach() for i, each in enumerate(tensors)]
    try:
        with silenced(), quiet(), torch.no_grad(), Fakes() as fakes:
            fake = list(map(fakes.from_tensor, given))
            operators = make_fx(on_tensors)(*fake)
            _check(operators)
            if [(t.shape, t.stride()) for t in given] != [(t.shape, t.stride()) for t in fake]:
                raise NotTraceableError("an argument gets another shape")
            with torch._C._DisableAutocast():  # the casts are among the operators
                graph = make_fx(functionalize(Rewriter(operators).run))(*fake)
                if ChannelsLast.pays(graph):
                    graph = make_fx(ChannelsLast(graph).run)(*fake)
            pairs = zip(_results(operators), _results(graph), strict=True)
            results = [_layout(before.meta["val"], new.meta["val"].dtype) for before, new in pairs]
    except NotTraceableError:
        raise
    except Exception as error:  # tracing raises many kinds of errors
        raise NotTraceableError(described(error)) from error
    _check(graph, read=False)
    return Traced(graph, *_keep_old(graph, written), results, numbers)


def _check(graph: torch.fx.GraphModule, read: bool = True) -> None:
    """Raise NotTraceableError for what is not compiled; ``read``: whether it may read numbers."""
    for node in graph.graph.nodes:
        if why := _objection(node):
            raise NotTraceableError(why)
        if node.target is READ_NUMBER and not read:
            raise NotTraceableError("an operator needs a number that is read from a tensor")


def _layout(result: torch.Tensor, dtype: torch.dtype) -> tuple[Sequence[int], int]:
    """Return the strides and bytes of a tensor like this one, of some dtype."""
    made = torch.empty_strided(result.shape, result.stride(), dtype=dtype, device=result.device)
    return made.stride(), made.untyped_storage().nbytes()


def _results(graph: torch.fx.GraphModule) -> list[Any]:
    output: Any = graph.graph.output_node()
    return list(output.args[0])


def _keep_old(graph: torch.fx.GraphModule, written: Collection[int]) -> tuple[list[int], list[int]]:
    """Let a graph take copies of arguments whose old values stay; return these, and all written."""
    nodes = graph.graph
    inputs = nodes.find_nodes(op="placeholder")
    places = {node: i for i, node in enumerate(inputs)}
    copies = [
        node
        for node in nodes.find_nodes(op="call_function", target=aten.copy_.default)
        if node.args[0] in places
    ]
    targets = [places[node.args[0]] for node in copies]
    changed = {*written, *targets}
    old: set[int] = set()
    for node in (*_results(graph), *(copy.args[1] for copy in copies)):
        found = [places.get(origin) for origin in _origins(node)]
        old |= changed.intersection(found) if None not in found else set()
    last = inputs[-1] if inputs else None
    for i in sorted(old):
        with nodes.inserting_after(last):
            last = nodes.placeholder(f"before_{i}")
        like = inputs[i].meta["val"]
        last.meta["val"] = like.new_empty_strided(like.shape, like.stride())
        inputs[i].replace_all_uses_with(last)
    for copy, i in zip(copies, targets, strict=True):
        copy.update_arg(0, inputs[i])  # only writes are to the argument itself
    graph.recompile()
    return sorted(old), sorted(changed)


def _origins(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the nodes whose values this one has, but for views, casts and where they lie."""
    found: set[torch.fx.Node] = set()
    pending = [node]
    while pending:
        node = pending.pop()
        packet = getattr(node.target, "overloadpacket", None)
        if packet is aten.copy:
            pending += [arg for arg in node.args[1:2] if isinstance(arg, torch.fx.Node)]
        elif node.target is getitem or getattr(node.target, "is_view", False) or packet in _MOVES:
            pending += node.all_input_nodes
        else:
            found.add(node)
    return found


def _objection(node: torch.fx.Node) -> str | None:
    """Return why a graph with this node is not compiled, or None."""
    if node.op == "get_attr":
        return f"it uses the tensor {node.target!r}, which is no argument"
    if node.op == "output" and any(
        not isinstance(leaf, torch.fx.Node) for leaf in flatten(node.args)
    ):
        return "a result is no tensor"
    if isinstance(node.target, OpOverload):
        if node.target is READ_NUMBER:
            return None
        effects = effects_of(node.target, node.args, node.kwargs)
        if effects.random:
            return f"{node.target} draws random numbers"
        if effects.writes and not node.target._schema.is_mutable and not rewrites(node.target):
            return f"{node.target} writes what it does not declare"
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            return f"{node.target} returns a tensor that is not dense"
        tags = set(node.target.tags)
        if isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape):
            tags.discard(torch.Tag.dynamic_output_shape)
        if reason := next((why for tag, why in TAGS.items() if tag in tags), None):
            return f"{node.target} {reason}"
        if node.target.overloadpacket in AS_STRIDED:
            # For Inductor, memory begins at the first element of an argument.
            return f"{node.target} depends on the memory around its argument"
        if node.target.overloadpacket in _MEANS and not node.all_input_nodes[0].meta["val"].numel():
            return f"{node.target} has the mean 0 of an empty tensor if compiled"
    return None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Suppress warnings about torch's own code, and what Inductor logs: it raises errors, too.

    Where its log has a level, as by ``TORCH_LOGS``, that is kept.
    """
    log = logging.getLogger("torch._inductor")
    level = log.level
    log.setLevel(level or logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def described(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
