"""An emulation that this CPU cannot keep up with says so, once, and what would help does."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch

import autosched as asc
from autosched.runtime.backends.emulated import Pace


def late(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(item.message) for item in caught if "cannot keep up" in str(item.message)]


def slow(x: Any) -> Any:
    time.sleep(0.004)
    return x + 0


def sleeper(seconds: float) -> asc.Schedule:
    """Two tasks of 4 ms of real time each, one after another, on a GPU."""
    graph = asc.Graph()
    x = graph.input("x")
    for number in range(2):
        x = graph.add(slow, x, name=f"slow{number}", on="cuda:0", seconds=seconds)
    graph.output(x=graph.add(torch.neg, x))
    return asc.schedule(graph, asc.Machine.emulated(gpus=1))


def test_an_emulation_that_cannot_keep_up_is_said_once() -> None:
    """A run predicted to take 0.1 ms took 8 ms, and nothing said that its measurements are not the machine's."""
    x = torch.ones(2)
    with warnings.catch_warnings(record=True) as caught, sleeper(5e-5) as schedule:
        warnings.simplefilter("always")
        schedule(x=x)
        schedule(x=x)
        assert late(caught) == []
        for _ in range(4):
            schedule(x=x)
        schedule.profile(x=x)
    (said,) = late(caught)
    assert "predicted to take 0.1" in said
    assert "machine.slower(" in said
    assert [item.filename for item in caught if "cannot keep up" in str(item.message)] == [__file__]


def test_an_emulation_that_keeps_up_says_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught, sleeper(0.02) as schedule:
        warnings.simplefilter("always")
        for _ in range(3):
            schedule(x=torch.ones(2))
    assert late(caught) == []


def test_the_factor_is_the_least_of_late_runs_in_a_row_and_one_that_is_in_time_begins_anew() -> (
    None
):
    pace = Pace()

    def run(measured: float) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pace.judge(4.0, measured)
        return late(caught)

    assert [len(run(measured)) for measured in (40.0, 90.0, 5.0, 400.0, 100.0)] == [0] * 5
    (said,) = run(4000.0)
    assert "machine.slower(50)" in said
    assert run(4000.0) == []
