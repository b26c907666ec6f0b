"""Compute vector clocks over the streams of a program.

Source: Fidge; Mattern, 1988. Vector clocks answer which instruction happens before which.
``behind[s][t]`` is the position on stream ``t`` up to which everything happens before the next
instruction of stream ``s``. A stream always happens after its own earlier instructions; that is not
stored. Streams are numbers here; ``index`` maps streams to numbers. This module knows no
instruction; its callers decide what must be ordered.

On a machine without contention, each copy has a stream of its own. An entry in every clock for each
of these streams would make planning quadratic. So a stream that holds a single copy may have no
entry. Whatever happens after that copy also happens after one of the instructions that waited for
it, and these few are stored instead. The answers remain exact, and planning takes near-linear time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import numpy as np

from autosched.program.clock_kernels import Moments
from autosched.program.program import Copy, Instruction, Record, Run, Stream, Wait, occupied

__all__ = ["Clocks", "Stamp", "alone", "joined"]


# A stream, a position on it, and the clock there: a position on each stream that has an entry.
# Plain tuples of numbers, because the garbage collector does not track those, and
# planning makes very many of them.
Stamp = tuple[int, int, tuple[int, ...]]


class Clocks:
    """The clocks while a program is walked in issue order.

    Streams that are ``alone`` have no entry in clocks. Each holds one copy, which is on no other
    stream, and only streams with an entry wait for it.

    >>> clocks = Clocks([Stream("cpu", "a"), Stream("cpu", "b")])
    >>> stamp = clocks.advance(0)
    >>> clocks.passed(stamp, 1)
    False
    >>> clocks.catch_up(1, stamp); clocks.passed(stamp, 1)
    True
    """

    def __init__(self, streams: Iterable[Stream], alone: Collection[Stream] = ()):
        known = dict.fromkeys(streams)
        placed = [stream for stream in known if stream not in alone] if alone else known
        self.index = {stream: i for i, stream in enumerate(placed)}
        self.places = len(self.index)  # streams from this number on have no entry
        for stream in known if alone else ():
            self.index.setdefault(stream, len(self.index))
        self.count = [0] * len(
            self.index
        )  # by stream, its runs, copies and waits for single-copy streams so far
        self.behind = [(0,) * self.places] * len(self.index)
        self.waiters: dict[
            int, list[tuple[int, int]]
        ] = {}  # of single-copy streams: (stream, position) that waited for them

    def resume(self, m: Moments) -> None:
        """Continue from the state that kernels have reached."""
        self.count = list(map(int, m.count))
        rows = np.array(m.behind, np.int64).reshape(len(self.index), self.places)
        self.behind = list(map(tuple, rows.tolist()))
        for other in (np.asarray(m.last) >= 0).nonzero()[0].tolist():
            found = []
            w = m.last[other]
            while w >= 0:
                found.append((int(m.waiter[w]), int(m.since[w])))
                w = m.before[w]
            self.waiters[other] = found[::-1]

    def advance(self, own: int, also: int | None = None) -> Stamp:
        """Advance the clocks by a run or copy; one on two streams orders both."""
        count = self.count
        count[own] += 1
        if also is not None:
            both = joined(self.behind[own], self.behind[also])
            both[own] = count[own]
            both[also] = count[also]
            self.behind[own] = self.behind[also] = tuple(both)
        return own, count[own], self.behind[own]

    def now(self, own: int) -> Stamp:
        """Return the stamp of everything issued on a stream so far."""
        return own, self.count[own], self.behind[own]

    def catch_up(self, own: int, stamp: Stamp) -> None:
        """Order the next instructions of a stream after a stamp, and after its clock."""
        other, position, seen = stamp
        behind = joined(self.behind[own], seen)
        if other < self.places:
            behind[other] = max(behind[other], position)
        elif not self.reaches(behind, other, position):
            # Advance this stream's position, to distinguish streams that wait for it from now on
            # from those that waited before.
            behind[own] = self.count[own] = self.count[own] + 1
            self.waiters.setdefault(other, []).append((own, behind[own]))
        self.behind[own] = tuple(behind)

    def passed(self, stamp: Stamp, own: int) -> bool:
        """Whether ``stamp`` happens before all later instructions of a stream."""
        other, position, _ = stamp
        if other < self.places:
            return own == other or self.behind[own][other] >= position
        return own == other or self.reaches(self.behind[own], other, position)

    def reaches(self, behind: Sequence[int], other: int, position: int) -> bool:
        """Whether a clock includes a position of any stream."""
        if other < self.places:
            return behind[other] >= position
        return not position or any(
            behind[own] >= since for own, since in self.waiters.get(other, ())
        )


def alone(instructions: Iterable[Instruction]) -> frozenset[Stream]:
    """Return the streams that hold a single copy for which no other such stream waits.

    >>> alone([Copy(Stream("cpu", "copy-0"), "x", 0, "cpu", "cuda:0"), Run(Stream("cuda:0", "compute"), "y")])
    frozenset({Stream(device='cpu', name='copy-0')})
    """
    held: dict[Stream, int] = {}
    copies: list[Copy] = []
    for instruction in instructions:
        if isinstance(instruction, Copy):
            copies.append(instruction)
        elif isinstance(instruction, Run):
            # any number but 1 excludes a stream with other instructions
            held[instruction.stream] = 2
    for stream in chain.from_iterable(map(occupied, copies)):
        held[stream] = held.get(stream, 0) + 1
    found = {copy.stream for copy in copies if copy.also is None and held[copy.stream] == 1}
    waited: set[Stream] = set()
    recorded: dict[int, Stream] = {}
    for instruction in instructions if found else ():
        if isinstance(instruction, Record):
            recorded[instruction.event] = instruction.stream
        elif (
            isinstance(instruction, Wait)
            and instruction.stream in found
            and instruction.event in recorded
        ):
            waited.add(recorded[instruction.event])
    return frozenset(found - waited)


def joined(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """Return the elementwise maximum of two clocks of the same length."""
    return [x if x > y else y for x, y in zip(a, b)]  # noqa: B905  # strict=True takes a fifth longer
