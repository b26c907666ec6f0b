"""Let several processes agree on a text, through a store of torch.distributed.

Each process gives a text, the first one makes an answer from all of them, and all return it. If the
first one raises an error of autosched, all raise it. A process that failed on its way lets the next
agreement fail, so that nobody waits for it. What comes from the store is text and JSON; it is never
unpickled.

A process that waits asks the store again and again. So Control-C ends it at once, and so does news
of a process that has gone. The store may be in a process that hangs, and never answer: it is asked
in threads that are given up.

Processes may leave as soon as they have agreed, for example because all raise the same error. What
they wrote before counts, and the first one, which may have the store, stays until all have read it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from autosched import errors
from autosched.errors import AutoschedError, RankError, ScheduleError, listed

__all__ = ["Meeting", "common_token", "connected", "waited_for"]

T = TypeVar("T")
_SHORTEST = 1e-4  # seconds between two questions to the store; doubled up to the longest
_LONGEST = 1e-2
_PATIENCE = 0.5  # seconds for the store to answer before news of other processes counts
_SOON = 0.05  # seconds after which a process has ended whose connections are closed
_LAST = 1.0  # seconds that the first process stays
_FAILED = ""  # the name of what a process calls that failed before


class _Answer(NamedTuple):
    """Of rank 0: the name of an error, or none; its message, or what all return.

    With an error there are the name of the agreement, and the ranks that did not come to it.
    """

    error: str
    text: str
    name: str = ""
    absent: Sequence[int] = ()


class Meeting:
    """The agreements of ``size`` processes, which all make the same ones in the same order.

    ``store`` has ``get``, ``set``, ``check`` and ``delete_key``. ``alive`` is called while this
    process waits, and may raise. ``timeout`` is in seconds.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float,
        alive: Callable[[], None] = lambda: None,
    ):
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.alive = alive
        self.count = 0  # agreements so far
        self.raised: BaseException | None = None  # the last error that all have raised
        self._last = -1  # the last one that this process has answered

    def agree(self, name: str, mine: str, decide: Callable[[Sequence[str]], str]) -> str:
        """Return what rank 0's ``decide`` makes of the texts of all ranks, in order.

        Raises what ``decide`` raises there, and RankError if ranks are missing, or make another
        agreement than ``name``. One that rank 0 gave up before this rank came is left out, unless
        it has this name.
        """
        answer = self._answered(name, mine, decide)
        while self.rank in answer.absent and answer.name != name:
            answer = self._answered(name, mine, decide)
        if answer.error:
            self.raised = _error(answer.error, answer.text)
            raise self.raised
        return answer.text

    def _answered(self, name: str, mine: str, decide: Callable[[Sequence[str]], str]) -> _Answer:
        """Return the answer of rank 0 to the next texts of all ranks."""
        keys = [f"{self.count}/{rank}" for rank in range(self.size)]
        key = f"{self.count}/answer"
        self._set(keys[self.rank], json.dumps([name, mine]))
        if self.rank == 0:
            answer = self._decided(name, keys, decide)
            self._set(key, json.dumps(answer))
            self._last = self.count
            self._ask(lambda: self._forget(self._last - 1))
        else:
            self.wait([key], 2 * self.timeout, lambda _: "rank 0 did not answer")
            answer = _Answer(*json.loads(self._get(key)))
            self._set(f"{self.count}/read/{self.rank}", "")
        self.count += 1
        return answer

    def fail(self, why: str) -> None:
        """Let the next agreement fail, whichever it is; do not wait for the others.

        They raise ScheduleError when they come to it.
        """
        with contextlib.suppress(AutoschedError):  # the store has gone, and so they will not come
            if self.rank:
                self._set(f"{self.count}/{self.rank}", json.dumps([_FAILED, why]))
            else:
                answer = _Answer("ScheduleError", f"rank 0: {why}")
                self._set(f"{self.count}/answer", json.dumps(answer))
                self._last = self.count
        self.count += 1

    def _decided(
        self, name: str, keys: Sequence[str], decide: Callable[[Sequence[str]], str]
    ) -> _Answer:
        """Return what ``decide`` makes of all texts, or an error."""
        absent: list[int] = []
        try:
            try:
                self.wait(keys, self.timeout, _missing)
            except RankError:
                absent = [rank for rank, key in enumerate(keys) if not self._has([key])]
                raise
            named = [json.loads(self._get(key)) for key in keys]
            for rank, (other, why) in enumerate(named):
                if other == _FAILED:
                    raise ScheduleError(f"rank {rank}: {why}")
            for rank, (other, _) in enumerate(named):
                if other != name:
                    what = f"rank {rank} calls {other} where rank 0 calls {name}"
                    raise RankError(f"{what}; all ranks must make the same calls, in one order")
            return _Answer("", decide([text for _, text in named]))
        except AutoschedError as error:
            return _Answer(type(error).__name__, str(error), name, absent)

    def _forget(self, count: int) -> None:
        """Delete an agreement that all ranks have read, since they have come to the next."""
        ranks = range(self.size)
        for key in [
            f"{count}/answer",
            *(f"{count}/{rank}" for rank in ranks),
            *self._readers(count),
        ]:
            self.store.delete_key(key)

    def _readers(self, count: int) -> list[str]:
        return [f"{count}/read/{rank}" for rank in range(1, self.size)]

    def end(self) -> None:
        """Wait a moment until all processes have read the last answer of this one."""
        self.alive = lambda: None  # those that have left have read it
        if self._last >= 0 and self.size > 1:
            with contextlib.suppress(AutoschedError):
                self.wait(self._readers(self._last), _LAST, _missing)

    def wait(
        self, keys: Sequence[str], timeout: float, late: Callable[[Sequence[str]], str]
    ) -> None:
        """Wait until all keys are in the store.

        Raises RankError with the message of ``late``, which gets the keys that are missing.
        """
        deadline = time.monotonic() + timeout
        pause = _SHORTEST
        while not self._has(keys):
            try:
                self.alive()
            except AutoschedError:
                if self._has(keys):  # written by one that has left since
                    return
                raise
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self._has([key])]
                raise RankError(f"{late(missing)} within {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    # ---- the store

    def _has(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(lambda: self.store.check([*keys])))

    def _get(self, key: str) -> Any:
        return self._ask(lambda: self.store.get(key))

    def _set(self, key: str, text: str) -> None:
        self._ask(lambda: self.store.set(key, text))

    def _ask(self, ask: Callable[[], T]) -> T:
        """Return what the store answers. Raises RankError if it has gone, or does not answer."""
        store = "the process with the store of the ranks"
        try:
            return waited_for(ask, self.alive, self.timeout, f"{store} does not answer")
        except RuntimeError as error:
            if isinstance(error, AutoschedError):
                raise
            self.alive()  # which may know why
            raise RankError(f"{store} has gone: {error}") from error


def waited_for(
    do: Callable[[], T],
    alive: Callable[[], None],
    timeout: float,
    late: str,
    patience: float = _PATIENCE,
) -> T:
    """Return what a function returns, or raise what it raises; it may never end.

    It is called in a thread, which is given up where ``alive`` raises, after ``patience`` seconds,
    or after ``timeout`` seconds: then RankError is raised, which begins with ``late``.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def doing() -> None:
        try:
            results.append(do())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=doing, daemon=True, name="store")
    thread.start()
    thread.join(min(patience, timeout))
    deadline = time.monotonic() + timeout
    while thread.is_alive():
        alive()
        if time.monotonic() > deadline:
            raise RankError(f"{late} within {timeout:g} s")
        thread.join(_LONGEST)
    if errors:
        raise errors[0]
    return results[0]


def connected(make: Callable[[], T], alive: Callable[[], None], timeout: float) -> T:
    """Return a group of all ranks, which a function makes. Raises RankError if one has gone."""
    late = "the ranks did not connect"
    try:
        return waited_for(make, alive, timeout, late, patience=0)
    except RuntimeError as error:
        if isinstance(error, AutoschedError):
            raise
        time.sleep(_SOON)
        alive()  # which may know why
        raise RankError(f"{late}: {error}") from error


def common_token(store: Any, rank: int, size: int, timeout: float) -> str:
    """Return a token that these processes share, and that no earlier ones had.

    A store may still hold what processes wrote that have been restarted since. So each process
    writes a number that nobody else has, and rank 0 answers it.
    """
    meeting = Meeting(store, rank, size, timeout)
    mine = uuid.uuid4().hex
    store.set(f"hello/{rank}", mine)
    if rank:
        meeting.wait([f"token/{mine}"], 2 * timeout, lambda _: "rank 0 did not answer")
        token = store.get(f"token/{mine}").decode()
        store.set(f"here/{token}/{rank}", "")
        return str(token)
    token = uuid.uuid4().hex
    store.set(f"here/{token}/0", "")
    meeting.alive = lambda: _answer(store, size, token)
    meeting.wait([f"here/{token}/{other}" for other in range(size)], timeout, _missing)
    return token


def _answer(store: Any, size: int, token: str) -> None:
    """Answer the number that each process has written last."""
    for rank in range(1, size):
        if store.check([f"hello/{rank}"]):
            store.set(f"token/{store.get(f'hello/{rank}').decode()}", token)


def _missing(keys: Sequence[str]) -> str:
    ranks = listed([key.rpartition("/")[2] for key in keys]).replace("'", "")
    return f"rank {ranks} did not come" if len(keys) == 1 else f"ranks {ranks} did not come"


def _error(kind: str, text: str) -> AutoschedError:
    """Return the error of autosched with this name."""
    found = getattr(errors, kind, AutoschedError)
    is_ours = isinstance(found, type) and issubclass(found, AutoschedError)
    return found(text) if is_ours else AutoschedError(text)
