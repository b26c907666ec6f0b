"""Trace a call of a function or step to ATen operators.

The function runs once on fake tensors, which have shapes and no data, while ``make_fx`` records the
operators of forward, backward and optimizer. Changes that a graph cannot make raise CaptureError,
and all changes are undone. Knows no tasks.
"""

from __future__ import annotations

import contextlib
import enum
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from autosched._lib.containers import with_leaves
from autosched._lib.fake_tensors import Fakes, quiet
from autosched._lib.gc_pause import without_collecting
from autosched._lib.tree import flatten
from autosched.errors import CaptureError
from autosched.frontends.captured import Captured, Output
from autosched.frontends.origins import annotating_origins
from autosched.frontends.reachability import Reach, is_trainable, is_value
from autosched.frontends.replacements import (
    EagerOperators,
    FakeChecks,
    replacing,
    warn_of_fake_check,
)
from autosched.frontends.settings import (
    Counters,
    Number,
    Settings,
    without_repeats,
    without_unused,
)
from autosched.frontends.side_effects import (
    Call,
    MadeTensors,
    SideEffects,
    check_properties,
    clear_caches_of,
    observing_calls,
    properties_of,
)
from autosched.frontends.specializations import settings_of_torch
from autosched.frontends.state import Place, State, hooks_of, without_gradients
from autosched.frontends.unsupported import (
    check_nodes,
    definition_of,
    failure_message,
    refusal,
)

_CONSTANTS = (enum.Enum, type, torch.nn.Module, torch.optim.Optimizer, torch.Generator)


def generator_id(generator: Any) -> int:
    """Return torch's id of a generator, which can have several Python objects."""
    return int(generator._cdata)


@without_collecting()
def trace(
    graph: Captured, args: Sequence[Any], kwargs: Mapping[str, Any], varying: Iterable[str]
) -> Trace:
    """Return the trace of a call, and note in the graph what it returned and changed.

    Settings of optimizers named ``varying`` become inputs, if possible. Raises CaptureError for
    what a graph cannot express.

    1. Replace the tensors of arguments, modules and optimizers by fake tensors.
    2. Run the function, while ``make_fx`` records operators and their origins.
    3. Raise for changes of anything but tensors, compared with the objects before the call.
    4. Undo all changes; remove fake tensors from caches, and raise if other containers have some.
    """
    made = MadeTensors()
    try:
        parameters = graph.state.parameters.values()  # their gradients are separate inputs
        with without_gradients(parameters), torch.autograd.set_multithreading_enabled(False):
            found = Trace(graph, (list(args), dict(kwargs)), varying, made)
            found.make()
    except BaseException as error:
        # Frames hold tensors, too, which the step has not stored anywhere.
        failed: BaseException | None = error
        while failed is not None:
            traceback.clear_frames(failed.__traceback__)
            failed = failed.__cause__ or failed.__context__
        made.remove()
        raise
    nodes = found.module.graph.nodes
    if places := made.remove(leaf for node in nodes for leaf in flatten(node.meta.get("val"))):
        left = CaptureError(
            f"a tensor of the step is left in {places[0]}, which a graph cannot do; keep it in a "
            "buffer of a module, return it, or store it outside of the step"
        )
        raise CaptureError(failure_message(graph.fn, left))
    return found


def _without_shapes(graph: torch.fx.Graph) -> None:
    """Remove unused operators on meta tensors, which torch calls to find shapes.

    It does so for tangents that it knows to be zero, and these operators do not read the zeros.
    """
    for node in reversed(graph.nodes):
        results = [*flatten(node.meta.get("val"))] if node.op == "call_function" else []
        devices = [item.device.type for item in results if isinstance(item, torch.Tensor)]
        finds_shape = bool(devices) and set(devices) == {"meta"}
        is_zero = node.target is torch.ops.aten._efficientzerotensor.default
        if (finds_shape or is_zero) and not node.users and not node.is_impure():
            graph.erase_node(node)


@contextlib.contextmanager
def _caching_casts(caches: bool) -> Iterator[None]:
    """Let autocast cast a weight once, as it does eagerly and ``make_fx`` switches off.

    Gradients of several uses of a weight are then added in half precision. What is cached of fake
    tensors is removed, and what the caller's region has cached with it.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(caches)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


class Trace:
    """The operators of a call, and what the call changed that the graph does not have.

    The placeholders of ``module`` are the examples of the capture, in their order, and the
    ``settings``.
    """

    module: torch.fx.GraphModule
    outputs: dict[str, Place]  # with the places of new state
    differentiable: list[str]  # outputs that require grad
    rewritten: list[str]  # inputs with another autograd history
    generators: set[int]  # ids of those that existed before
    calls: list[Call]  # of the host, which a graph does not repeat
    settings: Settings  # of optimizers, that are inputs

    def __init__(self, graph: Captured, arguments: Any, varying: Iterable[str], made: MadeTensors):
        self.graph = graph
        self.fn = graph.fn
        self.arguments = arguments
        self.state = graph.state
        self.examples = graph.examples
        self.varying = frozenset(varying)
        self.counts = graph.state.counters()
        self.made = made
        self.effects: SideEffects | None = None  # while the function runs
        self.outside: torch.Tensor | None = None  # the last tensor with data

    def make(self) -> None:
        """Trace the function, again if the reason of failure is removed.

        That is a cache that returned what was computed before, a path for real tensors that cannot
        be captured, where another one for fake tensors exists, or settings of optimizers that must
        be constants.
        """
        checks = FakeChecks()
        why = ""
        while True:
            try:
                self._attempt(checks)
            except Exception as error:
                if self.outside is not None and clear_caches_of(self.outside):
                    continue
                if self.varying:
                    self.varying = frozenset()
                    continue
                message = failure_message(self.fn, error)
                if not checks.lines or checks.truthful:
                    raise CaptureError(message) from error
                checks.truthful = True
                why = message.partition(" ")[2]
            else:
                if constant := self.settings.constant:
                    self.varying -= constant
                    continue
                if why:
                    warn_of_fake_check(checks.lines[-1], why, definition_of(self.fn))
                return

    def _attempt(self, checks: FakeChecks) -> None:
        self.outside = None
        self.outputs, self.settings = {}, Settings(self.varying)
        caches = torch.is_autocast_cache_enabled()

        def step(inputs: Sequence[Any]) -> list[torch.Tensor]:
            with _caching_casts(caches):
                return self._step(inputs[: len(self.examples)], numbers)

        with (
            quiet(),
            replacing(checks),
            annotating_origins(self.state.modules, self._refuse, self.made.add),
        ):
            fakes = Fakes()
            numbers = self.settings.numbers(self.state, fakes)
            inputs = [*map(fakes.from_tensor, self.examples.values()), *numbers.values()]
            self.module = make_fx(step, tracing_mode="fake")(inputs)
        self.settings.names = without_unused(self.module.graph, list(numbers))
        without_repeats(self.module.graph)
        _without_shapes(self.module.graph)

    def _step(
        self, fakes: Sequence[torch.Tensor], numbers: Mapping[str, Number]
    ) -> list[torch.Tensor]:
        """Run the function; return the tensors of its result and state."""
        twins = dict(zip(map(id, self.examples.values()), fakes, strict=True))
        given = with_leaves(lambda leaf: twins.get(id(leaf), leaf), self.arguments)
        args, kwargs = given
        before = dict(zip(self.examples, fakes, strict=True))
        for item, twin in zip(self.examples.values(), fakes, strict=True):
            for hook in hooks_of(item)[0]:
                twin.register_hook(hook)  # type: ignore[no-untyped-call]
        counters = self.state.numbers()
        counted = {name: (before[name], number) for name, number in self.counts.items()}
        with (
            self._checking_changes(before, given, numbers) as reach,
            EagerOperators(Counters(self.settings, counted)),
        ):
            parameters = {name: before[name] for name in self.state.parameters}
            state = State(self.state.modules, self.state.optimizers, parameters)
            held = state.all_places()
            settings = settings_of_torch()
            with observing_calls(reach) as self.calls:
                result = self.fn(*args, **kwargs)
            if settings != settings_of_torch():
                raise CaptureError(
                    "a setting of torch, such as grad mode or autocast, is another after the step; "
                    "set it in a with statement, or outside of the step"
                )
            found = self._results(result)
            for name, item in state.numbers().items():
                if item is not None and item != counters.get(name):
                    raise CaptureError(
                        f"{name!r} is {item!r} after the step, but a graph changes tensors only; "
                        "use an optimizer that keeps it in a tensor"
                    )
            found += self._new_state(held, state.all_places())
        pairs = zip(self.outputs, found, strict=True)
        self.differentiable = [
            name for name, item in pairs if isinstance(item, torch.Tensor) and item.requires_grad
        ]
        return found

    def _results(self, result: Any) -> list[Any]:
        """Return the tensors in the function's result, and store its structure."""
        found: list[Any] = []

        def output(leaf: Any) -> Any:
            if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
                name = "result" if leaf is result else f"result.{len(found)}"
                self.outputs[name] = ()
                found.append(leaf)
                return Output(name)
            if not is_value(leaf) and not isinstance(leaf, _CONSTANTS):
                raise CaptureError(
                    f"a {type(leaf).__name__} is returned; return tensors, in tuples, lists, dicts "
                    "or dataclasses"
                )
            return leaf

        self.graph.returned = with_leaves(output, result)
        return found

    def _new_state(
        self,
        before: Mapping[str, tuple[Place, torch.Tensor]],
        now: Mapping[str, tuple[Place, torch.Tensor]],
    ) -> list[torch.Tensor]:
        """Return the tensors that the step stored in modules and optimizers."""
        found: list[torch.Tensor] = []
        for name, (place, tensor) in now.items():
            if name not in before or tensor is not before[name][1]:
                self.outputs[name] = place
                found.append(tensor)
        gone = {name: place for name, (place, _) in before.items() if name not in now}
        for name, place in gone.items():
            if place[0] == "moment":
                raise CaptureError(f"{name!r} is gone after the step; remove it between calls")
        self.graph.gone = tuple(place for place in gone.values() if place[0] in ("grad", "buffer"))
        return found

    @contextlib.contextmanager
    def _checking_changes(
        self, before: Mapping[str, torch.Tensor], given: Any, numbers: Mapping[str, Any]
    ) -> Iterator[Reach]:
        """Put ``before`` and ``numbers`` in their places; refuse and undo changes afterwards.

        Yields what the function can read.
        """
        held = self.state.places().items()
        twins = {id(item): before[name] for name, (place, item) in held if place[0] != "grad"}
        trained = {id(item) for item in self.state.parameters.values() if is_trainable(item)}
        fixed = self.state.fixed(numbers)
        effects = SideEffects([self.fn, given], self.state)
        generators = [item for item in effects.found if isinstance(item, torch.Generator)]
        self.generators = set(map(generator_id, [torch.default_generator, *generators]))
        try:
            effects.substitute(twins, trained, fixed)
            for name in self.state.parameters:
                before[name].grad = before.get(f"{name}.grad")
            properties = {name: properties_of(tensor) for name, tensor in before.items()}
            self.effects = effects
            yield effects.reach
            mode = get_proxy_mode()
            check_nodes(mode.tracer.graph.nodes if mode is not None else ())
            self.rewritten = check_properties(before, properties, self.state.parameters)
            effects.check()
            self.graph.switched = effects.switched()
        finally:
            self.effects = None
            effects.undo()

    def _refuse(self, tensor: torch.Tensor) -> None:
        """Raise CaptureError for a tensor that has data, and has a name."""
        if self.effects is None:
            return
        self.outside = tensor
        name = self.effects.name_of(tensor)
        parameter = self.state.names.get(id(tensor))
        if parameter is not None:
            raise CaptureError(
                f"{name or 'a tensor'} is parameter {parameter!r}; get it from the module within "
                "the step"
            )
        if name is not None:
            raise refusal(
                f"{name} is a tensor from outside",
                "pass it as an argument, or make it a module's buffer",
            )
