"""Threads that drain lists of steps together, and stop together when one step raises.

Knows no program and no device: a step is a function of no arguments with a position, by which a fault is named.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Crew", "Fault", "Step", "Tape"]

Step = Callable[[], Any]


class Fault(NamedTuple):
    """The step (its position) that raised, and what."""

    position: int
    error: BaseException


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
        """Add steps to a thread; None is none."""
        self.steps.setdefault(thread, []).extend((position, step) for step in steps if step is not None)


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
        self.stopped = False
        self.fault: Fault | None = None
        self._guard = threading.Lock()
        self._tape = Tape()
        self._workers = [_Worker(name, self, prepare) for name in names]

    def run(self, tape: Tape) -> Fault | None:
        """Drain a tape, the calling thread's part too; return the first fault, if any.

        When this returns or raises (KeyboardInterrupt), no thread is at work.
        """
        self._tape, self.fault, self.stopped = tape, None, False
        started: list[_Worker] = []
        try:
            for worker in self._workers:
                started.append(worker)
                worker.go.release()
            self.drain(tape.steps.get(None, ()))
            while started:
                started[-1].done.acquire()
                started.pop()
        finally:
            if started:
                self.stop()
                for worker in started:
                    worker.done.acquire()
            if self.stopped:
                for lock in tape.locks:
                    lock.acquire(blocking=False)
            self._tape = Tape()
        return self.fault

    def drain(self, steps: Sequence[tuple[int, Step]]) -> None:
        """Call steps one after another, until one raises or the run is given up."""
        position = -1
        try:
            for position, step in steps:  # noqa: B007, the except clause uses it
                if self.stopped:
                    return
                step()
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
        self.stop()
        for worker in self._workers:
            worker.close()


class _Worker:
    def __init__(self, name: str, crew: Crew, prepare: Step):
        self.name = name
        self.open = True
        self.go, self.done = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.done.acquire()
        self.thread = threading.Thread(target=self._serve, args=(crew, prepare), name=f"autosched {name}", daemon=True)
        self.thread.start()

    def _serve(self, crew: Crew, prepare: Step) -> None:
        prepare()
        while self.go.acquire() and self.open:
            crew.drain(crew._tape.steps.get(self.name, ()))
            self.done.release()

    def close(self) -> None:
        self.open = False
        with contextlib.suppress(RuntimeError):
            self.go.release()
        self.thread.join()
