"""Compiled functions with several calls in flight, and training steps on the batches of an iterable."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import torch

import autosched as asc

GPUS = asc.Machine.emulated(gpus=2)
COSTS = asc.Costs(default_seconds=0, default_nbytes=0)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator))
        for _ in range(count)
    ]


@torch.no_grad()
def test_a_compiled_module_answers_several_calls_at_a_time() -> None:
    model = network()
    place = {"0": "cuda:0", "2": "cuda:1"}
    with asc.compile(model, GPUS, costs=COSTS, place=place, in_flight=3) as run:
        xs = [x for x, _ in batches(6)]
        futures = [run.submit(x) for x in xs]
        assert all(torch.equal(f.result(), model(x)) for f, x in zip(futures, xs, strict=True))
        assert all(torch.equal(y, model(x)) for y, x in zip(run.map(xs), xs, strict=True))
        found: dict[int, torch.Tensor] = {}
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: run(xs[i])})) for i in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(found[i], model(xs[i])) for i in range(6))
        assert torch.equal(run(torch.ones(5, 4)), model(torch.ones(5, 4)))  # another capture
        run.wait()


def trained(model: torch.nn.Module, clears: bool):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()
        return loss

    return step


def test_a_compiled_step_trains_in_the_order_of_submission() -> None:
    """Each call finds parameters, moments and gradients as the one before has left them."""
    for clears in (True, False):
        model = network()
        other = copy.deepcopy(model)
        eager = trained(other, clears)
        expected = [eager(x, y).item() for x, y in batches(6)]
        with asc.compile(trained(model, clears), GPUS, costs=COSTS, in_flight=3) as step:
            found = [loss.item() for loss in step.map(batches(6))]
        assert found == expected
        assert all(map(torch.equal, model.parameters(), other.parameters()))


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
