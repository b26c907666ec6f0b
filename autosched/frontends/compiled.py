"""Functions that are captured and scheduled when they are called.

A call uses an earlier capture if capturing it again would give the same graph: see
``frontends.guards``.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from autosched._lib.containers import leaves
from autosched._lib.forks import rlock
from autosched._lib.logs import LOG
from autosched._lib.recent import MOST, Recent
from autosched.coarsening.grouping import Granularity, check_granularity
from autosched.costs.costs import Costs
from autosched.errors import ScheduleError, shown
from autosched.frontends.capture import captured, coarse
from autosched.frontends.capture_lock import check_not_capturing, is_capturing
from autosched.frontends.captured import Captured, arguments_of
from autosched.frontends.every_rank import (
    Ends,
    captured_alike,
    drawing_on_one,
    on_every_rank,
    same_capture,
)
from autosched.frontends.guards import Arguments, Guard, Key
from autosched.frontends.reachability import Reach
from autosched.frontends.settings import Varying
from autosched.frontends.state import State
from autosched.frontends.unsupported import check_function
from autosched.fusion import Compiler, check_one_process, compiler_of, fused_with_machine
from autosched.machine.machine import Machine
from autosched.policies import Policy
from autosched.runtime.in_flight.batches import results, unpacked
from autosched.runtime.in_flight.future import RunFuture
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule

if TYPE_CHECKING:
    from autosched.frontends.dynamo import TorchBackend

# The recapture that warns: a step has one when its optimizer has state.
_WARNED = 2


class _Specialization(NamedTuple):
    """A cached capture: what its guard admits calls to, and the key of these calls."""

    key: Key
    graph: Captured
    schedule: Schedule
    ends: Ends | None  # of the outputs, on a machine of several ranks
    guard: Guard

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
    granularity: Granularity = "op",
    fuse: bool | Compiler = False,
    **options: Any,
) -> Compiled | CompiledModule:
    """Return a function that runs ``fn`` on a machine, by a schedule.

    ``fn`` is what ``capture`` takes: a function of tensors, a module, or a training step. The first
    call captures and schedules, and so does one that needs a recapture; the ``maxsize`` most
    recently used captures are cached. ``costs`` default to an estimate; ``granularity`` is that
    of ``capture``; with ``fuse``, Inductor, or a function that is passed, compiles regions of tasks, and results
    differ from eager ones by rounding: see ``fuse``; a first step, which creates an optimizer's
    state, is not fused.
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
    check_granularity(granularity)
    compiler_of(fuse)
    if fuse:
        check_one_process(machine)
    options |= {"machine": machine, "policy": policy}
    compiled = Compiled(fn, maxsize, granularity, costs, fuse, options)
    return CompiledModule(compiled) if isinstance(fn, torch.nn.Module) else compiled


class Compiled:
    """A function with a cache of schedules.

    Made by ``compile``; closed by ``close()`` or by garbage collection.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        maxsize: int,
        granularity: Granularity,
        costs: Costs | None,
        fuse: bool | Compiler,
        options: Mapping[str, Any],
    ):
        self.fn = fn
        self.maxsize = maxsize
        self.fuse = fuse
        self.granularity = granularity
        self.costs = costs
        self.options = options  # of schedule
        self.stacklevel = 4  # of the user's call, in ``_explain``
        self._cache = Recent[int, _Specialization](lambda entry: entry.schedule.close(), maxsize)
        self._varying = Varying()
        self._hits = 0
        self._misses = 0
        self._unexpected = 0  # recaptures, except those that make settings of optimizers inputs
        self._submitted: _Specialization | None = None  # the last one
        self._lock = rlock()
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function by a schedule.

        Raises CaptureError for what a graph cannot express, and the errors of a schedule's call.
        """
        check_not_capturing("a compiled function")
        with self._lock:
            if not self._overlaps():
                entry, inputs = self._find(args, kwargs)
                return entry.run(inputs)
            run = self.submit(*args, **kwargs)
        return run.result()

    def submit(self, /, *args: Any, **kwargs: Any) -> RunFuture:
        """Start a call, and return the future of its result: see ``Schedule.submit``.

        Call ``wait()`` before the model is evaluated: it may have half of an update.
        A call waits for those before it if it is captured again, if it uses another capture, and if
        they leave new tensors in modules or optimizers: gradients, for example.
        """
        check_not_capturing("a compiled function")
        if self._has_ranks:
            what = "a function of several ranks"
            raise ScheduleError(f"{what} is called, and not submitted: all ranks wait for its end")
        with self._lock:
            last = self._submitted
            if last is not None and last.graph.keeps:
                last.schedule.wait()
            entry, inputs = self._find(args, kwargs)
            if last is not None and last.schedule is not entry.schedule:
                last.schedule.wait()
            self._submitted = entry
            return entry.schedule.submit_for(inputs, entry.graph.finish)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all submitted calls have ended: see ``Schedule.wait``."""
        if self._submitted is not None:
            self._submitted.schedule.wait(timeout)

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of a call on each item of an iterable: see ``Schedule.map``.

        Tuples and lists are the arguments of a call, mappings its keyword arguments, and other
        items its only argument. The first item is fetched by the caller. Call ``wait()`` before a
        model that the calls train is evaluated: it may have half of an update.
        """
        rest = iter(batches)
        for first in rest:
            args, kwargs = unpacked(first, None)
            most = self.schedule(*args, **kwargs).program.in_flight
            yield from results(self.submit, chain([first], rest), most)

    def _overlaps(self) -> bool:
        """Whether calls are submitted, so that those of several threads can overlap."""
        given = self.options.get("in_flight")
        wanted = given is not None or self.options.get("objective") == "period"
        return self._submitted is not None or (wanted and given != 1)

    def schedule(self, /, *args: Any, **kwargs: Any) -> Schedule:
        """Return the schedule of calls like this one."""
        check_not_capturing("a compiled function's schedule")
        with self._lock:
            return self._find(args, kwargs)[0].schedule

    def _find(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[_Specialization, dict[str, Any]]:
        """Return the cache entry for a call, and its inputs by name.

        1. Return the first entry whose guard recognizes the call.
        2. Otherwise compute the key of the call, and look it up in the cache.
        3. If there is no such entry, capture the function and schedule the graph.
        4. Store a new guard, which recognizes the objects of this call.
        """
        arguments = Arguments(args, kwargs)
        for number, entry in reversed(self._cache.items()):
            if (inputs := entry.guard.inputs(arguments)) is not None:
                self._agree(number)
                self._hits += 1
                self._cache.move_to_end(number)
                return entry, inputs
        try:
            given = arguments_of(self.fn, args, kwargs)
            state = State.of(self.fn, [*args, *kwargs.values()])
            varying = self._varying.names(state)
            reach = Reach([self.fn, *arguments.others], varying=state.items_of(varying))
            key = Key.of(state, reach, arguments, given)
            number, known = self._known(key, state)
        except Exception as error:
            self._agree(-1, reason=f"raises {error}")
            raise
        self._agree(number, key)
        if known is not None:
            self._hits += 1
            _, graph, made, ends, _ = self._cache.pop(number)
        else:
            self.wait()  # a capture reads state
            self._misses += 1
            number = self._misses
            self._explain(key, state)
            graph, made, ends = self._captured(args, kwargs, varying)
            if constant := varying - graph.settings.wanted:
                self._varying.keep(constant)
                rest = state.items_of(graph.settings.wanted)
                reach = Reach([self.fn, *arguments.others], varying=rest)
                key = Key.of(state, reach, arguments, given)
        reader = graph.settings.reader(state)
        entry = _Specialization(
            key, graph, made, ends, Guard(state, reach, arguments, given, reader)
        )
        self._cache.use(number, entry)
        return entry, {**state.tensors(), **given, **graph.settings.inputs(state)}

    def _known(self, key: Key, state: State) -> tuple[int, _Specialization | None]:
        """Return the cache entry with a key, for the present settings, and its number."""
        for number, entry in reversed(self._cache.items()):
            if entry.key == key and entry.graph.settings.reader(state)() is not None:
                return number, entry
        return 0, None

    def _captured(
        self, args: Any, kwargs: Mapping[str, Any], varying: frozenset[str]
    ) -> tuple[Captured, Schedule, Ends | None]:
        """Return a capture with its schedule; on several ranks, with what these do with outputs."""

        def capture() -> Captured:
            found = captured(self.fn, args, kwargs, varying)
            if self._has_ranks:
                drawing_on_one(found)
            return found

        operators = captured_alike(_name_of(self.fn), capture) if self._is_rank else capture()
        examples = operators.examples
        operators.examples = {}  # or this batch would live as long as the schedule
        costs: dict[str, Any] = (
            {"examples": examples} if self.costs is None else {"costs": self.costs}
        )
        place = self.options.get("place") if self.granularity != "op" else None
        graph = coarse(operators, self.granularity, place)
        fuses = self.fuse and not _creates_state(operators)
        if self.fuse and not fuses and self.options.get("progress") in (None, True):
            why = "the first one creates the state of its optimizer"
            print(f"fusing {operators.name!r} begins at its second call: {why}", file=sys.stderr)
        if fuses:
            options: dict[str, Any] = {**self.options, "costs": self.costs}
            options["compiler"] = compiler_of(self.fuse)
            graph, costs["machine"] = fused_with_machine(graph, examples=examples, **options)
        if not self._has_ranks:
            return graph, schedule(graph, **{**self.options, **costs}), None
        machine = self.options["machine"]
        twin, ends, asked = on_every_rank(graph, machine, self.options)
        return graph, schedule(twin, **{**self.options, **costs, **asked}), ends

    @property
    def _has_ranks(self) -> bool:
        machine = self.options["machine"]
        return machine is not None and bool(machine.ranks)

    @property
    def _is_rank(self) -> bool:
        """Whether this process is one of several ranks, and does not play all of them."""
        return self._has_ranks and self.options["machine"].rank is not None

    def _agree(self, number: int, key: Any = None, reason: str = "") -> None:
        """Raise ScheduleError if other ranks use another capture; 0 is a new one."""
        if self._is_rank:
            same_capture(_name_of(self.fn), number, lambda: reason or self._why(number, key))

    def _why(self, number: int, key: Any) -> str:
        """Return which capture a call uses, or why it needs a new one."""
        if number:
            return f"uses capture {number}"
        if not self._cache:
            return "needs a first capture"
        found = changes(next(reversed(self._cache.values())).key, key)
        return f"needs a new capture ({_described(found)})"

    def _explain(self, key: Key, state: State) -> None:
        """Log why a call needs a recapture; the third time, warn."""
        if not self._cache:
            return
        name = _name_of(self.fn)
        if new := self._varying.new:
            LOG.info("%r is captured again, with inputs %s", name, ", ".join(sorted(new)))
            return
        last = next(reversed(self._cache.values())).key
        if key == last:
            LOG.info("%r is captured again, for other numbers that it compares", name)
            return
        self._unexpected += 1
        found = changes(last, key)
        why = f"{name!r} is captured again, capture {self._misses}: {_described(found)}"
        LOG.info("%s", why)
        if self._unexpected == _WARNED:
            optimizers = state.optimizers.values()
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            settings = frozenset(name for group in groups for name in group)
            advice = remedy(found, settings)
            warnings.warn(
                f"{why} since the last call; {advice}. Only the logger 'autosched' reports later "
                "captures",
                RuntimeWarning,
                stacklevel=self.stacklevel,
            )

    def cache_info(self) -> CacheInfo:
        """Return the numbers of cache hits and misses."""
        return CacheInfo(self._hits, self._misses, self.maxsize, len(self._cache))

    def close(self) -> None:
        """Close all schedules, and drop them."""
        with self._lock:
            self._cache.close()
            self._submitted = None

    def __reduce__(self) -> Any:
        options = dict(self.options)
        return Compiled, (self.fn, self.maxsize, self.granularity, self.costs, self.fuse, options)

    def __enter__(self) -> Compiled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _name_of(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__name__))


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
        own.stacklevel += 1
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
        own = {"machine", "policy", "backend", "check"}
        others = {name for name, given in options.items() if given not in (None, False)} - own
        is_made = backend is not None and not isinstance(backend, str)
        is_cluster = options["machine"] is not None and options["machine"].ranks
        if others or is_made or is_cluster or "backward" in Reach([self.fn]).mentioned:
            return None
        from autosched.frontends.dynamo import TorchBackend

        known = {name: options[name] for name in own & options.keys()}
        made = TorchBackend(costs=self._compiled.costs, fuse=self._compiled.fuse, **known)
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
for _name in ("schedule", "submit", "wait", "map", "cache_info"):  # where autograd does not record
    setattr(CompiledModule, _name, _delegated(_name, Compiled, "_compiled"))


# ---- why a call needs a new capture

_MOST = 3  # changes that are named
_FACTS = "the tensor of,type,shape,strides,dtype,device,requires_grad,hooks".split(",")


def changes(before: Key, after: Key) -> list[tuple[str, str]]:
    """Return the first few differences between two keys; at least one.

    >>> tensors = {"x": ("x", None)}
    >>> keys = [Key(tensors, (), ("lr", (float, rate)), "{}", ()) for rate in ("0.1", "0.2")]
    >>> changes(*keys)
    [('lr', '0.1 -> 0.2')]
    """
    found = [*_of_tensors(before.tensors, after.tensors)]
    found += _of_values("an object", before.objects, after.objects)
    found = found or [*_of_values("an argument", before.arguments, after.arguments)]
    for what, old, new in (
        ("the state of an optimizer", [before.numbers], [after.numbers]),
        ("a setting of torch, such as no_grad or autocast", before.settings, after.settings),
    ):
        pairs = [(one, other) for one, other in zip_longest(old, new) if one != other]
        found = found or [(what, f"{_short(one)} -> {_short(other)}") for one, other in pairs]
    found = list(dict.fromkeys(found)) or [("an object", "it was replaced")]
    more = len(found) - _MOST
    return found[:_MOST] + ([("", f"and {more} more")] if more > 0 else [])


def _described(found: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{what}: {how}" if what else how for what, how in found)


def remedy(found: Sequence[tuple[str, str]], settings: frozenset[str]) -> str:
    """Return how to avoid recaptures for these changes.

    ``settings`` are the names of settings of optimizers' groups.

    >>> remedy([("lr", "0.1 -> 0.2")], frozenset(["lr"]))
    'a rate that is a tensor, lr=torch.tensor(...), may change without a recapture'
    """
    if rates := [name for name, _ in found if name in settings]:
        advice = "a rate that is a tensor, lr=torch.tensor(...), may change without a recapture"
        others = " and ".join(name for name in rates if name != "lr")
        return (
            advice
            if not others
            else (f"{advice}; do not change {others} (cycle_momentum=False of a scheduler)")
        )
    if any(how.startswith("shape") for _, how in found):
        advice = (
            "pad to one of few shapes, with a mask; instead of growing a cache, write in place "
            "into a part of one that has its largest shape"
        )
    elif any(how.startswith(("'", '"')) for _, how in found):
        advice = "leave a text that no operator reads out of the arguments"
    else:
        advice = (
            "pass what changes as a tensor, or do not change it; if it is a length, pad to one of "
            "few lengths"
        )
    return f"{advice}; maxsize= is the number of cached captures"


def _of_tensors(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            yield name, "it no longer exists" if new is None else "it did not exist"
        elif old != new:
            facts = zip(_FACTS, old, new, strict=False)
            what, one, other = next(fact for fact in facts if fact[1] != fact[2])
            yield name, f"{what} {_short(one)} -> {_short(other)}"


def _of_values(name: str, before: Any, after: Any) -> Iterator[tuple[str, str]]:
    """Yield the changes of values in nested tuples; names precede them in the keys."""
    olds, news = ([*_leaves(item)] for item in (before, after))
    for old, new in zip_longest(olds, news):
        if old == new:
            name = new if isinstance(new, str) else name
        elif isinstance(old, str) and isinstance(new, str):
            yield "a dict or object", f"it has {new!r} where it had {old!r}"
            return
        elif not _is_value(old) or not _is_value(new):
            yield name, "it was replaced"
            return  # all later positions differ
        elif len(olds) != len(news):
            how = "more" if len(olds) < len(news) else "fewer"
            yield "a list, dict or object", f"it has {how} items"
            return
        else:
            is_number = old[0] in (float, complex)  # of which a key has the text
            one, other = (item[1] if is_number else _short(item[1]) for item in (old, new))
            yield name, f"{one} -> {other}"


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, tuple) and not _is_value(item):
        for part in item:
            yield from _leaves(part)
    else:
        yield item


def _is_value(item: Any) -> bool:
    """Whether this is a key that ``value_key`` returned."""
    is_pair = isinstance(item, tuple) and len(item) == 2
    return is_pair and isinstance(item[0], type) and not isinstance(item[1], tuple)


def _short(item: Any) -> str:
    text = str(tuple(item)) if isinstance(item, tuple) else shown(item)
    return text if len(text) <= 60 else f"{text[:57]}..."
