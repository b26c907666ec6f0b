"""Training steps in flight do what steps one after another do, bit for bit."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import autosched as asc
from autosched import parallel

MACHINE = asc.Machine.emulated(gpus=2)
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
SYSTEMS = {
    "data": partial(parallel.data_parallel, reduction="sum"),
    "pipeline": partial(parallel.pipeline, chunks=2, schedule="gpipe"),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)
    return nn.Sequential(*layers)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))


def batches(count: int, last: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(1)
    rows = [8] * (count - 1) + [last]
    return [
        (torch.randn(n, 6, generator=source), torch.randn(n, 2, generator=source)) for n in rows
    ]


def trained(system, optimizer, use, model=small, **options):
    """Return what ``use`` returns for a step, and the state of the model and the optimizer."""
    model = model()
    rule = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(7)
    with SYSTEMS[system](model, nn.MSELoss(), rule, MACHINE, **options) as step:
        found = use(step)
        step.wait()
        return found, copy.deepcopy(step.state_dict())


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(("system", "optimizer"), [("data", "adam"), ("pipeline", "sgd")])
def test_steps_in_flight_train_as_steps_one_after_another(system, optimizer):
    given = batches(5, last=4)  # the last one has another plan
    how = {"model": network, "backend": "emulated"}
    expected = trained(system, optimizer, lambda step: [step(*b) for b in given], **how)
    found = trained(system, optimizer, lambda step: list(step.map(given)), in_flight=2, **how)
    assert same(found, expected)


def test_a_learning_rate_counts_for_the_steps_submitted_after_it_is_set():
    def use(step):
        futures = []
        for number, batch in enumerate(given):
            step.optimizer.param_groups[0]["lr"] = 0.1 if number < 3 else 0.05
            futures.append(step.submit(*batch))
        return [future.result() for future in futures]

    given = batches(6)
    expected = trained("data", "sgd", use, backend="host")
    assert same(trained("data", "sgd", use, backend="emulated", in_flight=2), expected)


def test_replicas_follow_changes_after_wait_and_the_norm_is_of_the_last_step():
    def use(step):
        losses = []
        for number, batch in enumerate(given):
            losses.append(step.submit(*batch))
            if number == 2:
                step.wait()
                with torch.no_grad():
                    step.model[0].weight.mul_(0.5)
        found = [future.result() for future in losses]
        return found, step.grad_norm

    given = batches(6)
    options = {"clip_grad_norm": 0.1}
    expected = trained("data", "sgd", use, backend="host", **options)
    assert same(trained("data", "sgd", use, backend="emulated", in_flight=2, **options), expected)


def test_steps_go_on_after_one_that_raised():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.randint(0, 5, (4, 2))
    wrong = torch.full((4, 2), 9)
    target = torch.zeros(4, 2)
    make = parallel.data_parallel
    with make(model, nn.MSELoss(), optimizer, MACHINE, backend="emulated", in_flight=2) as step:
        step(words, target)
        futures = [step.submit(item, target) for item in (words, wrong, words)]
        futures[0].result()
        with pytest.raises(asc.TaskError):
            futures[1].result()
        step.submit(words, target).result()
        step.wait()
        before = step(words, target)
        assert step(words, target) < before


def test_a_step_that_was_closed_or_dropped_leaves_nothing_behind():
    model = small()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = SYSTEMS["data"](model, nn.MSELoss(), optimizer, MACHINE, backend="emulated", in_flight=2)
    (batch,) = batches(1)
    step(*batch)
    futures = [step.submit(*batch) for _ in range(2)]
    step.close()
    assert all(future.done() for future in futures)
    assert torch.isfinite(step.submit(*batch).result())  # by a new plan
    step.wait()
    dropped = weakref.ref(step)
    del step, futures
    assert dropped() is None
    gc.collect()


def test_a_closed_step_keeps_no_tensors_of_replicas():
    model = small()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = SYSTEMS["data"](model, nn.MSELoss(), optimizer, MACHINE, backend="host", in_flight=2)
    (batch,) = batches(1)
    for _ in range(2):
        step.submit(*batch).result()
    copies = [weakref.ref(copy.tensor) for copy in step._copies.values()]
    assert len(copies) == 4
    step.close()
    gc.collect()
    assert not any(copy() is not None for copy in copies)


def test_a_thread_that_waits_also_waits_for_another_one_that_submits(monkeypatch):
    def use(step):
        submit = asc.Schedule.submit_for

        def slowly(*args):
            here.set()
            go.wait(10)
            return submit(*args)

        monkeypatch.setattr(asc.Schedule, "submit_for", slowly)
        futures = []
        thread = threading.Thread(target=lambda: futures.append(step.submit(*batch)))
        thread.start()
        here.wait(10)
        with pytest.raises(asc.RunTimeoutError, match="another thread"):
            step.wait(0.01)
        go.set()
        step.wait()
        thread.join()
        return [future.result() for future in futures]

    here, go = threading.Event(), threading.Event()
    (batch,) = batches(1)
    expected = trained("data", "sgd", lambda step: [step(*batch)], backend="host")
    assert same(trained("data", "sgd", use, backend="host", in_flight=2), expected)


@pytest.mark.parametrize("how", ["run_with", "submit_for"])
def test_a_step_that_was_interrupted_is_waited_for(monkeypatch, how):
    def use(step):
        def interrupted(self, inputs, *_, **__):
            step.future = self.submit(**inputs)
            raise KeyboardInterrupt

        step(*batch)
        with monkeypatch.context() as patch:
            patch.setattr(asc.Schedule, how, interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(*batch) if how == "run_with" else step.submit(*batch)
        step.wait()
        assert step.future.done()
        assert not step._copies  # which tensors it has updated is unknown
        return step(*batch)

    (batch,) = batches(1)
    trained("data", "sgd", use, backend="emulated", in_flight=2)


def test_steps_of_several_ranks_are_not_in_flight(monkeypatch):
    monkeypatch.setattr(asc.Machine, "rank", 0)
    machine = asc.Machine.emulated(gpus=1, hosts=2)
    model = small()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(asc.ScheduleError, match="in_flight= of data_parallel is for one process"):
        parallel.data_parallel(model, nn.MSELoss(), optimizer, machine, in_flight=2)
