"""What one thread executes alone is one function with local variables, and nobody can tell."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import autosched as asc
from autosched.errors import TaskError

CPU = asc.Machine([asc.Device("cpu")])


def is_local(schedule: asc.Schedule) -> bool:
    return schedule._executor.local is not None


def test_only_what_one_thread_does_is_local() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=(x + 1) * (x + 2))
    for machine, backend, expected in [
        (CPU, "host", True),
        (CPU, "threads", True),
        (CPU, "virtual", False),
        (CPU, "emulated", False),
        (asc.Machine([asc.Device("cpu", streams=2)]), "threads", False),
        (asc.Machine.emulated(gpus=1), "host", True),
    ]:
        with asc.schedule(graph, machine, backend=backend, policy="round_robin") as schedule:
            assert is_local(schedule) is expected, backend
            for _ in range(3):
                assert schedule(x=torch.ones(2))["y"].tolist() == [6.0, 6.0]


def fails(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.sum() > 5:
        raise ValueError("too much")
    return x + y


def failing() -> asc.Graph:
    graph = asc.Graph()
    x = graph.input("x")
    big = x * 2
    graph.output(y=graph.add(fails, big, big[0], name="weak") + 1)
    return graph


def test_an_error_keeps_no_tensor_of_the_run_alive() -> None:
    with asc.schedule(failing(), CPU) as schedule:
        schedule(x=torch.ones(2))
        x = torch.full((2,), 9.0)
        seen = weakref.ref(x)
        with pytest.raises(TaskError) as error:
            schedule(x=x)
        del x
        frames = []
        trace = error.value.__cause__.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
        assert not any("big" in frame.f_locals for frame in frames)
        del error, trace, frames
        gc.collect()
        assert seen() is None
