"""Submit runs of a schedule: the methods of ``Schedule`` for several runs in flight."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from autosched._lib.forks import forks, rlock
from autosched.errors import ScheduleError
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.program.program import Program
from autosched.runtime.backends import Backend
from autosched.runtime.execute import Executor
from autosched.runtime.in_flight.batches import results, unpacked
from autosched.runtime.in_flight.future import RunFuture
from autosched.runtime.in_flight.runs import Runs
from autosched.scheduling.agreement import inputs_on, own_inputs
from autosched.scheduling.arguments import checked_timeout
from autosched.scheduling.resident_state import ResidentState, moves_to

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

    graph: Graph
    machine: Machine
    program: Program
    backend: str | Backend
    _state: RunState

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
        return ResidentState(self.graph, moves_to(self.machine, self.backend), here)

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

    def call_with(
        self, args: Sequence[Any], inputs: Mapping[str, Any], timeout: Any, is_agreed: bool = False
    ) -> dict[str, Any]:
        """Call the schedule."""
        raise NotImplementedError

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
            return (self.call_with(*unpacked(batch, only), None) for batch in batches)
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
