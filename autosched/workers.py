"""Threads that drain lists of steps together, and stop together when one step raises.

Knows no program and no device: a step is a function of no arguments with a position, by which a fault is named.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

__all__ = ["Choose", "Crew", "Fault", "Interleaver", "Step", "Stretch", "Tape", "Team"]

Step = Callable[[], Any]


class Fault(NamedTuple):
    """The step (its position) that raised, and what."""

    position: int
    error: BaseException


# Position, function, and slots: of the result, of one or two arguments (-1: no second), of what is dropped then.
Call = tuple[int, Callable[..., Any], int, int, int, int]


@dataclass(eq=False)
class Stretch:
    """Calls one after another, on slots of ``data``, as one step.

    A small task costs less as a tuple here than as a function of its own: less memory has to be fetched for it.

    >>> data, tape = [None, 2, 3, None, None], Tape()
    >>> tape.add(None, 7, Stretch(data, [(7, pow, 3, 1, 2, 1)]))
    >>> tape.add(None, 8, Stretch(data, [(8, abs, 4, 1, -1, 0)]))
    >>> Crew([], prepare=lambda: None).run(tape), data, len(tape.steps[None])
    (Fault(position=8, error=TypeError("bad operand type for abs(): 'NoneType'")), [None, None, 3, 8, None], 1)
    """

    data: list[Any]
    calls: list[Call]

    def __call__(self) -> None:
        """Do them all."""
        data = self.data
        for _, fn, target, first, second, dropped in self.calls:
            data[target] = fn(data[first]) if second < 0 else fn(data[first], data[second])
            data[dropped] = None


@dataclass
class Tape:
    """Steps by thread (None is the calling one), and the locks by which one thread lets another go on.

    Each lock is released once and acquired once in a run, so all are ready for the next.
    """

    steps: dict[str | None, list[tuple[int, Step]]] = field(default_factory=dict)
    locks: list[threading.Lock] = field(default_factory=list)

    def lock(self) -> threading.Lock:
        """Make a lock: ``release`` and ``acquire`` of it are steps."""
        lock = threading.Lock()
        lock.acquire()
        self.locks.append(lock)
        return lock

    def add(self, thread: str | None, position: int, *steps: Step | None) -> None:
        """Add steps to a thread; None is none. Stretches that meet become one."""
        line = self.steps.setdefault(thread, [])
        for step in steps:
            last = line[-1][1] if line else None
            if isinstance(step, Stretch):
                if isinstance(last, Stretch) and last.data is step.data:
                    last.calls.extend(step.calls)
                else:
                    line.append((position, Stretch(step.data, step.calls.copy())))
            elif step is not None:
                line.append((position, step))


class Team(Protocol):
    """What runs tapes."""

    stopped: bool
    threads: frozenset[int]  # the identities of its own

    def run(self, tape: Tape) -> Fault | None:
        """Drain a tape; return the first fault, if any. When this returns or raises, nothing is at work any more."""

    def close(self) -> None:
        """End what there is to end."""


class Crew:
    """Named threads that run tapes.

    >>> tape, said = Tape(), []
    >>> lock = tape.lock()
    >>> tape.add("a", 0, lambda: said.append("first"), lock.release)
    >>> tape.add("b", 1, lock.acquire, lambda: said.append("second"))
    >>> crew = Crew(["a", "b"], prepare=lambda: None)
    >>> crew.run(tape), said, crew.close()
    (None, ['first', 'second'], None)
    """

    def __init__(self, names: Sequence[str], prepare: Step):
        self.stopped = self.closed = False
        self.fault: Fault | None = None
        self._guard = threading.Lock()
        self._tape = Tape()
        self._workers = [_Worker(name, self, prepare) for name in names]
        self.threads = frozenset(worker.thread.ident or 0 for worker in self._workers)
        for unfit in [worker.unfit for worker in self._workers if worker.unfit is not None]:
            self.close()
            raise unfit

    def run(self, tape: Tape) -> Fault | None:
        """Drain a tape, the calling thread's part too; return the first fault, if any.

        When this returns or raises (KeyboardInterrupt), no thread is at work; ``stopped`` says whether it was given up.
        """
        for worker in self._workers:  # one is at work still if the last run was interrupted, and the wait for it too
            worker.done.wait()
        with self._guard:
            self._tape, self.stopped = tape, self.closed
        try:
            for worker in self._workers if not self.stopped else ():
                worker.start()
            self.drain(tape.steps.get(None, ()))
            for worker in self._workers:
                worker.done.wait()
            return self.fault
        finally:
            if not all(worker.done.is_set() for worker in self._workers):
                self.stop()
                for worker in self._workers:
                    worker.done.wait()
            if self.stopped:
                for lock in tape.locks:
                    lock.acquire(blocking=False)
            self._tape, self.fault = Tape(), None  # an error holds on to all that its frames do

    def drain(self, steps: Sequence[tuple[int, Step]]) -> None:
        """Call steps one after another, until one raises or the run is given up."""
        position = -1
        try:
            for position, step in steps:
                if self.stopped:
                    return
                if not isinstance(step, Stretch):
                    step()
                    continue
                data = step.data
                for position, fn, target, first, second, dropped in step.calls:  # noqa: B007, PLW2901
                    if self.stopped:
                        return
                    data[target] = fn(data[first]) if second < 0 else fn(data[first], data[second])
                    data[dropped] = None
        except BaseException as error:
            if not self.stopped:  # else it is the echo of another fault: a lock that was let go
                self.stop(Fault(position, error))

    def stop(self, fault: Fault | None = None) -> None:
        """Give the run up; the first fault is kept, and whoever waits is let go."""
        with self._guard:
            self.fault = self.fault or fault
            self.stopped = True
            for lock in self._tape.locks:
                with contextlib.suppress(RuntimeError):
                    lock.release()

    def close(self) -> None:
        """End the threads, after the steps that they are in."""
        self.closed = True
        self.stop()
        for worker in self._workers:
            worker.close()


Choose = Callable[[list[str]], str]  # of the threads that could go on, the one that does


class Interleaver:
    """Runs tapes in the calling thread, an instruction at a time, of whichever thread ``choose`` picks.

    >>> tape, said = Tape(), []
    >>> lock = tape.lock()
    >>> tape.add("a", 0, lambda: said.append("first"), lock.release)
    >>> tape.add("b", 1, lock.acquire, lambda: said.append("second"))
    >>> Interleaver(max).run(tape), said
    (None, ['first', 'second'])
    """

    def __init__(self, choose: Choose):
        self.choose = choose
        self.stopped = False
        self.threads: frozenset[int] = frozenset()

    def run(self, tape: Tape) -> Fault | None:
        """Drain a tape; return the fault of the step that raised, if one did."""
        self.stopped = False
        try:
            fault = self._interleave(tape)
            self.stopped = fault is not None
            return fault
        finally:
            for lock in tape.locks:
                lock.acquire(blocking=False)

    def _interleave(self, tape: Tape) -> Fault | None:
        at = {name: 0 for name in tape.steps if name is not None}
        while ready := [name for name in at if _can_go_on(tape, name, at[name])]:
            name = self.choose(ready)
            position, _ = tape.steps[name][at[name]]
            while _can_go_on(tape, name, at[name]) and tape.steps[name][at[name]][0] == position:
                try:
                    tape.steps[name][at[name]][1]()
                except BaseException as error:
                    return Fault(position, error)
                at[name] += 1
        return None

    def close(self) -> None:
        """End nothing: there are no threads."""


def _can_go_on(tape: Tape, name: str, at: int) -> bool:
    """Whether a thread has a next step that would not wait for another thread."""
    if at == len(tape.steps[name]):
        return False
    step = tape.steps[name][at][1]
    lock = getattr(step, "__self__", None)
    return not (isinstance(lock, _Lock) and step == lock.acquire and lock.locked())


_Lock = type(threading.Lock())


class _Worker:
    def __init__(self, name: str, crew: Crew, prepare: Step):
        self.name = name
        self.open = True
        self.unfit: BaseException | None = None
        self.go, self.done = threading.Lock(), threading.Event()
        self.go.acquire()
        self.thread = threading.Thread(target=self._serve, args=(crew, prepare), name=f"autosched {name}", daemon=True)
        self.thread.start()
        self.done.wait()

    def _serve(self, crew: Crew, prepare: Step) -> None:
        try:
            prepare()
        except BaseException as error:
            self.unfit = error
            return
        finally:
            self.done.set()
        while self.go.acquire() and self.open:
            crew.drain(crew._tape.steps.get(self.name, ()))
            self.done.set()
        self.done.set()

    def start(self) -> None:
        try:
            self.done.clear()
        finally:  # also if interrupted: whoever waits for ``done`` waits for the thread to wake up
            with contextlib.suppress(RuntimeError):
                self.go.release()

    def close(self) -> None:
        self.open = False
        with contextlib.suppress(RuntimeError):
            self.go.release()
        self.thread.join()
