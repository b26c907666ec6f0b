"""Explanations: a planted fault is named first, its gain is what a schedule without it shows, and the facts add up."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.explanation import Explanation
from autosched.explanation.report import Late
from autosched.policies import single_on
from autosched.timeline.timeline import Timeline
from tests.strategies import DEVICES, graphs, machines

ONE, TWO = asc.Machine.emulated(gpus=1), asc.Machine.emulated(gpus=2)
COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)


def call(*values: Any) -> None:
    """Stand for any function: nothing here runs."""


# ---- planted faults


def unpinned(pageable: bool = True) -> asc.Schedule:
    """Return one whose input, of 50 MB, is copied from pageable memory; the small one does not matter."""
    graph = asc.Graph("unpinned")
    x, w = graph.inputs("x", "w")
    with graph.on("cuda:0"):
        graph.output(y=graph.add(call, x, w, name="y", seconds=1e-3))
    costs = asc.Costs(nbytes={"x": 50e6, "w": 1e4}, pageable=frozenset(["w", *["x"] * pageable]))
    return asc.schedule(graph, ONE, costs=costs)


def tiny(seconds: float = 6e-6) -> asc.Schedule:
    """Return one with 40 tasks in a row that take 5 us to launch, the first 6 us in all."""
    graph = asc.Graph("tiny")
    value = graph.input("x")
    with graph.on("cuda:0"):
        for i in range(40):
            value = graph.add(call, value, name=f"scale{i}", seconds=seconds if i else 6e-6)
        graph.output(y=graph.add(call, value, name="product", seconds=2e-4))
    return asc.schedule(graph, ONE)


def host_read() -> asc.Schedule:
    """Return one in which backward waits for a number that the host reads, from ``loss``."""
    graph = asc.Graph("host read")
    x = graph.input("x")
    with graph.on("cuda:0"):
        loss = graph.add(call, x, name="loss", seconds=2e-3, nbytes=4)
    item = graph.add(call, loss, name="item", on="host", seconds=3e-3)
    with graph.on("cuda:0"):
        graph.output(w=graph.add(call, loss, item, name="backward", seconds=4e-3))
    return asc.schedule(graph, ONE)


def on_one_device(
    on: str | None = "cuda:0", machine: asc.Machine = TWO, **options: Any
) -> asc.Schedule:
    """Return one of eight tasks that could run side by side."""
    graph = asc.Graph("on one device")
    x = graph.input("x")
    towers = [
        graph.add(call, x, name=f"tower{i}", on=on, seconds={"cuda:0": 1e-3, "cuda:1": 1e-3})
        for i in range(8)
    ]
    graph.output(
        y=graph.add(call, *towers, name="sum", on=on, seconds={"cuda:0": 1e-5, "cuda:1": 1e-5})
    )
    return asc.schedule(graph, machine, **options)


def in_line() -> asc.Schedule:
    """Return one that sends a tensor to each of three other devices, one after another."""
    graph = asc.Graph("in line")
    with graph.on("cuda:0"):
        made = [graph.add(call, name=f"h{i}", seconds=1e-4, nbytes=25e6) for i in range(3)]
    for i, value in enumerate(made):
        with graph.on(f"cuda:{i + 1}"):
            graph.output(**{f"y{i}": graph.add(call, value, name=f"y{i}", seconds=1e-3)})
    return asc.schedule(graph, asc.Machine.emulated(gpus=4))


def weights_at_home(inputs: str | None = None) -> asc.Schedule:
    """Return a step whose weights come from the host and go back, unless they live elsewhere."""
    graph = asc.Graph("weights at home")
    x, w = graph.inputs("x", "w")
    with graph.on("cuda:0"):
        graph.add(call, w, x, name="update", writes=[w], outputs=(), seconds=1e-3)
    homes = {"w": inputs} if inputs else None
    return asc.schedule(graph, ONE, costs=asc.Costs(nbytes={"x": 1e5, "w": 5e7}), inputs=homes)


def two_for_nothing(devices: tuple[str, ...] = ("cuda:0", "cuda:1")) -> asc.Schedule:
    """Return a chain that changes the device at each step."""
    graph = asc.Graph("two for nothing")
    value = graph.input("x")
    for i in range(6):
        with graph.on(devices[i % len(devices)]):
            value = graph.add(call, value, name=f"step{i}", seconds=5e-4, nbytes=25e6)
    graph.output(y=value)
    return asc.schedule(graph, TWO)


def slow_update(on: str | None = "cpu") -> asc.Schedule:
    """Return a step whose weights are updated on the host, which takes ten times longer for it than a GPU."""
    graph = asc.Graph("slow update")
    x = graph.input("x")
    with graph.on("cuda:0"):
        gradient = graph.add(call, x, name="gradient", seconds=1e-3)
    seconds = {"cpu": 1e-2, "cuda:0": 1e-3}
    graph.output(w=graph.add(call, gradient, name="update", on=on, seconds=seconds))
    return asc.schedule(graph, ONE)


@pytest.mark.parametrize(
    ("faulty", "kind", "names", "cured"),
    [
        (
            slow_update,
            "host bound",
            ["'update'", "bound to cpu", "test_explain.py:"],
            lambda: slow_update(None),
        ),
        (unpinned, "pin", ["'x'"], lambda: unpinned(pageable=False)),
        (
            tiny,
            "launch",
            ["40 tasks", "6 us", "'scale0'", "replay=True"],
            lambda: tiny(seconds=1e-6),
        ),
        (on_one_device, "idle bound", ["cuda:1", "bound to cuda:0"], lambda: on_one_device(None)),
        (weights_at_home, "keep", ["'w'", "cuda:0"], lambda: weights_at_home("cuda:0")),
        (two_for_nothing, "fewer bound", ["two devices give nothing", "copies take longer"], None),
    ],
)
def test_a_planted_fault_is_named_first_and_its_gain_is_what_the_cure_gives(
    faulty: Callable[[], asc.Schedule],
    kind: str,
    names: list[str],
    cured: Callable[[], asc.Schedule] | None,
) -> None:
    schedule = faulty()
    first = schedule.explain().advice[0]
    assert first.kind == kind
    assert [name for name in names if name not in first.words] == []
    assert first.gain == schedule.makespan - first.makespan
    assert first.share == first.gain / schedule.makespan > 0.1
    if cured is not None:
        assert first.makespan == pytest.approx(cured().makespan, rel=1e-9)


def test_tasks_on_one_device_instead_of_two_take_no_copies():
    found = two_for_nothing().explain().advice[0]
    assert found.makespan == pytest.approx(6 * 5e-4 + 1e-5)  # and the input's copy
    assert found.tasks == tuple(f"step{i}" for i in range(6))


@pytest.mark.parametrize(
    "sound",
    [
        lambda: tiny(seconds=1e-3),
        lambda: on_one_device(None),
        host_read,
        lambda: two_for_nothing(("cuda:0",)),
    ],
)
def test_where_nothing_is_wrong_nothing_is_advised(sound: Callable[[], asc.Schedule]) -> None:
    found = sound().explain()
    assert found.advice == ()
    assert "Nothing that was tried would make it faster." in str(found)


def test_of_what_takes_no_time_nothing_is_explained():
    found = asc.schedule(asc.Graph("empty"), ONE).explain()
    assert (
        str(found)
        == "empty: 0 us predicted, 0 tasks on no device\n\nIt takes no time, so there is nothing to explain."
    )
    assert repr(found) == "<Explanation of 'empty': 0 s predicted, 0 suggestions>"
    assert found._repr_mimebundle_() == {"text/plain": str(found)}


def test_a_better_policy_is_named():
    found = on_one_device(None, policy=single_on("cuda:1")).explain().advice[0]
    assert (found.kind, found.makespan) == ("idle policy", on_one_device(None).makespan)
    assert "policy='auto'" in found.words


def test_a_device_that_would_not_help_is_a_note():
    found = asc.schedule(fork(), TWO).explain()
    assert found.advice == ()
    (note,) = found.notes
    assert note.startswith(
        "two devices give nothing here: copies take longer than the compute they save"
    )


def test_a_split_that_is_far_slower_is_told_of_in_times():
    graph, seconds = asc.Graph(), {"cuda:0": 1e-4, "cuda:1": 1e-4}
    value = graph.add(call, name="first", seconds=seconds, nbytes=25e6)
    for i in range(2):
        value = graph.add(call, value, name=f"next{i}", seconds=seconds, nbytes=25e6)
    graph.output(y=value)
    (note,) = asc.schedule(graph, TWO).explain().notes
    assert re.search(r"\(cuda:0 and cuda:1 take \d times as long\)$", note)


def fork() -> asc.Graph:
    """Return two tasks of 0.8 ms that read one tensor, which takes 1 ms to copy."""
    graph = asc.Graph("fork")
    seconds = {"cuda:0": 8e-4, "cuda:1": 8e-4}
    root = graph.add(call, name="root", seconds=seconds, nbytes=25e6)
    left, right = (
        graph.add(call, root, name=name, seconds=seconds, nbytes=8) for name in ("left", "right")
    )
    graph.output(y=graph.add(call, left, right, name="join", seconds=seconds))
    return graph


def weights(
    homes: tuple[str, ...] = (), seconds: float = 2e-4, on: str | None = None
) -> asc.Schedule:
    """Return a forward pass that reads two weights of 16.8 MB, which no task writes, and a small batch."""
    graph = asc.Graph("weights")
    value, *given = graph.inputs("x", "w1", "w2")
    for i, w in enumerate(given):
        value = graph.add(
            call,
            value,
            w,
            name=f"layer{i}",
            seconds={"cpu": 1.0, "cuda:0": seconds, "cuda:1": seconds},
        )
    graph.output(y=value)
    costs = asc.Costs(nbytes={"x": 1e4, "w1": 16.8e6, "w2": 16.8e6, "layer0": 1e4})
    return asc.schedule(
        graph,
        TWO,
        costs=costs,
        inputs=dict.fromkeys(homes, "cuda:0"),
        place={"*": on} if on else None,
    )


@pytest.mark.parametrize("on", [None, "cuda:0"])
def test_weights_that_are_only_read_could_stay_where_they_are_used(on: str | None) -> None:
    found, cured = weights(on=on).explain().advice[-1], weights(("w1", "w2"))
    assert (found.kind, set(found.values)) == ("keep inputs", {"w1", "w2"})
    assert found.makespan == pytest.approx(cured.makespan)
    assert (
        "by inputs={'w2': 'cuda:0', 'w1': 'cuda:0'}, if they are the same tensors in each run"
        in found.words
    )
    assert cured.explain().advice == ()  # the batch is another in each run


def test_weights_that_would_have_to_travel_to_a_faster_device_could_live_there():
    """One run alone is faster on the CPU, so no copy of a weight is there to see."""
    graph = asc.Graph()
    x, w = graph.inputs("x", "w")
    graph.output(y=graph.add(call, x, w, name="y", seconds={"cpu": 1e-3, "cuda:0": 1e-4}))
    costs = asc.Costs(nbytes={"x": 1e4, "w": 50e6})
    schedule = asc.schedule(graph, ONE, costs=costs)
    assert schedule.placement.device == {"y": "cpu"}
    (found,) = schedule.explain().advice
    assert found.kind == "keep inputs"
    assert found.makespan == pytest.approx(
        asc.schedule(graph, ONE, costs=costs, inputs={"w": "cuda:0"}).makespan
    )


def test_no_advice_sends_more_than_links_allow():
    """Two weights of 16.8 MB for two tasks stand in line on one link, which has a rate, with streams or without."""
    for schedule in (weights(), weights(on="cuda:0")):
        link = schedule.machine.link("cuda:0", "cpu")
        assert link is not None
        for advice in schedule.explain().advice:
            if advice.kind not in ("keep", "keep inputs"):
                assert advice.makespan >= 16.8e6 / link.bytes_per_second


def test_copies_by_one_link_are_not_advised_to_go_at_once():
    graph = asc.Graph()
    for i, value in enumerate(graph.inputs("a", "b")):
        graph.output(**{f"y{i}": graph.add(call, value, name=f"y{i}", on="cuda:0", seconds=1e-5)})
    found = asc.schedule(
        graph, ONE, costs=asc.Costs(default_nbytes=25e6), inputs={"a": "cpu", "b": "cpu"}
    ).explain()
    assert [advice.kind for advice in found.advice] == ["keep inputs"]


def test_tiny_tasks_between_large_ones_are_no_row():
    graph = asc.Graph()
    value = graph.input("x")
    with graph.on("cuda:0"):
        for i in range(10):
            tiny_one = graph.add(call, value, name=f"tiny{i}", seconds=6e-6)
            value = graph.add(call, tiny_one, name=f"large{i}", seconds=2e-5)
        graph.output(y=value)
    assert asc.schedule(graph, ONE).explain().advice == ()


def test_only_as_many_values_are_named_as_matter():
    graph = asc.Graph()
    values = graph.inputs("a", "b", "c")
    with graph.on("cuda:0"):
        graph.output(y=graph.add(call, *values, name="y", seconds=1e-3))
    costs = asc.Costs(nbytes={"a": 1e6, "b": 9e7, "c": 1e6}, pageable=frozenset("abc"))
    assert asc.schedule(graph, ONE, costs=costs).explain().advice[0].values == ("b",)


# ---- facts, by hand


def test_the_critical_path_tells_what_each_step_was_behind():
    steps = [
        (step.kind, step.name, step.where, step.cause, step.behind)
        for step in in_line().explain().critical_path
    ]
    assert steps == [
        ("run", "h0", "cuda:0", "start", ""),
        ("copy", "h0", "cuda:0 -> cuda:1", "data", "h0"),
        ("copy", "h1", "cuda:0 -> cuda:2", "link", "h0"),
        ("copy", "h2", "cuda:0 -> cuda:3", "link", "h1"),
        ("run", "y2", "cuda:3", "copy", "h2"),
    ]


def test_idle_times_have_causes():
    _, _, _, last = in_line().explain().idle
    copy = 1e-5 + 25e6 / 25e9
    assert last.device == "cuda:3"
    assert last.causes == pytest.approx({"copy": copy, "link": 2 * copy, "cuda:0": 1e-4})


def test_efficiency_names_its_bound():
    one, two = (on_one_device(on).explain().efficiency for on in ("cuda:0", None))
    assert (one.bound, one.share) == ("critical_path", pytest.approx(1))
    assert (two.bound, two.share) == ("interval", pytest.approx(4.02 / 4.03))


def test_a_task_is_compared_on_all_its_devices():
    schedule = on_one_device(None)
    found = schedule.explain("sum")
    here, there = found.options
    assert found.reason == "chosen by the policy"
    assert {here.device, there.device} == {"cuda:0", "cuda:1"}
    assert (here.end, here.makespan) == (found.end, schedule.makespan)
    assert found.slack == 0
    moved = dataclasses.replace(
        schedule.placement, device={**schedule.placement.device, "sum": there.device}
    )
    again = asc.schedule(schedule.graph, TWO, policy=lambda *_: moved)
    assert there.makespan == again.makespan


def test_what_a_task_waited_for_is_named():
    found = on_one_device().explain("tower3")
    assert (found.needed, found.ahead) == ("the copy of 'x' from cpu", "'tower2' on cuda:0")
    assert found.ready == pytest.approx(1e-5)
    assert found.start - found.ready == pytest.approx(3e-3)
    assert "starts 3 ms later, behind 'tower2' on cuda:0" in " ".join(str(found).split())


def test_slack_is_what_the_longer_branch_takes_more():
    graph = asc.Graph()
    with graph.on("cuda:0"):
        short = graph.add(call, name="short", seconds=1.0, nbytes=8)
        end = graph.add(call, short, name="short_end", seconds=0.5, nbytes=8)
    with graph.on("cuda:1"):
        long = graph.add(call, name="long", seconds=4.0)
        graph.output(y=graph.add(call, end, long, name="y", seconds=1.0))
    schedule = asc.schedule(graph, TWO)
    found = [schedule.explain(name).slack for name in ("short", "short_end", "long", "y")]
    assert found == pytest.approx([2.5, 2.5, 0, 0], abs=1e-4)


def test_a_bound_task_says_so_and_what_would_be_elsewhere():
    found = on_one_device().explain("sum")
    assert "bound to cuda:0" in found.reason
    assert [option.device for option in found.options] == ["cuda:0", "cuda:1"]


def test_a_task_that_is_not_there():
    with pytest.raises(asc.GraphError, match="summ"):
        on_one_device().explain("summ")


# ---- measured runs


def late(timeline: Timeline, name: str, seconds: float) -> Timeline:
    """Return a timeline in which a task, the last one, took longer, and began late by as much."""
    longer = dataclasses.replace
    spans = [
        longer(span, start=span.start + seconds, end=span.end + 2 * seconds)
        if span.name == name
        else span
        for span in timeline.spans
    ]
    return dataclasses.replace(timeline, spans=tuple(spans))


def test_a_measured_run_is_compared_with_the_predicted_one():
    schedule = host_read()
    found = schedule.explain(measured=late(schedule.simulate(), "backward", 0.1))
    assert found.measured
    assert (found.makespan, found.predicted) == (
        pytest.approx(schedule.makespan + 0.2),
        schedule.makespan,
    )
    assert [(x.kind, x.name) for x in found.late] == [
        ("run", "backward"),
        ("gaps", ""),
    ]
    assert [x.measured - x.predicted for x in found.late] == pytest.approx([0.1, 0.1])
    assert found.advice == schedule.explain().advice
    assert found.path_seconds["gap"] == pytest.approx(0.1)
    assert "task 'backward' 104 ms instead of 4 ms" in str(found)
    assert isinstance(found.late[0], Late)


def test_a_timeline_of_another_program_is_refused():
    with pytest.raises(asc.ScheduleError, match="another program"):
        host_read().explain(measured=tiny().simulate())


# ---- laws


def with_pageable_memory(machine: asc.Machine) -> asc.Machine:
    links = [
        dataclasses.replace(k, pageable_bytes_per_second=k.bytes_per_second / 2)
        for k in machine.links
    ]
    return asc.Machine(machine.devices, links, contention=machine.contention, imagined=True)


def some(graph: asc.Graph, machine: asc.Machine, policy: str) -> asc.Schedule:
    costs = dataclasses.replace(COSTS, pageable=frozenset(["x"]))
    return asc.schedule(graph, with_pageable_memory(machine), policy=policy, costs=costs)


ANY = {
    "graph": graphs(),
    "machine": machines(),
    "policy": st.sampled_from(["heft", "round_robin", "single"]),
}


@settings(max_examples=settings().max_examples // 3)  # plans are searched for in each
@given(**ANY)
def test_any_schedule_can_be_explained(graph: asc.Graph, machine: asc.Machine, policy: str) -> None:
    schedule = some(graph, machine, policy)
    found = schedule.explain()
    assert str(found) == str(schedule.explain())
    assert json.loads(found.to_json())["makespan"] == schedule.makespan
    assert all(advice.makespan < schedule.makespan for advice in found.advice)
    assert found.efficiency.share <= 1 + 1e-9


@settings(max_examples=settings().max_examples // 3)  # plans are searched for in each
@given(**ANY, stretch=st.sampled_from([1.0, 1.5]))
def test_what_the_makespan_goes_to_sums_up_to_it(
    graph: asc.Graph, machine: asc.Machine, policy: str, stretch: float
) -> None:
    schedule = some(graph, machine, policy)
    timeline = stretched(schedule.simulate(), stretch)
    found = schedule.explain(measured=timeline)
    assert_sums(found, timeline)
    if stretch == 1:
        assert "gap" not in found.path_seconds


def stretched(timeline: Timeline, factor: float) -> Timeline:
    """Return a timeline in which all starts are later, so that gaps are between them."""
    spans = [
        dataclasses.replace(s, start=s.start * factor, end=s.start * factor + s.seconds)
        for s in timeline.spans
    ]
    return dataclasses.replace(timeline, spans=tuple(spans))


def assert_sums(found: Explanation, timeline: Timeline) -> None:
    whole = timeline.makespan
    assert math.isclose(sum(found.path_seconds.values()), whole, rel_tol=1e-9, abs_tol=1e-15)
    for idle in found.idle:
        assert math.isclose(sum(idle.causes.values()), idle.seconds, rel_tol=1e-9, abs_tol=1e-15)
        assert math.isclose(
            idle.seconds + busy(timeline, idle.device), whole, rel_tol=1e-9, abs_tol=1e-12
        )
        assert set(idle.causes) <= {"copy", "link", "gap", "end", *DEVICES} - {idle.device}


def busy(timeline: Timeline, device: str) -> float:
    """Return how long some task ran on a device, by looking at each moment at which one begins or ends."""
    runs = [s for s in timeline.spans if s.kind == "run" and s.streams[0].device == device]
    moments = sorted({time for s in runs for time in (s.start, s.end)})
    return sum(
        b - a
        for a, b in itertools.pairwise(moments)
        if any(s.start <= a and b <= s.end for s in runs)
    )


@given(**ANY, data=st.data())
def test_any_task_can_be_explained(
    graph: asc.Graph, machine: asc.Machine, policy: str, data: st.DataObject
) -> None:
    schedule = some(graph, machine, policy)
    if not schedule.graph.tasks:
        return
    name = data.draw(st.sampled_from([task.name for task in schedule.graph.tasks]))
    found = schedule.explain(name)
    assert name in str(found)
    assert 0 <= found.ready <= found.start + 1e-12 <= found.end + 1e-12
    assert 0 <= found.slack <= schedule.makespan
    assert (found.options[0].device, found.options[0].end) == (found.device, found.end)
