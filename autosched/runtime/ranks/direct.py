"""Copies between accelerators of two ranks, without a stop in host memory.

They are work of the accelerators' copy streams, as copies within a rank are: events order them, and
the host does not wait. In the first run a header goes ahead of each value, over the wire of the
hosts. At the end of a run the host waits for these copies, because only then is it known that the
wire was not lost meanwhile: lost copies end, too, with any contents.

Communicators are made at the beginning of the first run, in threads: a rank that fails by then never
comes to make its own, and NCCL would wait for it forever. Such threads are given up.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from autosched.errors import RankError, ScheduleError
from autosched.program.parts import crosses
from autosched.program.program import Copy, Program, Receive, Send
from autosched.runtime.backends import Step, Transfer
from autosched.runtime.backends.host import overwritten
from autosched.runtime.ranks.messages import (
    ReceiveBuffer,
    blank_row,
    described,
    header_of,
    header_row,
    is_fixed,
    on_device,
    rows,
    signature,
    sizes,
)
from autosched.runtime.ranks.nccl import Arc, Connect, NcclWire
from autosched.runtime.ranks.session import Session

__all__ = ["Direct", "direct_arcs", "number_of"]

_OTHER_TAGS = 1 << 30  # those of copies between hosts are below
_NAP = 5e-5
_MAKING = "communicators of NCCL to be made"
_PATIENCE = 0.2  # seconds for news of other ranks


def direct_arcs(whole: Program) -> set[Arc]:
    """Return the pairs of GPUs of different ranks between which a program copies."""
    rank = dict(whole.ranks)
    copies = (i for i in whole if isinstance(i, Copy) and crosses(i, rank))
    ends = ((copy.source, copy.destination) for copy in copies)
    return {(number_of(a), number_of(b)) for a, b in ends if not a.startswith("cpu")}


def number_of(name: str) -> int:
    """Return the number of a GPU among those of all ranks."""
    return int(name.rpartition(":")[2])


class Direct:
    """The direct sends and receives of one rank's part of a program.

    ``connect`` makes communicators of a device, by its name; ``arcs`` are the pairs of all ranks.
    """

    def __init__(
        self,
        halves: Sequence[tuple[Send | Receive, str]],
        ranks: Mapping[str, int],
        session: Session,
        first_tag: int,
        arcs: Collection[Arc],
        devices: Mapping[str, torch.device],
        connect: Callable[[str], Connect],
    ):
        self.streams = {half.stream for half, _ in halves}
        self.session = session
        self.arcs = arcs
        self.devices = {name: devices[name] for name in sorted({s.device for s in self.streams})}
        self.connect = connect
        self.wires: dict[str, NcclWire] = {}  # of this run, by the name of the device
        self._host_wire: Any = None
        self._announcing: list[Any] = []  # works of headers
        self._ends: dict[Send | Receive, deque[_End]] = defaultdict(deque)
        count: Counter[tuple[int, bool]] = Counter()
        for half, name in halves:
            is_send = isinstance(half, Send)
            other = half.destination if isinstance(half, Send) else half.source
            peer = ranks[other]
            tag = _OTHER_TAGS + first_tag // 2 + count[peer, is_send]
            count[peer, is_send] += 1
            made = (_Send if is_send else _Receive)(self, half, other, peer, tag, name)
            self._ends[half].append(made)
        self._all = [end for ends in self._ends.values() for end in ends]

    def transfer(self, half: Send | Receive) -> Transfer:
        """Return the function that sends or receives on the current stream.

        Called once for each, in the order of the part.
        """
        return self._ends[half].popleft()

    def begin(self, found: Any) -> None:
        """Begin a run on a wire of the hosts. Collective in the first one on each.

        Raises the cause where it is lost before communicators are made.
        """
        self._announcing.clear()
        if found is self._host_wire:
            return
        for end in self._all:
            end.known = None
        wires = {wire.gpu: wire for wire in found.others if isinstance(wire, NcclWire)}
        for name in self.devices:
            number = number_of(name)
            if number not in wires:
                wires[number] = NcclWire(number, self.connect(name))
                found.others.append(wires[number])
            self.wires[name] = wires[number]
        if found.is_lost:  # perhaps before it had the others
            raise self.session.cause(_MAKING)
        self._open()
        self._host_wire = found

    def _open(self) -> None:
        """Make communicators, each device in a thread of its own: two may be in one communicator."""
        errors: list[RuntimeError] = []

        def opening(name: str, device: torch.device) -> None:
            try:
                with torch.accelerator.device_index(device.index):  # NCCL may hang on another one
                    blank = partial(torch.zeros, 1, dtype=torch.uint8, device=device)
                    self.wires[name].open(self.arcs, blank)
                    torch.accelerator.current_stream(device).synchronize()
            except RuntimeError as error:
                errors.append(error)

        threads = [
            threading.Thread(target=opening, args=each, daemon=True, name=f"open NCCL of {each[0]}")
            for each in self.devices.items()
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not (errors or self.is_lost):
            time.sleep(_NAP)
        if errors:
            self._fail(errors[0])
        if self.is_lost:
            raise self.session.cause(_MAKING)

    def _fail(self, error: RuntimeError) -> None:
        """Give up, unless another rank did: NCCL may know of its end before this rank is told."""
        deadline = time.monotonic() + _PATIENCE
        while not self.is_lost and time.monotonic() < deadline:
            time.sleep(_NAP)
        if not self.is_lost:
            who = self.session.named(self.session.rank)
            why = f"{who} could not make communicators of NCCL: {error}"
            self.session.give_up("rank", why)
            raise RankError(why) from error

    @property
    def is_lost(self) -> bool:
        """Whether copies of this run may have ended with any contents."""
        return any(wire.is_lost for wire in self.wires.values())

    def until(self, event: torch.Event, pending: str) -> None:
        """Wait until an event has happened. Raises the cause if the wire was lost by then."""
        while not event.query() and not self.is_lost:
            time.sleep(_NAP)
        if self.is_lost:
            raise self.session.cause(pending)

    def ending(self, streams: Collection[torch.Stream]) -> Step:
        """Return a step that waits for all copies of some streams."""

        def finish() -> None:
            for stream in streams:
                self.until(stream.record_event(), "its copies between accelerators to end")
            for work in self._announcing:
                self.awaited(work, "its headers to be received")

        return finish

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
        row = blank_row()
        try:
            work = self._host_wire.receive(row, end.peer, end.tag)
        except RuntimeError as error:
            raise self.session.cause(end.name) from error
        self.awaited(work, end.name)
        return described(row)


class _End:
    """One end of a direct copy; ``known`` is what the other end knows of the value, if anything.

    ``other`` is the device of the other end, and ``peer`` its rank.
    """

    known: Any = None

    def __init__(
        self, direct: Direct, half: Send | Receive, other: str, peer: int, tag: int, name: str
    ):
        self.direct = direct
        self.half = half
        self.own = half.stream.device
        self.gpu = number_of(other)
        self.peer = peer
        self.tag = tag
        self.name = name

    def __call__(self, value: Any, into: Any) -> Any:
        """Send a value, or receive one, on the current stream."""
        raise NotImplementedError

    def exchanged(self, how: Callable[[torch.Tensor, int], Any], row: torch.Tensor) -> None:
        """Send or receive a row, for which the current stream waits, so that there is one at a time.

        Raises the cause where the wire is lost.
        """
        try:
            how(row, self.gpu).wait()
        except RuntimeError as error:
            raise self.direct.session.cause(self.name) from error


class _Send(_End):
    """Sends a value."""

    last = ""

    def __call__(self, value: Any, _: Any) -> None:
        if self.known is None:
            header = header_of(value, self.direct.devices[self.own].type)
            if is_fixed(header):
                self.known = signature(value)
                self.last = sizes(value)
            self.direct.announce(header_row(header, self.half.value), self)
        elif self.known != signature(value):
            raise ScheduleError(
                f"{self.half.value!r} was {self.last} in the first run, for which rank {self.peer} "
                f"is ready, and is {sizes(value)} now; make a schedule for each shape"
            )
        wire = self.direct.wires[self.own]
        for row in rows(value):
            self.exchanged(wire.send, row)


class _Receive(_End):
    """Receives a value into memory of the current stream."""

    def __call__(self, _: Any, into: Any) -> Any:
        header = self.direct.announced(self) if self.known is None else self.known
        self.known = header if is_fixed(header) else None
        buffer = ReceiveBuffer(header, partial(on_device, self.direct.devices[self.own]))
        wire = self.direct.wires[self.own]
        for row in buffer.rows:
            self.exchanged(wire.receive, row)
        buffer.spread()
        return buffer.value if into is None else overwritten(into, buffer.value)
