"""The processes that torch.distributed joins: how they meet, agree, and learn of a failure.

They meet in torch's default group, which they make from what torchrun says, unless the user has made
it. Two private functions of torch are used, here alone. ``_set_pg_timeout``: torch's groups have one
timeout for connecting and for all that follows, and ranks that wait for a long task must not give
up. It changes that of collectives alone, so whoever waits for a send or a receive says how long.
``_get_default_store: what a rank says when it fails goes through the store of a group that the
user has made, and torch has no public function that returns it.

Agreements are plain data that all gather from all as JSON, in one order of calls; nothing is
unpickled. A process that waits for others looks again and again, so that Control-C ends it, and so
does news of a failure.

gloo wakes who waits for a connection that closes, but not where a part of a copy is under way (torch
2.13), nor who computes, or waits for others. So a thread of each process waits for a word from the
one before it, which says farewell at its end. Whoever fails writes why into the store, and closes
all its connections. That wakes the next one, which reads why, and closes its own. Where nothing is
written, the process before has been killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed

from autosched import errors
from autosched._lib.text import difference
from autosched.errors import AutoschedError, MachineError, RankError, ScheduleError, TaskError

T = TypeVar("T")
_dist: Any = torch.distributed  # some of whose functions have no types
_set_timeout = _dist.distributed_c10d._set_pg_timeout
_default_store = _dist.distributed_c10d._get_default_store
_HOW = (
    "start the program by torchrun --nproc-per-node=2 ..., or call "
    "torch.distributed.init_process_group first"
)
_FOREVER = timedelta(days=1)
LIMIT: timedelta = _dist.default_pg_timeout  # of a send or a receive
_MOMENT = timedelta(milliseconds=50)
_HEAD, _SHORT = 8, 504  # bytes of an agreement: of a length, and of what goes with it
_SPINS = 200  # looks, some 100 us, before a process begins to sleep: to sleep at all takes as long
_let_others_run: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0.0))
_SHORTEST = 2e-5  # seconds between two looks; longer and longer, up to the longest
_LONGEST = 1e-3
_PATIENCE = 0.5  # seconds for whoever failed to write why, and for others to read it
_NEVER_SENT = 2**31 - 1  # a tag


class ProcessGroup:
    """The place of this process among those of torch's default group.

    ``ways`` has two groups of gloo: what goes to higher ranks and what goes to lower ones do not
    wait for each other. ``devices`` has the same for NCCL, if GPUs exchange data directly.
    """

    def __init__(self, store: Any, timeout: float):
        self.rank: int = _dist.get_rank()
        self.size: int = _dist.get_world_size()
        self.store = _dist.PrefixStore("autosched", store)
        self.hosts: Sequence[str] = ()
        self.why: tuple[str, str] | None = None  # the kind of failure, and its text
        self.raised: BaseException | None = None  # the last error that all have raised
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # whose ``lost`` is called
        self.ways = [_group("gloo", timeout) for _ in range(2)]
        self.devices: list[Any] = []
        self._watch = _group("gloo", timeout)
        self._guard = threading.RLock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, daemon=True, name="autosched watch")
        if self.size > 1:
            self._thread.start()

    def join_devices(self, timeout: float) -> None:
        """Make groups of NCCL. Collective."""
        self.devices = self.devices or [_group("nccl", timeout) for _ in range(2)]

    def named(self, rank: int) -> str:
        """Return a rank with its host, if they are several."""
        several = len({*self.hosts}) > 1
        return f"rank {rank} (host {self.hosts[rank]})" if several else f"rank {rank}"

    # ---- agreements

    def gather(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """Return the plain data that a function returns on each rank; raise on all what it raises.

        ``what`` names the call. The function may contain agreements. A rank that fails before one
        of them lets it fail.
        """
        try:
            mine = make()
        except Exception as error:
            if error is not self.raised:
                with contextlib.suppress(AutoschedError):  # it is raised here, and told there
                    self._gathered(what, True, _told(error))
                self.raised = error
            raise
        except BaseException as error:
            self.fail_by(error)
            raise
        return self._gathered(what, False, mine)

    def together(self, what: str, do: Callable[[], T]) -> T:
        """Return what a function returns; raise on all ranks what it raises on one."""
        made: list[T] = []
        self.gather(what, lambda: made.append(do()))
        return made[0]

    def compare(self, call: str, what: str, lines: Sequence[str]) -> None:
        """Raise ScheduleError, on all ranks, unless all describe something in the same lines."""
        first, *others = self.gather(call, lambda: [*lines])
        for rank, own in enumerate(others, 1):
            if found := difference("rank 0", first, f"rank {rank}", own):
                raise ScheduleError(f"rank {rank}: {what} differs from rank 0's{found}")

    def _gathered(self, what: str, has_failed: bool, mine: Any) -> list[Any]:
        """Return what all ranks say, unless one of them has failed, or made another call."""
        self.check()
        try:
            text = json.dumps([what, has_failed, mine]).encode()
            # All send as many bytes: the length and the beginning, and where that is too short, all.
            begun = len(text).to_bytes(_HEAD) + text[:_SHORT]
            texts = self._all(begun.ljust(_HEAD + _SHORT, b"\0"), what)
            lengths = [int.from_bytes(each[:_HEAD]) for each in texts]
            texts = [each[_HEAD:] for each in texts]
            if max(lengths) > _SHORT:
                texts = self._all(text.ljust(max(lengths), b"\0"), what)
            said = [json.loads(each[:n]) for each, n in zip(texts, lengths, strict=True)]
        except AutoschedError:
            raise
        except BaseException as error:  # the others are in the middle of it
            self.fail_by(error)
            raise
        for rank, (_, failed, told) in enumerate(said):
            if failed and rank == self.rank:
                return []  # it is raised where it comes from
            if failed:
                kind, why = told
                self.raised = _error(kind, why, rank)
                raise self.raised
        for rank, (other, _, _) in enumerate(said):
            if other != said[0][0]:
                calls = f"rank {rank} calls {other} where rank 0 calls {said[0][0]}"
                self.raised = RankError(
                    f"{calls}; all ranks must make the same calls, in one order"
                )
                raise self.raised
        return [each for _, _, each in said]

    def _all(self, data: bytes, what: str) -> list[bytes]:
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(row) for _ in range(self.size)]
        self.finish(self.ways[0].allgather([found], [row]), what)
        return [bytes(each.numpy()) for each in found]

    def broadcast(self, row: torch.Tensor, root: int, what: str) -> None:
        """Give all ranks the row of one, in place.

        All others add zero bytes: gloo never ends a broadcast whose rank was killed.
        """
        self.check()
        if self.rank != root:
            row.zero_()
        self.finish(self.ways[0].allreduce([row.view(torch.uint8)]), what)

    def finish(self, work: Any, what: str) -> None:
        """Wait for a collective. Raises the cause where one of the ranks has failed."""
        try:
            looks = 0
            while self.why is None and not work.is_completed():
                looks += 1
                if looks < _SPINS:
                    _let_others_run()
                else:
                    time.sleep(min(_SHORTEST * (looks - _SPINS), _LONGEST))
            if self.why is not None:
                raise self.lost(what)
            work.wait()
        except KeyboardInterrupt as error:
            self.fail_by(error)
            raise
        except RuntimeError as error:
            if isinstance(error, AutoschedError):
                raise
            raise self.lost(what, None, error) from error

    def way(self, source: int, target: int, is_direct: bool = False) -> Any:
        """Return the group for what one rank sends to another, if ``is_direct`` between GPUs."""
        return (self.devices if is_direct else self.ways)[target > source]

    # ---- failures

    def check(self) -> None:
        """Raise RankError if a run has failed before: its connections are lost."""
        if self.why is not None:
            raise RankError(f"a run failed before, and all ranks must start again: {self.why[1]}")

    def fail(self, kind: str, why: str) -> None:
        """Let all ranks fail, for the reason that the first of them gave."""
        with self._guard:
            if self.why is None:
                found = json.dumps([kind, why])
                with contextlib.suppress(RuntimeError):  # the store may have gone with its process
                    found = self.store.compare_set("why", "", found).decode()
                    self.store.set(f"told/{self.rank}", "")
                self.why = tuple(json.loads(found))
                self._close()
                if self.rank == 0:
                    self._let_others_read()

    def fail_by(self, error: BaseException) -> None:
        """Let all ranks fail, because of an error here, unless all have raised it."""
        if error is self.raised:
            return
        is_interrupt = isinstance(error, KeyboardInterrupt)
        what = "was interrupted" if is_interrupt else f"failed: {_told(error)[1]}"
        self.fail("rank", f"{self.named(self.rank)} {what}")

    def lost(
        self, pending: str, peer: int | None = None, error: BaseException | None = None
    ) -> AutoschedError:
        """Return the error where a connection is lost; ``pending`` is what this rank waits for."""
        if self.why is None:
            self.fail("rank", self._cause(peer, error))
        with self._guard:  # until others know
            assert self.why is not None
            kind, why = self.why
        text = f"{why}\n    rank {self.rank} waited: {pending}"
        return TaskError(text) if kind == "task" else RankError(text)

    def _cause(self, peer: int | None, error: BaseException | None) -> str:
        """Return why a connection closed, if its other end did not say."""
        said = str(error).partition(". This")[0]
        if "timed out" in said.lower():
            return f"{self.named(self.rank)} gave up: {said}"
        try:
            if peer is not None and self.store.check([f"left/{peer}"]):
                return f"{self.named(peer)} has left: its program has ended"
            deadline = time.monotonic() + _PATIENCE * (peer is None)
            while time.monotonic() < deadline and self.why is None:
                time.sleep(_LONGEST)
        except RuntimeError:
            return f"{self.named(0)} has gone, or the process with the store of the ranks"
        if peer is None:
            return f"the connection to another rank broke: {said}"
        return f"{self.named(peer)} has gone: its process was ended, or its host is lost"

    def _listen(self) -> None:
        """Wait for a word from the process before this one."""
        before = (self.rank - 1) % self.size
        try:
            self._watch.recv([torch.zeros(1)], before, 0).wait(_FOREVER)
        except RuntimeError as error:
            if not self._is_closed:
                self.lost("", before, error)

    def _close(self) -> None:
        """Close all connections; what waits for them raises, here and in other ranks."""
        self._is_closed = True
        for user in tuple(self.users):
            user.lost()
        for group in (*self.ways, self._watch):
            _lose(group, self.rank, self.size)
        for group in self.devices:
            threading.Thread(target=_abort, args=(group,), daemon=True).start()

    def close(self) -> None:
        """Leave the other ranks; they are told."""
        with self._guard:
            if not self._is_closed and self.size > 1:
                self._is_closed = True
                with contextlib.suppress(RuntimeError):
                    self.store.set(f"left/{self.rank}", "")
                    after = (self.rank + 1) % self.size
                    self._watch.send([torch.zeros(1)], after, 0).wait(_MOMENT)
                self._close()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _let_others_read(self) -> None:
        """Wait a moment until all others know why: the store may end with this process."""
        keys = [f"told/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(_LONGEST)


# ---- meeting


def meet(timeout: float) -> ProcessGroup:
    """Join the ranks of torch.distributed, which is initialised if it is not.

    Raises MachineError where nothing says which ranks there are, and RankError for missing ones.
    """
    try:
        if _dist.is_initialized():
            return ProcessGroup(_default_store(), timeout)
        store, rank, size = next(_dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return join(store, rank, size, timeout)
    except ValueError as error:  # a variable of the environment
        what = f"Machine.cluster() needs other processes: {error}"
        raise MachineError(f"{what}; {_HOW}") from error
    except RuntimeError as error:  # of torch
        if isinstance(error, AutoschedError):
            raise
        raise RankError(f"the ranks did not meet: {error}") from error


def join(store: Any, rank: int, size: int, timeout: float) -> ProcessGroup:
    """Join the processes that share a store of torch.distributed, in its default group."""
    # Processes that torchrun starts again find what earlier ones wrote: so names are new.
    store = _dist.PrefixStore(_token(store, rank, size, timeout), store)
    limit = timedelta(seconds=timeout)
    _dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    _set_timeout(_dist.default_pg_timeout)
    atexit.unregister(destroy)  # once is enough
    atexit.register(destroy)
    return ProcessGroup(store, timeout)


def destroy() -> None:
    """Leave torch's default group."""
    if _dist.is_initialized():
        _dist.destroy_process_group()


def _token(store: Any, rank: int, size: int, timeout: float) -> str:
    """Return a text that these processes share, and that no earlier ones had.

    Each process writes a number that nobody else has, and rank 0 answers the last one of each.
    """
    mine = uuid.uuid4().hex
    store.set(f"hello/{rank}", mine)
    if rank:
        store.wait([f"token/{mine}"], timedelta(seconds=timeout))
        token = str(store.get(f"token/{mine}").decode())
        store.set(f"here/{token}/{rank}", "")
        return token
    deadline = time.monotonic() + timeout
    for other in range(1, size):
        while not store.check([f"here/{mine}/{other}"]):
            if store.check([f"hello/{other}"]):
                store.set(f"token/{store.get(f'hello/{other}').decode()}", mine)
            if time.monotonic() > deadline:
                raise RankError(f"rank {other} did not come within {timeout:g} s")
            time.sleep(_LONGEST)
    return mine


# ---- torch


def _group(backend: str, timeout: float) -> Any:
    """Return a new group of all ranks, which connect in so many seconds."""
    group = _dist.new_group(backend=backend, timeout=timedelta(seconds=timeout))
    _set_timeout(_dist.default_pg_timeout, group)
    return group


def _lose(group: Any, rank: int, size: int) -> None:
    """Close all connections of a group.

    gloo does so where a wait ends too early, which needs one rank that has not closed its own.
    Functions of gloo to abort wake no wait.
    """
    for other in (*range(rank + 1, size), *range(rank)):
        try:
            group.recv([torch.zeros(1)], other, _NEVER_SENT).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def _told(error: BaseException) -> tuple[str, str]:
    """Return the name of the error that other ranks raise, and its text."""
    if isinstance(error, AutoschedError):
        return type(error).__name__, str(error)
    return "ScheduleError", f"{type(error).__name__}: {error}"


def _error(kind: str, text: str, rank: int) -> AutoschedError:
    """Return the error of autosched with this name, of a rank."""
    found: type[AutoschedError] = getattr(errors, kind, ScheduleError)
    return found(text if text.startswith("rank ") else f"rank {rank}: {text}")
