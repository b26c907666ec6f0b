"""A backend for ``torch.compile`` that schedules the compiled graphs.

torch traces the code, guards it and differentiates it; this module schedules the resulting graphs.

``torch.compile(model, backend="autosched", options={"machine": machine})``, or
``backend=TorchBackend(machine)``: an object that returns its schedules on request. ``default``
returns those of all models that used the name.

Never fails where torch would not: a graph that cannot be captured or scheduled runs as torch gave
it, with one warning.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from autosched._lib.forks import rlock
from autosched.costs.costs import Costs
from autosched.costs.estimate import estimate
from autosched.errors import AutoschedError, ScheduleError, TaskError, listed, shown
from autosched.frontends.aot import AotGraph, convert, run_unscheduled, split
from autosched.fusion import fuse
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.policies import Policy
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule

__all__ = ["TorchBackend", "default"]

Planned = tuple[AotGraph, Schedule]

_MOST_CACHED = 8  # schedules of one graph, for as many shapes


class TorchBackend:
    """A backend for ``torch.compile``. The options are those of ``autosched.schedule``.

    ``costs`` may name tasks of several graphs; default: an estimate. ``backend`` is a name, or a
    function that makes one, since each serves one schedule. ``fuse``: whether Inductor compiles
    regions of operators, see ``autosched.fuse``; the default is to do so on real machines, and not
    on emulated ones. With ``fuse=False`` results equal those of the backend ``"aot_eager"`` bit for
    bit. Raises ScheduleError or MachineError for invalid options.

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
        fuse: bool | None = None,
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

        def compile(
            part: torch.fx.GraphModule, phase: str, names: Sequence[str]
        ) -> Callable[..., Any]:
            def plan(arguments: Sequence[Any]) -> Planned:
                graph = convert(part, arguments, phase, names, chosen.machine.host)
                return graph, chosen._schedule(graph, graph.feed(arguments))

            runner = _Runner(part, phase, plan)
            self._runners[next(self._numbers)] = runner
            return runner

        return split(module, inputs, compile)

    @functools.cached_property
    def machine(self) -> Machine:
        """The machine on which graphs run."""
        return Machine.local() if self._machine is None else self._machine

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

    def _schedule(self, graph: AotGraph, examples: Mapping[str, Any]) -> Schedule:
        """Schedule a graph with its outputs on the devices of torch."""
        given = self._costs
        costs = estimate(graph, examples).costs if given is None else given.restricted(graph)
        if not self.machine.imagined if self._fuse is None else self._fuse:
            outputs = {"outputs": graph.homes, **self._options}
            graph = fuse(graph, self.machine, costs, examples=examples, **outputs)
            costs = costs.restricted(graph)
        backend = self._backend() if callable(self._backend) else self._backend
        return schedule(
            graph, self.machine, costs=costs, outputs=graph.homes, backend=backend, **self._options
        )


class _Runner:
    """Calls a graph of AOTAutograd, by a schedule for each shape."""

    def __init__(
        self, module: torch.fx.GraphModule, phase: str, plan: Callable[[Sequence[Any]], Planned]
    ):
        self.module = module
        self.phase = phase
        self.plan = plan
        self._cache: OrderedDict[Hashable, Planned | None] = OrderedDict()
        self._warned = False
        self._lock = rlock()

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the graph. Raises the errors of its operators."""
        with self._lock:
            found = self._find(arguments)
        if found is None:
            return run_unscheduled(self.module, arguments)
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

    def _find(self, arguments: Sequence[Any]) -> Planned | None:
        """Return the graph and schedule for such arguments, or None."""
        key = tuple(map(_properties, arguments))
        if key not in self._cache:
            try:
                self._cache[key] = self.plan(arguments)
            except Exception as error:
                self._cache[key] = None
                self._warn(error)
            while len(self._cache) > _MOST_CACHED:
                self._cache.popitem(last=False)  # not closed: another thread may be in it
        self._cache.move_to_end(key)
        return self._cache[key]

    def _warn(self, error: Exception) -> None:
        """Warn, once, of a graph that runs without a schedule."""
        ours = isinstance(error, AutoschedError)
        why = f"{error}" if ours else f"{type(error).__name__}: {error}"
        if not self._warned:
            message = f"torch.compile's {self.phase} graph runs without a schedule: {why}"
            warnings.warn(message, stacklevel=2)
        self._warned = True

    def schedules(self) -> list[Schedule]:
        with self._lock:
            return [found[1] for found in self._cache.values() if found is not None]

    def reset(self) -> None:
        with self._lock:
            for made in self.schedules():
                made.close()
            self._cache.clear()


def _properties(argument: Any) -> Hashable:
    """Return the properties of an argument that a trace depends on."""
    if not isinstance(argument, torch.Tensor):
        return type(argument), argument
    shape = (argument.shape, argument.stride())
    return *shape, argument.dtype, argument.device, argument.is_inference()


default = TorchBackend()  # for the name "autosched"
