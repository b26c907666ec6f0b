"""Submit runs of a schedule, execute several at the same time, and wait for them.

Runs behave as if executed one after another in the order in which they were submitted. The
program's waits order the runs in flight where they share state; what no program can know is found
here, and then a run begins only after those before it have ended:

* an input shares memory with another input of an earlier run, which tasks write;
* a captured step puts outputs into modules when it ends, and the next run reads them there;
* the first run, and each one if ``check`` is set, is checked, and runs alone.

A run has a slot of its own, and threads go from run to run. The last thread that leaves a run ends
it; where devices work on after the steps have been called, a thread of its own waits for them, so
that no other thread has to. A run that must be alone, and each run of a schedule with one run in
flight, is a call of the executor, in that thread.
"""

from __future__ import annotations

import operator
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any, TypeVar

from autosched._lib.aliasing import Extent, extents, first_meeting
from autosched._lib.forks import forks
from autosched.codegen.threads import Emitted
from autosched.errors import CancelledRunError, RunTimeoutError, ScheduleError
from autosched.program.program import Wait
from autosched.runtime.backends import Backend
from autosched.runtime.backends.host import prepare_thread
from autosched.runtime.compiler import Carried, Compiler, waits_between_threads
from autosched.runtime.execute import Executor
from autosched.runtime.failures import report
from autosched.runtime.in_flight.future import RunFuture, Waiting
from autosched.runtime.memory import Memory
from autosched.runtime.threads.runs import Loop, Run, Step, unlock
from autosched.runtime.threads.team import GRACE, ThreadTeam, at_once, end_threads

Keep = Callable[[Mapping[str, Any]], Any]
Inputs = dict[str, Any]
Complete = Callable[[Sequence[Any], Inputs], tuple[Inputs, Keep | None]]
Guarded = Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]]

Made = TypeVar("Made")

_LATE = "the run did not begin in time: earlier runs go on"
_CLOSED = "the schedule was closed while it ran"


class Started(Run):
    """A run in a slot; ``late`` is its error if it was aborted for being late, by its ``alarm``."""

    late: RunTimeoutError | None = None
    alarm: threading.Timer | None = None

    def __init__(
        self,
        future: RunFuture,
        inputs: Mapping[str, Any],
        slot: Slot,
        loop: Loop,
        ended: Callable[[Any], None],
    ):
        super().__init__(future.number, slot.emitted, slot.locks, loop, ended)
        self.future = future
        self.inputs = inputs
        self.slot = slot


@dataclass(eq=False)
class Alone:
    """A run that is a call of the executor, and that cannot be aborted separately."""

    future: RunFuture
    inputs: Mapping[str, Any]


class Runs:
    """The submitted runs of a schedule.

    ``complete`` returns the inputs of a run, and what keeps its outputs: ``Graph.completed``;
    ``names`` are those of the inputs. ``placed`` returns these with state on its devices, and
    ``wrote`` is called when the run may have written them; ``guarded`` returns the outputs for the
    caller.
    """

    def __init__(
        self,
        executor: Executor,
        complete: Complete,
        guarded: Guarded,
        placed: Callable[[Inputs], Mapping[str, Any]],
        wrote: Callable[[Inputs], None],
        names: Sequence[str],
    ):
        self.executor = executor
        self.in_flight = executor.program.in_flight
        self.process = forks()
        self._complete = complete
        self._guarded = guarded
        self._placed = placed
        self._wrote = wrote
        self._under_way: dict[int, Started | Alone] = {}  # by number, in order
        self._turn = threading.Lock()  # held by the thread that submits
        self._submitted = 0
        self._names = {*names}
        self._written = self._names & executor.memory.written
        self._slots: Slots | None = None
        self._threads = _Threads()
        self._closed = False
        self._waiting = Waiting(executor.name, self._executing)
        parts = self._under_way, executor.close, self._threads, self.process
        # Without threads, runs that nobody can wait for any more are garbage.
        self._is_driven = executor.compiler.can.choosing is not None
        self._close: Callable[[], object] = partial(_close, *parts)
        if not self._is_driven:
            self._close = weakref.finalize(self, _close, *parts)

    @property
    def is_idle(self) -> bool:
        """Whether no submitted run is under way."""
        return not self._under_way

    def submit(
        self,
        args: Sequence[Any],
        inputs: Inputs,
        timeout: float | None,
        finish: Keep | None = None,
    ) -> RunFuture:
        """Start a run, when there is room for it; return its future.

        Its result is what ``finish`` returns for the outputs, by default these.
        """
        deadline = None if timeout is None else time.perf_counter() + timeout
        return self._in_turn(deadline, partial(self._submit, args, inputs, deadline, finish))

    def _submit(
        self, args: Sequence[Any], inputs: Inputs, deadline: float | None, finish: Keep | None
    ) -> RunFuture:
        # 1. Wait for room, and for the inputs.
        self._wait_until_fewer(self.in_flight, deadline)
        found, keep = self._complete(args, inputs)
        if keep is not None and self._under_way:
            self._wait_until_fewer(1, deadline)
            found, keep = self._complete(args, inputs)
        if found.keys() != self._names:
            self.executor.graph.bind(found)
        # 2. Wait for all earlier runs, if this one must begin after they have ended.
        slots = self._slots
        is_broken = slots is not None and slots.loop.broken is not None
        alone = self._is_alone
        if is_broken or alone or self._overlaps(found):
            self._wait_until_fewer(1, deadline)
            alone = self._is_alone
        if slots is not None and is_broken:
            slots.begin_again()
        # 3. Start it.
        self._submitted += 1
        wrote = partial(self._wrote, found) if self._written else None
        ending = partial(self._finish, found, keep, finish, _is_recording())
        future = RunFuture(self._submitted, ending, wrote, self._waiting)
        start = self._start_alone if alone else self._start
        start(future, self._placed(found), deadline)
        return future

    def _overlaps(self, inputs: Inputs) -> bool:
        """Whether inputs overlap with those of runs under way so that no program orders them."""
        earlier = list(self._under_way.values()) if self._written else ()
        return any(overlap(self._written, inputs, run.inputs) for run in earlier)

    @property
    def _is_alone(self) -> bool:
        """Whether the next run must be alone; the first one, until it has ended."""
        return self.in_flight == 1 or bool(self.executor.check) or not self.executor.checked

    def wait(self, deadline: float | None = None) -> None:
        """Wait until all runs have ended that were submitted before.

        Raises TimeoutError if that takes longer.
        """
        for run in list(self._under_way.values()):
            if not run.future.wait(deadline):
                raise RunTimeoutError("not all runs have ended in time")

    def abort(self, future: RunFuture) -> None:
        """Abort a run that nobody waits for any more, if it can be aborted separately."""
        run = self._under_way.get(future.number)
        if isinstance(run, Started):
            run.stop()

    def paused(self, call: Callable[[], Made]) -> Made:
        """Return what a function returns that is called while no run is under way."""

        def alone() -> Made:
            self._wait_until_fewer(1, None)
            return call()

        return self._in_turn(None, alone)

    def close(self) -> None:
        """Abort all runs, and end the threads."""
        self._closed = True
        self._close()

    def _in_turn(self, deadline: float | None, call: Callable[[], Made]) -> Made:
        """Call a function in one thread at a time.

        An interrupt can come after any call. So the lock is noted by the same call of C that takes
        it.
        """
        if self._is_executing(threading.get_ident()):
            raise ScheduleError(
                "a task calls the schedule that it is part of, and would wait for itself"
            )
        taken: list[bool] = []
        try:
            taken.extend(map(self._turn.acquire, (True,), (_patience(deadline),)))
            if not taken[0]:
                raise RunTimeoutError(_LATE)
            return call()
        finally:
            if True in taken:
                self._turn.release()

    def _wait_until_fewer(self, most: int, deadline: float | None) -> None:
        """Wait until fewer than so many runs are under way."""
        while len(runs := list(self._under_way.values())) >= most:
            if not runs[0].future.wait(deadline):
                raise RunTimeoutError(_LATE)
            if self._closed:
                break
        if self._closed:
            raise ScheduleError("the schedule is closed; make a new one")

    def _is_executing(self, thread: int) -> bool:
        """Whether a thread executes a task of the schedule."""
        executor = self.executor
        if executor.is_run_by(thread) or thread in executor.threads:
            return True
        return bool(self._under_way) and thread in self._executing()

    def _executing(self) -> frozenset[int]:
        """Return the identities of the threads that execute tasks."""
        return self.executor.threads | self._threads.identities

    # ---- a run begins

    def _start_alone(
        self, future: RunFuture, inputs: Mapping[str, Any], deadline: float | None
    ) -> None:
        looping = self.executor.compiler.can.looping
        adopt = _nothing if looping is None else looping.adopting()
        work = partial(self._run_alone, future, inputs, deadline, adopt)
        note = partial(self._under_way.__setitem__, future.number, Alone(future, inputs))
        if self._is_driven:
            future.drive = partial(next, map(operator.call, [work]), None)  # once
            note()
        else:
            at_once(note, partial(self._threads.aside().put, work))

    def _start(self, future: RunFuture, inputs: Mapping[str, Any], deadline: float | None) -> None:
        """Start a run in the next slot. Raises as ``Memory.check`` does."""
        slots = self._slots = self._slots or Slots(self.executor)
        slot = slots.turns[0]
        team = self._threads.team
        if team is None:
            names = list(slot.emitted.threads) or [None]
            team = self._threads.team = self.executor.new_team(names)
        if slot.is_asynchronous:
            self._threads.aside()
        slot.memory.fill(inputs)
        run = Started(future, inputs, slot, slots.loop, self._left)
        if self._is_driven:
            future.drive = partial(_drive, team, run)
        slot.backend.begin(lambda: bool(run.aborted))
        note = partial(self._under_way.__setitem__, future.number, run)
        team.start(run, note, slots.advance)
        if not run.begun:
            raise ScheduleError(_CLOSED)
        if deadline is not None:
            seconds = _patience(deadline)
            run.alarm = threading.Timer(seconds, _expire, [weakref.ref(self), future.number])
            run.alarm.daemon = True
            run.alarm.start()
            weakref.finalize(future, run.alarm.cancel).atexit = False

    # ---- a run ends

    def _run_alone(
        self,
        future: RunFuture,
        inputs: Mapping[str, Any],
        deadline: float | None,
        adopt: Callable[[], object],
    ) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            adopt()
            left = None if deadline is None else max(0.0, deadline - time.perf_counter())
            result = future.finish(self.executor(inputs, left))
        except BaseException as raised:
            error = raised
        del self._under_way[future.number]
        future.end(result, error)

    def expire(self, number: int) -> None:
        """Abort a run that is late, unless it has ended."""
        run = self._under_way.get(number)
        if not isinstance(run, Started) or self._threads.team is None:
            return
        executor = self.executor
        places = report(executor.program, executor.graph, self._threads.team.places(run))
        run.late = RunTimeoutError(f"the run did not end in time:\n{places}")
        run.reason = "it did not end in time"
        run.stop()
        run.future.settle(GRACE)
        run.future.fail(run.late)

    def _left(self, run: Started) -> None:
        """End a run whose steps have been called."""
        if run.slot.is_asynchronous:
            self._threads.aside().put(partial(self._end, run))
        else:
            self._end(run)

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
                if (hands_out := slot.compiler.can.hands_out) is not None:
                    future.hand_out = partial(hands_out.hand_out, outputs)
        except BaseException as raised:
            error = raised
        if run.alarm is not None:
            run.alarm.cancel()
        # The slot refers to the run until its next one; an error refers to frames.
        run.inputs = {}
        run.fault = None
        del self._under_way[future.number]
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
        return ScheduleError(_CLOSED)

    def _finish(
        self,
        inputs: Mapping[str, Any],
        keep: Keep | None,
        finish: Keep | None,
        autograd: bool,
        outputs: dict[str, Any],
    ) -> Any:
        """Put outputs where they belong; return the result. Called when the run has ended."""
        before = _set_autograd(autograd)
        try:
            if autograd:
                outputs = self._guarded(inputs, outputs)
            if keep is not None:
                keep(outputs)
            return outputs if finish is None else finish(outputs)
        finally:
            _set_autograd(before)


def _patience(deadline: float | None) -> float:
    if deadline is None:
        return -1.0
    return min(max(0.0, deadline - time.perf_counter()), threading.TIMEOUT_MAX)


def _is_recording() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.is_grad_enabled())


def _set_autograd(records: bool) -> bool:
    """Let autograd record in this thread, or not; return whether it did."""
    before = _is_recording()
    if before != records:
        sys.modules["torch"]._C._set_grad_enabled(records)
    return before


def _drive(team: ThreadTeam, run: Run) -> None:
    """Execute a run in this thread, where no other does."""
    before = _set_autograd(False)
    try:
        team.drive(run)
    finally:
        _set_autograd(before)


def _nothing() -> None:
    pass


# ---- threads


class _Threads:
    """The threads of submitted runs; those of the team are started at the first run in a slot."""

    def __init__(self) -> None:
        self.team: ThreadTeam | None = None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._aside: threading.Thread | None = None

    def aside(self) -> SimpleQueue[Callable[[], None] | None]:
        """Return the queue of a thread that calls the executor, and ends runs; start it before."""
        if self._aside is None:
            name = "autosched submitted runs"
            self._aside = threading.Thread(
                target=_serve, args=[self._queue], name=name, daemon=True
            )
            self._aside.start()
        return self._queue

    @property
    def identities(self) -> frozenset[int]:
        """The identities of those that execute tasks or end runs."""
        own = frozenset() if self._aside is None else frozenset([self._aside.ident or 0])
        return own if self.team is None else own | self.team.threads

    def close(self) -> None:
        """End them, in this order: the team's threads let the other one end runs."""
        if self.team is not None:
            self.team.close()
        self._queue.put(None)
        if self._aside is not None:
            end_threads([self._aside])


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    prepare_thread()
    while (work := queue.get()) is not None:
        work()
        del work  # an idle thread keeps nothing alive


def _close(
    under_way: Mapping[int, Started | Alone],
    close_executor: Callable[[], object],
    threads: _Threads,
    process: int,
) -> None:
    """Abort all runs, and end the threads.

    Nobody waits for a thread that does not end: what it works on is abandoned.
    """
    if process != forks():  # they are the parent's
        return
    for run in list(under_way.values()):
        if isinstance(run, Started):
            run.stop()
        else:
            close_executor()
    threads.close()
    for run in list(under_way.values()):
        run.future.fail(ScheduleError(_CLOSED), abandoned=True)


def _expire(runs: weakref.ref[Runs], number: int) -> None:
    found = runs()
    if found is not None:
        found.expire(number)


# ---- inputs that share memory with those of earlier runs
#
# A program orders the runs' accesses to one input, which is the same memory in each run, or memory of
# its own. It cannot know that a tensor which one run writes as ``a`` is the next run's ``b``, or
# another part of the same memory.

_Owned = tuple[bool, str]  # whether it is the earlier run's; the name of an input


def overlap(written: Set[str], inputs: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether inputs overlap with those of an earlier run so that no program orders them.

    ``written`` are the inputs that tasks write. What both runs have under one name was compared with
    the rest when either was checked. So each pair that is compared here has a tensor that only one
    of the runs has.

    >>> import torch
    >>> w, x = torch.zeros(4), torch.zeros(4)
    >>> overlap({"w"}, {"w": w, "x": torch.ones(4)}, {"w": w, "x": x})
    False
    >>> overlap({"w"}, {"w": w[:2], "x": x}, {"w": w, "x": x})
    True
    """
    changed = {name for name, item in inputs.items() if other.get(name) is not item}
    if not changed:
        return False
    compared = inputs.keys() if changed & written else written | changed
    owned: list[tuple[_Owned, Extent]] = [
        ((is_earlier, name), extent)
        for is_earlier, items in ((True, other), (False, inputs))
        for name in compared
        for extent in extents(items[name])
    ]
    same = {name for name in compared if _are_same(other[name], inputs[name])}

    def matters(a: _Owned, b: _Owned) -> bool:
        if a[0] == b[0] or not (a[1] in changed or b[1] in changed):
            return False
        if a[1] == b[1] in same:
            return False
        return a[1] in written or b[1] in written

    return first_meeting(owned, matters) is not None


def _are_same(one: Any, other: Any) -> bool:
    """Whether two inputs are the same tensors, or different views that are alike."""
    if one is other:
        return True
    a = [_shape(extent) for extent in extents(one)]
    return bool(a) and a == [_shape(extent) for extent in extents(other)]


def _shape(extent: Extent) -> Any:
    tensor = extent.tensor
    strides = tensor.stride() if hasattr(tensor, "stride") else tensor.strides
    return extent.first, tuple(tensor.shape), tuple(strides), tensor.dtype


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
    """The slots of a loop, and the order of its runs. ``turns`` has the slot of the next run first.

    Raises ScheduleError if the backend executes one run at a time.
    """

    def __init__(self, executor: Executor):
        compiler = executor.compiler
        looping = compiler.can.looping
        if looping is None:
            raise ScheduleError(
                f"{executor.backend!r} executes one run at a time, as it has no method 'slot'; use "
                "in_flight=1"
            )
        program = compiler.program
        waits = [i for i in program if isinstance(i, Wait) and i.ago]
        # Streams may order accesses to memory that all runs share, without waits.
        carries = bool(waits) or any(
            compiler.graph.last_version(value.index) for value in compiler.graph.sources
        )
        self.loop = Loop(carries)
        reach = max((wait.ago for wait in waits), default=0)
        self._backends = [looping.slot() for _ in range(program.in_flight + reach)]
        between = waits_between_threads(program, compiler.can)
        self._waits = {at: wait for at, wait in between if wait.ago}
        # By slot, the locks that its waits for earlier runs acquire, by position.
        self._locks = [{at: threading.Lock() for at in self._waits} for _ in self._backends]
        self._reset()
        self.turns: deque[Slot] = deque()
        for number, backend in enumerate(self._backends):
            own = compiler.over(backend)
            awaited = self._locks[number]
            carried = Carried(awaited, self._passed(number), partial(self._earlier, number))
            emitted = own.emit(carried=carried)
            locks = [*emitted.locks, *awaited.values()]
            self.turns.append(Slot(number, backend, own, emitted, locks))
        self.advance = partial(self.turns.rotate, -1)

    def begin_again(self) -> None:
        """Begin with the first slot, after all runs have ended."""
        self.loop.go_on()
        self.turns.rotate(self.turns[0].number)
        self._reset()

    def _reset(self) -> None:
        """Lock what waits for earlier runs acquire, as if these had recorded all events."""
        for slot, locks in enumerate(self._locks):
            for at, lock in locks.items():
                lock.acquire(blocking=False)
                if slot < self._waits[at].ago:
                    lock.release()

    def _earlier(self, slot: int, ago: int) -> Backend:
        """Return the backend of the run that many before that in a slot."""
        return self._backends[(slot - ago) % len(self._backends)]

    def _passed(self, slot: int) -> dict[int, list[Step]]:
        """Return the steps that let later runs go on after a slot's records, by event."""
        steps: dict[int, list[Step]] = {}
        for at, wait in self._waits.items():
            lock = self._locks[(slot + wait.ago) % len(self._locks)][at]
            steps.setdefault(wait.event, []).append(partial(unlock, lock))
        return steps


@dataclass(frozen=True)
class Slot:
    """What belongs to one run in flight; ``locks`` are those that threads wait for during the run."""

    number: int
    backend: Backend
    compiler: Compiler
    emitted: Emitted
    locks: Sequence[threading.Lock]

    @property
    def memory(self) -> Memory:
        """The tensors of the run."""
        return self.compiler.memory

    @property
    def is_asynchronous(self) -> bool:
        """Whether devices may work on when all steps of a run have been called."""
        return self.compiler.can.bracketed is not None

    @cached_property
    def _free(self) -> Callable[[Any], None] | None:
        """What the backend does to freed memory."""
        streams = self.compiler.program.streams
        return self.compiler.can.free(streams[0]) if streams else None

    def clear(self, stopped: bool) -> None:
        """Release the memory of a run that has ended, and lock all locks between its threads."""
        if self._free is not None:
            self.memory.leave(self._free)
        self.memory.clear()
        if stopped:
            for lock in self.emitted.locks:
                lock.acquire(blocking=False)
