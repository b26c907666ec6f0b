"""Copies between ranks, as works that are started and that events stand for.

A copy stream is asynchronous, as on an accelerator: its copies are started by the thread that issues
it, and end later. An event stands for the copies that its stream has started so far; who waits for
it waits for those. No thread waits for a copy that nobody needs yet. Which copies a wait must wait
for is found once, when a program is compiled: see ``waits``.

In the first run a header goes ahead of each value, in the order of the program on both sides. From
then on the receiver knows what comes: it is ready to receive from the beginning of the run, in
memory that it keeps. The sender compares before it sends, because gloo aborts a receiver that gets
more than it expects.

Where a connection is closed, gloo wakes those who wait for a copy that has not begun, and no others:
a copy of which a part is on its way never ends. So once the wire is lost, threads that still wait a
moment later are given up, and the run goes on without them.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from autosched.errors import AutoschedError, ScheduleError
from autosched.program.program import Program, Receive, Record, Send, Stream
from autosched.runtime.backends import Step, Transfer
from autosched.runtime.backends.host import overwritten, prepare_thread
from autosched.runtime.ranks.messages import (
    Landing,
    described,
    header_of,
    is_fixed,
    is_row,
    rows,
    signature,
    sizes,
)
from autosched.runtime.ranks.session import Session
from autosched.runtime.ranks.waits import copies_awaited
from autosched.runtime.ranks.wire import Wire

__all__ = ["Exchange"]

_LONGEST_HEADER = 1 << 20  # bytes: the receiver of a header does not know its length
_PATIENCE = 0.2  # seconds for waits to end when the wire is lost


class Exchange:
    """The sends and receives of one rank's part of a program.

    ``ranks`` are the ranks of devices by name, and ``threads`` the names of the threads that issue
    streams. Each program has another ``first_tag``. ``begin`` is called at the beginning of each
    run, and the steps of ``transfer`` and ``wait`` where the program has them.
    """

    def __init__(
        self,
        part: Program,
        ranks: Mapping[str, int],
        threads: Mapping[Stream, str | None],
        session: Session,
        first_tag: int,
    ):
        self.session = session
        self.ranks = ranks
        # Called with a thread whose wait never ends, with its copy and with the cause.
        self.give_up: Callable[[int, int, AutoschedError], None] = lambda *_: None
        self.waiting: dict[int, _End] = {}  # by thread
        self.is_watched = False  # so that ``arrivals`` has when each receive of a run has ended
        self.arrivals: dict[int, float] = {}  # by position in the part
        self._ends: dict[Send | Receive, deque[_End]] = defaultdict(deque)
        self._by_stream: dict[Stream, list[_End]] = {}
        self._wire: Wire | None = None
        # Of each pair of ranks, sends and receives are the same sequence: so both know the tags.
        count: Counter[tuple[int, bool]] = Counter()
        ends: dict[int, _End] = {}
        for i, half in enumerate(part):
            if isinstance(half, (Send, Receive)) and self.carries(half):
                made = self._end(half, f"{half}, instruction {i + 1} of {len(part)}")
                made.position = i
                made.tag = first_tag + count[made.way]
                count[made.way] += 1
                ends[i] = made
                self._ends[half].append(made)
                self._by_stream.setdefault(half.stream, []).append(made)
        self._all = [end for ends in self._by_stream.values() for end in ends]
        self._receives = [end for end in self._all if isinstance(end, _Receive)]
        self.events = {
            i.event for i in part if isinstance(i, Record) and i.stream in self._by_stream
        }
        self._awaited = copies_awaited(part, ends, threads)

    @property
    def wire(self) -> Wire:
        """The wire of this run."""
        assert self._wire is not None
        return self._wire

    def _end(self, half: Send | Receive, name: str) -> _End:
        if isinstance(half, Send):
            return _Send(self, half, self.ranks[half.destination], name)
        return _Receive(self, half, self.ranks[half.source], name)

    def carries(self, half: Send | Receive) -> bool:
        """Whether this wire carries a copy; a part may have others."""
        return True

    def landing(self, half: Send | Receive, header: Any) -> Landing:
        """Return memory for a value that arrives."""
        return Landing(header)

    # ---- compiling

    def transfer(self, half: Send | Receive) -> Transfer:
        """Return the function that starts to send or to receive a value.

        Called once for each, in the order of the part.
        """
        return self._ends[half].popleft()

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Return a step that waits for the copies of an event, unless others have done so."""
        return _waiting(self._awaited.get((stream, event), ()))

    def ending(self, streams: Collection[Stream]) -> Step | None:
        """Return a step that waits for all copies of some streams that have been started."""
        return _waiting([end for stream in streams for end in self._by_stream.get(stream, ())])

    # ---- running

    def begin(self) -> None:
        """Begin a run: be ready to receive what is known to come.

        Collective in the first run, and in the first one after a failure.
        """
        wire = self.session.wire()
        if wire is not self._wire:
            self._wire = wire
            self.session.exchanges.add(self)
            for each in self._all:
                each.forget(wire)
        for received in self._receives:
            received.post()

    # ---- the wire is lost

    def lost(self) -> None:
        """Give up the threads that still wait after a moment."""
        threading.Thread(target=self._give_up_all, daemon=True, name="lost").start()

    def _give_up_all(self) -> None:
        before = dict(self.waiting)
        time.sleep(_PATIENCE)
        for thread, end in before.items():
            if self.waiting.get(thread) is end and self.session.is_lost:
                cause = self.session.cause(end.name)
                if self.waiting.pop(thread, None) is not None:
                    self.give_up(thread, end.position, cause)


def _waiting(ends: Sequence[_End]) -> Step | None:
    """Return a step that waits for copies."""
    if len(ends) < 2:
        return ends[0].wait if ends else None

    def wait() -> None:
        for end in ends:
            if end.started is not None:
                end.wait()

    return wait


class _End:
    """One end of a copy between ranks; several threads may wait for it.

    ``started`` are its works, until they have ended; ``arrived`` is called then.
    """

    tag = 0
    position = 0
    started: Sequence[Any] | None = None
    arrived: Step | None = None
    issue: Callable[[torch.Tensor], Any]  # starts to send or to receive a row

    def __init__(self, exchange: Exchange, half: Send | Receive, peer: int, name: str):
        self.exchange = exchange
        self.half = half
        self.peer = peer
        self.name = name
        self.way = (peer, isinstance(half, Send))
        self._guard = threading.Lock()

    def forget(self, wire: Wire) -> None:
        """Begin to use a new wire, and headers again."""
        self.started = None
        self._guard = threading.Lock()  # a thread that was given up may hold the last one

    def __call__(self, value: Any, into: Any) -> Any:
        """Start to send a value, or to receive one, perhaps into memory that exists."""
        raise NotImplementedError

    def start(self, rows: Sequence[torch.Tensor]) -> list[Any]:
        """Return the works of rows. Raises the cause where the wire is lost."""
        issue = self.issue
        try:
            return [issue(row) for row in rows]
        except RuntimeError as error:
            raise self.exchange.session.cause(self.name) from error

    def wait(self) -> None:
        """Wait for the end, if the copy has been started."""
        waiting = self.exchange.waiting
        thread = threading.get_ident()
        waiting[thread] = self
        try:
            if self.exchange.session.is_lost:
                self.exchange.lost()
            self._wait()
        finally:
            if waiting.pop(thread, None) is None:  # given up: its steps are those of another thread
                threading.Event().wait()

    def _wait(self) -> None:
        with self._guard:
            works = self.started
            if works is None:
                return
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self.exchange.session.cause(self.name) from error
            if self.arrived is not None:
                self.arrived()
            self.started = None
            if self.exchange.is_watched:
                self.exchange.arrivals[self.position] = time.perf_counter()

    def watch(self) -> None:
        """Wait in a thread of its own, to know when a copy ends; errors are those of others."""
        prepare_thread()
        with contextlib.suppress(AutoschedError):
            self.wait()


class _Send(_End):
    """Sends a value; ``known`` is what the receiver is ready for."""

    known: Any = None
    last = ""
    is_row = False  # whether such a value needs no other row

    def forget(self, wire: Wire) -> None:
        """Begin to send headers again."""
        super().forget(wire)
        self.issue = wire.sender(self.peer, self.tag)
        self.known = None

    def __call__(self, value: Any, _: Any) -> None:
        if self.known is None:
            works = self._announce(value)
            self.started = works + self.start(rows(value))
            return
        if self.known != signature(value):
            raise ScheduleError(
                f"{self.half.value!r} was {self.last} in the first run, for which rank {self.peer} "
                f"is ready, and is {sizes(value)} now; make a schedule for each shape"
            )
        self.started = self.start((value,) if self.is_row else rows(value))

    def _announce(self, value: Any) -> list[Any]:
        """Send the header of a value; from then on the receiver knows tensors like these."""
        header = header_of(value)
        self.is_row = is_row(value)
        if is_fixed(header):
            self.known = signature(value)
            self.last = sizes(value)
        data = json.dumps(header).encode()
        if len(data) > _LONGEST_HEADER:
            raise ScheduleError(
                f"{self.half.value!r} has too many parts to be sent to another rank"
            )
        return self.start([torch.frombuffer(bytearray(data), dtype=torch.uint8)])


class _Receive(_End):
    """Receives a value, into the memory of the last run if that is free."""

    header: Any = None
    landing: Landing | None = None
    posted: list[Any] | None = None  # works that were started at the beginning of the run

    def forget(self, wire: Wire) -> None:
        """Expect a header again."""
        super().forget(wire)
        self.issue = wire.receiver(self.peer, self.tag)
        self.header = None
        self.posted = None
        self.arrived = None

    def post(self) -> None:
        """Be ready to receive, if it is known what comes."""
        if self.header is None:
            return
        if self.landing is None or not self.landing.is_free():
            self.landing = self.exchange.landing(self.half, self.header)
        self.posted = self.start(self.landing.rows)

    def __call__(self, _: Any, into: Any) -> Any:
        if self.posted is None:
            header = self._header()
            self.header = header
            self.landing = None
            self.post()
            self.header = header if is_fixed(header) else None
        assert self.landing is not None
        self.started = self.posted
        self.posted = None
        self.arrived = self.landing.spread if self.landing.is_packed else None
        if into is not None:
            self.arrived = partial(_overwrite, into, self.landing)
        if self.exchange.is_watched:
            threading.Thread(target=self.watch, daemon=True, name=self.name).start()
        return self.landing.value if into is None else into

    def _header(self) -> Any:
        """Wait for the header of a value."""
        row = torch.zeros(_LONGEST_HEADER, dtype=torch.uint8)
        self.started = self.start([row])
        self.wait()
        return described(bytes(row.numpy()).rstrip(b"\0").decode())


def _overwrite(into: Any, landing: Landing) -> None:
    landing.spread()
    overwritten(into, landing.value)
