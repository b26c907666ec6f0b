"""Compile programs to steps.

Each instruction is compiled once to a step. A step is a closure without arguments, and a run calls
lists of such steps, one list per thread. Between threads there is one lock per event and waiter. It
is released once and acquired once in a run, so nothing has to be built again for the next run.

This module makes no decisions: streams, order and waits are given by the program, and the backend
implements streams and events. This module adds that a wait never comes before its record where
different threads issue them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.program.program import (
    Copy,
    Free,
    Program,
    Receive,
    Record,
    Run,
    Send,
    Stream,
    Wait,
    occupied,
)
from autosched.runtime.backends import Backend, Capabilities, Step
from autosched.runtime.memory import Memory
from autosched.runtime.profile import annotation, ranged
from autosched.runtime.threads.tapes import Stretch, Tape

if TYPE_CHECKING:
    from autosched.runtime.ranks.generators import Drawing

__all__ = ["Carried", "Compiler", "Lines", "Wrap", "drawing_of"]

Wrap = Callable[[int, Step], Step]  # of the instruction at a position


class Lines(NamedTuple):
    """A program to compile.

    ``calls`` are the effects of its instructions (None: nothing), ``at`` their positions in the
    whole program.
    """

    program: Program
    calls: Sequence[Step | None]
    at: Sequence[int]
    backend: Backend


class Carried(NamedTuple):
    """What orders a run after earlier ones: locks between threads, and the earlier backends.

    ``awaited`` are the locks that waits for earlier runs acquire, by position; ``passed`` are steps
    that let later runs go on, by event. ``earlier`` returns the backend of the run that many
    before.
    """

    awaited: Mapping[int, threading.Lock]
    passed: Mapping[int, Sequence[Step]]
    earlier: Callable[[int], Backend]


class Compiler:
    """Compiles a schedule's program, and parts of it, for a backend.

    ``seconds`` are the modelled seconds of each instruction. With ``nvtx``, runs and copies are
    ranges of NVTX, named by their streams.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        machine: Machine,
        backend: Backend,
        seconds: Sequence[float],
        nvtx: bool,
    ):
        self.program = program
        self.graph = graph
        self.machine = machine
        self.backend = backend
        self.seconds = seconds
        self.nvtx = nvtx
        self.can = Capabilities(backend)
        self.memory = Memory(program, graph, self.can.located, self.can.emulating)
        on = {run.task: run.stream.device for run in program if isinstance(run, Run)}
        self.drawing = None if machine.rank is not None else drawing_of(graph, on, machine)
        self.calls = [self._call(i) for i in range(len(program))]
        issued = [machine.device(stream.device).is_accelerator for stream in program.streams]
        self.on_cpu = not any(issued)
        self.only_issues = all(issued)  # no step takes long: each issues work to a device

    def over(self, backend: Backend) -> Compiler:
        """Return a compiler of the same program for another backend, with memory of its own."""
        parts = self.program, self.graph, self.machine, backend, self.seconds, self.nvtx
        return Compiler(*parts)

    def _call(self, i: int) -> Step | None:
        """Return the function that changes memory for an instruction.

        None for records, waits and some frees.
        """
        memory = self.memory
        match self.program.instructions[i]:
            case Run(_, name):
                task = self.graph.task(name)
                dropped = self._dropped(i)
                if task.random and self.drawing is not None:
                    return self.drawing.around(task, memory.run(i, task, dropped))
                call = memory.call(i, task, dropped)
                return Stretch(memory.data, [call]) if call else memory.run(i, task, dropped)
            case Copy() as copy:
                return memory.copy(i, copy, self.backend.transfer(copy))
            case (Send() | Receive()) as half if self.can.exchanging is not None:
                return memory.exchange(i, half, self.can.exchanging.exchange(half))
            case Free(stream):
                return None if self._dropped(i - 1) else memory.free(i, self.can.free(stream))
        return _nothing

    def _dropped(self, i: int) -> int:
        """Return the slot that is freed together with a run, which saves a step; 0 if none."""
        match self.program.instructions[i : i + 2]:
            case (Run(stream), Free(owner)) if stream == owner and self.can.free(owner) is None:
                slots = self.memory.freed[i + 1]
                return slots[0] if len(slots) == 1 else 0
        return 0

    def tape(
        self,
        lines: Lines | None = None,
        call: Wrap | None = None,
        launched: Wrap | None = None,
        carried: Carried | None = None,
    ) -> Tape:
        """Return the steps of each thread; by default, of the whole program.

        ``call`` and ``launched`` wrap runs and copies before and after launch. Without ``carried``
        the run is alone, and does not wait for earlier ones.
        """
        lines = lines or Lines(self.program, self.calls, range(len(self.calls)), self.backend)
        program, calls, positions, backend = lines
        can = self.can if backend is self.backend else Capabilities(backend)
        tape = Tape(quick=self.only_issues)
        handshakes = _Handshakes(program, can, tape, carried)
        current: dict[str | None, Sequence[Stream]] = {}
        _add_first(program, can, tape)
        for at, instruction in enumerate(program.instructions):
            i = positions[at]
            made = calls[at]
            streams = occupied(instruction)
            thread = can.thread(instruction.stream)
            match instruction:
                case Record(stream, event):
                    tape.add(thread, i, backend.record(stream, event), *handshakes.record(event))
                case Wait(stream, event, ago):
                    tape.add(thread, i, *handshakes.wait(at))
                    source = backend if not ago else carried and carried.earlier(ago)
                    tape.add(thread, i, source.wait(stream, event) if source else None)
                case Free():
                    tape.add(thread, i, made)
                case Run() | Copy() | Send() | Receive() if made is not None:
                    if current.get(thread) != streams:
                        current[thread] = streams
                        tape.add(thread, i, can.enter(streams))
                    step = backend.launch(streams, self.seconds[i], call(i, made) if call else made)
                    if self.nvtx:
                        on = " and ".join(map(str, streams))
                        step = ranged(f"{annotation(i, instruction)} on {on}", step)
                    with handshakes.meeting(i, streams):
                        tape.add(thread, i, launched(i, step) if launched else step)
        _add_last(program, can, tape)
        _add_ending(can, tape)
        return tape


def drawing_of(graph: Graph, devices: Mapping[str, str], machine: Machine) -> Drawing | None:
    """Return how tasks draw random numbers in a process that plays several ranks, if any draws.

    ``devices`` are those of tasks, by name.
    """
    if not machine.ranks or not any(task.random for task in graph.tasks):
        return None
    from autosched.runtime.ranks.generators import Drawing

    return Drawing(graph, devices, machine.ranks)


def _add_first(program: Program, can: Capabilities, tape: Tape) -> None:
    """Add the steps with which a run begins on each stream, where there are any."""
    if can.bracketed is not None:
        for stream in program.streams:
            tape.add(can.thread(stream), 0, can.bracketed.follow(stream))


def _add_last(program: Program, can: Capabilities, tape: Tape) -> None:
    """Add the steps with which a run ends on each stream, where there are any."""
    if can.bracketed is not None:
        for stream in program.streams:
            tape.add(can.thread(stream), len(program) - 1, can.bracketed.leave(stream))


def _add_ending(can: Capabilities, tape: Tape) -> None:
    """Add the steps with which a run ends in each thread that exchanges values with other ranks."""
    for thread, steps in [*tape.steps.items()] if can.exchanging is not None else ():
        assert can.exchanging is not None
        ending = can.exchanging.ending(thread) if steps else None
        if ending is not None:
            tape.add(thread, steps[-1][0], ending)


class _Handshakes:
    """Locks between threads.

    A record releases the threads that wait for its event; a copy on two streams synchronizes their
    threads.
    """

    def __init__(
        self, program: Program, can: Capabilities, tape: Tape, carried: Carried | None = None
    ):
        self.can = can
        self.tape = tape
        self.carried = carried or Carried({}, {}, lambda ago: can.backend)
        self.locks: dict[int, threading.Lock] = {}  # by the position of the wait
        self.waiting: dict[int, list[threading.Lock]] = {}
        recorder: dict[int, str | None] = {}
        held: set[tuple[int, str | None]] = set()
        for i, instruction in enumerate(program):
            thread = can.thread(instruction.stream)
            match instruction:
                case Record(_, event):
                    recorder[event] = thread
                case Wait(_, event, 0) if (
                    recorder.get(event, thread) != thread and (event, thread) not in held
                ):
                    held.add((event, thread))
                    self.locks[i] = tape.lock()
                    self.waiting.setdefault(event, []).append(self.locks[i])

    def record(self, event: int) -> list[Step]:
        """Return the steps that release the waiting threads, of this run and of later ones."""
        own = [lock.release for lock in self.waiting.get(event, ())]
        return [*own, *self.carried.passed.get(event, ())]

    def wait(self, i: int) -> list[Step]:
        """Return the step that waits for the recording thread: one for each thread and event.

        None if the event is recorded later, or never: CUDA does not wait then.
        """
        lock = self.locks.get(i) or self.carried.awaited.get(i)
        return [] if lock is None else [lock.acquire]

    @contextlib.contextmanager
    def meeting(self, i: int, streams: Sequence[Stream]) -> Iterator[None]:
        """Block the thread of a copy's second stream, where the copy is, until it is issued."""
        here, *others = [self.can.thread(stream) for stream in streams]
        if not others or others[0] == here:
            yield
            return
        arrived = self.tape.lock()
        done = self.tape.lock()
        self.tape.add(others[0], i, arrived.release, done.acquire)
        self.tape.add(here, i, arrived.acquire)
        yield
        self.tape.add(here, i, done.release)


def _nothing() -> None:
    pass
