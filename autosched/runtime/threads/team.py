"""A team of threads, each with a queue of runs.

    call     run() ── queued ──► threads and the caller execute ──► all have left ──► afterwards()
                                     │ raises, interrupt, deadline, close()
                                     ▼
                                  aborted ── GRACE ──► abandoned: the last thread tidies up
    loop     start() ── queued ──► threads execute run after run; the last one that leaves ends it

1. A thread goes on with the next run as soon as it has left one. In a loop a fast thread is up to as
   many runs ahead as may be in flight; a call is a loop with one run in flight, in which the calling
   thread takes part.
2. All threads stop when one raises, is interrupted, or exceeds the deadline. An exception that is
   not an ``Exception`` reaches the caller unchanged, from whichever thread, as in the serial run: a
   task may end the program, and does not wait for the tasks of other threads.
3. A thread inside a long task cannot be stopped safely. Half a second after an interrupt or a
   deadline the call ends without it. The team keeps the run's locks, and the memory its tensors,
   until the last such thread has left, and that thread clears both. The next call begins only then,
   so a late result never reaches it.
4. Control-C raises KeyboardInterrupt in the main thread at any moment, that is: at the beginning of
   a Python function, and after any call. So the calling thread uses no lock that it could leave
   locked: only locks written in C, in ``with`` statements, whose beginning and end no interrupt can
   separate from what they do; and what must happen together is called by C. ``threading.Event`` and
   ``Condition`` are written in Python and are not safe.
5. In a loop, a thread that waits for a run does not execute it: then its autocast mode and its
   streams would apply to the tasks, and an interrupt of the wait would abort other runs.
6. At the interpreter's exit a thread that returns from torch would end the process by a signal, so
   it is made to raise SystemExit.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import call
from queue import SimpleQueue

from autosched.codegen.threads import Emitted
from autosched.runtime.threads.runs import Fault, Flag, Late, Loop, Place, Run, Step

GRACE = 0.5  # seconds that an aborted run waits for its threads before it abandons them
_READY = 0.25  # seconds after which a thread that has begun is asked again whether it has
_PATIENCE = 1.0  # seconds that ``close`` waits: most steps end, and an interpreter's exit is quick


class ThreadTeam:
    """Named threads; None is one that does what the calling thread would.

    Deadlines are moments of ``time.perf_counter``. Before each ``run`` comes ``settle``.

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

    def __init__(self, names: Sequence[str | None], prepare: Step):
        self.closed = False
        self.threads: frozenset[int] = frozenset()
        # Garbage collection may close this team in a thread that holds the lock.
        self._guard = threading.RLock()
        self._call: Run | None = None  # until it has ended and all abandoned threads have left
        self._prepare = prepare
        self._workers: dict[str | None, _Worker] = {}
        self._add(names)

    def _add(self, names: Iterable[str | None]) -> None:
        """Start threads with these names."""
        added = {name: _Worker(name, self._prepare) for name in names}
        try:
            self._begin(added.values())
        except BaseException:
            _end(added.values())
            raise
        self._workers |= added
        self.threads |= {worker.thread.ident or 0 for worker in added.values()}

    def _begin(self, workers: Iterable[_Worker]) -> None:
        """Start new threads."""
        for worker in workers:
            worker.begin()

    # ---- loops

    def start(self, run: Run, *others: Step) -> None:
        """Call ``others``, and queue a run for all threads; no interrupt comes in between."""
        self._queue(run, list(self._workers), *others)

    def drive(self, run: Run) -> None:
        """Do nothing: threads execute the runs."""

    def places(self, run: Run) -> Mapping[str | None, Place | None]:
        """Return where each thread is in a run; None if it has left it."""
        workers = self._workers.items()
        return {name: worker.place(run) for name, worker in workers if name in run.emitted.threads}

    # ---- calls

    @property
    def stopped(self) -> bool:
        """Whether the call's run was aborted."""
        return self.closed or (self._call is not None and bool(self._call.aborted))

    def settle(self, deadline: float | None = None) -> Late | None:
        """Wait for threads that the last call abandoned. Returns their places if they are late."""
        abandoned = self._call
        if abandoned is not None:
            abandoned.stop()
            if not abandoned.wait(deadline):
                return Late(self.places(abandoned))
            abandoned.lock_again()
            self._call = None
        return None

    def run(self, emitted: Emitted, deadline: float | None = None) -> Fault | Late | None:
        """Execute functions, the calling thread's part too; return the first fault, if any.

        With a deadline, or if this thread does not suit, a spare thread does the calling thread's
        part. When this returns None, no thread is working. When the deadline has passed, or after
        KeyboardInterrupt, some may be: they have been abandoned. ``stopped`` says whether the run
        was aborted.
        """
        names = self._parts(emitted)
        spare = None in names and (deadline is not None or not self.suits())
        takes_part = None in names and not spare
        run = self._call = self._new_call(emitted)
        try:
            self._queue(run, [name for name in names if name is not None or spare])
            if takes_part and run.begun:
                self.execute(run)
                run.leave(None)
            in_time = run.is_interrupted or run.wait(deadline)
            return Late(self.places(run)) if not in_time and run.fault is None else run.fault
        finally:
            if takes_part:
                run.leave(None)  # an interrupt may have come before
            if not run.has_ended:
                run.stop()
                if not run.wait(time.perf_counter() + GRACE):
                    run.let_go()
            run.fault = None  # an error keeps alive everything that its frames hold

    def _queue(self, run: Run, names: Sequence[str | None], *others: Step) -> None:
        """Call ``others``, and queue a run for some threads, unless the team is closed."""
        with self._guard:
            missing = [name for name in names if name not in self._workers]
            if missing and not self.closed:
                self._add(missing)
            if not self.closed:
                queues = [self._workers[name].queue for name in names]
                puts = (partial(queue.put, run) for queue in queues)
                at_once(partial(run.begun.append, True), *others, *puts)

    def _parts(self, emitted: Emitted) -> list[str | None]:
        """Return the threads that have a part; None is the calling one."""
        return list(emitted.threads)

    def _new_call(self, emitted: Emitted) -> Run:
        return Run(0, emitted, emitted.locks, Loop(False))

    def suits(self) -> bool:
        """Whether the calling thread can execute its part itself."""
        return True

    def execute(self, run: Run) -> None:
        """Execute the calling thread's part, in this thread."""
        run.execute(None)

    def afterwards(self, step: Step) -> bool:
        """Call a step when no thread is working: now (True), or in the thread that leaves last."""
        if self._call is None:
            step()
        elif not self._call.afterwards(step):
            return False
        self._call = None
        return True

    def abandon(self, thread: int, fault: Fault) -> None:
        """Replace a thread whose task never ends, and which must not return from it.

        The run fails with ``fault``.
        """
        with self._guard:
            run = self._call
            for name, worker in self._workers.items():
                if worker.thread.ident == thread and run is not None and name not in run.left:
                    added = self._workers[name] = _Worker(name, self._prepare)
                    self._begin([added])
                    self.threads |= {added.thread.ident or 0}
                    worker.queue.put(None)
                    run.stop(fault)
                    run.leave(name)
                    return

    def close(self) -> None:
        """End the threads, after their current tasks; one in a long task ends later, by itself."""
        self.closed = True
        with self._guard:  # what is queued now comes before the end
            run = self._call
        if run is not None:
            run.stop()
        _end(self._workers.values())


class _Worker:
    """A thread that executes its part of each run in its queue."""

    def __init__(self, name: str | None, prepare: Step):
        self.name = name
        self.queue: SimpleQueue[Run | None] = SimpleQueue()
        self.unfit: BaseException | None = None
        self._run: Run | None = None  # that it is in
        self._ready = Flag()
        title = f"autosched {name or 'for the caller'}"
        self.thread = threading.Thread(target=self._serve, args=(prepare,), name=title, daemon=True)

    def begin(self) -> None:
        """Start the thread. Raises what its preparation raises."""
        self.thread.start()
        while not self._ready.wait(_READY):
            pass
        if self.unfit is not None:
            raise self.unfit

    def _serve(self, prepare: Step) -> None:
        try:
            prepare()
        except BaseException as error:
            self.unfit = error
            return
        finally:
            self._ready.set()
        while (run := self.queue.get()) is not None:
            self._run = run
            run.enter()
            run.execute(self.name)
            self._run = None
            run.leave(self.name)
            del run  # an idle thread keeps nothing alive

    def place(self, run: Run) -> Place | None:
        """Return where the thread is in a run; None if it has left it."""
        if self._run is run or self.name in run.left:
            return run.place(self.name, self.thread)
        return Place(-1, "before")


def at_once(*steps: Step) -> None:
    """Call functions written in C one after another; no interrupt comes in between.

    Python raises KeyboardInterrupt between instructions of its own, and there are none here.
    """
    deque(map(call, steps), maxlen=0)


def _end(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.queue.put(None)
    end_threads([worker.thread for worker in workers if worker.thread.ident])


def end_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait a moment for threads that were told to end, and longer at the interpreter's exit."""
    _join(threads, _PATIENCE)
    # Between tasks threads end by themselves; only an exception ends one within a task of Python
    # that goes on. No flag can do so, because the task is the user's own code.
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
