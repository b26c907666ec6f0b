"""A backend for ``torch.compile`` that schedules the compiled graphs.

torch traces the code, guards it and differentiates it; this module schedules the resulting graphs.

``torch.compile(model, backend="autosched", options={"machine": machine})``, or
``backend=TorchBackend(machine)``: an object that returns its schedules on request. ``default``
returns those of all models that used the name.

Never fails where torch would not: a graph that cannot be captured or scheduled runs as torch gave
it, with one warning.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import operator
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from autosched._lib.allowed import WORDS
from autosched._lib.forks import rlock
from autosched._lib.recent import Recent
from autosched._lib.tree import flatten
from autosched.costs.costs import Costs
from autosched.costs.estimate import estimate
from autosched.errors import AutoschedError, CaptureError, ScheduleError, TaskError, listed, shown
from autosched.frontends.operators import Operators, common_device, storages
from autosched.frontends.reachability import GLOBAL_HOOKS
from autosched.frontends.specializations import Arguments
from autosched.frontends.unsupported import reason_of
from autosched.fusion import Compiler, compiler_of, fused
from autosched.graph.graph import Graph, Value
from autosched.graph.task import Origin
from autosched.machine.machine import Machine, given_or_local
from autosched.policies import Policy
from autosched.scheduling.binding import Binding
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule


class TorchBackend:
    """A backend for ``torch.compile``. The options are those of ``autosched.schedule``.

    ``costs`` may name tasks of several graphs; default: an estimate. ``backend`` is a name, or a
    function that makes one, since each serves one schedule. ``fuse``: whether Inductor compiles
    regions of operators, see ``autosched.fuse``; the default is to do so on real machines, and not
    on emulated ones; a function takes the place of Inductor. With ``fuse=False`` results equal
    those of the backend ``"aot_eager"`` bit for bit. Raises ScheduleError or MachineError for invalid options.

    >>> backend = TorchBackend(Machine.emulated(gpus=2), backend="virtual")
    >>> model = torch.compile(torch.nn.Linear(3, 2), backend=backend)
    >>> model(torch.ones(4, 3)).sum().backward()
    >>> [schedule.graph.name for schedule in backend.schedules()]
    ['forward', 'backward']
    """

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        policy: str | Policy = "auto",
        costs: Costs | None = None,
        backend: str | Callable[[], Any] | None = None,
        check: Any = False,
        fuse: bool | Compiler | None = None,
    ):
        self._machine = machine
        self._fuse = fuse
        self._costs = costs
        self._backend = backend
        self._options: dict[str, Any] = {"policy": policy, "check": check}
        self._runners: weakref.WeakValueDictionary[int, _Runner] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        ranks = machine.ranks if isinstance(machine, Machine) and machine.rank is not None else {}
        if len({*ranks.values()}) > 1:
            raise ScheduleError(
                "torch.compile compiles a graph on each rank by itself, and would get only the "
                "outputs made there; call autosched.compile for a machine of several ranks, or "
                "give each rank a machine of its own, Machine.local()"
            )
        # Errors that would later prevent schedules are raised now.
        if not isinstance(backend, str) and backend is not None and not callable(backend):
            raise ScheduleError(
                f"backend must be a name, or a function that makes one, got {shown(backend)}"
            )
        schedule(
            Graph(),
            Machine.emulated(gpus=0) if machine is None else machine,
            policy="auto" if callable(policy) else policy,
            costs=costs.restricted(Graph()) if isinstance(costs, Costs) else costs,
            backend=backend if isinstance(backend, str) else None,
            check=check,
        )

    def __call__(
        self,
        module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph that Dynamo traced. ``options`` override this backend's own."""
        chosen = self if not options else self._with(options)
        _guard_hooks()
        names = [_variable(node) for node in module.graph.nodes if node.op == "placeholder"]
        unused = _UnusedOutputs()

        def compiler(phase: str) -> Callable[..., _Runner]:
            def compiled(part: torch.fx.GraphModule, _: Sequence[Any]) -> _Runner:
                made = _Runner(part, phase, names, unused, chosen)
                self._runners[next(self._numbers)] = made
                return made

            return compiled

        run: Callable[..., Any] = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )(module, inputs)

        def noting(*arguments: Any) -> Any:
            results = run(*arguments)
            unused.note(results)
            return results

        return noting

    @functools.cached_property
    def machine(self) -> Machine:
        """The machine on which graphs run."""
        return given_or_local(self._machine)

    def schedules(self) -> tuple[Schedule, ...]:
        """Return the schedules that are in use, in the order in which torch compiled graphs.

        A graph has none before its first call, and then one for each shape. Schedules of functions
        that no longer exist are not included.
        """
        runners = list(self._runners.values())
        return tuple(made for runner in runners for made in runner.schedules())

    def reset(self) -> None:
        """Close all schedules; ``torch._dynamo.reset()`` calls this. Later calls make new ones."""
        for runner in list(self._runners.values()):
            runner.reset()

    def _with(self, options: Mapping[str, Any]) -> TorchBackend:
        known = list(inspect.signature(TorchBackend).parameters)
        for name in options:
            if name not in known:
                raise ScheduleError(
                    f"unknown option {name!r}; options of backend 'autosched' are {listed(known)}"
                )
        return TorchBackend(**options)

    def plan(self, graph: AotGraph, examples: Mapping[str, Any]) -> Schedule:
        """Schedule a graph with its outputs on the devices of torch."""
        if self._costs is not None:
            costs = self._costs.restricted(graph)
        else:
            estimated = estimate(graph, examples)
            estimated.warn(graph)
            costs = estimated.costs
        own = self._backend if callable(self._backend) else None
        options = {
            **self._options,
            "outputs": graph.homes,
            "backend": self._backend if own is None else None,
        }
        if not self.machine.imagined if self._fuse is None else self._fuse:
            options["compiler"] = None if self._fuse is None else compiler_of(self._fuse)
            made = fused(graph, self.machine, costs, examples=examples, **options).schedule
        else:
            made = schedule(graph, self.machine, costs=costs, **options)
        return made if own is None else dataclasses.replace(made, backend=own())


class _Runner:
    """Calls a graph of AOTAutograd, by a schedule for each shape; ``names`` are Dynamo's."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        phase: str,
        names: Sequence[str],
        unused: _UnusedOutputs,
        backend: TorchBackend,
    ):
        self.module = module
        self.phase = phase
        self.names = names
        self.unused = unused
        self.backend = backend
        self._boxed_call = True  # it is called with a list, and clears it
        # A thread may be in what it drops.
        self._cache: Recent[Hashable, tuple[AotGraph, Schedule] | None] = Recent()
        self._warned = False
        self._lock = rlock()

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the graph. Raises the errors of its operators."""
        if self.phase != "backward":
            return self._results(arguments)
        has_gradient = self.unused.take()
        return _gradients(self.module, self._results(arguments), has_gradient)

    def _results(self, arguments: list[Any]) -> Sequence[Any]:
        with self._lock:
            found = self._find(arguments)
        if found is None:
            run: Callable[..., Sequence[Any]] = boxed_nop(self.module, [])  # as "aot_eager" does
            return run(arguments)
        graph, made = found
        inputs = graph.feed(arguments)
        arguments.clear()  # the caller has no other use for them
        try:
            with torch.no_grad():  # AOTAutograd computes the gradients
                return graph.finish(made(**inputs))
        except TaskError as error:
            cause = error.__cause__
            assert cause is not None
            cause.add_note(str(error))
            raise cause from None

    def _find(self, arguments: Sequence[Any]) -> tuple[AotGraph, Schedule] | None:
        """Return the graph and schedule for such arguments; None, with one warning, if it has none."""
        given = Arguments(arguments, {})
        key = given.key, *map(id, given.others)
        found = self._cache.get(key)
        if key not in self._cache:
            try:
                host = self.backend.machine.host
                graph = AotGraph(self.module, arguments, self.phase, self.names, host)
                found = graph, self.backend.plan(graph, graph.feed(arguments))
            except Exception as error:
                ours = isinstance(error, AutoschedError)
                why = f"{error}" if ours else f"{type(error).__name__}: {error}"
                if not self._warned:
                    message = f"torch.compile's {self.phase} graph runs without a schedule: {why}"
                    warnings.warn(message, stacklevel=2)
                self._warned = True
        self._cache.use(key, found)
        return found

    def schedules(self) -> list[Schedule]:
        with self._lock:
            return [found[1] for found in self._cache.values() if found is not None]

    def reset(self) -> None:
        with self._lock:
            for made in self.schedules():
                made.close()
            self._cache.clear()


default = TorchBackend()  # for the name "autosched"


# ---- graphs of AOTAutograd
#
# AOTAutograd splits what Dynamo traced into forward and backward. Everything that depends on
# properties of these two that torch does not guarantee is below. Knows no machine and no
# schedule.
#
# The graphs are those of torch's backend ``aot_eager``, which calls the same kernels on the same
# shapes, so the results are equal by construction. Shapes are computed for the arguments of each
# call, on fake tensors. So graphs with and without symbolic shapes take the same path, and memory is
# shared between values exactly where it is shared in that call.

_MOST_VIEWS = 8  # between an output and the tensor that a graph computed


class _UnusedOutputs(threading.local):
    """The outputs of a forward that have no gradient in a backward pass.

    AOTAutograd gives their gradients as zeros, and would return zeros where eager code leaves no
    gradient: for parameters on which only these outputs depend.
    """

    def __init__(self) -> None:
        self.has_gradient: list[bool] = []  # of each differentiable output

    def note(self, results: Any) -> None:
        """Let the backward of these outputs note which have a gradient, before it begins."""
        sources = [_source(item) for item in results if isinstance(item, torch.Tensor)]
        found = {(node, slot) for node, slot in sources if _is_compiled(node)}
        nodes = {node for node, _ in found}
        if len(found) < 2 or len(nodes) > 1:  # some are views of other results
            return
        slots = sorted(slot for _, slot in found)

        def before(gradients: Sequence[Any]) -> None:
            self.has_gradient = [gradients[slot] is not None for slot in slots]

        nodes.pop().register_prehook(before)

    def take(self) -> list[bool]:
        """Return, once, which outputs have a gradient; nothing if that is not known."""
        found, self.has_gradient = self.has_gradient, []
        return found


def _source(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return the node of autograd that computes an output, or what it is a view of."""
    node, slot = tensor.grad_fn, tensor.output_nr
    for _ in range(_MOST_VIEWS):
        if node is None or len(node.next_functions) != 1 or _is_compiled(node):
            break
        node, slot = node.next_functions[0]
    return node, slot


def _is_compiled(node: Any) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"


def _gradients(
    part: torch.fx.GraphModule, results: Sequence[Any], has_gradient: Sequence[bool]
) -> Sequence[Any]:
    """Return the results of a backward, None for those that eager code does not compute."""
    tangents = [node for node in part.graph.nodes if node.name.startswith("tangents_")]
    if all(has_gradient) or len(tangents) != len(has_gradient):
        return results
    given = dict(zip(tangents, has_gradient, strict=True))
    used = _users(node for node in tangents if given[node])
    idle = _users(node for node in tangents if not given[node]) - used
    nodes: Any = next(iter(reversed(part.graph.nodes))).args[0]
    pairs = zip(nodes, results, strict=True)
    return [None if node in idle else result for node, result in pairs]


def _users(nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return nodes, and those that need them."""
    found = set(nodes)
    pending = [*found]
    while pending:
        new = pending.pop().users.keys() - found
        found |= new
        pending += new
    return found


def _guard_hooks() -> None:
    """Have Dynamo guard the numbers of modules' hooks, which it supposes not to change."""
    context = TracingContext.try_get()
    if context is None:
        return
    guards = context.guards_context.dynamo_guards
    for guard in list(guards):
        source = guard.originating_source
        of_module = guard.create_fn is GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT
        if of_module or (isinstance(source, AttrSource) and source.member in GLOBAL_HOOKS):
            guards.add(source.make_guard(GuardBuilder.SEQUENCE_LENGTH))


class AotGraph(Graph, Binding):
    """A forward or backward graph, called with a list for a list; for arguments of these shapes.

    Numbers among them become constants. ``names`` are those of what Dynamo traced. Raises
    CaptureError, with the user's line, for what a graph cannot express.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        arguments: Sequence[Any],
        phase: str,
        names: Sequence[str],
        host: str,  # the device of tensors on the CPU
    ) -> None:
        super().__init__(phase)
        self._names = names
        self._host = host
        self.given: dict[str, int] = {}  # inputs, by the position of their argument
        self.homes: dict[str, str] = {}  # the devices of outputs
        # An output's name; or "", and a result that is not a tensor.
        self.returned: list[tuple[str, Any]] = []
        self._build(module, arguments)
        for name, position in self.given.items():
            if arguments[position].is_inference() and self.last_version(self.value(name).index):
                raise CaptureError(
                    f"{name!r} is a tensor of inference mode and written, which other threads "
                    "cannot do; use torch.no_grad() instead"
                )

    def feed(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Return the inputs of a run."""
        return {name: arguments[position] for name, position in self.given.items()}

    def finish(self, outputs: Mapping[str, Any]) -> list[Any]:
        """Return what the graph returns."""
        return [outputs[name] if name else item for name, item in self.returned]

    def _build(self, module: torch.fx.GraphModule, arguments: Sequence[Any]) -> None:
        nodes = _with_shapes(module, arguments)
        origins = {node: _origin(node, self.name) for node in nodes}
        device = common_device(filter(torch.is_tensor, arguments))
        operators = Operators(self, origins, device)
        together = _returned_together(nodes[-1])
        positions = itertools.count()
        for node in nodes:
            if node.op == "placeholder":
                position = next(positions)
                operators.values[node] = self._input(node, position, arguments[position])
            elif node.op == "get_attr":
                held = operator.attrgetter(str(node.target))(module)
                is_tensor = isinstance(held, torch.Tensor)
                operators.values[node] = self.constant(held) if is_tensor else held
            elif node.op == "call_function":
                with _naming(node), self._on(node, not together.isdisjoint(storages(node))):
                    _add(operators, node)
        self._return(nodes[-1], operators.values)

    def _input(self, node: torch.fx.Node, position: int, argument: Any) -> Any:
        """Add an input on the device of the tensor; return any other argument."""
        if not isinstance(node.meta["val"], torch.Tensor):
            return node.meta["val"]
        name = _described(node.meta.get("desc"), self._names) or node.name
        name = self.fresh(f"{name}_" if name in WORDS else name)
        self.given[name] = position
        # Dynamo marks parameters and buffers of modules.
        if getattr(argument, "_dynamo_static_input_type", None) is not None:
            self.state_inputs |= {name}
        with self._on(node, node.meta["val"].device.type != "cpu"):
            return self.input(name)

    def _return(self, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> None:
        """Declare the outputs, each under one name."""
        labels: dict[str, str] = {}
        for item, description in _results(node):
            value = values[item] if isinstance(item, torch.fx.Node) else item
            if not isinstance(value, Value):
                self.returned.append(("", value))
                continue
            if value.name not in labels:
                labels[value.name] = label = _described(description, self._names) or value.name
                self.output(**{label: value})
                self.homes[label] = self._home(item)
            self.returned.append((labels[value.name], None))

    def _home(self, node: torch.fx.Node) -> str:
        """Return the device on which torch has a node's result."""
        tensors = (item for item in flatten(node.meta["val"]) if isinstance(item, torch.Tensor))
        device = next(tensors).device
        return self._host if device.type == "cpu" else str(device)

    def _on(self, node: torch.fx.Node, bound: bool) -> contextlib.AbstractContextManager[None]:
        """Place tasks on a node's device, if ``bound``."""
        return self.on(self._home(node)) if bound else contextlib.nullcontext()


# Higher-order operators that do not change their arguments, and return new memory.
_FUNCTIONAL = frozenset(
    (
        *("auto_functionalized", "auto_functionalized_v2", "cond"),
        *("run_and_save_rng_state", "run_with_rng_state"),
    )
)


def _add(operators: Operators, node: torch.fx.Node) -> None:
    """Add the task of a node, unless its result is a number."""
    if isinstance(node.meta["val"], (bool, int, float)):
        operators.values[node] = node.meta["val"]
    elif isinstance(node.target, HigherOrderOperator):
        operators.add(node, random=True)  # its inner functions may draw
    elif isinstance(node.target, OpOverload) or node.target is operator.getitem:
        operators.add(node)
    else:
        raise CaptureError("is not an operator")


def _results(output: torch.fx.Node) -> list[tuple[Any, Any]]:
    """Return what a graph returns, each with AOTAutograd's description."""
    items = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    return list(zip(items, output.meta.get("desc") or [None] * len(items), strict=True))


def _returned_together(output: torch.fx.Node) -> set[int]:
    """Return the memory that several results share which the user sees: copies would not."""
    nodes = {
        item: None
        for item, description in _results(output)
        if not type(description).__name__.startswith("SavedForBackwards")
        and isinstance(item, torch.fx.Node)
    }
    counts = Counter(storage for node in nodes for storage in storages(node))
    return {storage for storage, count in counts.items() if count > 1}


# ---- shapes


def _with_shapes(module: torch.fx.GraphModule, arguments: Sequence[Any]) -> list[torch.fx.Node]:
    """Return copies of nodes with fake tensors as ``val``, which share memory as results do."""
    shapes = _Shapes(module, garbage_collect_values=False, graph=copy.deepcopy(module.graph))
    shapes.extra_traceback = False
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), fakes:
        twins = [
            fakes.from_tensor(item) if isinstance(item, torch.Tensor) else item
            for item in arguments
        ]
        shapes.run(*twins, enable_io_processing=False)
    return list(shapes.graph.nodes)


class _Shapes(torch.fx.Interpreter):
    def run_node(self, n: torch.fx.Node) -> Any:
        with _naming(n):
            if isinstance(n.target, HigherOrderOperator) and str(n.target) not in _FUNCTIONAL:
                raise CaptureError("is not known to return new tensors and have no other effect")
            n.meta["val"] = found = super().run_node(n)
        return found


@contextlib.contextmanager
def _naming(node: torch.fx.Node) -> Iterator[None]:
    """Add to an error the node and the user's line."""
    try:
        yield
    except Exception as error:
        file, line = _line(node)
        where = f"\n    at {file}:{line}" if line else ""
        raise CaptureError(f"{node.target} {reason_of(error)}{where}") from error


# ---- names and source lines


def _variable(node: torch.fx.Node) -> str:
    """Return the parameter's path or variable of a placeholder of Dynamo."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return _path(str(name() if callable(name) else name)) or node.name


def _described(description: Any, names: Sequence[str]) -> str:
    """Return the name of the input, or of its gradient, that a description refers to, or ""."""
    if (source := getattr(description, "grad_of", None)) is not None:
        name = _described(source, names)
        return f"{name}.grad" if name else ""
    if type(description).__name__ == "PlainAOTInput" and description.idx < len(names):
        return names[int(description.idx)]
    return str(getattr(description, "target", ""))


def _origin(node: torch.fx.Node, phase: str) -> Origin:
    """Return the user's line, the module and the phase; of backward, those of its forward node."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = _path([path for path, _ in stack.values()][-1]) if stack else ""
    return Origin(_line(node), module, "backward" if phase == "backward" else "forward")


def _line(node: torch.fx.Node) -> tuple[str, int]:
    """Return the innermost user's line that was traced."""
    lines = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return (lines[-1][0], int(lines[-1][1])) if lines else ("<unknown>", 0)


def _path(source: str) -> str:
    """Return the path in an expression of Dynamo.

    There ``fn`` is the name of a module of torch's own.

    >>> _path("L['self']._modules['fc1']._parameters['weight']"), _path("L['x']")
    ('fc1.weight', 'x')
    """
    internal = ("_modules", "_parameters", "_buffers")
    words = [word for word in re.findall(r"\w+", source) if word not in internal]
    for root in (("L", "G"), ("self", "fn")):
        words = words[1:] if words and words[0] in root else words
    return ".".join(words)
