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
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from autosched._lib.tree import flatten
from autosched.errors import MachineError
from autosched.program.program import Copy, Program, Receive, Run, Send, occupied
from autosched.runtime.backends import Step, Timed
from autosched.timeline.timeline import Span, Timeline, what

__all__ = ["Notes", "Trace", "annotation", "is_traced", "ranged"]

_NAP = 0.05  # seconds after which a thread that waits notices that the run was aborted


class Notes:
    """The measurements of one run.

    Call ``close`` in any case: it removes the callback for garbage collections.
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
        """Return a run or a copy that measures when it begins and ends, and how much it moves."""
        instruction = self.program.instructions[i]
        stamp = self.backend.stamp(occupied(instruction))
        stamps = self.stamps
        moves = isinstance(instruction, (Copy, Receive))

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
        assert isinstance(instruction, (Run, Copy, Send, Receive))
        return Span(
            *what(instruction), occupied(instruction), start, end, i, self.nbytes.get(i, 0.0)
        )


def is_traced() -> bool:
    """Whether torch.profiler is active in this process; costs one look-up if not."""
    profiler = sys.modules.get("torch.autograd.profiler")
    return profiler is not None and getattr(profiler, "_is_profiler_enabled", False)


class Trace:
    """Names runs and copies in the trace of a torch.profiler.

    By default the profiler sees only the thread in which it was started. If this one is ``idle``
    while others work, it writes their steps into the trace: they post when each begins and ends.
    Then what happens inside a step is not visible, times are some microseconds late, and slices of
    steps that overlap are on one thread.
    """

    def __init__(self, program: Program, idle: bool, stopped: Callable[[], bool]):
        import torch

        self.relays = idle and torch._C._autograd._profiler_enabled()
        self._program = program
        self._stopped = stopped
        self._posted: SimpleQueue[tuple[int, str]] = SimpleQueue()  # "": the end of this position
        self._expected = 0  # ends

    def named(self, i: int, step: Step) -> Step:
        """Return a run or a copy that appears in the trace under its name."""
        instruction = self._program.instructions[i]
        assert isinstance(instruction, (Run, Copy, Send, Receive))
        name = annotation(i, instruction)
        if not self.relays:
            return _annotated(name, step)
        post = self._posted.put
        self._expected += 1

        def posted() -> None:
            post((i, name))
            try:
                step()
            finally:
                post((i, ""))

        return posted

    def relay(self) -> None:
        """Write the steps of other threads into the trace, until they have ended."""
        from torch.profiler import record_function

        slices: dict[int, record_function] = {}
        ended = 0
        try:
            while ended < self._expected and not self._stopped():
                with contextlib.suppress(Empty):
                    i, name = self._posted.get(timeout=_NAP)
                    if name:
                        slices[i] = record_function(name)
                        slices[i].__enter__()  # type: ignore[no-untyped-call]
                    else:
                        slices.pop(i).__exit__(None, None, None)
                        ended += 1
        finally:
            for found in slices.values():
                found.__exit__(None, None, None)


def annotation(i: int, instruction: Run | Copy | Send | Receive) -> str:
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

    The thread that issues it pushes and pops: Nsight extends the range to the kernels launched.
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
