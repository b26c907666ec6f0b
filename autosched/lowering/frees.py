"""Insert frees: a block goes back on the stream that allocated it, once that stream is behind all who used it.

A free never costs a wait while the program has work to do: it stands at the first place where the waits that are
there anyway order it behind every use. What is left waits at the very end.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import count

from autosched.clocks import Clocks, Stamp, joined
from autosched.lowering.hazards import Block
from autosched.program import Copy, Free, Instruction, Record, Run, Stream, Wait, occupied

__all__ = ["insert_frees"]


def insert_frees(
    instructions: Sequence[Instruction], blocks: Sequence[Block], alone: Collection[Stream] = ()
) -> list[Instruction]:
    """Return the instructions with a free for each block. ``alone`` are streams that need no place in clocks."""
    return _Frees(instructions, blocks, alone).result


_Use = tuple[int, int]  # a stream, by its rank in order of first use, and a position there


class _Frees:
    def __init__(self, instructions: Sequence[Instruction], blocks: Sequence[Block], alone: Collection[Stream]):
        self.blocks = blocks
        self.streams = list(dict.fromkeys(stream for i in instructions for stream in occupied(i)))
        self.clocks = Clocks(self.streams, alone)
        self.rank = dict(zip(map(self.clocks.index.__getitem__, self.streams), count()))
        self.result: list[Instruction] = []
        self.stamps: list[Stamp] = []
        self.records: dict[int, list[tuple[int, int]]] = {}  # of each stream, (position, event)
        self.stuck: dict[int, _Use] = {}  # by block, the first use that its owner has not passed
        # Of each owner, by stream: a heap of (position there, use, block), to be tried when the owner has passed that.
        self.held: dict[int, dict[int, list[tuple[int, _Use, int]]]] = {}
        self.watched: dict[int, list[int]] = {}  # blocks used by streams alone, as far as nobody waits for these
        self.events = 0
        # Blocks by their last use; the next to end stands last.
        self.ending = sorted([(max(block.uses.values()), i) for i, block in enumerate(blocks)], reverse=True)
        for instruction in instructions:
            self.result.append(instruction)
            self._step(instruction)
        self._finish()

    def _step(self, instruction: Instruction) -> None:
        match instruction:
            case Run() | Copy():
                self.stamps.append(self.clocks.advance(instruction))
                for stream in occupied(instruction)[1:]:
                    self._release(stream)
                while self.ending and self.ending[-1][0] < len(self.stamps):
                    self._try(self.ending.pop()[1])
            case Record(stream, event):
                self.clocks.record(instruction)
                own = self.clocks.index[stream]
                self.records.setdefault(own, []).append((self.clocks.count[own], event))
                self.events += 1
            case Wait(stream):
                self._wait(instruction)
                self._release(stream)

    def _wait(self, wait: Wait) -> None:
        """Let a stream wait; of a copy alone, who waits for it is known from now on."""
        self.clocks.wait(wait)
        user = self.clocks.events[wait.event][0]
        waiters = self.clocks.waiters.get(user, ())
        for number in self.watched.get(user, ()) if waiters else ():
            if number in self.stuck and self.stuck[number][0] == self.rank[user]:
                self._hold(number, *waiters[-1])

    def _hold(self, number: int, user: int, position: int) -> None:
        """Let a block be tried again as soon as its owner has passed a position of a stream."""
        held = self.held.setdefault(self.clocks.index[_owner(self.blocks[number])], {})
        heapq.heappush(held.setdefault(user, []), (position, self.stuck[number], number))

    def _try(self, number: int) -> None:
        """Free a block, or hold it until its owner has passed the first use that it has not."""
        block = self.blocks[number]
        owner = _owner(block)
        for use in block.uses.values():
            stamp = self.stamps[use]
            if not self.clocks.passed(stamp, owner):
                user, position, _ = stamp
                self.stuck[number] = self.rank[user], position
                if user < self.clocks.places:
                    self._hold(number, user, position)
                    return
                self.watched.setdefault(user, []).append(number)
                for waiter in self.clocks.waiters.get(user, ()):
                    self._hold(number, *waiter)
                return
        self.stuck.pop(number, None)
        self.result.append(Free(owner, block.value, block.version))

    def _release(self, owner: Stream) -> None:
        """Try again the blocks of a stream whose clock has moved."""
        own = self.clocks.index[owner]
        behind, due = self.clocks.behind[own], []
        for user, heap in self.held.get(own, {}).items():
            while heap and heap[0][0] <= behind[user]:
                due.append(heapq.heappop(heap)[1:])
        for use, number in sorted(due):
            if self.stuck.get(number) == use:
                self._try(number)

    def _finish(self) -> None:
        """Wait, at the end, for what the remaining blocks are still used by."""
        held: dict[Stream, list[int]] = {}
        for number in self.stuck:
            held.setdefault(_owner(self.blocks[number]), []).append(number)
        for owner in self.streams:
            for user, event in self._needed(owner, held.get(owner, ())):
                wait = Wait(owner, self._record(user) if event is None else event)
                self.result.append(wait)
                self._wait(wait)
            self._release(owner)

    def _needed(self, owner: Stream, held: Sequence[int]) -> list[tuple[int, int | None]]:
        """Return the streams to wait for, each with its event (None: to be recorded), none implied by the others."""
        last: dict[int, int] = {}
        for number in held:
            for use in self.blocks[number].uses.values():
                user, position, _ = self.stamps[use]
                if not self.clocks.passed(self.stamps[use], owner):
                    last[user] = max(last.get(user, 0), position)
        event = {user: self._event(user, position) for user, position in last.items()}
        clocks = {u: self.clocks.behind[u] if e is None else self.clocks.events[e][2] for u, e in event.items()}
        lone, top = self._latest(last, clocks)
        rest = [user for user in last if user < self.clocks.places and top[user] < last[user]]
        implied = {u: {user for user in rest if clocks[u][user] >= last[user]} | {u} for u in rest}
        for user in sorted(rest):  # one that implies all that this one does, not only this one: that may go in turn
            if any(implied[other] >= implied[user] for other in implied if other != user):
                del implied[user]
        lone = [user for user in lone if not any(self.clocks.reaches(clocks[u], user, last[user]) for u in implied)]
        return [(user, event[user]) for user in sorted([*implied, *lone], key=self.rank.__getitem__)]

    def _latest(self, last: Mapping[int, int], clocks: Mapping[int, tuple[int, ...]]) -> tuple[list[int], list[int]]:
        """Return the copies alone, among those used last, that no others of them imply; and what these imply."""
        lone: list[int] = []
        top = [0] * self.clocks.places
        for user in sorted([user for user in last if user >= len(top)], reverse=True):  # what is later implies more
            if not self.clocks.reaches(top, user, last[user]):
                lone.append(user)
                top = joined(top, clocks[user])
        return lone, top

    def _record(self, user: int) -> int:
        record = Record(self.streams[self.rank[user]], self.events)
        self.result.append(record)
        self._step(record)
        return record.event

    def _event(self, user: int, position: int) -> int | None:
        """Return an event of a stream at or behind a position, if there is one."""
        records = self.records.get(user, [])
        found = bisect_left(records, (position,))
        return records[found][1] if found < len(records) else None


def _owner(block: Block) -> Stream:
    assert block.owner is not None, f"block of {block.value!r} was never read on its device"
    return block.owner
