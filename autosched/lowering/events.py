"""Insert the records and waits that enforce all hazards.

Each hazard between two streams gets a record and a wait, unless earlier ones imply it. Vector
clocks answer what is implied; asking for the latest producer first leaves out the most. With the
assignment of ``streams`` this reaches the minimum number of waits (Nimble's theorem; Kwon et al.,
NeurIPS 2020). ``frees`` is informed of the progress of each stream during the walk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import kernel, mode
from autosched.lowering.ending import Ending
from autosched.lowering.frees import DO, FREE, WAIT, Held, Order, emit, ended, release, waited
from autosched.lowering.hazards import Hazards
from autosched.program.clock_kernels import Moments, advance, catch_up, reaches
from autosched.program.program import Copy, Free, Instruction, Record, Run, Stream, Wait, occupied
from autosched.program.vector_clocks import Clocks, Stamp

__all__ = ["insert_events"]

_RECORD = 3  # a kind of issued item, in addition to those of ``frees``

Ints = NDArray[np.int64]


def insert_events(
    instructions: Sequence[Run | Copy | Free], hazards: Hazards, alone: Collection[Stream] = ()
) -> list[Instruction]:
    """Return the instructions with records, waits and frees, so that every hazard is ordered.

    Blocks of ``hazards`` are freed, in addition to the frees that make room. Streams in ``alone``
    have no entry in vector clocks.
    """
    streams = chain.from_iterable(map(occupied, instructions))
    clocks = Clocks(chain(streams, hazards.owners), alone)  # owners may have no other instruction
    how = mode(len(instructions) * (5 + clocks.places / 4), walk)
    o = how.of(_order(instructions, hazards, clocks))
    m = Moments.of(how, len(clocks.index), clocks.places, len(o.after) + len(o.uses))
    h = Held.of(how, o, len(clocks.index), clocks.places)
    how(walk)(o, h, m)
    return _Issued(instructions, hazards, clocks, o, h, m).program()


def _order(instructions: Sequence[Run | Copy | Free], hazards: Hazards, clocks: Clocks) -> Order:
    index = clocks.index
    also = [i.also if type(i) is Copy else None for i in instructions]
    ending_at, ending = hazards.ending(len(instructions))
    return Order(
        np.array([index[i.stream] for i in instructions], np.int64),
        np.array([-1 if stream is None else index[stream] for stream in also], np.int64),
        hazards.after_at,
        hazards.after,
        np.array([index[stream] for stream in hazards.owners], np.int64),
        hazards.uses_at,
        hazards.uses,
        ending_at,
        ending,
    )


@kernel
def walk(o: Order, h: Held, m: Moments) -> None:
    """Issue each instruction after waits for its predecessors, with frees where possible."""
    for i in range(len(o.own)):
        own = o.own[i]
        also = o.also[i]
        # 1. Wait for predecessors that earlier waits do not imply, the latest predecessor first.
        for k in range(o.after_at[i + 1] - 1, o.after_at[i] - 1, -1):
            producer = o.after[k]
            stream = o.own[producer]
            position = h.position[producer]
            if stream == own or reaches(m, m.behind, own * m.places, stream, position):
                continue
            if also >= 0 and (
                stream == also or reaches(m, m.behind, also * m.places, stream, position)
            ):
                continue
            catch_up(m, own, stream, position, h.behind, producer * m.places)
            emit(h, WAIT, producer, i)
            waited(o, h, m, own, stream, i)
        # 2. Issue the instruction, and keep its position and its clock for later waits.
        advance(m, own, also)
        h.position[i] = m.count[own]
        for k in range(m.places):
            h.behind[i * m.places + k] = m.behind[own * m.places + k]
        emit(h, DO, i, i)
        # 3. Free blocks whose uses all happen before by now.
        if also >= 0:
            release(o, h, m, also, i)
        ended(o, h, m, i)


class _Issued:
    """The issued instructions, as numbers, and the program that they form."""

    def __init__(
        self,
        instructions: Sequence[Any],
        hazards: Hazards,
        clocks: Clocks,
        o: Order,
        h: Held,
        m: Moments,
    ):
        self.instructions = instructions
        self.hazards = hazards
        self.clocks = clocks
        self.streams = list(clocks.index)
        self.o = o
        self.h = h
        self.m = m
        count = h.issued[0]
        self.kind, self.item, self.line = (
            np.asarray(column[:count], np.int64) for column in (h.kind, h.item, h.line)
        )
        self.producers: Ints = np.unique(self.item[self.kind == WAIT])

    def program(self) -> list[Instruction]:
        """Return the instructions, with a record after each one that is waited for."""
        behind = np.searchsorted(self.line, self.producers, side="right")
        kind = np.insert(self.kind, behind, _RECORD).tolist()
        frees = self._frees(self.item[self.kind == FREE].tolist())
        lines: list[Iterator[Instruction]] = [
            iter(part) for part in (self.instructions, self._waits(), frees, self._records())
        ]
        found: list[Instruction] = list(map(next, map(lines.__getitem__, kind)))
        left = (np.asarray(self.h.stuck) >= 0).nonzero()[0].tolist()
        return found + self._ending(left) if left else found

    def _waits(self) -> list[Wait]:
        waits = self.kind == WAIT
        events = np.searchsorted(self.producers, self.item[waits]).tolist()
        return list(map(Wait, self._streams(self.line[waits]), events))

    def _records(self) -> list[Record]:
        return list(map(Record, self._streams(self.producers), range(len(self.producers))))

    def _frees(self, blocks: Sequence[int]) -> list[Free]:
        known = self.hazards
        columns = (
            [column[block] for block in blocks]
            for column in (known.owners, known.values, known.versions)
        )
        return list(map(Free, *columns))

    def _streams(self, lines: Ints) -> list[Stream]:
        return [self.streams[own] for own in np.asarray(self.o.own, np.int64)[lines].tolist()]

    def _ending(self, left: Sequence[int]) -> list[Instruction]:
        """Return waits for the uses of the remaining blocks, and the frees of these."""
        self.clocks.resume(self.m)
        own, position = (
            np.asarray(column)[self.producers].tolist() for column in (self.o.own, self.h.position)
        )
        ending = Ending(
            self.clocks, list(zip(own, position, self.producers.tolist(), strict=True)), self._stamp
        )
        found: list[Instruction] = []
        for own in sorted({self.o.owner[block] for block in left}):
            held = [block for block in left if self.o.owner[block] == own]
            found += ending.waits(own, chain.from_iterable(map(self._uses, held)))
            held.sort(
                key=lambda block: (self.o.own[self.h.stuck[block]], self.h.stuck[block], block)
            )
            found += self._frees(held)
        return found

    def _uses(self, block: int) -> Sequence[int]:
        return self.o.uses[self.o.uses_at[block] : self.o.uses_at[block + 1]]  # type: ignore[no-any-return]

    def _stamp(self, at: int) -> Stamp:
        places = self.m.places
        behind = tuple(map(int, self.h.behind[at * places : (at + 1) * places]))
        return int(self.o.own[at]), int(self.h.position[at]), behind
