"""Strings in a batch that nothing reads do not recapture; others do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autosched as asc

MACHINE = asc.Machine([asc.Device("cpu")])
X = torch.arange(3.0)


def captures(fn: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> int:
    """Return the number of captures of some calls; each gives what the function gives."""
    with asc.compile(fn, MACHINE, backend="host", **options) as run:
        for args in calls:
            found, expected = run(*args), fn(*args)
            pairs = (
                zip(found, expected, strict=True)
                if isinstance(expected, tuple)
                else [(found, expected)]
            )
            assert all(a == b if not isinstance(b, Tensor) else torch.equal(a, b) for a, b in pairs)
        return run.cache_info().misses


def of_images(batch: Any) -> Tensor:
    return batch["x"] * 2


def of_tensors(batch: Any) -> Tensor:
    return sum(item for item in batch.values() if isinstance(item, Tensor)) + 1


@pytest.mark.parametrize("fn", [of_images, of_tensors])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_texts_of_a_batch_that_nothing_reads_may_change(fn: Any, kind: Any) -> None:
    batches = [kind(x=X + i, path=[f"{i}.png", "b"], more={"id": (str(i),)}) for i in range(4)]
    assert captures(fn, *[(batch,) for batch in batches]) == 1


def test_texts_among_the_arguments_that_nothing_reads_may_change() -> None:
    def step(x: Tensor, names: Any, other: Any) -> Tensor:
        return x * 2 if isinstance(names, list) else x

    assert captures(step, (X, ["a"], ("b", "c")), (X, ["b"], ("d", "")), (X, [""], ("e", "b"))) == 1
    assert captures(step, (X, ["a"], ("b",)), (X, ("a",), ("b",)), (X, 3, ("b",))) == 3


READERS: dict[str, Callable[[Any], Any]] = {
    "item": lambda texts: texts[0] == "double",
    "unpacked": lambda texts: dict(zip("ab", texts, strict=False))["a"] == "double",
    "in": lambda texts: "double" in texts,
    "equal": lambda texts: list(texts) == ["double", "b"],
    "joined": lambda texts: "".join(texts) == "doubleb",
    "printed": lambda texts: "double" in f"{texts}",
    "sorted": lambda texts: max(texts) == "double",
    "counted": lambda texts: len(texts) == 2,
    "added": lambda texts: (texts + type(texts)(["c"]))[0] == "double",
    "copied": lambda texts: [*texts][-2] == "double",
    "sliced": lambda texts: texts[::-1][-1] == "double",
    "by the class": lambda texts: type(texts).__mro__[-2].__getitem__(texts, 0) == "double",
    "hashed": lambda texts: {tuple(texts): True}.get(("double", "b"), False),
}


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("reader", READERS)
def test_texts_that_decide_recapture(reader: str, kind: Any) -> None:
    def step(x: Tensor, texts: Any) -> Tensor:
        return x * 2 if READERS[reader](texts) else x

    others = kind(["a"]) if reader == "counted" else kind(["a", "b"])
    assert captures(step, (X, kind(["double", "b"])), (X, others), (X, kind(["double", "b"]))) == 2


def test_texts_that_are_returned_are_those_of_the_call() -> None:
    def step(x: Tensor, texts: Any) -> tuple[Any, ...]:
        return x + 1, texts

    assert captures(step, (X, ["a"]), (X, ["b"])) == 2


def test_only_those_texts_that_a_step_reads_recapture() -> None:
    def step(x: Tensor, read: list[str], unread: list[str]) -> Tensor:
        return x * len(read[0])

    calls = [
        (X, ["a"], ["a"]),
        (X, ["a"], ["bb"]),
        (X, ["bb"], ["a"]),
        (X, ["bb"], ["c"]),
        (X, ["a"], []),
    ]
    assert captures(step, *calls) == 3  # the number of texts may decide


def test_a_step_that_fails_names_its_own_error() -> None:
    def step(x: Tensor, texts: list[str]) -> Tensor:
        return x * int(texts[0])

    with pytest.raises(asc.CaptureError, match="invalid literal for int"):
        asc.compile(step, MACHINE, backend="host")(X, ["a"])
