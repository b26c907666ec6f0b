"""Capture: a PyTorch function, a module or a whole training step becomes a graph, a task for each ATen operator.

The function runs once on fake tensors, which have shapes and no data, while ``make_fx`` writes down what it does:
forward, backward and optimizer. Tensors that it reaches in modules and optimizers become inputs, as its arguments do.
What it leaves there that was not there before, such as the moments of a new optimizer, is put out.

All that is no tensor stands in the graph as it was: shapes, learning rates, training flags. Knows no machine.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autosched.errors import CaptureError, GraphError
from autosched.frontends.attention import fast_paths
from autosched.frontends.fakes import Fakes
from autosched.frontends.granularity import coarse
from autosched.frontends.kept import check_kept, is_constant, looks_of
from autosched.frontends.operators import Operators, usual_device
from autosched.frontends.origins import origins, written_down
from autosched.frontends.refusals import (
    check_held,
    check_modes,
    check_nodes,
    check_tensors,
    defined,
    drawing_nothing,
    told,
)
from autosched.frontends.state import State
from autosched.frontends.surroundings import Surroundings
from autosched.frontends.updates import Updates
from autosched.graph import Graph, Value
from autosched.grouping import Granularity, check_granularity
from autosched.tree import transform

__all__ = ["Captured", "arguments_of", "capture", "captured", "leaves"]


@dataclass(frozen=True)
class _Output:
    """Stands in what a function returns for a tensor: the output of this name."""

    name: str


class Captured(Graph):
    """A graph that was captured, and how to run it on what it was captured from.

    ``examples`` are the inputs with which it was captured.
    """

    def __init__(self, fn: Callable[..., Any], state: State, examples: Mapping[str, Any]):
        super().__init__(re.sub(r"\W", "", getattr(fn, "__name__", type(fn).__name__)) or "step")
        self.fn, self.state, self.examples = fn, state, examples
        self.returned: Any = None
        self.made: dict[str, tuple[str, ...]] = {}  # outputs that are new state, and their places
        self.gone: tuple[tuple[str, ...], ...] = ()  # places that are empty afterwards
        self.switched: list[tuple[dict[str, Any], str, Any]] = []  # attributes, and what they are afterwards

    def feed(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the inputs of a run: the tensors among these arguments, and those in modules and optimizers now."""
        return {**self.state.tensors(), **arguments_of(self.fn, args, kwargs)}

    def finish(self, outputs: Mapping[str, Any]) -> Any:
        """Put new state where it belongs, and return what the function returns."""
        for name, place in self.made.items():
            self.state.put(place, outputs[name])
        for place in self.gone:
            self.state.put(place, None)
        for attributes, name, item in self.switched:
            attributes[name] = item
        return transform(lambda leaf: outputs[leaf.name] if isinstance(leaf, _Output) else leaf, self.returned)


def capture(fn: Callable[..., Any], /, *args: Any, granularity: Granularity = "op", **kwargs: Any) -> Captured:
    """Return as a graph what ``fn(*args, **kwargs)`` does, without doing it.

    ``fn`` is a function of tensors, an ``nn.Module``, or a step that calls ``backward()`` and ``optimizer.step()``;
    modules and optimizers are found among its arguments and in its closure. Inputs have the names of parameters and
    buffers (``fc1.weight``), of arguments as in the signature, ``fc1.weight.grad`` and
    ``optimizer.fc1.weight.exp_avg``. A task is an operator; by ``granularity="module"`` a call of a module, forward or
    backward, and by ``"auto"`` chains and what is tiny. Raises CaptureError, with the user's line, for
    what no graph can say.

    >>> model = torch.nn.Linear(3, 2)
    >>> graph = capture(model, torch.ones(4, 3))
    >>> graph.input_names, [task.name for task in graph.tasks]
    (('weight', 'bias', 'input'), ['t', 'addmm'])
    >>> torch.equal(graph.finish(graph.run_serial(**graph.feed(torch.ones(4, 3)))), model(torch.ones(4, 3)))
    True
    """
    check_granularity(granularity)
    if "granularity" in _parameters(fn):
        name = getattr(fn, "__qualname__", type(fn).__name__)
        raise CaptureError(f"{name!r} has a parameter 'granularity', a word that capture takes; wrap it in a lambda")
    graph = captured(fn, args, kwargs)
    return coarse(graph, granularity, graph.examples)


def captured(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Do as ``capture``, with a task for each operator, those of marked functions too."""
    check_modes()
    state = State.of(fn, [*args, *kwargs.values()])
    given, held = arguments_of(fn, args, kwargs), state.tensors()
    for name in given.keys() & held.keys():
        raise CaptureError(f"two inputs would be called {name!r}: an argument, and what a module or optimizer holds")
    graph = Captured(fn, state, {**held, **given})
    check_tensors(graph.examples)
    check_held(state)
    _Builder(graph).build(args, kwargs)
    return graph


def arguments_of(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among a call's arguments, by the names of the parameters."""
    try:
        call = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).bind(*args, **kwargs)
    except ValueError:  # a builtin, of which Python cannot tell
        named: dict[str, Any] = {**{f"arg{i}": item for i, item in enumerate(args)}, **kwargs}
    except TypeError as error:
        raise CaptureError(f"{getattr(fn, '__qualname__', fn)!r} cannot be called like that: {error}") from None
    else:
        named = dict(call.arguments)
        for name, parameter in call.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named.update(named.pop(name, {}))
    found: dict[str, torch.Tensor] = {}
    for path, leaf in leaves(named):
        name = re.sub(r"[\s@]", "_", path)
        if name in found:
            raise CaptureError(f"two arguments would be called {name!r}; rename one")
        if isinstance(leaf, torch.Tensor):
            found[name] = leaf
    return found


def _parameters(fn: Callable[..., Any]) -> Collection[str]:
    try:
        return inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters
    except ValueError:
        return ()


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree by their paths: ``batch.0``."""
    if isinstance(tree, (tuple, list, dict)):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(item, f"{path}.{key}" if path else f"{key}")
    else:
        yield path, tree


class _Builder:
    """Runs the function on fake tensors, and makes what was written down into tasks."""

    def __init__(self, graph: Captured):
        self.graph, self.state = graph, graph.state
        self.left: dict[str, tuple[str, ...]] = {}  # outputs: their places, none for what the function returns
        self.numbers = self.state.numbers()
        self.around: Surroundings | None = None  # while the function runs

    def build(self, args: Any, kwargs: Any) -> None:
        traced = self._trace(args, kwargs)
        nodes = list(traced.graph.nodes)
        check_nodes(nodes)
        updates = Updates(nodes, self._places(nodes))
        where = origins(nodes, defined(self.graph.fn), updates.owner)
        operators = Operators(self.graph, where, usual_device(self.graph.examples.values()), updates.on_host)
        names = iter(self.graph.examples)
        for node in nodes:
            if node.op == "placeholder":
                operators.values[node] = self._input(next(names))
            elif node.op == "get_attr":
                operators.values[node] = self.graph.constant(getattr(traced, node.target))
            elif node.op == "call_function":
                self._add(operators, node)
            elif node.op == "output":
                results = [operators.values[item] for item in node.args[0]]
                self.graph.output(**dict(zip(self.left, results, strict=True)))
        self.graph.made = {name: place for name, place in self.left.items() if place}
        for bond in updates.bonds():
            self.graph.together(*[operators.values[node] for node in bond])

    def _add(self, operators: Operators, node: torch.fx.Node) -> None:
        try:
            operators.add(node)
        except GraphError as error:
            where = "{}:{}".format(*operators.origins[node].where)
            raise CaptureError(f"{str(error).partition(';')[0]}; write in place, with copy_\n    at {where}") from error

    def _places(self, nodes: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, tuple[str, ...]]:
        """Return where what nodes stand for was held, or will be."""
        held = {name: place for name, (place, _) in self.state.places().items()}
        given = zip([node for node in nodes if node.op == "placeholder"], self.graph.examples, strict=True)
        found = {node: held[name] for node, name in given if name in held}
        left = zip(nodes[-1].args[0], self.left.values(), strict=True)  # type: ignore[arg-type]
        return found | {node: place for node, place in left if place}

    def _input(self, name: str) -> Value:
        """Add an input, which lives where the tensor lives that is there now; one on the CPU, on the host."""
        device = str(self.graph.examples[name].device)
        with self.graph.on(device) if device != "cpu" else contextlib.nullcontext():
            return self.graph.input(name)

    # ---- tracing

    def _trace(self, args: Any, kwargs: Any) -> torch.fx.GraphModule:
        examples = self.graph.examples
        number = {id(item): i for i, item in enumerate(examples.values())}

        def step(fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            given = transform(
                lambda leaf: fakes[number[id(leaf)]] if id(leaf) in number else leaf, (list(args), dict(kwargs))
            )
            before = dict(zip(examples, fakes, strict=True))
            with self.state.acting_on(before) as acting, self._watching(before, given):
                result = self.graph.fn(*given[0], **given[1])
                return self._left(result, before, acting)

        with self.state.put_aside(), torch.autograd.set_multithreading_enabled(False):
            try:
                with drawing_nothing(), written_down(self.state.modules, self._refuse), fast_paths():
                    fakes = Fakes()
                    return make_fx(step, tracing_mode="fake")([fakes.from_tensor(x) for x in examples.values()])
            except Exception as error:
                raise CaptureError(told(self.graph.fn, error)) from error

    @contextlib.contextmanager
    def _watching(self, before: Mapping[str, torch.Tensor], given: Any) -> Iterator[None]:
        """See to it that nothing changes that no graph can change."""
        self.around = around = Surroundings([self.graph.fn, given], self.state.modules)
        looks = looks_of(before)
        try:
            yield
            check_kept(looks, looks_of(before), [before[name] for name in self.state.parameters])
            if (change := around.change()) is not None:
                raise CaptureError(
                    f"{change} after the step, and what can change is tensors in modules and optimizers, and switches; "
                    f"keep it in a buffer, return it, or change it outside of the step, as schedulers do"
                )
            self.graph.switched = around.switched()
        finally:
            self.around = None
            around.restore()

    def _refuse(self, tensor: torch.Tensor) -> None:
        """Raise CaptureError for a tensor that is real, and has a name."""
        if self.around is None:
            return
        name = self.around.name_of(tensor)
        if id(tensor) in self.state.names:
            known = self.state.names[id(tensor)]
            raise CaptureError(f"{name or 'a tensor'} is parameter {known!r}; ask the module for it within the step")
        if name is not None:
            raise CaptureError(f"{name} is a tensor from outside; pass it as an argument, or make it a module's buffer")

    def _left(self, result: Any, before: Mapping[str, Any], acting: State) -> list[torch.Tensor]:
        """Return what the function returned and left; note what that is."""
        found: list[Any] = []

        def output(leaf: Any) -> Any:
            if not isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
                if not is_constant(leaf):
                    raise CaptureError(
                        f"a {type(leaf).__name__} is returned; tensors can be in tuples, lists and dicts"
                    )
                return leaf
            name = "result" if leaf is result else f"result.{len(found)}"
            self.left[name] = ()
            found.append(leaf)
            return _Output(name)

        self.graph.returned = transform(output, result)
        for name, item in acting.numbers().items():
            if item is not None and item != self.numbers.get(name):
                raise CaptureError(f"{name!r} is {item!r} after the step, and only what is kept in tensors can change")
        places = acting.places()
        for name, (place, tensor) in places.items():
            if tensor is not before.get(name):
                self.left[name] = place
                found.append(tensor)
        grads = {f"{name}.grad": ("grad", name) for name in self.state.parameters}
        self.graph.gone = tuple(place for name, place in grads.items() if name in before and name not in places)
        return found
