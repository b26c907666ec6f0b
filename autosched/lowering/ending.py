"""Order and free the remaining blocks at the end of a program.

The owner of a block waits for the other streams that use it, with as few waits as suffice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from autosched.program.clocks import Clocks, Stamp, includes, wait_for
from autosched.program.program import Instruction, Record, Stream, Wait

__all__ = ["Ending"]


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
        tables = (np.asarray(table).tolist() for table in clocks[2:])
        self.clocks = Clocks(clocks.width, clocks.tracked, *tables)
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
            if user != own and not self._includes(self._clock(own), user, position):
                last[user] = max(last.get(user, 0), position)
        # 2. The event to wait for on each of these streams, and the clock that a wait would bring.
        event = {user: self._event(user, position) for user, position in last.items()}
        clocks = {
            u: self._clock(u) if found is None else self._event_stamp(found)[2]
            for u, found in event.items()
        }
        # 3. Drop streams that single-copy streams imply, then streams that other streams imply.
        single, top = self._latest(last, clocks)
        rest = [user for user in last if user < len(top) and top[user] < last[user]]
        implied = {u: {user for user in rest if clocks[u][user] >= last[user]} | {u} for u in rest}
        for user in sorted(rest):  # drop a wait if another implies all that it does
            if any(implied[other] >= implied[user] for other in implied if other != user):
                del implied[user]
        # 4. Drop single-copy streams that the remaining streams imply.
        for user in single.copy():
            if any(self._includes(clocks[u], user, last[user]) for u in implied):
                single.remove(user)
        return [(user, event[user]) for user in sorted([*implied, *single])]

    def _latest(
        self, last: Mapping[int, int], clocks: Mapping[int, Sequence[int]]
    ) -> tuple[list[int], list[int]]:
        """Return the single-copy streams, among the last uses, that no other of them implies.

        Also return the elementwise maximum of the clocks of these streams.
        """
        single: list[int] = []
        top = [0] * self.clocks.width
        for user in sorted(last, reverse=True):  # later ones imply more
            if user >= len(top) and not self._includes(top, user, last[user]):
                single.append(user)
                top = list(map(max, top, clocks[user]))
        return single, top

    def _clock(self, stream: int) -> list[int]:
        width = self.clocks.width
        clock: list[int] = self.clocks.clocks[stream * width : (stream + 1) * width]
        return clock

    def _includes(self, clock: Sequence[int], other: int, position: int) -> bool:
        return includes(self.clocks, clock, 0, other, position)
