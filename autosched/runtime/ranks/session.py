"""What the ranks of a cluster tell each other of failures, and the wire that they share.

A rank that fails first writes why into the store, and then loses the wire and tells all others.
A rank whose wire is lost reads why, and raises it with what it was waiting for. The next run makes a
new wire, unless a rank has gone, or hangs: then torchrun must start all of them again.

The store may be in the process of the rank that hangs, and then all its functions do. So failures
are read and written in threads that are given up.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from autosched._lib.meeting import connected
from autosched._lib.processes import has_ended, is_stopped
from autosched.errors import AutoschedError, RankError, TaskError
from autosched.machine import cluster
from autosched.machine.cluster import Joined, joined
from autosched.runtime.ranks.heartbeat import Heartbeat, acknowledged
from autosched.runtime.ranks.watch import Watch
from autosched.runtime.ranks.wire import InterruptibleStore, Wire, new_group

__all__ = ["Session", "leave", "pause", "session"]

T = TypeVar("T")
_PATIENCE = 0.5  # seconds for the rank that failed to write why
_NAP = 1e-3
_WATCH = "watch"  # the group that is connected first


class WireUser(Protocol):
    """What uses a wire."""

    def where(self) -> str:
        """Return the tasks that it executes."""

    def lost(self) -> None:
        """Note that the wire is lost."""


class Runs(Protocol):
    """The runs of a program."""

    def wait(self, deadline: float | None) -> None:
        """Wait until all of them have ended."""


class Session:
    """The wire of a rank, and what it knows of the others. One for each cluster."""

    def __init__(self, member: Joined):
        self.rank = member.rank
        self.size = member.size
        self.store = member.store
        self.hosts = member.hosts
        self.meeting = member.meeting
        self.meeting.alive = self.check
        self.absent: dict[int, str] = {}  # the ranks that are not there, and how they went
        self.left: set[int] = set()  # those of them whose programs have ended
        self.hanging = ""  # how one of them hangs
        self.generation = 0  # of the wire
        self._runs = 0  # that this rank has begun
        self._first = 0  # the first of them that any rank has begun on this wire
        self.exchanged = 0  # exchanges of numbers that were begun on this wire: see ``gathering``
        self.told: AutoschedError | None = None  # the last failure of another rank
        self._told: weakref.WeakSet[WireUser] = weakref.WeakSet()  # when the wire is lost
        self._turn: weakref.ref[Runs] | None = None  # of the program that runs
        self._wire: Wire | None = None
        self._reported = -1  # the last wire whose failure this rank has caused, or raised
        self._guard = threading.Lock()
        self._failed = -1  # the last wire that is known to have failed
        self._near = self._processes()
        with acknowledged(member.heartbeat):
            group = self._connected(new_group, _WATCH)
        on_news = self._lose, self._gone, self._left, self._hangs
        self._watch = Watch(group, self.rank, self.size, *on_news)
        self._heartbeat = self._listen(group, member.heartbeat)
        atexit.register(self.end)

    def _processes(self) -> dict[int, str]:
        """Return the processes that may be on this host, by rank."""
        hosts = self.hosts or [""] * self.size
        near = [rank for rank in range(self.size) if hosts[rank] == hosts[self.rank]]
        return {rank: self.store.get(f"process/{rank}").decode() for rank in near}

    def _listen(self, group: object, limit: float | None) -> Heartbeat:
        """Listen to the rank before this one, and look at the one before it on this host."""
        near = [*self._near]
        beside = near[near.index(self.rank) - 1]
        process = self._near[beside]
        look = beside, lambda: is_stopped(process)
        return Heartbeat(group, self.rank, self.size, limit, self._hangs, *look)

    def _connected(self, make: Callable[[str, Any, int, int], T], name: str) -> T:
        """Return what connects all ranks. Raises RankError if one of them has gone.

        One that has left was connected before, and has done its part of what follows.
        """
        unwatched = self._near if name == _WATCH else {}  # the watch tells of them later

        def alive() -> None:
            for rank, why in tuple(self.absent.items()):
                if rank not in self.left:
                    raise RankError(self.hanging or why)
            for rank, process in unwatched.items():
                if has_ended(process):
                    raise RankError(self._ended(rank))
            if self.is_lost:
                raise self.cause("ranks to connect")

        connect = partial(make, name, InterruptibleStore(self.store, alive), self.rank, self.size)
        return connected(connect, alive, self.meeting.timeout)

    # ---- the wire

    def wire(self) -> Wire:
        """Return the wire; a new one after a failure. Collective where it is made.

        Raises RankError where a rank has gone, or does not come. One that has left is not missed
        before something is needed from it.
        """
        if self._wire is None or self._failed == self.generation:
            self.check()
            generation = self._failed + 1
            # All are here before they connect: gloo would wait for those that do not come.
            agreed = self.meeting.agree("a run", f"{generation} {self._runs}", _latest)
            self._runs = self._first = int(agreed)
            self.exchanged = 0
            self._wire = None
            self.generation = generation
            try:
                self._wire = self._connected(Wire, f"wire {generation}")
            except BaseException as error:
                why = str(error) or type(error).__name__
                self.give_up("rank", f"{self.named(self.rank)} gave up: {why}")
                raise
            if self._failed == generation:  # another rank was faster, and failed
                self._wire.lose()
        return self._wire

    def wire_of_run(self, pending: str) -> Wire:
        """Return the wire of the run that is under way. Raises the cause if it is lost."""
        wire = self.current
        if wire is None:
            raise self.cause(pending)
        return wire

    def begin_run(self, wire: Wire | None = None) -> Wire:
        """Return the wire for the next run: a given one, or as ``wire`` does.

        Ranks may notice a failure in different runs. So that their runs stay together, one that has
        been given up on another rank fails here, too: then this raises RankError.
        """
        number = self._runs
        try:
            wire = wire or self.wire()
        finally:
            self._runs = number + 1
        if number < self._first:
            raise RankError("another rank gave up this run, when one before it had failed")
        return wire

    def take_turn(self, runs: Runs | None, deadline: float | None) -> None:
        """Let runs of a program begin when those of all others have ended.

        Ranks issue copies of two programs in different orders, and their tags may be the same.
        """
        last = None if self._turn is None else self._turn()
        if last is not runs:
            if last is not None:
                last.wait(deadline)
            self._turn = None if runs is None else weakref.ref(runs)

    @property
    def current(self) -> Wire | None:
        """The wire, unless it is lost, or not made yet."""
        return None if self.is_lost else self._wire

    @property
    def is_lost(self) -> bool:
        """Whether the wire is known to have failed."""
        return self._failed >= self.generation

    def check(self) -> None:
        """Raise RankError if a rank has gone, has left, or hangs."""
        if self.absent:
            raise RankError(self.hanging or next(iter(self.absent.values())))

    # ---- failures

    def tell_when_lost(self, user: WireUser) -> None:
        """Tell a user of the wire when it is lost; it is not kept alive."""
        with self._guard:
            self._told.add(user)

    def give_up(self, kind: str, why: str) -> None:
        """Tell all ranks why this run has failed, unless another one was first; wake them."""
        self._reported = self.generation
        text = json.dumps([self.rank, kind, why, self.exchanged])
        key = f"why/{self.generation}"
        self._ask(lambda: self.store.compare_set(key, "", text))
        self._lose(self.generation)

    def cause(self, pending: str) -> AutoschedError:
        """Return the error for a run whose wire is lost; ``pending`` says what this rank awaits.

        The wire is lost here, too, so that the other ranks learn of it.
        """
        kind, why, exchanged = self._why()
        if exchanged <= self.exchanged:  # else it is raised again, in the exchange that has failed
            self._reported = self.generation
        self._lose(self.generation)
        places = self.places() if kind == "late" else ""
        text = f"{why}{places}\n    rank {self.rank} waited: {pending}"
        self.told = TaskError(text) if kind == "task" else RankError(text)
        return self.told

    @property
    def is_given_up(self) -> bool:
        """Whether another rank failed in an exchange that this one has not begun yet."""
        if self._wire is None or not self._is_unreported:
            return False
        found = self._ask(self._read)
        return found is not None and found[2] > self.exchanged

    @property
    def _is_unreported(self) -> bool:
        """Whether a run has failed on another rank, and this one has not raised that."""
        return self._wire is not None and self.is_lost and self._reported != self.generation

    def _why(self) -> tuple[str, str, int]:
        """Return what ``_read`` does; a rank that fails writes it before it loses its own wire."""
        found = self._ask(self._read)
        if self.hanging:  # others may end because of that, and it is not in the store
            return "rank", self.hanging, 0
        if found is None and self.absent:
            return "rank", next(iter(self.absent.values())), 0
        return found or ("rank", "the connection to another rank broke, and none said why", 0)

    def _read(self) -> tuple[str, str, int] | None:
        """Wait until a rank has written why the wire was lost, or is known to be absent.

        Return the kind of failure, the reason, and the number of exchanges there.
        """
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # the store may have gone with its process
                if self.store.check([f"why/{self.generation}"]):
                    found = json.loads(self.store.get(f"why/{self.generation}"))
                    return found[1], found[2], found[3]
            if self.absent:
                return None
            time.sleep(_NAP)
        return None

    def places(self) -> str:
        """Return lines that say what each rank executed when the wire was lost."""
        found: dict[int, str] = {}

        def read() -> None:
            deadline = time.monotonic() + _PATIENCE
            while len(found) < self.size and time.monotonic() < deadline:
                for rank in {*range(self.size)} - found.keys():
                    if self.store.check([key := f"at/{self.generation}/{rank}"]):
                        found[rank] = self.store.get(key).decode()
                time.sleep(_NAP)

        self._ask(read)
        said = {
            rank: found.get(rank, "something of which it tells nothing")
            for rank in range(self.size)
        }
        executing = ((self.named(rank), what) for rank, what in said.items() if what)
        return "".join(f"\n    {rank} executed {what}" for rank, what in executing)

    def _ask(self, ask: Callable[[], T]) -> T | None:
        """Return what the store is asked for; None if it has gone, or does not answer."""
        answers: list[T] = []

        def asking() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(ask())

        thread = threading.Thread(target=asking, daemon=True, name="store")
        thread.start()
        deadline = time.monotonic() + 2 * _PATIENCE
        while thread.is_alive() and not self.hanging and time.monotonic() < deadline:
            thread.join(_NAP)
        return answers[0] if answers else None

    def _lose(self, generation: int) -> None:
        """Lose this wire, unless it is lost already, and tell the others."""
        with self._guard:
            if self._failed >= generation:
                return
            self._failed = generation
            exchanges = tuple(self._told)
        where = " and ".join(filter(None, (exchange.where() for exchange in exchanges)))
        if self._wire is not None and generation == self.generation:
            self._wire.lose()
        self._watch.tell(generation)
        for exchange in exchanges:
            exchange.lost()
        self._ask(lambda: self.store.set(f"at/{generation}/{self.rank}", where))

    # ---- news of other ranks

    def named(self, rank: int) -> str:
        """Return a rank with its host, if they are several."""
        several = len({*self.hosts}) > 1
        return f"rank {rank} (host {self.hosts[rank]})" if several else f"rank {rank}"

    def _gone(self, rank: int) -> None:
        self._absent(rank, self._ended(rank))

    def _ended(self, rank: int) -> str:
        return f"{self.named(rank)} has gone: its process was ended"

    def _left(self, rank: int) -> None:
        self.left.add(rank)
        self._absent(rank, f"{self.named(rank)} has left: its program has ended")

    def _absent(self, rank: int, why: str) -> None:
        self.absent[rank] = why
        if "gone" in why:
            self.give_up("rank", why)

    def _hangs(self, rank: int) -> None:
        """Give up a rank that does not answer, and tell the others, without the store."""
        if rank in self.absent:
            return
        who = "this rank" if rank == self.rank else self.named(rank)
        self.hanging = (
            f"{who} hangs: its process was stopped or does not answer, or its host is lost"
        )
        self.absent[rank] = self.hanging
        self._watch.tell_hangs(rank)
        self._lose(self.generation)

    def end(self) -> None:
        """Leave the other ranks at the end of the program; warn of a run that failed there."""
        if self._is_unreported:
            what = f"{self._why()[1]}\n    rank {self.rank} had ended its part of the run"
            warnings.warn(what, RuntimeWarning, stacklevel=1)
        self.close()

    def close(self) -> None:
        """Leave the other ranks; they are told."""
        atexit.unregister(self.end)
        self._heartbeat.close()
        self._watch.close()
        if self._wire is not None:
            self._wire.lose()
            for other in self._wire.others:
                other.join()


def _latest(texts: Sequence[str]) -> str:
    """Return the largest number of runs. Raises RankError where numbers of failures differ."""
    told = [text.split() for text in texts]
    for rank, (failures, _) in enumerate(told):
        if failures != told[0][0]:
            what = f"rank {rank} has seen {failures} failures, and rank 0 {told[0][0]}"
            raise RankError(f"{what}; all ranks must make the same calls, in one order")
    return str(max(int(runs) for _, runs in told))


_sessions: weakref.WeakKeyDictionary[Joined, Session] = weakref.WeakKeyDictionary()


def session() -> Session:
    """Return the session of the ranks that this process joined last; made once, by all."""
    member = joined()
    if member not in _sessions:
        _sessions[member] = Session(member)
    return _sessions[member]


def pause() -> None:
    """Wait until all runs have ended that were submitted: the first one makes an agreement."""
    for members in tuple(_sessions.values()):
        members.take_turn(None, None)


def leave() -> None:
    """Close the session of this process, if there is one, and forget the ranks that it joined."""
    for each in list(_sessions.values()):
        each.close()
    _sessions.clear()
    cluster.leave()
