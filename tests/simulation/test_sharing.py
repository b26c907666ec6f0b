"""Sharing: tasks on several streams of a device do at most what the device can do."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc

FREE = asc.Link("cuda:0", "cuda:1", 1e30)


def gpu(streams, name="cuda:0", **rates):
    """Return a device that computes one operation in a second."""
    return asc.Device(name, streams, **{"flops_per_second": 1.0, "launch_seconds": 0.0, **rates})


def first(*values):
    return values[0]


def independent(*flops):
    """Return a graph of tasks that need nothing, and the costs with their operations."""
    graph = asc.Graph()
    names = [f"t{i}" for i in range(len(flops))]
    graph.output(*(graph.add(int, graph.input(f"x{name}"), name=name) for name in names))
    return graph, asc.Costs(work={n: asc.Work(f, 0) for n, f in zip(names, flops, strict=True)})


def ends(schedule):
    return {span.name: span.end for span in schedule.simulate().spans if span.kind == "run"}


def test_shares_that_are_given_count_rather_than_work():
    graph, costs = independent(1, 1)
    costs = replace(costs, shares={"t0": 0.5, "t1": 0.5})
    made = asc.schedule(graph, asc.Machine([gpu(2)]), policy="single", costs=costs)
    assert made.makespan == 1


def test_where_tasks_share_a_device_seconds_are_not_whole() -> None:
    """All seconds are whole numbers, and so were bounds, above what a schedule reaches."""
    graph, _ = independent(1, 1)
    shares = {"t0": 0.8, "t1": {"cuda:0": 0.7}}
    costs = replace(asc.Costs.table({"t0": 1.0, "t1": 1.0}), shares=shares)
    made = asc.schedule(graph, asc.Machine([gpu(2)]), costs=costs)
    assert (made.makespan, made.gap) == (pytest.approx(1.5), pytest.approx(0))


def test_tasks_whose_seconds_are_given_and_nothing_else_do_not_disturb_each_other():
    graph, _ = independent(1, 1)
    costs = asc.Costs.table({"t0": 1.0, "t1": 1.0})
    machine = asc.Machine([gpu(2)])
    assert asc.schedule(graph, machine, policy="single", costs=costs).makespan == 1
    busy = replace(costs, work=dict.fromkeys(("t0", "t1"), asc.Work(0.75, 0)))
    assert asc.schedule(graph, machine, policy="single", costs=busy).makespan == 1.5


def test_logical_devices_share_the_gpu_on_which_they_are():
    graph, costs = independent(1, 1)
    devices = [gpu(1, f"cuda:{i}", physical="cuda:0") for i in range(2)]
    machine = asc.Machine(devices, [FREE])
    place = {"t0": "cuda:0", "t1": "cuda:1"}
    made = asc.schedule(graph, machine, costs=costs, place=place)
    assert (made.makespan, made.gap) == (2, 0)
    apart = asc.Machine([replace(device, physical=None) for device in devices], [FREE])
    assert asc.schedule(graph, apart, costs=costs, place=place).makespan == 1


def test_streams_of_a_cpu_have_a_part_each_also_while_others_are_idle():
    graph, costs = independent(1, 3)
    machine = asc.Machine([gpu(2, "cpu")])
    assert ends(asc.schedule(graph, machine, policy="heft", costs=costs)) == {"t0": 2, "t1": 6}
    assert asc.schedule(graph, machine, costs=costs).makespan == 4  # one stream has all threads


def test_without_contention_streams_do_not_disturb_each_other():
    graph, costs = independent(1, 1)
    machine = asc.Machine([gpu(2)], contention=False)
    assert asc.schedule(graph, machine, costs=costs).makespan == 1


def test_auto_uses_no_streams_that_bring_nothing():
    graph, costs = independent(*[1.0] * 8)
    made = asc.schedule(graph, asc.Machine([gpu(4)]), costs=costs)
    assert (made.makespan, made.gap, len(made.program.streams)) == (8, 0, 1)
    small = replace(costs, shares={f"t{i}": 0.25 for i in range(8)})
    made = asc.schedule(graph, asc.Machine([gpu(4)]), costs=small)
    assert (made.makespan, made.gap, len(made.program.streams)) == (2, 0, 4)


def test_runs_in_flight_share_the_device_too():
    """Each run uses both streams one after the other, so two runs could use both all the time."""
    graph = asc.Graph()
    a = graph.add(int, graph.input("x"), name="a")
    b = graph.add(int, graph.input("y"), name="b")
    graph.output(a, graph.add(max, a, b, name="c"))
    costs = asc.Costs(work={name: asc.Work(1, 0) for name in "abc"})
    made = asc.schedule(graph, asc.Machine([gpu(2)]), policy="heft", costs=costs, in_flight=4)
    assert len(made.program.streams) == 2
    assert made.period == 3


def test_explain_says_what_is_guessed_and_what_is_shared():
    graph, costs = independent(1, 1)
    machine = asc.Machine([gpu(2)])
    made = asc.schedule(graph, machine, policy="single", costs=costs)
    text = " ".join(str(made.explain("t0")).split())
    assert "takes 2 s (estimated from its work), 1 s alone: tasks on other streams share" in text
    guessed = asc.schedule(graph, machine, policy="single")
    assert "takes 10 us (a guess)" in str(guessed.explain("t0"))
    given = asc.schedule(graph, machine, costs=asc.Costs.table({"t0": 1.0, "t1": 1.0}))
    assert "takes 1 s\n" in str(given.explain("t0"))


@st.composite
def cases(draw):
    """Draw a graph on devices with streams, with the work of its tasks, and a policy."""
    source = random.Random(draw(st.integers(0, 10**6)))
    graph = asc.Graph()
    values = [graph.input("x", nbytes=source.choice([0, 1, 3]))]
    for i in range(source.randint(1, 14)):
        read = source.sample(values, min(len(values), source.choice([1, 1, 2])))
        on = source.choice([None, "cuda:0", "cuda:0", "cuda:1"])
        values.append(graph.add(first, *read, name=f"t{i}", nbytes=source.choice([0, 1, 2]), on=on))
    graph.output(*values[1:])
    flops = [0, 1, 2, 5]
    costs = asc.Costs(work={t.name: asc.Work(source.choice(flops), 0) for t in graph.tasks})
    times = {name: source.choice([0.0, 0.25]) for name in ("launch_seconds", "issue_seconds")}
    devices = [asc.Device("cpu", 2, 0.5, launch_seconds=1.0)]
    devices += [gpu(source.choice([1, 2, 3]), f"cuda:{i}", **times) for i in range(2)]
    pairs = itertools.combinations(("cpu", "cuda:0", "cuda:1"), 2)
    machine = asc.Machine(devices, [asc.Link(a, b, 2.0, 0.5) for a, b in pairs], imagined=True)
    return graph, machine, costs, source.choice(["single", "heft", "round_robin"])


@given(cases())
def test_each_task_does_its_work_in_its_span(case):
    """Between any two moments at which a task begins or ends, the tasks of a device are slowed down
    by what they take together, if that is more than all of it; in all, each has done its own."""
    graph, machine, costs, policy = case
    timeline = asc.schedule(graph, machine, policy=policy, costs=costs).simulate()
    for device in map(machine.device, machine.accelerators):
        spans = [
            s for s in timeline.spans if s.kind == "run" and s.streams[0].device == device.name
        ]
        alone = {s: costs.task_seconds(graph.task(s.name), device) for s in spans}
        busy = {s: costs.busy_seconds(graph.task(s.name), device) for s in spans}
        done = dict.fromkeys(spans, 0.0)
        moments = sorted({moment for s in spans for moment in (s.start, s.end)})
        for begin, end in itertools.pairwise(moments):
            here = [s for s in spans if s.start < (begin + end) / 2 < s.end]
            factor = max(1.0, sum(busy[s] / alone[s] for s in here))
            for span in here:
                done[span] += (end - begin) / (factor if busy[span] else 1.0)
        assert done == {span: pytest.approx(seconds) for span, seconds in alone.items()}


@given(cases())
def test_bounds_and_more_streams(case):
    """No bound is above a makespan, and with one stream per device ``auto`` is never faster."""
    graph, machine, costs, policy = case
    made = asc.schedule(graph, machine, policy=policy, costs=costs)
    assert max(asc.bounds(asc.Problem(graph, machine, costs)).values()) <= made.makespan * (
        1 + 1e-9
    )
    one = asc.Machine([replace(d, streams=1) for d in machine.devices], machine.links)
    most = asc.schedule(graph, machine, costs=costs).makespan
    assert most <= asc.schedule(graph, one, costs=costs).makespan * (1 + 1e-9)


@given(cases())
def test_emulation_in_virtual_time_has_the_predicted_times(case):
    graph, machine, costs, policy = case
    machine = replace(machine, devices=tuple(replace(d, issue_seconds=0) for d in machine.devices))
    made = asc.schedule(graph, machine, policy=policy, costs=costs, backend="virtual")
    predicted = made.simulate()
    measured = made.profile(x=1)
    assert {(s.name, s.streams): s.end for s in measured.spans} == {
        (s.name, s.streams): pytest.approx(s.end) for s in predicted.spans
    }
