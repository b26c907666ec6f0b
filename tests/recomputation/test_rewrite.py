"""Graphs in which tasks are repeated: the same results, with views, writes and random numbers."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.recomputation.rewrite import last_repeats, rewritten, without_unread
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
