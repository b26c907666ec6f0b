"""Check what concerns several ranks: the laws of their program, and that their parts fit together.

A program that spans several ranks must satisfy, in addition to what ``verify`` requires:

    rank        an event is recorded and waited for on one rank, and tasks that share state run on
                one; where a machine is given, its devices are of the ranks that the program says
    exchange    a copy between ranks is on a stream of its source and on one of its destination

For such a copy, the receive follows the send, and the send follows nothing of the receiver. No rank
waits for another that waits for it, because each issues its part in the order of one list.

So parts that were cut from one program, by ``Program.part``, need no proof of their own. Parts that
were changed or loaded one by one are joined by executing them: a send and its receive take effect
when both are next on their ranks. The laws of parts:

    rank        a part has the streams of one rank
    exchange    between two devices, sends and receives are of the same versions in the same order
    alive       each rank gets to its end, even if it does one thing at a time, in order, and
                nothing is buffered

The last is sufficient for every transport. It is also necessary for one that executes the
operations of a rank in order of issue, one by one. The order in which parts are executed does not
matter: what can take effect remains possible whatever else does. What the joined program must
satisfy besides, ``verify`` proves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NoReturn

from autosched.errors import ProgramError
from autosched.graph.graph import Task
from autosched.program.parts import crosses, numbered, whole_of
from autosched.program.program import (
    Copy,
    Instruction,
    Program,
    Receive,
    Record,
    Run,
    Send,
    Stream,
    Wait,
    excerpt,
)

__all__ = ["RankLaws", "joined"]


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


# ---- parts


def joined(parts: Sequence[Program]) -> Program:
    r"""Return the program of which these are the parts, in an order in which they can execute.

    Raises ProgramError if they break a law above.

    >>> text = "rank {0} has cpu:{0}\ncpu:{0}/out send x -> cpu:{1}\ncpu:{0}/in receive y <- cpu:{1}"
    >>> one, other = (text.format(0, 1), text.format(1, 0).replace("x", "?"))
    >>> other = other.replace("y", "x").replace("?", "y")
    >>> joined([Program.parse(one), Program.parse(other)])
    Traceback (most recent call last):
    autosched.errors.ProgramError: ranks wait for each other for ever: rank 0 to send x -> cpu:1, ...
    """
    queues = _Queues(parts)
    queues.run()
    whole = parts[0] if parts else Program(())
    return replace(
        whole,
        instructions=tuple(numbered(queues.done)),
        inputs=tuple(chain.from_iterable(part.inputs for part in parts)),
        outputs=tuple(chain.from_iterable(part.outputs for part in parts)),
        ranks=tuple(chain.from_iterable(part.ranks for part in parts)),
    )


_Key = tuple[str, str, int]
"""A copy between ranks: its two devices, and its number among the copies between them."""


class _Queue:
    """The instructions of a rank, and the position of the next."""

    def __init__(self, rank: int, part: Program) -> None:
        self.rank = rank
        self.part = part
        self.at = 0

    @property
    def head(self) -> Instruction | None:
        items = self.part.instructions
        return items[self.at] if self.at < len(items) else None


class _Queues:
    """All queues while the parts are executed."""

    def __init__(self, parts: Sequence[Program]):
        self.queues: dict[int, _Queue] = {}
        self.done: list[tuple[int, Instruction]] = []
        self.recorded: set[tuple[int, int]] = set()
        self.half: dict[_Key, _Queue] = {}  # by send or receive that is next, its queue
        for part in parts:
            rank = self._rank(part)
            self.queues[rank] = _Queue(rank, part)
        self.keys = _exchanged({rank: queue.part for rank, queue in self.queues.items()})

    def _rank(self, part: Program) -> int:
        """Return the rank of a part. Raises ProgramError if it is not of one rank, or a second."""
        ranks = {rank for _, rank in part.ranks}
        if len(ranks) != 1 or ranks & self.queues.keys():
            what = f"a part is of one rank, each of another, and one is of {sorted(ranks)}"
            raise ProgramError(f"{what} (law: rank)")
        own = {device for device, _ in part.ranks}
        for at, item in enumerate(part.instructions):
            if item.stream.device not in own:
                what = f"{item.stream} is not on this rank"
                raise ProgramError(excerpt(part, at, "rank", what, None))
        return ranks.pop()

    def run(self) -> None:
        """Execute everything. Raises ProgramError if that is not possible."""
        ready = list(self.queues.values())[::-1]
        while ready:
            ready += self._continue(ready.pop())
        stuck = [queue for queue in self.queues.values() if queue.head is not None]
        if stuck:
            waits = ", ".join(f"rank {queue.rank} to {queue.head}" for queue in stuck[:4])
            what = f"ranks wait for each other for ever: {waits}"
            raise ProgramError(excerpt(stuck[0].part, stuck[0].at, "alive", what, None))

    def _continue(self, queue: _Queue) -> list[_Queue]:
        """Execute a queue as far as possible; return the queues that may continue."""
        rank = queue.rank
        while (head := queue.head) is not None:
            if isinstance(head, Send | Receive):
                return self._meet(queue)
            # A wait for an event that comes later is for ever.
            if isinstance(head, Wait) and not head.ago and (rank, head.event) not in self.recorded:
                return []
            if isinstance(head, Record):
                self.recorded.add((rank, head.event))
            self.done.append((rank, head))
            queue.at += 1
        return []

    def _meet(self, queue: _Queue) -> list[_Queue]:
        """Execute a send with its receive if both are next; else let this one wait."""
        key = self.keys[queue.rank, queue.at]
        other = self.half.pop(key, None)
        if other is None:
            self.half[key] = queue
            return []
        sender, receiver = (queue, other) if isinstance(queue.head, Send) else (other, queue)
        sent, received = sender.head, receiver.head
        assert isinstance(sent, Send)
        assert isinstance(received, Receive)
        self.done.append((sender.rank, whole_of(sent, received)))
        sender.at += 1
        receiver.at += 1
        return [sender, receiver]


def _exchanged(parts: Mapping[int, Program]) -> dict[tuple[int, int], _Key]:
    """Number the sends and receives between two devices; return the key of each by (rank, position).

    A send has the key of its receive. Raises ProgramError if they do not agree.
    """
    sends: dict[_Key, tuple[int, int]] = {}
    receives: dict[_Key, tuple[int, int]] = {}
    for rank, part in parts.items():
        count: Counter[tuple[str, str]] = Counter()
        for at, item in enumerate(part.instructions):
            if isinstance(item, Send | Receive):
                here = item.stream.device
                ends = (here, item.destination) if isinstance(item, Send) else (item.source, here)
                found = sends if isinstance(item, Send) else receives
                found[*ends, count[ends]] = rank, at
                count[ends] += 1
    for key in (*sends, *receives):
        places = [found.get(key) for found in (sends, receives)]
        halves = [place and parts[place[0]].instructions[place[1]] for place in places]
        values = [half and (half.value, half.version) for half in halves]  # type: ignore[union-attr]
        if values[0] != values[1]:
            rank, at = next(place for place in reversed(places) if place is not None)
            others = f"{halves[0]}" if None not in halves else "nothing"
            what = f"the other end of this exchange is {others}"
            raise ProgramError(excerpt(parts[rank], at, "exchange", what, None))
    return {place: key for found in (sends, receives) for key, place in found.items()}
