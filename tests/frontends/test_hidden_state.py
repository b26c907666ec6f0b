"""What a step takes from things that give something else each time is refused, by name."""

from __future__ import annotations

import array
import contextvars
import io
import itertools
import queue
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import autosched as asc
from autosched.frontends.side_effects import HiddenStates

NUMBERS = [1.0, 2.0, 3.0]


def halves() -> Iterator[float]:
    number = 1.0
    while True:
        yield number
        number *= 0.5


def delegates() -> Iterator[float]:
    yield from iter(NUMBERS)


def filled(kind: Callable[[], Any]) -> Any:
    made = kind()
    for number in NUMBERS:
        made.put(number)
    return made


TAKES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a generator": (halves, next),
    "a generator over another": (delegates, next),
    "a generator expression": (lambda: (number for number in NUMBERS), next),
    "a list's iterator": (lambda: iter(NUMBERS), next),
    "a range's iterator": (lambda: iter(range(3)), next),
    "a dict's iterator": (lambda: iter({1: 2, 3: 4}), next),
    "zip": (lambda: zip(NUMBERS, NUMBERS, strict=True), lambda it: next(it)[0]),
    "map": (lambda: map(float, NUMBERS), next),
    "enumerate": (lambda: enumerate(NUMBERS), lambda it: next(it)[0] + 1),
    "reversed": (lambda: reversed(NUMBERS), next),
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle(NUMBERS), next),
    "chain": (lambda: itertools.chain(NUMBERS), next),
    "islice": (lambda: itertools.islice(NUMBERS, 2), next),
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


def test_an_iterator_that_a_module_holds_is_named() -> None:
    class Warmed(nn.Module):
        def __init__(self, rates: Iterable[float]) -> None:
            super().__init__()
            self.rates = iter(rates)

        def forward(self, x: Tensor) -> Tensor:
            return x * next(self.rates)

    with pytest.raises(
        asc.CaptureError, match="attribute 'rates' of the module, a list_iterator, may not be"
    ):
        asc.capture(Warmed(NUMBERS), torch.ones(1))


def test_random_numbers_are_put_back() -> None:
    for make in (
        lambda: random.Random(0),
        lambda: numpy.random.default_rng(0),
        lambda: numpy.random.RandomState(0),
    ):
        rng, twin = make(), make()
        states = HiddenStates([rng])
        rng.uniform(0, 1)
        assert states.changed() is rng
        states.restore()
        assert rng.uniform(0, 1) == twin.uniform(0, 1)
