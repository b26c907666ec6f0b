"""A team of threads, each with a queue of runs.

A thread goes on with the next run as soon as it has left one, so a fast thread is up to as many
runs ahead as may be in flight. A run that is aborted is left by each thread at its next step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from operator import call
from queue import SimpleQueue

from autosched.runtime.threads.loop_runs import LoopRun
from autosched.runtime.threads.team import Place, Step, execute, place_of
from autosched.runtime.threads.thread_team import end_threads

__all__ = ["QueueTeam", "at_once"]


class QueueTeam:
    """Named threads that execute runs.

    A thread that waits for a run does not execute it: then its autocast mode and its streams would
    apply to the tasks, and an interrupt of the wait would abort other runs.

    >>> from autosched.codegen.threads import Emitted
    >>> from autosched.runtime.threads.loop_runs import Line
    >>> emitted, said, ended = Emitted(), [], threading.Lock()
    >>> emitted.add("a", 0, partial(said.append, "step"))
    >>> emitted.load()
    >>> team = QueueTeam(["a"], prepare=lambda: None)
    >>> with ended:
    ...     team.start(LoopRun(0, emitted, [], Line(False), lambda run: ended.release()))
    ...     _ = ended.acquire()
    >>> said, team.close()
    (['step'], None)
    """

    def __init__(self, names: Sequence[str | None], prepare: Step):
        self._prepare = prepare
        self._workers = [_Worker(name, prepare, SimpleQueue()) for name in names]
        try:
            for worker in self._workers:
                worker.begin()
        except BaseException:
            self.close()
            raise
        self.threads = frozenset(worker.thread.ident or 0 for worker in self._workers)

    def start(self, run: LoopRun, *others: Step) -> None:
        """Call ``others``, and queue a run for all threads; no interrupt comes in between."""
        at_once(*others, *(partial(worker.queue.put, run) for worker in self._workers))

    def drive(self, run: LoopRun) -> None:
        """Do nothing: threads execute the runs."""

    def places(self, run: LoopRun) -> Mapping[str | None, Place | None]:
        """Return where each thread is in a run; None if it has left it."""
        return {
            worker.name: None if worker.name in run.left else worker.place(run)
            for worker in self._workers
        }

    def close(self) -> None:
        """End the threads, after their current steps; one in a long step ends later, by itself."""
        for worker in self._workers:
            worker.queue.put(None)
        end_threads([worker.thread for worker in self._workers if worker.thread.ident])


class _Worker:
    """A thread that executes its part of each run in its queue."""

    def __init__(self, name: str | None, prepare: Step, queue: SimpleQueue[LoopRun | None]):
        self.name = name
        self.queue = queue
        self.run: LoopRun | None = None  # that it is in
        self.unfit: BaseException | None = None
        self._ready = threading.Lock()
        self._ready.acquire()
        title = f"autosched {name or 'issuing'} of runs in flight"
        self.thread = threading.Thread(target=self._serve, args=(prepare,), name=title, daemon=True)

    def begin(self) -> None:
        """Start the thread. Raises what its preparation raises."""
        self.thread.start()
        self._ready.acquire()
        if self.unfit is not None:
            raise self.unfit

    def _serve(self, prepare: Step) -> None:
        try:
            prepare()
        except BaseException as error:
            self.unfit = error
            return
        finally:
            self._ready.release()
        while (run := self.queue.get()) is not None:
            self.run = run
            run.enter()
            execute(run, run.emitted, self.name)
            self.run = None
            run.leave(self.name)
            del run  # an idle thread keeps nothing alive

    def place(self, run: LoopRun) -> Place:
        """Return where the thread is in a run that it has not left."""
        return place_of(self.thread, run.emitted) if self.run is run else Place(-1, "before")


def at_once(*steps: Step) -> None:
    """Call functions written in C one after another; no interrupt comes in between.

    Python raises KeyboardInterrupt between instructions of its own, and there are none here.
    """
    deque(map(call, steps), maxlen=0)
