"""Copies between ranks, as works that are started and that events stand for.

A copy stream is asynchronous, as on an accelerator: its copies are started by the thread that issues
it, and end later. An event stands for the copies that its stream has started so far; who waits for
it waits for those. No thread waits for a copy that nobody needs yet. Which copies a wait must wait
for is found once, when a program is compiled: see ``waits``.

In the first run a header goes ahead of each value, in the order of the program on both sides. From
then on the receiver knows what comes: it is ready to receive from the beginning of the run, in
memory that it keeps. The sender compares before it sends, because gloo aborts a receiver that gets
more than it expects.

A value of another shape or dtype than in the last run is announced in what the receiver is ready
for, which has a byte more than the value: a mark, which no value reaches. A marked row has no other
contents; after it come a header, as in the first run, and a copy of the value. The receiver finds
the mark where it first waits for the value, which may be later than the sender waits for memory. So
the sender waits for these rows only when it has issued its whole part: no two ranks wait for each
other.

Where a connection is closed, gloo wakes those who wait for a copy that has not begun, and no others:
a copy of which a part is on its way never ends. So once the wire is lost, threads that still wait a
moment later are given up, and the run goes on without them.
"""

from __future__ import annotations

import contextlib
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
    ReceiveBuffer,
    blank_row,
    described,
    header_of,
    header_row,
    is_fixed,
    is_row,
    outline,
    rows,
    signature,
    sizes,
)
from autosched.runtime.ranks.session import Session
from autosched.runtime.ranks.waits import copies_awaited
from autosched.runtime.ranks.wire import Wire

__all__ = ["Exchange"]

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
        self.where: Callable[[], str] = lambda: ""  # the tasks that this rank executes
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
            i.event: i.stream for i in part if isinstance(i, Record) and i.stream in self._by_stream
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

    def buffer(self, half: Send | Receive, header: Any) -> ReceiveBuffer:
        """Return memory for a value that arrives."""
        return ReceiveBuffer(header, mark=True)

    # ---- compiling

    def transfer(self, half: Send | Receive) -> Transfer:
        """Return the function that starts to send or to receive a value.

        Called once for each, in the order of the part.
        """
        return self._ends[half].popleft()

    def wait(self, stream: Stream, event: int, before: Exchange | None = None) -> Step | None:
        """Return a step that waits for the copies of an event, unless others have done so.

        Also for those that the run before has started on the stream of the event, on which they
        end first.
        """
        earlier = () if before is None else before._by_stream[self.events[event]]
        return _waiting([*earlier, *self._awaited.get((stream, event), ())])

    def freeing(self, stream: Stream) -> Step | None:
        """Return a step that waits for the copies of a stream, before memory is freed there."""
        return _waiting(self._by_stream.get(stream, ()))

    def ending(self, streams: Collection[Stream]) -> Step | None:
        """Return a step that waits for all copies of some streams that have been started."""
        ends = [end for stream in streams for end in self._by_stream.get(stream, ())]
        return partial(_finish, ends) if ends else None

    def awaited(self) -> Sequence[_End]:
        """Return the copies for which threads wait now."""
        return tuple(self.waiting.values())

    # ---- running

    def begin(self, wire: Wire | None = None) -> Wire:
        """Begin a run: be ready to receive what is known to come; return the wire.

        Without a ``wire``, it is collective in the first run, and in the first one after a failure.
        """
        wire = self.session.begin_run(wire)
        if wire is not self._wire:
            self._wire = wire
            self.session.tell_when_lost(self)
            for each in self._all:
                each.forget(wire)
        for received in self._receives:
            received.post()
        return wire

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
    if len(ends) < 2:
        return ends[0].wait if ends else None

    def wait() -> None:
        for end in ends:
            if end.started is not None:
                end.wait()

    return wait


def _finish(ends: Sequence[_End]) -> None:
    """Wait for copies, and then for rows that nothing else waits for."""
    for end in ends:
        if end.started is not None:
            end.wait()
    for end in ends:
        if end.late:
            end.attended(end.finish)


class _End:
    """One end of a copy between ranks; several threads may wait for it.

    ``started`` are its works, until they have ended. Then ``arrive`` is called if the byte of
    ``mark`` is set, or if the value ``is_moved`` from where it arrives.
    """

    tag = 0
    position = 0
    started: Sequence[Any] | None = None
    late: Sequence[Any] = ()  # works that only the end of the run waits for
    mark: Any = b"\0"
    is_moved = False
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
        self.late = ()
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
        self.attended(self._wait)

    def attended(self, wait: Step) -> None:
        """Call a function that waits; the thread is given up if the wire is lost meanwhile."""
        waiting = self.exchange.waiting
        thread = threading.get_ident()
        waiting[thread] = self
        try:
            if self.exchange.session.is_lost:
                self.exchange.lost()
            wait()
        finally:
            if waiting.pop(thread, None) is None:  # given up: its steps are those of another thread
                threading.Event().wait()

    def _wait(self) -> None:
        with self._guard:
            works = self.started
            if works is None:
                return
            self.end(works)
            if self.is_moved or self.mark[0]:
                self.arrive()
            self.started = None
            if self.exchange.is_watched:
                self.exchange.arrivals[self.position] = time.perf_counter()

    def arrive(self) -> None:
        """Put what has arrived in its places."""

    def end(self, works: Sequence[Any]) -> None:
        """Wait for works. Raises the cause where the wire is lost."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.exchange.session.cause(self.name) from error

    def finish(self) -> None:
        """Wait for what only the end of the run waits for."""
        works, self.late = self.late, ()
        self.end(works)

    def watch(self) -> None:
        """Wait in a thread of its own, to know when a copy ends; errors are those of others."""
        prepare_thread()
        with contextlib.suppress(AutoschedError):
            self.wait()


class _Send(_End):
    """Sends a value; ``known`` is what the receiver is ready for."""

    known: Any = None
    header: Any = None
    lengths: Sequence[int] = ()  # of the rows for which the receiver is ready
    last = ""
    is_row = False  # whether such a value needs no other row

    def forget(self, wire: Wire) -> None:
        """Begin to send headers again."""
        super().forget(wire)
        self.issue = wire.sender(self.peer, self.tag)
        self.known = None

    def __call__(self, value: Any, _: Any) -> None:
        if self.known is None:
            sent = rows(value)
            self.started = self._announce(value, sent) + self.start(sent)
        elif self.known == signature(value):
            self.started = self.start((value,) if self.is_row else rows(value))
        else:
            self.late = self._change(value)

    def _announce(self, value: Any, sent: Sequence[torch.Tensor]) -> list[Any]:
        """Send the header of a value; from then on the receiver knows tensors like these."""
        header = header_of(value)
        self.is_row = is_row(value)
        self.known = signature(value) if sent and is_fixed(header) else None
        self.header = header
        self.lengths = [row.nbytes for row in sent]
        self.last = sizes(value)
        return self.start([header_row(header, self.half.value)])

    def _change(self, value: Any) -> list[Any]:
        """Send a copy of a value of another shape or dtype, after a mark and its header."""
        if outline(header_of(value)) != outline(self.header):
            raise ScheduleError(
                f"{self.half.value!r} was {self.last} in the last run, for which rank {self.peer} "
                "is ready, and has another structure now; make a schedule for each"
            )
        first, *others = self.lengths
        lengths = first + 1, *(1 for _ in others)
        works = self.start([torch.ones(length, dtype=torch.uint8) for length in lengths])
        sent = [row.clone() for row in rows(value)]
        return works + self._announce(value, sent) + self.start(sent)


class _Receive(_End):
    """Receives a value, into the memory of the last run if that is free."""

    header: Any = None
    buffer: ReceiveBuffer | None = None
    posted: list[Any] | None = None  # works that were started at the beginning of the run
    into: Any = None  # memory that exists

    def forget(self, wire: Wire) -> None:
        """Expect a header again."""
        super().forget(wire)
        self.issue = wire.receiver(self.peer, self.tag)
        self.header = None
        self.posted = None

    def post(self) -> None:
        """Be ready to receive, if it is known what comes."""
        if self.header is None:
            return
        if self.posted is not None:  # by a run that was interrupted before its first step
            self.exchange.session.give_up("rank", f"{self.name} was interrupted")
        if self.buffer is None or not self.buffer.is_free():
            self.buffer = self.exchange.buffer(self.half, self.header)
        self.posted = self.start(self.buffer.rows)

    def __call__(self, _: Any, into: Any) -> Any:
        if self.posted is None:
            self.attended(self._learn)
            self.buffer = None
            self.post()
            self._know()
        buffer = self.buffer
        assert buffer is not None
        self.started = self.posted
        self.posted = None
        self.into = into
        self.mark = buffer.mark
        self.is_moved = buffer.is_packed or into is not None
        if self.exchange.is_watched:
            threading.Thread(target=self.watch, daemon=True, name=self.name).start()
        return buffer.value if into is None else into

    def _know(self) -> None:
        """Keep the header for the next run, unless the sender sends one in each."""
        assert self.buffer is not None
        if not (self.buffer.rows and is_fixed(self.header)):
            self.header = None

    def arrive(self) -> None:
        """Put what has arrived in its places, after what the sender announces."""
        buffer = self.buffer
        assert buffer is not None
        if self.mark[0]:
            self._learn()
            self.buffer = self.exchange.buffer(self.half, self.header)
            self.end(self.start(self.buffer.rows))
            self.buffer.spread()
            buffer.become(self.buffer)
            self._know()
            self.buffer = None  # the value has its memory
        else:
            buffer.spread()
        if self.into is not None:
            overwritten(self.into, buffer.value)
            self.into = None

    def _learn(self) -> None:
        """Wait for the header of a value."""
        row = blank_row()
        self.end(self.start([row]))
        self.header = described(row)
