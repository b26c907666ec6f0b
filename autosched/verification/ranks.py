"""Check the laws of programs that span several ranks, in addition to those of ``verify``.

    rank        an event is recorded and waited for on one rank, and tasks that share state run on
                one; where a machine is given, its devices are of the ranks that the program says
    exchange    a copy between ranks is on a stream of its source and on one of its destination

For such a copy, the receive follows the send, and the send follows nothing of the receiver. No rank
waits for another that waits for it, because each issues its part in the order of one list. For
parts that were changed one by one, ``parts`` proves that there is such a list (law: alive).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from autosched.graph.graph import Task
from autosched.program.parts import crosses
from autosched.program.program import Copy, Program, Record, Run, Stream, Wait

__all__ = ["RankLaws"]


class RankLaws:
    """The ranks of devices while a program is walked; ``fail`` raises an error for a law."""

    def __init__(self, program: Program, fail: Callable[[str, str], NoReturn]):
        self.program = program
        self.fail = fail
        self.rank = dict(program.ranks)
        self.recorder: dict[int, Stream] = {}  # by event
        self.sharing: dict[int, Run] = {}  # by state that tasks share, the first that has it

    def check_devices(self) -> None:
        """Check that each device has one rank."""
        if not self.rank:
            return
        used = [stream.device for stream in self.program.streams]
        placed = [device for _, device in (*self.program.inputs, *self.program.outputs)]
        ends = [end for i in self.program if type(i) is Copy for end in (i.source, i.destination)]
        for device in (*used, *placed, *ends):
            if device not in self.rank:
                self.fail("rank", f"device {device} is of no rank")
        if len(self.rank) < len(self.program.ranks):
            self.fail("rank", "a device is of two ranks")

    def _apart(self, one: Stream, other: Stream) -> bool:
        return self.rank.get(one.device) != self.rank.get(other.device)

    def record(self, record: Record) -> None:
        """Note where an event is recorded."""
        self.recorder[record.event] = record.stream

    def wait(self, wait: Wait) -> None:
        """Check that an event is of the rank that waits for it."""
        recorder = self.recorder[wait.event]
        if self._apart(recorder, wait.stream):
            self.fail("rank", f"event e{wait.event} is recorded on {recorder}, on another rank")

    def share(self, task: Task, run: Run) -> None:
        """Check that tasks that share state are on one rank."""
        for item in task.shared if self.rank else ():
            first = self.sharing.setdefault(id(item), run)
            if self._apart(first.stream, run.stream):
                what = f"{first.task!r} on {first.stream.device}, on another rank"
                self.fail("rank", f"task {task.name!r} shares state with {what}")

    def crosses(self, copy: Copy) -> bool:
        """Whether a copy is between ranks; check that it is on streams of these."""
        if not crosses(copy, self.rank):
            if copy.also is not None and self._apart(copy.stream, copy.also):
                self.fail("exchange", f"a copy within a rank occupies {copy.also}, of another")
            return False
        ends = copy.stream.device, copy.also and copy.also.device
        if ends != (copy.source, copy.destination):
            what = "a copy between ranks is on a stream of its source and of its destination"
            self.fail("exchange", what)
        return True
