"""Copies between ranks, as works that are started and that events stand for.

A copy stream is asynchronous, as on an accelerator: its copies are started by the thread that issues
it, and end later. An event stands for the copies that its stream has started so far; who waits for
it waits for those. No thread waits for a copy that nobody needs yet.

In the first run a header goes ahead of each value, in the order of the program on both sides. From
then on the receiver knows what comes: it is ready to receive from the beginning of the run, in
memory that it keeps. The sender compares before it sends, because gloo aborts a receiver that gets
more than it expects.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
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
    rows,
    signature,
    sizes,
)
from autosched.runtime.ranks.session import Session
from autosched.runtime.ranks.wire import Wire

__all__ = ["Exchange"]

_LONGEST_HEADER = 1 << 20  # bytes: the receiver of a header does not know its length


class Exchange:
    """The sends and receives of one rank's part of a program.

    ``ranks`` are the ranks of devices by name. Each program has another ``first_tag``. ``begin`` is
    called at the beginning of each run, and the steps of ``transfer``, ``record`` and ``wait``
    where the program has them.
    """

    def __init__(self, part: Program, ranks: Mapping[str, int], session: Session, first_tag: int):
        self.session = session
        self.ranks = ranks
        self.is_watched = False  # so that ``arrivals`` has when each receive of a run has ended
        self.arrivals: dict[int, float] = {}  # by position in the part
        both = [(i, half) for i, half in enumerate(part) if isinstance(half, (Send, Receive))]
        halves = [(i, half) for i, half in both if self.carries(half)]
        self.started: dict[Stream, list[_Started]] = {half.stream: [] for _, half in halves}
        recorded = [i for i in part if isinstance(i, Record) and i.stream in self.started]
        self.events: dict[int, list[_Started]] = {record.event: [] for record in recorded}
        self._ends: dict[Send | Receive, deque[_End]] = defaultdict(deque)
        self._all: list[_End] = []
        self._receives: list[_Receive] = []
        self._wire: Wire | None = None
        # Of each pair of ranks, sends and receives are the same sequence: so both know the tags.
        count: Counter[tuple[int, bool]] = Counter()
        for i, half in halves:
            made = self._end(half, f"{half}, instruction {i + 1} of {len(part)}")
            made.position = i
            made.tag = first_tag + count[made.way]
            count[made.way] += 1
            self._ends[half].append(made)
            self._all.append(made)

    def _end(self, half: Send | Receive, name: str) -> _End:
        if isinstance(half, Send):
            return _Send(self, half, self.ranks[half.destination], name)
        made = _Receive(self, half, self.ranks[half.source], name)
        self._receives.append(made)
        return made

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

    def record(self, stream: Stream, event: int) -> Step:
        """Return a step after which an event stands for what its stream has started."""

        def record() -> None:
            self.started[stream] = [each for each in self.started[stream] if not each.has_ended]
            self.events[event] = self.started[stream].copy()

        return record

    def wait(self, event: int) -> Step:
        """Return a step that waits for the copies of an event."""

        def wait() -> None:
            for each in self.events[event]:
                each.wait()

        return wait

    def ending(self, streams: Collection[Stream]) -> Step | None:
        """Return a step that waits for all copies of some streams."""
        own = [stream for stream in streams if stream in self.started]

        def finish() -> None:
            for stream in own:
                for each in self.started[stream]:
                    each.wait()

        return finish if own else None

    # ---- running

    def begin(self) -> None:
        """Begin a run: be ready to receive what is known to come.

        Collective in the first run, and in the first one after a failure.
        """
        wire = self.session.wire()
        if wire is not self._wire:
            self._wire = wire
            for each in self._all:
                each.forget()
        for stream in self.started:
            self.started[stream] = []
        for received in self._receives:
            received.post()

    @property
    def wire(self) -> Wire:
        """The wire of this run."""
        assert self._wire is not None
        return self._wire

    def start(self, end: _End, works: Callable[[], list[Any]]) -> list[Any]:
        """Return works. Raises the cause where the wire is lost."""
        try:
            return works()
        except RuntimeError as error:
            raise self.session.cause(end.name) from error


class _Started:
    """A copy that has been started; several threads may wait for it."""

    def __init__(self, end: _End, works: Iterable[Any], landed: Step | None = None):
        self.has_ended = False
        self._end = end
        self._works = list(works)
        self._landed = landed
        self._guard = threading.Lock()

    def wait(self) -> None:
        if self.has_ended:
            return
        with self._guard:
            if self.has_ended:
                return
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                raise self._end.exchange.session.cause(self._end.name) from error
            if self._landed is not None:
                self._landed()
            self._works.clear()
            self.has_ended = True
            if self._end.exchange.is_watched:
                self._end.exchange.arrivals[self._end.position] = time.perf_counter()

    def watch(self) -> None:
        """Wait in a thread of its own, to know when a copy ends; errors are those of others."""
        prepare_thread()
        with contextlib.suppress(AutoschedError):
            self.wait()


class _End:
    """One end of a copy between ranks."""

    tag = 0
    position = 0

    def __init__(self, exchange: Exchange, half: Send | Receive, peer: int, name: str):
        self.exchange = exchange
        self.half = half
        self.peer = peer
        self.name = name
        self.way = (peer, isinstance(half, Send))

    def forget(self) -> None:
        """Begin to use headers again, because the wire is a new one."""
        raise NotImplementedError

    def __call__(self, value: Any, into: Any) -> Any:
        """Start to send a value, or to receive one, perhaps into memory that exists."""
        raise NotImplementedError

    def _note(self, works: Iterable[Any], landed: Step | None = None) -> None:
        started = _Started(self, works, landed)
        self.exchange.started[self.half.stream].append(started)
        if self.exchange.is_watched and landed is not None:
            threading.Thread(target=started.watch, daemon=True, name=self.name).start()


class _Send(_End):
    """Sends a value; ``known`` is what the receiver is ready for."""

    known: Any = None
    last = ""

    def forget(self) -> None:
        """Begin to send headers again."""
        self.known = None

    def __call__(self, value: Any, _: Any) -> None:
        works: list[Any] = []
        if self.known is None:
            works += self._announce(value)
        elif self.known != signature(value):
            raise ScheduleError(
                f"{self.half.value!r} was {self.last} in the first run, for which rank {self.peer} "
                f"is ready, and is {sizes(value)} now; make a schedule for each shape"
            )
        send = self.exchange.wire.send
        works += self.exchange.start(
            self, lambda: [send(row, self.peer, self.tag) for row in rows(value)]
        )
        self._note(works)

    def _announce(self, value: Any) -> list[Any]:
        """Send the header of a value; from then on the receiver knows tensors like these."""
        header = header_of(value)
        if is_fixed(header):
            self.known = signature(value)
            self.last = sizes(value)
        data = json.dumps(header).encode()
        if len(data) > _LONGEST_HEADER:
            raise ScheduleError(
                f"{self.half.value!r} has too many parts to be sent to another rank"
            )
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self.exchange.start(
            self, lambda: [self.exchange.wire.send(row, self.peer, self.tag)]
        )


class _Receive(_End):
    """Receives a value, into the memory of the last run if that is free."""

    header: Any = None
    landing: Landing | None = None
    works: list[Any] | None = None  # started at the beginning of the run

    def forget(self) -> None:
        """Expect a header again."""
        self.header = None
        self.works = None

    def post(self) -> None:
        """Be ready to receive, if it is known what comes."""
        self.works = None
        if self.header is None:
            return
        if self.landing is None or not self.landing.is_free():
            self.landing = self.exchange.landing(self.half, self.header)
        receive = self.exchange.wire.receive
        landing = self.landing
        self.works = self.exchange.start(
            self, lambda: [receive(row, self.peer, self.tag) for row in landing.rows]
        )

    def __call__(self, _: Any, into: Any) -> Any:
        if self.works is None:
            header = self._header()
            self.header = header
            self.landing = None
            self.post()
            self.header = header if is_fixed(header) else None
        landing = self.landing
        works = self.works
        assert landing is not None
        assert works is not None

        def landed() -> None:
            landing.spread()
            if into is not None:
                overwritten(into, landing.value)

        self._note(works, landed)
        self.works = None
        return landing.value if into is None else into

    def _header(self) -> Any:
        """Wait for the header of a value."""
        row = torch.zeros(_LONGEST_HEADER, dtype=torch.uint8)
        receive = self.exchange.wire.receive
        (work,) = self.exchange.start(self, lambda: [receive(row, self.peer, self.tag)])
        _Started(self, [work]).wait()
        return described(bytes(row.numpy()).rstrip(b"\0").decode())
