"""Submit runs of a schedule, and wait for them.

Runs behave as if executed one after another in the order in which they were submitted. The
program's waits order the runs in flight where they share state; what no program can know is found
here, and then a run begins only after those before it have ended:

* an input shares memory with another input of an earlier run, which tasks write;
* a captured step puts outputs into modules when it ends, and the next run reads them there;
* the first run, and each one if ``check`` is set, is checked, and runs alone.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from autosched._lib.aliasing import Extent, extents, first_meeting
from autosched._lib.forks import forks
from autosched.errors import RunTimeoutError, ScheduleError
from autosched.runtime.execute import Executor
from autosched.runtime.in_flight.future import RunFuture, Unfinished, Waiting
from autosched.runtime.in_flight.overlapping_runs import CLOSED, OverlappingRuns, call_each
from autosched.runtime.threads.team import at_once, end_threads

__all__ = ["Runs"]

Keep = Callable[[Mapping[str, Any]], Any]
Inputs = dict[str, Any]
Complete = Callable[[Sequence[Any], Inputs], tuple[Inputs, Keep | None]]
Guarded = Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]]

Made = TypeVar("Made")

_LATE = "the run did not begin in time: earlier runs go on"


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
        self._under_way: dict[int, Unfinished] = {}  # by number, in order
        self._turn = threading.Lock()  # held by the thread that submits
        self._submitted = 0
        self._names = {*names}
        self._written = self._names & executor.memory.written
        self._overlaps = Overlaps(self._written)
        self._single: SingleRuns | None = None
        self._overlapping: OverlappingRuns | None = None
        self._closed = False
        self._waiting = Waiting(executor.name, self._executing)

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
        self._wait_until_fewer(self.in_flight, deadline)
        found, keep = self._complete(args, inputs)
        if keep is not None and self._under_way:
            self._wait_until_fewer(1, deadline)
            found, keep = self._complete(args, inputs)
        if found.keys() != self._names:
            self.executor.graph.bind(found)
        engine = self._engine(deadline)
        wrote = None
        if self._written:
            wrote = partial(self._wrote, found)
            if self._overlaps.exist(found, [run.inputs for run in list(self._under_way.values())]):
                self._wait_until_fewer(1, deadline)
        self._submitted += 1
        ending = partial(self._finish, found, keep, finish, _autograd())
        future = RunFuture(self._submitted, ending, wrote, self._waiting)
        engine.start(future, self._placed(found), deadline)
        return future

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
        if run is not None:
            run.stop()

    def paused(self, call: Callable[[], Made], deadline: float | None = None) -> Made:
        """Return what a function returns that is called while no run is under way."""

        def alone() -> Made:
            self._wait_until_fewer(1, deadline)
            return call()

        return self._in_turn(deadline, alone)

    def close(self) -> None:
        """Abort all runs, and end the threads."""
        self._closed = True
        for engine in (self._overlapping, self._single):
            if engine is not None:
                engine.close()

    # ---- submitting

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

    def _engine(self, deadline: float | None) -> SingleRuns | OverlappingRuns:
        """Return what executes the next run."""
        executor = self.executor
        if self.in_flight == 1 or executor.check or not executor.checked:
            self._wait_until_fewer(1, deadline)
            if self.in_flight == 1 or executor.check or not executor.checked:
                if self._single is None:
                    self._single = SingleRuns(executor, self._under_way)
                return self._single
        if self._single is not None:
            self._single.close()
            self._single = None
        if self._overlapping is None:
            self._overlapping = OverlappingRuns(executor, self._under_way)
        if self._overlapping.is_broken:
            self._wait_until_fewer(1, deadline)
        return self._overlapping

    def _is_executing(self, thread: int) -> bool:
        """Whether a thread executes a task of the schedule."""
        executor = self.executor
        if executor.is_run_by(thread) or thread in executor.threads:
            return True
        return bool(self._under_way) and thread in self._executing()

    def _executing(self) -> frozenset[int]:
        """Return the identities of the threads that execute tasks."""
        engines = [engine for engine in (self._single, self._overlapping) if engine is not None]
        return self.executor.threads.union(*(engine.threads for engine in engines))

    def _finish(
        self,
        inputs: Mapping[str, Any],
        keep: Keep | None,
        finish: Keep | None,
        autograd: bool,
        outputs: dict[str, Any],
    ) -> Any:
        """Put outputs where they belong; return the result. Called when the run has ended."""
        if autograd:
            torch: Any = sys.modules["torch"]
            before = torch.is_grad_enabled()
            torch._C._set_grad_enabled(True)
        try:
            if autograd:
                outputs = self._guarded(inputs, outputs)
            if keep is not None:
                keep(outputs)
            return outputs if finish is None else finish(outputs)
        finally:
            if autograd:
                torch._C._set_grad_enabled(before)


def _autograd() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.is_grad_enabled())


def _patience(deadline: float | None) -> float:
    if deadline is None:
        return -1.0
    return min(max(0.0, deadline - time.perf_counter()), threading.TIMEOUT_MAX)


# ---- inputs that share memory with those of earlier runs
#
# A program orders the runs' accesses to one input, which is the same memory in each run, or memory of
# its own. It cannot know that a tensor which one run writes as ``a`` is the next run's ``b``, or
# another part of the same memory.

_Owned = tuple[bool, str]  # whether it is the earlier run's; the name of an input


class Overlaps:
    """Overlaps of inputs of a program. ``written`` are the inputs that tasks write.

    >>> import torch
    >>> w, x = torch.zeros(4), torch.zeros(4)
    >>> overlaps = Overlaps({"w"})
    >>> overlaps.exist({"w": w, "x": torch.ones(4)}, [{"w": w, "x": x}])
    False
    >>> overlaps.exist({"w": w[:2], "x": x}, [{"w": w, "x": x}])
    True
    """

    def __init__(self, written: Set[str]):
        self._written = written

    def exist(self, inputs: Mapping[str, Any], earlier: Iterable[Mapping[str, Any]]) -> bool:
        """Whether inputs overlap with those of earlier runs so that no program orders them."""
        return bool(self._written) and any(self._meet(other, inputs) for other in earlier)

    def _meet(self, other: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
        """Whether inputs overlap with those of an earlier run.

        What both runs have under one name was compared with the rest when either was checked. So
        each pair that is compared here has a tensor that only one of the runs has.
        """
        written = self._written
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


# ---- one run at a time, in a thread of its own
#
# For schedules with one run in flight, and for runs that are checked: a check must see one run alone.

_Work = Callable[[], None]


@dataclass(eq=False)
class Queued:
    """A run that waits for the thread, or is executed by it."""

    future: RunFuture
    inputs: Mapping[str, Any]

    def stop(self) -> None:
        """Do nothing: it cannot be aborted separately."""


class SingleRuns:
    """A thread that calls an executor. ``under_way`` are the runs that have not ended."""

    def __init__(self, executor: Executor, under_way: dict[int, Unfinished]):
        self.executor = executor
        self.under_way = under_way
        self._looping = executor.compiler.can.looping
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        name = "autosched submitted runs"
        thread = threading.Thread(target=call_each, args=(self._queue,), name=name, daemon=True)
        thread.start()
        self.threads = frozenset([thread.ident or 0])
        parts = self._queue, thread, executor.close, under_way, forks()
        self.close = weakref.finalize(self, _close, *parts)

    def start(self, future: RunFuture, inputs: Mapping[str, Any], deadline: float | None) -> None:
        """Start a run, for which there must be room."""
        adopt = _nothing if self._looping is None else self._looping.adopting()
        at_once(
            partial(self.under_way.__setitem__, future.number, Queued(future, inputs)),
            partial(self._queue.put, partial(self._run, future, inputs, deadline, adopt)),
        )

    def _run(
        self,
        future: RunFuture,
        inputs: Mapping[str, Any],
        deadline: float | None,
        adopt: _Work,
    ) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            adopt()
            left = None if deadline is None else max(0.0, deadline - time.perf_counter())
            result = future.finish(self.executor(inputs, left))
        except BaseException as raised:
            error = raised
        del self.under_way[future.number]
        future.end(result, error)


def _close(
    queue: SimpleQueue[_Work | None],
    thread: threading.Thread,
    abort: Callable[[], object],
    under_way: Mapping[int, Unfinished],
    process: int,
) -> None:
    """Abort the run, and end the thread."""
    if process != forks():  # it is the parent's
        return
    queue.put(None)
    if under_way:
        abort()
    end_threads([thread])
    for run in list(under_way.values()):
        run.future.fail(ScheduleError(CLOSED), abandoned=True)


def _nothing() -> None:
    pass
