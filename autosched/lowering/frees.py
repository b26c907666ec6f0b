"""Insert frees: a block goes back on the stream that allocated it, once that stream is behind all who used it.

A free never costs a wait while the program has work to do: it stands at the first place where the waits that are
there anyway order it behind every use. What is left waits at the very end.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autosched.clocks import Clocks, Stamp
from autosched.lowering.hazards import Block
from autosched.program import Copy, Free, Instruction, Record, Run, Stream, Wait, occupied

__all__ = ["insert_frees"]


def insert_frees(instructions: Sequence[Instruction], blocks: Sequence[Block]) -> list[Instruction]:
    """Return the instructions with a free for each block."""
    return _Frees(instructions, blocks).result


class _Frees:
    def __init__(self, instructions: Sequence[Instruction], blocks: Sequence[Block]):
        self.blocks = blocks
        streams = dict.fromkeys(stream for i in instructions for stream in occupied(i))
        streams |= dict.fromkeys(map(_owner, blocks))  # the host's, which may have nothing else to do
        self.clocks = Clocks(streams)
        self.streams = list(streams)
        self.result: list[Instruction] = []
        self.stamps: list[Stamp] = []
        self.records: list[list[tuple[int, int]]] = [[] for _ in streams]  # of each stream, (position, event)
        # Of each owner, by user: a heap of (position there, block), to be freed when the owner has passed that.
        self.held: list[dict[int, list[tuple[int, int]]]] = [{} for _ in streams]
        self.events = 0
        # Blocks by their last use; the next to end stands last.
        self.ending = sorted([(max(block.uses.values()), i) for i, block in enumerate(blocks)], reverse=True)
        for instruction in instructions:
            self.result.append(instruction)
            self._step(instruction)
        self._finish()

    def _step(self, instruction: Instruction) -> None:
        match instruction:
            case Run() | Copy() | Free():  # a free that stands there already makes room where memory is limited
                self.stamps.append(self.clocks.advance(instruction))
                for stream in occupied(instruction)[1:]:
                    self._release(stream)
                while self.ending and self.ending[-1][0] < len(self.stamps):
                    self._try(self.ending.pop()[1])
            case Record(stream, event):
                self.clocks.record(instruction)
                own = self.clocks.index[stream]
                self.records[own].append((self.clocks.count[own], event))
                self.events += 1
            case Wait(stream):
                self.clocks.wait(instruction)
                self._release(stream)

    def _try(self, number: int) -> None:
        """Free a block, or hold it until its owner has passed the first use that it has not."""
        block = self.blocks[number]
        owner = _owner(block)
        for use in block.uses.values():
            stamp = self.stamps[use]
            if not self.clocks.passed(stamp, owner):
                user, position, _ = stamp
                heapq.heappush(self.held[self.clocks.index[owner]].setdefault(user, []), (position, number))
                return
        self.result.append(Free(owner, block.value, block.version))

    def _release(self, owner: Stream) -> None:
        """Try again the blocks of a stream whose clock has moved."""
        own = self.clocks.index[owner]
        held, behind = self.held[own], self.clocks.behind[own]
        for user in sorted([user for user, heap in held.items() if heap and heap[0][0] <= behind[user]]):
            heap = held[user]
            while heap and heap[0][0] <= behind[user]:
                self._try(heapq.heappop(heap)[1])

    def _finish(self) -> None:
        """Wait, at the end, for what the remaining blocks are still used by."""
        for owner, heaps in zip(self.streams, self.held, strict=True):
            held = [number for heap in heaps.values() for _, number in heap]
            for user, event in self._needed(owner, held):
                wait = Wait(owner, self._record(user) if event is None else event)
                self.result.append(wait)
                self.clocks.wait(wait)
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
        implied = {u: {user for user in last if clock[user] >= last[user]} | {u} for u, clock in clocks.items()}
        for user in sorted(last):  # one that implies all that this one does, not only this one: that may go in turn
            if any(implied[other] >= implied[user] for other in implied if other != user):
                del implied[user]
        return [(user, event[user]) for user in sorted(implied)]

    def _record(self, user: int) -> int:
        record = Record(self.streams[user], self.events)
        self.result.append(record)
        self._step(record)
        return record.event

    def _event(self, user: int, position: int) -> int | None:
        """Return an event of a stream at or behind a position, if there is one."""
        return next((event for at, event in self.records[user] if at >= position), None)


def _owner(block: Block) -> Stream:
    assert block.owner is not None, f"block of {block.value!r} was never read on its device"
    return block.owner
