"""AOT: graphs that Dynamo traced and AOTAutograd split into forward and backward, as graphs of ours.

What torch does not promise to keep, about these two, stands here and nowhere else. Knows no machine and no schedule.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from autosched.errors import CaptureError
from autosched.frontends.operators import Operators
from autosched.graph import Graph, Value
from autosched.task import Origin

__all__ = ["Traced", "run_as_given", "split", "traced"]

Boxed = Callable[[list[Any]], Sequence[Any]]
Compile = Callable[[torch.fx.GraphModule, str, Sequence[str]], Boxed]  # of a module, its phase, the names of inputs


def split(module: torch.fx.GraphModule, inputs: Sequence[Any], compile: Compile) -> Callable[..., Any]:
    """Return as a function what Dynamo traced; ``compile`` is given the graphs that AOTAutograd makes of it.

    The graphs are those of ``backend="aot_eager"``, so that results can be the same to the last bit.
    """
    names = [_called(node) for node in module.graph.nodes if node.op == "placeholder"]

    def compiler(phase: str) -> Callable[..., Boxed]:
        def compiled(part: torch.fx.GraphModule, _: Sequence[Any]) -> Boxed:
            run = compile(part, phase, names)

            def boxed(arguments: list[Any]) -> Sequence[Any]:
                return run(arguments)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return compiled

    run: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(module, inputs)
    return run


def run_as_given(module: torch.fx.GraphModule, arguments: list[Any]) -> Sequence[Any]:
    """Run a graph as ``backend="aot_eager"`` does."""
    run: Boxed = boxed_nop(module, [])
    return run(arguments)


class Traced(Graph):
    """A graph that was split off, and how to call it as AOTAutograd does: with a list, for a list."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.given: dict[str, int] = {}  # inputs, by the position of their argument
        self.homes: dict[str, str] = {}  # the devices of outputs
        self.returned: list[tuple[str, Any]] = []  # an output's name, or nothing and what is no tensor

    def feed(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Return the inputs of a run."""
        return {name: arguments[position] for name, position in self.given.items()}

    def finish(self, outputs: Mapping[str, Any]) -> list[Any]:
        """Return what the graph returns."""
        return [outputs[name] if name else item for name, item in self.returned]


def traced(module: torch.fx.GraphModule, arguments: Sequence[Any], phase: str, names: Sequence[str]) -> Traced:
    """Return a graph that AOTAutograd made, for arguments of these shapes; numbers among them are baked in.

    Raises CaptureError, with the user's line, for what no graph can say.
    """
    graph = Traced(phase)
    shaped = _Shapes(module)
    shaped.find(arguments)
    operators = Operators(graph, {node: _origin(node, phase) for node in shaped.graph.nodes})
    for position, node in enumerate(shaped.graph.find_nodes(op="placeholder")):
        if isinstance(arguments[position], torch.Tensor):
            operators.values[node] = _input(graph, node, position, arguments[position], names)
        else:
            operators.values[node] = arguments[position]
    for node in shaped.graph.nodes:
        if node.op == "get_attr":
            held = operator.attrgetter(node.target)(module)
            operators.values[node] = graph.constant(held) if isinstance(held, torch.Tensor) else held
        elif node.op == "call_function":
            with _told(node):
                _add(operators, node)
        elif node.op == "output":
            _return(operators, node, names)
    for name, position in graph.given.items():
        if arguments[position].is_inference() and graph.last_version(graph.value(name).index):
            raise CaptureError(f"{name!r} is a tensor of inference mode and written, which no other thread may")
    return graph


# Operators of operators that leave their arguments as they are and make new memory.
_FUNCTIONAL = frozenset(
    ("auto_functionalized", "auto_functionalized_v2", "cond", "run_and_save_rng_state", "run_with_rng_state")
)


def _add(operators: Operators, node: torch.fx.Node) -> None:
    """Add the task of a node, unless it is a number that shapes alone tell."""
    if isinstance(node.meta["val"], (bool, int, float)):
        operators.values[node] = node.meta["val"]
    elif isinstance(node.target, HigherOrderOperator):
        operators.add(node, random=True)  # what is called inside may draw
    elif isinstance(node.target, OpOverload) or node.target is operator.getitem:
        operators.add(node)
    else:
        raise CaptureError("is no operator")


def _input(graph: Traced, node: torch.fx.Node, position: int, tensor: torch.Tensor, names: Sequence[str]) -> Value:
    """Add an input, which lives where the tensor lives that is there now; one on the CPU, on the host."""
    name = _named(node.meta.get("desc"), names) or node.name
    name = graph.fresh(name if name != "timeout" else "timeout_")  # a word that a schedule's call takes
    graph.given[name] = position
    with graph.on(str(tensor.device)) if tensor.device.type != "cpu" else contextlib.nullcontext():
        return graph.input(name)


def _return(operators: Operators, node: torch.fx.Node, names: Sequence[str]) -> None:
    """Declare the outputs: each under one name, however often it is returned."""
    graph, labels = operators.graph, dict[str, str]()
    assert isinstance(graph, Traced)
    items = node.args[0] if isinstance(node.args[0], (tuple, list)) else [node.args[0]]
    descriptions = node.meta.get("desc") or [None] * len(items)
    for item, description in zip(items, descriptions, strict=True):
        value = operators.values[item] if isinstance(item, torch.fx.Node) else item
        if not isinstance(value, Value):
            graph.returned.append(("", value))
            continue
        assert isinstance(item, torch.fx.Node)
        if value.name not in labels:
            labels[value.name] = label = _named(description, names) or value.name
            graph.output(**{label: value})
            graph.homes[label] = str(item.meta["val"].device)
        graph.returned.append((labels[value.name], None))


# ---- shapes


class _Shapes(torch.fx.Interpreter):
    """Finds what each node of a graph is on fake tensors, in a copy of the graph."""

    def __init__(self, module: torch.fx.GraphModule):
        super().__init__(module, garbage_collect_values=False, graph=copy.deepcopy(module.graph))
        self.extra_traceback = False

    def find(self, arguments: Sequence[Any]) -> None:
        """Note it for these arguments, as the nodes' ``val``: results that share memory do so there too."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            twins = [mode.from_tensor(item) if isinstance(item, torch.Tensor) else item for item in arguments]
            self.run(*twins, enable_io_processing=False)

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node, and note what comes of it."""
        with _told(n):
            if isinstance(n.target, HigherOrderOperator) and str(n.target) not in _FUNCTIONAL:
                raise CaptureError("is not known to do no more than to return tensors")
            n.meta["val"] = found = super().run_node(n)
        return found


@contextlib.contextmanager
def _told(node: torch.fx.Node) -> Iterator[None]:
    """Say of an error at which node, and which line of the user's, it was."""
    try:
        yield
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        said = first if isinstance(error, CaptureError) else f"{type(error).__name__}: {first}"
        file, line = _where(node)
        where = f"\n    at {file}:{line}" if line else ""
        raise CaptureError(f"{node.target} {said}{where}") from error


# ---- where things come from


def _called(node: torch.fx.Node) -> str:
    """Return the name of what Dynamo made a placeholder: a parameter's path, a variable's name."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return _path(str(name() if callable(name) else name)) or node.name


def _named(description: Any, names: Sequence[str]) -> str:
    """Return the name of what AOTAutograd describes: an input, or the gradient of one; else nothing."""
    if (of := getattr(description, "grad_of", None)) is not None:
        return f"{name}.grad" if (name := _named(of, names)) else ""
    if type(description).__name__ == "PlainAOTInput" and description.idx < len(names):
        return names[int(description.idx)]
    return str(getattr(description, "target", ""))


def _origin(node: torch.fx.Node, phase: str) -> Origin:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = _path([path for path, _ in stack.values()][-1]) if stack else ""
    return Origin(_where(node), module, "backward" if phase == "backward" else "forward")


def _where(node: torch.fx.Node) -> tuple[str, int]:
    """Return the user's line: the innermost one that was traced."""
    lines = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return (lines[-1][0], int(lines[-1][1])) if lines else ("<unknown>", 0)


_PLUMBING = ("_modules", "_parameters", "_buffers")


def _path(source: str) -> str:
    """Return the path that an expression of Dynamo's stands for; ``fn`` is how it calls a module of torch's own.

    >>> _path("L['self']._modules['fc1']._parameters['weight']"), _path("L['x']")
    ('fc1.weight', 'x')
    """
    words = [word for word in re.findall(r"\w+", source) if word not in _PLUMBING]
    for root in (("L", "G"), ("self", "fn")):
        words = words[1:] if words and words[0] in root else words
    return ".".join(words)
