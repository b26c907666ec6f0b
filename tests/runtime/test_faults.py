"""Faults: what users get when tasks fail, hang or are interrupted, and that the schedule works on afterwards.

``test_execute.py`` shows what one failing call looks like; here are all backends, repeated runs, and time.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from textwrap import dedent

import pytest
import torch

import autosched as asc
from autosched.codegen.threads import Emitted
from autosched.runtime.backends.emulated import Emulated
from autosched.runtime.backends.host import Host
from autosched.runtime.backends.virtual import Virtual
from autosched.runtime.execute import Executor
from autosched.runtime.threads import team as teams
from autosched.runtime.threads.runs import Fault, Loop, Run
from autosched.runtime.threads.team import ThreadTeam
from tests.faults import inject
from tests.serial import some

GENEROUS = 30  # seconds until a test that hangs fails
SOON = 10  # seconds in which control is back: half of one in truth, but the computer has other things to do
TWO_GPUS = asc.Machine.emulated(gpus=2)
CPUS = asc.Machine([asc.Device("cpu", streams=2)])
# ``inline`` is a machine on which later runs are calls of a function with local variables.
MACHINES = {
    "host": TWO_GPUS,
    "threads": CPUS,
    "emulated": TWO_GPUS,
    "virtual": TWO_GPUS,
    "inline": asc.Machine([asc.Device("cpu")]),
}
pytestmark = pytest.mark.usefixtures("interruptible", "impatient")
every_backend = pytest.mark.parametrize("backend", MACHINES)


@pytest.fixture
def impatient(monkeypatch):
    """Abandon tasks of aborted runs soon: here they go on until they are told to end."""
    monkeypatch.setattr(teams, "GRACE", 0.1)
    monkeypatch.setattr(teams, "_PATIENCE", 0.2)


def on(backend, graph, check=False, machine=None):
    """Schedule a graph in turns over the devices of the backend's machine."""
    machine = machine or MACHINES[backend]
    costs, kind = asc.Costs(default_seconds=0), backend.replace("inline", "host")
    return asc.schedule(
        graph, machine, policy="round_robin", backend=kind, costs=costs, check=check
    )


def chain(*fns, beside="last"):
    """Return a graph of tasks of which each reads the one before, and of one beside them: so threads are in use.

    Of several CPU streams, the calling thread executes the one beside, if it is first; else the others.
    """
    graph = asc.Graph("chain")
    value = x = graph.input("x")
    if beside == "first":
        graph.add(type, x, name="beside")
    for fn in fns:
        value = graph.add(fn, value)
    if beside == "last":
        graph.add(type, x, name="beside")
    graph.output(y=value)
    return graph


def plus(x):
    return x + 1


class Ledger:
    """Tasks that write down their names as they run."""

    def __init__(self):
        self.ran = []

    def __call__(self, name, fn):
        def noted(*args):
            self.ran.append(name)
            return fn(*args)

        return noted


def net(ledger, other=torch.abs):
    """
    x -- first -- split == (low, high) -- low: left -+
      \\                               -- high ------ join -- y
       other -- z
    """
    graph = asc.Graph("net")
    x = graph.input("x")
    first = graph.add(ledger("first", torch.neg), x, name="first")
    low, high = graph.add(
        ledger("split", lambda v: (v - 1, v + 1)), first, outputs=("low", "high"), name="split"
    )
    left = graph.add(ledger("left", torch.mm), low, first, name="left")
    other = graph.add(ledger("other", other), x, name="other")
    graph.output(y=graph.add(ledger("join", torch.mm), left, high, name="join"), z=other)
    return graph


def slots_are_blank(schedule):
    memory = schedule._executor.memory
    return all(item is blank for item, blank in zip(memory.data, memory._blank, strict=True))


class Held:
    """A task that says that it has begun, and ends when it is told to, unless it is free."""

    def __init__(self):
        self.begun, self.go_on, self.made = threading.Event(), threading.Event(), []

    def __call__(self, x):
        self.begun.set()
        assert self.go_on.wait(GENEROUS)
        result = x + 1
        if isinstance(result, torch.Tensor):
            self.made.append(weakref.ref(result))
        return result


@contextlib.contextmanager
def interrupted_when(begun: threading.Event, times: int = 1) -> Iterator[None]:
    """Send the main thread SIGINT, as Control-C does, once a task is in flight."""

    def shoot():
        assert begun.wait(GENEROUS)
        time.sleep(0.02)  # the main thread reaches its wait, and moments before it are fine too
        for _ in range(times):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    shooter = threading.Thread(target=shoot)
    shooter.start()
    start = time.perf_counter()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        shooter.join()
    assert time.perf_counter() - start < SOON


# ---- who is named, what does not run, and that the schedule works on

WHO = {  # fault -> the task that fails, its cause, what it says; and those that do not run
    "raise": ("split", RuntimeError, "injected", {"left", "join"}),
    "out of memory": ("split", torch.OutOfMemoryError, "injected", {"left", "join"}),
    "count": ("split", ValueError, "1 results where outputs= says 2", {"left", "join"}),
    "shape": (
        "left",
        RuntimeError,
        "shapes cannot be multiplied",
        {"join"},
    ),  # the first that minds
}


@every_backend
@pytest.mark.parametrize("fault", WHO)
@pytest.mark.parametrize("check", [False, True])
def test_the_right_task_is_named_none_behind_it_runs_and_the_next_call_is_right(
    fault, check, backend
):
    name, cause, says, behind = WHO[fault]
    ledger, broken = Ledger(), []
    graph = net(ledger)
    with on(backend, inject(graph, "split", fault, when=lambda: broken), check) as schedule:
        x = torch.arange(4.0).reshape(2, 2)
        right = graph.run_serial(x=x)
        for turn in range(6):
            broken[:] = [True] * (turn % 2)
            ledger.ran.clear()
            if not broken:
                out = schedule(x=x)
                assert all(torch.equal(out[label], right[label]) for label in right)
                assert sorted(ledger.ran) == ["first", "join", "left", "other", "split"]
                continue
            with pytest.raises(asc.TaskError) as error:
                schedule(x=x)
            task, device = graph.task(name), schedule.placement.device[name]
            assert str(error.value).startswith(
                f"task {name!r} on {device} failed: {cause.__name__}: "
            )
            assert says in str(error.value)
            assert str(error.value).endswith(f"added at {task.source}")
            assert type(error.value.__cause__) is cause
            assert not behind & set(ledger.ran)
            assert slots_are_blank(schedule)


# ---- nothing piles up


def census():
    gc.collect()
    tensors = sum(type(item) is torch.Tensor for item in gc.get_objects())
    return threading.active_count(), tensors, len(gc.get_objects())


def depth(error):
    """Return how many frames the tracebacks of an error and its causes have."""
    frames, trace = 0, error.__traceback__
    while trace is not None:
        frames, trace = frames + 1, trace.tb_next
    others = [other for other in (error.__cause__, error.__context__) if other is not None]
    return frames + sum(map(depth, others))


def fail_often(schedule, times, kind, **options):
    x, depths = torch.eye(2), set()
    for _ in range(times):
        try:
            schedule(x=x, **options)
        except kind as error:
            depths.add(depth(error))
        else:
            raise AssertionError("it did not fail")
    return depths


@pytest.mark.parametrize("backend", some(MACHINES, "threads"))
@pytest.mark.parametrize("timed", some([False, True], True))
def test_a_thousand_failing_calls_leave_nothing_behind(backend, timed):
    options = {"timeout": 1000.0} if timed else {}
    with on(backend, inject(net(Ledger()), "left", "raise")) as schedule:
        fail_often(schedule, 20, asc.TaskError, **options)
        before, blocks, locks = (
            census(),
            sys.getallocatedblocks(),
            list(schedule._executor.emitted.locks),
        )
        depths = fail_often(schedule, 1000, asc.TaskError, **options)
        after = census()
        assert after[:2] == before[:2]
        assert after[2] - before[2] < 100
        assert (
            sys.getallocatedblocks() - blocks < 1000
        )  # of which a thousand locks, events or frames would be more
        assert slots_are_blank(schedule)
        assert len(depths) == 1
        team = schedule._executor.team
        assert (team._call, list(schedule._executor.emitted.locks)) == (
            None,
            locks,
        )
        assert all(lock.locked() for lock in locks)


# ---- interrupts


@pytest.mark.parametrize("backend", ["threads", "emulated"])
@pytest.mark.parametrize("timed", [False, True])
def test_an_interrupt_does_not_wait_for_a_long_task_and_the_next_call_does(backend, timed):
    held = Held()
    with on(backend, chain(held, plus)) as schedule:
        with interrupted_when(held.begun):
            schedule(x=torch.ones(1), timeout=GENEROUS if timed else None)
        assert not held.go_on.is_set()
        out = []
        caller = threading.Thread(target=lambda: out.append(schedule(x=torch.full((1,), 5.0))["y"]))
        caller.start()
        time.sleep(0.05)
        assert not out
        held.go_on.set()
        caller.join(GENEROUS)
        assert out == [7]
        assert slots_are_blank(schedule)


@pytest.mark.parametrize("backend", ["threads", "emulated"])
def test_waiting_for_a_task_that_was_let_go_can_be_interrupted_too_and_timed(backend):
    held, again = Held(), threading.Event()
    again.set()
    with on(backend, chain(held, plus, beside="first")) as schedule:
        with interrupted_when(held.begun):
            schedule(x=torch.ones(1))
        with interrupted_when(again):
            schedule(x=torch.ones(1))
        message = "the run did not begin in time, as an aborted run still executes"
        with pytest.raises(asc.RunTimeoutError, match=message):
            schedule(x=torch.ones(1), timeout=0.01)
        held.go_on.set()
        assert schedule(x=torch.ones(1)) == {"y": 3}


@pytest.mark.parametrize("timed", [False, True])
@every_backend
def test_an_interrupt_stops_the_calling_threads_own_task(backend, timed):
    """Where another thread runs it, it is let go; it ends soon after."""
    begun, stop = threading.Event(), []

    def loop(x):
        end = time.perf_counter() + GENEROUS
        begun.set()
        while not stop and time.perf_counter() < end:
            pass
        return x + 1

    def sleep(x):
        if not stop:
            begun.set()
            for _ in range(GENEROUS * 100):
                time.sleep(0.01 if not stop else 0)
        return x + 1

    for task in (loop, sleep):
        begun.clear()
        stop.clear()
        with on(backend, chain(task)) as schedule:
            with interrupted_when(begun):
                schedule(x=1, timeout=GENEROUS if timed else None)
            stop.append(True)
            assert schedule(x=1) == {"y": 2}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["record", "wait", "free"])
@pytest.mark.parametrize("base", [Host, Emulated, Virtual])
def test_an_interrupt_in_a_step_that_is_no_task_is_an_interrupt(base, where, kind):
    """Its step reads nothing, and KeyError once came instead."""
    planted = []

    def struck(*_):
        if planted:
            raise planted.pop()

    methods = {"record": lambda *_: struck, "wait": lambda *_: struck, "free": lambda *_: struck}
    backend = type("Struck", (base,), {where: methods[where]})()
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=graph.add(plus, graph.add(plus, x, on="cuda:0"), on="cuda:1"))
    with asc.schedule(
        graph, TWO_GPUS, backend=backend, costs=asc.Costs(default_seconds=0)
    ) as schedule:
        for _ in range(2):
            planted.append(kind())
            with pytest.raises(kind if kind is KeyboardInterrupt else asc.TaskError):
                schedule(x=1)
            assert schedule(x=1) == {"y": 3}


def failing_first(*then):
    """Return functions: of a thread that fails when the other is in a step, and of that, which goes on."""
    emitted, begun = Emitted(), threading.Event()

    def fail():
        assert begun.wait(GENEROUS)
        raise ValueError("planted")

    def begin():
        begun.set()
        while not team.stopped:
            time.sleep(0.001)
        for step in then:
            step()

    emitted.add("a", 0, fail)
    emitted.add("b", 1, begin)
    team = ThreadTeam(["a", "b"], prepare=lambda: None)
    return team, emitted


def test_no_thread_begins_a_task_after_another_one_s_fault():
    team, emitted = failing_first()
    ran = []
    emitted.write("b", 2, [emitted.line(lambda: ran.append(2), 2)], is_task=True)
    emitted.load()
    team.run(emitted)
    team.close()
    assert ran == []


def is_interrupted(call, moment):
    """Call, and raise KeyboardInterrupt at a moment at which Control-C can raise it, by its number.

    These are the beginnings of functions in Python, and the ends of functions in C. Returns whether
    there was such a moment.
    """
    left = itertools.count(moment, -1)
    raised = []

    def count(_, event, __):
        if event in ("call", "c_return") and not next(left):
            sys.setprofile(None)
            raised.append(event)
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        try:
            sys.setprofile(count)
            call()
        finally:
            sys.setprofile(None)
    return bool(raised)


@pytest.mark.parametrize(
    ("backend", "timeout"),
    [("host", None), ("host", GENEROUS), ("threads", None), ("threads", GENEROUS)],
)
def test_an_interrupt_at_each_moment_of_a_call_leaves_no_lock_locked(backend, timeout):
    """One within a wait for an Event left its lock locked, and the next call did not return."""
    machine = asc.Machine.local(gpus=0, cpu_streams=2)
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=x * 2 + x * 3)
    with asc.schedule(graph, machine, policy="round_robin", backend=backend) as schedule:
        x = torch.ones(1)
        for _ in range(3):
            schedule(x=x, timeout=timeout)
        moment = 0
        while is_interrupted(lambda: schedule(x=x, timeout=timeout), moment):
            assert torch.is_grad_enabled()
            assert schedule(x=x, timeout=GENEROUS) == {"y": 5}
            moment += 1
        assert moment > 50


# ---- timeouts


def test_a_late_run_says_who_waits_for_whom():
    held = Held()
    graph = asc.Graph()
    with graph.on("cuda:0"):
        h = graph.add(held, graph.input("x"), name="held")
    with graph.on("cuda:1"):
        graph.add(plus, h, name="next")
    graph.add(plus, graph.input("other"), name="alone", on="cpu")
    with asc.schedule(
        graph, TWO_GPUS, costs=asc.Costs(default_seconds=0), backend="emulated"
    ) as schedule:
        with pytest.raises(asc.RunTimeoutError) as error:
            schedule(x=1, other=1, timeout=1.0)
        held.go_on.set()
        where = graph.task("held").source
        assert str(error.value) == (
            "the run did not end in time:\n"
            f"    cuda:0/compute runs task 'held' (added at {where})\n"
            "    cuda:0/copy-out waits for e0, which cuda:0/compute records after 'held'\n"
            "    cuda:1/copy-in waits for cuda:0/copy-out, to copy held -> cuda:1/copy-in together\n"
            "    cuda:1/compute waits for e1, which cuda:0/copy-out records after 'copy held -> cuda:1/copy-in'\n"
            "    cpu/compute has ended"
        )
        assert isinstance(error.value, TimeoutError)
        assert schedule(x=1, other=1, timeout=GENEROUS) == {}


@pytest.mark.parametrize("how", ["call", "profile"])
@pytest.mark.parametrize(
    ("backend", "machine"),
    [("host", TWO_GPUS), ("threads", asc.Machine([asc.Device("cpu")])), ("virtual", TWO_GPUS)],
)
def test_a_task_in_the_calling_threads_part_cannot_hold_the_caller(backend, machine, how):
    held = Held()
    with on(backend, chain(plus, held), machine=machine) as schedule:
        call = schedule if how == "call" else schedule.profile
        start = time.perf_counter()
        with pytest.raises(
            asc.RunTimeoutError, match=r"/compute runs task 'Held' \(added at .*test_faults.py:"
        ):
            call(x=torch.ones(1), timeout=0.1)
        assert time.perf_counter() - start < SOON
        held.go_on.set()
        assert schedule(x=torch.ones(1)) == {"y": 3}
        assert slots_are_blank(schedule)


def test_a_fault_counts_more_than_that_others_are_late():
    held = Held()
    graph = asc.Graph()
    graph.add(held, graph.input("x"), on="cuda:0")
    graph.add(lambda: 1 / held.begun.wait(GENEROUS) - 2 / 0, name="bad", on="cuda:1")
    with on("emulated", graph) as schedule:
        with pytest.raises(asc.TaskError, match="task 'bad' on cuda:1 failed: ZeroDivisionError"):
            schedule(x=1, timeout=0.2)
        held.go_on.set()


@pytest.mark.parametrize("seconds", [-1, -0.001, math.nan, "2", [1], 1j, torch.ones(1)])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(seconds):
    with on("host", chain(plus)) as schedule:
        for call in (schedule, schedule.profile):
            with pytest.raises(
                asc.ScheduleError, match="timeout must be a number of seconds, 0 or more, or None"
            ):
                call(x=1, timeout=seconds)


@pytest.mark.parametrize("word", ["repeat", "timeout", "warmup"])
def test_an_input_cannot_be_named_by_a_word_that_runs_take(word):
    graph = asc.Graph()
    graph.output(y=graph.input(word) + 1)
    with pytest.raises(
        asc.ScheduleError, match=f"an input cannot be named '{word}': .*; rename it"
    ):
        asc.schedule(graph, TWO_GPUS)


def test_the_time_covers_the_wait_for_another_threads_call():
    held = Held()
    with on("threads", chain(held, plus)) as schedule:
        other = threading.Thread(target=lambda: schedule(x=1))
        other.start()
        assert held.begun.wait(GENEROUS)
        with pytest.raises(
            asc.RunTimeoutError, match="the run did not begin in time: another thread's call"
        ):
            schedule(x=1, timeout=0.01)
        held.go_on.set()
        other.join()
        assert schedule(x=1, timeout=GENEROUS) == {"y": 3}


def test_a_task_that_was_let_go_cannot_call_its_schedule():
    """Nor could it wait for itself."""
    begun, told = threading.Event(), []

    def call_back(x):
        if not begun.is_set():
            begun.set()
            time.sleep(0.8)  # let go by then
            try:
                schedule(x=1)
            except asc.ScheduleError as error:
                told.append(str(error))
        return x

    with on("host", chain(call_back)) as schedule:
        with pytest.raises(asc.RunTimeoutError):
            schedule(x=1, timeout=0.2)
        assert schedule(x=1) == {"y": 1}
    assert told == ["a task calls the schedule that it is part of, and would wait for itself"]


# ---- the end, with a task that goes on


@pytest.mark.parametrize("ended_by", ["close", "letting go"])
@pytest.mark.parametrize("backend", some(["host", "threads", "emulated", "virtual"], "threads"))
def test_closing_does_not_wait_for_ever_for_a_task_that_was_let_go(backend, ended_by):
    held = Held()
    schedule = on(backend, chain(held, plus))
    with pytest.raises(asc.RunTimeoutError):
        schedule(x=torch.ones(1), timeout=0.2)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("autosched")]
    start = time.perf_counter()
    if ended_by == "close":
        schedule.close()
    else:
        del schedule
        gc.collect()
    assert time.perf_counter() - start < SOON
    held.go_on.set()
    for thread in threads:
        thread.join(GENEROUS)
        assert not thread.is_alive()
    gc.collect()
    assert [ref() for ref in held.made] == [None]


# ---- several callers


@pytest.mark.parametrize("callers", [2, 4])
@every_backend
def test_threads_that_call_at_once_get_their_own_results_and_their_own_faults(backend, callers):
    """Some calls fail, some are late: each caller sees its own alone."""
    wrong, kinds = [], set()

    def moody(x):
        if x.sum() < 0:
            raise ValueError("planted")
        return x * 2

    def call(number):
        chance = random.Random(number)
        for i in range(150):
            value = chance.randrange(1, 1000) * (-1 if number == 0 and i % 3 == 0 else 1)
            timeout = chance.choice([None, None, 0.0, 0.001, GENEROUS])
            try:
                out = schedule(x=torch.full((3,), float(value)), timeout=timeout)["y"]
                kind, fine = (
                    "result",
                    value > 0 and torch.equal(out, torch.full((3,), 2.0 * value + 1)),
                )
            except asc.TaskError:
                kind, fine = "fault", value < 0
            except asc.RunTimeoutError:
                kind, fine = "late", timeout is not None and timeout < 1
            kinds.add(kind)
            if not fine:
                wrong.append((number, i, kind))

    with on(backend, chain(moody, plus)) as schedule:
        threads = [threading.Thread(target=call, args=(number,)) for number in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert {"result", "fault"} <= kinds


@every_backend
def test_closing_while_others_call_ends_their_calls_with_an_error(backend):
    """A thread that was told to end just before it was told to begin once never said that it had ended."""
    chance = random.Random(1)
    for _ in range(15):
        ends = []

        def call(ends=ends):
            try:
                while True:
                    assert schedule(x=1, timeout=None if len(ends) % 2 else GENEROUS) == {"y": 3}  # noqa: B023
            except asc.ScheduleError as error:
                ends.append(str(error))

        schedule = on(backend, chain(plus, plus))
        threads = [threading.Thread(target=call, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(chance.random() * 0.01)
        schedule.close()
        for thread in threads:
            thread.join(GENEROUS)
        assert len(ends) == 3
        assert set(ends) <= {
            "the schedule is closed; make a new one",
            "the schedule was closed while it ran",
        }


# ---- errors that are not what one expects


class CannotSayError(Exception):
    def __str__(self):
        raise ZeroDivisionError


class CannotShow:
    def __repr__(self):
        raise KeyError("no")


@every_backend
def test_errors_and_arguments_that_cannot_be_shown_are_reported_all_the_same(backend):
    def fail(x):
        raise CannotSayError

    with on(backend, chain(fail)) as schedule:
        for _ in range(2):
            with pytest.raises(asc.TaskError) as error:
                schedule(x=CannotShow())
            text = str(error.value)
            assert (
                "failed: CannotSayError: <CannotSayError that cannot be shown: ZeroDivisionError>\n"
                in text
            )
            assert "    arguments: <CannotShow that cannot be shown: KeyError>\n" in text
            assert isinstance(error.value.__cause__, CannotSayError)


class Odd(BaseException):
    pass


@every_backend
@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, KeyboardInterrupt, Odd, StopIteration])
def test_what_is_no_exception_comes_to_the_caller_as_from_a_serial_run(backend, kind):
    """So a task may end the program; a StopIteration is an exception like any other."""
    planted = [kind(7)]

    def leave(x):
        if planted:
            raise planted.pop()
        return x

    with on(backend, chain(leave, plus)) as schedule:
        expected = asc.TaskError if issubclass(kind, Exception) else kind
        with pytest.raises(expected) as error:
            schedule(x=1)
        assert (error.value.__cause__ if expected is asc.TaskError else error.value).args == (7,)
        for _ in range(2):
            assert schedule(x=1) == {"y": 2}


# ---- what CUDA would do


def test_a_wait_that_is_issued_before_its_record_does_not_hold():
    ran = []
    graph = asc.Graph()
    graph.add(lambda: ran.append("early"), name="early", outputs=())
    graph.add(lambda: ran.append("late"), name="late", outputs=())
    program = asc.Program.parse(
        dedent("""
        cuda:0/compute  wait e0
        cuda:0/compute  run early
        cuda:1/compute  run late
        cuda:1/compute  record e0
    """)
    )
    with pytest.raises(asc.ProgramError):
        asc.verify(program, graph)
    executor = Executor(program, graph, TWO_GPUS, Virtual(choose=min), [0.0, 0.0, 1.0, 0.0])
    for _ in range(2):  # in the second run too, when the event has been recorded by the first
        executor({})
        assert executor.backend.clock[program.streams[0]] == 0
    assert ran == ["early", "late"] * 2
    executor.close()


# ---- the interpreter's exit

PRELUDE = """
import gc, os, signal, sys, threading, time
import torch
import autosched as asc

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored

def work(*args):
    return (torch.ones(300, 300) @ torch.ones(300, 300)).sum()

def schedule(backend, task=work):
    machine = asc.Machine.emulated(gpus=2) if backend == "emulated" else asc.Machine([asc.Device("cpu", streams=2)])
    graph = asc.Graph()
    first = [graph.add(task, name=f"work{i}") for i in range(2)]
    graph.output(graph.add(work, *first, name="last"))
    return asc.schedule(graph, machine, policy="round_robin", backend=backend, costs=asc.Costs(default_seconds=0))
"""

EXITS = {
    "called from daemon threads": """
        made = schedule(backend)
        def again(timeout):
            try:
                while True:
                    made(timeout=timeout)
            except asc.ScheduleError:  # closed
                pass
        made()
        for timeout in (None, 60.0):
            threading.Thread(target=again, args=(timeout,), daemon=True).start()
        time.sleep(0.05)
    """,
    "interrupted in a long task": """
        begun = threading.Event()
        def slow(*args):
            begun.set()
            time.sleep(600)
        made = schedule(backend, slow)
        def shoot():
            begun.wait()
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=shoot).start()
        try:
            made()
        except KeyboardInterrupt:
            pass
        else:
            sys.exit("not interrupted")
    """,
}

# Importing torch takes seconds, so one process imports it, and forks those that are to exit. What
# they have in common is no garbage of theirs: to look for it takes most of an exit.
FORKED = """
gc.freeze()
children = []
for _ in range(3):
    if not (child := os.fork()):
        break
    children.append(child)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(f"exit codes {codes}" if any(codes) else 0)
"""


def exits(code, backend, start=""):
    program = f"{PRELUDE}\nbackend = {backend!r}\n{start}{dedent(code)}"
    run = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    return run.returncode, run.stderr


@pytest.mark.parametrize("backend", ["threads", pytest.param("emulated", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", some(EXITS, "interrupted in a long task"))
def test_the_interpreter_exits_with_code_0_while_tasks_go_on(name, backend):
    assert exits(EXITS[name], backend, FORKED) == (0, "")


def test_a_thread_whose_step_never_ends_is_replaced():
    stuck, entered, ended = threading.Event(), threading.Event(), threading.Event()
    said = []
    team = ThreadTeam(["a", "b"], lambda: None)
    emitted = Emitted()
    emitted.add("a", 3, entered.set, stuck.wait)
    emitted.add("b", 4, lambda: said.append("first"), ended.set)
    emitted.load()
    fault = Fault(3, RuntimeError("lost"))
    (thread,) = [each.thread for each in team._workers.values() if each.name == "a"]

    def abandon():
        entered.wait(GENEROUS)
        ended.wait(GENEROUS)  # otherwise the other thread may not have begun
        team.abandon(thread.ident, fault)

    threading.Thread(target=abandon).start()
    assert team.run(emitted) == fault
    emitted = Emitted()
    lock = emitted.lock()
    emitted.add("a", 0, lambda: said.append("second"), lock.release)
    emitted.acquire("b", 1, lock)
    emitted.add("b", 1, lambda: said.append("third"))
    emitted.load()
    assert team.settle() is None
    assert team.run(emitted) is None
    assert said == ["first", "second", "third"]
    team.close()
    stuck.set()
    thread.join(GENEROUS)


def test_a_thread_that_is_interrupted_while_it_leaves_a_run_leaves_it_again():
    """Nobody else would, and the next call would wait for the end of that run for ever."""
    emitted = Emitted()
    emitted.add(None, 0, int)
    emitted.load()
    run = Run(0, emitted, [], Loop(False))
    run.begun.append(True)
    run.left.add(None)  # the interrupt came behind this
    run.leave(None)
    assert run.has_ended
