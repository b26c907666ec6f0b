"""Captured graphs, and how they are called with a function's arguments.

Knows neither tracing nor machines.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autosched._lib.containers import leaves, with_leaves
from autosched.errors import CaptureError, GraphError
from autosched.frontends.reachability import is_value, value_key
from autosched.frontends.settings import Settings
from autosched.frontends.state import Place, State
from autosched.graph.graph import Graph, run_serial
from autosched.scheduling.binding import Binding, Finish

_AGAIN = "; capture it again, or use autosched.compile, which recaptures by itself"


class Output:
    """A placeholder for a tensor in the function's result."""

    def __init__(self, name: str):
        self.name = name


class Captured(Graph, Binding):
    """A captured graph, and how to run it on the function's arguments.

    It, and its schedules, are called with the arguments of the function. The tensors that modules
    and optimizers hold at that time are passed to the run, and new state, such as gradients, is put
    back. A call that names all inputs, parameters too, is given those and puts nothing back;
    ``feed`` and ``finish`` do the two steps separately. Values that are not tensors keep their
    value at the time of the capture: learning rates, flags; ``compile`` recaptures if they change.
    Schedules keep state on devices: on real ones, copies of what no task writes, which are made
    again when other code has changed it.
    ``examples`` are the inputs with which it was captured, by name.

    >>> import autosched as asc
    >>> model = torch.nn.Linear(3, 2)
    >>> graph = asc.capture(model, x := torch.ones(4, 3))
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=1), backend="host")
    >>> torch.equal(schedule(x)["result"], model(x)), graph.finish(schedule(input=x)).shape
    (True, torch.Size([4, 2]))
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        super().__init__(re.sub(r"\W", "", getattr(fn, "__name__", type(fn).__name__)) or "step")
        self.fn = fn
        self.state = State.of(fn, [*args, *kwargs.values()])
        named = _named_leaves(fn, args, kwargs)
        given = _tensors(named)
        held = self.state.tensors()
        self.held = frozenset(held)  # the inputs that modules and optimizers hold
        places = self.state.places().items()
        self.state_inputs = frozenset(name for name, (place, _) in places if place[0] != "grad")
        for name in given.keys() & held.keys():
            raise CaptureError(
                f"two inputs would have the name {name!r}: an argument, and a tensor of a module "
                "or optimizer; rename the argument"
            )
        self.examples: Mapping[str, Any] = {**held, **given}
        # Arguments that are not tensors, by their paths.
        self.constants = {path: leaf for path, leaf in named if is_value(leaf)}
        # The function's result, with an ``Output`` for each tensor.
        self.returned: Any = None
        self.settings = Settings()  # of optimizers, as inputs
        # Outputs that are new state, and their places; places that are empty afterwards.
        self.made: dict[str, Place] = {}
        self.gone: tuple[Place, ...] = ()
        # Attributes that hold other flags afterwards: the object's attributes, a name, its value.
        self.switched: list[tuple[dict[str, Any], str, Any]] = []

    def feed(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the inputs of a run: arguments and present state.

        Raises GraphError if a number among the arguments differs from that of the capture.
        """
        found = self._present()
        for path, leaf in _named_leaves(self.fn, args, kwargs):
            if isinstance(leaf, torch.Tensor):
                found[path] = leaf
            elif is_value(leaf) and path in self.constants:
                constant = self.constants[path]
                if value_key(leaf) != value_key(constant):
                    raise GraphError(
                        f"{path!r} is {leaf!r}, but it was {constant!r} when {self.name!r} was "
                        f"captured, and the graph contains that value{_AGAIN}"
                    )
        return found

    def hold(self, settings: Settings) -> None:
        """Have settings of optimizers as inputs."""
        inputs = settings.inputs(self.state)
        self.settings = settings
        self.held |= inputs.keys()
        self.examples = {**self.examples, **inputs}

    def _present(self) -> dict[str, Any]:
        """Return what modules and optimizers hold now."""
        return {**self.state.tensors(), **self.settings.inputs(self.state)}

    def run_serial(self, /, *args: Any, **inputs: Any) -> dict[str, Any]:
        """Run the tasks one by one, with the arguments of the function: see ``Graph.run_serial``."""
        found, finish = self.completed(self, args, inputs)
        outputs = run_serial(self, found, followed=self.followed)
        if finish is not None:
            finish(outputs)
        return outputs

    def completed(
        self, graph: Graph, args: Sequence[Any], inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], Finish | None]:
        """Return the inputs of a run with present state, and ``finish`` if there is new state.

        Raises GraphError if modules or optimizers hold other tensors than during the capture.
        """
        names_state = not self.held.isdisjoint(inputs)
        if not args and (names_state or (not self.held and inputs.keys() == set(self.input_names))):
            return inputs, None  # if some are missing, the run says so
        if args or inputs.keys() - self.names.keys():
            found = self.feed(*args, **inputs)
        else:
            found = {**self._present(), **inputs}
        for name in sorted(found.keys() ^ set(self.input_names)):
            when = f"when {self.name!r} was captured{_AGAIN}"
            if name in self.held:
                raise GraphError(f"{name!r} no longer exists, as it did {when}")
            if name in found and name not in inputs:
                raise GraphError(f"{name!r} did not exist yet {when}")
        is_pure = not (self.made or self.gone or self.switched or self.settings.counters)
        return found, None if is_pure else self.finish

    def finish(self, outputs: Mapping[str, Any]) -> Any:
        """Put new state where it belongs, and return the function's result."""
        if missing := [name for name in self.made if name not in outputs]:
            raise GraphError(
                f"{missing[0]!r} was made on another rank; autosched.compile brings new state to all"
            )
        for name, place in self.made.items():
            self.state.put(place, outputs[name])
        for place in self.gone:
            self.state.put(place, None)
        for attributes, name, item in self.switched:
            attributes[name] = item
        return with_leaves(
            lambda leaf: outputs[leaf.name] if isinstance(leaf, Output) else leaf, self.returned
        )


def arguments_of(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the tensors among a call's arguments, by name."""
    return _tensors(_named_leaves(fn, args, kwargs))


def _tensors(named: Sequence[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}


def _named_leaves(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return the leaves of a call's arguments, by parameter and path."""
    named: dict[str, Any] = {**{f"arg{i}": item for i, item in enumerate(args)}, **kwargs}
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
        try:
            named = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            name = getattr(fn, "__qualname__", fn)
            raise CaptureError(f"{name!r} cannot be called like that: {error}") from None
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named.update(named.pop(name, {}))
    found: list[tuple[str, Any]] = []
    tensors: set[str] = set()
    for path, leaf in leaves(named):
        name = re.sub(r"[\s@]", "_", path)
        if name in tensors:
            raise CaptureError(f"two arguments would have the name {name!r}; rename one")
        if isinstance(leaf, torch.Tensor):
            tensors.add(name)
        found.append((name, leaf))
    return found
