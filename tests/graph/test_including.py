"""A graph that is included in another does there what it does alone, as often as it is included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.runtime.backends.virtual import Virtual
from tests.frontends.test_granularity import grouped
from tests.strategies import graphs, inputs_for, machines, outcome

drawn_groups = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=60, max_size=60)


def included(graph: asc.Graph, times: int = 1, prefix: str = "") -> asc.Graph:
    """Return a graph that includes one several times, each behind the other, on the same inputs."""
    new = asc.Graph("new")
    inputs = {}
    for value in graph.sources:
        if value.tensor is None and value.home:
            with new.on(value.home):
                inputs[value.name] = new.input(value.name)
        elif value.tensor is None:
            inputs[value.name] = new.input(value.name)
    for i in range(times):
        outputs = new.include(graph, inputs, prefix=f"{prefix}{i}." if times > 1 else prefix)
    new.output(**outputs)
    return new


@given(graph=graphs())
def test_a_graph_included_in_an_empty_one_is_the_graph(graph: asc.Graph) -> None:
    new = included(graph)
    assert shape(new) == shape(graph)


def test_random_tasks_with_generators_of_their_own_keep_the_order_that_was_asked_for() -> None:
    graph = asc.Graph(generators={"cpu": "cpu", "cuda:0": "cuda:0"})
    with graph.on("cpu"):
        graph.add(torch.rand, 3, name="first")
    with graph.on("cuda:0"):
        y = graph.add(torch.rand, 3, name="second", after=["first"])
    new = asc.Graph(generators={"cpu": "cpu", "cuda:0": "cuda:0"})
    new.include(graph, {})
    assert y.producer is not None
    assert graph.task("second").dependencies == new.task("second").dependencies != ()


def shape(graph: asc.Graph) -> list[object]:
    names = [value.name for value in graph.values]
    return [
        (
            t.name,
            t.dependencies,
            t.device,
            t.view,
            t.random,
            *[[(names[v], n) for v, n in uses] for uses in uses_of(t)],
        )
        for t in graph.tasks
    ]


def uses_of(task: asc.Task) -> tuple[object, ...]:
    return task.reads, task.writes, sorted(task.changes), task.outputs


@given(graph=graphs(), machine=machines(), data=st.data())
def test_included_twice_it_does_what_running_it_twice_does(
    graph: asc.Graph, machine: asc.Machine, data: st.DataObject
) -> None:
    torch.manual_seed(3)
    expected = inputs_for(graph)
    graph.run_serial(**expected)
    expected.update({f"output {name}": item for name, item in graph.run_serial(**expected).items()})
    new = included(graph, times=2)
    found = outcome(new.run_serial, graph)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    choose = Virtual(choose=lambda ready: data.draw(st.sampled_from(ready)))
    with asc.schedule(new, machine, policy="round_robin", backend=choose) as schedule:
        found = outcome(schedule, graph)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@given(graph=graphs(), drawn=drawn_groups)
def test_a_merged_graph_can_be_included(graph: asc.Graph, drawn: list[str | None]) -> None:
    merged = asc.merge(graph, grouped(graph, drawn))
    expected, found = outcome(graph.run_serial, graph), outcome(included(merged).run_serial, graph)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def part(writes: bool = False) -> asc.Graph:
    graph = asc.Graph("part")
    x = graph.input("x")
    low, high = x[:2], x[2:]
    if writes:
        low.mul_(2)
    graph.output(y=low + 1, z=high)
    return graph


def test_what_it_writes_is_written_to_what_it_is_given() -> None:
    graph = asc.Graph("whole")
    x = graph.input("x")
    graph.include(part(writes=True), {"x": x})
    graph.output(x=x)
    assert graph.run_serial(x=torch.ones(4))["x"].tolist() == [2, 2, 1, 1]


def test_parts_of_a_value_of_its_own_memory_stay_apart() -> None:
    graph = asc.Graph("whole")
    x = graph.input("x")
    graph.include(part(), {"x": x}, prefix="a.")
    x[2:].mul_(3)  # the rows that a.add does not read
    graph.include(part(writes=True), {"x": x}, prefix="b.")
    names = {graph.tasks[d.task].name for d in graph.task("mul").dependencies}
    assert "a.add" not in names
    assert "a.add" in {graph.tasks[d.task].name for d in graph.task("b.mul").dependencies}


def test_parts_of_a_view_are_taken_to_overlap() -> None:
    graph = asc.Graph("whole")
    x = graph.input("x")
    graph.include(part(), {"x": x[:, :4].t()}, prefix="a.")
    x[7:].mul_(3)
    assert "a.add" in {graph.tasks[d.task].name for d in graph.task("mul").dependencies}


def test_devices_and_costs_are_those_given() -> None:
    graph = asc.Graph("whole")
    graph.include(
        part(), {"x": graph.input("x")}, on="cuda:1", seconds={"add": 2.0}, nbytes={"add": 8}
    )
    assert (graph.task("add").device, graph.task("add").seconds, graph.value("add").nbytes) == (
        "cuda:1",
        2.0,
        8,
    )
    assert graph.task("getitem").device is None
    other = asc.Graph("other")
    other.include(part(), {"x": other.input("x")}, on={"add": "cuda:0"})
    assert other.task("add").device == "cuda:0"


def test_tasks_on_the_host_stay_there_and_the_order_of_tasks_too() -> None:
    inner = asc.Graph("inner")
    x = inner.input("x")
    inner.add(abs, x, name="first", on="host")
    inner.add(abs, x, name="second", after="first")
    graph = asc.Graph("whole")
    graph.include(inner, {"x": graph.input("x")}, on="cuda:0", prefix="p.")
    assert graph.task("p.first").device == "host"
    assert [d.kind for d in graph.task("p.second").dependencies] == ["order"]


def test_constants_are_the_same_wherever_a_graph_is_included() -> None:
    inner = asc.Graph("inner")
    inner.output(y=inner.input("x") + torch.ones(2))
    graph = asc.Graph("whole")
    x = graph.input("x")
    graph.include(inner, {"x": x}, prefix="a.")
    graph.include(inner, {"x": x}, prefix="b.")
    assert sum(value.tensor is not None for value in graph.sources) == 1


def test_what_does_not_fit_is_named_and_leaves_the_graph_as_it_was() -> None:
    graph, other = asc.Graph("whole"), asc.Graph("other")
    x = graph.input("x")
    for inputs, words in (
        ({}, "misses input 'x'"),
        ({"x": x, "y": x}, "gives 'y', which is no input"),
        ({"x": 3}, "input 'x' must be given a Value of graph 'whole', got 3"),
        ({"x": other.input("z")}, "value 'z' belongs to graph 'other'"),
    ):
        with pytest.raises(asc.GraphError, match=words):
            graph.include(part(), inputs)
        other = asc.Graph("other")
    graph.add(abs, x, name="add")
    with pytest.raises(
        asc.GraphError, match=r"name 'add' is already taken in graph 'whole'; give another prefix"
    ):
        graph.include(part(), {"x": x})
    assert [task.name for task in graph.tasks] == ["add"]


@given(graph=graphs(), data=st.data())
def test_a_graph_can_be_included_in_portions(graph: asc.Graph, data: st.DataObject) -> None:
    new = asc.Graph("new")
    values = {name: new.input(name) for name in graph.input_names}
    names = [task.name for task in graph.tasks]
    while names:
        count = data.draw(st.integers(1, len(names)))
        needed = {
            graph.values[use.value].name for name in names[:count] for use in graph.task(name).reads
        }
        values.update(
            new.include(graph, {n: v for n, v in values.items() if n in needed}, only=names[:count])
            if count < len(graph) or not names
            else {
                graph.values[graph.outputs[n]].name: v
                for n, v in new.include(graph, values).items()
            }
        )
        names = names[count:]
    new.output(**{name: values[graph.values[index].name] for name, index in graph.outputs.items()})
    expected, found = outcome(graph.run_serial, graph), outcome(new.run_serial, graph)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    before = [{d.task for d in task.dependencies} for task in graph.tasks]
    for task in new.tasks:
        assert before[task.index] <= reached(new, task.index), f"{task.name}\n{graph}\n{new}"


def reached(graph: asc.Graph, task: int) -> set[int]:
    found: set[int] = set()
    pending = [task]
    while pending:
        for dependency in graph.tasks[pending.pop()].dependencies:
            if dependency.task not in found:
                found.add(dependency.task)
                pending.append(dependency.task)
    return found
