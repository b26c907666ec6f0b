"""Insert the records and waits that enforce all hazards, and the frees.

Each hazard between two streams gets a record and a wait, unless earlier ones imply it. Vector
clocks answer what is implied; asking for the latest producer first leaves out the most. With the
assignment of ``streams`` this reaches the minimum number of waits (Nimble's theorem; Kwon et al.,
NeurIPS 2020).

Memory is freed in the same walk. A block is freed on the stream that allocated it, when all its
uses happen before. A free never adds a wait while the program has work to do: it is placed at the
first point where existing waits order it after every use. Blocks that remain are freed at the end:
the owner of a block waits for the other streams that use it, with as few waits as suffice. This
trades some memory for time.

Three streams, where q follows p, r follows p and q, and s follows r. A clock has for each stream the
number of its instructions that have surely ended:

    instruction        clocks of a, b, c after it           issued
    a  run p           a [1 0 0]                            run p, record e0
    b  run q                     b [1 1 0]                  wait e0, run q, record e1
    c  run r                               c [1 1 1]        wait e1, run r, record e2
    a  run s           a [2 1 1]                            wait e2, free p, run s

    r: the latest predecessor comes first. It is q, whose clock includes p, so p needs no wait.
    s: its wait for r brings r's clock, so a knows that b's q has ended, too.

The block that p made belongs to stream a, and is read by q and r. When p has ended, a knows of none
of these: the first, q, is noted as what the block waits for, and the block is tried again when the
clock of a includes it. The wait for e2 advances the clock of a, so the block is freed there, before s.
The block that q made belongs to b, which waits for nothing more: it is freed at the end, after a
wait for e2.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import Mode, kernel, mode
from autosched.lowering.hazards import Hazards, Line
from autosched.program.clocks import Clocks, Stamp, advance, numbered, wait_for
from autosched.program.program import Copy, Free, Instruction, Record, Stream, Wait, occupied

ISSUE, WAIT, FREE, _RECORD = range(4)  # kinds of issued items


class Work(NamedTuple):
    """The instructions to be ordered and the blocks to be freed. Streams are numbers.

    Instructions are runs and copies (and frees that make room). Ragged tables are pairs (CSR): row
    offsets, and the entries of all rows.
    """

    own: Any  # [instruction], its stream
    also: Any  # and its second, -1 if it has none
    after_at: Any
    after: Any  # [instruction], its predecessors
    owner: Any  # [block], the stream that frees it
    uses_at: Any
    uses: Any  # [block], the last instruction of each stream that uses it
    ending_at: Any
    ending: Any  # [instruction], blocks that it uses last
    known_ended_at: Any
    known_ended: Any  # [instruction], others that have ended when it ends


class Frees(NamedTuple):
    """The instructions issued so far, and the blocks that wait to be freed."""

    position: Any  # [instruction], its position on its stream
    clocks: Any  # [instruction, entry], its clock
    kind: Any  # [issued item], ISSUE, WAIT, FREE or a record
    item: Any  # [issued item], the instruction, block, or instruction waited for
    at: Any  # [issued item], the instruction with which it is issued
    issued: Any  # number of issued items
    # [block], the first use that does not happen before its owner's next instruction; -1 if there
    # is none, -2 before the first check
    pending: Any
    # Blocks that wait are in lists: of the streams that free them, and use them as noted.
    first: Any  # [owner, user], the first block of a list, -1 for none
    following: Any  # [block], the next one in its list
    seen: Any  # [owner, user], the owner's clock when the list was searched last
    due: Any  # scratch space to sort blocks

    @classmethod
    def of(cls, how: Mode, o: Work, streams: int, width: int) -> Frees:
        """Return the initial state."""
        count = len(o.own)
        blocks = len(o.owner)
        issued = count + len(o.after) + blocks
        return cls(
            how.counts(count), how.small(count * width),
            how.counts(issued), how.counts(issued), how.counts(issued), how.counts(1),
            how.counts(blocks, -2), how.counts(streams * width, -1), how.counts(blocks),
            how.small(streams * width), how.counts(blocks),
        )  # fmt: skip


@kernel
def emit(h: Frees, kind: int, item: int, at: int) -> None:
    """Issue one instruction, wait or free."""
    k = h.issued[0]
    h.kind[k] = kind
    h.item[k] = item
    h.at[k] = at
    h.issued[0] = k + 1


@kernel
def free_unused(o: Work, h: Frees, c: Clocks, at: int) -> None:
    """Free, if possible, the blocks that the current instruction uses last."""
    for k in range(o.ending_at[at], o.ending_at[at + 1]):
        try_free(o, h, c, o.ending[k], at)


@kernel
def try_free(o: Work, h: Frees, c: Clocks, block: int, at: int) -> None:
    """Free a block if all its uses happen before its owner's next instruction.

    Otherwise the first that does not is noted, and the block is tried again when the owner's clock
    includes it.
    """
    own = o.owner[block]
    for k in range(o.uses_at[block], o.uses_at[block + 1]):
        use = o.uses[k]
        user = o.own[use]
        if user != own and c.clocks[own * c.width + user] < h.position[use]:
            h.pending[block] = use
            waiting = own * c.width + user
            h.following[block] = h.first[waiting]
            h.first[waiting] = block
            return
    h.pending[block] = -1
    emit(h, FREE, block, at)


@kernel
def is_behind(o: Work, h: Frees, a: int, b: int) -> bool:
    """Whether a block that waits is tried after another."""
    one = h.pending[a]
    other = h.pending[b]
    return bool((o.own[one], one, a) > (o.own[other], other, b))


@kernel
def free_due(o: Work, h: Frees, c: Clocks, own: int, at: int) -> None:
    """Free blocks of a stream whose clock has advanced, ordered by stream, use and block."""
    # 1. Take the blocks whose noted uses the clock includes now out of their lists.
    count = 0
    for user in range(c.width):
        waiting = own * c.width + user
        known = c.clocks[waiting]
        if known == h.seen[waiting]:
            continue
        h.seen[waiting] = known
        before = -1
        block = h.first[waiting]
        while block >= 0:
            following = h.following[block]
            use = h.pending[block]
            if known < h.position[use]:
                before = block
            else:
                if before < 0:
                    h.first[waiting] = following
                else:
                    h.following[before] = following
                k = count
                while k > 0 and is_behind(o, h, h.due[k - 1], block):
                    h.due[k] = h.due[k - 1]
                    k -= 1
                h.due[k] = block
                count += 1
            block = following
    # 2. Try them.
    for k in range(count):
        try_free(o, h, c, h.due[k], at)


Ints = NDArray[np.int64]


def insert_events(
    instructions: Sequence[Line],
    hazards: Hazards,
    known_ended: tuple[Ints, Ints] | None = None,
    ends: bool = True,
) -> list[Instruction]:
    """Return the instructions with records, waits and frees, so that every hazard is ordered.

    Blocks of ``hazards`` are freed, in addition to the frees that make room; those that no existing
    wait allows to free are left, or freed at the end with waits if ``ends`` is set. ``known_ended``
    has for each instruction others that have ended when it ends, for reasons of its own, as a ragged
    table.
    """
    streams = chain.from_iterable(map(occupied, instructions))
    # Owners may have no other instruction.
    index, width = numbered(chain(streams, hazards.owners))
    how = mode(len(instructions) * (8 + width / 3), walk)
    o = how.of(_work(instructions, hazards, index, known_ended))
    c = Clocks.of(how, len(index), width)
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
            if stream == own or c.clocks[own * c.width + stream] >= position:
                continue
            if also >= 0 and (stream == also or c.clocks[also * c.width + stream] >= position):
                continue
            wait_for(c, own, stream, position, h.clocks, producer * c.width)
            emit(h, WAIT, producer, i)
            free_due(o, h, c, own, i)
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


class Ending:
    """Inserts the final records and waits. Events are numbered in the order of their records."""

    def __init__(
        self,
        clocks: Clocks,
        streams: Sequence[Stream],
        events: Sequence[tuple[int, int, int]],
        stamp: Callable[[int], Stamp],
    ):
        """``events`` are (stream, position, run or copy before); ``stamp`` gives stamps of uses."""
        tables = (np.asarray(table).tolist() for table in clocks[1:])
        self.clocks = Clocks(clocks.width, *tables)
        self.stamp = stamp
        self.streams = streams
        # By event, the run or copy before it, or its stamp.
        self.producers: list[int | Stamp] = [producer for *_, producer in events]
        self.records: dict[int, list[tuple[int, int]]] = {}  # by stream, (position, event)
        for event, (user, position, _) in enumerate(events):
            self.records.setdefault(user, []).append((position, event))

    def waits(self, own: int, uses: Iterable[int]) -> list[Instruction]:
        """Make a stream wait for uses (runs and copies); return the waits and new records."""
        lines: list[Instruction] = []
        for user, known in self._needed(own, uses):
            event = len(self.producers) if known is None else known
            if known is None:
                stamp = user, self.clocks.count[user], self._clock(user)
                lines.append(Record(self.streams[user], event))
                self.records.setdefault(user, []).append((stamp[1], event))
                self.producers.append(stamp)
            lines.append(Wait(self.streams[own], event))
            wait_for(self.clocks, own, *self._event_stamp(event), 0)
        return lines

    def _event_stamp(self, event: int) -> Stamp:
        producer = self.producers[event]
        return self.stamp(producer) if isinstance(producer, int) else producer

    def _event(self, user: int, position: int) -> int | None:
        """Return the first event of a stream at or after a position, if there is one."""
        records = self.records.get(user, [])
        found = bisect_left(records, (position,))
        return records[found][1] if found < len(records) else None

    def _needed(self, own: int, uses: Iterable[int]) -> list[tuple[int, int | None]]:
        """Return the streams to wait for, with their events, without those that others imply.

        An event of None has still to be recorded.
        """
        # 1. The last use on each stream that does not yet happen before the owner's next
        #    instruction.
        last: dict[int, int] = {}
        for use in uses:
            user, position, _ = self.stamp(use)
            if user != own and self._clock(own)[user] < position:
                last[user] = max(last.get(user, 0), position)
        # 2. The event to wait for on each of these streams, and the clock that a wait would bring.
        event = {user: self._event(user, position) for user, position in last.items()}
        clocks = {
            u: self._clock(u) if found is None else self._event_stamp(found)[2]
            for u, found in event.items()
        }
        # 3. Drop streams that other streams imply: a wait if another implies all that it does.
        implied = {u: {user for user in last if clocks[u][user] >= last[user]} | {u} for u in last}
        for user in sorted(last):
            if any(implied[other] >= implied[user] for other in implied if other != user):
                del implied[user]
        return [(user, event[user]) for user in sorted(implied)]

    def _clock(self, stream: int) -> list[int]:
        width = self.clocks.width
        clock: list[int] = self.clocks.clocks[stream * width : (stream + 1) * width]
        return clock
