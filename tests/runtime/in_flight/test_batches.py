"""Mapping a schedule over an iterable."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import autosched as asc
from tests.runtime.in_flight.test_runs import (
    BACKENDS,
    GENEROUS,
    number,
    raising,
    scheduled,
    two_stages,
)


def added():
    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    graph.output(z=graph.add(torch.add, x, y, on="cuda:0"))
    return graph


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_come_in_order(backend, in_flight):
    with scheduled(two_stages(torch.neg, torch.exp), in_flight, backend) as schedule:
        for batches in (
            map(number, range(6)),
            [{"x": number(i)} for i in range(6)],
            [(number(i),) for i in range(6)],
        ):
            for i, outputs in enumerate(schedule.map(batches)):
                assert torch.equal(outputs["y"], torch.exp(-number(i)))


def test_items_are_what_data_loaders_yield():
    data = TensorDataset(torch.arange(8.0), torch.ones(8))
    with scheduled(added()) as schedule:
        for loader in (
            DataLoader(data, batch_size=2),
            DataLoader(data, batch_size=2, num_workers=1),
        ):
            found = [outputs["z"] for outputs in schedule.map(loader)]
            assert torch.equal(torch.cat(found), torch.arange(8.0) + 1)
        pairs = [{"y": number(1), "x": number(i)} for i in range(3)]
        assert [outputs["z"][0] for outputs in schedule.map(pairs)] == [1, 2, 3]
        with pytest.raises(asc.GraphError, match="misses input 'y'"):
            next(schedule.map([number(1)]))


def fetched(count, taken, error=None):
    for i in range(count):
        taken.append(i)
        yield number(i)
    if error is not None:
        raise error


def test_no_more_is_fetched_than_may_be_in_flight():
    taken = []
    with scheduled(two_stages(torch.neg, torch.exp), 3) as schedule:
        results = schedule.map(fetched(100, taken))
        assert taken == []
        for i in range(4):
            next(results)
            schedule.wait()
            assert (
                len(taken) <= i + 1 + 3 + 1
            )  # yielded, in flight or waiting, and one that is fetched
        results.close()
    assert len(taken) < 10


@pytest.mark.parametrize("by", ["the iterable", "a run"])
def test_what_is_raised_comes_after_the_results(by):
    first, error, said, batches = raising(4), asc.TaskError, "no 4", fetched(50, [])
    if by == "the iterable":
        first, error, said = torch.neg, ZeroDivisionError, "mine"
        batches = fetched(4, [], ZeroDivisionError("mine"))
    with scheduled(two_stages(first, torch.exp)) as schedule:
        found = []
        with pytest.raises(error, match=said):
            found.extend(schedule.map(batches))
        assert len(found) == 4
        schedule.wait()
        assert len([*schedule.map(fetched(2, []))]) == 2


def test_a_consumer_that_stops_waits_for_no_slow_iterable():
    go = threading.Event()

    def slow():
        yield number(1)
        go.wait(GENEROUS)
        yield number(2)

    with scheduled(two_stages(torch.neg, torch.exp)) as schedule:
        for _ in schedule.map(slow()):
            go.set()
            break
        schedule(x=number(1))


def test_batches_are_fetched_with_the_callers_gradient_mode():
    seen = []

    def batches():
        seen.append(torch.is_grad_enabled())
        yield torch.ones(2, requires_grad=True)

    with scheduled(two_stages(torch.neg, torch.exp)) as schedule:
        for mode in (True, False):
            with torch.set_grad_enabled(mode):
                (outputs,) = schedule.map(batches())
            assert outputs["y"].requires_grad is mode
    assert seen == [True, False]
