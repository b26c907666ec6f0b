"""Compute vector clocks over the streams of a program.

Source: Fidge; Mattern, 1988. Vector clocks answer which instruction happens before which.
``clock[s][t] = k`` means that the next instruction of stream ``s`` happens after the first ``k`` of
stream ``t``. A stream always happens after its own earlier instructions; that is not stored.
Streams are numbers here; ``index`` maps streams to numbers. This module knows no instruction; its
callers decide what must be ordered.

On a machine without contention, each copy has a stream of its own. An entry in every clock for each
of these streams would make planning quadratic. So a stream that holds a single copy may have no
entry. Whatever happens after that copy also happens after one of the instructions that waited for
it, and these few are stored instead. The answers remain exact, and planning takes near-linear time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import numpy as np

from autosched.program.clock_kernels import ClockState
from autosched.program.program import Copy, Instruction, Record, Run, Stream, Wait, occupied

__all__ = ["Clocks", "Stamp", "maximum", "single_copy_streams"]


# A stream, a position on it, and the clock there: a position on each stream that has an entry.
# Plain tuples of numbers, because the garbage collector does not track those, and planning makes
# very many of them.
Stamp = tuple[int, int, tuple[int, ...]]


class Clocks:
    """The clocks while a program is walked in issue order.

    Streams in ``single`` have no entry in clocks. Each holds one copy, which is on no other stream,
    and only streams with an entry wait for it.

    >>> clocks = Clocks([Stream("cpu", "a"), Stream("cpu", "b")])
    >>> stamp = clocks.advance(0)
    >>> clocks.happens_before(stamp, 1)
    False
    >>> clocks.wait_for(1, stamp); clocks.happens_before(stamp, 1)
    True
    """

    def __init__(self, streams: Iterable[Stream], single: Collection[Stream] = ()):
        known = dict.fromkeys(streams)
        entries = [stream for stream in known if stream not in single]
        self.width = len(entries)  # streams from this number on have no entry
        order = dict.fromkeys([*entries, *known])
        self.index = {stream: i for i, stream in enumerate(order)}
        # By stream, its runs, its copies and its waits for single-copy streams so far.
        self.count = [0] * len(self.index)
        self.clock = [(0,) * self.width] * len(self.index)
        # By single-copy stream, the (stream, position) that waited for it.
        self.waiters: dict[int, list[tuple[int, int]]] = {}

    def resume(self, c: ClockState) -> None:
        """Continue from the state that kernels have reached."""
        self.count = list(map(int, c.count))
        rows = np.array(c.clocks, np.int64).reshape(len(self.index), self.width)
        self.clock = list(map(tuple, rows.tolist()))
        for other in (np.asarray(c.last) >= 0).nonzero()[0].tolist():
            found = []
            w = c.last[other]
            while w >= 0:
                found.append((int(c.waiter[w]), int(c.since[w])))
                w = c.previous[w]
            self.waiters[other] = found[::-1]

    def advance(self, own: int, also: int | None = None) -> Stamp:
        """Advance the clocks by a run or copy; one on two streams orders both."""
        count = self.count
        count[own] += 1
        if also is not None:
            both = maximum(self.clock[own], self.clock[also])
            both[own] = count[own]
            both[also] = count[also]
            self.clock[own] = self.clock[also] = tuple(both)
        return own, count[own], self.clock[own]

    def stamp(self, own: int) -> Stamp:
        """Return the stamp of everything issued on a stream so far."""
        return own, self.count[own], self.clock[own]

    def wait_for(self, own: int, stamp: Stamp) -> None:
        """Order the next instructions of a stream after a stamp, and after its clock."""
        other, position, seen = stamp
        clock = maximum(self.clock[own], seen)
        if other < self.width:
            clock[other] = max(clock[other], position)
        elif not self.includes(clock, other, position):
            # Advance this stream's position, to distinguish streams that wait for it from now on
            # from those that waited before.
            clock[own] = self.count[own] = self.count[own] + 1
            self.waiters.setdefault(other, []).append((own, clock[own]))
        self.clock[own] = tuple(clock)

    def happens_before(self, stamp: Stamp, own: int) -> bool:
        """Whether ``stamp`` happens before all later instructions of a stream."""
        other, position, _ = stamp
        return own == other or self.includes(self.clock[own], other, position)

    def includes(self, clock: Sequence[int], other: int, position: int) -> bool:
        """Whether a clock includes a position of any stream."""
        if other < self.width:
            return clock[other] >= position
        waiters = self.waiters.get(other, ())
        return not position or any(clock[own] >= since for own, since in waiters)


def single_copy_streams(instructions: Iterable[Instruction]) -> frozenset[Stream]:
    """Return the streams that hold a single copy for which no other such stream waits.

    >>> copy = Copy(Stream("cpu", "copy-0"), "x", 0, "cpu", "cuda:0")
    >>> single_copy_streams([copy, Run(Stream("cuda:0", "compute"), "y")])
    frozenset({Stream(device='cpu', name='copy-0')})
    """
    instructions = list(instructions)
    copies = [i for i in instructions if isinstance(i, Copy)]
    # Any number but 1 excludes a stream with other instructions.
    held = {i.stream: 2 for i in instructions if isinstance(i, Run)}
    for stream in chain.from_iterable(map(occupied, copies)):
        held[stream] = held.get(stream, 0) + 1
    found = {copy.stream for copy in copies if copy.also is None and held[copy.stream] == 1}
    waited: set[Stream] = set()
    recorded: dict[int, Stream] = {}
    for i in instructions if found else ():
        if isinstance(i, Record):
            recorded[i.event] = i.stream
        elif isinstance(i, Wait) and not i.ago and i.stream in found and i.event in recorded:
            waited.add(recorded[i.event])
    return frozenset(found - waited)


def maximum(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """Return the elementwise maximum of two clocks of the same length."""
    return [x if x > y else y for x, y in zip(a, b)]  # noqa: B905  # strict=True takes a fifth longer
