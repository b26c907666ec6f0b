"""Free memory: a block goes back on the stream that allocated it, once that stream is behind all who used it.

A free never costs a wait while the program has work to do: it stands at the first place where the waits that are
there anyway order it behind every use. What is left waits at the very end.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from autosched.clocks import Clocks, Stamp, joined
from autosched.lowering.hazards import Block
from autosched.program import Copy, Free, Instruction, Record, Run, Stream, Wait

__all__ = ["Frees", "owner_of"]


_Line = list[int | Free | Run | Copy]


class Frees:
    """The blocks that are still there while a program is walked in issue order, by whoever moves the clocks.

    ``stamps`` are those of the runs and copies so far. A free goes into the ``line`` that is given.
    """

    def __init__(self, clocks: Clocks, blocks: Sequence[Block]):
        self.clocks = clocks
        self.blocks = blocks
        self.stamps: list[Stamp] = []
        self.owner = [clocks.index[owner_of(block)] for block in blocks]
        self.uses = [[*block.uses.values()] for block in blocks]
        self.stuck: dict[int, int] = {}  # by block, the first use that its owner has not passed
        # Of each owner, by stream: a heap of (position there, use, block), to be tried when the owner has passed that.
        self.held: list[dict[int, list[tuple[int, int, int]]]] = [{} for _ in range(clocks.places)]
        self.watched: dict[int, list[int]] = {}  # blocks used by streams alone
        self.ending: dict[int, list[int]] = {}  # blocks by their last use
        for number, uses in enumerate(self.uses):
            self.ending.setdefault(max(uses), []).append(number)

    def ended(self, position: int, line: _Line) -> None:
        """Free, as far as may be, what is used last by the run or copy at a position."""
        for number in self.ending.get(position, ()):
            self._try(number, line)

    def waited(self, own: int, user: int, line: _Line) -> None:
        """Free what a stream owns that has waited for another; who waits for a copy alone is known from now on."""
        if user >= self.clocks.places:
            self._watch(user)
        self.release(own, line)

    def _watch(self, user: int) -> None:
        for number in self.watched.get(user, ()):
            if number in self.stuck and self.stamps[self.stuck[number]][0] == user and user in self.clocks.waiters:
                self._hold(number, *self.clocks.waiters[user][-1])

    def _hold(self, number: int, user: int, position: int) -> None:
        """Let a block be tried again as soon as its owner has passed a position of a stream."""
        held = self.held[self.owner[number]].setdefault(user, [])
        heapq.heappush(held, (position, self.stuck[number], number))

    def _try(self, number: int, line: _Line) -> None:
        """Free a block, or hold it until its owner has passed the first use that it has not."""
        clocks, stamps, owner = self.clocks, self.stamps, self.owner[number]
        behind, places = clocks.behind[owner], clocks.places
        for use in self.uses[number]:
            user, position, _ = stamps[use]
            if user == owner or (behind[user] >= position if user < places else clocks.reaches(behind, user, position)):
                continue
            self.stuck[number] = use
            if user < places:
                self._hold(number, user, position)
                return
            self.watched.setdefault(user, []).append(number)
            for waiter in clocks.waiters.get(user, ()):
                self._hold(number, *waiter)
            return
        self.stuck.pop(number, None)
        block = self.blocks[number]
        line.append(Free(owner_of(block), block.value, block.version))

    def release(self, own: int, line: _Line) -> None:
        """Free what a stream owns, as far as may be now that its clock has moved."""
        held = self.held[own] if own < self.clocks.places else None
        if not held:
            return
        behind, due = self.clocks.behind[own], []
        for user, heap in held.items():
            while heap and heap[0][0] <= behind[user]:
                due.append(heapq.heappop(heap))
        if len(due) > 1:  # by stream; two uses of one stream are in the order of their positions
            due.sort(key=lambda item: (self.stamps[item[1]][0], item[1], item[2]))
        for _, use, number in due:
            if self.stuck.get(number) == use:
                self._try(number, line)

    def finish(self, program: list[Instruction], events: Mapping[int, int]) -> None:
        """Wait, at the end, for what the remaining blocks are still used by; ``events`` has those of positions."""
        ending = _Ending(self, program, events)
        held: dict[int, list[int]] = {}
        for number in self.stuck:
            held.setdefault(self.owner[number], []).append(number)
        for own in sorted(held):
            line: _Line = []
            for user, event in ending.needed(own, held[own]):
                ending.wait(own, user, event)
                self._watch(user)
            self.release(own, line)
            program += line  # type: ignore[arg-type]  # which holds frees alone


class _Ending:
    """The end of a program, where streams wait for each other as memory needs it."""

    def __init__(self, frees: Frees, program: list[Instruction], events: Mapping[int, int]):
        self.frees, self.clocks, self.program = frees, frees.clocks, program
        self.streams = list(self.clocks.index)
        self.records: dict[int, list[tuple[int, int, Stamp]]] = {}  # of each stream, (position, event, moment)
        for at, event in events.items():
            stamp = frees.stamps[at]
            self.records.setdefault(stamp[0], []).append((stamp[1], event, stamp))
        self.events = len(events)

    def wait(self, own: int, user: int, found: tuple[int, Stamp] | None) -> None:
        """Let a stream wait for an event of another; for one that is recorded now, if there is none."""
        event, stamp = found or self._record(user)
        self.program.append(Wait(self.streams[own], event))
        self.clocks.catch_up(own, stamp)

    def _record(self, user: int) -> tuple[int, Stamp]:
        event, stamp = self.events, self.clocks.now(user)
        self.program.append(Record(self.streams[user], event))
        self.records.setdefault(user, []).append((stamp[1], event, stamp))
        self.events += 1
        return event, stamp

    def _event(self, user: int, position: int) -> tuple[int, Stamp] | None:
        """Return the first event of a stream at or behind a position, if there is one."""
        records = self.records.get(user, [])
        found = bisect_left(records, (position,))
        return records[found][1:] if found < len(records) else None

    def needed(self, own: int, held: Sequence[int]) -> list[tuple[int, tuple[int, Stamp] | None]]:
        """Return the streams to wait for, each with its event (None: to be recorded), none implied by the others."""
        last: dict[int, int] = {}
        for number in held:
            for use in self.frees.uses[number]:
                user, position, _ = stamp = self.frees.stamps[use]
                if not self.clocks.passed(stamp, own):
                    last[user] = max(last.get(user, 0), position)
        event = {user: self._event(user, position) for user, position in last.items()}
        clocks = {user: self.clocks.behind[user] if found is None else found[1][2] for user, found in event.items()}
        lone, top = self._latest(last, clocks)
        rest = [user for user in last if user < len(top) and top[user] < last[user]]
        implied = {u: {user for user in rest if clocks[u][user] >= last[user]} | {u} for u in rest}
        for user in sorted(rest):  # one that implies all that this one does, not only this one: that may go in turn
            if any(implied[other] >= implied[user] for other in implied if other != user):
                del implied[user]
        lone = [user for user in lone if not any(self.clocks.reaches(clocks[u], user, last[user]) for u in implied)]
        return [(user, event[user]) for user in sorted([*implied, *lone])]

    def _latest(self, last: Mapping[int, int], clocks: Mapping[int, tuple[int, ...]]) -> tuple[list[int], list[int]]:
        """Return the copies alone, among those used last, that no others of them imply; and what these imply."""
        lone: list[int] = []
        top = [0] * self.clocks.places
        for user in sorted([user for user in last if user >= len(top)], reverse=True):  # what is later implies more
            if not self.clocks.reaches(top, user, last[user]):
                lone.append(user)
                top = joined(top, clocks[user])
        return lone, top


def owner_of(block: Block) -> Stream:
    """Return the stream that frees a block."""
    assert block.owner is not None, f"block of {block.value!r} was never read on its device"
    return block.owner
