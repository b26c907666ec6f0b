"""Measure runs and copies while a program runs.

Notes when runs and copies begin and end, and how many bytes copies move. Wraps steps for the
executor and reads the backend's clock; decides nothing. Uses torch for one thing: to write the
names of runs and copies into the trace of an active torch.profiler, or into ranges for Nsight.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autosched._lib.tree import flatten
from autosched.errors import MachineError
from autosched.program.program import Copy, Instruction, Program, Receive, Run, Send, occupied
from autosched.runtime.backends import Step, Timed
from autosched.timeline.timeline import Span, Timeline, what


class Notes:
    """The measurements of one run."""

    timeline: Timeline

    def __init__(self, program: Program, backend: Timed, made: Callable[[int], list[Any]]):
        self.program = program
        self.backend = backend
        self.made = made
        self.stamps: dict[int, tuple[Any, Any]] = {}
        self.nbytes: dict[int, float] = {}

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

    def finish(self) -> None:
        """Read the backend's clock, after its ``join``, and make the timeline."""
        seconds = self.backend.seconds
        spans = [self._span(i, *map(seconds, pair)) for i, pair in sorted(self.stamps.items())]
        made = Timeline.of(spans, self.program.arrows)
        self.timeline = replace(made, doubt=self.backend.doubt)

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


def annotation(i: int, instruction: Instruction) -> str:
    """Return the name of a run or a copy in a trace of torch.profiler.

    >>> from autosched.program.program import Stream
    >>> annotation(7, Run(Stream("cpu", "compute"), "h"))
    'autosched::run h#7'
    """
    return f"autosched::{instruction}#{i}"


def named(name: str, step: Step) -> Step:
    """Return a step under a name in a trace of torch.profiler, if this sees its thread."""
    from torch.profiler import record_function

    def within() -> None:
        with record_function(name):
            step()

    return within


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
