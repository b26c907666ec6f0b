"""An adaptive lock behaves like a lock of ``threading``."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched._lib import adaptive_lock, extension
from autosched.runtime.threads.tapes import Tape, lock_awaited
from autosched.runtime.threads.thread_team import ThreadTeam

ACTIVE = {"sleeping": 0.0, "active": 10.0}  # seconds of active waiting


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if adaptive_lock._adaptive() is None:
        pytest.skip("there is no compiler")


@pytest.fixture(params=ACTIVE)
def lock(request: pytest.FixtureRequest) -> adaptive_lock.Lock:
    made: adaptive_lock.Lock = adaptive_lock._adaptive()(ACTIVE[request.param])
    return made


CALLS: dict[str, Callable[[Any], Any]] = {
    "try": lambda lock: lock.acquire(blocking=False),
    "try at once": lambda lock: lock.acquire(timeout=0),
    "try for a while": lambda lock: lock.acquire(True, 0.0005),
    "try for less than no time": lambda lock: lock.acquire(True, -2),
    "try for an unknown time": lambda lock: lock.acquire(True, float("nan")),
    "try at once for a while": lambda lock: lock.acquire(False, 1),
    "release": lambda lock: lock.release(),
    "locked": lambda lock: lock.locked(),
}


@given(calls=st.lists(st.sampled_from([*CALLS]), max_size=12))
def test_in_one_thread_it_is_a_lock(calls: list[str]) -> None:
    usual = threading.Lock()
    for seconds in ACTIVE.values():
        adaptive = adaptive_lock._adaptive()(seconds)
        for call in calls:
            assert _end_of(CALLS[call], adaptive) == _end_of(CALLS[call], usual), call
        if usual.locked():
            usual.release()


def _end_of(call: Callable[[Any], Any], lock: Any) -> Any:
    try:
        return call(lock)
    except (RuntimeError, ValueError) as error:
        return type(error)


def test_threads_take_turns(lock: adaptive_lock.Lock) -> None:
    """Each increments a number that it has read before another thread runs."""
    count = 0

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
    for thread in threads:
        thread.join()
    assert count == 800
    assert not lock.locked()


def test_others_execute_python_while_a_thread_waits(lock: adaptive_lock.Lock) -> None:
    lock.acquire()
    waiting = threading.Thread(target=lock.acquire)
    begun = time.perf_counter()
    waiting.start()
    sum(range(100_000))
    taken = time.perf_counter() - begun
    lock.release()
    waiting.join(10)
    assert not waiting.is_alive()
    assert lock.locked()
    assert taken < 5  # seconds; a thread that keeps the global lock waits for 10


def test_a_wait_ends_in_time(lock: adaptive_lock.Lock) -> None:
    lock.acquire()
    begun = time.perf_counter()
    assert not lock.acquire(timeout=0.05)
    assert 0.05 <= time.perf_counter() - begun < 5


@contextlib.contextmanager
def handled_by(handler: Callable[..., None]) -> Iterator[None]:
    """Have a handler of signals."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def alarm(handler: Callable[..., None]) -> Iterator[None]:
    """Call a handler of signals in 50 ms."""
    with handled_by(handler):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        yield


def _interrupt(*_: object) -> None:
    raise InterruptedError


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
def test_a_signal_interrupts_a_thread_that_sleeps() -> None:
    sleeping = adaptive_lock._adaptive()(0.0)
    sleeping.acquire()

    with alarm(_interrupt), pytest.raises(InterruptedError):
        sleeping.acquire()
    assert sleeping.locked()
    sleeping.release()
    assert sleeping.acquire(blocking=False)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
def test_a_signal_during_active_waiting_interrupts_before_the_thread_sleeps() -> None:
    lock = adaptive_lock._adaptive()(0.3)
    lock.acquire()

    begun = time.perf_counter()
    with alarm(_interrupt), pytest.raises(InterruptedError):
        lock.acquire(timeout=12)
    assert time.perf_counter() - begun < 6  # otherwise it is raised when the wait has ended


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
def test_a_signal_that_comes_just_before_a_wait_ends_it(lock: adaptive_lock.Lock) -> None:
    lock.acquire()
    send = getattr(ctypes.CDLL(None), "raise")

    # No Python code is executed between the two, so Python does not look for signals.
    calls = [partial(send, int(signal.SIGALRM)), partial(lock.acquire, timeout=40)]
    begun = time.perf_counter()
    with handled_by(_interrupt), pytest.raises(InterruptedError):
        deque(map(operator.call, calls), maxlen=0)
    assert time.perf_counter() - begun < 20


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
def test_a_signal_without_consequence_does_not_end_a_wait() -> None:
    sleeping = adaptive_lock._adaptive()(0.0)
    sleeping.acquire()
    seen: list[int] = []

    def note(*_: object) -> None:
        seen.append(1)
        sleeping.release()

    with alarm(note):
        assert sleeping.acquire()
    assert seen == [1]


def test_a_thread_in_a_hang_report_is_shown_as_waiting(lock: adaptive_lock.Lock) -> None:
    assert not lock_awaited(lock.acquire)
    lock.acquire()
    assert lock_awaited(lock.acquire)
    assert not lock_awaited(lock.release)


@pytest.mark.parametrize("seconds", ACTIVE.values(), ids=ACTIVE)
def test_a_team_ends_and_can_be_stopped(seconds: float) -> None:
    def new_lock() -> adaptive_lock.Lock:
        made: adaptive_lock.Lock = adaptive_lock._adaptive()(seconds)
        return made

    said: list[str] = []
    tape = Tape(new_lock=new_lock)
    ready = tape.lock()
    tape.add("a", 0, lambda: said.append("a"), ready.release)
    tape.add("b", 1, ready.acquire, lambda: said.append("b"))
    team = ThreadTeam(["a", "b"], lambda: None, new_lock)
    for _ in range(100):
        assert team.run(tape) is None
    assert said == ["a", "b"] * 100

    failing = Tape(new_lock=new_lock)
    never = failing.lock()
    failing.add("a", 0, lambda: 1 / 0, never.release)
    failing.add("b", 1, never.acquire)
    fault = team.run(failing)
    assert isinstance(fault.error, ZeroDivisionError)  # type: ignore[union-attr]
    assert team.afterwards(lambda: None)
    team.close()
    assert not any(thread.is_alive() for thread in map(_by_identity, team.threads) if thread)


def _by_identity(number: int) -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.ident == number), None)


# ---- which locks threads have


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_cores(count: int) -> None:
        monkeypatch.setattr(adaptive_lock, "_cores", lambda: count)

    return set_cores


def _waits_actively(lock: object) -> bool:
    return getattr(lock, "active", 0.0) > 0


def test_threads_wait_actively_if_each_has_a_core(cores: Callable[[int], None]) -> None:
    cores(2)
    made = [adaptive_lock.lock_maker(n)() for n in (1, 2, 3)]
    assert list(map(_waits_actively, made)) == [False, True, False]
    assert [type(lock) is type(made[1]) for lock in made] == [False, True, True]


@pytest.mark.parametrize("count", [1, 2])
def test_schedules_for_two_cpu_streams_have_such_locks(
    cores: Callable[[int], None], count: int
) -> None:
    cores(count)
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=(x @ x).relu() + (x + 1).exp() @ x)
    machine = asc.Machine.local(gpus=0, cpu_streams=2)
    seconds = {task.name: 1.0 for task in graph.tasks}
    with asc.schedule(graph, machine, costs=asc.Costs.table(seconds=seconds)) as made:
        tape = made._executor.tape
        assert tape.locks
        assert all(_waits_actively(lock) == (count == 2) for lock in tape.locks)
        given = torch.eye(3)
        assert made(x=given)["y"].equal(graph.run_serial(x=given)["y"])


def test_without_a_compiler_threads_sleep(
    cores: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: Any) -> Any:
        raise subprocess.CalledProcessError(1, "g++", b"", b"x\nerror: no such header")

    cores(2)
    monkeypatch.setattr(extension, "loaded", fails)
    adaptive_lock._adaptive.cache_clear()
    try:
        with caplog.at_level("INFO", "autosched"):
            for _ in range(2):
                assert adaptive_lock.lock_maker(2) is threading.Lock
    finally:
        adaptive_lock._adaptive.cache_clear()
    (message,) = caplog.messages  # once
    assert "no such header" in message


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_has_locks_of_its_own() -> None:
    code = """
import os, torch, autosched as asc
from autosched._lib import adaptive_lock
adaptive_lock._cores = lambda: 2
graph = asc.Graph()
x = graph.input("x")
graph.output(y=(x @ x).relu() + (x + 1).exp() @ x)
costs = asc.Costs.table(seconds={task.name: 1.0 for task in graph.tasks})
made = asc.schedule(graph, asc.Machine.local(gpus=0, cpu_streams=2), costs=costs)
x = torch.eye(3)
expected = made(x=x)["y"]
assert all(isinstance(lock, adaptive_lock._adaptive()) for lock in made._executor.tape.locks)
child = os.fork()
if not child:
    os._exit(0 if made(x=x)["y"].equal(expected) else 1)
assert os.waitpid(child, 0)[1] == 0
assert made(x=x)["y"].equal(expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
