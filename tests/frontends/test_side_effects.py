"""What a step takes from elsewhere, leaves there, or tells people, is refused or told of, by name."""

from __future__ import annotations

import array
import contextvars
import functools
import gc
import io
import itertools
import logging
import os
import queue
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import autosched as asc
from tests.serial import some

# ---- things that give something else each time

NUMBERS = [1.0, 2.0, 3.0]


def halves() -> Iterator[float]:
    number = 1.0
    while True:
        yield number
        number *= 0.5


def filled(kind: Callable[[], Any]) -> Any:
    made = kind()
    for number in NUMBERS:
        made.put(number)
    return made


TAKES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a generator": (halves, next),
    "a list's iterator": (lambda: iter(NUMBERS), next),
    "a range's iterator": (lambda: iter(range(3)), next),
    "zip": (lambda: zip(NUMBERS, NUMBERS, strict=True), lambda it: next(it)[0]),
    "map": (lambda: map(float, NUMBERS), next),
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle(NUMBERS), next),
    "random.Random": (lambda: random.Random(0), lambda rng: rng.random()),
    "NumPy's Generator": (lambda: numpy.random.default_rng(0), lambda rng: float(rng.random())),
    "NumPy's RandomState": (lambda: numpy.random.RandomState(0), lambda rng: rng.rand()),
    "a queue": (lambda: filled(queue.Queue), lambda q: q.get()),
    "a simple queue": (lambda: filled(queue.SimpleQueue), lambda q: q.get()),
    "a file": (lambda: io.StringIO("1\n2\n3\n"), lambda file: float(file.readline())),
    "an array of NumPy's": (
        lambda: numpy.ones(2),
        lambda item: item.__setitem__(0, item[0] + 1) or 1,
    ),
    "bytes": (lambda: bytearray(3), lambda item: item.__setitem__(0, item[0] + 1) or 1),
    "an array": (lambda: array.array("d", NUMBERS), lambda item: item.append(1) or 1),
    "a context variable": (
        lambda: contextvars.ContextVar("v", default=1),
        lambda item: item.set(object()) and 1,
    ),
}


@pytest.mark.parametrize("name", TAKES)
def test_what_a_step_takes_is_refused(name: str) -> None:
    make, take = TAKES[name]
    thing = make()
    with pytest.raises(
        asc.CaptureError,
        match=r"variable 'thing', a \w+, may not be as it was after the step.*\n    at ",
    ):
        asc.capture(lambda x: x * take(thing), torch.ones(1))


@pytest.mark.parametrize("name", [*TAKES][[*TAKES].index("random.Random") :])
def test_what_a_step_only_reaches_is_left_alone(name: str) -> None:
    """Of iterators it is not known whether something was taken from them."""
    thing = TAKES[name][0]()
    asc.capture(lambda x: x * (1 if thing is None else 2), torch.ones(1))


# ---- caches

X = torch.randn(5, 4)
LIBRARY = """
import torch
KEPT, LISTED, LAST = {}, [], None
class Holder: pass
holder = Holder()

def mask(n):
    return torch.full((n, n), float("-inf")).triu(1)

def in_a_dict(n):
    KEPT[n] = mask(n)
    return KEPT[n]

def in_a_list(n):
    LISTED.append(mask(n))
    return LISTED[-1]

def in_an_attribute(n):
    holder.last = mask(n)
    return holder.last

def in_a_global(n):
    global LAST
    LAST = mask(n)
    return LAST
"""


def mask(n: int) -> Tensor:
    return torch.full((n, n), float("-inf")).triu(1)


class Masks:
    @functools.cached_property
    def own(self) -> Tensor:
        return mask(5)

    @functools.lru_cache(4)  # noqa: B019
    def method(self, n: int) -> Tensor:
        return mask(n)


MASKS = Masks()
cached = functools.lru_cache(mask)
forever = functools.cache(mask)


@functools.cache
def within(n: int) -> dict[str, list[Tensor]]:
    return {"masks": [mask(n)]}


CACHES: dict[str, Callable[[int], Tensor]] = {
    "lru_cache": cached,
    "cache": forever,
    "lists and dicts in a cache": lambda n: within(n)["masks"][0],
    "cached_property": lambda n: MASKS.own,
    "lru_cache of a method": lambda n: MASKS.method(n),
}


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Let the garbage collector see the caches of this module, which ``conftest`` has frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


def attending(masked: Callable[[int], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (x @ x.T + masked(x.shape[0])).softmax(-1) @ x


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("name", some(CACHES, "lru_cache", "cached_property"))
def test_what_python_caches_is_computed_in_the_graph_and_eagerly_again(
    name: str, filled: bool
) -> None:
    step = attending(CACHES[name])
    for clear in (cached.cache_clear, forever.cache_clear, within.cache_clear, vars(MASKS).clear):
        clear()
    expected = attending(mask)(X)
    if filled:
        step(X)
    with asc.compile(step, asc.Machine.emulated(gpus=1), policy="single", backend="host") as run:
        assert torch.equal(run(X), expected)
        assert torch.equal(step(X), expected)
        assert torch.equal(run(X), expected)


def test_a_capture_that_fails_leaves_nothing_in_caches() -> None:
    cached.cache_clear()

    def step(x: Tensor) -> float:
        return float((x @ cached(4)).sum())

    with pytest.raises(asc.CaptureError, match=r"at .*test_side_effects"):
        asc.capture(step, X)
    assert type(cached(4)) is Tensor


@pytest.fixture
def library() -> Iterator[types.ModuleType]:
    module = types.ModuleType("a_library")
    module.__file__ = f"{Path(torch.__file__).parents[1]}/a_library.py"
    sys.modules["a_library"] = module
    exec(LIBRARY, vars(module))
    yield module
    del sys.modules["a_library"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("in_a_dict", r"5 of a_library\.KEPT"),
        ("in_a_list", r"a_library\.LISTED"),
        ("in_an_attribute", "'last' of a Holder"),
        ("in_a_global", "'LAST' of module 'a_library'"),
    ],
)
def test_what_a_library_keeps_elsewhere_is_named_and_taken_out(
    library: types.ModuleType, name: str, said: str
) -> None:
    step = attending(getattr(library, name))
    with pytest.raises(
        asc.CaptureError, match=f"cannot be captured: a tensor of the step is left in {said}"
    ):
        asc.capture(step, X)
    assert (library.KEPT, library.LISTED, library.LAST) == ({}, [], None)
    assert getattr(library.holder, "last", None) is None
    assert torch.equal(step(X), attending(mask)(X))


# ---- calls that a graph does not repeat

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
        match=r"(time|perf_counter|urandom) is called at .*effects\.py:\d+, and a gr",
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
