"""Small exchanges of all ranks: a few numbers of each, and values of rank 0.

Numbers travel over the wire, in log2 of the number of ranks hops. A rank that waits for them asks
its memory again and again, so that Control-C ends it, and so does news of a failure: gloo would
hold both back. Each exchange makes the rank ready to receive the next one, because gloo moves
nothing before, and would ask for it by a message of its own.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from autosched.errors import RankError
from autosched.machine.cluster import joined
from autosched.runtime.ranks.messages import ReceiveBuffer, header_of, rows
from autosched.runtime.ranks.session import Session, session
from autosched.runtime.ranks.wire import Wire

__all__ = ["Gathering"]

T = TypeVar("T")
_TAG = 2**31 - 2  # which no copy of a program has
_NUMBERS_TAG = 2**31 - 3
_WIDTH = 4  # numbers of each rank at most
_SPINS = 200  # looks at memory before a rank begins to sleep
_SHORTEST = 2e-5  # seconds between two looks; doubled up to the longest
_LONGEST = 1e-3
_PATIENCE = 1800.0  # seconds for a rank that does something else, as long as torch's groups wait


class Gathering:
    """Exchanges that all ranks make, in one order.

    Each raises RankError where a rank is missing, and the cause where another one fails meanwhile.
    """

    def __init__(self) -> None:
        self._meeting = joined().meeting
        self._session: Session | None = None

    def agree(self, name: str, mine: str, decide: Callable[[Sequence[str]], str]) -> str:
        """Return what rank 0 makes of the texts of all ranks; takes milliseconds."""
        try:
            return self._meeting.agree(name, mine, decide)
        except RankError as error:  # perhaps here alone, and others wait for the wire
            self.give_up(error)
            raise

    def together(self, what: str, do: Callable[[], T]) -> T:
        """Return what a function returns; raise on all ranks what it raises on one of them.

        The function may contain agreements. A rank that fails before one of them lets it fail.
        """
        try:
            result = do()
        except BaseException as error:
            if error is not self._meeting.raised:
                self._meeting.fail(f"{type(error).__name__}: {error}")
                self._meeting.raised = error
            raise
        self.agree(what, "", lambda _: "")
        return result

    def give_up(self, error: BaseException, is_next: bool = False) -> None:
        """Tell the other ranks of an error here, unless they know, and wake those that wait.

        ``is_next``: it occurred before the next exchange, which fails on all ranks, also on one that
        has not finished what came before.
        """
        members = self._session
        if members is None or members.is_lost:
            return
        members.exchanged += is_next
        who = members.named(members.rank)
        if isinstance(error, KeyboardInterrupt):
            why = f"{who} was interrupted"
        elif isinstance(error, RankError):
            why = str(error)
        else:
            why = f"{who}: {type(error).__name__}: {error}"
        members.give_up("rank", why)

    def gather(self, numbers: Sequence[int], what: str) -> list[list[int]]:
        """Return the numbers of all ranks, at most 4 of each; ``what`` says for what."""
        members = self._members()
        if members.is_given_up:
            members.exchanged += 1
            raise members.cause(what)
        wire = members.wire()
        try:
            members.exchanged += 1
            return _channel(wire).gather(numbers, members.exchanged, members, what)
        except (KeyboardInterrupt, RankError) as error:
            self.give_up(error)
            raise
        except RuntimeError as error:  # of torch: the wire is lost
            raise members.cause(what) from error

    def _members(self) -> Session:
        if self._session is None:
            # All are here before they connect: gloo would wait for those that do not come.
            self._meeting.agree("a training step", "", lambda _: "")
            self._session = session()
        return self._session

    def broadcast(self, value: Any, what: str, root: int = 0) -> Any:
        """Return the value of one rank, a tree of tensors and plain data, on each rank."""
        members = self._members()
        size = members.size
        rank = (members.rank - root) % size  # counted from the root
        text = json.dumps(header_of(value)) if rank == 0 else ""
        header = json.loads(self.agree(what, text, lambda texts: texts[root]))
        wire = members.wire()
        buffer = None if rank == 0 else ReceiveBuffer(header)
        own = rows(value) if buffer is None else buffer.rows
        try:
            # Each rank receives from that without its lowest bit, and sends to those above it.
            lowest = rank & -rank or 1 << (size - 1).bit_length()
            for row in own if rank else ():
                wire.receive(row, (rank - lowest + root) % size, _TAG).wait()
            targets = [rank + (1 << k) for k in reversed(range(lowest.bit_length() - 1))]
            peers = [(target + root) % size for target in targets if target < size]
            works = [wire.send(row, peer, _TAG) for peer in peers for row in own]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise members.cause(what) from error
        except BaseException as error:
            self.give_up(error)
            raise
        if buffer is None:
            return value
        buffer.spread()
        return buffer.value


class _Channel:
    """The exchanges of numbers over one wire; all that a process makes are one sequence.

    What a rank knows doubles with each hop. Bruck et al., "Efficient algorithms for all-to-all
    communications in multiport message-passing systems", 1997.
    """

    def __init__(self, wire: Wire):
        self._rank, self._size = wire.rank, wire.size
        self._hops = [_Hop(wire, 1 << k) for k in range((wire.size - 1).bit_length())]

    def gather(
        self, numbers: Sequence[int], count: int, members: Session, what: str
    ) -> list[list[int]]:
        """Return the numbers of all ranks; ``count`` is one more than the last time."""
        width = len(numbers)
        known = [*numbers, *[0] * (_WIDTH - width)]
        for hop in self._hops:
            hop.tell(count, known)
            self._await(hop.seen, count, members, hop.source, what)
            known += hop.told()
        for hop in self._hops:
            hop.expect()
        parts = [known[i : i + width] for i in range(0, self._size * _WIDTH, _WIDTH)]
        return [parts[(rank - self._rank) % self._size] for rank in range(self._size)]

    def _await(self, row: Any, count: int, members: Session, rank: int, what: str) -> None:
        """Wait until a message of a rank is complete. Raises the cause of a failure."""
        deadline = time.monotonic() + _PATIENCE
        for pause in _pauses():
            if row[0] == row[-1] == count:
                return
            if members.is_lost:
                raise RuntimeError("the wire is lost")
            if pause:
                members.check()
                if time.monotonic() > deadline:
                    late = f"{members.named(rank)} did not tell {what} within {_PATIENCE:g} s"
                    raise RankError(f"{late}; all ranks must make the same calls, in one order")
            time.sleep(pause)


class _Hop:
    """A message to one rank, and one from another, in memory that each exchange uses again.

    The count of the exchange comes first and last in a message: when both are there, all is.
    """

    def __init__(self, wire: Wire, distance: int):
        length = min(distance, wire.size - distance) * _WIDTH + 2
        self.source = (wire.rank + distance) % wire.size
        arriving, leaving = (torch.zeros(length, dtype=torch.int64) for _ in range(2))
        self.seen, self._own = (memoryview(row.numpy().data) for row in (arriving, leaving))
        self._rows = arriving.view(torch.uint8), leaving.view(torch.uint8)
        self._receive = wire.receiver(self.source, _NUMBERS_TAG)
        self._send = wire.sender((wire.rank - distance) % wire.size, _NUMBERS_TAG)
        self._sending: Any = None
        self.expect()

    def expect(self) -> None:
        """Be ready to receive the next message."""
        self._receiving = self._receive(self._rows[0])

    def tell(self, count: int, numbers: Sequence[int]) -> None:
        """Start to send numbers, as many as a message has."""
        if self._sending is not None:
            self._sending.wait()
        own = self._own
        for at in range(1, len(own) - 1):
            own[at] = numbers[at - 1]
        own[0] = own[-1] = count
        self._sending = self._send(self._rows[1])

    def told(self) -> list[int]:
        """Return the numbers of a message that is there."""
        self._receiving.wait()
        return self.seen[1:-1].tolist()


_channels: weakref.WeakKeyDictionary[Wire, _Channel] = weakref.WeakKeyDictionary()


def _channel(wire: Wire) -> _Channel:
    if wire not in _channels:
        _channels[wire] = _Channel(wire)
    return _channels[wire]


def _pauses() -> Iterator[float]:
    """Yield how long to sleep before the next look."""
    for _ in range(_SPINS):
        yield 0.0
    pause = _SHORTEST
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST)
