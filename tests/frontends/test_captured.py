"""Dataclasses and mappings around dicts are containers of tensors, as tuples and dicts are."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc

MACHINE = asc.Machine.emulated(gpus=1)
X = torch.linspace(-1, 1, 6).view(2, 3)
SCALE = 2.0


@dataclass
class Batch:
    x: Tensor
    rest: Any = None
    factor: float = 1.0
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = len(self.x)
        self.seen = False  # no field

    def scaled(self) -> Tensor:
        return self.x * SCALE * self.factor


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    rest: tuple[Any, ...] = ()


def compiled(fn: Any) -> Any:
    return asc.compile(fn, MACHINE, policy="single")


def test_a_dataclass_may_be_a_batch_and_a_result() -> None:
    def step(batch: Batch) -> Frozen:
        inner = batch.rest["inner"].x
        return Frozen(batch.scaled() + inner * batch.rows, (batch.rest["mapping"]["y"] + 1, "done"))

    def batch(x: Tensor, **options: Any) -> Batch:
        rest = {"inner": Frozen(x * 2), "mapping": UserDict(y=x * 3)}
        return Batch(x, rest=rest, **options)

    with compiled(step) as run:
        for factor in (1.0, 1.0, 3.0):
            given = batch(torch.randn(2, 3), factor=factor)
            x = given.x
            found, expected = run(given), step(given)
            assert type(found) is Frozen
            assert found.rest[1] == "done"
            assert torch.equal(found.x, expected.x)
            assert torch.equal(found.rest[0], expected.rest[0])
            assert given.x is x
        assert run.cache_info()[:2] == (1, 2)
    graph = asc.capture(step, batch(X))
    assert graph.input_names == ("batch.x", "batch.rest.inner.x", "batch.rest.mapping.y")
    schedule = asc.schedule(graph, MACHINE)
    assert torch.equal(schedule(batch(X))["result.0"], step(batch(X)).x)


def test_batches_of_tokenizers_are_mappings() -> None:
    transformers = pytest.importorskip("transformers")
    model = nn.Linear(3, 2)

    def step(batch: Any, **others: Any) -> Tensor:
        loss = (model(batch["x"]) - batch.y).square().mean()
        loss.backward()
        return loss.detach()

    with compiled(step) as run:
        for _ in range(2):
            batch = transformers.BatchEncoding({"x": torch.randn(4, 3), "y": torch.randn(4, 2)})
            found, grad = run(batch), model.weight.grad.clone()
            model.zero_grad()
            assert torch.equal(found, step(batch))
            assert torch.equal(grad, model.weight.grad)
            model.zero_grad()
        assert run.cache_info().misses == 1


@pytest.mark.parametrize("kind", [Batch, lambda x: UserDict(x=x)], ids=["dataclass", "mapping"])
def test_a_step_that_changes_its_batch_is_refused(kind: Any) -> None:
    def step(batch: Any) -> Tensor:
        if isinstance(batch, Batch):
            batch.x = batch.x * 2
        else:
            batch["x"] = batch["x"] * 2
        return torch.zeros(())

    given = kind(X)
    with pytest.raises(asc.CaptureError, match=r"'x'.* is a tensor after the step"):
        asc.capture(step, given)
