"""Training steps on the batches of an iterable."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import torch

import autosched as asc

GPUS = asc.Machine.emulated(gpus=2)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator))
        for _ in range(count)
    ]


def test_a_parallel_step_fetches_batches_while_it_trains() -> None:
    model = network()
    other = copy.deepcopy(model)
    loss_fn = torch.nn.MSELoss()
    fetched: list[str] = []

    def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in batches(4):
            fetched.append(threading.current_thread().name)
            yield batch

    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    with (
        asc.parallel.data_parallel(model, loss_fn, optimizers[0], GPUS) as step,
        asc.parallel.data_parallel(other, loss_fn, optimizers[1], GPUS) as calls,
    ):
        losses = [loss.item() for loss in step.map(loader())]
        assert losses == [calls(*batch).item() for batch in batches(4)]
    assert fetched == ["autosched fetching ahead"] * 4
    assert all(map(torch.equal, model.parameters(), other.parameters()))
