"""Find which copies between ranks each wait of a program must wait for.

A thread waits for each copy once. Between its waits it releases what has been sent and freed: then
the program shows that the other rank has it, and the work alone would keep the memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autosched.program.program import Free, Program, Receive, Record, Send, Stream, Wait

__all__ = ["copies_awaited"]

End = TypeVar("End")


def copies_awaited(
    part: Program, ends: Mapping[int, End], threads: Mapping[Stream, str | None]
) -> dict[tuple[Stream, int], Sequence[End]]:
    """Return the copies, by the stream and the event of each wait.

    ``ends`` are the copies of one wire by their positions in a rank's part of a program, ``threads``
    the threads that issue its streams.
    """
    walk = _Walk[End](threads)
    carried: list[Wait] = []
    found: dict[tuple[Stream, int], Sequence[End]] = {}
    for at, i in enumerate(part):
        match i:
            case Send() | Receive() if at in ends:
                walk.started[i.stream].append(ends[at])
                if isinstance(i, Send):
                    walk.sent[i.value, i.stream.device].append((i.version, ends[at]))
            case Record(stream, event):
                walk.recorded[event] = stream, len(walk.started[stream])
            case Free():
                walk.free(i)
            case Wait(ago=ago) if ago:
                carried.append(i)
            case Wait(stream, event):
                freed = walk.freed_before(threads[stream])
                if copies := walk.wait(threads[stream], event):
                    # Who waits for a copy has the time to release others first.
                    found.setdefault((stream, event), walk.release(freed) + copies)
    for wait in carried:  # in the run that is waited for, all of them may be under way
        stream, count = walk.recorded[wait.event]
        if copies := walk.started[stream][:count]:
            key = wait.stream, wait.event
            found[key] = list(dict.fromkeys([*found.get(key, ()), *copies]))
    return found


@dataclass(eq=False)
class _Freed(Generic[End]):
    """Sends that have ended when a thread has waited for ``count`` copies of a stream."""

    thread: str | None
    stream: Stream
    count: int
    sends: list[End]


class _Walk(Generic[End]):
    """What has happened before a place in the program."""

    def __init__(self, threads: Mapping[Stream, str | None]):
        self.threads = threads
        self.started: dict[Stream, list[End]] = defaultdict(list)
        self.recorded: dict[int, tuple[Stream, int]] = {}  # by event: how many were started
        # By value and device: versions.
        self.sent: dict[tuple[str, str], list[tuple[int, End]]] = defaultdict(list)
        self._waited: Counter[tuple[str | None, Stream]] = Counter()  # how many, by thread
        self._freed: list[_Freed[End]] = []

    def wait(self, thread: str | None, event: int) -> list[End]:
        """Return the copies of an event that a thread has not waited for."""
        stream, count = self.recorded[event]
        before = self._waited[thread, stream]
        self._waited[thread, stream] = max(before, count)
        return self.started[stream][before:count]

    def free(self, free: Free) -> None:
        """Note the sends of freed memory. What comes before on the stream has ended then."""
        sent = self.sent[free.value, free.stream.device]
        sends = [end for version, end in sent if version <= free.version]
        if sends:
            count = len(self.started[free.stream])
            self._freed.append(_Freed(self.threads[free.stream], free.stream, count, sends))
            sent[:] = [each for each in sent if each[1] not in sends]

    def freed_before(self, thread: str | None) -> list[_Freed[End]]:
        """Return the sends of freed memory that have ended, as a thread knows by now."""
        return [
            each
            for each in self._freed
            if each.thread == thread and self._waited[thread, each.stream] >= each.count
        ]

    def release(self, freed: Sequence[_Freed[End]]) -> list[End]:
        """Return the sends of freed memory, which are released once."""
        self._freed = [each for each in self._freed if each not in freed]
        return [end for each in freed for end in each.sends]
