"""Runs in flight leave what they leave one after another: outputs, inputs, state, random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.errors import CancelledRunError
from autosched.program.program import Wait
from autosched.runtime.backends import Backend
from autosched.runtime.backends.emulated import Emulated
from autosched.runtime.backends.host import Host
from autosched.runtime.backends.virtual import Virtual
from autosched.testing.checking import SharedState
from tests.laws.test_loops import copies, storage
from tests.loop_model import Tensors
from tests.sample_policies import policies
from tests.strategies import given_to, graphs, machines, mix

COSTS = asc.Costs(default_seconds=0, default_nbytes=0)
loops = st.integers(2, 4)


def left(graph: asc.Graph, run: Callable[[Sequence[Tensors]], list[Tensors]], runs: int) -> Any:
    """What runs return and leave behind. State is restored."""
    inputs = given_to(graph, runs)
    state = SharedState(graph)
    torch.manual_seed(3)
    outputs = [*map(copies, run(inputs))]
    found = outputs, [*map(copies, inputs)], state.copies(), torch.get_rng_state()
    state.restore()
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(same, one, other))


def aside(graph: asc.Graph, outputs: list[Tensors], inputs: Sequence[Tensors]) -> list[Tensors]:
    """Return outputs without those in memory of the caller's, which later runs write."""
    constants = [value.tensor for value in graph.sources if value.tensor is not None]
    theirs = {*map(storage, constants)}.union(*(map(storage, each.values()) for each in inputs))
    return [
        {name: item for name, item in each.items() if storage(item) not in theirs}
        for each in outputs
    ]


def compare(
    graph: asc.Graph,
    machine: asc.Machine,
    policy: str,
    in_flight: int,
    backend: str | Backend,
    seed: int,
) -> None:
    runs = in_flight + 3
    with asc.schedule(
        graph, machine, policy=policy, costs=COSTS, backend=backend, in_flight=in_flight
    ) as schedule:
        order = random.Random(seed)

        def serial(inputs: Sequence[Tensors]) -> list[Tensors]:
            found = [copies(graph.run_serial(**each)) for each in inputs]
            kept = [asked.keys() for asked in submitted]
            return [
                {name: each[name] for name in names}
                for each, names in zip(found, kept, strict=True)
            ]

        def overlapped(inputs: Sequence[Tensors]) -> list[Tensors]:
            futures = [schedule.submit(**each) for each in inputs]
            for future in order.sample(futures, len(futures)):
                future.result()
            return aside(graph, [future.result() for future in futures], inputs)

        submitted: list[Tensors] = []
        found = left(graph, overlapped, runs)
        submitted = found[0]
        assert same(left(graph, serial, runs), found), f"{graph}\n{schedule}"


@given(
    policy=policies,
    graph=graphs(state=True),
    machine=machines(),
    in_flight=loops,
    seed=st.integers(0, 99),
)
def test_in_every_interleaving(
    policy: str, graph: asc.Graph, machine: asc.Machine, in_flight: int, seed: int
) -> None:
    compare(graph, machine, policy, in_flight, Virtual(random.Random(seed).choice), seed)


@pytest.mark.parametrize("make", [Host, Emulated])
@settings(max_examples=8)
@given(policy=policies, graph=graphs(state=True), machine=machines(), in_flight=loops)
def test_in_threads(
    make: Callable[[], Backend], policy: str, graph: asc.Graph, machine: asc.Machine, in_flight: int
) -> None:
    compare(graph, machine, policy, in_flight, make(), 0)


class Failing:
    """Calls a function, and raises in one of its calls."""

    def __init__(self, fn: Callable[..., Any], at: int):
        self.fn = fn
        self.at = at
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise ZeroDivisionError
        return self.fn(*args, **kwargs)


@given(
    policy=policies,
    graph=graphs(state=True),
    machine=machines(),
    in_flight=loops,
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_one_run_fails_and_those_without_its_state_go_on(
    policy: str,
    graph: asc.Graph,
    machine: asc.Machine,
    in_flight: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Earlier runs end well; later ones too, or are cancelled if runs share state; then all go well again."""
    graph = graph.snapshot()
    candidates = [task for task in graph.tasks if task.fn is mix]
    assume(candidates)
    runs = in_flight + 3
    failing = data.draw(st.integers(2, runs))  # the first run is checked, and tasks run in order
    chosen = data.draw(st.sampled_from(candidates))
    graph.tasks[chosen.index] = replace(chosen, fn=Failing(mix, failing))
    backend = Virtual(random.Random(seed).choice)
    with asc.schedule(
        graph, machine, policy=policy, costs=COSTS, backend=backend, in_flight=in_flight
    ) as schedule:
        state = SharedState(graph)
        carried = any(isinstance(i, Wait) and i.ago for i in schedule.program)
        carried = carried or any(graph.last_version(value.index) for value in graph.sources)
        futures = [schedule.submit(**inputs) for inputs in given_to(graph, runs)]
        errors = [type(future.exception()) for future in futures]
        good = type(None)
        assert errors[failing - 1] is asc.TaskError
        assert set(errors[: failing - 1]) <= {good}
        assert set(errors[failing:]) <= ({good, CancelledRunError} if carried else {good})
        again = [schedule.submit(**inputs) for inputs in given_to(graph, runs)]
        assert all(future.exception() is None for future in again)
        state.restore()
