"""A lock that is awaited actively behaves like a lock of ``threading``."""

from __future__ import annotations

import operator
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched._lib import active_lock
from autosched._lib.active_lock import ActiveLock, lock_maker

CALLS: dict[str, Any] = {
    "wait": lambda lock: lock.locked() or lock.acquire(),
    "try": lambda lock: lock.acquire(blocking=False),
    "try at once": lambda lock: lock.acquire(timeout=0),
    "try for a while": lambda lock: lock.acquire(True, 0.0005),
    "try for less than no time": lambda lock: lock.acquire(True, -2),
    "try for an unknown time": lambda lock: lock.acquire(True, float("nan")),
    "try at once for a while": lambda lock: lock.acquire(False, 1),
    "release": operator.methodcaller("release"),
    "locked": operator.methodcaller("locked"),
}


@given(calls=st.lists(st.sampled_from([*CALLS]), max_size=12))
def test_in_one_thread_it_is_a_lock(calls: list[str]) -> None:
    active, usual = ActiveLock(), threading.Lock()
    for call in calls:
        assert _end_of(CALLS[call], active) == _end_of(CALLS[call], usual), call


def _end_of(call: Any, lock: Any) -> Any:
    try:
        return call(lock)
    except (RuntimeError, ValueError) as error:
        return type(error)


@pytest.mark.parametrize("seconds", [0.0, 10.0], ids=["sleeping", "active"])
def test_threads_take_turns_and_let_others_run(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Each increments a number that it has read before another thread runs."""
    monkeypatch.setattr(active_lock, "_ACTIVE", seconds)
    lock, count = ActiveLock(), 0
    lock.acquire()

    def add() -> None:
        nonlocal count
        for _ in range(200):
            lock.acquire()
            found = count
            if found % 16 == 0:
                time.sleep(0)
            count = found + 1
            lock.release()

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    sum(range(100_000))  # while they wait
    assert count == 0
    lock.release()
    for thread in threads:
        thread.join(30)
    assert count == 800
    assert not lock.locked()


def test_threads_wait_actively_if_each_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_lock, "_cores", lambda: 4)
    assert [lock_maker(threads) for threads in (1, 2, 4, 5)] == [
        threading.Lock,
        ActiveLock,
        ActiveLock,
        threading.Lock,
    ]
