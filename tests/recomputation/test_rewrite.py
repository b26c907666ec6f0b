"""Graphs in which tasks are repeated: the same results, with views, writes and random numbers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.recomputation.rewrite import last_repeats, rewritten, without_unread
from autosched.runtime.backends.virtual import Virtual
from autosched.testing import uniform
from tests import strategies
from tests.strategies import graphs, outcome


@st.composite
def drawn(draw: st.DrawFn, **options: object) -> asc.Graph:
    """Random graphs whose random numbers are those of dropout, which can be repeated."""
    add = lambda graph, a, b, **facts: [  # noqa: E731
        graph.add(torch.nn.functional.dropout, a, 0.5, training=True, **facts)
    ]
    with mock.patch.dict(strategies.MOVES, noisy=add):
        return draw(graphs(**options))


@settings(max_examples=10 * settings().max_examples)
@given(data=st.data())
def test_a_graph_with_repeated_tasks_equals_the_graph(data: st.DataObject) -> None:
    graph = data.draw(drawn())
    last = last_repeats(graph, graph.tasks)
    order = []
    for at in range(len(graph) + 1):
        possible = [task.name for task in graph.tasks[:at] if last[task.index] >= at]
        if possible:
            order += data.draw(st.lists(st.sampled_from(possible), max_size=3))
        order += [task.name for task in graph.tasks[at : at + 1]]
    again = rewritten(graph, order)
    assert len(again) >= len(order)
    fewer = without_unread(graph, order)
    assert {*fewer} == {*order}
    expected = outcome(graph.run_serial, graph)
    for repeating in (again, again, rewritten(graph, fewer)):
        found = outcome(repeating.run_serial, graph)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@given(seed=st.integers(0, 999))
def test_runs_in_flight_repeat_the_random_numbers_of_their_own_run(seed: int) -> None:
    graph = asc.Graph()
    a = graph.add(torch.nn.functional.dropout, graph.input("x"), 0.5, training=True, name="a")
    b = graph.add(torch.nn.functional.dropout, a.sin(), 0.5, training=True, name="b", on="cuda:0")
    graph.output(z=a * b, again=b.cos() * a)
    repeats = rewritten(graph, ["a", "sin", "b", "a", "mul", "b", "cos", "a", "mul_1"])
    assert [task.name for task in repeats.tasks if "again" in task.name] == [
        *("a.again", "b.again", "a.again_1")
    ]
    inputs = [torch.rand(100) for _ in range(4)]
    torch.manual_seed(seed)
    expected = [graph.run_serial(x=x) for x in inputs]
    made = asc.schedule(
        *(repeats, asc.Machine.emulated(gpus=1)), in_flight=3, backend=Virtual(uniform(seed))
    )
    torch.manual_seed(seed)
    with made:
        found = [run.result() for run in [made.submit(x=x) for x in inputs]]
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[label], other[label]) for label in other)


def test_what_would_have_other_results_is_not_repeated() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    made = graph.add(lambda: torch.ones(3), name="unknown")
    graph.add(torch.mul, x, made, name="before")
    x.add_(1)
    drawn = graph.add(lambda x: x + torch.rand(3), x, random=True, name="drawn")
    model = torch.nn.Linear(3, 3)
    graph.output(y=graph.add(model, drawn, name="shared"), z=graph.add(abs, made, name="pure"))
    last = dict(
        zip((task.name for task in graph.tasks), last_repeats(graph, graph.tasks), strict=True)
    )
    assert last == {
        **dict.fromkeys(("unknown", "add", "drawn", "shared"), -1),
        "before": 2,
        "pure": len(graph),
    }
    names = [task.name for task in graph.tasks]
    with pytest.raises(asc.ScheduleError, match="'before' cannot be repeated there with the same"):
        rewritten(graph, [*names, "before"])
    with pytest.raises(
        asc.ScheduleError, match="'before' is ordered before a task that it depends"
    ):
        rewritten(graph, ["before", *(name for name in names if name != "before")])
    with pytest.raises(asc.ScheduleError, match="the order has 5 tasks, the graph has 6"):
        rewritten(graph, names[1:])


def test_what_may_be_a_view_or_a_copy_is_not_repeated_after_a_write() -> None:
    graph = asc.Graph()
    made = graph.add(torch.sin, graph.input("x"), name="sin")
    copied = made.t().reshape(-1)
    made.mul_(2)
    graph.output(y=copied.cos())
    assert [last_repeats(graph, graph.tasks)[i] for i in (0, 2)] == [-1, -1]  # sin, reshape
    torch.manual_seed(0)
    x = torch.rand(3, 3)
    assert torch.equal(graph.run_serial(x=x)["y"], x.sin().t().reshape(-1).cos())
