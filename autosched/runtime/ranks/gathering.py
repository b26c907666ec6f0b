"""Small exchanges of all ranks: a few numbers of each, and values of rank 0.

Numbers travel over the wire, in log2 of the number of ranks hops. A rank that waits for them asks
its memory again and again, so that Control-C ends it, and so does news of a failure: gloo would
hold both back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from autosched.errors import RankError
from autosched.machine.cluster import joined
from autosched.runtime.ranks.messages import Landing, described, header_of, rows
from autosched.runtime.ranks.session import Session, session
from autosched.runtime.ranks.wire import Wire

__all__ = ["Gathering"]

T = TypeVar("T")
_TAG = 2**31 - 2  # which no copy of a program has
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
        self._wire: Wire | None = None
        self._sent: list[Any] = []

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

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks of an error here, unless they know, and wake those that wait."""
        members = self._session
        if members is None or members.is_lost:
            return
        who = members.named(members.rank)
        if isinstance(error, KeyboardInterrupt):
            why = f"{who} was interrupted"
        elif isinstance(error, RankError):
            why = str(error)
        else:
            why = f"{who}: {type(error).__name__}: {error}"
        members.give_up("rank", why)

    def gather(self, numbers: Sequence[int], what: str) -> list[list[int]]:
        """Return the numbers of all ranks, which give as many; ``what`` says for what."""
        members = self._members()
        if members.is_given_up:
            raise members.cause(what)
        wire = members.wire()
        if wire is not self._wire:
            self._wire, self._sent = wire, []
        wire.exchanges += 1
        try:
            return self._gathered(wire, members, numbers, what)
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

    def _gathered(
        self, wire: Wire, members: Session, numbers: Sequence[int], what: str
    ) -> list[list[int]]:
        """Return the numbers of all ranks; what a rank knows doubles with each hop.

        Bruck et al., "Efficient algorithms for all-to-all communications in multiport
        message-passing systems", 1997.
        """
        size, width = wire.size, len(numbers)
        # The count comes first and last in a message: when both are there, all is.
        known = [*numbers]
        works = self._sent
        self._sent = []
        for work in works:
            work.wait()
        hops = [1 << k for k in range((size - 1).bit_length())]
        arriving = []
        for hop in hops:
            row = torch.zeros(min(hop, size - hop) * width + 2, dtype=torch.int64)
            work = wire.receive(row.view(torch.uint8), (wire.rank + hop) % size, _TAG)
            arriving.append((row, work))
        for hop, (row, work) in zip(hops, arriving, strict=True):
            part = known[: min(hop, size - hop) * width]
            mine = torch.tensor([wire.exchanges, *part, wire.exchanges])
            self._sent.append(wire.send(mine.view(torch.uint8), (wire.rank - hop) % size, _TAG))
            self._await(row.numpy(), wire.exchanges, members, (wire.rank + hop) % size, what)
            work.wait()
            known += row[1:-1].tolist()
        parts = [known[i : i + width] for i in range(0, size * width, width)]
        return [parts[(rank - wire.rank) % size] for rank in range(size)]

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

    def broadcast(self, value: Any, what: str, root: int = 0) -> Any:
        """Return the value of one rank, a tree of tensors and plain data, on each rank."""
        members = self._members()
        size = members.size
        rank = (members.rank - root) % size  # counted from the root
        text = json.dumps(header_of(value)) if rank == 0 else ""
        header = described(self.agree(what, text, lambda texts: texts[root]))
        wire = members.wire()
        landing = None if rank == 0 else Landing(header)
        own = rows(value) if landing is None else landing.rows
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
        if landing is None:
            return value
        landing.spread()
        return landing.value


def _pauses() -> Iterator[float]:
    """Yield how long to sleep before the next look."""
    for _ in range(_SPINS):
        yield 0.0
    pause = _SHORTEST
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST)
