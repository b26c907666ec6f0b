"""Define the schedule of a graph on a machine.

A schedule has a snapshot of the graph, so it does not change when the user's graph grows. It also
has the devices on which outputs were requested: otherwise a plan that leaves outputs elsewhere
would look better than it is. For a loaded schedule, outputs that are copied from the device of
their producer are taken as requested where they go.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, overload

from autosched._lib.display import public_names
from autosched._lib.fetching import fetched_ahead
from autosched._lib.files import write
from autosched._lib.forks import forks, rlock
from autosched.bounds import bounds
from autosched.bounds.periods import period_bounds
from autosched.codegen import Code, generate
from autosched.costs.costs import Costs
from autosched.costs.learning import learn
from autosched.errors import AutoschedError, ChartError, MachineError, ScheduleError, TaskError
from autosched.explanation import Case, Explanation, TaskExplanation, explain, explain_task
from autosched.graph.constraints import by_pattern
from autosched.graph.graph import Graph, run_serial
from autosched.lowering import lower
from autosched.lowering.resident_state import with_resident_state_as, without_resident_state
from autosched.machine.cluster import joined as joined_ranks
from autosched.placement import Placement
from autosched.placement import check as check_placement
from autosched.problem import Constraints, Problem
from autosched.recomputation.repeats import with_repeats
from autosched.recomputation.rewrite import first_name
from autosched.runtime.backends import Backend, make
from autosched.runtime.check import Check
from autosched.runtime.compiler import drawing_of
from autosched.runtime.execute import Executor, executor_of_rank
from autosched.runtime.in_flight.future import RunFuture
from autosched.runtime.in_flight.runs import Runs
from autosched.scheduling.agreement import OwnInputs
from autosched.scheduling.arguments import check_arguments, checked_count, checked_timeout
from autosched.scheduling.binding import Binding, binding_of
from autosched.scheduling.kept_state import ResidentState
from autosched.scheduling.plans import limit_note
from autosched.scheduling.saved import Saved, check_graph, describe, from_text, to_text
from autosched.simulation.footprint import memory_over_time, peaks
from autosched.simulation.plan import Plan
from autosched.simulation.simulate import simulate
from autosched.timeline.timeline import Timeline
from autosched.verification.verify import verify
from autosched.viz.drawing import phases, save_picture, show_timeline
from autosched.viz.gantt import gantt_svg
from autosched.viz.page import page_html

LOCK = rlock()  # two threads that call a schedule for the first time share one executor
_MORE = 3  # runs that are shown in addition to those in flight, to see a steady state


class RunState:
    """The mutable state of a schedule; the executor is made at the first run."""

    def __init__(self) -> None:
        self.executor: Executor | None = None
        self.runs: Runs | None = None
        self.verified = False
        self.closed = False


@dataclass(frozen=True)
class Schedule(Plan):
    """A verified program for a graph on a machine. Call it with the graph's inputs.

    ``print`` it to read the program. Its parts are ``problem``, ``placement`` and ``program``;
    ``graph``, ``machine`` and ``costs`` are those of the problem. Use it in a ``with`` statement, or
    call ``close()``, to end its threads.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> with asc.schedule(graph, asc.Machine.emulated(gpus=0)) as schedule:
    ...     schedule(x=41)
    {'y': 42}
    """

    backend: str | Backend = "host"
    check: Check = False
    _state: RunState = field(default_factory=RunState, init=False, compare=False, repr=False)

    # ---- running

    def __call__(self, /, *args: Any, **inputs: Any) -> dict[str, Any]:
        """Run and return the outputs by name; ``timeout`` is a keyword, too.

        Inputs are given by name, or in the order of ``graph.input_names``. The schedule of a
        captured graph is called as its function is; parameters, buffers and moments are those of
        its modules and optimizers: see ``Captured``.

        Raises TaskError if a task raises, and RunTimeoutError, which says who waits for whom, if
        the run does not end within ``timeout`` seconds. The schedule can be called again after
        either, and after KeyboardInterrupt. A task that continues nevertheless is abandoned after
        half a second, and the next call waits for it; until it ends, it may write to inputs that it
        was given to write. With a timeout all tasks run in threads of the schedule. The timeout
        does not cover work that was already issued to devices.

        Autograd does not follow tasks: where inputs require grad, outputs raise GradientError in
        ``backward()``, so that no gradient is lost unnoticed.

        Calls are serialized: a call from another thread waits until this one has ended. Raises
        ScheduleError if a task calls a schedule that waits for that task to end. After a fork, the
        child process starts its own threads.
        """
        # Python takes longer to call a function with many keywords if one is a parameter.
        timeout = inputs.pop("timeout", None)
        if self._is_busy:
            return self._call(args, inputs, timeout)
        seconds = checked_timeout(timeout)
        found, keep = self._binding.completed(self.graph, args, inputs)
        outputs = self._run(found, seconds)
        if keep is not None:
            keep(outputs)
        return outputs

    def run_with(self, inputs: dict[str, Any], is_agreed: bool = False) -> dict[str, Any]:
        """Run on all inputs, given by name, for functions that are called by schedules.

        ``is_agreed``: all ranks make such a call.
        """
        if self._is_busy:
            return self._call((), dict(inputs), None)
        return self._run(inputs, None, is_agreed)

    @cached_property
    def _binding(self) -> Binding:
        return binding_of(self.graph)

    @property
    def _is_busy(self) -> bool:
        """Whether other runs are under way, or may be."""
        runs = self._state.runs
        return self.program.in_flight > 1 or (runs is not None and not runs.is_idle)

    def _run(
        self, inputs: dict[str, Any], seconds: float | None, is_agreed: bool = False
    ) -> dict[str, Any]:
        """Run now, in the calling thread as far as possible."""
        own = self._own.of(inputs, is_agreed)
        kept = self._kept
        try:
            return self._guarded(inputs, self._executor(kept.inputs(own), seconds))
        except TaskError as error:
            raise error.with_traceback(None)  # noqa: B904
        except BaseException as error:
            if self.machine.rank is not None:
                joined_ranks().fail_by(error)  # unless they know
            raise
        finally:
            kept.wrote(inputs)

    def profile(
        self, /, *args: Any, repeat: Any = 1, warmup: Any = 0, timeout: Any = None, **inputs: Any
    ) -> Timeline:
        """Run and return a measured timeline: the median of ``repeat`` runs.

        The first ``warmup`` runs do not count. All times are seconds since the run began, on one
        clock. ``timeline.runs`` has each run, if there are several, and ``timeline.costs()`` has the
        measured costs, for
        ``asc.schedule(graph, machine, costs=...)``. Each run gets the same inputs: those that tasks
        write are written by each run. ``timeout`` applies to each run, as for a call. Of several
        ranks, which all call this, each gets the timeline of its own part, on its own clock.
        """
        runs = checked_count(repeat, "repeat", 1), checked_count(warmup, "warmup", 0)
        seconds = checked_timeout(timeout)
        inputs, _ = self._completed(args, inputs)
        profile = partial(self._executor.profile, self._kept.inputs(inputs), seconds)
        if self._state.runs is not None:
            profile = partial(self._runs.paused, profile)
        try:
            timelines = [profile() for _ in range(sum(runs))]
        finally:
            self._kept.wrote(inputs)
        measured = partial(_learned, problem=self.problem)
        return replace(Timeline.median(timelines[runs[1] :]), learn=measured)

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
            pairs = (_unpacked(batch, only) for batch in batches)
            return (self(*args, **inputs) for args, inputs in pairs)

        def submitted(batch: Any) -> RunFuture:
            args, inputs = _unpacked(batch, only)
            return self.submit(*args, **inputs)

        def results() -> Iterator[dict[str, Any]]:  # a loop lets go of its iterator when it raises
            for run in fetched_ahead(batches, self.program.in_flight, submitted):
                yield run.result()

        return results()

    @property
    def not_fused(self) -> dict[str, str]:
        """Why tasks are not fused, by name: for a graph that ``fuse`` returned, else empty.

        A region that could not be compiled is among them once that was tried.
        """
        failures = {task.name: getattr(task.fn, "failure", None) for task in self.graph.tasks}
        return {
            **getattr(self.graph, "not_fused", {}),
            **{name: why for name, why in failures.items() if why},
        }

    @property
    def not_replayed(self) -> str | None:
        """Why runs are not replayed from CUDA graphs, as far as known; None if they are or will be.

        With ``schedule(..., replay=True)`` the second run of inputs with the same shapes, strides,
        dtypes and numbers is captured, and later ones are replayed. Tasks on accelerators are not
        called in a replay: whatever they read apart from values must stay at its address, and their
        side effects apart from results do not happen.

        To capture, cached memory and all workspaces of cuBLAS in the process are released. CUDA
        graphs of your own keep the address of their workspace. If their stream had one before, call
        ``torch._C._cuda_clearCublasWorkspaces()`` before and after you capture them. If another
        thread synchronizes a device meanwhile, it gets an error, and a later run is captured.

        A recording keeps the memory that the program needs at its peak. Buffers for inputs that
        come from other addresses, copies of outputs, and workspaces are not part of that. If there
        is too little memory for a recording, the run is an ordinary one, and later ones are captured.

        >>> import autosched as asc
        >>> graph = asc.Graph()
        >>> graph.output(y=graph.input("x") + 1)
        >>> asc.schedule(graph, asc.Machine.emulated(gpus=0)).not_replayed
        "backend 'emulated' records nothing"
        """
        if self.backend != "replay" and not hasattr(self.backend, "recorder"):
            return f"backend {self.backend!r} records nothing"
        if self.program.in_flight > 1:
            return "several runs may be in flight, and a recording has the events of one run"
        executor = self._state.executor
        if executor is None:
            return None
        return "every run is checked" if executor.check else executor.not_replayed

    def run_serial(self, /, *args: Any, **inputs: Any) -> dict[str, Any]:
        """Run the tasks one by one, in insertion order, on their devices, as a reference.

        Parameters and results are those of a call. Waits for submitted runs.
        """
        self.wait()
        inputs, keep = self._binding.completed(self.graph, args, inputs)
        outputs = self._serial(inputs)
        if keep is not None:
            keep(outputs)
        return outputs

    @cached_property
    def _serial(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        if self.backend not in ("accelerator", "replay"):
            drawing = drawing_of(self.graph, self.placement.device, self.machine)
            return lambda inputs: run_serial(self.graph, inputs, drawing, self._binding.followed)
        from autosched.runtime.backends.accelerator import Accelerator

        placement = Placement(self.placement.device, tuple(task.name for task in self.graph.tasks))
        program = lower(self._as_is, placement)
        run = Executor(
            program, self.graph, self.machine, Accelerator(serial=True), [0.0] * len(program)
        )
        return lambda inputs: self._guarded(inputs, run(self._kept.inputs(inputs)))

    def close(self) -> None:
        """End the threads. It is called on garbage collection and at interpreter exit, too.

        It waits at most about a second for a running task, whose thread ends when the task does.
        """
        with LOCK:
            self._state.closed = True
            if self._state.runs is not None:
                self._state.runs.close()
            if self._state.executor is not None:
                self._state.executor.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without threads and other state of runs."""
        state = {item.name: getattr(self, item.name) for item in fields(self)}
        return state | {"_state": RunState()}

    def __enter__(self) -> Schedule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _executor(self) -> Executor:
        if self._state.executor is None:
            with LOCK:
                if self._state.executor is None:
                    self._state.executor = self._new_executor()
        return self._state.executor

    def _new_executor(self) -> Executor:
        self._check_open()
        self._verify_once()
        if self.machine.rank is not None:
            return executor_of_rank(self.program, self.graph, self.machine, self.check)
        backend = make(self.backend) if isinstance(self.backend, str) else self.backend
        parts = self.program, self.graph, self.machine, backend, self.seconds
        return Executor(*parts, self.check)

    @cached_property
    def _kept(self) -> ResidentState:
        return ResidentState(self.problem, self.backend, self.program)

    @cached_property
    def _own(self) -> OwnInputs:
        return OwnInputs(self.graph, self.machine, self.program)

    @property
    def inputs_here(self) -> tuple[str, ...]:
        """The inputs that this process passes: of ``Machine.cluster``, those on its devices."""
        return self._own.names

    def _completed(self, args: Sequence[Any], inputs: dict[str, Any]) -> Any:
        """Return the inputs of this process, and what keeps the outputs."""
        found, keep = self._binding.completed(self.graph, args, inputs)
        return self._own.of(found, is_agreed=False), keep

    def _guarded(self, inputs: Mapping[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
        """Return outputs that raise where autograd would lose a gradient."""
        return outputs if "torch" not in sys.modules else self._gradients.guarded(inputs, outputs)

    @cached_property
    def _gradients(self) -> Any:
        from autosched.graph.gradients import Gradients

        return Gradients(self.graph, self._binding.followed)

    @property
    def _runs(self) -> Runs:
        runs = self._state.runs
        if runs is None or runs.process != forks():
            with LOCK:
                self._check_open()
                runs = self._state.runs
                if runs is None or runs.process != forks():
                    kept = self._kept
                    parts = self._completed, self._guarded, kept.inputs, kept.wrote
                    runs = self._state.runs = Runs(self._executor, *parts, self.inputs_here)
        return runs

    def _check_open(self) -> None:
        if self._state.closed:
            raise ScheduleError("the schedule is closed; make a new one")

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule to a file as JSON, for ``load``, without functions and tensors.

        The file is written completely or not at all. Raises ScheduleError for what cannot be
        written as text, such as a backend that is an object, what ``schedule`` and ``verify`` raise
        for a schedule that ``load`` would refuse, and OSError.
        """
        write(path, self.text)

    @property
    def text(self) -> str:
        """The text that ``save`` writes. Raises as ``save`` does."""
        if not isinstance(self.backend, str):
            what = f"backend {self.backend!r} is an object and cannot be saved"
            raise ScheduleError(f"{what}; only a backend's name can")
        parts = self.machine, self.costs, self.placement, self.program, self.backend, self.check
        bound = ((task.name, self.problem.constraint(task)) for task in self.graph.tasks)
        devices = {name: device for name, device in bound if device}
        saved = Saved(describe(self.graph), *parts, devices)
        joined(saved, self.graph)  # the schedule may come from dataclasses.replace
        return to_text(saved)

    @cached_property
    def code(self) -> Code:
        """Return the schedule as PyTorch source: a module that does not need autosched.

        It has streams, events and a function ``step``. Objects that cannot be written as source,
        such as closures or constants, are keyword parameters of ``step``: ``code.given`` has them.
        The code of a program with several runs in flight executes one after
        another. Raises ScheduleError for a graph without functions, MachineError for a machine
        without contention.
        """
        self._verify_once()
        program = self.program
        if program.in_flight > 1:
            program = lower(self._as_is, self.placement)
        return generate(program, self.graph, self.machine, self.makespan)

    def save_code(self, path: str | os.PathLike[str]) -> None:
        """Write ``code`` to a file."""
        write(path, self.code)

    # ---- predictions and pictures

    def report(
        self, path: str | os.PathLike[str], measured: Timeline | None = None, *, title: str = ""
    ) -> None:
        """Write ``page`` to a file, completely or not at all; raises ChartError and OSError.

        >>> import autosched as asc, pathlib, tempfile
        >>> (graph := asc.Graph("one sum")).output(y=graph.input("x") + 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     asc.schedule(graph, asc.Machine.emulated(gpus=1)).report(f"{folder}/sum.html")
        ...     "<title>one sum" in pathlib.Path(f"{folder}/sum.html").read_text()
        True
        """
        if os.fspath(path).endswith((".svg", ".png", ".pdf")):
            raise ChartError(f"report writes HTML, draw a picture; got {os.fspath(path)!r}")
        write(path, self.page(measured, title=title))

    def page(self, measured: Timeline | None = None, *, title: str = "") -> str:
        """Return an HTML page with chart, graph, explanations, program and code.

        The page contains everything it needs and loads nothing from a server. ``measured`` is a
        result of ``profile``, shown beside the prediction.
        """
        try:
            code = str(self.code)
        except (MachineError, ScheduleError):  # there is no code for a graph without functions
            code = ""
        explanation = str(self.explain(measured=measured))
        parts = self.graph, self.program, self._shown(measured), measured
        memory = self.memory(measured)
        limits = {device.name: device.nbytes for device in self.machine.devices}
        return page_html(
            *parts, title=title, explanation=explanation, code=code, memory=memory, limits=limits
        )

    def simulate(self, runs: int = 1) -> Timeline:
        """Return the predicted timeline of a number of runs, submitted without delay.

        At most ``program.in_flight`` of them are under way at a time.
        """
        if checked_count(runs, "runs", 1) == 1:
            return self.predicted
        found = simulate(self.program, self.problem, runs)
        return replace(found, period=self.period, guess=self.costs.guess(self.graph))

    def verify(self) -> None:
        """Prove again that the program is race-free. Raises ProgramError if it is not."""
        verify(self.program, self.problem)
        self._state.verified = True

    def _verify_once(self) -> None:
        """Verify a program that was not verified yet, as one set by ``dataclasses.replace``."""
        if not self._state.verified:
            self.verify()

    @property
    def _as_is(self) -> Problem:
        """The problem with the outputs where the program leaves them."""
        return self.problem.constrained(outputs=dict(self.program.outputs))

    @property
    def runs_shown(self) -> int:
        """The runs that pictures show: 1, or for a loop a few more than are in flight."""
        in_flight = self.program.in_flight
        return 1 if in_flight == 1 else in_flight + _MORE

    def _shown(self, measured: Timeline | None = None) -> Timeline:
        """Return the prediction to show, of as many runs as ``measured`` has."""
        return self.simulate(self.runs_shown if measured is None else measured.run_count)

    @cached_property
    def period_bound(self) -> float:
        """Lower bound on the period of all schedules with as many runs in flight."""
        # Tasks that fit into no device's memory cannot run.
        in_flight = self.program.in_flight
        known = period_bounds((self.problem.original or self.problem).confined, in_flight)
        return max([*known.values(), self.placement.bound / in_flight])

    @cached_property
    def peak_bytes(self) -> dict[str, float]:
        """Peak memory of each device, without what tasks allocate temporarily.

        No run holds more, whichever threads are ahead: see ``autosched.simulation.footprint``. A
        value counts as ``costs.default_nbytes``, which is 0, unless costs know its bytes: from
        ``nbytes=``, or ``examples=`` of ``schedule``.
        """
        return peaks(self.program, self.problem)

    @cached_property
    def serial_seconds(self) -> float:
        """Predicted duration of the same tasks and copies, issued and run one at a time."""
        threads = self.issuing
        return sum(self.seconds) + (0.0 if threads is None else threads.total)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The tasks that are repeated because memory is limited, as they are named in ``graph``.

        ``mul.again`` makes again what ``mul`` made, which was not kept meanwhile.
        """
        original = self.problem.original
        names = () if original is None else original.graph.names
        return tuple(task.name for task in self.graph.tasks if original and task.name not in names)

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound on the makespan of all schedules of this graph on this machine."""
        known = bounds(without_resident_state(self.problem.original or self.problem))
        return max([*known.values(), self.placement.bound])

    @property
    def gap(self) -> float:
        """Makespan over the best lower bound, minus 1; 0 is optimal."""
        if not self.lower_bound:
            return 0.0
        # A bound may exceed the makespan by a rounding error.
        return max(0.0, self.makespan / self.lower_bound - 1)

    def memory(
        self, measured: Timeline | None = None
    ) -> dict[str, tuple[tuple[float, float], ...]]:
        """Return the bytes that each device holds over time, predicted or measured.

        The result has steps (seconds, bytes). ``autosched show --what memory`` draws them.
        ``autosched.simulation.footprint.memory_over_time`` documents what is counted.
        """
        timeline = self._shown() if measured is None else measured
        return memory_over_time(self.program, self.problem, timeline)

    def draw(
        self,
        path: str | os.PathLike[str],
        measured: Timeline | None = None,
        *,
        copies: bool = True,
        width: float = 1000,
        title: str | None = None,
        font_size: float = 12,
    ) -> None:
        """Draw a Gantt chart into a file, by suffix: .svg, .png or .pdf (extra ``viz``).

        ``measured``, a result of ``profile``, is drawn below the prediction. Without ``copies``,
        streams of copies are left out. ``width`` and ``font_size`` are in pixels; the title is that
        of the graph unless given. Raises ChartError for other suffixes and sizes, and OSError.
        """
        name = self.graph.name if title is None else title
        draw = partial(
            gantt_svg, self._shown(measured), title=name, measured=measured, copies=copies,
            phases=phases(self.graph), width=width, font_size=font_size,
        )  # fmt: skip
        save_picture(path, svg=draw)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return show_timeline(self._shown(), self.graph.name, repr(self), self.graph)

    @overload
    def explain(self, task: None = None, measured: Timeline | None = None) -> Explanation: ...

    @overload
    def explain(self, task: str, measured: Timeline | None = None) -> TaskExplanation: ...

    def explain(
        self, task: str | None = None, measured: Timeline | None = None
    ) -> Explanation | TaskExplanation:
        """Explain the makespan and suggest improvements, or explain a single task.

        Of a task, the explanation says why it runs on its device and at its time. ``print`` the
        result, or use its fields. ``measured`` is a result of ``profile``, to explain that run
        instead of the predicted one; gains are predicted in either case. Raises GraphError for an
        unknown task, ScheduleError for a timeline of another program.

        >>> import autosched as asc
        >>> graph = asc.Graph()
        >>> graph.output(y=graph.input("x") + 1)
        >>> asc.schedule(graph, asc.Machine.emulated(gpus=0)).explain().advice
        ()
        """
        case = Case(self.problem, self.placement, self.program)
        if task is not None:
            return explain_task(case, task, measured)
        found = explain(case, measured)
        return replace(found, notes=(*found.notes, *limit_note(case)))

    def __dir__(self) -> list[str]:
        return public_names(self, (item.name for item in fields(self) if item.repr))

    def __str__(self) -> str:
        return str(self.program)

    def __repr__(self) -> str:
        guess = self.costs.guess(self.graph)
        return (
            f"<Schedule of {self.graph.name!r}: {len(self.graph)} tasks, "
            f"{len(self.program)} instructions on {len(self.program.streams)} streams, "
            f"{self.makespan:.3g} s predicted{f', with {guess}' if guess else ''}>"
        )


def _unpacked(batch: Any, only: str | None) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call for an item; ``only`` is the name of the only input.

    The item for a graph with one input may be the input itself.
    """
    if isinstance(batch, Mapping) and (only is None or only in batch):
        return (), batch
    if isinstance(batch, (tuple, list)) and (only is None or len(batch) == 1):
        return batch, {}
    return (batch,), {}


def _learned(timeline: Timeline, problem: Problem) -> Costs:
    """Return the costs that a timeline shows, for the graph before tasks were repeated."""
    costs = learn(timeline, problem.graph, problem.machine, problem.costs)
    return costs if problem.original is None else costs.restricted(problem.original.graph)


def load(path: str | os.PathLike[str], graph: Graph) -> Schedule:
    """Read a saved schedule for the same graph built again, and verify it again.

    ``Schedule.save`` wrote the file. Tasks run the functions of ``graph``: the file holds no
    functions and no tensors. Raises ScheduleError for a malformed file, for a different graph, and
    for parts that do not fit together; OSError for a file that cannot be read.

    >>> import autosched as asc, tempfile
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.add(abs, graph.input("x"), seconds=1e-5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asc.schedule(graph, asc.Machine.emulated(gpus=1)).save(f"{folder}/plan.json")
    ...     asc.load(f"{folder}/plan.json", graph)
    <Schedule of 'graph': 1 tasks, 1 instructions on 1 streams, 1e-05 s predicted>
    """
    check_arguments(graph=graph)
    data = Path(path).read_bytes()
    try:
        return joined(from_text(data.decode()), graph)
    except (AutoschedError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{os.fspath(path)}: {error}") from error


def joined(saved: Saved, graph: Graph, rank: int | None = None) -> Schedule:
    """Join a saved schedule to its graph, with the checks of ``schedule`` and ``lower``.

    With a ``rank``, the graph is that rank's, and the schedule is that of rank 0.
    """
    inputs = dict(saved.program.inputs)
    free = (task.name for task in graph.tasks if task.device is None)
    place = {name: saved.devices[name] for name in free if name in saved.devices}
    state = binding_of(graph).state_on(graph, saved.machine)
    constraints = Constraints(place=place, state=state)
    problem = Problem(graph.snapshot(), saved.machine, saved.costs, constraints)
    problem = _with_saved_repeats(problem, saved.placement)
    problem = with_resident_state_as(problem, saved.placement, inputs)
    check_graph(saved, problem.graph, rank)
    by_pattern(inputs, [value.name for value in problem.graph.sources], "inputs", "input")
    for _, device in (*saved.program.inputs, *saved.program.outputs):
        saved.machine.device(device)
    saved.costs.check(problem.graph)
    problem = problem.constrained(inputs=inputs)
    if (original := problem.original) is not None:  # its bounds are those of the same inputs
        known = original.graph.names
        kept = tuple(name for name in problem.constraints.resident if name in known)
        homes = {name: device for name, device in inputs.items() if name in known}
        problem = replace(problem, original=original.constrained(inputs=homes, resident=kept))
    check_placement(saved.placement, problem)
    made = Schedule(problem, saved.placement, saved.program, saved.backend, saved.check)
    made.verify()
    _ = made.makespan  # raises for instructions that the machine cannot execute
    return made


def _with_saved_repeats(problem: Problem, placement: Placement) -> Problem:
    """Return the problem in which those tasks are repeated that a saved placement repeats."""
    graph = problem.graph
    order = [first_name(graph, name) for name in placement.order]
    if len(order) == len(set(order)) or not set(order) <= {task.name for task in graph.tasks}:
        return problem
    original = replace(problem, costs=problem.costs.restricted(graph))
    device = {first_name(graph, name): at for name, at in placement.device.items()}
    made, _ = with_repeats(original, replace(placement, device=device), order)
    return replace(made, costs=problem.costs)
