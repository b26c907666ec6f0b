"""Compile a program to steps, and run the steps.

Each instruction is compiled once to a step. A step is a closure without arguments, and a run calls
lists of such steps, one list per thread. Between threads there is one lock per event and waiter. It
is released once and acquired once in a run, so nothing has to be built again for the next run.

This module makes no decisions: streams, order and waits are given by the program, and the backend
implements streams and events. This module adds that a wait never comes before its record where
different threads issue them, and what happens when a step raises.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from autosched._lib.forks import forks, rlock
from autosched.codegen import Code
from autosched.errors import AutoschedError, RunTimeoutError, ScheduleError
from autosched.graph.graph import Graph, no_grad
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Free, Program, Record, Run, Wait, occupied
from autosched.runtime.backends import Backend, Step
from autosched.runtime.check import Check, Watcher
from autosched.runtime.hang_report import failed, report
from autosched.runtime.inline import Inline
from autosched.runtime.memory import Memory
from autosched.runtime.nesting import Calls, Turn
from autosched.runtime.profile import Notes, Trace, annotation, is_traced, ranged
from autosched.runtime.replay.recording import Lines, Parts, Replayer, reals
from autosched.runtime.replay.replaying import Replaying
from autosched.runtime.replay.segments import segmented
from autosched.runtime.threads.tapes import Fault, Late, Stretch, Tape, Team
from autosched.timeline.timeline import Timeline

__all__ = ["Executor"]

_serving: dict[int, Backend] = {}  # until closed; not noted on the backend, which may be any object
_calls = Calls()
_beginning = rlock()
Wrap = Callable[[int, Step], Step]
Read = TypeVar("Read")


class Executor:
    """A program, compiled for a backend, which can be called any number of times.

    It is ended by ``close()``, or when it is garbage collected. ``seconds`` are the modelled
    seconds of each instruction, for backends that emulate. The first run is checked for writes,
    aliases and random numbers that tasks did not declare; so is every run if ``check`` is set, and
    by all bits of the arguments with ``"bytes"``. With ``nvtx``, runs and copies are ranges of
    NVTX, named by their streams.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        machine: Machine,
        backend: Backend,
        seconds: Sequence[float],
        check: Check = False,
        code: Callable[[], Code] | None = None,
        nvtx: bool = False,
    ):
        for task in graph.tasks:
            if task.fn is None:
                raise ScheduleError(
                    f"task {task.name!r} has no function: it can be planned, not run"
                )
        if id(backend) in _serving:
            raise ScheduleError(
                f"{backend!r} serves another schedule, which is not closed; make a backend for each"
            )
        self.program = program
        self.graph = graph
        self.backend = backend
        self.seconds = seconds
        self.nvtx = nvtx
        cut = segmented(program, reals(machine)) if hasattr(backend, "recorder") else None
        backend.open(program if cut is None else cut.everything, machine)
        self.memory = Memory(program, graph, backend.place, getattr(backend, "here", None))
        self.calls = [self._call(i) for i in range(len(program))]
        on_cpu = [machine.device(stream.device).kind == "cpu" for stream in program.streams]
        self.code, self.quick = code if all(on_cpu) else None, not any(on_cpu)
        self.check = check
        self._begin()
        _serving[id(backend)] = backend
        self.replaying: Replaying | None = None
        if cut is not None and not check:
            compiled: Any = functools.partial(Executor._compile, weakref.proxy(self), None, None)  # type: ignore[arg-type]
            parts = Parts(
                cut,
                reals(machine),
                graph,
                self.memory,
                cast("Replayer", backend),
                self.calls,
                compiled,
            )
            self.replaying = Replaying(parts, self.tape)

    def _begin(self) -> None:
        """Create everything that belongs to this process: threads, and their locks."""
        self.forks = forks()
        self.tape = self._compile()
        self.watcher = Watcher(self.graph, self.check, self.memory.is_entangled)
        self.checked = False
        self.crew = self.backend.crew([thread for thread in self.tape.steps if thread is not None])
        self.busy = threading.Lock()
        self.caller = 0  # the thread that holds it, or held it last
        self.tidy = functools.partial(_tidy, self.crew, self.backend, self.memory)
        self.close = weakref.finalize(self, _close, self.crew, self.backend, self.busy, self.forks)

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
            self.replaying = None  # recordings belong to the parent
            self._begin()

    @property
    def name(self) -> str:
        """The name of its graph."""
        return self.graph.name

    @property
    def threads(self) -> frozenset[int]:
        """The identities of its own threads."""
        return self.crew.threads

    def is_run_by(self, thread: int) -> bool:
        """Whether a run is in progress that this thread called."""
        return self.caller == thread and self.busy.locked()

    def __call__(self, inputs: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Run once and return the outputs by name.

        Raises TaskError if a task raises, RunTimeoutError if it is late.
        """
        if self.forks != forks():
            self._begin_in_child()
        deadline = None if timeout is None else time.perf_counter() + timeout
        watched = self.check or not self.checked
        traced = is_traced()
        if self.replaying is not None and not watched:
            return self._replay(self.replaying, inputs, deadline)
        if not watched and not traced:
            if (
                deadline is None
                and self.inline is not None
                and all(map(_is_tensor, inputs.values()))
            ):
                return self._run_inline(self.inline, inputs)
            return self._run(lambda: self.tape, inputs, self._outputs, deadline)
        call = self._watch if watched else None
        outputs = self._run(
            lambda: self._compile_named(call, None, deadline), inputs, self._outputs, deadline
        )
        self.checked = True
        if self.replaying is not None:
            self.replaying.note(inputs)
        return outputs

    def profile(self, inputs: Mapping[str, Any], timeout: float | None = None) -> Timeline:
        """Run once, and return the timeline."""
        if self.forks != forks():
            self._begin_in_child()
        deadline = None if timeout is None else time.perf_counter() + timeout
        notes = Notes(self.program, self.backend, self.memory.results)
        try:
            notes.open()
            return self._run(
                lambda: self._compile_named(None, notes.timed, deadline),
                inputs,
                notes.timeline,
                deadline,
            )
        finally:
            notes.close()

    def _run(
        self,
        make: Callable[[], Tape],
        inputs: Mapping[str, Any],
        read: Callable[[], Read],
        deadline: float | None,
    ) -> Read:
        """Execute a tape once, and return the result of ``read`` at its end."""
        crew = self.crew
        with self._turn(deadline):
            try:
                self.memory.fill(inputs)
                tape = make()
                self.backend.begin(lambda: crew.stopped)
                self._raise(crew.run(tape, deadline), "end in time")
                if crew.stopped:
                    raise ScheduleError("the schedule was closed while it ran")
                self.backend.join()
                return read()
            finally:
                if not self.crew.afterwards(
                    self.tidy
                ):  # left to a thread; but the caller's streams are its own again
                    with contextlib.suppress(Exception):
                        self.backend.join()

    def _replay(
        self, replaying: Replaying, inputs: Mapping[str, Any], deadline: float | None
    ) -> dict[str, Any]:
        """Run once, from recorded graphs if there are any for inputs of this kind."""

        def outputs() -> dict[str, Any]:
            return self._outputs() if replaying.now is None else replaying.outputs(inputs)

        return self._run(
            lambda: replaying.tape(inputs, deadline is not None), inputs, outputs, deadline
        )

    @property
    def not_replayed(self) -> str | None:
        """The reason why nothing is recorded."""
        return None if self.replaying is None else self.replaying.reason

    def _outputs(self) -> dict[str, Any]:
        outputs = self.memory.outputs()
        self.backend.hand_out(outputs)
        return outputs

    @functools.cached_property
    def inline(self) -> Inline | None:
        """The generated code, if it is available and the backend adds nothing to it."""
        tape = self.tape
        program = self.program
        backend = self.backend
        plain = (
            self.code is not None
            and "torch" in sys.modules
            and tape.steps.keys() <= {None}
            and all(
                isinstance(step, Stretch) or step is self.calls[i]
                for i, step in tape.steps.get(None, ())
            )
            and not any(isinstance(instruction, Copy) for instruction in program)
            and all(backend.free(stream) is None for stream in program.streams)
        )
        return Inline(self.code()) if plain and self.code is not None else None

    def _run_inline(self, inline: Inline, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the generated code once."""
        with self._turn(None):
            self.memory.check(inputs)
            self.backend.begin(lambda: self.crew.stopped)
            try:
                outputs: dict[str, Any] = inline(inputs)
            except BaseException as error:
                found = inline.fault(error)
                if found is None:
                    raise
                try:
                    self._raise_fault(*found)
                finally:
                    del found  # whose error has this frame in its trace: the inputs would wait for the collector
            if self.crew.stopped:
                raise ScheduleError("the schedule was closed while it ran")
            self.backend.join()
            return outputs

    @contextlib.contextmanager
    def _turn(self, deadline: float | None) -> Iterator[None]:
        """Exclude other runs, including aborted ones that still execute."""
        try:
            if self.close.alive:
                _calls.enter(self)
            with self.busy if deadline is None else Turn(self.busy, deadline), no_grad():
                self.caller = threading.get_ident()
                if not self.close.alive:
                    raise ScheduleError("the schedule is closed; make a new one")
                try:
                    self._raise(
                        self.crew.settle(deadline),
                        "begin in time, as a run that was given up goes on",
                    )
                    yield
                finally:
                    self.caller = 0
        finally:
            _calls.leave(self)

    def _raise(self, end: Fault | Late | None, do: str) -> None:
        """Raise the error that ended a run, or the wait for the last one, if any."""
        if isinstance(end, Late):
            raise RunTimeoutError(
                f"the run did not {do}:\n{report(self.program, self.graph, end.places)}"
            )
        if end is not None:
            self._raise_fault(end, self.memory.arguments(end.position))

    def _raise_fault(self, fault: Fault, arguments: Sequence[Any]) -> NoReturn:
        instruction = self.program.instructions[fault.position]
        error = fault.error
        if isinstance(error, AutoschedError) or not isinstance(
            error, Exception
        ):  # the latter is no task's fault
            raise error
        raise failed(self.graph, instruction, error, arguments) from error

    # ---- compiling

    def _call(self, i: int) -> Step | None:
        """Return the function that changes memory for an instruction.

        None for records, waits and some frees.
        """
        match self.program.instructions[i]:
            case Run(_, name):
                task = self.graph.task(name)
                dropped = self._dropped(i)
                call = self.memory.call(i, task, dropped)
                return (
                    Stretch(self.memory.data, [call]) if call else self.memory.run(i, task, dropped)
                )
            case Copy() as copy:
                return self.memory.copy(i, copy, self.backend.transfer(copy))
            case Free(stream):
                return (
                    None if self._dropped(i - 1) else self.memory.free(i, self.backend.free(stream))
                )
        return _nothing

    def _dropped(self, i: int) -> int:
        """Return the slot that can be freed together with a run; 0 if none. This saves a step."""
        match self.program.instructions[i : i + 2]:
            case (Run(stream), Free(owner)) if stream == owner and self.backend.free(owner) is None:
                slots = self.memory.freed[i + 1]
                return slots[0] if len(slots) == 1 else 0
        return 0

    def _compile(
        self, call: Wrap | None = None, launched: Wrap | None = None, lines: Lines | None = None
    ) -> Tape:
        """Return the steps of each thread.

        ``call`` and ``launched`` wrap runs and copies before and after launch.
        """
        lines = lines or Lines(self.program, self.calls, range(len(self.calls)), self.backend)
        program, calls, positions, backend = lines
        tape = Tape(quick=self.quick)
        handshakes = _Handshakes(program, backend, tape)
        current: dict[str | None, Sequence[Any]] = {}
        for at, instruction in enumerate(program.instructions):
            i = positions[at]
            made = calls[at]
            streams = occupied(instruction)
            thread = backend.thread(instruction.stream)
            match instruction:
                case Record(stream, event):
                    tape.add(thread, i, backend.record(stream, event), *handshakes.record(event))
                case Wait(stream, event):
                    tape.add(thread, i, *handshakes.wait(at), backend.wait(stream, event))
                case Free():
                    tape.add(thread, i, made)
                case Run() | Copy() if made is not None:
                    if current.get(thread) != streams:
                        current[thread] = streams
                        tape.add(thread, i, backend.enter(streams))
                    step = backend.launch(streams, self.seconds[i], call(i, made) if call else made)
                    if self.nvtx:
                        step = ranged(
                            f"{annotation(i, instruction)} on {' and '.join(map(str, streams))}",
                            step,
                        )
                    with handshakes.meeting(i, streams):
                        tape.add(thread, i, launched(i, step) if launched else step)
        return tape

    def _watch(self, i: int, call: Step) -> Step:
        instruction = self.program.instructions[i]
        if not isinstance(instruction, Run):
            return call
        task = self.graph.task(instruction.task)
        memory = self.memory
        watched = getattr(self.backend, "watched", None)  # by backends that emulate
        if watched is not None:
            call = watched(instruction.stream.device, task.fn, call, lambda: memory.arguments(i))
        return self.watcher.around(
            task, call, lambda: memory.arguments(i), lambda: memory.results(i)
        )

    def _compile_named(
        self, call: Wrap | None, launched: Wrap | None, deadline: float | None
    ) -> Tape:
        """Return steps that appear in the trace of a torch.profiler, if one is active."""
        if not is_traced():
            return self._compile(call, launched)
        idle = bool(self.crew.threads) and None not in self.tape.steps and deadline is None
        trace = Trace(self.program, idle, lambda: self.crew.stopped)
        tape = self._compile(
            call, lambda i, step: trace.named(i, launched(i, step) if launched else step)
        )
        for told in trace.telling(tape.lock):
            tape.add(None, 0, told)
        return tape


class _Handshakes:
    """Locks between threads.

    A record releases the threads that wait for its event; a copy on two streams synchronizes their
    threads.
    """

    def __init__(self, program: Program, backend: Backend, tape: Tape):
        self.backend = backend
        self.tape = tape
        self.locks: dict[int, threading.Lock] = {}  # by the position of the wait
        self.waiting: dict[int, list[threading.Lock]] = {}
        recorder: dict[int, str | None] = {}
        held: set[tuple[int, str | None]] = set()
        for i, instruction in enumerate(program):
            thread = backend.thread(instruction.stream)
            match instruction:
                case Record(_, event):
                    recorder[event] = thread
                case Wait(_, event) if (
                    recorder.get(event, thread) != thread and (event, thread) not in held
                ):
                    held.add((event, thread))
                    self.locks[i] = tape.lock()
                    self.waiting.setdefault(event, []).append(self.locks[i])

    def record(self, event: int) -> list[Step]:
        """Return the steps that release the waiting threads."""
        return [lock.release for lock in self.waiting.get(event, ())]

    def wait(self, i: int) -> list[Step]:
        """Return the step that waits for the recording thread: one for each thread and event.

        None if the event is recorded later, or never: CUDA does not wait then.
        """
        return [self.locks[i].acquire] if i in self.locks else []

    @contextlib.contextmanager
    def meeting(self, i: int, streams: Sequence[Any]) -> Any:
        """Block the thread of a copy's second stream, at the copy's position there, until the copy is issued."""
        here, *others = [self.backend.thread(stream) for stream in streams]
        if not others or others[0] == here:
            yield
            return
        arrived = self.tape.lock()
        done = self.tape.lock()
        self.tape.add(others[0], i, arrived.release, done.acquire)
        self.tape.add(here, i, arrived.acquire)
        yield
        self.tape.add(here, i, done.release)


def _is_tensor(item: Any) -> bool:
    return hasattr(type(item), "data_ptr")


def _nothing() -> None:
    pass


def _tidy(crew: Team, backend: Backend, memory: Memory) -> None:
    """Drop a run's tensors when devices have finished the issued work."""
    if crew.stopped:
        with contextlib.suppress(Exception):
            backend.join()
    memory.clear()


def _close(crew: Team, backend: Backend, busy: threading.Lock, process: int) -> None:
    """End the threads.

    A call in another thread gets a moment to leave torch before the interpreter exits.
    """
    if process != forks():  # they are the parent's
        return
    crew.close()
    if busy.acquire(timeout=1.0):
        busy.release()
    backend.close()
    _serving.pop(id(backend), None)
