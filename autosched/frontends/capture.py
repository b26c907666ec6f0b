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
    updates = Updates(nodes, places | {node: place for node, place in left if place})
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
    for group in updates.groups():
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


class Updates:
    """The operators of optimizers, and the state that they change.

    ``places`` has the nodes of that state.

    ``owner`` is the parameter whose state an operator uses, directly or through others, or if it
    uses none, that of its users; only for operators of one parameter, which no operator updates
    along with others. ``on_host`` are the operators on numbers: Python's own, and counters of steps
    on the CPU.
    """

    def __init__(self, nodes: Sequence[Node], places: Mapping[Node, Place]):
        self._root: dict[Node, Node] = {}  # an in-place operator returns its argument
        together = [written for node in nodes if len(written := self._writes(node)) > 1]
        self._fused = {root for written in together for root in written}
        self._places = {
            self._of(node): place for node, place in places.items() if place[0] in _OF_PARAMETERS
        }
        self._steps = [node for node in nodes if _is_update(node)]
        self._updates = set(self._steps)
        self._counters = self._step_counters()
        mixed = {_parameter(place) for root, place in self._places.items() if root in self._fused}
        self.owner = {
            node: names[0]
            for node, names in self._owners().items()
            if len(names) == 1 and names[0] not in mixed
        }
        self.on_host = {*filter(_is_python, nodes), *filter(self._counts, self._steps)}
        for node in reversed(self._steps):  # constants of the arithmetic of counters
            constant = all(item.op == "get_attr" for item in node.all_input_nodes)
            if constant and node.users and node.users.keys() <= self.on_host:
                self.on_host.add(node)

    def _writes(self, node: Node) -> list[Node]:
        if node.op != "call_function" or not callable(node.target):
            return []
        effects = effects_of(node.target, node.args, node.kwargs)
        written = [self._of(item) for item in effects.writes if isinstance(item, Node)]
        if effects.in_place and len(written) == 1:
            self._root[node] = written[0]
        return written

    def _of(self, node: Node) -> Node:
        """Return the node that computed the tensor."""
        return self._root.get(node, node)

    def _touched(self, node: Node) -> list[Node]:
        return [self._of(item) for item in (*node.all_input_nodes, node)]

    def _owners(self) -> dict[Node, tuple[str, ...]]:
        found: dict[Node, tuple[str, ...]] = {
            root: (_parameter(place),) for root, place in self._places.items()
        }
        for node in self._steps:
            found[node] = _union(
                found.get(item, ()) for item in (*self._touched(node), *node.all_input_nodes)
            )
        for node in reversed(self._steps):
            found[node] = found[node] or _union(found.get(user, ()) for user in node.users)
        return {node: found[node] for node in self._steps}

    # ---- counters of steps

    def _step_counters(self) -> set[Node]:
        """Return step counters on the CPU that other tensors do not use."""
        steps = [root for root, place in self._places.items() if place[-1] == "step"]
        found = set(filter(_is_number, steps))
        touched = map(self._touched, self._steps)
        return found.difference(*(items for items in touched if not all(map(_is_number, items))))

    def _counts(self, node: Node) -> bool:
        touched = self._touched(node)
        return any(item in self._counters for item in touched) and all(map(_is_number, touched))

    # ---- tensors on one device

    def groups(self) -> list[list[Node]]:
        """Return, for each parameter, the tensors that belong on one device.

        Itself, its moments, and its gradient. The gradient only if the parameter has an update of
        its own, and no operator writes it along with others.
        """
        found: dict[str, dict[Node, None]] = {}
        for root, place in self._places.items():
            if place[0] in ("parameter", "moment") and root not in self._counters:
                found.setdefault(_parameter(place), {})[root] = None
        for node, name in self.owner.items():
            if name in found:
                own = found[name]
                shape = _shape(next(iter(own)))
                for item in self._touched(node):
                    if self._is_gradient(item) and _shape(item) == shape:
                        own[item] = None
        return [list(own) for own in found.values() if len(own) > 1]

    def _is_gradient(self, root: Node) -> bool:
        """Whether an update's tensor was computed before, and is written alone."""
        computed = root.op == "call_function" and root not in self._updates
        is_grad = self._places.get(root, ("",))[0] == "grad"
        return (computed or is_grad) and root not in self._fused


def _is_update(node: Node) -> bool:
    """Whether an optimizer calls an operator, other than in a closure that computes gradients."""
    custom = node.meta.get("custom") or {}
    return custom.get("phase") == "optimizer" and not node.meta.get("autograd_backward")


def _parameter(place: Place) -> str:
    return place[2] if place[0] == "moment" else place[1]


def _union(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))


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
