"""Emit the functions of a program's threads for a backend.

Each instruction becomes lines of the function of the thread that issues its stream: a task the
statements that ``codegen`` writes, on slots of values; the rest calls of what the backend returns
for it. Between threads there is one lock per event and waiter. It is released once and acquired
once in a run, so nothing has to be built again for the next run.

What is checked, measured or named is called: its statements are a function of their own, with which
others do what they like.

This module makes no decisions: streams, order and waits are given by the program, and the backend
implements streams and events. This module adds that a wait never comes before its record where
different threads issue them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from autosched.codegen.calls import Statements, numbered
from autosched.codegen.functions import Bound
from autosched.codegen.slots import Writer
from autosched.codegen.threads import Emitted, Line, Module
from autosched.graph.graph import Graph, Here, Task
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

if TYPE_CHECKING:
    from autosched.runtime.ranks.generators import Drawing

Wrap = Callable[[int, Step], Step]  # of the instruction at a position
_OTHERS = (Record, Wait, Free)  # nothing is added to these, so they are not called
_LONGEST = 5_000  # instructions of a function with local variables, which cannot be divided


class Call:
    """The effect of a run, copy or free: its statements, as a function when it is called."""

    def __init__(self, compiler: Compiler, position: int):
        self.position = position
        self._compiler = compiler

    def __call__(self) -> None:
        """Execute the statements."""
        self._compiler.functions[self.position]()


class Part(NamedTuple):
    """A program to emit: the whole one, or what a recording replays or records.

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


class Compiler(Writer):
    """Emits a schedule's program, and parts of it, for a backend.

    ``seconds`` are the modelled seconds of each instruction.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        machine: Machine,
        backend: Backend,
        seconds: Sequence[float],
    ):
        self.machine = machine
        self.backend = backend
        self.seconds = seconds
        self.can = Capabilities(backend)
        self._bound = Bound()
        self.memory = Memory(program, graph, self.can.located)
        super().__init__(program, graph, self.memory, Statements(self._bound, numbered()))
        on = {run.task: run.stream.device for run in program if isinstance(run, Run)}
        self.drawing = None if machine.rank is not None else drawing_of(graph, on, machine)
        # The effects of instructions; None for records and waits.
        self.calls = [
            None if isinstance(instruction, (Record, Wait)) else Call(self, i)
            for i, instruction in enumerate(program)
        ]
        self._transfers: dict[int, Callable[[Any, Any], Any]] = {}
        slots = range(self.memory.count)
        self._data = {slot: f"data[{slot}]" for slot in slots}
        self.variables = {slot: f"v{slot}" for slot in slots}  # of a function that is all
        self._on_data: dict[int, list[Line]] = {}  # the statements of each instruction, on slots
        self._emitted: WeakSet[Emitted] = WeakSet()
        self._others: list[Compiler] = []
        self.module = Module(f"instructions of {graph.name!r}", self._bound.means)

    def over(self, backend: Backend) -> Compiler:
        """Return a compiler of the same program for another backend, with memory of its own."""
        other = Compiler(self.program, self.graph, self.machine, backend, self.seconds)
        self._others.append(other)
        return other

    @cached_property
    def functions(self) -> dict[int, Callable[[], None]]:
        """The statements of each run and copy as a function, by position."""
        instructions = enumerate(self.program.instructions)
        positions = [at for at, each in instructions if not isinstance(each, _OTHERS)]
        for at in positions:
            lines = self.lines(at) or [Line("pass", at)]
            self.module.define(f"call{at}", ["data=data"], lines)
        self._bound.means["data"] = self.memory.data
        self.module.load()
        return {at: self.module[f"call{at}"] for at in positions}

    def forget(self) -> None:
        """Drop all objects that functions name: functions name themselves, too."""
        self._bound.means.clear()
        self.calls.clear()
        self._on_data.clear()
        for emitted in self._emitted:
            emitted.forget()
        for other in self._others:
            other.forget()

    def lines(self, i: int) -> list[Line]:
        """Return the statements of an instruction, on slots."""
        if i not in self._on_data:
            self._on_data[i] = self.lines_on(self._data, i)
        return self._on_data[i]

    # ---- statements

    def lines_on(self, names: dict[int, str], i: int) -> list[Line]:
        """Return the statements of an instruction on the variables of slots."""
        own = self.statements
        return [Line(text, i, within=own.within) for text in self.texts(i, names)]

    def run(self, i: int, task: Task, device: str, names: dict[int, str]) -> Iterator[str]:
        """Yield the statements of a task, of several ranks with the numbers that its rank draws."""
        texts = super().run(i, task, device, names)
        if task.random and self.drawing is not None:
            yield f"with {self._bound.give(partial(self.drawing, task), 'drawing')}():"
            texts = (f" {text}" for text in texts)
        yield from texts

    def place(self, leaf: Here, device: str) -> str:
        """Return the name of a device that replaces a placeholder."""
        return self._bound.give(self.memory.place(device) or leaf.usual, "device")

    def stored(self, i: int, task: Task, names: dict[int, str]) -> Iterator[str]:
        """Yield what the copy from storage reads."""
        stored = self._bound.give(task.fn, "stored")
        slots = self.memory.made[i]
        yield from (f"{names[slot]} = {stored}" for slot in slots if slot is not None)

    def copy(self, i: int, copy: Copy | Send | Receive, names: dict[int, str]) -> Iterator[str]:
        """Yield a call of what the backend copies, sends or receives with."""
        memory = self.memory
        source = None if isinstance(copy, Receive) else names[memory.reads[i][0]]
        if isinstance(copy, Copy) and memory.is_counted(copy):
            yield f"{self._bound.give(partial(memory.check_copy, copy), 'check')}({source})"
        if not isinstance(copy, Copy) and self.can.exchanging is None:
            return
        transfer = self._bound.give(self._transfer(i), type(copy).__name__.lower())
        if isinstance(copy, Send):
            yield f"{transfer}({source}, None)"
            return
        target = names[memory.made[i][0] or 0]
        into = target if copy.overwrite else None
        yield f"{target} = {transfer}({source}, {into})"

    def free(self, stream: Stream, names: Sequence[str]) -> Iterator[str]:
        """Yield what the backend does to memory that is freed, and drop the references."""
        act = self.can.free(stream)
        if act is not None:
            acting = self._bound.give(act, "free")
            yield from (f"{acting}({each})" for each in names)
        yield " = ".join([*names, "None"])

    def _transfer(self, i: int) -> Callable[[Any, Any], Any]:
        """Return what copies, sends or receives for an instruction; the same each time."""
        if i not in self._transfers:
            instruction = self.program.instructions[i]
            if isinstance(instruction, Copy):
                self._transfers[i] = self.backend.transfer(instruction)
            elif isinstance(instruction, (Send, Receive)) and self.can.exchanging is not None:
                self._transfers[i] = self.can.exchanging.exchange(instruction)
        return self._transfers[i]

    # ---- functions of threads

    def emit(
        self,
        part: Part | None = None,
        call: Wrap | None = None,
        launched: Wrap | None = None,
        carried: Carried | None = None,
    ) -> Emitted:
        """Return the functions of threads; by default, of the whole program.

        ``call`` and ``launched`` wrap runs and copies before and after launch. Without ``carried``
        the run is alone, and does not wait for earlier ones.
        """
        part = part or Part(self.program, self.calls, range(len(self.calls)), self.backend)
        emission = _Emission(self, part, carried)
        emission.add_all(call, launched)
        emitted = emission.emitted
        if emission.has_calls:
            _ = self.functions  # threads would compile them at the same time
        emitted.load(self._means())
        self._emitted.add(emitted)
        return emitted

    def _means(self) -> dict[str, Any]:
        return {**self._bound.means, "data": self.memory.data}

    def emit_local(self) -> Emitted | None:
        """Return a function with local variables, from the inputs in order to the outputs by name.

        None if several threads issue the program, if the backend adds anything to calls of tasks,
        or if the program is too long for one function.
        """
        is_alone = all(self.can.thread(stream) is None for stream in self.program.streams)
        if not is_alone or len(self.program) > _LONGEST:
            return None
        part = Part(self.program, self.calls, range(len(self.calls)), self.backend)
        emission = _Emission(self, part, None, is_local=True)
        emission.add_all(None, None)
        if emission.has_calls:
            return None
        memory = self.memory
        variables = self.variables
        constants = [
            Line(f"{variables[memory.homes[name]]} = {self._bound.give(item, 'constant')}", -1)
            for name, item in memory.constants.items()
        ]
        outputs = [f"{label!r}: {variables[slot]}" for label, slot in memory.outputs_at]
        parameters = [variables[memory.homes[name]] for name in memory.names]
        last = Line(f"return {{{', '.join(outputs)}}}", -1)
        emission.emitted.load_local(self._means(), parameters, constants, last)
        self._emitted.add(emission.emitted)
        return emission.emitted


def drawing_of(graph: Graph, devices: Mapping[str, str], machine: Machine) -> Drawing | None:
    """Return how tasks draw random numbers in a process that plays several ranks, if any draws.

    ``devices`` are those of tasks, by name.
    """
    if not machine.ranks or not any(task.random for task in graph.tasks):
        return None
    from autosched.runtime.ranks.generators import Drawing

    return Drawing(graph, devices, machine.ranks)


def waits_between_threads(program: Program, can: Capabilities) -> Iterator[tuple[int, Wait]]:
    """Yield the waits, with their positions, for what another thread records.

    One for each thread and event. Those for an event of the same run that is recorded later have no
    effect, as with CUDA.
    """
    records = {i.event: at for at, i in enumerate(program) if isinstance(i, Record)}
    seen: set[tuple[int, int, str | None]] = set()
    for at, wait in enumerate(program):
        if isinstance(wait, Wait) and wait.event in records:
            recorded = records[wait.event]
            thread = can.thread(wait.stream)
            key = wait.event, wait.ago, thread
            is_other = can.thread(program.instructions[recorded].stream) != thread
            if is_other and (wait.ago or recorded < at) and key not in seen:
                seen.add(key)
                yield at, wait


class _Emission:
    """Adds the instructions of a program, or of a part of it, to the functions of threads.

    A record releases the threads that wait for its event; a copy on two streams synchronizes their
    threads.
    """

    def __init__(
        self,
        compiler: Compiler,
        part: Part,
        carried: Carried | None,
        is_local: bool = False,
    ):
        self.compiler = compiler
        self.part = part
        self.carried = carried
        self.is_local = is_local
        self.has_calls = False  # whether a task is called, as the backend adds something to it
        self.can = compiler.can
        if part.backend is not compiler.backend:
            self.can = Capabilities(part.backend)
        yields = None if self.can.choosing is None else self.can.choosing.yields
        self.emitted = emitted = Emitted(yields, stops=not is_local)
        emitted.inner.append(compiler.module)
        self.locks: dict[int, threading.Lock] = {}  # by the position of the wait
        self.waiting: dict[int, list[threading.Lock]] = {}
        for at, wait in waits_between_threads(part.program, self.can):
            if not wait.ago:
                self.locks[at] = emitted.lock()
                self.waiting.setdefault(wait.event, []).append(self.locks[at])

    def add_all(self, call: Wrap | None, launched: Wrap | None) -> None:
        """Add all instructions, and what a run begins and ends with."""
        program, calls, positions, backend = self.part
        can, emitted = self.can, self.emitted
        current: dict[str | None, Sequence[Stream]] = {}
        bracketed = can.bracketed
        if bracketed is not None:
            for stream in program.streams:
                emitted.add(can.thread(stream), 0, bracketed.follow(stream))
        for at, instruction in enumerate(program.instructions):
            i, made = positions[at], calls[at]
            thread = can.thread(instruction.stream)
            match instruction:
                case Record(stream, event):
                    emitted.add(thread, i, backend.record(stream, event), *self._passed(event))
                case Wait(stream, event, ago):
                    self._wait(thread, at, i, stream, event, ago)
                case Free():
                    self._add(thread, i, made)
                case Run() | Copy() | Send() | Receive() if made is not None:
                    streams = occupied(instruction)
                    if current.get(thread) != streams:
                        current[thread] = streams
                        emitted.add(thread, i, can.enter(streams))
                    wrapped = call(i, made) if call else made
                    step = backend.launch(streams, self.compiler.seconds[i], wrapped)
                    with self._together(i, streams):
                        self._add(thread, i, launched(i, step) if launched else step, True)
        if bracketed is not None:
            for stream in program.streams:
                emitted.add(can.thread(stream), len(program) - 1, bracketed.leave(stream))
        if can.exchanging is not None:
            for thread in emitted.names:
                emitted.add(thread, emitted.last_position(thread), can.exchanging.ending(thread))

    def _add(self, thread: str | None, i: int, step: Step | None, is_task: bool = False) -> None:
        """Add a step; of a call to which nothing was added, the statements."""
        if isinstance(step, Call):
            at = step.position
            own = self.compiler
            lines = own.lines_on(own.variables, at) if self.is_local else own.lines(at)
            self.emitted.write(thread, i, lines, is_task)
        elif step is not None:
            self.has_calls = True
            self.emitted.write(thread, i, [self.emitted.line(step, i)], is_task)

    def _passed(self, event: int) -> list[Step]:
        """Return the steps that release the waiting threads, of this run and of later ones."""
        own = [lock.release for lock in self.waiting.get(event, ())]
        return [*own, *(self.carried.passed.get(event, ()) if self.carried else ())]

    def _wait(
        self, thread: str | None, at: int, i: int, stream: Stream, event: int, ago: int
    ) -> None:
        """Add a wait; first for the recording thread: once for each thread and event.

        Not if the event is recorded later, or never: CUDA does not wait then.
        """
        lock = self.locks.get(at) or (self.carried and self.carried.awaited.get(at))
        if lock:
            self.emitted.acquire(thread, i, lock)
        source = self.part.backend if not ago else self.carried and self.carried.earlier(ago)
        if source:
            self.emitted.add(thread, i, source.wait(stream, event))

    @contextlib.contextmanager
    def _together(self, i: int, streams: Sequence[Stream]) -> Iterator[None]:
        """Block the thread of a copy's second stream, where the copy is, until it is issued."""
        here, *others = [self.can.thread(stream) for stream in streams]
        if not others or others[0] == here:
            yield
            return
        emitted = self.emitted
        arrived, done = emitted.lock(), emitted.lock()
        emitted.add(others[0], i, arrived.release)
        emitted.acquire(others[0], i, done)
        emitted.acquire(here, i, arrived)
        yield
        emitted.add(here, i, done.release)
