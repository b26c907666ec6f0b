"""What a step tells people or asks of the computer is told of once, with its line."""

from __future__ import annotations

import builtins
import logging
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import autosched as asc

LOG = logging.getLogger("a step")
MACHINE = asc.Machine.emulated(gpus=1)
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "print": (lambda: print("here"), "print"),
    "open": (lambda: Path(os.devnull).open().close(), "open"),
    "logging": (lambda: LOG.warning("here"), "logging"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_a_graph_does_not_do_are_told_of(name: str) -> None:
    call, said = CALLS[name]

    def step(x: Tensor) -> Tensor:
        call()
        return x * 2

    with pytest.warns(
        RuntimeWarning, match=f"{said}.* is called when 'step' is captured, and not when"
    ) as caught:
        asc.capture(step, torch.ones(2))
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "read",
    [
        time.time,
        time.perf_counter,
        lambda: os.urandom(1)[0],
        lambda: random.SystemRandom().random(),
    ],
)
def test_a_clock_is_refused(read: Callable[[], float]) -> None:
    with pytest.raises(
        asc.CaptureError,
        match=r"(time|perf_counter|urandom) is called at .*calls\.py:\d+, and a gr",
    ):
        asc.capture(lambda x: x * read(), torch.ones(2))


def test_each_line_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: Tensor) -> Tensor:
        print("here")
        print("there")
        return x * 2

    with (
        warnings.catch_warnings(record=True) as caught,
        asc.compile(step, MACHINE, backend="host") as run,
    ):
        warnings.simplefilter("default")
        for rows in (2, 2, 3):
            run(torch.ones(rows))
    lines = step.__code__.co_firstlineno
    assert [(each.filename, each.lineno - lines) for each in caught] == [
        (__file__, 1),
        (__file__, 2),
    ]
    assert capsys.readouterr().out == "here\nthere\n" * 2


def test_calls_of_libraries_and_other_threads_are_no_concern() -> None:
    done, functions = threading.Event(), (print, open, time.time)

    def step(x: Tensor) -> Tensor:
        torch.nn.functional.relu(x, inplace=False)
        worker = threading.Thread(target=lambda: (time.time(), done.set()))
        worker.start()
        worker.join()
        assert (builtins.print, builtins.open, time.time) == functions
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        asc.capture(step, torch.ones(2))
    assert done.is_set()


def test_a_profiler_of_the_user_stays() -> None:
    def profile(*event: object) -> None:
        pass

    def step(x: Tensor) -> Tensor:
        assert sys.getprofile() is profile
        return x * 2 if time.time() > 0 else x

    sys.setprofile(profile)
    try:
        asc.capture(step, torch.ones(2))
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
