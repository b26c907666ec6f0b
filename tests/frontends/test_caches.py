"""Captures leave nothing in caches, and are not stopped by what is in them."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import autosched as asc
from tests.serial import some

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

    with pytest.raises(asc.CaptureError, match=r"at .*test_caches"):
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
