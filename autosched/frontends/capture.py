"""Capture a PyTorch function, module or training step as a graph.

Each ATen operator becomes a task. The function runs once on fake tensors, which have shapes and no
data, while ``make_fx`` traces forward, backward and optimizer. Tensors of modules and optimizers
that it uses become inputs, as its arguments do. Tensors that it leaves there and that were not
there before, such as the moments of a new optimizer, become outputs.

A capture keeps in-place operators, and finds dependencies from operator schemas and storages. A
functional graph would have the same dependencies, only hidden in copies at its end.

Values that are not tensors become constants of the graph: shapes, learning rates, training flags.
An argument that names the device of the capture means "the device of the task" (``Here``), so a
step that was captured on one device runs on any. Any other device is kept, and fixes the device of
the task. Knows no machine.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autosched._lib.fake_tensors import Fakes
from autosched._lib.gc_pause import without_collecting
from autosched._lib.logs import LOG
from autosched._lib.quiet import quiet
from autosched._lib.tree import flatten, transform
from autosched.coarsening.grouping import Granularity, check_granularity
from autosched.errors import CaptureError, GraphError
from autosched.frontends.asking import Asked, answered, warn_of_asking
from autosched.frontends.attention import fast_paths
from autosched.frontends.caches import Made, emptied_caches_of
from autosched.frontends.calls import Call, calls_noted, warn_of
from autosched.frontends.drawn import Drawn
from autosched.frontends.exclusive import capturing
from autosched.frontends.faithful import as_eagerly
from autosched.frontends.granularity import coarse
from autosched.frontends.kept import check_kept, is_constant, looks_of
from autosched.frontends.operators import Operators, usual_device
from autosched.frontends.origins import origins, written_down
from autosched.frontends.reach import is_plain
from autosched.frontends.reach import told as told_of
from autosched.frontends.refusals import (
    check_held,
    check_modes,
    check_nodes,
    check_tensors,
    defined,
    drawing_nothing,
    told,
)
from autosched.frontends.seeds import seeds_written_down, settled
from autosched.frontends.state import State
from autosched.frontends.surroundings import Surroundings
from autosched.frontends.updates import Updates
from autosched.graph.graph import Graph, Value
from autosched.graph.task import Followed

__all__ = ["Captured", "arguments_of", "capture", "captured", "leaves"]


@dataclass(frozen=True)
class _Output:
    """A placeholder for a tensor in the function's result: the output of this name."""

    name: str


class Captured(Graph):
    """A captured graph, and how to run it on the function's arguments.

    It, and its schedules, are called with the arguments of the function. The tensors that modules
    and optimizers hold at that time are passed to the run, and new state, such as gradients, is put
    back. A call that names all inputs, parameters too, is given those and puts nothing back;
    ``feed`` and ``finish`` do the two steps separately. Values that are not tensors, such as
    learning rates and flags, keep their value at the time of the capture; ``compile`` recaptures if
    they change. ``examples`` are the inputs with which it was captured, by name.

    >>> import autosched as asc
    >>> model = torch.nn.Linear(3, 2)
    >>> graph = capture(model, x := torch.ones(4, 3))
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=1), backend="host")
    >>> torch.equal(schedule(x)["result"], model(x)), graph.finish(schedule(input=x)).shape
    (True, torch.Size([4, 2]))
    """

    def __init__(self, fn: Callable[..., Any], state: State, examples: Mapping[str, Any]):
        super().__init__(re.sub(r"\W", "", getattr(fn, "__name__", type(fn).__name__)) or "step")
        self.fn = fn
        self.state = state
        self.examples = examples
        self.held = frozenset(state.tensors())  # the inputs that modules and optimizers hold
        self.constants: dict[str, Any] = {}  # arguments that are no tensors, by their paths
        self.returned: Any = None
        self.made: dict[str, tuple[str, ...]] = {}  # outputs that are new state, and their places
        self.gone: tuple[tuple[str, ...], ...] = ()  # places that are empty afterwards
        self.switched: list[
            tuple[dict[str, Any], str, Any]
        ] = []  # attributes, and their later values

    def feed(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the inputs of a run: tensors among these arguments, and those in modules and optimizers now.

        Raises GraphError if a number among the arguments differs from that of the capture.
        """
        found: dict[str, Any] = {**self.state.tensors()}
        for path, leaf in _named_leaves(self.fn, args, kwargs):
            if isinstance(leaf, torch.Tensor):
                found[path] = leaf
            elif (
                is_plain(leaf)
                and path in self.constants
                and told_of(leaf) != told_of(self.constants[path])
            ):
                raise GraphError(
                    f"{path!r} is {leaf!r}, and was {self.constants[path]!r} when {self.name!r} was captured, where it "
                    f"stays as it was; capture it again, or use autosched.compile, which does so by itself"
                )
        return found

    def completed(
        self, args: Sequence[Any], inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], Any] | None]:
        """Return the inputs of a run, completed from modules and optimizers if none is given.

        And ``finish``.

        Raises GraphError if they hold other tensors than at the time of the capture.
        """
        named = inputs.keys() & self.held
        if not args and (named or (not self.held and inputs.keys() == set(self.input_names))):
            return inputs, None  # if some are missing, the run says so
        found = self.feed(*args, **inputs) if args or inputs.keys() - self.names.keys() else None
        if found is None:
            found = {**self.state.tensors(), **inputs}
        for name in sorted(found.keys() ^ set(self.input_names)):
            if name in self.held:
                raise GraphError(
                    f"{name!r}, which was there when {self.name!r} was captured, is gone{_AGAIN}"
                )
            if name in found and name not in inputs:
                raise GraphError(
                    f"{name!r} was not there yet when {self.name!r} was captured{_AGAIN}"
                )
        return found, self.finish

    def finish(self, outputs: Mapping[str, Any]) -> Any:
        """Put new state where it belongs, and return the function's result."""
        for name, place in self.made.items():
            self.state.put(place, outputs[name])
        for place in self.gone:
            self.state.put(place, None)
        for attributes, name, item in self.switched:
            attributes[name] = item
        return transform(
            lambda leaf: outputs[leaf.name] if isinstance(leaf, _Output) else leaf, self.returned
        )


def capture(
    fn: Callable[..., Any], /, *args: Any, granularity: Granularity = "op", **kwargs: Any
) -> Captured:
    """Return as a graph what ``fn(*args, **kwargs)`` does, without executing it on data.

    ``fn`` is a function of tensors, an ``nn.Module``, or a step that calls ``backward()`` and
    ``optimizer.step()``; modules and optimizers are found among its arguments and in its closure.
    Inputs have the names of parameters and buffers (``fc1.weight``), of arguments as in the
    signature, ``fc1.weight.grad`` and ``optimizer.fc1.weight.exp_avg``. By default a task is an
    operator; with ``granularity="module"`` it is a call of a module, forward or backward, and with
    ``"auto"`` a chain of operators or several small ones. Raises CaptureError, with the user's
    line, for what a graph cannot express.

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
        raise CaptureError(
            f"{name!r} has a parameter 'granularity', a word that capture takes; wrap it in a lambda"
        )
    graph = captured(fn, args, kwargs)
    return coarse(graph, granularity, graph.examples)


def captured(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Like ``capture``, with a task for each operator, also those of marked functions."""
    check_modes()
    with capturing():
        return _captured(fn, args, kwargs)


def _captured(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    state = State.of(fn, [*args, *kwargs.values()])
    given = arguments_of(fn, args, kwargs)
    held = state.tensors()
    for name in given.keys() & held.keys():
        raise CaptureError(
            f"two inputs would be called {name!r}: an argument, and what a module or optimizer holds"
        )
    graph = Captured(fn, state, {**held, **given})
    graph.constants = {
        path: leaf for path, leaf in _named_leaves(fn, args, kwargs) if is_plain(leaf)
    }
    check_tensors(graph.examples)
    check_held(state)
    begun = time.perf_counter()
    _Builder(graph).build(args, kwargs)
    LOG.info("captured %r: %d tasks in %.3g s", graph.name, len(graph), time.perf_counter() - begun)
    return graph


def arguments_of(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the tensors among a call's arguments, by the names of the parameters."""
    return {
        name: leaf
        for name, leaf in _named_leaves(fn, args, kwargs)
        if isinstance(leaf, torch.Tensor)
    }


def _named_leaves(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return the leaves of a call's arguments, by the names of the parameters."""
    try:
        call = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).bind(
            *args, **kwargs
        )
    except ValueError:  # a builtin, of which Python cannot tell
        named: dict[str, Any] = {**{f"arg{i}": item for i, item in enumerate(args)}, **kwargs}
    except TypeError as error:
        raise CaptureError(
            f"{getattr(fn, '__qualname__', fn)!r} cannot be called like that: {error}"
        ) from None
    else:
        named = dict(call.arguments)
        for name, parameter in call.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named.update(named.pop(name, {}))
    found: list[tuple[str, Any]] = []
    tensors: set[str] = set()
    for path, leaf in leaves(named):
        name = re.sub(r"[\s@]", "_", path)
        if name in tensors:
            raise CaptureError(f"two arguments would be called {name!r}; rename one")
        if isinstance(leaf, torch.Tensor):
            tensors.add(name)
        found.append((name, leaf))
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


_AGAIN = "; capture it again now that it is so, or use autosched.compile, which does so by itself"


def _number(generator: Any) -> int:
    """Return torch's number of a generator, which can have several Python objects."""
    return int(generator._cdata)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from or during."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        found = pending.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            pending += [found.__cause__, found.__context__]


class _Builder:
    """Runs the function on fake tensors, and converts the traced nodes to tasks."""

    def __init__(self, graph: Captured):
        self.graph = graph
        self.state = graph.state
        self.left: dict[
            str, tuple[str, ...]
        ] = {}  # places of outputs; none for the function's result
        self.following: list[str] = []  # outputs that require grad
        self.rewritten: list[str] = []  # inputs that have another history of autograd's afterwards
        self.numbers = self.state.numbers()
        self.around: Surroundings | None = None  # while the function runs
        self.generators: set[int] = set()  # those that are there before, by torch's number
        self.calls: list[Call] = []  # of the host, which a graph does not do
        self.met: torch.Tensor | None = None  # the last tensor from outside

    def build(self, args: Any, kwargs: Any) -> None:
        traced = self._trace(args, kwargs)
        if torch.is_grad_enabled():
            given = frozenset(
                name for name, tensor in self.graph.examples.items() if tensor.requires_grad
            )
            self.graph.followed = Followed(given, frozenset(self.following), tuple(self.rewritten))
        random = settled(traced.graph)
        nodes = list(traced.graph.nodes)
        check_nodes(nodes)
        updates = Updates(nodes, self._places(nodes))
        where = origins(nodes, defined(self.graph.fn), updates.owner)
        on_host = updates.on_host | random
        operators = Operators(
            self.graph, where, usual_device(self.graph.examples.values()), on_host
        )
        names = iter(self.graph.examples)
        for node in nodes:
            if node.op == "placeholder":
                operators.values[node] = self._input(next(names))
            elif node.op == "get_attr":
                operators.values[node] = self._constant(getattr(traced, node.target), node)
            elif node.op == "call_function":
                self._add(operators, node)
            elif node.op == "output":
                results = [operators.values[item] for item in node.args[0]]
                self.graph.output(**dict(zip(self.left, results, strict=True)))
        self.graph.made = {name: place for name, place in self.left.items() if place}
        for bond in updates.bonds():
            self.graph.together(*[operators.values[node] for node in bond])
        warn_of(self.calls, self.graph.name)

    def _constant(self, item: Any, node: torch.fx.Node) -> Value:
        """Add a constant that the step holds itself.

        A generator must exist before, because its state continues from run to run.
        """
        if isinstance(item, torch.Generator) and _number(item) not in self.generators:
            custom = next(iter(node.users)).meta.get("custom") or {}
            file, line = custom.get("where", ("", 0))
            raise CaptureError(
                "the step draws from a torch.Generator that it makes itself, and in a graph its state would go on from "
                "call to call; use torch.manual_seed in torch.random.fork_rng(), or pass a generator as an argument"
                + (f"\n    at {file}:{line}" if file else "")
            )
        return self.graph.constant(item)

    def _add(self, operators: Operators, node: torch.fx.Node) -> None:
        try:
            operators.add(node)
        except GraphError as error:
            where = "{}:{}".format(*operators.origins[node].where)
            raise CaptureError(
                f"{str(error).partition(';')[0]}; write in place, with copy_\n    at {where}"
            ) from error

    def _places(self, nodes: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, tuple[str, ...]]:
        """Return the places at which the values of nodes were held, or will be."""
        held = {name: place for name, (place, _) in self.state.places().items()}
        given = zip(
            [node for node in nodes if node.op == "placeholder"], self.graph.examples, strict=True
        )
        found = {node: held[name] for node, name in given if name in held}
        left = zip(nodes[-1].args[0], self.left.values(), strict=True)  # type: ignore[arg-type]
        return found | {node: place for node, place in left if place}

    def _input(self, name: str) -> Value:
        """Add an input on the device of the present tensor; one on the CPU, on the host."""
        device = str(self.graph.examples[name].device)
        with self.graph.on(device) if device != "cpu" else contextlib.nullcontext():
            return self.graph.input(name)

    # ---- tracing

    @without_collecting()
    def _trace(self, args: Any, kwargs: Any) -> torch.fx.GraphModule:
        examples = self.graph.examples
        number = {id(item): i for i, item in enumerate(examples.values())}

        def step(fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            given = transform(
                lambda leaf: fakes[number[id(leaf)]] if id(leaf) in number else leaf,
                (list(args), dict(kwargs)),
            )
            before = dict(zip(examples, fakes, strict=True))
            with (
                self.state.acting_on(before) as acting,
                self._watching(before, given),
                as_eagerly(),
            ):
                result = self.graph.fn(*given[0], **given[1])
                return self._left(result, before, acting)

        made = Made()
        try:
            with self.state.put_aside(), torch.autograd.set_multithreading_enabled(False):
                traced = self._tried(step, made)
        except BaseException as error:
            # Frames hold tensors, too, which the step has not left anywhere.
            for failed in _chain(error):
                traceback.clear_frames(failed.__traceback__)
            made.removed()
            raise
        if places := made.removed(
            leaf for node in traced.graph.nodes for leaf in flatten(node.meta.get("val"))
        ):
            left = CaptureError(
                f"a tensor of the step is left in {places[0]}, which a graph would not do; keep it in a buffer of a "
                f"module, return it, or put it there outside of the step"
            )
            raise CaptureError(told(self.graph.fn, left))
        return traced

    def _tried(self, step: Callable[..., Any], made: Made) -> torch.fx.GraphModule:
        """Trace a step.

        Trace it again if a cache returned what was computed before, or if the eager path cannot be
        captured.
        """
        examples = list(self.graph.examples.values())
        asked = Asked()
        why = ""
        while True:
            self.met = None
            try:
                with (
                    quiet(),
                    answered(asked),
                    calls_noted() as self.calls,
                    drawing_nothing(),
                    seeds_written_down(),
                    written_down(self.state.modules, self._refuse, made.note),
                    fast_paths(),
                ):
                    fakes = Fakes()
                    traced = make_fx(step, tracing_mode="fake")(
                        [fakes.from_tensor(x) for x in examples]
                    )
            except Exception as error:
                if self.met is not None and emptied_caches_of(self.met):
                    continue
                if not asked.lines or asked.told:
                    raise CaptureError(told(self.graph.fn, error)) from error
                asked.told, why = True, told(self.graph.fn, error).partition(" ")[2]
            else:
                if why:
                    warn_of_asking(asked.lines[-1], why, defined(self.graph.fn))
                return traced

    @contextlib.contextmanager
    def _watching(self, before: Mapping[str, torch.Tensor], given: Any) -> Iterator[None]:
        """Raise CaptureError for changes that a graph cannot make."""
        self.around = around = Surroundings([self.graph.fn, given], self.state.modules)
        histories = {name: tensor.grad_fn for name, tensor in before.items()}
        looks = looks_of(before)
        drawn = Drawn(around.found)
        found = [torch.default_generator, *around.found]
        self.generators = {_number(item) for item in found if isinstance(item, torch.Generator)}
        try:
            yield
            check_kept(looks, looks_of(before), [before[name] for name in self.state.parameters])
            if (change := around.change()) is not None:
                raise CaptureError(
                    f"{change} after the step, and what can change is tensors in modules and optimizers, and switches; "
                    f"keep it in a buffer, return it, or change it outside of the step, as schedulers do"
                )
            if (moved := drawn.moved()) is not None:
                name = around.name_of(moved) or "a thing that the step reaches"
                raise CaptureError(
                    f"{name}, a {type(moved).__name__}, is not as it was after the step: what the step takes from it, "
                    f"or changes in it, a graph would do only once; do it outside, and pass what it gives as a tensor"
                )
            self.graph.switched = around.switched()
            self.rewritten = [
                name for name, tensor in before.items() if tensor.grad_fn is not histories[name]
            ]
        finally:
            drawn.restore()
            self.around = None
            around.restore()

    def _refuse(self, tensor: torch.Tensor) -> None:
        """Raise CaptureError for a tensor that has data, and has a name."""
        if self.around is None:
            return
        self.met = tensor
        name = self.around.name_of(tensor)
        if id(tensor) in self.state.names:
            known = self.state.names[id(tensor)]
            raise CaptureError(
                f"{name or 'a tensor'} is parameter {known!r}; ask the module for it within the step"
            )
        if name is not None:
            raise CaptureError(
                f"{name} is a tensor from outside; pass it as an argument, or make it a module's buffer"
            )

    def _left(self, result: Any, before: Mapping[str, Any], acting: State) -> list[torch.Tensor]:
        """Return the function's result and new state, and store their structure."""
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
                raise CaptureError(
                    f"{name!r} is {item!r} after the step, and only what is kept in tensors can change"
                )
        places = acting.places()
        for name, (place, tensor) in places.items():
            if tensor is not before.get(name):
                self.left[name] = place
                found.append(tensor)
        grads = {f"{name}.grad": ("grad", name) for name in self.state.parameters}
        self.graph.gone = tuple(
            place for name, place in grads.items() if name in before and name not in places
        )
        tensors = zip(self.left, found, strict=True)
        self.following = [
            name for name, item in tensors if isinstance(item, torch.Tensor) and item.requires_grad
        ]
        return found
