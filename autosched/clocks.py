"""Vector clocks over the streams of a program (Fidge, Mattern, 1988): what has surely happened when.

``clock[s][t]`` is how far along stream ``t`` all that comes next on stream ``s`` is ordered behind. Knows streams and
events; what must be ordered is for others to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from autosched.program import Copy, Instruction, Record, Run, Stream, Wait, occupied

__all__ = ["Clocks", "Stamp"]


class Stamp(NamedTuple):
    """A moment: the end of the ``position``-th run or copy of a stream (by its index)."""

    stream: int
    position: int


class Clocks:
    """The clocks while a program is walked in issue order.

    >>> a, b = Stream("cpu", "a"), Stream("cpu", "b")
    >>> clocks = Clocks([a, b])
    >>> stamp = clocks.advance(Run(a, "x"))
    >>> clocks.record(Record(a, 0)); clocks.passed(stamp, b)
    False
    >>> clocks.wait(Wait(b, 0)); clocks.passed(stamp, b)
    True
    """

    def __init__(self, streams: Iterable[Stream]):
        self.index = {stream: i for i, stream in enumerate(streams)}
        self.clock = [[0] * len(self.index) for _ in self.index]
        self.events: dict[int, list[int]] = {}

    def advance(self, instruction: Run | Copy) -> Stamp:
        """Let a run or copy take place; one that occupies two streams orders each behind the other."""
        own = self.index[instruction.stream]
        for stream in occupied(instruction)[1:]:
            self.clock[own] = self.clock[self.index[stream]] = joined(self.clock[own], self.clock[self.index[stream]])
        clock = self.clock[own]
        clock[own] += 1
        for stream in occupied(instruction)[1:]:
            self.clock[self.index[stream]] = clock.copy()
        return Stamp(own, clock[own])

    def record(self, instruction: Record) -> None:
        """Let an event remember what is behind it."""
        self.events[instruction.event] = self.snapshot(instruction.stream)

    def wait(self, instruction: Wait) -> None:
        """Order what comes next on the stream behind the event. The event must have been recorded."""
        self.catch_up(instruction.stream, self.events[instruction.event])

    def snapshot(self, stream: Stream) -> list[int]:
        """Return a copy of a stream's clock."""
        return self.clock[self.index[stream]].copy()

    def catch_up(self, stream: Stream, snapshot: list[int]) -> None:
        """Order what comes next on the stream behind all that the snapshot has seen."""
        own = self.index[stream]
        self.clock[own] = joined(self.clock[own], snapshot)

    def passed(self, stamp: Stamp, stream: Stream) -> bool:
        """Whether all that comes next on ``stream`` is ordered behind ``stamp``."""
        return self.clock[self.index[stream]][stamp.stream] >= stamp.position

    def seen(self, stamp: Stamp, instruction: Instruction) -> bool:
        """Whether an instruction, on whichever streams it occupies, comes behind ``stamp``."""
        return any(self.passed(stamp, stream) for stream in occupied(instruction))


def joined(a: list[int], b: list[int]) -> list[int]:
    """Return the elementwise maximum."""
    return [x if x > y else y for x, y in zip(a, b, strict=True)]
