"""Insert the records and waits that enforce all hazards.

Each hazard between two streams gets a record and a wait, unless earlier ones imply it. Vector
clocks answer what is implied; asking for the latest producer first leaves out the most. With the
assignment of ``streams`` this reaches the minimum number of waits (Nimble's theorem; Kwon et al.,
NeurIPS 2020). ``frees`` is informed of the progress of each stream during the walk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import kernel, mode
from autosched.lowering.ending import Ending
from autosched.lowering.frees import (
    FREE,
    ISSUE,
    WAIT,
    Frees,
    Work,
    emit,
    free_due,
    free_unused,
    free_waited,
)
from autosched.lowering.hazards import Hazards, Line
from autosched.program.clocks import Clocks, Stamp, advance, includes, numbered, wait_for
from autosched.program.program import Copy, Free, Instruction, Record, Stream, Wait, occupied

__all__ = ["insert_events"]

_RECORD = 3  # a kind of issued item, in addition to those of ``frees``

Ints = NDArray[np.int64]


def insert_events(
    instructions: Sequence[Line],
    hazards: Hazards,
    single: Collection[Stream] = (),
    known_ended: tuple[Ints, Ints] | None = None,
    ends: bool = True,
) -> list[Instruction]:
    """Return the instructions with records, waits and frees, so that every hazard is ordered.

    Blocks of ``hazards`` are freed, in addition to the frees that make room; those that no existing
    wait allows to free are left, or freed at the end with waits if ``ends`` is set. The streams in
    ``single``, which hold a single copy, have no entry in vector clocks. ``known_ended`` has for each
    instruction others that have ended when it ends, for reasons of its own, as a ragged table.
    """
    streams = chain.from_iterable(map(occupied, instructions))
    # Owners may have no other instruction.
    index, width = numbered(chain(streams, hazards.owners), single)
    how = mode(len(instructions) * (8 + width / 3), walk)
    o = how.of(_work(instructions, hazards, index, known_ended))
    c = Clocks.of(how, len(index), width, len(o.after) + len(o.uses))
    h = Frees.of(how, o, len(index), width)
    how(walk)(o, h, c)
    return _Issued(instructions, hazards, list(index), o, h, c).program(ends)


def _work(
    instructions: Sequence[Line],
    hazards: Hazards,
    index: Mapping[Stream, int],
    known_ended: tuple[Ints, Ints] | None,
) -> Work:
    nothing = np.zeros(len(instructions) + 1, np.int64), np.zeros(0, np.int64)
    also = [i.also if type(i) is Copy else None for i in instructions]
    return Work(
        np.array([index[i.stream] for i in instructions], np.int64),
        np.array([-1 if stream is None else index[stream] for stream in also], np.int64),
        hazards.after_at,
        hazards.after,
        np.array([index[stream] for stream in hazards.owners], np.int64),
        hazards.uses_at,
        hazards.uses,
        *hazards.ending(len(instructions)),
        *(known_ended or nothing),
    )


@kernel
def walk(o: Work, h: Frees, c: Clocks) -> None:
    """Issue each instruction after waits for its predecessors, with frees where possible."""
    for i in range(len(o.own)):
        own = o.own[i]
        also = o.also[i]
        # 1. Wait for predecessors that earlier waits do not imply, the latest predecessor first.
        for k in range(o.after_at[i + 1] - 1, o.after_at[i] - 1, -1):
            producer = o.after[k]
            stream = o.own[producer]
            position = h.position[producer]
            if stream == own or includes(c, c.clocks, own * c.width, stream, position):
                continue
            if also >= 0 and (
                stream == also or includes(c, c.clocks, also * c.width, stream, position)
            ):
                continue
            wait_for(c, own, stream, position, h.clocks, producer * c.width)
            emit(h, WAIT, producer, i)
            free_waited(o, h, c, own, stream, i)
        # 2. Issue the instruction, and keep its position and its clock for later waits.
        advance(c, own, also)
        h.position[i] = c.count[own]
        for k in range(o.known_ended_at[i], o.known_ended_at[i + 1]):
            ended = o.known_ended[k]
            wait_for(c, own, o.own[ended], h.position[ended], h.clocks, ended * c.width)
        for k in range(c.width):
            h.clocks[i * c.width + k] = c.clocks[own * c.width + k]
        emit(h, ISSUE, i, i)
        # 3. Free blocks whose uses all happen before by now.
        if also >= 0:
            free_due(o, h, c, also, i)
        if o.known_ended_at[i] < o.known_ended_at[i + 1]:
            free_due(o, h, c, own, i)
        free_unused(o, h, c, i)


class _Issued:
    """The issued items, as numbers, and the program that they form."""

    def __init__(
        self,
        instructions: Sequence[Any],
        hazards: Hazards,
        streams: Sequence[Stream],
        o: Work,
        h: Frees,
        c: Clocks,
    ):
        self.instructions = instructions
        self.hazards = hazards
        self.streams = streams
        self.own = np.asarray(o.own, np.int64)
        self.o = o
        self.h = h
        self.c = c
        columns = (h.kind, h.item, h.at)
        self.kind, self.item, self.at = (
            np.asarray(column[: h.issued[0]], np.int64) for column in columns
        )
        self.producers: Ints = np.unique(self.item[self.kind == WAIT])

    def program(self, ends: bool) -> list[Instruction]:
        """Return the instructions, with a record after each one that is waited for.

        With ``ends``, the remaining blocks are freed.
        """
        recorded = np.searchsorted(self.at, self.producers, side="right")
        kind = np.insert(self.kind, recorded, _RECORD).tolist()
        waits = self.kind == WAIT
        events = np.searchsorted(self.producers, self.item[waits]).tolist()
        # The items of each kind, in the order of their kinds' numbers.
        lines: list[Iterator[Instruction]] = [
            iter(self.instructions),
            map(Wait, self._streams(self.at[waits]), events),
            iter(self._frees(self.item[self.kind == FREE].tolist())),
            map(Record, self._streams(self.producers), range(len(self.producers))),
        ]
        found: list[Instruction] = list(map(next, map(lines.__getitem__, kind)))
        left = (np.asarray(self.h.pending) >= 0).nonzero()[0].tolist()
        return found + self._ending(left) if left and ends else found

    def _frees(self, blocks: Sequence[int]) -> list[Free]:
        h = self.hazards
        return [Free(h.owners[block], h.values[block], h.versions[block]) for block in blocks]

    def _streams(self, instructions: Ints) -> list[Stream]:
        return [self.streams[own] for own in self.own[instructions].tolist()]

    def _ending(self, left: Sequence[int]) -> list[Instruction]:
        """Return waits for the uses of the remaining blocks, and the frees of these."""
        producers = self.producers.tolist()
        own = self.own[producers].tolist()
        position = np.asarray(self.h.position)[producers].tolist()
        events = list(zip(own, position, producers, strict=True))
        ending = Ending(self.c, self.streams, events, self._stamp)
        found: list[Instruction] = []
        for owner in sorted({self.o.owner[block] for block in left}):
            blocks = [block for block in left if self.o.owner[block] == owner]
            found += ending.waits(owner, chain.from_iterable(map(self._uses, blocks)))
            pending = self.h.pending
            blocks.sort(key=lambda b: (self.o.own[pending[b]], pending[b], b))
            found += self._frees(blocks)
        return found

    def _uses(self, block: int) -> Sequence[int]:
        return self.o.uses[self.o.uses_at[block] : self.o.uses_at[block + 1]]  # type: ignore[no-any-return]

    def _stamp(self, at: int) -> Stamp:
        width = self.c.width
        clock = list(map(int, self.h.clocks[at * width : (at + 1) * width]))
        return int(self.own[at]), int(self.h.position[at]), clock
