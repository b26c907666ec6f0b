"""Compute which of a few marked instructions happen before others, over several runs.

A bit set for each stream contains the marked instructions that happen before the next one of that
stream. It answers for the marked ones alone what vector clocks answer for all, and needs no entry
per stream, so the number of streams does not matter. This module knows no graph and no machine.
"""

from __future__ import annotations

from autosched.program.program import (
    Copy,
    Instruction,
    Receive,
    Record,
    Run,
    Send,
    Stream,
    Wait,
    occupied,
)

__all__ = ["BitClocks"]


class BitClocks:
    """The bit sets of streams and events while the runs of a loop are walked in issue order.

    A stream executes run after run. Waits for events of the run before last, or of earlier ones,
    are ignored: what they order needs no answer within two runs. A receive is issued directly after
    its send, and follows it.

    >>> a, b = Stream("cpu", "a"), Stream("cpu", "b")
    >>> loop = [Wait(b, 0, 1), Run(b, "read"), Run(a, "write"), Record(a, 0)]
    >>> clocks = BitClocks()
    >>> [clocks.issue(line, mark=line == Run(a, "write")) for line in loop]
    [0, 0, 1, 1]
    >>> clocks.begin_run()
    >>> [clocks.issue(line) for line in loop]
    [1, 1, 1, 1]
    """

    def __init__(self) -> None:
        self._streams: dict[Stream, int] = {}
        self._events: dict[int, int] = {}
        self._events_before: dict[int, int] = {}
        self._sent = 0  # of the last send

    def begin_run(self) -> None:
        """Begin the next run: its events are new, and those of this run are of 1 run ago."""
        self._events_before = self._events
        self._events = {}

    def before(self, instruction: Instruction) -> int:
        """Return the marks that happen before an instruction, which is to be issued next."""
        found = self._sent if isinstance(instruction, Receive) else 0
        for stream in occupied(instruction):
            found |= self._streams.get(stream, 0)
        return found

    def follow(self, stream: Stream, marks: int) -> None:
        """Order the next instructions of a stream after these marks."""
        self._streams[stream] = self._streams.get(stream, 0) | marks

    def issue(self, instruction: Instruction, mark: int = 0) -> int:
        """Issue an instruction with this mark; return the marks that happen before what follows."""
        if isinstance(instruction, (Run, Copy, Send, Receive)):
            marks = self.before(instruction) | mark
            self._streams.update((stream, marks) for stream in occupied(instruction))
            self._sent = marks if isinstance(instruction, Send) else 0
        elif isinstance(instruction, Record):
            self._events[instruction.event] = self.before(instruction)
        elif isinstance(instruction, Wait) and instruction.ago < 2:
            events = self._events_before if instruction.ago else self._events
            self.follow(instruction.stream, events.get(instruction.event, 0))
        return self.before(instruction)
