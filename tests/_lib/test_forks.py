"""Child processes: a schedule that ran in the parent runs there too, and hangs neither the child nor its end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import autosched as asc

GENEROUS = 30  # seconds until a test that hangs fails
TWO_GPUS = asc.Machine.emulated(gpus=2)
CPUS = asc.Machine([asc.Device("cpu", streams=2)])
MACHINES = {"host": TWO_GPUS, "threads": CPUS, "emulated": TWO_GPUS, "virtual": TWO_GPUS}
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def double(x):
    return x * 2


def scheduled(backend="emulated", fn=double):
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=graph.add(fn, x) + graph.add(fn, x))
    return asc.schedule(graph, MACHINES[backend], policy="round_robin", backend=backend)


def in_child(call):
    """Fork; return whether the call was true in the child."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if call() else 2
        finally:
            os._exit(code)
    end = time.monotonic() + GENEROUS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


@pytest.mark.parametrize("backend", MACHINES)
def test_a_schedule_that_ran_runs_in_a_child_and_in_the_childs_child(backend):
    def right():
        return [
            schedule(x=torch.ones(2), timeout=t)["y"].tolist() for t in (None, GENEROUS, None)
        ] == [[4.0, 4.0]] * 3

    with scheduled(backend) as schedule:
        assert right()
        assert in_child(right)
        assert in_child(lambda: in_child(right) and right())
        assert in_child(lambda: len(schedule.profile(x=torch.ones(2)).spans) > 2)
        assert right()


def test_a_schedule_runs_in_a_child_of_a_process_in_which_another_thread_runs_it():
    begun, go_on = threading.Event(), threading.Event()

    def held(x):
        begun.set()
        assert go_on.wait(GENEROUS)
        return x + 1

    with scheduled(fn=held) as schedule:
        caller = threading.Thread(target=lambda: schedule(x=torch.ones(1)))
        caller.start()
        assert begun.wait(GENEROUS)
        assert in_child(lambda: go_on.set() or schedule(x=torch.ones(1))["y"].item() == 4)
        go_on.set()
        caller.join(GENEROUS)


def test_a_schedule_is_let_go_and_closed_in_a_child():
    made = [scheduled("threads"), scheduled()]
    for schedule in made:
        schedule(x=torch.ones(1))

    def let_go():
        made.pop().close()
        made.clear()
        gc.collect()
        return True

    def refused():
        with pytest.raises(asc.ScheduleError, match="the schedule is closed; make a new one"):
            made[0](x=torch.ones(1))
        return True

    assert in_child(let_go)
    for schedule in made:
        schedule.close()
    assert in_child(refused)


def test_a_task_may_fork_and_its_child_may_call_the_schedule():
    """As a DataLoader with workers does, in a function that is a task."""
    answers = []

    def forking(x):
        if not answers:
            answers.append(None)
            answers.append(in_child(lambda: schedule(x=x)["y"].item() == 4))
        return x + 1

    with scheduled(fn=forking) as schedule:
        schedule(x=torch.ones(1))
    assert answers == [None, True]


class Scheduled(Dataset):
    def __init__(self, schedule):
        self.schedule = schedule

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.schedule(x=torch.full((1,), float(i)))["y"]


def test_workers_of_a_data_loader_run_a_schedule():
    with scheduled() as schedule:
        schedule(x=torch.ones(1))
        batches = DataLoader(
            Scheduled(schedule),
            batch_size=2,
            num_workers=2,
            multiprocessing_context="fork",
            timeout=GENEROUS,
        )
        assert [batch.flatten().tolist() for batch in batches] == [[0, 4], [8, 12]]


def _answer(schedule, queue):
    queue.put(schedule(x=torch.ones(1))["y"].item())


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_schedule_is_given_to_another_process(how):
    context = multiprocessing.get_context(how)
    with scheduled() as schedule:
        schedule(x=torch.ones(1))
        queue = context.Queue()
        process = context.Process(target=_answer, args=(schedule, queue))
        process.start()
        assert queue.get(timeout=2 * GENEROUS) == 4
        process.join()
