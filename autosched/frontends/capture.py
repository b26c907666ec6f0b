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
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from autosched._lib.logs import LOG
from autosched._lib.tree import flatten
from autosched.coarsening import by_mark, merged
from autosched.errors import CaptureError, GraphError
from autosched.frontends.capture_lock import capturing
from autosched.frontends.captured import Captured
from autosched.frontends.operators import Operators, common_device
from autosched.frontends.origins import origins_of, traced_at
from autosched.frontends.random_state import random_nodes
from autosched.frontends.side_effects import warn_of_calls
from autosched.frontends.state import Place
from autosched.frontends.tracing import Trace, generator_id, trace
from autosched.frontends.unsupported import (
    check_function,
    check_modes,
    check_others,
    check_state,
    check_tensors,
    definition_of,
)
from autosched.graph.effects import effects_of
from autosched.graph.graph import Value
from autosched.graph.task import Followed


def capture(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Captured:
    """Return ``fn(*args, **kwargs)`` as a graph, without executing it on data.

    ``fn`` is a function of tensors, an ``nn.Module``, or a step that calls ``backward()`` and
    ``optimizer.step()``; modules and optimizers are found among its arguments and in its closure.
    Inputs have the names of parameters and buffers (``fc1.weight``), of arguments as in the
    signature, ``fc1.weight.grad`` and ``optimizer.fc1.weight.exp_avg``. A task is an operator, or a
    call of a function marked by ``task``; ``merge`` makes larger ones. Raises CaptureError, with
    the user's line, for what a graph cannot express.

    >>> model = torch.nn.Linear(3, 2)
    >>> x = torch.ones(4, 3)
    >>> graph = capture(model, x)
    >>> graph.input_names, [task.name for task in graph.tasks]
    (('weight', 'bias', 'input'), ['t', 'addmm'])
    >>> torch.equal(graph.finish(graph.run_serial(**graph.feed(x))), model(x))
    True
    """
    check_function(fn, "capture", CaptureError)
    return with_marked_tasks(captured(fn, args, kwargs))


def with_marked_tasks(graph: Captured) -> Captured:
    """Return a graph in which a call of a marked function is one task, and so is its backward."""
    marks = by_mark(graph)
    return merged(graph, marks) if marks else graph


def captured(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    varying: Iterable[str] = (),
) -> Captured:
    """Like ``capture``, with a task for each operator; settings named ``varying`` are inputs."""
    check_modes()
    with capturing():
        graph = Captured(fn, args, kwargs)
        check_state(graph.state)
        check_tensors(graph.examples)
        check_others((args, kwargs))
        begun = time.perf_counter()
        traced = trace(graph, args, kwargs, varying)
        graph.hold(traced.settings)
        _build(graph, traced)
        seconds = time.perf_counter() - begun
    LOG.info("captured %r: %d tasks in %.3g s", graph.name, len(graph), seconds)
    return graph


def _build(graph: Captured, traced: Trace) -> None:
    """Convert the nodes of a trace to inputs, tasks and outputs."""
    graph.made = {name: place for name, place in traced.outputs.items() if place}
    examples = graph.examples
    if torch.is_grad_enabled():
        tensors = {name: item for name, item in examples.items() if torch.is_tensor(item)}
        given = frozenset(name for name, item in tensors.items() if item.requires_grad)
        graph.followed = Followed(given, frozenset(traced.differentiable), tuple(traced.rewritten))
    random = random_nodes(traced.module.graph)
    nodes = list(traced.module.graph.nodes)
    inputs = dict(zip((node for node in nodes if node.op == "placeholder"), examples, strict=True))
    results: Any = nodes[-1].args[0]
    held = {name: place for name, (place, _) in graph.state.places().items()}
    places = {node: held[name] for node, name in inputs.items() if name in held}
    left = zip(results, traced.outputs.values(), strict=True)
    updates = updates_of(nodes, places | {node: place for node, place in left if place})
    origins = origins_of(nodes, definition_of(graph.fn), updates.owner)
    device = common_device(filter(torch.is_tensor, examples.values()))
    operators = Operators(graph, origins, device, updates.on_host | random)
    for node in nodes:
        if node.op == "placeholder":
            operators.values[node] = _input(graph, inputs[node], is_used=bool(node.users))
        elif node.op == "get_attr":
            operators.values[node] = graph.constant(_constant(traced, node))
        elif node.op == "call_function":
            _add(operators, node)
    outputs = dict(zip(traced.outputs, results, strict=True))
    graph.output(**{name: operators.values[node] for name, node in outputs.items()})
    made = {name: node.meta["val"] for name, node in outputs.items()}
    graph.homes = {name: str(val.device) for name, val in made.items() if torch.is_tensor(val)}
    for group in updates.groups:
        graph.together(*[operators.values[node] for node in group])
    warn_of_calls(traced.calls, graph.name)


def _input(graph: Captured, name: str, is_used: bool) -> Value:
    """Add an input on the device of the present tensor.

    A module whose parameters are passed by ``functional_call`` may have none with data.
    """
    device = str(getattr(graph.examples[name], "device", "cpu"))
    if device == "meta" and not is_used:
        device = "cpu"
    with graph.on(device) if device != "cpu" else contextlib.nullcontext():
        return graph.input(name)


def _constant(traced: Trace, node: Node) -> Any:
    """Return a constant that the step itself holds.

    A generator must exist before, because its state continues from run to run.
    """
    item = getattr(traced.module, str(node.target))
    if isinstance(item, torch.Generator) and generator_id(item) not in traced.generators:
        raise CaptureError(
            "the step creates a torch.Generator and draws from it, and in a graph its state would "
            "continue from call to call; use torch.manual_seed in torch.random.fork_rng(), or pass "
            "a generator as an argument" + traced_at(next(iter(node.users)))
        )
    return item


def _add(operators: Operators, node: torch.fx.Node) -> None:
    """Add the task of a node. Raises CaptureError for writes that a graph cannot express."""
    try:
        operators.add(node)
    except GraphError as error:
        why = str(error).partition(";")[0]
        file, line = operators.origins[node].where
        raise CaptureError(f"{why}; write in place, with copy_\n    at {file}:{line}") from error


# ---- gradients and updates
#
# A parameter, its moments and its gradient are on one device, so an update runs where the gradient is
# computed, unless ``place=`` puts it elsewhere. Parameters that one fused operator updates together
# are an exception, because that would move the whole backward pass to one device. The step counters
# of an optimizer are on the host, where torch has them, and so are the Python numbers computed from
# them. Reads the nodes of a traced step; knows no graph of autosched.

_OF_PARAMETERS = ("parameter", "grad", "moment")
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class Updates(NamedTuple):
    """What is known of the operators of optimizers.

    ``owner`` is the parameter whose state an operator uses, directly or through others, or if it
    uses none, that of its users; only for operators of one parameter, which no operator updates
    along with others. ``on_host`` are the operators on numbers: Python's own, and counters of steps
    on the CPU. ``groups`` are the tensors that belong on one device: of each parameter, itself, its
    moments, and its gradient, if the parameter has an update of its own.
    """

    owner: dict[Node, str]
    on_host: set[Node]
    groups: list[list[Node]]


def updates_of(nodes: Sequence[Node], places: Mapping[Node, Place]) -> Updates:
    """Find the operators of optimizers; ``places`` has the nodes of the state that they change."""
    root: dict[Node, Node] = {}  # an in-place operator returns its argument
    fused: set[Node] = set()  # written by one operator along with others
    for node in nodes:
        if node.op == "call_function" and callable(node.target):
            effects = effects_of(node.target, node.args, node.kwargs)
            written = [root.get(item, item) for item in effects.writes if isinstance(item, Node)]
            if len(written) > 1:
                fused.update(written)
            elif written and effects.in_place:
                root[node] = written[0]
    state = {root.get(n, n): place for n, place in places.items() if place[0] in _OF_PARAMETERS}
    steps = {  # the tensors that they touch
        node: [root.get(item, item) for item in (*node.all_input_nodes, node)]
        for node in nodes
        if _is_update(node)
    }
    names = {item: {_parameter(place)} for item, place in state.items()}
    for node, touched in steps.items():
        known = (names.get(item, set()) for item in (*touched, *node.all_input_nodes))
        names[node] = set().union(*known)
    for node in reversed(steps):
        names[node] = names[node] or set().union(*(names.get(user, set()) for user in node.users))
    mixed = {_parameter(place) for item, place in state.items() if item in fused}
    owner = {
        node: next(iter(own)) for node in steps if len(own := names[node]) == 1 and not own & mixed
    }

    numeric = {node for node, touched in steps.items() if all(map(_is_number, touched))}
    others = {item for node, touched in steps.items() if node not in numeric for item in touched}
    counters = {item for item, place in state.items() if place[-1] == "step" and _is_number(item)}
    counters -= others
    counting = {node for node in numeric if not counters.isdisjoint(steps[node])}
    on_host = {*filter(_is_python, nodes), *counting}
    for node in reversed(steps):  # constants of the arithmetic of counters
        constant = all(item.op == "get_attr" for item in node.all_input_nodes)
        if constant and node.users and node.users.keys() <= on_host:
            on_host.add(node)

    groups: dict[str, dict[Node, None]] = {}
    for item, place in state.items():
        if place[0] != "grad" and item not in counters:
            groups.setdefault(_parameter(place), {})[item] = None
    for node, name in owner.items():
        tensors = groups.get(name, {})
        for item in steps[node] if tensors else ():
            computed = item.op == "call_function" and item not in steps
            is_gradient = computed or state.get(item, ("",))[0] == "grad"
            if is_gradient and item not in fused and _shape(item) == _shape(next(iter(tensors))):
                tensors[item] = None
    return Updates(owner, on_host, [list(group) for group in groups.values() if len(group) > 1])


def _is_update(node: Node) -> bool:
    """Whether an optimizer calls an operator, other than in a closure that computes gradients."""
    custom = node.meta.get("custom") or {}
    return custom.get("phase") == "optimizer" and not node.meta.get("autograd_backward")


def _parameter(place: Place) -> str:
    return place[2] if place[0] == "moment" else place[1]


def _values(node: Node) -> list[object]:
    return [leaf for leaf in flatten(node.meta.get("val")) if leaf is not None]


def _shape(node: Node) -> object:
    return getattr(node.meta.get("val"), "shape", None)


def _is_number(node: Node) -> bool:
    """Whether a node represents numbers: Python's, or CPU tensors without dimensions."""
    return not any(
        isinstance(v, torch.Tensor) and (v.dim() or v.device.type != "cpu") for v in _values(node)
    )


def _is_python(node: Node) -> bool:
    values = _values(node) if node.op == "call_function" else []
    return bool(values) and all(isinstance(v, _NUMBERS) for v in values)
