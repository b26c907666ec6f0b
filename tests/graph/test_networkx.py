"""Graphs from networkx and back."""

import inspect
import operator
import re

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.errors import GraphError
from autosched.graph.graph import Graph


def text(lines):
    return inspect.cleandoc(lines)


def same(a, b):
    """Whether two dags agree in everything, the order of nodes included."""
    nodes = list(a.nodes(data=True)) == list(b.nodes(data=True))
    return nodes and sorted(a.edges(data=True), key=str) == sorted(b.edges(data=True), key=str)


def test_nodes_become_tasks_and_sinks_outputs():
    dag = networkx.DiGraph(
        [("load", "left"), ("load", "right"), ("left", "join"), ("right", "join")], name="diamond"
    )
    assert str(Graph.from_networkx(dag)) == text("""
        graph diamond
          load()
          left(load)
          right(load)
          join(left, right)
          output join = join
    """)


def test_tasks_are_added_in_topological_order_and_otherwise_as_nodes_stand():
    dag = networkx.DiGraph()
    dag.add_nodes_from(["d", "c", "b", "a"])
    dag.add_edge("a", "c")
    assert [task.name for task in Graph.from_networkx(dag).tasks] == ["d", "b", "a", "c"]


def test_attributes_become_costs_functions_and_constraints():
    dag = networkx.DiGraph()
    dag.add_node("two", fn=lambda: 2, seconds=1.5, nbytes=8)
    dag.add_node("three", fn=lambda: 3, seconds={"cpu": 1.0, "cuda:0": 2.0}, device="cpu")
    dag.add_node("minus", fn=operator.sub)
    dag.add_edges_from([("three", "minus"), ("two", "minus")])
    graph = Graph.from_networkx(dag, name="arithmetic")
    assert graph.name == "arithmetic"
    assert graph.run_serial() == {"minus": 1}  # arguments in the order of the edges
    assert (graph.task("two").seconds, graph.value("two").nbytes) == (1.5, 8)
    assert (graph.task("three").seconds, graph.task("three").device) == (
        {"cpu": 1.0, "cuda:0": 2.0},
        "cpu",
    )


def test_an_order_edge_carries_no_data():
    dag = networkx.DiGraph()
    dag.add_node("a", fn=lambda: 1)
    dag.add_node("b", fn=lambda: 2)
    dag.add_edge("a", "b", kind="order")
    graph = Graph.from_networkx(dag)
    assert str(graph).splitlines()[2] == "  b(): after a"
    assert graph.run_serial() == {"b": 2}


def test_an_edge_with_bytes_of_its_own_is_a_value_of_its_own():
    dag = networkx.DiGraph()
    dag.add_node("a", nbytes=100)
    dag.add_edge("a", "b", nbytes=0)
    dag.add_edge("a", "c")
    graph = Graph.from_networkx(dag)
    assert str(graph) == text("""
        graph graph
          a()
          b(a>b)
          c(a)
          output b = b
          output c = c
    """)
    assert {v.name: v.nbytes for v in graph.values[:2]} == {"a": 100, "a>b": 0}


def test_names_that_cannot_be_are_made_to_fit():
    dag = networkx.DiGraph([(1, "1"), ("1", "a b"), ("a b", "x@2"), ("x@2", "")])
    assert [task.name for task in Graph.from_networkx(dag).tasks] == [
        "1",
        "1_1",
        "ab",
        "x_2",
        "task",
    ]


# ---- and back


def test_tasks_become_nodes_and_dependencies_edges_with_a_kind():
    graph = Graph("g")
    x = graph.input("x")
    y = x + 1
    x *= 2
    graph.add(operator.neg, y, name="last", after="imul", on="cuda:0", seconds=2.0, nbytes=4)
    dag = graph.to_networkx()
    assert dag.name == "g"
    functions = dict(dag.nodes(data="fn"))
    assert list(functions) == ["add", "imul", "last"]
    assert (functions["add"], functions["last"]) == (operator.add, operator.neg)
    assert dag.nodes["last"] == {
        "fn": operator.neg,
        "seconds": 2.0,
        "nbytes": 4,
        "device": "cuda:0",
    }
    assert list(dag.edges(data="kind")) == [
        ("add", "imul", "anti"),
        ("add", "last", "data"),
        ("imul", "last", "order"),
    ]


@st.composite
def dags(draw):
    """Draw a dag as from_networkx reads it: names as nodes, costs, order edges, edges with bytes of their own."""
    dag = networkx.DiGraph(name="drawn")
    for i in range(draw(st.integers(0, 8))):
        facts = {
            "seconds": st.floats(0, 9),
            "nbytes": st.integers(0, 9),
            "device": st.sampled_from(["cpu", "cuda:0"]),
        }
        dag.add_node(
            f"n{i}", **{key: draw(value) for key, value in facts.items() if draw(st.booleans())}
        )
        for before in sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else ():
            kind = draw(st.sampled_from(["data", "data", "order"]))
            nbytes = draw(st.none() | st.integers(0, 9)) if kind == "data" else None
            dag.add_edge(
                f"n{before}", f"n{i}", kind=kind, **({} if nbytes is None else {"nbytes": nbytes})
            )
    return dag


@given(dags())
def test_networkx_there_and_back(dag):
    graph = Graph.from_networkx(dag)
    again = graph.to_networkx()
    assert same(again, dag)
    assert str(Graph.from_networkx(again)) == str(graph)


# ---- errors


def test_attributes_that_are_ignored_are_named():
    dag = networkx.DiGraph()
    dag.add_node("a", weight=3, seconds=1.0, pos=(0, 1))
    dag.add_edge("a", "b", weight=2, nbytes=3)
    with pytest.warns(UserWarning, match="from_networkx ignores") as caught:
        Graph.from_networkx(dag)
    assert [str(item.message) for item in caught] == [
        "from_networkx ignores 'weight', 'pos' of nodes; it knows 'seconds', 'nbytes', 'fn', 'device'",
        "from_networkx ignores 'weight' of edges; it knows 'nbytes', 'kind'",
    ]
    assert {item.filename for item in caught} == {__file__}


@pytest.mark.parametrize(
    "dag",
    [
        networkx.DiGraph([("a", "b"), ("b", "a")]),
        networkx.DiGraph([("a", "a")]),
        networkx.Graph([("a", "b")]),
        networkx.MultiDiGraph([("a", "b"), ("a", "b")]),
    ],
)
def test_what_is_no_dag(dag):
    with pytest.raises(
        GraphError,
        match=f"^{re.escape(f'from_networkx needs a DiGraph without cycles, got {dag}')}$",
    ):
        Graph.from_networkx(dag)


def test_a_function_whose_result_would_travel_in_parts():
    dag = networkx.DiGraph()
    dag.add_node("a", fn=lambda: 1)
    dag.add_edge("a", "b", nbytes=3)
    message = (
        "node 'a' has a fn, so its edges cannot have nbytes of their own: a run copies all of it"
    )
    with pytest.raises(GraphError, match=f"^{re.escape(message)}$"):
        Graph.from_networkx(dag)
