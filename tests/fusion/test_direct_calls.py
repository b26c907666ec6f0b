"""Compiled functions that are called directly do what they do inside of Inductor's Python code.

That code is played here: it passes arguments and results on, or does something with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autosched.fusion.direct_calls import (
    DirectCalls,
    Entry,
    Pointers,
    _pointers,
    _tensors,
    written_arguments,
)
from tests.fusion.regions import call, needs_compiler, region

COUNT = 3  # arguments


class Around(NamedTuple):
    """What is done around a function, which writes to some arguments and does not count that."""

    written: frozenset[int] = frozenset()
    counted: frozenset[int] = frozenset()  # whose versions are incremented before
    cloned: frozenset[int] = frozenset()
    order: Sequence[int] = range(COUNT)  # of the arguments, which may contain one twice
    calls: int = 1
    returned: frozenset[int] = frozenset()  # arguments that are results, too
    changed: frozenset[int] = frozenset()  # results that are made again
    dropped: bool = False  # one result is not returned

    @property
    def passes_on(self) -> bool:
        """Whether arguments and results are the function's own."""
        alike = (*self.order,) == (*range(COUNT),) and self.calls == 1
        return alike and not (self.cloned or self.changed or self.dropped)

    def function(self, pointers: Pointers) -> Pointers:
        """Do what kernels do."""
        given = _tensors(pointers)
        for i in self.written:
            given[i].numpy()[...] += 1
        return _pointers([sum(given), given[0] * 2, *(given[i] for i in sorted(self.returned))])

    def artifact(self, entry: Callable[[Pointers], Pointers]) -> Callable[..., list[Tensor]]:
        """Return what calls ``entry`` and does the rest."""

        def run(*args: Tensor) -> list[Tensor]:
            for i in self.counted:
                torch._C._increment_version([args[i]])
            taken = [arg.clone() if i in self.cloned else arg for i, arg in enumerate(args)]
            made = [taken[0] + 1, *taken]  # without a call
            for _ in range(self.calls):
                made = _tensors(entry(_pointers([taken[i] for i in self.order])))
            made = [
                item.view_as(item) if i in self.changed else item for i, item in enumerate(made)
            ]
            return made[1:] if self.dropped else made

        return run


some = st.frozensets(st.integers(0, COUNT - 1), min_size=1)
orders = st.lists(st.integers(0, COUNT - 1), min_size=COUNT, max_size=COUNT + 1)
none = st.just(frozenset[int]())
more = {
    "cloned": some,
    "order": orders,
    "calls": st.sampled_from([0, 2]),
    "changed": st.frozensets(st.integers(0, 1), min_size=1),
    "dropped": st.just(True),
}


kinds = st.permutations(["apart", "parts of one", "of inference mode"])


def around(names: Iterable[str]) -> st.SearchStrategy[Around]:
    """Count writes, and do what these fields of ``Around`` say."""
    always = {"written": some, "counted": some, "returned": st.one_of(none, some)}
    drawn = st.fixed_dictionaries(always | {name: more[name] for name in names})
    return drawn.map(lambda fields: Around(**fields))


def arguments(kind: str = "apart") -> list[Tensor]:
    if kind == "parts of one":  # whose versions are one number
        return list((torch.arange(4.0) + torch.arange(3.0)[:, None]).unbind())
    with torch.inference_mode(kind == "of inference mode"):
        return [torch.arange(4.0) + i for i in range(COUNT)]


def observed(run: Callable[..., Any], args: Sequence[Tensor]) -> Any:
    """Return all that a caller sees of a call: results, arguments, and how often these were written."""
    counts = [arg for arg in args if not arg.is_inference()]
    before = [arg._version for arg in counts]
    made = run(*args)
    which = [next((i for i, arg in enumerate(args) if item is arg), None) for item in made]
    versions = [arg._version - old for arg, old in zip(counts, before, strict=True)]
    return [item.tolist() for item in made], which, [arg.tolist() for arg in args], versions


@pytest.mark.parametrize("names", [(), *([name] for name in more)])
@given(st.data())
def test_a_direct_call_is_made_only_where_nobody_sees_it(
    names: Sequence[str], data: st.DataObject
) -> None:
    made = data.draw(around(names))
    around_it = 0

    def counted(*args: Tensor) -> list[Tensor]:
        nonlocal around_it
        around_it += 1
        return artifact(*args)

    artifact = made.artifact(Entry(lambda: made.function))
    direct, plain = DirectCalls(counted, sorted(made.counted)), made.artifact(made.function)
    with torch.no_grad():
        for kind in data.draw(kinds):
            given, twins = arguments(kind), arguments(kind)
            for _ in range(2):
                assert observed(direct, given) == observed(plain, twins)
    assert around_it == (1 if made.passes_on else 6)


def test_autograd_needs_the_code_around_a_function() -> None:
    seen = []

    def noted(*args: Tensor) -> list[Tensor]:
        seen.append(torch.is_grad_enabled())
        return artifact(*args)

    made = Around()
    artifact = made.artifact(Entry(lambda: made.function))
    direct = DirectCalls(noted, [])
    for enabled in (False, False, True):
        with torch.set_grad_enabled(enabled):
            direct(*arguments())
    assert seen == [False, True]


WRITING: list[tuple[Callable[..., Any], list[int]]] = [
    (lambda x, y: x + y, []),
    (lambda x, y: x + y.add_(1), [1]),
    (lambda x, y: x[0].t().mul_(2).sub_(1) + y, [0]),
    (lambda x, y: x.clone().add_(y), []),
    (lambda x, y: x.split(1)[1].zero_() + y, [0]),
    (lambda x, y: torch._foreach_add_([x, y], 1), [0, 1]),
    (lambda x, y: torch.add(x, 1, out=y), [1]),
    (lambda x, y: x.exp().add_(y) + y.copy_(x), [1]),
]


@pytest.mark.parametrize(("fn", "expected"), WRITING)
def test_written_arguments_are_found(fn: Callable[..., Any], expected: list[int]) -> None:
    traced = make_fx(fn)(torch.ones(2, 2), torch.ones(2, 2))
    assert written_arguments(traced) == expected


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_first_call_that_fails_is_no_trial(error: type[BaseException]) -> None:
    calls = []

    def artifact(*args: Tensor) -> list[Tensor]:
        calls.append(args)
        if len(calls) == 1:
            raise error
        return whole(*args)

    made = Around()
    whole = made.artifact(Entry(lambda: made.function))
    direct = DirectCalls(artifact, [])
    with torch.no_grad():
        with pytest.raises(error):
            direct(*arguments())
        for _ in range(3):
            assert len(direct(*arguments())) == 2
    assert len(calls) == 2


def test_other_threads_are_no_part_of_a_trial() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args: Tensor) -> list[Tensor]:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(30)
        return whole(*args)

    made = Around()
    whole = made.artifact(Entry(lambda: made.function))
    direct, found = DirectCalls(slow, []), []
    other = threading.Thread(target=lambda: found.append(call(direct, *arguments())))
    other.start()
    assert begun.wait(30)
    found += [call(direct, *arguments()) for _ in range(3)]
    go_on.set()
    other.join()
    assert all(torch.equal(each[0], found[0][0]) for each in found)


@needs_compiler
def test_compiled_regions_are_called_directly_also_if_they_were_loaded_before() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(1) * y

    for _ in range(2):  # the second time, Inductor's Python code is loaded already
        made = region(fn, inputs=2)
        x, y = torch.zeros(3), torch.full((3,), 2.0)
        written = x._version
        for number in (1, 2, 3):
            assert torch.equal(call(made, x, y), torch.full((3,), 2.0 * number))
            assert x._version > written
            written = x._version
        kernels = made._variants[0].kernels
        assert kernels is not None
        assert kernels._call._direct is not None  # type: ignore[attr-defined]
        del made, kernels
