"""Functions that are captured and scheduled when they are called.

A call uses an earlier capture if capturing it again would give the same graph: see
``frontends.specializations``.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from autosched._lib.containers import leaves
from autosched._lib.forks import rlock
from autosched._lib.recent import MOST
from autosched.costs.costs import Costs
from autosched.errors import ScheduleError
from autosched.frontends.capture import captured, with_marked_tasks
from autosched.frontends.capture_lock import check_not_capturing, is_capturing
from autosched.frontends.captured import Captured
from autosched.frontends.every_rank import (
    Ends,
    captured_alike,
    drawing_on_one,
    on_every_rank,
    same_capture,
)
from autosched.frontends.reachability import Reach
from autosched.frontends.specializations import Specializations, name_of
from autosched.frontends.unsupported import check_function
from autosched.fusion import Compiler, check_one_process, compiler_of, fused
from autosched.machine.machine import Machine, given_or_local
from autosched.policies import Policy
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule

if TYPE_CHECKING:
    from autosched.frontends.dynamo import TorchBackend


class _Planned(NamedTuple):
    """A capture, and its schedule."""

    graph: Captured
    schedule: Schedule
    ends: Ends | None  # of the outputs, on a machine of several ranks

    def run(self, inputs: dict[str, Any]) -> Any:
        """Run the schedule, put new state where it belongs, and return the function's result."""
        if self.ends is None:
            return self.graph.finish(self.schedule.run_with(inputs))
        self.ends.check(inputs)
        outputs = self.schedule.run_with(inputs, is_agreed=True)
        return self.graph.finish(self.ends.collect(inputs, outputs))


class CacheInfo(NamedTuple):
    """Numbers of cache hits and misses, and of cached captures."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


@overload
def compile(
    fn: torch.nn.Module, machine: Machine | None = None, **options: Any
) -> CompiledModule: ...
@overload
def compile(fn: Callable[..., Any], machine: Machine | None = None, **options: Any) -> Compiled: ...
def compile(
    fn: Callable[..., Any],
    machine: Machine | None = None,
    *,
    policy: str | Policy = "auto",
    costs: Costs | None = None,
    maxsize: int = MOST,
    fuse: bool | Compiler = False,
    memory: float | None = None,
    **options: Any,
) -> Compiled | CompiledModule:
    """Return a function that runs ``fn`` on a machine, by a schedule.

    ``fn`` is what ``capture`` takes: a function of tensors, a module, or a training step. The first
    call captures and schedules, and so does one that needs a recapture; the ``maxsize`` most
    recently used captures are cached. ``costs`` default to an estimate;
    with ``fuse``, Inductor, or a function that is passed, compiles regions of tasks, and results
    differ from eager ones by rounding: see ``fuse``; a first step, which creates an optimizer's
    state, is not fused. ``memory`` limits the bytes on each accelerator: see ``Machine.limited``.
    ``options`` are those of ``schedule``. The third capture warns of what changed; the logger
    ``autosched`` reports each recapture.

    On a machine of ``Machine.cluster`` all ranks make the same calls, with equal arguments, and get
    equal results; results that ``outputs`` names are on that device's rank alone, and None on
    others. Ranks that call differently get ScheduleError.

    Of a module, return a module with the same parameters, which autograd records: it has schedules
    for forward and backward, if ``options`` are among those of ``TorchBackend``. Other functions
    compute gradients inside, and if a gradient would be lost, GradientError is raised.

    >>> model = torch.nn.Linear(3, 2)
    >>> run = compile(model, Machine.emulated(gpus=1), backend="host")
    >>> with torch.no_grad():
    ...     torch.equal(run(torch.ones(4, 3)), model(torch.ones(4, 3))), run.cache_info()
    (True, CacheInfo(hits=0, misses=1, maxsize=8, currsize=1))
    """
    if isinstance(fn, Compiled | CompiledModule):
        raise ScheduleError(f"{fn!r} is compiled already; compile the function itself, {fn.fn!r}")
    check_function(fn, "compile", ScheduleError)
    if not isinstance(maxsize, int) or isinstance(maxsize, bool) or maxsize < 1:
        raise ScheduleError(f"maxsize must be 1 or more, got {maxsize!r}")
    compiler_of(fuse)
    if machine is not None or memory is not None:
        machine = given_or_local(machine)
        machine = machine if memory is None else machine.limited(memory)
    if fuse:
        check_one_process(machine)
    options |= {"machine": machine, "policy": policy, "costs": costs}
    compiled = Compiled(fn, maxsize, fuse, options)
    return CompiledModule(compiled) if isinstance(fn, torch.nn.Module) else compiled


class Compiled:
    """A function with a cache of schedules.

    Made by ``compile``; closed by ``close()`` or by garbage collection.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        maxsize: int,
        fuse: bool | Compiler,
        options: Mapping[str, Any],
    ):
        self.fn = fn
        self.maxsize = maxsize
        self.fuse = fuse
        self.options = options  # of schedule
        self._known = Specializations[_Planned](
            fn, [fn], lambda entry: entry.schedule.close(), maxsize
        )
        self._lock = rlock()
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function by a schedule.

        Raises CaptureError for what a graph cannot express, and the errors of a schedule's call.
        """
        check_not_capturing("a compiled function")
        with self._lock:
            entry, inputs = self._find(args, kwargs)
            return entry.run(inputs)

    def schedule(self, /, *args: Any, **kwargs: Any) -> Schedule:
        """Return the schedule of calls like this one."""
        check_not_capturing("a compiled function's schedule")
        with self._lock:
            return self._find(args, kwargs)[0].schedule

    def _find(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[_Planned, dict[str, Any]]:
        """Return the capture for a call, a new one if need be, and the call's inputs by name."""
        try:
            found = self._known.find(args, kwargs)
        except Exception as error:
            reason = f"raises {error}"
            self._agree(-1, lambda: reason)
            raise
        self._agree(found.number, lambda: self._known.why(found))
        entry = found.value
        if entry is not None and found.inputs is not None:
            return entry, found.inputs
        if entry is None:
            self._known.missed(found)
            assert found.call is not None
            entry = self._captured(args, kwargs, found.call.varying)
            machine = entry.schedule.problem.machine
            if machine.accelerators and not machine.imagined:
                gc.collect()  # of the trace, whose tensors are on an accelerator
        return entry, self._known.store(found, entry, [entry.graph.settings])

    def _captured(self, args: Any, kwargs: Mapping[str, Any], varying: frozenset[str]) -> _Planned:
        """Return a capture with its schedule; on several ranks, with what these do with outputs."""

        def capture() -> Captured:
            found = captured(self.fn, args, kwargs, varying)
            if self._has_ranks:
                drawing_on_one(found)
            return found

        operators = captured_alike(name_of(self.fn), capture) if self._is_rank else capture()
        examples = operators.examples
        operators.examples = {}  # or this batch would live as long as the schedule
        graph = with_marked_tasks(operators)
        fuses = self.fuse and not _creates_state(operators)
        if self.fuse and not fuses and self.options.get("progress") in (None, True):
            why = "the first one creates the state of its optimizer"
            print(f"fusing {operators.name!r} begins at its second call: {why}", file=sys.stderr)
        options = dict(self.options)
        if fuses:
            made = fused(graph, examples=examples, compiler=compiler_of(self.fuse), **options)
            return _Planned(made.graph, made.schedule, None)
        if options["costs"] is None:
            options["examples"] = examples
        if not self._has_ranks:
            return _Planned(graph, schedule(graph, **options), None)
        machine = self.options["machine"]
        twin, ends, asked = on_every_rank(graph, machine, self.options)
        return _Planned(graph, schedule(twin, **{**options, **asked}), ends)

    @property
    def _has_ranks(self) -> bool:
        machine = self.options["machine"]
        return machine is not None and bool(machine.ranks)

    @property
    def _is_rank(self) -> bool:
        """Whether this process is one of several ranks, and does not play all of them."""
        return self._has_ranks and self.options["machine"].rank is not None

    def _agree(self, number: int, why: Callable[[], str]) -> None:
        """Raise ScheduleError if other ranks use another capture; 0 is a new one."""
        if self._is_rank:
            same_capture(name_of(self.fn), number, why)

    def cache_info(self) -> CacheInfo:
        """Return the numbers of cache hits and misses."""
        known = self._known
        return CacheInfo(known.hits, known.misses, self.maxsize, len(known.values()))

    def close(self) -> None:
        """Close all schedules, and drop them."""
        with self._lock:
            self._known.close()

    def __reduce__(self) -> Any:
        return Compiled, (self.fn, self.maxsize, self.fuse, dict(self.options))

    def __enter__(self) -> Compiled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _creates_state(graph: Captured) -> bool:
    """Whether a step creates state of an optimizer, so that the next one is another graph."""
    return any(
        place[0] == "moment" and name not in graph.held for name, place in graph.made.items()
    )


# ---- modules: trained as by torch.compile, in eval as captured graphs
#
# A call that autograd does not record runs by the schedule of a capture. Where autograd records,
# ``torch.compile`` divides the call into forward and backward, which have schedules of their own. A
# module whose code calls ``backward()`` is a training step, and always captured.


class CompiledModule(torch.nn.Module):
    """A module that runs by schedules. Made by ``compile``.

    All else is that of the module ``fn``: parameters, buffers, hooks, attributes and methods. So
    ``state_dict()`` has the same keys, and ``to()`` and ``train()`` change ``fn``. Only calls run by
    schedules: another method, such as ``generate``, runs eagerly with all that it calls. To compile
    it, ``compile`` a function that calls it once, such as one step of a generation. Where autograd
    records, the module has a schedule for forward and one for backward; a second derivative raises
    RuntimeError. A copy, and a module that is unpickled, has no schedules yet.

    >>> import autosched as asc
    >>> model = torch.nn.Linear(3, 2)
    >>> run = asc.compile(model, asc.Machine.emulated(gpus=1), backend="host")
    >>> list(run.state_dict()), run.weight is model.weight
    (['weight', 'bias'], True)
    >>> run(torch.ones(4, 3)).sum().backward()
    >>> model.weight.grad.shape
    torch.Size([2, 3])
    """

    fn: torch.nn.Module

    def __init__(self, compiled: Compiled):
        # Not that of torch.nn.Module: all state is that of ``fn``.
        own = copy.copy(compiled)  # with a cache of its own, in copies of this module, too
        vars(self).update(fn=own.fn, _compiled=own, _backend=None)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module by a schedule, and let autograd record it where it is enabled."""
        if is_capturing() or torch.compiler.is_compiling():
            return self.fn(*args, **kwargs)
        if torch.is_grad_enabled() and self._requires_grad(args, kwargs) and self._run is not None:
            return self._run(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    @cached_property
    def _run(self) -> Callable[..., Any] | None:
        """What ``torch.compile`` returns; None if options, or the module's code, are none for it.

        Nor is a machine of several ranks: what forward saves for backward is on one of them.
        """
        options = self._compiled.options
        backend = options.get("backend")
        own = {"machine", "policy", "backend", "check", "costs"}
        others = {name for name, given in options.items() if given not in (None, False)} - own
        is_made = backend is not None and not isinstance(backend, str)
        is_cluster = self._compiled._has_ranks
        if others or is_made or is_cluster or "backward" in Reach([self.fn]).mentioned:
            return None
        from autosched.frontends.dynamo import TorchBackend

        known = {name: options[name] for name in own & options.keys()}
        made = TorchBackend(fuse=self._compiled.fuse, **known)
        vars(self)["_backend"] = made
        # Its ``forward``: calling torch's wrapper would run hooks of all modules once more.
        wrapper: Any = torch.compile(self.fn, backend=made)
        run: Callable[..., Any] = wrapper.forward
        return run

    def _requires_grad(self, *arguments: Any) -> bool:
        """Whether an argument, a parameter or a buffer requires grad."""
        given = (item for _, item in leaves(arguments))
        tensors = chain(self.fn.parameters(), given, self.fn.buffers())
        return any(isinstance(item, torch.Tensor) and item.requires_grad for item in tensors)

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The forward of the module, which is not compiled."""
        return self.fn.forward

    def schedules(self) -> tuple[Schedule, ...]:
        """Return the schedules of forward and backward that are in use."""
        return () if self._backend is None else self._backend.schedules()

    def close(self) -> None:
        """Close all schedules, and drop them; later calls make new ones."""
        self._compiled.close()
        if self._backend is not None:
            self._backend.reset()

    def __enter__(self) -> CompiledModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- all else is that of ``fn``

    _compiled: Compiled
    _backend: TorchBackend | None

    def __getattr__(self, name: str) -> Any:
        if "fn" not in vars(self):  # while it is made
            raise AttributeError(name)
        return getattr(self.fn, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.fn, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.fn, name)

    def __dir__(self) -> Iterator[str]:
        return iter({*dir(type(self)), *dir(self.fn)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fn!r})"

    def __reduce__(self) -> Any:
        return type(self), (self._compiled,)


def _delegated(name: str, kind: type, to: str) -> Callable[..., Any]:
    """Return a method that calls that of an attribute, and returns this module instead of ``fn``."""

    @functools.wraps(getattr(kind, name))
    def method(self: CompiledModule, /, *args: Any, **kwargs: Any) -> Any:
        result = getattr(getattr(self, to), name)(*args, **kwargs)
        return self if result is self.fn else result

    return method


for _name, _item in vars(torch.nn.Module).items():
    if callable(_item) and not _name.startswith("__") and _name != "forward":
        _method = _delegated(_name, torch.nn.Module, "fn")
        setattr(CompiledModule, _name, _method)
for _name in ("schedule", "cache_info"):  # where autograd does not record
    setattr(CompiledModule, _name, _delegated(_name, Compiled, "_compiled"))
