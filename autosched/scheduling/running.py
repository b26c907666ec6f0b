"""Submit runs of a schedule: the methods of ``Schedule`` for several runs in flight.

And give it the state that it keeps on devices. On an imagined machine a tensor of the caller stands
for the one on the device. On a real one, state that is elsewhere is copied to its device before a
run, once, and again when other code has changed it: when the caller's tensor is another one, has
other memory, or its version counter has moved. Torch counts no version where it updates the
statistics of a batch norm, nor where an optimizer is fused. So small buffers are compared element
by element, and a step of an optimizer counts as a change of its parameters. Nothing reveals a write
through ``tensor.data`` or NumPy. The copies are only read, so the caller's tensors are never out of
date.
"""

from __future__ import annotations

import sys
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autosched._lib.aliasing import are_apart, extents, first_meeting
from autosched._lib.copying import span
from autosched._lib.forks import forks, rlock
from autosched.costs.costs import Costs
from autosched.errors import HazardError, ScheduleError
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.problem import Problem
from autosched.program.program import Program
from autosched.runtime.backends import Backend
from autosched.runtime.execute import Executor
from autosched.runtime.in_flight.batches import results, unpacked
from autosched.runtime.in_flight.future import RunFuture
from autosched.runtime.in_flight.runs import Runs
from autosched.scheduling.agreement import inputs_on, own_inputs
from autosched.scheduling.arguments import checked_timeout

__all__ = ["LOCK", "RunState", "Running"]

LOCK = rlock()  # two threads that call a schedule for the first time share one executor


class RunState:
    """The mutable state of a schedule; the executor is made at the first run."""

    def __init__(self) -> None:
        self.executor: Executor | None = None
        self.runs: Runs | None = None
        self.verified = False
        self.closed = False


class Running:
    """What a schedule does with several runs."""

    problem: Problem
    program: Program
    backend: str | Backend
    _state: RunState

    @property
    def graph(self) -> Graph:
        """The graph that is run, which does not change when the user's grows."""
        return self.problem.graph

    @property
    def machine(self) -> Machine:
        """The machine that it is planned for."""
        return self.problem.machine

    @property
    def costs(self) -> Costs:
        """The costs that predictions use."""
        return self.problem.costs

    @property
    def _executor(self) -> Executor:
        raise NotImplementedError

    @cached_property
    def _kept(self) -> ResidentState:
        here = None
        if self.machine.rank is not None:
            devices = self.machine.here
            names = [value.name for value in self.graph.sources if value.tensor is None]
            here = [name for name, at in self.program.inputs if at in devices and name in names]
        return ResidentState(self.problem, moves_to(self.machine, self.backend), here)

    @cached_property
    def inputs_here(self) -> tuple[str, ...]:
        """The inputs that this process passes: of ``Machine.cluster``, those on its devices."""
        return inputs_on(self.machine.here, self.program, self.graph)

    def _completed(self, args: Sequence[Any], inputs: dict[str, Any]) -> Any:
        """Return the inputs of this process, and what keeps the outputs: ``Graph.completed``."""
        found, keep = self.graph.completed(args, inputs)
        return own_inputs(self, found, is_agreed=False), keep

    @cached_property
    def call_name(self) -> str:
        """What ranks agree on before a call: that it is of this program."""
        number = zlib.crc32(str(self.program).encode())
        return f"a call of a schedule of {self.graph.name!r}, number {number:x}"

    @cached_property
    def first_shapes(self) -> dict[str, Any]:
        """Shapes and dtypes of the inputs in the first call, on several ranks."""
        return {}

    def _guarded(self, inputs: Mapping[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
        """Return outputs that raise where autograd would lose a gradient."""
        return outputs if "torch" not in sys.modules else self._gradients.guarded(inputs, outputs)

    @cached_property
    def _gradients(self) -> Any:
        from autosched.graph.gradients import Gradients

        return Gradients(self.graph)

    def submit(self, /, *args: Any, timeout: Any = None, **inputs: Any) -> RunFuture:
        """Start a run, and return its future immediately.

        The future has the methods of ``concurrent.futures.Future``, and can be awaited. Inputs are
        given as in a call. At most ``in_flight`` runs are under way at a time: while they are,
        ``submit`` blocks, also an event loop: let coroutines wait for a semaphore before. Several
        threads may submit; runs behave as if executed one after another in the order of submission.
        Do not write to the inputs of a run before it has ended, nor read those that its tasks
        write: a model that is evaluated meanwhile may have half of an update. ``wait()`` before. An
        output that shares memory with an input that tasks write shows what later runs write.

        ``result()`` raises TaskError if a task raised. If runs share state, which tasks of them
        write, those that were submitted later and are under way raise CancelledRunError then; the
        state is what the tasks left. A run that has not ended ``timeout`` seconds after ``submit``
        is aborted, and raises RunTimeoutError; ``result(timeout=...)`` only stops waiting. Runs
        that are under way are aborted by ``close()``: call ``wait()`` before it.

        Some runs wait for all before them: the first one, which is checked, and each one with
        ``check``; runs after a captured step that puts new tensors into modules, as its inputs are
        what the step before leaves there; and runs on tensors that share memory with other inputs
        of earlier runs, if tasks write them.

        >>> import autosched as asc
        >>> graph = asc.Graph()
        >>> graph.output(y=graph.input("x") + 1)
        >>> with asc.schedule(graph, asc.Machine.emulated(gpus=0), in_flight=2) as schedule:
        ...     [run.result()["y"] for run in [schedule.submit(x=1), schedule.submit(x=2)]]
        [2, 3]
        """
        if self.machine.rank is not None:
            raise ScheduleError("ranks execute one run at a time: call the schedule")
        return self._runs.submit(args, inputs, checked_timeout(timeout))

    def submit_for(
        self, inputs: dict[str, Any], finish: Callable[[Mapping[str, Any]], Any]
    ) -> RunFuture:
        """Start a run whose result is what ``finish`` returns for its outputs.

        For functions that are called by schedules. ``finish`` is called in any thread, in the order
        of the runs.
        """
        return self._runs.submit((), inputs, None, finish)

    def _call(self, args: Any, inputs: dict[str, Any], timeout: Any) -> dict[str, Any]:
        """Submit a run, and wait for it; abort it on an interrupt."""
        run = self.submit(*args, timeout=timeout, **inputs)
        try:
            outputs: dict[str, Any] = run.result()
        except BaseException:
            if not run.done():
                self._runs.abort(run)
            raise
        return outputs

    def wait(self, timeout: Any = None) -> None:
        """Wait until all submitted runs have ended, also those that failed.

        Raises RunTimeoutError if that takes more than ``timeout`` seconds.
        """
        seconds = checked_timeout(timeout)
        if (runs := self._state.runs) is not None and runs.process == forks():
            runs.wait(None if seconds is None else time.perf_counter() + seconds)

    def map(self, batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield the outputs of a run on each item of an iterable, in order.

        Items are mappings with inputs by name, tuples or lists with inputs in order, or the only
        input. A thread fetches them ahead: at most ``in_flight`` runs are under way, or have
        outputs that were not yielded. If the iterable or a run raises, earlier outputs are yielded
        first. When the caller stops early, up to ``in_flight`` items more may have been processed.
        Between items, runs are under way: see ``submit`` for what may be read then.

        The iterable is used by that thread while runs execute, so both must not draw random
        numbers from one generator if these are to be reproducible.

        >>> import autosched as asc
        >>> graph = asc.Graph()
        >>> graph.output(y=graph.input("x") + 1)
        >>> with asc.schedule(graph, asc.Machine.emulated(gpus=0), in_flight=2) as schedule:
        ...     [outputs["y"] for outputs in schedule.map(range(3))]
        [1, 2, 3]
        """
        names = self.graph.input_names
        only = names[0] if len(names) == 1 else None
        if self.machine.rank is not None:
            call: Any = self
            pairs = (unpacked(batch, only) for batch in batches)
            return (call(*args, **inputs) for args, inputs in pairs)
        return results(self.submit, batches, self.program.in_flight, only)

    @property
    def _runs(self) -> Runs:
        runs = self._state.runs
        if runs is None or runs.process != forks():
            executor = self._executor
            with LOCK:
                if self._state.closed:
                    raise ScheduleError("the schedule is closed; make a new one")
                if self._state.runs is None or self._state.runs.process != forks():
                    kept = self._kept
                    parts = self._completed, self._guarded, kept.inputs, kept.wrote
                    self._state.runs = Runs(executor, *parts, self.inputs_here)
                runs = self._state.runs
        return runs


Move = Callable[[Any], Any]  # returns a copy of a tensor on a device


def moves_to(machine: Machine, backend: str | Backend) -> dict[str, Move]:
    """Return, by accelerator, what copies tensors there; none where these are imagined.

    >>> moves_to(Machine.emulated(gpus=1), "emulated")
    {}
    """
    is_located = backend in ("accelerator", "replay") or hasattr(backend, "place")
    if machine.imagined or not is_located:
        return {}
    return {name: _move_to(place) for name, place in machine.physical.items() if place}


class ResidentState:
    """The state that a schedule of ``problem`` keeps; ``moves`` copy tensors to physical devices.

    ``here`` are the inputs of this rank, if there are several.
    """

    def __init__(
        self, problem: Problem, moves: Mapping[str, Move], here: Collection[str] | None = None
    ):
        graph = problem.graph
        source = {value.name: value.copy_of or value.name for value in graph.sources}
        self._sources = None if here is None else {name: source[name] for name in here}
        resident = problem.constraints.resident
        homes = {name: problem.homes[graph.value(name).index] for name in resident}
        self._moves = {name: (home, moves[home]) for name, home in homes.items() if home in moves}
        self._others = {name: source[name] for name in resident if name != source[name]}
        self._moved = {source[name] for name in self._moves}
        self._written = {
            value.name
            for value in graph.sources
            if value.tensor is None and graph.last_version(value.index)
        }
        self._copies: dict[str, _Copy] = {}

    def inputs(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of a run, with state on its devices.

        Raises HazardError if a task writes memory of which there is a copy.
        """
        if self._sources is not None:
            return {name: given[source] for name, source in self._sources.items()}
        if not self._moves and not self._others:
            return given
        if self._moves and self._written:
            self._check_apart(given)
        found = dict(given)
        for name, source in self._others.items():
            if source in given:
                found[name] = given[source]
        for name, (device, move) in self._moves.items():
            if (tensor := found.get(name)) is not None:
                found[name] = self._current(name, tensor, device, move)
        for name in self._others.keys() & found.keys() - self._moves.keys():
            found[name] = _another(found[name])
        return found

    def wrote(self, given: Mapping[str, Any]) -> None:
        """Note that a run may have written its inputs."""
        if self._written and _COPIES:
            forget(given[name] for name in self._written if name in given)

    def _current(self, name: str, tensor: Any, device: str, move: Move) -> Any:
        """Return the copy of a tensor; a new one if the tensor was changed."""
        copy = self._copies.get(name)
        if copy is None or not copy.is_of(tensor):
            copy = _COPIES.get((id(tensor), device))  # of another schedule
            if copy is None or not copy.is_of(tensor):
                copy = _copied(tensor, device, move)
            if copy is None:
                return tensor
            self._copies[name] = copy
        return copy.tensor

    def _check_apart(self, given: Mapping[str, Any]) -> None:
        """Raise HazardError if a task writes memory of state of which there is a copy."""
        if are_apart(given.values()):
            return
        written = self._written
        owned = [(name, extent) for name, item in given.items() for extent in extents(item)]

        def matters(a: str, b: str) -> bool:
            return (a in written and b in self._moved) or (b in written and a in self._moved)

        pair = first_meeting(owned, matters)
        if pair is not None:
            a, b = pair
            raise HazardError(
                f"{a!r} and {b!r} share memory, and {(a if a in written else b)!r} is written in "
                "place; pass a clone, or make one a view of the other in the graph"
            )


@dataclass(eq=False)
class _Copy:
    """A copy of a tensor on a device: of which tensor, in which memory, and of which version.

    ``memory`` shares that memory, so that nothing else comes to its address. ``elements`` are those
    at that time, of a tensor whose version does not show each write.
    """

    tensor: Any
    source: Any
    memory: Any
    version: int | None
    elements: Any

    def is_of(self, source: Any) -> bool:
        """Whether a tensor is the source, and unchanged."""
        memory = self.memory
        is_same = (
            source is self.source
            and self.version is not None
            and self.version == source._version
            and source.data_ptr() == memory.data_ptr()
            and source.shape == memory.shape
            and source.stride() == memory.stride()
            and source.dtype is memory.dtype
        )
        if not is_same or self.elements is None:
            return is_same
        return bool(sys.modules["torch"].equal(self.elements, memory))


# The copies that schedules hold, which they share, by the source's identity and the device.
_COPIES: weakref.WeakValueDictionary[tuple[int, str], _Copy] = weakref.WeakValueDictionary()
_HOOKS: list[Any] = []


def _copied(source: Any, device: str, move: Move) -> _Copy | None:
    """Copy a tensor to a device; None for what is not an ordinary one."""
    torch = sys.modules["torch"]
    if not isinstance(source, torch.Tensor) or source.layout is not torch.strided:
        return None
    if not _HOOKS:
        optimizer = sys.modules["torch.optim.optimizer"]
        _HOOKS.append(optimizer.register_optimizer_step_post_hook(_note_step))
    memory = source.detach()
    is_counted = isinstance(source, torch.nn.Parameter) or source.dim() > 1
    elements = None if is_counted else memory.clone()
    version = None if source.is_inference() else source._version  # those have none
    copy = _COPIES[id(source), device] = _Copy(move(memory), source, memory, version, elements)
    return copy


def forget(tensors: Iterable[Any]) -> None:
    """Let all schedules copy tensors again, because they may have been written."""
    found = set(map(id, tensors))
    for copy in list(_COPIES.values()):
        if id(copy.source) in found:
            copy.version = None


def _note_step(optimizer: Any, *_: Any) -> None:
    """Let a step of an optimizer count as a change of its parameters."""
    if _COPIES:
        forget(item for group in optimizer.param_groups for item in group["params"])


def _another(tensor: Any) -> Any:
    """Return another object for the same memory, since on imagined machines objects have devices."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _move_to(device: str) -> Move:
    """Return a function that copies tensors to a torch device, with their strides."""

    def move(tensor: Any) -> Any:
        if tensor.is_contiguous() or not tensor.numel():
            return tensor.to(device)
        row = tensor.as_strided((span(tensor),), (1,)).to(device)
        return row.as_strided(tensor.shape, tensor.stride())

    return move
