"""Vector clocks over the streams of a program (Fidge, Mattern, 1988): what has surely happened when.

``behind[s][t]`` is how far along stream ``t`` all that comes next on stream ``s`` is ordered behind. That a stream is
behind all of itself goes without saying, and is not kept there. Knows streams and events; what must be ordered is for
others to say.
"""

from __future__ import annotations

from collections.abc import Iterable

from autosched.program import Copy, Free, Instruction, Record, Run, Stream, Wait, occupied

__all__ = ["Clocks", "Stamp"]


# A moment: a stream (by its index), how many runs and copies it has had, and how far along each stream that is behind.
# Plain tuples of numbers all through: the garbage collector leaves those alone, and planning makes very many.
Stamp = tuple[int, int, tuple[int, ...]]


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
        self.count = [0] * len(self.index)  # of each stream, its runs and copies so far
        self.behind = [(0,) * len(self.index)] * len(self.index)
        self.events: dict[int, Stamp] = {}

    def advance(self, instruction: Run | Copy | Free) -> Stamp:
        """Let a run, copy or free take place; one that occupies two streams orders each behind the other."""
        own = self.index[instruction.stream]
        self.count[own] += 1
        if isinstance(instruction, Copy) and instruction.also is not None:
            also = self.index[instruction.also]
            both = joined(self.behind[own], self.behind[also])
            both[own], both[also] = self.count[own], self.count[also]
            self.behind[own] = self.behind[also] = tuple(both)
        return own, self.count[own], self.behind[own]

    def now(self, stream: Stream) -> Stamp:
        """Return the moment behind all that was issued on a stream so far."""
        own = self.index[stream]
        return own, self.count[own], self.behind[own]

    def record(self, instruction: Record) -> None:
        """Let an event remember what is behind it."""
        self.events[instruction.event] = self.now(instruction.stream)

    def wait(self, instruction: Wait) -> None:
        """Order what comes next on the stream behind the event. The event must have been recorded."""
        self.catch_up(instruction.stream, self.events[instruction.event])

    def catch_up(self, stream: Stream, stamp: Stamp) -> None:
        """Order what comes next on a stream behind a moment, and all that this was behind."""
        own, (other, position, seen) = self.index[stream], stamp
        behind = joined(self.behind[own], seen)
        behind[other] = max(behind[other], position)
        self.behind[own] = tuple(behind)

    def passed(self, stamp: Stamp, stream: Stream) -> bool:
        """Whether all that comes next on ``stream`` is ordered behind ``stamp``."""
        own, (other, position, _) = self.index[stream], stamp
        return own == other or self.behind[own][other] >= position

    def seen(self, stamp: Stamp, instruction: Instruction) -> bool:
        """Whether an instruction, on whichever streams it occupies, comes behind ``stamp``."""
        return any(self.passed(stamp, stream) for stream in occupied(instruction))


def joined(a: tuple[int, ...], b: tuple[int, ...]) -> list[int]:
    """Return the elementwise maximum."""
    return [x if x > y else y for x, y in zip(a, b, strict=True)]
