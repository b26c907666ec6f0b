"""Tasks that call schedules: fine, unless these wait for each other; then an error names them."""

from __future__ import annotations

import threading

import pytest
import torch

import autosched as asc
from autosched.runtime.threads.interleaver import Interleaver

GENEROUS = 30  # seconds until a test that hangs fails
TWO_GPUS = asc.Machine.emulated(gpus=2)
COSTS = asc.Costs(default_seconds=0)


_made = []


@pytest.fixture(autouse=True)
def _closed():
    yield
    while _made:
        _made.pop().close()


def calling(name, fn, backend="emulated"):
    """Return a schedule of one task."""
    graph = asc.Graph(name)
    graph.output(y=graph.add(fn, graph.input("x"), on="cuda:0"))
    _made.append(asc.schedule(graph, TWO_GPUS, costs=COSTS, backend=backend))
    return _made[-1]


def ended(call):
    """Call in another thread; return the error that comes, or what is returned."""
    found = []

    def run():
        try:
            found.append(call())
        except asc.AutoschedError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GENEROUS)
    assert not thread.is_alive(), "it hangs"
    return found[0]


@pytest.mark.parametrize("timeout", [None, GENEROUS])
@pytest.mark.parametrize("backend", ["host", "emulated", "virtual"])
def test_schedules_that_call_each_other_are_named(backend, timeout):
    made = {}
    made["a"] = calling("a", lambda x: made["b"](x=x + 1)["y"] if float(x) < 9 else x + 1, backend)
    made["b"] = calling("b", lambda x: made["a"](x=x + 1, timeout=timeout)["y"], backend)
    for _ in range(2):
        error = ended(lambda: made["a"](x=torch.zeros(1), timeout=timeout))
        assert isinstance(error, asc.ScheduleError)
        assert str(error) == (
            "a task of schedule 'b' calls schedule 'a', and a task of 'a' calls 'b': each would wait for the other for "
            "ever; call one of them after the other has ended"
        )
        assert made["a"](x=torch.full((1,), 9.0))["y"].item() == 10


def test_three_schedules_in_a_cycle_are_named():
    made = {}
    made["a"] = calling("a", lambda x: made["b"](x=x)["y"])
    made["b"] = calling("b", lambda x: made["c"](x=x)["y"], "host")
    made["c"] = calling("c", lambda x: made["a"](x=x)["y"], "virtual")
    error = ended(lambda: made["a"](x=torch.zeros(1)))
    assert (
        "a task of schedule 'c' calls schedule 'a', and a task of 'a' calls 'b', and a task of 'b'"
        in str(error)
    )


def test_calls_of_two_threads_that_would_wait_for_each_other_do_not_hang():
    """Neither schedule calls itself, and both have begun when their tasks call the other."""
    both, made = threading.Barrier(2), {}

    def task(other):
        def call(x):
            both.wait(GENEROUS)
            return made[other](x=x)["y"]

        return call

    made["a"], made["b"] = calling("a", task("b")), calling("b", task("a"))
    found, failed = [], threading.Event()

    def run(name):
        try:
            made[name](x=torch.zeros(1))
        except (asc.AutoschedError, threading.BrokenBarrierError) as error:
            found.append(error)
            failed.set()

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in made]
    for thread in threads:
        thread.start()
    assert failed.wait(GENEROUS)
    both.abort()  # who was let in after the other had failed waits here
    for thread in threads:
        thread.join(GENEROUS)
    assert not any(thread.is_alive() for thread in threads)
    assert any("each would wait for the other for ever" in str(error) for error in found)


def test_a_thread_that_is_late_does_not_end_the_next_run(monkeypatch):
    """The spare thread that executes a call with a timeout has ended it, and tidies up later."""
    caller, begun, tidied = threading.current_thread(), threading.Event(), threading.Event()
    clear, drive = Interleaver.clear, Interleaver.drive

    def clear_later(self, *runs):
        is_spare = threading.current_thread() is not caller
        if is_spare:
            begun.wait(GENEROUS)
        clear(self, *runs)
        if is_spare:
            tidied.set()

    def drive_later(self, run):
        if threading.current_thread() is caller:
            begun.set()
            assert tidied.wait(GENEROUS)
        drive(self, run)

    monkeypatch.setattr(Interleaver, "clear", clear_later)
    monkeypatch.setattr(Interleaver, "drive", drive_later)
    schedule = calling("a", lambda x: x + 1, "virtual")
    assert schedule(x=torch.zeros(1), timeout=GENEROUS)["y"].item() == 1
    assert schedule(x=torch.ones(1))["y"].item() == 2
