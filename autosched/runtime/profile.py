"""Measure runs and copies while a program runs.

Notes when runs and copies begin and end, how many bytes copies move, and when Python's garbage
collector pauses the program. Wraps steps for the executor and reads the backend's clock; decides
nothing. Uses torch for one thing: to write the names of runs and copies into the trace of an active
torch.profiler, or into ranges for Nsight.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from autosched._lib.tree import flatten
from autosched.errors import MachineError
from autosched.program.program import Copy, Program, Run, occupied
from autosched.runtime.backends import Step, Timed
from autosched.timeline.timeline import Span, Timeline, what

__all__ = ["Notes", "Trace", "annotation", "is_traced", "ranged"]


class Notes:
    """The measurements of one run.

    Always call ``close``, or the callback for garbage collections remains installed.
    """

    timeline: Timeline

    def __init__(self, program: Program, backend: Timed, made: Callable[[int], list[Any]]):
        self.program = program
        self.backend = backend
        self.made = made
        self.stamps: dict[int, tuple[Any, Any]] = {}
        self.nbytes: dict[int, float] = {}
        self.pauses: list[tuple[Any, Any]] = []
        self._now = backend.stamp(())
        self._began: Any = None

    def timed(self, i: int, step: Step) -> Step:
        """Return a run or a copy that measures when it began and ended, and the bytes that it moved."""
        instruction = self.program.instructions[i]
        stamp = self.backend.stamp(occupied(instruction))
        stamps = self.stamps
        moves = isinstance(instruction, Copy)

        def timed() -> None:
            start = stamp()
            step()
            stamps[i] = (start, stamp())
            if moves:
                self.nbytes[i] = sum(map(_nbytes, flatten(self.made(i))))

        return timed

    def open(self) -> None:
        """Install a callback for pauses by Python's garbage collector."""
        gc.callbacks.append(self._collecting)

    def close(self) -> None:
        """Remove the callback."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = self._now()
        elif self._began is not None:
            self.pauses.append((self._began, self._now()))
            self._began = None

    def finish(self) -> None:
        """Read the backend's clock, after its ``join``, and make the timeline."""
        seconds = self.backend.seconds
        spans = [self._span(i, *map(seconds, pair)) for i, pair in sorted(self.stamps.items())]
        made = Timeline.of(spans, self.program.arrows)
        found = [
            (max(0.0, seconds(start)), min(seconds(end), made.makespan))
            for start, end in self.pauses
        ]
        pauses = tuple((start, end) for start, end in found if start < end)
        self.timeline = Timeline(made.spans, made.arrows, pauses, doubt=self.backend.doubt)

    def _span(self, i: int, start: float, end: float) -> Span:
        instruction = self.program.instructions[i]
        assert isinstance(instruction, (Run, Copy))
        return Span(
            *what(instruction), occupied(instruction), start, end, i, self.nbytes.get(i, 0.0)
        )


def is_traced() -> bool:
    """Whether torch.profiler is active in this process; costs one look-up if not."""
    profiler = sys.modules.get("torch.autograd.profiler")
    return profiler is not None and getattr(profiler, "_is_profiler_enabled", False)


class Trace:
    """Names runs and copies in the trace of a torch.profiler.

    By default the profiler sees the thread in which it was started. If this one is ``idle`` while
    others work, it writes their steps into the trace.
    """

    def __init__(self, program: Program, idle: bool, stopped: Callable[[], bool]):
        import torch

        self._program = program
        self._relay = _Relay(stopped) if idle and torch._C._autograd._profiler_enabled() else None

    def named(self, i: int, step: Step) -> Step:
        """Return a run or a copy that appears in the trace under its name."""
        instruction = self._program.instructions[i]
        assert isinstance(instruction, (Run, Copy))
        around = _annotated if self._relay is None else self._relay.around
        return around(annotation(i, instruction), step)

    def relaying(self, lock: Callable[[], threading.Lock]) -> list[Step]:
        """Return the calling thread's step if it writes for the others.

        It waits for ``lock``, which is closed.
        """
        return [] if self._relay is None else [self._relay.serving(lock())]


class _Relay:
    """Makes the calling thread write the steps of other threads into a trace.

    For a profiler that sees only the calling thread. The calling thread is idle while they work.
    Each of them posts the begin and the end of its steps; what happens inside a step is not
    visible. The times are some microseconds late, and slices of steps that overlap are on one
    thread.
    """

    def __init__(self, stopped: Callable[[], bool]):
        self._stopped = stopped
        self._posted: deque[tuple[int, str]] = (
            deque()
        )  # the number of a step, and its name, or "" at its end
        self._expected = 0  # ends
        self._lock = threading.Lock()

    def around(self, name: str, step: Step) -> Step:
        """Return a step that posts when it begins and ends."""
        number = self._expected
        posted = self._posted
        self._expected += 1

        def relayed() -> None:
            posted.append((number, name))
            self._wake()
            try:
                step()
            finally:
                posted.append((number, ""))
                self._wake()

        return relayed

    def serving(self, lock: threading.Lock) -> Step:
        """Return the calling thread's step.

        Whoever aborts the run opens the ``lock``, which is closed.
        """
        self._lock = lock
        return self._serve

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # open already: the calling thread is about to look
            self._lock.release()

    def _serve(self) -> None:
        from torch.profiler import record_function

        slices: dict[int, record_function] = {}
        ended = 0
        try:
            while ended < self._expected and not self._stopped():
                self._lock.acquire()
                while self._posted:
                    number, name = self._posted.popleft()
                    if name:
                        slices[number] = record_function(name)
                        slices[number].__enter__()  # type: ignore[no-untyped-call]
                    else:
                        slices.pop(number).__exit__(None, None, None)
                        ended += 1
        finally:
            for found in slices.values():
                found.__exit__(None, None, None)


def annotation(i: int, instruction: Run | Copy) -> str:
    """Return the name of a run or a copy in a trace of torch.profiler.

    >>> from autosched.program.program import Stream
    >>> annotation(7, Run(Stream("cpu", "compute"), "h"))
    'autosched::run h#7'
    """
    return f"autosched::{instruction}#{i}"


def _annotated(name: str, step: Step) -> Step:
    """Return a step under a name in a trace of torch.profiler."""
    from torch.profiler import record_function

    def named() -> None:
        with record_function(name):
            step()

    return named


def ranged(name: str, step: Step) -> Step:
    """Return a step in a range of NVTX, for Nsight. Raises MachineError where torch has none.

    Pushed and popped by the thread that issues it: Nsight itself lays the range over the kernels
    launched in it.
    """
    import torch

    if not hasattr(torch._C, "_nvtx"):
        raise MachineError("nvtx=True needs a build of torch for CUDA; this one has no NVTX")

    def within() -> None:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            step()
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    return within


def _nbytes(leaf: Any) -> float:
    """Return the bytes of a tensor or an array, if they are known."""
    with contextlib.suppress(Exception):  # a sparse tensor has none of its own
        return float(leaf.nbytes)
    return 0.0
