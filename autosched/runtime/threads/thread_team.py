"""A team of threads that stop together.

All threads stop when one step raises, is interrupted, or exceeds the timeout. An exception that is
not an ``Exception`` reaches the caller unchanged, from whichever thread, as in the serial run: a
task may end the program, and does not wait for the steps of other threads.

A thread inside a long step cannot be stopped safely. Half a second after an interrupt or a deadline
the run ends without it. The team keeps the run's locks, and the memory its tensors, until the last
such thread has returned, and that thread clears both. The next run begins only then, so a late
result never reaches it. Only when the interpreter exits is ``SystemExit`` raised in a thread that
does not return: one inside torch would abort the process. With a timeout, a spare thread does the
calling thread's part, so that no task can block the caller.

Knows no program and no device.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Sequence

from autosched.runtime.threads.straight_line import Straight
from autosched.runtime.threads.tapes import Fault, Late, Place, Step, Stretch, Tape, lock_awaited

__all__ = ["Crew"]

_GRACE = 0.5  # seconds that a run which is given up waits for its threads, before it lets them go
_PATIENCE = 1.0  # seconds that ``close`` does: enough for most steps, and short enough for an interpreter's exit
_LONGEST = 50_000  # steps of a tape that become lines of functions, at some 10 microseconds each


class Crew:
    """Named threads that execute tapes.

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
        self.closed = False
        self.fault: Fault | None = None
        self.threads: frozenset[int] = frozenset()
        self._guard = (
            threading.RLock()
        )  # garbage collection may close this team in a thread that holds the lock
        self._tape = (
            Tape()
        )  # has steps until the run has ended and all threads that it let go are back
        self._late: Step | None = None
        self._prepare = prepare
        self._workers: list[_Worker] = []
        self._hire(names)

    def _hire(self, names: Sequence[str | None]) -> None:
        hired = [_Worker(name, self, self._prepare) for name in names]
        try:
            for worker in hired:
                worker.begin()
        except BaseException:
            _part_with(hired)
            raise
        self._workers += hired
        self.threads |= {worker.thread.ident or 0 for worker in hired}

    def settle(self, deadline: float | None = None) -> Late | None:
        """Wait for threads that the last run abandoned. Returns their places if they are late."""
        if self._tape.steps:
            self.stop()
            if not self._wait(deadline):
                return Late(self._places())
            self._reset()
        with self._guard:
            self.stopped = self.closed
        return None

    def run(self, tape: Tape, deadline: float | None = None) -> Fault | Late | None:
        """Execute a tape, the calling thread's part too; return the first fault, if any.

        With a deadline a spare thread does the calling thread's part. When this returns None, no
        thread is working. When the deadline has passed, or after KeyboardInterrupt, some may be:
        they have been abandoned. ``stopped`` says whether the run was aborted.
        """
        with self._guard:
            if deadline is not None and None in tape.steps and not (self.closed or self._has_spare):
                self._hire([None])
            self._tape = tape
            self.stopped = self.closed
            self.fault = None
        try:
            for worker in self._workers:
                if deadline is not None or worker.name is not None:
                    worker.start()
            if deadline is None:
                self.drain(_straightened(tape))
            in_time = self._interrupted or self._wait(deadline)
            return Late(self._places()) if not in_time and self.fault is None else self.fault
        finally:
            if not self._idle:
                self.stop()
                self._wait(time.perf_counter() + _GRACE)
            self.fault = None  # an error holds on to all that its frames do

    @property
    def _has_spare(self) -> bool:
        return any(worker.name is None for worker in self._workers)

    @property
    def _idle(self) -> bool:
        return all(worker.done.is_set() for worker in self._workers)

    @property
    def _interrupted(self) -> bool:
        """Whether the calling thread was interrupted, and must return now, not when the others are done."""
        return self.fault is not None and not isinstance(self.fault.error, Exception)

    def _wait(self, deadline: float | None) -> bool:
        """Wait until no thread is working; return whether that was in time."""
        for worker in self._workers:
            left = (
                None
                if deadline is None
                else min(max(0.0, deadline - time.perf_counter()), threading.TIMEOUT_MAX)
            )
            if not worker.done.wait(left):
                return False
        return True

    def _places(self) -> dict[str | None, Place | None]:
        busy = [worker for worker in self._workers if worker.name in self._tape.steps]
        return {
            worker.name: None if worker.done.is_set() else self._place(worker) for worker in busy
        }

    def _place(self, worker: _Worker) -> Place:
        """Read the position of a thread from its stack frames, so that threads need not report it."""
        frame = sys._current_frames().get(worker.thread.ident or 0)
        while frame is not None:
            if frame.f_code is Crew.drain.__code__ and (found := frame.f_locals)["self"] is self:
                return Place(
                    found.get("position", -1),
                    "waiting" if lock_awaited(found.get("step")) else "in",
                )
            frame = frame.f_back
        return Place(-1, "before")

    def _reset(self) -> None:
        """Lock all locks of the last run again, and forget it."""
        if self.stopped:
            for lock in self._tape.locks:
                lock.acquire(blocking=False)
        self._tape = Tape()

    def drain(self, steps: Sequence[tuple[int, Step]]) -> None:
        """Call steps one after another, until one raises or the run is aborted."""
        position = -1
        step = _nothing
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
            self.stop(
                Fault(step.position(error) if isinstance(step, Straight) else position, error)
            )

    def stop(self, fault: Fault | None = None) -> None:
        """Abort the run.

        The first fault is kept, or the first interrupt, and waiting threads are released.
        """
        with self._guard:
            interrupt = fault is not None and not isinstance(fault.error, Exception)
            if not self.stopped or (interrupt and self.fault is not None and not self._interrupted):
                self.fault = fault  # any other is an echo, of a lock that was let go, or of a run that has ended
            self.stopped = True
            for lock in self._tape.locks:
                with contextlib.suppress(RuntimeError):
                    lock.release()

    def afterwards(self, step: Step) -> bool:
        """Call a step when no thread is working any more: now (True), or in the thread that returns last."""
        with self._guard:
            if not self._idle:
                self._late = step
                return False
        step()
        self._reset()
        return True

    def back(self, worker: _Worker) -> None:
        """Note that a thread has stopped working."""
        with self._guard:
            late = self._late
            if late is not None and all(
                other.done.is_set() for other in self._workers if other is not worker
            ):
                self._late = None
                with contextlib.suppress(Exception):
                    late()
                self._reset()
            worker.done.set()

    def close(self) -> None:
        """End the threads, after their current steps; one in a long step ends later, by itself."""
        self.closed = True
        self.stop()
        _part_with(self._workers)


def _nothing() -> None:
    pass


def _straightened(tape: Tape) -> Sequence[tuple[int, Step]]:
    """Return the calling thread's steps: compiled into one where that pays, and no abort between them is needed."""
    steps = tape.steps.get(None, ())
    tape.runs += 1
    if not tape.quick or tape.runs == 1 or len(tape.steps) > 1 or len(steps) > _LONGEST:
        return steps
    if tape.straight is None:
        tape.straight = Straight(steps)
    return [(-1, tape.straight)]


def _part_with(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.close()
    threads = [worker.thread for worker in workers]
    _join(threads, _PATIENCE)
    if (
        not threading.main_thread().is_alive()
    ):  # the interpreter ends, and would abort if a thread were inside torch
        for thread in threads:
            if thread.is_alive():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
                )
        _join(threads, _GRACE)


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    for thread in threads:
        if (
            thread.is_alive() and thread is not threading.current_thread()
        ):  # the collector calls from anywhere
            thread.join(max(0.0, deadline - time.perf_counter()))


class _Worker:
    """A thread that executes its part of the team's tape whenever it is started.

    None is the calling thread's part.
    """

    def __init__(self, name: str | None, crew: Crew, prepare: Step):
        self.name = name
        self.open = True
        self.unfit: BaseException | None = None
        self.guard = crew._guard
        self.go, self.done = threading.Lock(), threading.Event()
        self.go.acquire()
        title = f"autosched {name or 'for the caller'}"
        self.thread = threading.Thread(
            target=self._serve, args=(crew, prepare), name=title, daemon=True
        )

    def begin(self) -> None:
        self.thread.start()
        self.done.wait()
        if self.unfit is not None:
            raise self.unfit

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
            crew.back(self)
        crew.back(self)  # closed between its start and its first step

    def start(self) -> None:
        with self.guard:
            if not self.open:  # nobody would come back
                return
            try:
                self.done.clear()
            finally:  # also if interrupted: a wait for ``done`` is a wait for the thread to wake up
                with contextlib.suppress(RuntimeError):
                    self.go.release()

    def close(self) -> None:
        with self.guard:
            self.open = False
            with contextlib.suppress(RuntimeError):
                self.go.release()
