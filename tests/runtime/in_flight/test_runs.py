"""Submitting runs: futures, order, room, failures, time limits, and what is left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from textwrap import dedent

import pytest
import torch

import autosched as asc
from autosched.errors import CancelledRunError
from autosched.program.program import Free, Wait
from autosched.runtime.backends.virtual import Virtual

GENEROUS = 30  # seconds until a test that hangs fails
GPUS = asc.Machine.emulated(gpus=2)
COSTS = asc.Costs(default_seconds=0, default_nbytes=0)
BACKENDS = ["host", "emulated", "virtual"]


def two_stages(first, second):
    """Return a graph of two tasks on two devices."""
    graph = asc.Graph("stages")
    h = graph.add(first, graph.input("x"), name="first", on="cuda:0")
    graph.output(y=graph.add(second, h, name="second", on="cuda:1"))
    return graph


def counting():
    """Return a graph that adds its input to a total, a constant, and returns a copy of it."""
    graph = asc.Graph("counting")
    x = graph.input("x")
    total = graph.constant(torch.zeros(1), "total")
    graph.add(
        lambda total, x: total.add_(x),
        total,
        x,
        writes=[total],
        outputs=(),
        name="add",
        on="cuda:0",
    )
    graph.output(y=graph.add(torch.clone, total, name="read", on="cuda:1"))
    return graph


def scheduled(graph, in_flight=3, backend="emulated", **options):
    return asc.schedule(graph, GPUS, costs=COSTS, backend=backend, in_flight=in_flight, **options)


def number(i):
    return torch.full((2,), float(i))


def raising(at):
    """A function that raises for one number."""

    def fn(x):
        if x[0] == at:
            raise ValueError(f"no {at}")
        return x + 1

    return fn


# ---- futures


def test_whoever_waits_for_runs_under_way_is_told():
    go = threading.Event()

    def late(x):
        assert go.wait(GENEROUS)
        return raising(2.0)(x)

    with scheduled(two_stages(late, torch.neg), 3) as schedule:
        go.set()
        schedule(x=number(0))
        go.clear()
        runs = [schedule.submit(x=number(i)) for i in (1, 2, 3)]
        called = []
        runs[0].add_done_callback(called.append)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            every = pool.submit(lambda: [*concurrent.futures.as_completed(runs, GENEROUS)])
            until = {"return_when": concurrent.futures.FIRST_EXCEPTION}
            failed = pool.submit(concurrent.futures.wait, runs, GENEROUS, **until)
            assert not concurrent.futures.wait(runs, 0.05).done  # the others have begun, too
            go.set()
            assert sorted(run.number for run in every.result()) == [run.number for run in runs]
            assert runs[1] in failed.result().done
    assert called == [runs[0]]
    assert isinstance(runs[1].exception(), asc.TaskError)


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_can_be_awaited(backend):
    async def serve(schedule):
        async def ask(i):
            return (await schedule.submit(x=number(i)))["y"]

        return await asyncio.gather(*(ask(i) for i in range(5)))

    with scheduled(two_stages(torch.neg, torch.exp), backend=backend) as schedule:
        for i, y in enumerate(asyncio.run(serve(schedule))):
            assert torch.equal(y, torch.exp(-number(i)))


def test_runs_overlap_and_submit_blocks_while_there_is_no_room():
    """The first stage goes on with the next two runs while the second holds the first run."""
    go = threading.Event()
    begun: list[float] = []

    def first(x):
        begun.append(float(x[0]))
        return x + 0

    def second(x):
        assert x[0] < 0 or go.wait(GENEROUS)
        return x + 1

    with scheduled(two_stages(first, second), 3) as schedule:
        schedule(x=number(-1))  # the first run is alone
        runs = [schedule.submit(x=number(i)) for i in range(3)]
        fourth = threading.Thread(target=lambda: runs.append(schedule.submit(x=number(3))))
        fourth.start()
        deadline = time.perf_counter() + GENEROUS
        while len(begun) < 4 and time.perf_counter() < deadline:
            time.sleep(0.001)
        fourth.join(0.05)
        assert begun == [-1.0, 0.0, 1.0, 2.0]
        assert fourth.is_alive()
        assert not any(run.done() for run in runs)
        go.set()
        fourth.join(GENEROUS)
        assert [run.result()["y"][0].item() for run in runs] == [1, 2, 3, 4]


# ---- what programs do not know


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_that_comes_under_another_name_is_waited_for(backend):
    """Run r writes ``a``, whose memory is ``b`` in run r + 1; and parts of one tensor."""
    graph = asc.Graph()
    a, b = graph.inputs("a", "b")
    graph.add(lambda a, b: a.mul_(2).add_(b), a, b, writes=[a], outputs=(), on="cuda:0")
    graph.output(y=graph.add(torch.clone, b, on="cuda:1"))
    with scheduled(graph, 3, backend) as schedule, scheduled(graph, 1, "host") as alone:
        left = []
        for run in (lambda **inputs: alone(**inputs), schedule.submit):
            one, two, three = torch.ones(3), torch.full((3,), 2.0), torch.arange(6.0)
            pairs = [(one, two), (two, one), (one, two), (three[:3], one), (three[1:4], one)] * 2
            runs = [run(a=a, b=b) for a, b in pairs]
            ys = [item if isinstance(item, dict) else item.result() for item in runs]
            left.append([one, two, three, *(y["y"] for y in ys)])
        assert all(map(torch.equal, *left))


def test_a_gradient_that_would_be_lost_is_an_error():
    with scheduled(two_stages(torch.neg, torch.exp)) as schedule:
        x = torch.ones(2, requires_grad=True)
        for _ in range(2):
            y = schedule.submit(x=x).result()["y"]
            with pytest.raises(asc.GradientError):
                y.sum().backward()
        with torch.no_grad():
            assert not schedule.submit(x=x).result()["y"].requires_grad


# ---- failures


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_without_state_go_on_after_one_that_failed(backend, stage):
    fns = [raising(3), torch.neg] if not stage else [torch.neg, raising(-3)]
    with scheduled(two_stages(*fns), 4, backend) as schedule:
        runs = [schedule.submit(x=number(i)) for i in range(8)]
        for i, run in enumerate(runs):
            if i == 3:
                with pytest.raises(asc.TaskError, match=r"ValueError: no -?3"):
                    run.result()
            else:
                assert abs(run.result()["y"][0]) in (i + 1, i - 1)


def adding_until_3(submitted, on, read_on):
    """Return a graph that adds to a total; adding 3 fails when ``submitted`` is set."""
    graph = asc.Graph()
    x = graph.input("x")
    total = graph.constant(torch.zeros(2), "total")

    def add(total, x):
        if x[0] == 3:
            assert submitted.wait(GENEROUS)
            raise ValueError("no 3")
        total += x

    graph.add(add, total, x, writes=[total], outputs=(), name="add", on=on)
    graph.output(y=graph.add(torch.clone, total, name="read", on=read_on))
    return graph


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(3))
def test_runs_that_need_the_state_of_one_that_failed_are_cancelled(backend, seed):
    submitted = threading.Event()
    if backend == "virtual":
        submitted.set()
    graph = adding_until_3(submitted, on="cuda:0", read_on="cuda:1")
    chosen = Virtual(random.Random(seed).choice) if backend == "virtual" else backend
    with scheduled(graph, 3, chosen) as schedule:
        schedule(x=number(0))
        for _ in range(3):
            total_before = float(schedule(x=number(0))["y"][0])
            errors = [schedule.submit(x=number(i)) for i in (1, 3)]
            later = schedule.submit(x=number(5))
            submitted.set()
            assert errors[0].result()["y"][0] == total_before + 1
            with pytest.raises(asc.TaskError, match="ValueError: no 3"):
                errors[1].result()
            with pytest.raises(CancelledRunError, match=f"run {errors[1].number} .* task 'add'"):
                later.result()
            assert schedule(x=number(2))["y"][0] == total_before + 3
            if backend != "virtual":
                submitted.clear()


def test_runs_are_cancelled_where_streams_order_what_they_share():
    """All that touches the total is on one stream, so the program has no wait for another run."""
    submitted = threading.Event()
    graph = adding_until_3(submitted, on="cpu", read_on="cpu")
    with scheduled(graph, policy="single", place={"*": "cpu"}) as schedule:
        assert not any(isinstance(i, Wait) and i.ago for i in schedule.program)
        schedule(x=number(1))
        runs = [schedule.submit(x=number(i)) for i in (3, 5)]
        submitted.set()
        assert [type(run.exception()) for run in runs] == [asc.TaskError, CancelledRunError]
        assert schedule(x=number(1))["y"][0] == 2


def test_a_run_that_has_ended_keeps_no_input_alive():
    graph = asc.Graph()
    w, x = graph.inputs("w", "x")
    graph.add(torch.Tensor.add_, w, x, writes=[w], outputs=(), on="cuda:0")
    with scheduled(graph) as schedule:
        given = torch.zeros(2)
        schedule(w=given, x=number(1))
        x = number(1)
        kept = weakref.ref(x)
        run = schedule.submit(w=given, x=x)
        schedule.wait()
        del x
        assert run.done()
        assert kept() is None
        assert torch.equal(given, number(2))


def test_an_error_of_a_run_keeps_no_tensor_of_others_alive():
    with scheduled(two_stages(raising(3), torch.neg)) as schedule:
        schedule(x=number(0))
        x = number(1)
        kept = weakref.ref(x)
        runs = [schedule.submit(x=x), schedule.submit(x=number(3))]
        schedule.wait()
        del x, runs[0]
        gc.collect()
        assert kept() is None


# ---- time limits, interrupts, the end


def stuck(go):
    """A task that waits for an event where its argument is above 0."""

    def wait(x):
        assert x[0] <= 0 or go.wait(GENEROUS)
        return x + 0

    return wait


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_run_that_is_late_says_where_it_is(in_flight):
    go = threading.Event()
    with scheduled(two_stages(torch.neg, lambda x: stuck(go)(-x)), in_flight) as schedule:
        schedule(x=number(0))
        with pytest.raises(asc.RunTimeoutError, match="runs task 'second'"):
            schedule.submit(x=number(1), timeout=0.5).result()
        go.set()
        assert schedule(x=number(1), timeout=GENEROUS)["y"][0] == 1
        assert schedule.submit(x=number(1)).result(GENEROUS)["y"][0] == 1


@pytest.mark.parametrize("in_flight", [1, 3])
def test_whoever_stops_waiting_leaves_the_run_alone(in_flight):
    go = threading.Event()
    with scheduled(two_stages(stuck(go), torch.neg), in_flight) as schedule:
        schedule(x=number(0))
        run = schedule.submit(x=number(1))
        for ask in (run.result, run.exception):
            with pytest.raises(TimeoutError):
                ask(0.01)
        with pytest.raises(asc.RunTimeoutError):
            schedule.wait(timeout=0.01)
        others = [schedule.submit(x=number(0)) for _ in range(in_flight - 1)]
        with pytest.raises(asc.RunTimeoutError, match="did not begin in time"):
            schedule.submit(x=number(0), timeout=0.01)
        go.set()
        schedule.wait(timeout=GENEROUS)
        assert all(each.done() for each in (run, *others))
        assert run.result(0)["y"][0] == -1


@pytest.mark.parametrize("in_flight", [1, 3])
def test_close_aborts_runs_and_nothing_hangs(in_flight):
    go = threading.Event()
    schedule = scheduled(two_stages(stuck(go), torch.neg), in_flight)
    schedule(x=number(0))
    runs = [schedule.submit(x=number(1)) for _ in range(in_flight)]
    refused = []

    def submit():
        try:
            schedule.submit(x=number(1))
        except asc.ScheduleError as error:
            refused.append(error)

    late = threading.Thread(target=submit)
    late.start()
    threading.Timer(0.05, go.set).start()
    schedule.close()
    for run in runs:
        with pytest.raises(asc.ScheduleError, match="closed"):
            run.result(GENEROUS)
    late.join(GENEROUS)
    assert len(refused) == 1
    with pytest.raises(asc.ScheduleError, match="closed"):
        schedule.submit(x=number(0))
    unused = scheduled(two_stages(torch.neg, torch.neg), in_flight)
    unused.close()
    with pytest.raises(asc.ScheduleError, match="closed"):
        unused.submit(x=number(0))


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("backend", ["host", "emulated"])
def test_a_task_that_submits_to_its_own_schedule_is_refused(backend, in_flight):
    schedules = []

    def again(x):
        return schedules[0].submit(x=x) if x[0] else x + 0

    with scheduled(two_stages(again, torch.neg), in_flight, backend) as schedule:
        schedules.append(schedule)
        schedule(x=number(0))
        with pytest.raises(asc.ScheduleError, match="would wait for itself"):
            schedule(x=number(1))


def test_an_interrupt_leaves_the_schedule_usable(interruptible):
    go = threading.Event()
    with scheduled(two_stages(stuck(go), torch.neg)) as schedule:
        schedule(x=number(0))
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            schedule(x=number(1))
        go.set()
        assert schedule(x=number(1))["y"][0] == -1


def test_profiles_wait_for_runs():
    with scheduled(two_stages(torch.neg, torch.exp)) as schedule:
        runs = [schedule.submit(x=number(i)) for i in range(5)]
        assert len(schedule.profile(x=number(1)).spans) > 2
        assert all(run.done() for run in runs)


def test_a_child_process_has_runs_of_its_own_and_python_ends_with_runs_in_flight():
    code = """
        import atexit, os, threading, torch, autosched as asc

        def scheduled(fn, **facts):
            graph = asc.Graph()
            graph.output(y=graph.add(fn, graph.input("x"), **facts))
            return asc.schedule(graph, asc.Machine.emulated(gpus=1), in_flight=3, costs=asc.Costs(default_seconds=0))

        # ---- a child
        go = threading.Event()
        schedule = scheduled(lambda x: x + 1 if x[0] <= 0 or go.wait(30) else x)
        schedule(x=torch.zeros(1)); schedule(x=torch.zeros(1))
        run = schedule.submit(x=torch.ones(1))
        if not (child := os.fork()):
            try:
                run.result()
            except asc.ScheduleError as error:
                ok = "forked" in str(error) and schedule(x=torch.zeros(1))["y"] == 1
                ok = ok and schedule.submit(x=torch.zeros(1)).result()["y"] == 1
                os._exit(0 if ok else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        go.set()
        assert run.result()["y"] == 2

        # ---- the end
        def slow(x):
            threading.Event().wait(0.05)
            return x + 1

        def work():
            print(sum(outputs["y"] for outputs in schedule.map(range(4))))

        def late():
            print(schedule.submit(x=9).result()["y"])
            runs.extend(schedule.submit(x=i) for i in range(3))      # nobody waits for these

        schedule = scheduled(slow, on="cuda:0", seconds=0.05)
        schedule(x=1)
        atexit.register(late)
        runs = [schedule.submit(x=i) for i in range(3)]
        other = scheduled(slow, on="cuda:0")
        half = other.map(iter(range(100)))
        next(half)
        threading.Thread(target=work).start()                        # goes on when this has ended
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "10\n10\n"), done.stderr
    assert "Error" not in done.stderr


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def tensors_alive():
    # ``isinstance`` asks a proxy for its object, which may be gone.
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("backend", ["host", "emulated"])
def test_many_runs_leave_nothing_behind(backend):
    with scheduled(two_stages(torch.neg, torch.exp), 3, backend) as schedule:
        x = number(1)
        for _ in range(50):
            schedule.submit(x=x)
        schedule.wait()
        threads, files = threading.active_count(), descriptors()
        gc.collect()
        tensors = tensors_alive()
        for _ in range(1000):
            schedule.submit(x=x)
        schedule.wait()
        assert (threading.active_count(), descriptors()) == (threads, files)
        gc.collect()
        assert tensors_alive() <= tensors + 1


def test_virtual_runs_that_nobody_waits_for_are_garbage_with_their_schedule():
    threads = threading.active_count()
    x = number(1)
    schedule = scheduled(two_stages(torch.neg, torch.exp), 3, "virtual")
    schedule(x=x)
    run = schedule.submit(x=x, timeout=GENEROUS)  # with a thread for the deadline
    left = weakref.ref(run), weakref.ref(schedule), weakref.ref(x)
    del run, schedule, x
    gc.collect()
    assert [item() for item in left] == [None] * 3
    for alarm in [each for each in threading.enumerate() if isinstance(each, threading.Timer)]:
        alarm.join(GENEROUS)
    assert threading.active_count() == threads


def test_leftover_memory_is_overwritten_when_a_run_has_ended():
    """The copy of h, which no instruction frees, is freed then; outputs, inputs and constants are kept."""
    seen = []

    def remember(h, c):
        seen.append(h)
        return h + c

    graph = asc.Graph()
    x, c = graph.input("x"), graph.constant(torch.ones(2), "c")
    h = graph.add(torch.neg, x, name="h", on="cuda:0")
    y = graph.add(remember, h, c, name="y", on="cuda:1")
    graph.output(y=y, same=x[:1], copied=graph.add(torch.clone, h, on="cuda:1"))
    with scheduled(graph) as schedule:
        freed = [i for i in schedule.program if isinstance(i, Free) and i.stream.device == "cuda:1"]
        assert not freed
        runs = [schedule.submit(x=number(i)) for i in range(3)]
        for i, run in enumerate(runs):
            outputs = run.result()
            assert torch.equal(outputs["y"], 1 - number(i))
            assert torch.equal(outputs["copied"], -number(i))
            assert outputs["same"][0] == i
        assert all(item.isnan().all() for item in seen[1:])
        assert torch.equal(c.tensor, torch.ones(2))
