"""Tables of problems on clusters: the same as if each pair of devices were examined."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched import problem as problem_module
from autosched.machine.device import Network
from autosched.machine.machine import Device, Link, Machine
from autosched.policies.base.ranks import MeanLinks, mean_seconds
from autosched.problem import Problem

networks = st.builds(
    Network,
    st.sampled_from([1e9, 3e9]),
    st.sampled_from([0.0, 7e-5]),
    st.booleans(),
    st.none() | st.just(Network(7e9, 1e-6)),
)


@st.composite
def machines(draw):
    """Draw clusters with equal and unequal hosts, ranks without CPUs, and odd links."""
    devices, links = [], []
    for rank in range(draw(st.integers(2, 4))):
        host = draw(st.sampled_from([None, "a", "b"]))
        kinds = draw(st.lists(st.sampled_from(["cpu", "cuda"]), min_size=1, max_size=3))
        own = [f"{kind}:{10 * rank + i}" for i, kind in enumerate(kinds)]
        issue = draw(st.sampled_from([0.0, 2e-6]))
        devices += [Device(name, issue_seconds=issue, rank=rank, host=host) for name in own]
        rate, latency = draw(st.sampled_from([(9e9, 3e-6), (5e9, 1e-5)]))
        slow = draw(st.sampled_from([None, 2e9]))
        links += [
            Link(own[0], name, rate, latency, slow) for name in own[1:] if draw(st.booleans())
        ]
    if draw(st.booleans()):
        links.append(Link(devices[0].name, devices[-1].name, 1e8))
    network = draw(st.none() | networks)
    return Machine(devices, links, network=network, contention=draw(st.booleans()))


def tables(machine: Machine) -> dict[str, list[float]]:
    """Return the tables of paths."""
    found = problem_module._paths(machine, True)
    return {name: table.tolist() for name, table in found.items()}


@given(machines())
def test_one_pair_of_each_kind_tells_of_all(machine):
    found = tables(machine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem_module, "_kinds", lambda _: [])
        assert tables(machine) == found


def test_only_pairs_of_each_kind_are_examined(monkeypatch):
    """Of a thousand ranks, a few ways between ranks, and those within a rank."""
    seen = []
    real = problem_module._way
    monkeypatch.setattr(problem_module, "_way", lambda *way: seen.append(way) or real(*way))
    problem_module._paths(Machine.emulated(gpus=1, hosts=300), False)
    assert len(seen) <= 4 + 2 * 300


@given(
    st.integers(1, 5).flatmap(
        lambda p: st.lists(
            st.lists(st.booleans(), min_size=p, max_size=p).filter(any), min_size=1, max_size=5
        )
    )
)
def test_mean_links_are_those_of_pairs_in_order(rows):
    mask = np.array(rows)
    count = mask.shape[1]
    devices = [Device(f"cpu:{i}", rank=i) for i in range(count)]
    links = [Link("cpu:0", "cpu:1", 3e9, 1e-6)] if count > 1 else []
    machine = Machine(devices, links, network=Network(7e8, 3e-5))
    graph = asc.Graph()
    graph.output(y=graph.input("x") + 1)
    t = Problem(graph, machine, asc.Costs()).tables
    found = MeanLinks.of(t, mask)
    for a, one in enumerate(mask):
        for b, other in enumerate(mask):
            paths = [
                q * count + p for q in np.flatnonzero(one) for p in np.flatnonzero(other) if p != q
            ]
            latency = sum(t.latency[paths].tolist()) / len(paths) if paths else 0.0
            assert found.latency[found.kind[a], found.kind[b]] == latency
            per_byte = sum((1 / t.rate[paths]).tolist()) / len(paths) if paths else 0.0
            assert found.per_byte[found.kind[a], found.kind[b]] == per_byte


def test_means_are_added_from_left_to_right():
    generator = np.random.default_rng(0)
    seconds = generator.random((3000, 37))
    possible = generator.random((3000, 37)) < 0.7
    possible[:, 0] = True
    expected = [
        sum(row[there].tolist()) / there.sum() for row, there in zip(seconds, possible, strict=True)
    ]
    assert mean_seconds(seconds, possible).tolist() == expected


def test_seconds_depend_on_rates_unless_given_by_name():
    machine = Machine.emulated(gpus=1, hosts=3)
    slow = [replace(d, flops_per_second=1e9) if d.name == "cuda:2" else d for d in machine.devices]
    machine = replace(machine, devices=tuple(slow))
    graph = asc.Graph()
    x = graph.input("x")
    known = graph.add(abs, x, name="known")
    graph.output(
        graph.add(abs, known, name="named", seconds={"cuda:1": 2.0}),
        graph.add(abs, x, name="other"),
    )
    costs = asc.Costs(work={"known": asc.costs.costs.Work(1e9, 1e6)})
    problem = Problem(graph, machine, costs)
    for task, row in zip(graph.tasks, problem.seconds, strict=True):
        assert row == [costs.task_seconds(task, device) for device in machine.devices]
