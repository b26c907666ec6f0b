"""Capture a PyTorch function, module or training step as a graph.

Each ATen operator becomes a task. Tensors of modules and optimizers that the function uses become
inputs, as its arguments do. Tensors that it stores there and that did not exist before, such as the
moments of a new optimizer, become outputs.

A capture keeps in-place operators, and finds dependencies from operator schemas and storages. A
functional graph would have the same dependencies, only hidden in copies at its end.

Values that are not tensors become constants of the graph: shapes, learning rates, training flags.
An argument that names the device of the capture means "the device of the task" (``Here``), so a
step that was captured on one device runs on any. Any other device remains, and fixes the device of
the task. Knows no machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from autosched._lib.logs import LOG
from autosched.coarsening.grouping import Granularity, check_granularity
from autosched.errors import CaptureError, GraphError
from autosched.frontends.capture_lock import capturing
from autosched.frontends.captured import Captured, signature_of
from autosched.frontends.granularity import coarse
from autosched.frontends.host_calls import warn_of_calls
from autosched.frontends.operators import Operators, common_device
from autosched.frontends.origins import origins_of, traced_at
from autosched.frontends.random_state import random_nodes
from autosched.frontends.settings import Settings
from autosched.frontends.state import Place
from autosched.frontends.tracing import Trace, generator_id, trace
from autosched.frontends.unsupported import (
    check_function,
    check_modes,
    check_nodes,
    check_others,
    check_state,
    check_tensors,
    definition_of,
)
from autosched.frontends.updates import Updates
from autosched.fusion import fuse as fused
from autosched.graph.graph import Value
from autosched.graph.task import Followed

__all__ = ["Captured", "capture", "captured"]


def capture(
    fn: Callable[..., Any],
    /,
    *args: Any,
    granularity: Granularity = "op",
    fuse: bool = False,
    **kwargs: Any,
) -> Captured:
    """Return ``fn(*args, **kwargs)`` as a graph, without executing it on data.

    ``fn`` is a function of tensors, an ``nn.Module``, or a step that calls ``backward()`` and
    ``optimizer.step()``; modules and optimizers are found among its arguments and in its closure.
    Inputs have the names of parameters and buffers (``fc1.weight``), of arguments as in the
    signature, ``fc1.weight.grad`` and ``optimizer.fc1.weight.exp_avg``. By default a task is an
    operator; with ``granularity="module"`` it is a call of a module, forward or backward, and with
    ``"auto"`` a chain of operators or several small ones. ``fuse`` returns what ``fuse`` makes of
    the graph for ``Machine.local()``. Raises CaptureError, with the user's line, for what a graph
    cannot express.

    >>> model = torch.nn.Linear(3, 2)
    >>> x = torch.ones(4, 3)
    >>> graph = capture(model, x)
    >>> graph.input_names, [task.name for task in graph.tasks]
    (('weight', 'bias', 'input'), ['t', 'addmm'])
    >>> torch.equal(graph.finish(graph.run_serial(**graph.feed(x))), model(x))
    True
    """
    check_granularity(granularity)
    check_function(fn, "capture", CaptureError)
    signature = signature_of(fn)
    for name in ("granularity", "fuse"):
        if signature is not None and name in signature.parameters:
            function = getattr(fn, "__qualname__", type(fn).__name__)
            raise CaptureError(
                f"{function!r} has a parameter {name!r}, which is also one of capture; wrap the "
                "function in a lambda"
            )
    graph = captured(fn, args, kwargs)
    graph = coarse(graph, granularity, graph.examples)
    return fused(graph) if fuse else graph


def captured(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    varying: Iterable[str] = (),
) -> Captured:
    """Like ``capture``, with a task for each operator of marked functions.

    ``varying`` are the names of optimizers' settings that are to be inputs.
    """
    check_modes()
    with capturing():
        graph = Captured(fn, args, kwargs)
        graph.settings = Settings(varying)
        check_state(graph.state)
        check_tensors(graph.examples)
        check_others((args, kwargs))
        begun = time.perf_counter()
        traced = trace(graph, args, kwargs)
        graph.hold(traced.settings)
        _Builder(graph, traced).build()
        seconds = time.perf_counter() - begun
    LOG.info("captured %r: %d tasks in %.3g s", graph.name, len(graph), seconds)
    return graph


class _Builder:
    """Converts the nodes of a trace to inputs, tasks and outputs."""

    def __init__(self, graph: Captured, traced: Trace):
        self.graph = graph
        self.traced = traced
        graph.returned = traced.returned
        graph.gone = traced.gone
        graph.switched = traced.switched
        graph.made = {name: place for name, place in traced.outputs.items() if place}

    def build(self) -> None:
        graph = self.graph
        examples = graph.examples
        if torch.is_grad_enabled():
            tensors = {name: item for name, item in examples.items() if torch.is_tensor(item)}
            given = frozenset(name for name, item in tensors.items() if item.requires_grad)
            differentiable = frozenset(self.traced.differentiable)
            graph.followed = Followed(given, differentiable, tuple(self.traced.rewritten))
        random = random_nodes(self.traced.module.graph)
        nodes = list(self.traced.module.graph.nodes)
        check_nodes(nodes)
        updates = Updates(nodes, self._places(nodes))
        origins = origins_of(nodes, definition_of(graph.fn), updates.owner)
        on_host = updates.on_host | random
        device = common_device(filter(torch.is_tensor, examples.values()))
        operators = Operators(graph, origins, device, on_host)
        names = iter(examples)
        for node in nodes:
            if node.op == "placeholder":
                operators.values[node] = self._input(next(names), is_used=bool(node.users))
            elif node.op == "get_attr":
                operators.values[node] = self._constant(node)
            elif node.op == "call_function":
                _add(operators, node)
            elif node.op == "output":
                results = [operators.values[item] for item in node.args[0]]
                graph.output(**dict(zip(self.traced.outputs, results, strict=True)))
                graph.homes = {
                    name: str(item.meta["val"].device)
                    for name, item in zip(self.traced.outputs, node.args[0], strict=True)
                    if isinstance(item.meta["val"], torch.Tensor)
                }
        for group in updates.groups():
            graph.together(*[operators.values[node] for node in group])
        warn_of_calls(self.traced.calls, graph.name)

    def _input(self, name: str, is_used: bool) -> Value:
        """Add an input on the device of the present tensor.

        A module whose parameters are passed by ``functional_call`` may have none with data.
        """
        device = str(getattr(self.graph.examples[name], "device", "cpu"))
        if device == "meta" and not is_used:
            device = "cpu"
        with self.graph.on(device) if device != "cpu" else contextlib.nullcontext():
            return self.graph.input(name)

    def _constant(self, node: torch.fx.Node) -> Value:
        """Add a constant that the step itself holds.

        A generator must exist before, because its state continues from run to run.
        """
        item = getattr(self.traced.module, str(node.target))
        if isinstance(item, torch.Generator) and generator_id(item) not in self.traced.generators:
            raise CaptureError(
                "the step creates a torch.Generator and draws from it, and in a graph its state "
                "would continue from call to call; use torch.manual_seed in "
                "torch.random.fork_rng(), or pass a generator as an argument"
                + traced_at(next(iter(node.users)))
            )
        return self.graph.constant(item)

    def _places(self, nodes: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, Place]:
        held = {name: place for name, (place, _) in self.graph.state.places().items()}
        inputs = [node for node in nodes if node.op == "placeholder"]
        given = zip(inputs, self.graph.examples, strict=True)
        found = {node: held[name] for node, name in given if name in held}
        results: Any = nodes[-1].args[0]
        left = zip(results, self.traced.outputs.values(), strict=True)
        return found | {node: place for node, place in left if place}


def _add(operators: Operators, node: torch.fx.Node) -> None:
    """Add the task of a node. Raises CaptureError for writes that a graph cannot express."""
    try:
        operators.add(node)
    except GraphError as error:
        why = str(error).partition(";")[0]
        file, line = operators.origins[node].where
        raise CaptureError(f"{why}; write in place, with copy_\n    at {file}:{line}") from error
