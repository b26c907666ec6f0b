"""Write the functions that threads execute, and find the line at which one of them is.

A function has a line, or some, for each instruction: statements of tasks, and calls of what a
backend or a lock does. It runs without a loop, and notes nothing of how far it is: the number of
the line says it, of a frame that raised or that is still in it. Knows no program and no backend.

A thread's function gets ``stop``, a list that has an item when the run was aborted, and returns
then before its next task. Written as a generator it yields before each instruction, so that one
thread can execute several in turn: a lock for which it waits, or None if it can go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, NamedTuple

from autosched.codegen.functions import Bound
from autosched.graph.task import Task

_LINES = 2_000  # of one function: Python takes much memory to compile longer ones
_NO_NAMES: Mapping[str, Any] = {"data": None}
Yields = Literal["instruction", "step"] | None  # before what generators yield; None: no generators


class Line(NamedTuple):
    """A line, the position of its instruction, and whether the instruction begins behind it.

    ``within`` are the parts of a merged task that it belongs to. It may wait for another thread.
    """

    text: str
    position: int
    how: Literal["in", "waiting", "before"] = "in"
    within: tuple[Task, ...] = ()


class Module:
    """Functions that are compiled together, with the objects that their lines name.

    >>> module = Module("example", {})
    >>> module.define("double", ["x"], [Line("y = x + x", 7), Line("return y", 8)])
    >>> module.load()
    >>> module["double"](21)
    42
    >>> try:
    ...     module["double"](None)
    ... except TypeError as error:
    ...     [line.position for line, _ in module.lines(error.__traceback__)]
    [7]
    """

    def __init__(self, title: str, means: dict[str, Any]):
        self.means = means
        means["__name__"] = "autosched.emitted"  # tracebacks tell its frames from the user's
        self._title = f"<{title}, written by autosched>"
        self._waiting: list[tuple[str, Sequence[str], Sequence[Line]]] = []
        self._known: dict[int, tuple[CodeType, Sequence[Line]]] = {}  # by the identity of the code

    def define(self, name: str, parameters: Sequence[str], lines: Sequence[Line]) -> None:
        """Add a function, to be compiled by ``load``."""
        self._waiting.append((name, parameters, lines))

    def load(self) -> None:
        """Compile what was added."""
        texts: list[str] = []
        for name, parameters, lines in self._waiting:
            texts.append(f"def {name}({', '.join(parameters)}):")
            texts.extend(f" {line.text}" for line in lines)
        exec(compile("\n".join(texts), self._title, "exec"), self.means)
        for name, _, lines in self._waiting:
            code = self.means[name].__code__
            self._known[id(code)] = code, lines
        self._waiting.clear()

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return a function that was compiled."""
        found: Callable[..., Any] = self.means[name]
        return found

    def lines(self, trace: TracebackType | None) -> Iterator[tuple[Line, FrameType]]:
        """Yield the lines at which functions were when an error was raised, outermost first."""
        while trace is not None:
            line = self._line(trace.tb_frame, trace.tb_lineno)
            if line is not None:
                yield line, trace.tb_frame
            trace = trace.tb_next

    def line(self, frame: FrameType | None) -> Line | None:
        """Return the line at which the outermost function is in a thread; None if in none."""
        found = None
        while frame is not None:
            found = self._line(frame, frame.f_lineno) or found
            frame = frame.f_back
        return found

    def _line(self, frame: FrameType, number: int | None) -> Line | None:
        code, lines = self._known.get(id(frame.f_code), (None, ()))
        at = -1 if code is None or number is None else number - code.co_firstlineno - 1
        return lines[at] if 0 <= at < len(lines) else None


def add_notes(error: Exception, within: Sequence[Task]) -> None:
    """Let an error name the parts of a merged task that it comes from."""
    for task in reversed(within):
        error.add_note(f"in {task.name!r}, a part of the task, added at {task.source}")


# ---- threads


class Emitted:
    """The functions of threads, by name; None is the calling thread. Call ``load`` at the end.

    A long one is in several parts, which its thread calls one after another.
    ``locks`` are those between threads: each is released once and acquired once in a run, so all are
    ready for the next. ``stops``: threads execute tasks, and return between two of them if a run is
    aborted.

    >>> said, emitted = [], Emitted()
    >>> lock = emitted.lock()
    >>> emitted.add("a", 0, partial(said.append, "first"), lock.release)
    >>> emitted.acquire("b", 1, lock)
    >>> emitted.add("b", 1, partial(said.append, "second"))
    >>> emitted.load()
    >>> [part([]) for name in ("a", "b") for part in emitted.threads[name]], said
    ([None, None], ['first', 'second'])
    """

    def __init__(self, yields: Yields = None, stops: bool = True):
        self.threads: dict[str | None, Sequence[Callable[[Sequence[bool]], Any]]] = {}
        self.local: Callable[..., Any] = dict  # instead, if one thread executes all
        self.locks: list[threading.Lock] = []
        self.inner: list[Module] = []  # with functions that its steps call, outermost first
        self._bound = Bound("_s")
        self._yields = yields
        self._stops = stops
        self._lines: dict[str | None, list[Line]] = {}
        self.module = Module("threads", {})

    @property
    def names(self) -> list[str | None]:
        """The names of threads that execute anything."""
        return list(self._lines)

    def last_position(self, thread: str | None) -> int:
        """Return the position of the last line of a thread."""
        return self._lines[thread][-1].position

    def lock(self) -> threading.Lock:
        """Create a lock that is locked before each run."""
        lock = threading.Lock()
        lock.acquire()
        self.locks.append(lock)
        return lock

    def add(self, thread: str | None, position: int, *steps: Callable[[], Any] | None) -> None:
        """Add calls without arguments to a thread; None is no call."""
        for step in steps:
            if step is not None:
                self.write(thread, position, [self.line(step, position)])

    def acquire(self, thread: str | None, position: int, lock: Any) -> None:
        """Let a thread wait for a lock that another thread releases."""
        name = self._bound.reference(lock, "lock")
        lines = [Line(f"{name}.acquire()", position, "waiting")]
        if self._yields is not None:
            lines.insert(0, Line(f"while {name}.locked(): yield {name}", position, "waiting"))
        if self._stops:
            stop = Line("if stop: return", position, "waiting")
            lines = [stop, *lines, stop]
        self._extend(thread, position, lines, Line(f"yield {name}", position, "waiting"))

    def write(
        self, thread: str | None, position: int, lines: Sequence[Line], is_task: bool = False
    ) -> None:
        """Add lines to a thread; a run that was aborted ends before those of a task."""
        stop = [Line("if stop: return", position, "before")] if is_task and self._stops else []
        self._extend(thread, position, [*stop, *lines], Line("yield", position, "before"))

    def _extend(
        self, thread: str | None, position: int, lines: Sequence[Line], begin: Line
    ) -> None:
        own = self._lines.setdefault(thread, [])
        begins = not own or own[-1].position != position
        if self._yields == "step" or (self._yields and begins):
            own.append(begin)
        own.extend(lines)

    def line(self, step: Callable[[], Any], position: int) -> Line:
        """Return the call of a step; that of a partial object is the call of its function."""
        fn: Any = step
        args: Sequence[Any] = ()
        if type(step) is partial and not step.keywords:
            fn = step.func
            args = step.args
        given = ", ".join(self._bound.give(item, "given") for item in args)
        hint = str(getattr(fn, "__name__", "step"))
        return Line(f"{self._bound.reference(fn, hint)}({given})", position)

    def load(self, means: Mapping[str, Any] = _NO_NAMES) -> None:
        """Compile the functions; ``means`` are the objects that statements name."""
        self.module.means.update({**means, **self._bound.means})
        names: dict[str | None, list[str]] = {}
        for thread, lines in self._lines.items():
            for number, part in enumerate(_parted(lines)):
                name = f"thread{len(names)}part{number}"
                first = [Line("if stop: return", part[0].position, "before")]
                self.module.define(name, ["stop", "data=data"], [*first, *part])
                names.setdefault(thread, []).append(name)
        self.module.load()
        self.threads = {
            thread: [self.module[name] for name in parts] for thread, parts in names.items()
        }
        self._lines.clear()

    def load_local(
        self,
        means: Mapping[str, Any],
        parameters: Sequence[str],
        first: Sequence[Line],
        last: Line,
    ) -> None:
        """Compile the only function, ``self.local``, with parameters, and lines around the others."""
        self.module.means.update({**means, **self._bound.means})
        lines = [*first, *self._lines.pop(None, ()), last]
        self.module.define("step", parameters, lines)
        self.module.load()
        self.local = self.module["step"]

    def forget(self) -> None:
        """Drop all objects that the functions name: these name themselves, too."""
        self.module.means.clear()

    def fault(self, error: BaseException) -> int:
        """Return the position at which a function was when an error was raised, or -1.

        Lets an error of a part of a merged task name it.
        """
        modules = [self.module, *self.inner]
        lines = [line for each in modules for line, _ in each.lines(error.__traceback__)]
        if isinstance(error, Exception) and lines:
            add_notes(error, lines[-1].within)
        return lines[-1].position if lines else -1

    def clear(
        self, error: BaseException, reads: Mapping[int, Sequence[int]]
    ) -> tuple[int, list[Any]]:
        """Return the position at which ``local`` raised an error, and the arguments there.

        Drops all else that it held. ``reads`` are the slots of arguments, by position.
        """
        position = self.fault(error)
        arguments: list[Any] = []
        for line, frame in self.module.lines(error.__traceback__):
            held = frame.f_locals
            names = [f"v{slot}" for slot in reads.get(line.position, ())]
            arguments = [held[name] for name in names if name in held]
            frame.clear()
        return position, arguments


def _parted(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Yield the lines of functions of about the same length, cut between instructions."""
    part: list[Line] = []
    for _, group in groupby(lines, key=lambda line: line.position):
        own = list(group)
        if part and len(part) + len(own) > _LINES:
            yield part
            part = []
        part += own
    yield part
