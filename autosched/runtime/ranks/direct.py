"""Copies between accelerators of two ranks, without a stop in host memory.

They are work of the accelerators' copy streams, as copies within a rank are: events order them, and
the host does not wait. In the first run a header goes ahead of each value, over the wire of the
hosts. At the end of a run the host waits for these copies, because only then is it known that the
wire was not lost meanwhile: lost copies end, too, with any contents.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from autosched.errors import ScheduleError
from autosched.program.parts import crosses
from autosched.program.program import Copy, Program, Receive, Send
from autosched.runtime.backends import Step, Transfer
from autosched.runtime.backends.host import overwritten
from autosched.runtime.ranks.messages import (
    Landing,
    described,
    header_of,
    is_fixed,
    on_device,
    rows,
    signature,
    sizes,
)
from autosched.runtime.ranks.nccl import Connect, NcclWire
from autosched.runtime.ranks.session import Session

__all__ = ["Direct", "direct_arcs"]

_LONGEST_HEADER = 1 << 20  # bytes: the receiver of a header does not know its length
_OTHER_TAGS = 1 << 30  # those of copies between hosts are below
_NAP = 5e-5


def direct_arcs(whole: Program) -> set[tuple[int, int]]:
    """Return the pairs of ranks between whose accelerators a program copies."""
    rank = dict(whole.ranks)
    copies = (i for i in whole if isinstance(i, Copy) and crosses(i, rank))
    ends = ((copy.source, copy.destination) for copy in copies)
    return {(rank[a], rank[b]) for a, b in ends if not a.startswith("cpu")}


class Direct:
    """The direct sends and receives of one rank's part of a program.

    ``connect`` makes communicators for ``device``; ``arcs`` are the pairs of all ranks.
    """

    def __init__(
        self,
        halves: Sequence[tuple[Send | Receive, str]],
        ranks: Mapping[str, int],
        session: Session,
        first_tag: int,
        arcs: Collection[tuple[int, int]],
        device: torch.device,
        connect: Connect,
    ):
        self.streams = {half.stream for half, _ in halves}
        self.session = session
        self.arcs = arcs
        self.device = device
        self.connect = connect
        self._host_wire: Any = None
        self._wire: NcclWire | None = None
        self._announcing: list[Any] = []  # works of headers
        self._ends: dict[Send | Receive, deque[_End]] = defaultdict(deque)
        count: Counter[tuple[int, bool]] = Counter()
        for half, name in halves:
            is_send = isinstance(half, Send)
            peer = ranks[half.destination if isinstance(half, Send) else half.source]
            tag = _OTHER_TAGS + first_tag // 2 + count[peer, is_send]
            count[peer, is_send] += 1
            self._ends[half].append((_Send if is_send else _Receive)(self, half, peer, tag, name))
        self._all = [end for ends in self._ends.values() for end in ends]

    def transfer(self, half: Send | Receive) -> Transfer:
        """Return the function that sends or receives on the current stream.

        Called once for each, in the order of the part.
        """
        return self._ends[half].popleft()

    def begin(self) -> None:
        """Begin a run. Collective in the first run, and in the first one after a failure."""
        self._announcing.clear()
        found = self.session.wire()
        if found is self._host_wire:
            return
        for end in self._all:
            end.known = None
        wire = next((each for each in found.others if isinstance(each, NcclWire)), None)
        if wire is None:
            wire = NcclWire(self.session.rank, self.connect)
            found.others.append(wire)
        self._wire = wire
        if found.is_lost:  # before it had the other
            wire.lose()
        wire.open(self.arcs, lambda: torch.zeros(1, dtype=torch.uint8, device=self.device))
        self._host_wire = found
        self.until(torch.accelerator.current_stream(self.device).record_event(), "the first copies")

    @property
    def wire(self) -> NcclWire:
        """The wire of this run."""
        assert self._wire is not None
        return self._wire

    def until(self, event: torch.Event, pending: str) -> None:
        """Wait until an event has happened. Raises the cause if the wire was lost by then."""
        while not event.query() and not self.wire.is_lost:
            time.sleep(_NAP)
        if self.wire.is_lost:
            raise self.session.cause(pending)

    def ending(self, streams: Collection[torch.Stream]) -> Step:
        """Return a step that waits for all copies of some streams."""

        def finish() -> None:
            for stream in streams:
                self.until(stream.record_event(), "its copies between accelerators to end")
            for work in self._announcing:
                self.awaited(work, "its headers to be received")

        return finish

    def exchanged(
        self, how: Callable[[torch.Tensor, int], Any], row: torch.Tensor, end: _End
    ) -> None:
        """Send or receive a row, for which the current stream waits, so that there is one at a time.

        Raises the cause where the wire is lost.
        """
        try:
            how(row, end.peer).wait()
        except RuntimeError as error:
            raise self.session.cause(end.name) from error

    def awaited(self, work: Any, pending: str) -> None:
        """Wait for a work of the hosts' wire. Raises the cause if that is lost."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.session.cause(pending) from error

    def announce(self, row: torch.Tensor, end: _End) -> None:
        """Start to send a header."""
        try:
            self._announcing.append(self._host_wire.send(row, end.peer, end.tag))
        except RuntimeError as error:
            raise self.session.cause(end.name) from error

    def announced(self, end: _End) -> Any:
        """Wait for a header."""
        row = torch.zeros(_LONGEST_HEADER, dtype=torch.uint8)
        try:
            work = self._host_wire.receive(row, end.peer, end.tag)
        except RuntimeError as error:
            raise self.session.cause(end.name) from error
        self.awaited(work, end.name)
        return described(bytes(row.numpy()).rstrip(b"\0").decode())


class _End:
    """One end of a direct copy; ``known`` is what the other end knows of the value, if anything."""

    known: Any = None

    def __init__(self, direct: Direct, half: Send | Receive, peer: int, tag: int, name: str):
        self.direct = direct
        self.half = half
        self.peer = peer
        self.tag = tag
        self.name = name

    def __call__(self, value: Any, into: Any) -> Any:
        """Send a value, or receive one, on the current stream."""
        raise NotImplementedError


class _Send(_End):
    """Sends a value."""

    last = ""

    def __call__(self, value: Any, _: Any) -> None:
        if self.known is None:
            header = header_of(value, self.direct.device.type)
            if is_fixed(header):
                self.known = signature(value)
                self.last = sizes(value)
            data = bytearray(json.dumps(header).encode())
            if len(data) > _LONGEST_HEADER:
                raise ScheduleError(f"{self.half.value!r} has too many parts to be sent")
            self.direct.announce(torch.frombuffer(data, dtype=torch.uint8), self)
        elif self.known != signature(value):
            raise ScheduleError(
                f"{self.half.value!r} was {self.last} in the first run, for which rank {self.peer} "
                f"is ready, and is {sizes(value)} now; make a schedule for each shape"
            )
        for row in rows(value):
            self.direct.exchanged(self.direct.wire.send, row, self)


class _Receive(_End):
    """Receives a value into memory of the current stream."""

    def __call__(self, _: Any, into: Any) -> Any:
        header = self.direct.announced(self) if self.known is None else self.known
        self.known = header if is_fixed(header) else None
        landing = Landing(header, partial(on_device, self.direct.device))
        for row in landing.rows:
            self.direct.exchanged(self.direct.wire.receive, row, self)
        landing.spread()
        return landing.value if into is None else overwritten(into, landing.value)
