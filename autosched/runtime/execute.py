"""Run a schedule's program.

A call binds the inputs, runs the steps of the program, or replays a recording of an earlier run,
and returns the outputs. There is one run at a time. Also handles what happens when a step raises, a
run is late, or the process forks.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn, Protocol

from autosched._lib.forks import forks, in_child, rlock
from autosched._lib.tree import flatten
from autosched.codegen.threads import Emitted
from autosched.errors import AutoschedError, RunTimeoutError, ScheduleError
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.program.program import (
    Copy,
    Instruction,
    Program,
    Receive,
    Run,
    Send,
    occupied,
)
from autosched.runtime.backends import Backend, Capabilities, Step, Timed
from autosched.runtime.backends.host import prepare_thread
from autosched.runtime.check import Check, Watcher
from autosched.runtime.compiler import Compiler
from autosched.runtime.failures import failed, from_users_code, report
from autosched.runtime.memory import Memory
from autosched.runtime.replay.cache import Recordings
from autosched.runtime.replay.segments import segmented
from autosched.runtime.threads.runs import Fault, Late
from autosched.runtime.threads.team import ThreadTeam
from autosched.timeline.timeline import Span, Timeline, what

_serving: dict[int, Backend] = {}  # until closed; not noted on the backend, which may be any object
_beginning = rlock()


class Executor:
    """A program, compiled for a backend, which can be called any number of times.

    It is ended by ``close()``, or when it is garbage collected. ``seconds`` are the modelled
    seconds of each instruction, for backends that emulate. The first run is checked for writes,
    aliases and random numbers that tasks did not declare; so is every run if ``check`` is set, and
    by all bits of the arguments with ``"bytes"``.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        machine: Machine,
        backend: Backend,
        seconds: Sequence[float],
        check: Check = False,
    ):
        for task in graph.tasks:
            if task.fn is None:
                raise ScheduleError(
                    f"task {task.name!r} has no function: it can be planned, not run"
                )
        _check_generators(program, graph, machine)
        if id(backend) in _serving:
            raise ScheduleError(
                f"{backend!r} serves another schedule, which is not closed; make a backend for each"
            )
        self.program = program
        self.graph = graph
        self.backend = backend
        # A recording has the events of one run.
        replayable = Capabilities(backend).replayable if program.in_flight == 1 else None
        cut = None if replayable is None else segmented(program, machine.physical)
        backend.open(program if cut is None else cut.everything, machine)
        self.compiler = Compiler(program, graph, machine, backend, seconds)
        self.memory = self.compiler.memory
        _ = self.compiler.functions  # the first run calls them, and may have a deadline
        self.check = check
        self._begin()
        _serving[id(backend)] = backend
        self.recordings: Recordings | None = None
        if cut is not None and replayable is not None and not check:
            self.recordings = Recordings(cut, machine.physical, self.compiler, replayable)

    def _begin(self) -> None:
        """Create everything that belongs to this process: threads, and their locks."""
        self.forks = forks()
        vars(self).pop("emitted", None)  # with locks that a thread of the parent may hold
        self.watcher = Watcher(self.graph, self.check, self.memory.is_entangled)
        self.checked = False
        names = dict.fromkeys(map(self.compiler.can.thread, self.program.streams))
        threads = [name for name in names if name is not None]
        self.team = self.new_team(threads)
        self.busy = threading.Lock()
        self.caller = 0  # the thread that holds it, or held it last
        self.tidy = functools.partial(_tidy, self.team, self.backend, self.memory)
        self.close = weakref.finalize(
            self,
            _close,
            self.team,
            self.backend,
            self.busy,
            self.forks,
            weakref.ref(self.compiler),
        )

    def new_team(self, threads: Sequence[str | None]) -> ThreadTeam:
        """Return a team with these threads."""
        threaded = self.compiler.can.threaded
        return threaded.team(threads) if threaded else ThreadTeam(threads, prepare_thread)

    def _begin_in_child(self) -> None:
        """Start again in a forked process.

        The parent's threads do not exist here, and a run may have been in progress.
        """
        with _beginning:
            if self.forks == forks():
                return
            if not self.close.alive:
                raise ScheduleError("the schedule is closed; make a new one")
            self.close.detach()
            self.memory.clear()
            self.recordings = None  # recordings belong to the parent
            self._begin()

    @property
    def name(self) -> str:
        """The name of its graph."""
        return self.graph.name

    @property
    def threads(self) -> frozenset[int]:
        """The identities of its own threads."""
        return self.team.threads

    @property
    def not_replayed(self) -> str | None:
        """The reason why nothing is recorded."""
        return None if self.recordings is None else self.recordings.reason

    def is_run_by(self, thread: int) -> bool:
        """Whether a run is in progress that this thread called."""
        return self.caller == thread and self.busy.locked()

    def __call__(self, inputs: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Run once and return the outputs by name.

        Raises TaskError if a task raises, RunTimeoutError if it is late.
        """
        return self._exclusive(inputs, timeout, None)

    def profile(self, inputs: Mapping[str, Any], timeout: float | None = None) -> Timeline:
        """Run once, and return the timeline."""
        timed = self.compiler.can.timed
        if timed is None:
            raise ScheduleError(f"{self.backend!r} cannot be profiled: it measures no times")
        notes = Notes(self.program, timed, self.memory.results)
        self._exclusive(inputs, timeout, notes)
        return notes.timeline

    # ---- one run at a time

    def _exclusive(
        self, inputs: Mapping[str, Any], timeout: float | None, notes: Notes | None
    ) -> dict[str, Any]:
        """Run once, without autograd, when earlier runs have ended, including aborted ones.

        An interrupt can come after any call. So a lock that is taken is noted by the same call of C
        that takes it, and released without another call in between.
        """
        if self.forks != forks():
            self._begin_in_child()
        deadline = None if timeout is None else time.perf_counter() + timeout
        patience = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        torch: Any = sys.modules.get("torch")
        autograd = torch is not None and torch.is_grad_enabled()
        taken: list[bool] = []
        try:
            if self.close.alive:
                CALLS.enter(self)
            taken.extend(map(self.busy.acquire, (True,), (patience,)))
            if not taken[0]:
                raise RunTimeoutError(
                    "the run did not begin in time: another thread's call of the schedule goes on"
                )
            self.caller = threading.get_ident()
            if not self.close.alive:
                raise ScheduleError("the schedule is closed; make a new one")
            try:
                if autograd:
                    torch._C._set_grad_enabled(False)
                end = self.team.settle(deadline)
                self._raise(end, "begin in time, as an aborted run still executes")
                return self._run(inputs, deadline, notes)
            finally:
                if autograd:
                    torch._C._set_grad_enabled(True)
        finally:
            if True in taken:
                self.caller = 0
                self.busy.release()
            CALLS.leave(self)

    def _run(
        self, inputs: Mapping[str, Any], deadline: float | None, notes: Notes | None
    ) -> dict[str, Any]:
        """Run once; return the outputs, or for ``notes`` nothing."""
        recordings = self.recordings if notes is None else None
        watched = notes is None and bool(self.check or not self.checked)
        wrapped = watched or notes is not None or is_traced()
        if deadline is None and not wrapped and recordings is None and self.local is not None:
            return self._run_local(self.local, inputs)
        team = self.team
        try:
            # 1. Bind the inputs.
            recording = None
            if recordings is not None and not watched:
                recording = recordings.recognized(inputs)
            self.memory.fill(inputs, are_known=recording is not None)
            # 2. Choose the functions: of a recording that is valid for these inputs, or the program's.
            if recordings is not None and not watched:
                recording = recordings.find(inputs, recording, deadline is not None)
            if recording is not None:
                emitted = recording.emitted(inputs)
            else:
                emitted = self._wrapped(watched, notes) if wrapped else self.emitted
            # 3. Run them.
            self.backend.begin(lambda: team.stopped)
            self._raise(team.run(emitted, deadline), "end in time")
            if team.stopped:
                raise ScheduleError("the schedule was closed while it ran")
            self.backend.join()
            # 4. Return the outputs.
            if notes is not None:
                notes.finish()
                return {}
            if recordings is not None and recording is not None:
                return recordings.outputs(inputs)
            outputs = self._handed_out(self.memory.outputs())
            if watched:
                self.checked = True
                if recordings is not None:
                    recordings.note(inputs)
            return outputs
        finally:
            if not team.afterwards(self.tidy):
                # A thread tidies up later; but the caller's streams are the caller's again.
                with contextlib.suppress(Exception):
                    self.backend.join()

    def _handed_out(self, outputs: dict[str, Any]) -> dict[str, Any]:
        if self.compiler.can.hands_out is not None:
            self.compiler.can.hands_out.hand_out(outputs)
        return outputs

    @functools.cached_property
    def emitted(self) -> Emitted:
        """The functions of threads."""
        return self.compiler.emit()

    @functools.cached_property
    def local(self) -> Emitted | None:
        """The program as one function with local variables, if one thread executes it alone."""
        return None if self.program.in_flight > 1 else self.compiler.emit_local()

    def _run_local(self, emitted: Emitted, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run once in the calling thread."""
        memory = self.memory
        memory.check(inputs)
        aborted: list[bool] = []
        self.backend.begin(lambda: bool(aborted) or self.team.stopped)
        try:
            outputs: dict[str, Any] = emitted.local(*memory.in_order(inputs))
        except BaseException as error:
            aborted.append(True)
            with contextlib.suppress(Exception):
                self.backend.join()
            position, arguments = emitted.clear(error, memory.reads)
            try:
                self._raise_fault(Fault(position, error), arguments)
            finally:
                # The error refers to this frame: the inputs would wait for garbage collection.
                del arguments
        if self.team.stopped:
            raise ScheduleError("the schedule was closed while it ran")
        self.backend.join()
        return self._handed_out(outputs)

    # ---- errors

    def _raise(self, end: Fault | Late | None, do: str) -> None:
        """Raise the error that ended a run, or the wait for the last one, if any."""
        if isinstance(end, Late):
            here = report(self.program, self.graph, end.places)
            raise RunTimeoutError(f"the run did not {do}:\n{here}{end.elsewhere}")
        if end is not None:
            self._raise_fault(end, self.memory.arguments(end.position))

    def _raise_fault(self, fault: Fault, arguments: Sequence[Any]) -> NoReturn:
        raise self.error(fault, arguments)

    def error(self, fault: Fault, arguments: Sequence[Any]) -> BaseException:
        """Return the error for a fault: one that names the task, if it is a task's."""
        error = fault.error
        # What is not an Exception is no task's fault.
        if isinstance(error, AutoschedError) or not isinstance(error, Exception):
            return error
        if fault.position < 0:  # it comes from no instruction
            return error
        told = failed(self.graph, self.program.instructions[fault.position], error, arguments)
        told.__cause__ = error.with_traceback(from_users_code(error.__traceback__))
        return told

    # ---- runs that are checked, profiled or traced

    def _wrapped(self, watched: bool, notes: Notes | None) -> Emitted:
        """Return functions that are checked, measured, or shown by a torch.profiler."""
        traced = is_traced()

        def launched(i: int, step: Step) -> Step:
            if notes is not None:
                step = notes.timed(i, step)
            return named(annotation(i, self.program.instructions[i]), step) if traced else step

        return self.compiler.emit(None, self._watch if watched else None, launched)

    def _watch(self, i: int, call: Step) -> Step:
        """Return a run with a check around it."""
        instruction = self.program.instructions[i]
        if not isinstance(instruction, Run):
            return call
        task = self.graph.task(instruction.task)
        memory = self.memory
        arguments = functools.partial(memory.arguments, i)
        return self.watcher.around(task, call, arguments, functools.partial(memory.results, i))


def _check_generators(program: Program, graph: Graph, machine: Machine) -> None:
    """Raise ScheduleError if ranks draw random numbers on accelerators that one process has.

    Ranks may have the same accelerator, and so one generator, from which they would draw in any
    order. On CPUs, and on emulated machines, each rank has its own: see ``Drawing``.
    """
    if machine.rank is not None or machine.imagined or not machine.ranks:
        return
    drawing: dict[int, str] = {}
    for instruction in program:
        if isinstance(instruction, Run) and graph.task(instruction.task).random:
            drawing.setdefault(machine.ranks[instruction.stream.device], instruction.task)
    if len(drawing) > 1 and machine.accelerators:
        (one, first), (other, second) = sorted(drawing.items())[:2]
        raise ScheduleError(
            f"task {first!r} of rank {one} and task {second!r} of rank {other} draw random "
            "numbers, each from generators of its own rank, and this process has one for both; "
            "run it on several processes, with Machine.cluster()"
        )


def executor_of_rank(program: Program, graph: Graph, machine: Machine, check: Check) -> Executor:
    """Return an executor of this rank's part of a program."""
    from autosched.runtime.ranks.backend import backend_of

    assert machine.rank is not None
    part = program.part(machine.rank)
    seconds = [0.0] * len(part)  # nothing is emulated
    return Executor(part, graph, machine, backend_of(part), seconds, check)


def _tidy(team: ThreadTeam, backend: Backend, memory: Memory) -> None:
    """Drop a run's tensors when devices have finished the issued work."""
    if team.stopped:
        with contextlib.suppress(Exception):
            backend.join()
    memory.clear()


def _close(
    team: ThreadTeam,
    backend: Backend,
    busy: threading.Lock,
    process: int,
    emitting: weakref.ref[Compiler],
) -> None:
    """End the threads.

    A call in another thread gets a moment to leave torch before the interpreter exits.
    """
    if process != forks():  # they are the parent's
        return
    team.close()
    if busy.acquire(timeout=1.0):
        if (compiler := emitting()) is not None:
            compiler.forget()
        busy.release()
    backend.close()
    _serving.pop(id(backend), None)


# ---- measured times, and names in the trace of an active torch.profiler, or of ``emit_nvtx``


class Notes:
    """The measurements of one run."""

    timeline: Timeline

    def __init__(self, program: Program, backend: Timed, made: Callable[[int], list[Any]]):
        self.program = program
        self.backend = backend
        self.made = made
        self.stamps: dict[int, tuple[Any, Any]] = {}
        self.nbytes: dict[int, float] = {}

    def timed(self, i: int, step: Step) -> Step:
        """Return a run or a copy that measures when it begins and ends, and how much it moves."""
        instruction = self.program.instructions[i]
        stamp = self.backend.stamp(occupied(instruction))
        stamps = self.stamps
        moves = isinstance(instruction, (Copy, Receive))

        def timed() -> None:
            start = stamp()
            step()
            stamps[i] = (start, stamp())
            if moves:
                self.nbytes[i] = sum(map(_nbytes, flatten(self.made(i))))

        return timed

    def finish(self) -> None:
        """Read the backend's clock, after its ``join``, and make the timeline."""
        seconds = self.backend.seconds
        spans = [self._span(i, *map(seconds, pair)) for i, pair in sorted(self.stamps.items())]
        made = Timeline.of(spans, self.program.arrows)
        self.timeline = replace(made, doubt=self.backend.doubt)

    def _span(self, i: int, start: float, end: float) -> Span:
        instruction = self.program.instructions[i]
        assert isinstance(instruction, (Run, Copy, Send, Receive))
        return Span(
            *what(instruction), occupied(instruction), start, end, i, self.nbytes.get(i, 0.0)
        )


def is_traced() -> bool:
    """Whether torch.profiler is active in this process; costs one look-up if not."""
    profiler = sys.modules.get("torch.autograd.profiler")
    return profiler is not None and getattr(profiler, "_is_profiler_enabled", False)


def annotation(i: int, instruction: Instruction) -> str:
    """Return the name of a run or a copy in a trace of torch.profiler.

    >>> from autosched.program.program import Stream
    >>> annotation(7, Run(Stream("cpu", "compute"), "h"))
    'autosched::run h#7'
    """
    return f"autosched::{instruction}#{i}"


def named(name: str, step: Step) -> Step:
    """Return a step under a name in a trace of torch.profiler, if this sees its thread."""
    from torch.profiler import record_function

    def within() -> None:
        with record_function(name):
            step()

    return within


def _nbytes(leaf: Any) -> float:
    """Return the bytes of a tensor or an array, if they are known."""
    with contextlib.suppress(Exception):  # a sparse tensor has none of its own
        return float(leaf.nbytes)
    return 0.0


# ---- schedules that are called by tasks of other schedules
#
# A run waits for its tasks. A task that calls a schedule waits for that call, and the call waits for
# the run of that schedule that is in progress. If these waits form a cycle, none of them ends. Knows
# no program: a schedule is identified by a name.


class Called(Protocol):
    """A schedule, which runs tasks in the calling thread and in threads of its own."""

    @property
    def name(self) -> str:
        """The name for error messages."""

    @property
    def threads(self) -> frozenset[int]:
        """The identities of its own threads."""

    def is_run_by(self, thread: int) -> bool:
        """Whether a run of it is in progress that this thread called."""


class Calls:
    """The calls in progress or waiting to begin, by the thread that made them, innermost last."""

    def __init__(self) -> None:
        self._forget()
        in_child(self._forget)

    def _forget(self) -> None:
        self._guard = threading.Lock()
        self._stacks: dict[int, list[Called]] = {}

    def enter(self, called: Called) -> None:
        """Register a call in this thread.

        Raises ScheduleError if it would wait for itself to end.
        """
        me = threading.get_ident()
        with self._guard:
            # An interrupt may have prevented the removal of a call: keep only those in progress.
            stack = [item for item in self._stacks.get(me, ()) if item.is_run_by(me)]
            if self._stacks and (path := self._path(me, stack, [called])) is not None:
                _refuse([repr(item.name) for item in path])
            self._stacks[me] = [*stack, called]

    def leave(self, called: Called) -> None:
        """Remove a call of this thread that has ended."""
        me = threading.get_ident()
        with self._guard:
            stack = self._stacks.pop(me, [])
            if called in stack and stack[0] is not called:
                self._stacks[me] = stack[: stack.index(called)]

    def _path(self, me: int, stack: list[Called], path: list[Called]) -> list[Called] | None:
        """Return a chain of waits to the run of which this thread executes a task, None if none."""
        last = path[-1]
        if (last is stack[-1]) if stack else (me in last.threads):
            return path
        for other in self._waited_for(last):
            if other not in path and (found := self._path(me, stack, [*path, other])) is not None:
                return found
        return None

    def _waited_for(self, called: Called) -> Iterator[Called]:
        """Yield the schedules that are called by tasks of a run in progress."""
        for thread, stack in self._stacks.items():
            if thread in called.threads:
                yield stack[0]
            elif called in stack[:-1] and called.is_run_by(thread):
                yield stack[stack.index(called) + 1]


def _refuse(names: Sequence[str]) -> NoReturn:
    """Raise ScheduleError: a task of the last schedule calls the first, which waits for it."""
    if len(names) == 1:
        raise ScheduleError(
            "a task calls the schedule that it is part of, and would wait for itself"
        )
    calls = [f"a task of {a} calls {b}" for a, b in pairwise(names)]
    raise ScheduleError(
        f"a task of schedule {names[-1]} calls schedule {names[0]}, and {', and '.join(calls)}: "
        "each would wait for the other for ever; call one of them after the other has ended"
    )


CALLS = Calls()
