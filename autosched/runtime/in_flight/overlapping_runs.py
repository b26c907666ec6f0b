"""Execute several runs at the same time, each in a slot of its own.

Threads go from run to run. The last thread that leaves a run ends it; where devices work on after
the steps have been called, a thread of its own waits for them, so that no other thread has to.
"""

from __future__ import annotations

import contextlib
import heapq
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import Any

from autosched._lib.forks import forks
from autosched.codegen.threads import Emitted
from autosched.errors import CancelledRunError, RunTimeoutError, ScheduleError
from autosched.program.program import Record, Wait
from autosched.runtime.backends import Backend, Capabilities, Looping
from autosched.runtime.backends.host import prepare_thread
from autosched.runtime.compiler import Carried, Compiler
from autosched.runtime.execute import Executor
from autosched.runtime.hang_report import report
from autosched.runtime.in_flight.future import RunFuture, Unfinished
from autosched.runtime.memory import Memory
from autosched.runtime.threads.runs import Loop, Run, Step, unlock
from autosched.runtime.threads.team import GRACE, ThreadTeam, end_threads

__all__ = ["CLOSED", "OverlappingRuns", "call_each"]

CLOSED = "the schedule was closed while it ran"


class Started(Run):
    """A run in a slot; ``late`` is its error if it was aborted for being late."""

    late: RunTimeoutError | None = None

    def __init__(self, future: RunFuture, inputs: Mapping[str, Any], slot: Slot, *others: Any):
        super().__init__(future.number, slot.emitted, slot.locks, *others)
        self.future = future
        self.inputs = inputs
        self.slot = slot


class OverlappingRuns:
    """The slots of a program, and the threads that execute runs in them.

    ``under_way`` are the runs that have not ended, by number, in order: ``start`` adds to it.
    """

    def __init__(self, executor: Executor, under_way: dict[int, Unfinished]):
        looping = executor.compiler.can.looping
        if looping is None:
            raise ScheduleError(
                f"{executor.backend!r} executes one run at a time, as it has no method 'slot'; use "
                "in_flight=1"
            )
        self.executor = executor
        self.under_way = under_way
        self.slots = Slots(executor.compiler, looping)
        self.loop = Loop(self.slots.carries)
        self._turns = deque(self.slots.all)  # the slot of the next run comes first
        self._advance = partial(self._turns.rotate, -1)
        first = self.slots.all[0]
        self.team = executor.new_team(list(first.emitted.threads) or [None])
        self._ending = _Ending() if first.is_asynchronous else None
        self._deadlines = Deadlines(partial(_expire, weakref.ref(self)))
        parts = self.team, self._ending, self._deadlines, self.under_way, forks()
        # Without threads, runs that nobody can wait for any more are garbage.
        self.close: Callable[[], object] = partial(_close, *parts)
        if self.threads:
            self.close = weakref.finalize(self, _close, *parts)

    @property
    def threads(self) -> frozenset[int]:
        """The identities of its own threads."""
        return self.team.threads | (self._ending.threads if self._ending else frozenset())

    @property
    def is_broken(self) -> bool:
        """Whether an aborted run left state that later runs need: all must end before the next."""
        return self.loop.broken is not None

    def begin_again(self) -> None:
        """Begin with the first slot, after all runs have ended."""
        self.loop.go_on()
        self.slots.reset()
        self._turns.rotate(self._turns[0].number)

    def start(self, future: RunFuture, inputs: Mapping[str, Any], deadline: float | None) -> None:
        """Start a run, for which there must be room. Raises as ``Memory.check`` does."""
        if self.is_broken:
            self.begin_again()
        slot = self._turns[0]
        slot.memory.fill(inputs)
        run = Started(future, inputs, slot, self.loop, self._left)
        if not self.team.threads:
            future.drive = partial(self._drive, run)
        slot.backend.begin(lambda: bool(run.aborted))
        note = partial(self.under_way.__setitem__, future.number, run)
        self.team.start(run, note, self._advance)
        if deadline is not None:
            self._deadlines.add(deadline, future.number)

    def expire(self, number: int) -> None:
        """Abort a run that is late, unless it has ended."""
        run = self.under_way.get(number)
        if not isinstance(run, Started):
            return
        executor = self.executor
        places = report(executor.program, executor.graph, self.team.places(run))
        run.late = RunTimeoutError(f"the run did not end in time:\n{places}")
        run.reason = "it did not end in time"
        run.stop()
        run.future.settle(GRACE)
        run.future.fail(run.late)

    # ---- the end of a run

    def _drive(self, run: Run) -> None:
        with _without_autograd():
            self.team.drive(run)

    def _left(self, run: Started) -> None:
        """End a run whose steps have been called."""
        if self._ending is None:
            self._end(run)
        else:
            self._ending.queue.put(partial(self._end, run))

    def _end(self, run: Started) -> None:
        """Collect the outputs, release everything else, and set the future."""
        future = run.future
        slot = run.slot
        outputs: dict[str, Any] = {}
        result: Any = None
        error: BaseException | None = None
        try:
            slot.backend.join()
            if run.aborted:
                error = run.late or self._error(run)
            else:
                outputs = slot.memory.outputs()
        except BaseException as raised:
            error = raised
        try:  # noqa: SIM105 - each run comes here: ``suppress`` is slower
            slot.clear(bool(run.aborted))
        except Exception:
            pass
        try:
            if error is None:
                result = future.finish(outputs)
                future.hand_out = slot.handing_out(outputs)
        except BaseException as raised:
            error = raised
        # The slot refers to the run until its next one; an error refers to frames.
        run.inputs = {}
        run.fault = None
        del self.under_way[future.number]
        future.end(result, error)

    def _error(self, run: Started) -> BaseException:
        """Return the error that aborted a run."""
        if run.fault is not None:
            arguments = run.slot.memory.arguments(run.fault.position)
            error = self.executor.error(run.fault, arguments)
            run.reason = str(error).partition("\n")[0] or type(error).__name__
            return error
        if run.cause is not None:
            return CancelledRunError(
                f"run {run.number} was cancelled, because it needs what run {run.cause.number} "
                f"leaves, which was aborted: {run.cause.reason}"
            )
        return ScheduleError(CLOSED)


class _Ending:
    """A thread that ends runs, in order, when devices have finished them."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=call_each,
            args=(self.queue,),
            name="autosched ending runs in flight",
            daemon=True,
        )
        self.thread.start()

    @property
    def threads(self) -> frozenset[int]:
        """The identity of the thread."""
        return frozenset([self.thread.ident or 0])

    def close(self) -> None:
        """End the thread, after the runs whose steps have been called."""
        self.queue.put(None)
        end_threads([self.thread])


def call_each(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    """Call what comes through a queue, in a thread of its own, until None does."""
    prepare_thread()
    while (work := queue.get()) is not None:
        work()
        del work  # an idle thread keeps nothing alive


def _expire(runs: weakref.ref[OverlappingRuns], number: int) -> None:
    found = runs()
    if found is not None:
        found.expire(number)


def _close(
    team: ThreadTeam,
    ending: _Ending | None,
    deadlines: Deadlines,
    under_way: Mapping[int, Unfinished],
    process: int,
) -> None:
    """Abort all runs, and end the threads.

    Nobody waits for a thread that does not end: what it works on is abandoned.
    """
    if process != forks():  # they are the parent's
        return
    for started in list(under_way.values()):
        started.stop()
    team.close()
    if ending is not None:
        ending.close()
    deadlines.close()
    for started in list(under_way.values()):
        started.future.fail(ScheduleError(CLOSED), abandoned=True)


@contextlib.contextmanager
def _without_autograd() -> Iterator[None]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        yield
        return
    torch._C._set_grad_enabled(False)
    try:
        yield
    finally:
        torch._C._set_grad_enabled(True)


# ---- deadlines

_Alarm = tuple[float, int]  # a moment of ``time.perf_counter``, and the number of a run


class Deadlines:
    """A thread that calls ``late`` with the number of a run at its deadline.

    The thread is started at the first deadline; ``close()`` ends it, and so does garbage collection.
    """

    def __init__(self, late: Callable[[int], None]):
        self._queue: SimpleQueue[_Alarm | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._queue, late), name="autosched deadlines", daemon=True
        )
        self.close = weakref.finalize(self, _end, self._queue, self._thread)

    def add(self, deadline: float, number: int) -> None:
        """Call ``late`` with a number at a moment."""
        self._queue.put((deadline, number))
        if not self._thread.is_alive():
            self._thread.start()


def _end(queue: SimpleQueue[_Alarm | None], thread: threading.Thread) -> None:
    queue.put(None)
    if thread.ident:
        end_threads([thread])


def _serve(queue: SimpleQueue[_Alarm | None], late: Callable[[int], None]) -> None:
    alarms: list[_Alarm] = []
    while True:
        now = time.perf_counter()
        while alarms and alarms[0][0] <= now:
            late(heapq.heappop(alarms)[1])
        patience = min(alarms[0][0] - now, threading.TIMEOUT_MAX) if alarms else None
        try:
            alarm = queue.get(timeout=patience)
        except Empty:
            continue
        if alarm is None:
            return
        heapq.heappush(alarms, alarm)


# ---- slots
#
# Runs use the slots in turn. A wait for an event of an earlier run waits for the event of an earlier
# slot. Where different threads issue record and wait, a lock between the slots makes sure that the
# record comes first, as within a run.
#
# There are as many slots as runs in flight, and as many more as the longest wait reaches back. With
# fewer, a run could record an event again, and release its lock again, before the run that waits for
# the last record has come to its wait. That run has ended when the slot is used again.


class Slots:
    """The slots of a loop."""

    def __init__(self, compiler: Compiler, looping: Looping):
        program = compiler.program
        waits = [i for i in program if isinstance(i, Wait) and i.ago]
        # Streams may order accesses to memory that all runs share, without waits.
        self.carries = bool(waits) or any(
            compiler.graph.last_version(value.index) for value in compiler.graph.sources
        )
        reach = max((wait.ago for wait in waits), default=0)
        count = program.in_flight + reach
        self.all = [Slot(compiler, looping.slot(), n, self) for n in range(count)]
        self._waits = _locked(compiler)
        # Waits for earlier runs may be long, so threads sleep.
        self._locks = [{at: threading.Lock() for at in self._waits} for _ in self.all]
        self.reset()

    def reset(self) -> None:
        """Begin with slot 0, as if earlier runs had recorded all events."""
        for slot, locks in enumerate(self._locks):
            for at, lock in locks.items():
                lock.acquire(blocking=False)
                if slot < self._waits[at].ago:
                    lock.release()

    def awaited(self, slot: int) -> dict[int, threading.Lock]:
        """Return the locks that a slot's waits for earlier runs acquire, by position."""
        return self._locks[slot]

    def passed(self, slot: int) -> dict[int, list[Step]]:
        """Return the steps that let later runs go on after a slot's records, by event."""
        steps: dict[int, list[Step]] = {}
        for at, wait in self._waits.items():
            lock = self._locks[(slot + wait.ago) % len(self.all)][at]
            steps.setdefault(wait.event, []).append(partial(unlock, lock))
        return steps

    def earlier(self, slot: int, ago: int) -> Backend:
        """Return the backend of the run that many before that in a slot."""
        return self.all[(slot - ago) % len(self.all)].backend


class Slot:
    """What belongs to one run in flight. Compiled at its first run."""

    def __init__(self, compiler: Compiler, backend: Backend, number: int, slots: Slots):
        self.backend = backend
        self.number = number
        self._parent = compiler
        self._slots = slots

    @cached_property
    def _compiler(self) -> Compiler:
        return self._parent.over(self.backend)

    @property
    def is_asynchronous(self) -> bool:
        """Whether devices may work on when all steps of a run have been called."""
        return self._compiler.can.bracketed is not None

    def handing_out(self, outputs: Mapping[str, Any]) -> Callable[[], None] | None:
        """Return what prepares outputs for the thread that asks for them, if that is needed."""
        hands_out = self._compiler.can.hands_out
        return None if hands_out is None else partial(hands_out.hand_out, outputs)

    @property
    def memory(self) -> Memory:
        """The tensors of the run."""
        return self._compiler.memory

    @cached_property
    def emitted(self) -> Emitted:
        """The functions of the run."""
        slots = self._slots
        number = self.number
        carried = Carried(
            slots.awaited(number), slots.passed(number), partial(slots.earlier, number)
        )
        return self._compiler.emit(carried=carried)

    @cached_property
    def locks(self) -> Sequence[threading.Lock]:
        """The locks that threads wait for during the run."""
        return [*self.emitted.locks, *self._slots.awaited(self.number).values()]

    @cached_property
    def _free(self) -> Callable[[Any], None] | None:
        """What the backend does to freed memory."""
        streams = self._parent.program.streams
        can = self._compiler.can
        return can.free(streams[0]) if streams else None

    def clear(self, stopped: bool) -> None:
        """Release the memory of a run that has ended, and lock all locks between its threads."""
        if self._free is not None:
            self.memory.leave(self._free)
        self.memory.clear()
        if stopped:
            for lock in self.emitted.locks:
                lock.acquire(blocking=False)


def _locked(compiler: Compiler) -> dict[int, Wait]:
    """Return the waits for earlier runs, by position, that other threads issue than the records.

    One for each thread and event.
    """
    can = Capabilities(compiler.backend)
    program = compiler.program
    recorder = {i.event: can.thread(i.stream) for i in program if isinstance(i, Record)}
    found: dict[tuple[int, int, str | None], tuple[int, Wait]] = {}
    for at, instruction in enumerate(program):
        if isinstance(instruction, Wait) and instruction.ago and instruction.event in recorder:
            thread = can.thread(instruction.stream)
            if recorder[instruction.event] != thread:
                key = instruction.event, instruction.ago, thread
                found.setdefault(key, (at, instruction))
    return dict(found.values())
