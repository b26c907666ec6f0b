"""A team of threads that stop together.

All threads stop when one step raises, is interrupted, or exceeds the timeout. An exception that is
not an ``Exception`` reaches the caller unchanged, from whichever thread, as in the serial run: a
task may end the program, and does not wait for the steps of other threads.

A thread inside a long step cannot be stopped safely. Half a second after an interrupt or a deadline
the run ends without it. The team keeps the run's locks, and the memory its tensors, until the last
such thread has returned, and that thread clears both. The next run begins only then, so a late
result never reaches it.

Control-C raises KeyboardInterrupt in the main thread at any moment, that is: at the beginning of a
Python function, and after any call. So the calling thread uses no lock that it could leave locked:
only locks written in C, in ``with`` statements, whose beginning and end no interrupt can separate
from what they do. ``threading.Event`` and ``Condition`` are written in Python and are not safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterable, Sequence

from autosched.codegen.threads import Emitted
from autosched.runtime.threads.team import Fault, Late, Place, Step, execute, place_of

__all__ = ["GRACE", "ThreadTeam", "end_threads"]

GRACE = 0.5  # seconds that an aborted run waits for its threads before it abandons them
_LONGEST_WAIT = 0.25  # seconds in which a signal may be overlooked
_PATIENCE = 1.0  # seconds that ``close`` waits: most steps end, and an interpreter's exit is quick


class ThreadTeam:
    """Named threads that execute emitted functions.

    >>> said, emitted = [], Emitted()
    >>> lock = emitted.lock()
    >>> emitted.add("a", 0, lambda: said.append("first"), lock.release)
    >>> emitted.acquire("b", 1, lock)
    >>> emitted.add("b", 1, lambda: said.append("second"))
    >>> emitted.load()
    >>> team = ThreadTeam(["a", "b"], prepare=lambda: None)
    >>> team.run(emitted), said, team.close()
    (None, ['first', 'second'], None)
    """

    def __init__(self, names: Sequence[str], prepare: Step):
        self.aborted: list[bool] = []
        self.closed = False
        self.fault: Fault | None = None
        self.threads: frozenset[int] = frozenset()
        # Garbage collection may close this team in a thread that holds the lock.
        self._guard = threading.RLock()
        # None when the run has ended and all abandoned threads have returned.
        self._emitted: Emitted | None = None
        self._late: Step | None = None
        self._prepare = prepare
        self._workers: list[_Worker] = []
        self._add(names)

    def _add(self, names: Iterable[str | None]) -> None:
        """Start threads with these names."""
        added = list(map(self._worker, names))
        try:
            self._begin(added)
        except BaseException:
            _end(added)
            raise
        self._workers += added
        self.threads |= {worker.thread.ident or 0 for worker in added}

    def _worker(self, name: str | None) -> _Worker:
        return _Worker(name, self, self._prepare)

    def _begin(self, workers: Iterable[_Worker]) -> None:
        """Start new threads."""
        for worker in workers:
            worker.begin()

    @property
    def stopped(self) -> bool:
        """Whether the run was aborted."""
        return bool(self.aborted)

    def _begin_run(self) -> None:
        self.aborted.clear()
        if self.closed:
            self.aborted.append(True)

    def settle(self, deadline: float | None = None) -> Late | None:
        """Wait for threads that the last run abandoned. Returns their places if they are late."""
        if self._emitted is not None:
            self.stop()
            if not self._wait(deadline):
                return Late(self._places())
            self._reset()
        with self._guard:
            self._begin_run()
        return None

    def run(self, emitted: Emitted, deadline: float | None = None) -> Fault | Late | None:
        """Execute functions, the calling thread's part too; return the first fault, if any.

        With a deadline, or if this thread does not suit, a spare thread does the calling thread's
        part. When this returns None, no thread is working. When the deadline has passed, or after
        KeyboardInterrupt, some may be: they have been abandoned. ``stopped`` says whether the run
        was aborted.
        """
        spare = None in emitted.threads and (deadline is not None or not self.suits())
        used = {name for name in emitted.threads if name is not None or spare}
        with self._guard:
            missing = used - {worker.name for worker in self._workers}
            if missing and not self.closed:
                self._add(missing)
            self._emitted = emitted
            self._begin_run()
            self.fault = None
        try:
            for worker in self._workers:
                if worker.name in used:
                    worker.start()
            if not spare and None in emitted.threads:
                self.execute(emitted)
            in_time = self._interrupted or self._wait(deadline)
            return Late(self._places()) if not in_time and self.fault is None else self.fault
        finally:
            if not self._idle:
                self.stop()
                self._wait(time.perf_counter() + GRACE)
            self.fault = None  # an error keeps alive everything that its frames hold

    def suits(self) -> bool:
        """Whether the calling thread can execute its part itself."""
        return True

    def execute(self, emitted: Emitted) -> None:
        """Execute the calling thread's part, in this thread."""
        execute(self, emitted, None)

    @property
    def _idle(self) -> bool:
        return False not in [worker.idle for worker in self._workers]

    @property
    def _interrupted(self) -> bool:
        """Whether the calling thread must return now, without waiting for the others."""
        return self.fault is not None and not isinstance(self.fault.error, Exception)

    def _wait(self, deadline: float | None) -> bool:
        """Wait until no thread is working; return whether that was in time."""
        return False not in [worker.wait(deadline) for worker in self._workers]

    def _places(self) -> dict[str | None, Place | None]:
        emitted = self._emitted
        assert emitted is not None
        return {
            worker.name: None if worker.idle else place_of(worker.thread, emitted)
            for worker in self._workers
            if worker.name in emitted.threads
        }

    def _reset(self) -> None:
        """Lock all locks of the last run again, and forget it."""
        if self.stopped and self._emitted is not None:
            for lock in self._emitted.locks:
                lock.acquire(blocking=False)
        self._emitted = None

    def stop(self, fault: Fault | None = None) -> None:
        """Abort the run.

        The first fault is kept, or the first interrupt, and waiting threads are released.
        """
        with self._guard:
            interrupt = fault is not None and not isinstance(fault.error, Exception)
            # Others are consequences: of a lock that was released, or of a run that has ended.
            if not self.stopped or (interrupt and self.fault is not None and not self._interrupted):
                self.fault = fault
            self.aborted.append(True)
            for lock in self._emitted.locks if self._emitted is not None else ():
                with contextlib.suppress(RuntimeError):
                    lock.release()

    def abandon(self, thread: int, fault: Fault) -> None:
        """Replace a thread whose step never ends, and which must not return from it.

        The run fails with ``fault``.
        """
        with self._guard:
            for at, worker in enumerate(self._workers):
                if worker.thread.ident == thread and not worker.idle:
                    self._workers[at] = added = self._worker(worker.name)
                    self._begin([added])
                    self.threads |= {added.thread.ident or 0}
                    self.stop(fault)
                    worker.close()
                    worker.end()

    def afterwards(self, step: Step) -> bool:
        """Call a step when no thread is working: now (True), or in the thread that returns last."""
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
                other.idle for other in self._workers if other is not worker
            ):
                self._late = None
                with contextlib.suppress(Exception):
                    late()
                self._reset()
            worker.end()

    def close(self) -> None:
        """End the threads, after their current steps; one in a long step ends later, by itself."""
        self.closed = True
        self.stop()
        _end(self._workers)


class _Worker:
    """A thread that executes its part of the team's run whenever it is started.

    None is the calling thread's part.
    """

    def __init__(self, name: str | None, team: ThreadTeam, prepare: Step):
        self.name = name
        self.open = True
        self.idle = False
        self.unfit: BaseException | None = None
        self.guard = team._guard
        self._go = threading.Lock()  # released to start the thread
        self._go.acquire()
        self._ended = threading.Lock()  # released when the thread has become idle
        title = f"autosched {name or 'for the caller'}"
        self.thread = threading.Thread(
            target=self._serve, args=(team, prepare), name=title, daemon=True
        )

    def begin(self) -> None:
        """Start the thread. Raises what its preparation raises."""
        self.thread.start()
        self.wait(None)
        if self.unfit is not None:
            raise self.unfit

    def _serve(self, team: ThreadTeam, prepare: Step) -> None:
        try:
            prepare()
        except BaseException as error:
            self.unfit = error
            return
        finally:
            self.end()
        while self._go.acquire() and self.open:
            emitted = team._emitted
            if emitted is not None:
                execute(team, emitted, self.name)
            del emitted  # an idle thread keeps nothing alive
            team.back(self)
        team.back(self)  # closed between its start and its first step

    def start(self) -> None:
        """Let the thread execute its part."""
        with self.guard:
            if self.open:  # otherwise the thread has ended, and would not become idle
                # Nothing can interrupt between the two: a wait would not end.
                self.idle = False
                self._go.release()

    def end(self) -> None:
        """Note in the thread that it is idle."""
        self.idle = True
        with contextlib.suppress(RuntimeError):
            self._ended.release()

    def wait(self, deadline: float | None) -> bool:
        """Wait until the thread is idle; return whether that was in time.

        A signal that comes just before a wait does not end it, so no wait is long.
        """
        while not self.idle:  # the lock may be free from an earlier run
            left = _LONGEST_WAIT
            if deadline is not None:
                left = min(max(0.0, deadline - time.perf_counter()), left)
            if not self._ended.acquire(timeout=left) and left < _LONGEST_WAIT:
                return self.idle
        return True

    def close(self) -> None:
        """Let the thread end."""
        with self.guard:
            self.open = False
            with contextlib.suppress(RuntimeError):
                self._go.release()


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.close()
    end_threads([worker.thread for worker in workers])


def end_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait a moment for threads that were told to end, and longer at the interpreter's exit."""
    _join(threads, _PATIENCE)
    # At the interpreter's exit a thread that returns from torch would end the process by a signal.
    # Between steps threads end by themselves; only an exception ends one within a step of Python
    # that goes on. No flag can do so, because the step is the user's own code.
    if not threading.main_thread().is_alive():
        for thread in threads:
            if thread.is_alive():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
                )
        _join(threads, GRACE)


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    for thread in threads:
        # Garbage collection may close a team in one of its own threads.
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.perf_counter()))
