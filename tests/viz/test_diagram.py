"""What a picture of a graph has: folding, marks; and the languages in which it can be written."""

import html
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.errors import ChartError
from autosched.graph.graph import Graph
from autosched.graph.task import Origin
from autosched.viz import graph_dot, graph_svg
from autosched.viz.dag import acyclic_partition, diagram, fold, graph_parts
from tests.viz.test_viz import edges, elements, first, graphs, texts


def add(graph, name, *args, module="", phase="forward", **facts):
    """Add a task of a module."""
    return graph.record(
        first, args, {}, name=name, origin=Origin(("model.py", 1), module, phase), **facts
    )


def network(blocks=3, layers=4, device=None):
    """A training step: forward through blocks of layers, backward, and an update for each layer."""
    graph = Graph("network")
    x = graph.input("x")
    weights, seen = {}, []
    for block in range(blocks):
        for layer in range(layers):
            module = f"block{block}.{layer}"
            weights[module] = graph.input(f"{module}.weight")
            on = device and device(block)
            x = add(graph, f"{module}.mm", x, weights[module], module=module, on=on)
            x = add(graph, f"{module}.relu", x, module=module, on=on)
            seen.append((module, x, on))
    for module, value, on in reversed(seen):
        x = add(
            graph,
            f"{module}.backward",
            x,
            value,
            weights[module],
            module=module,
            phase="backward",
            on=on,
        )
        w = weights[module]
        add(
            graph,
            f"{module}.update",
            w,
            x,
            module=module,
            phase="optimizer",
            writes=[w],
            outputs=(),
            on=on,
        )
    return graph


def circle_in(edges):
    """Whether there is a way back to where it began."""
    after = {}
    for a, b in edges:
        after.setdefault(a, set()).add(b)
    while leaves := [a for a, behind in after.items() if not behind & after.keys()]:
        for a in leaves:
            del after[a]
    return bool(after)


def downward(found):
    """The arrows of a diagram without those within a band; all lead down."""
    rank = found.rank or range(len(found.boxes))
    assert all(rank[a] <= rank[b] for a, b in found.arrows)
    return [(a, b) for a, b in found.arrows if rank[a] < rank[b]]


# ---- folding


@st.composite
def dags(draw):
    count = draw(st.integers(1, 30))
    before = [
        draw(st.lists(st.integers(0, i - 1), unique=True, max_size=4)) if i else []
        for i in range(count)
    ]
    return draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), before


@given(dags())
def test_what_is_folded_is_a_dag_whose_numbers_follow_its_arrows(dag):
    keys, before = dag
    box = acyclic_partition(keys, before)
    assert sorted(set(box)) == list(range(max(box) + 1))
    edges = {(box[a], box[b]) for b, nodes in enumerate(before) for a in nodes if box[a] != box[b]}
    assert all(a < b for a, b in edges)
    assert all(len(mine) == 1 for mine in shared(box, keys))


@given(dags(), st.integers(1, 20), st.one_of(st.none(), st.integers(0, 3)))
def test_nodes_share_a_box_only_with_their_own_kind(dag, most, depth):
    keys, before = dag
    paths = [tuple("ab" * (key % 3)) for key in keys]
    part, rank = fold(before, keys, paths, depth, most)
    assert all(len(mine) == 1 for mine in shared(part, keys))
    assert sorted(set(part)) == list(range(max(part) + 1))
    if depth is None:
        assert max(part) < max(most, len(set(keys)))
    for b, nodes in enumerate(before):
        for a in nodes:
            if rank is None:
                assert part[a] <= part[b]
            else:
                assert rank[part[a]] <= rank[part[b]]


def exchange(devices, steps):
    """Each device needs in each step what its neighbours made in the step before."""
    graph = Graph("exchange")
    values = list(graph.inputs(*[f"u{i}" for i in range(devices)]))
    for step in range(steps):
        values = [
            graph.add(first, value, values[i - 1], name=f"s{step}.{i}", on=f"cuda:{i}")
            for i, value in enumerate(values)
        ]
    graph.output(**{f"out{i}": value for i, value in enumerate(values)})
    return graph


def test_an_exchange_between_devices_is_seen_however_much_is_folded():
    found = diagram(exchange(2, 60), most=40)
    assert len(found.boxes) <= 40 + 2
    moves = {edge for edge, arrow in found.arrows.items() if arrow == "move"}
    inside = {(a, b) for a, b in moves if found.rank[a] == found.rank[b]}
    assert inside
    assert inside == {(b, a) for a, b in inside}
    svg = graph_svg(exchange(2, 60), most=40)
    assert edges(svg)["move"] == len(moves)


def shared(part, keys):
    """The keys of the nodes in each box."""
    found = {}
    for box, key in zip(part, keys, strict=True):
        found.setdefault(box, set()).add(key)
    return found.values()


def test_what_makes_an_output_says_so():
    graph = exchange(2, 2)
    assert "s1.0 → out0" in texts(graph_svg(graph))
    assert "→ out1" in graph_dot(graph)
    folded = graph_svg(graph, dict.fromkeys([task.name for task in graph.tasks], "cpu"), depth=0)
    assert "4 tasks → 2 outputs" in texts(folded)


def test_a_picture_has_the_name_of_its_graph_as_title_unless_another_is_given():
    graph = exchange(2, 1)
    assert "exchange" in texts(graph_svg(graph))
    assert "exchange" not in texts(graph_svg(graph, title="other"))
    assert "exchange" not in texts(graph_svg(graph, title=""))


def test_parts_of_a_graph_open_each_other_and_show_what_is_around_them():
    graph = exchange(2, 200)
    found = list(graph_parts(graph, {}))
    assert sorted(i for group in found[0]["members"] for i in group) == list(range(len(graph)))
    assert len(found) > 20
    for part in found[1:]:
        view, box = part["opens"]
        inside = set(found[view]["members"][box])
        shown = [group for group in part["members"] if set(group) <= inside]
        assert sorted(i for group in shown for i in group) == sorted(inside)
        around = {i for group in part["members"] for i in group} - inside
        assert {d.task for i in inside for d in graph.tasks[i].dependencies} - inside <= around


def test_a_graph_of_few_tasks_is_shown_whole_and_a_large_one_by_modules():
    graph = network()
    assert diagram(graph).note == ""
    assert len(diagram(graph).boxes) == len(graph.tasks) + len(graph.sources)
    assert [box.label for box in diagram(graph, depth=1).boxes if box.kind == "task"] == [
        "block0",
        "block1",
        "block2",
        "block2 backward",
        "block2 optimizer",
        "block1 backward",
        "block1 optimizer",
        "block0 backward",
        "block0 optimizer",
    ]


def test_folded_boxes_say_how_many_tasks_they_are():
    graph = network()
    folded = diagram(graph, depth=1)
    (block,) = (box for box in folded.boxes if box.label == "block1" and box.kind == "task")
    assert block.amount == "8 tasks"
    assert block.facts.splitlines()[:3] == ["block1", "8 tasks", "block1.0.mm"]
    assert sum(len(box.names) for box in folded.boxes) == len(graph.tasks) + len(graph.sources)
    assert folded.note == "48 tasks and 13 inputs in 12 boxes"
    for drawn in (graph_svg(graph, depth=1), graph_dot(graph, depth=1)):
        assert "8 tasks" in drawn


def test_a_chain_without_modules_is_one_box():
    graph = Graph()
    value = graph.input("x")
    for i in range(300):
        value = graph.add(first, value, name=f"a{i}")
    left, right = graph.add(first, value, name="left"), graph.add(first, value, name="right")
    graph.add(first, left, right, name="join")
    boxes = [box for box in diagram(graph).boxes if box.kind == "task"]
    assert [(box.label, len(box.names)) for box in boxes] == [
        ("a0 … a299", 300),
        ("left", 1),
        ("right", 1),
        ("join", 1),
    ]


@pytest.mark.parametrize("most", [1, 10, 50])
def test_a_graph_without_modules_or_chains_is_folded_all_the_same(most):
    graph = Graph()
    values = [graph.input("x")]
    for i in range(400):
        values.append(graph.add(first, *values[-2:], name=f"t{i}"))
    folded = diagram(graph, most=most)
    assert len(folded.boxes) <= max(most, 2)  # an input is never in a box with tasks
    assert not circle_in(downward(folded))


def test_parameters_of_a_folded_graph_have_an_arrow_to_their_first_user_alone():
    folded = diagram(network(), depth=1)
    from_inputs = [(a, b) for a, b in folded.arrows if folded.boxes[a].kind == "input"]
    assert [(folded.boxes[a].label, folded.boxes[b].label) for a, b in from_inputs] == [
        ("x … block0.3.weight", "block0"),
        ("block1", "block1"),
        ("block2", "block2"),
    ]


def test_what_cannot_be_drawn_is_named():
    graph = network()
    for drawing in (graph_svg, graph_dot):
        with pytest.raises(ChartError, match=r"depth .* got -1"):
            drawing(graph, depth=-1)


# ---- languages


def test_dot_has_a_cluster_for_each_device_and_a_style_for_each_dependency():
    graph = Graph("step")
    x = graph.input("x")
    a = graph.add(first, x, name="a", on="cuda:0")
    graph.add(first, x, writes=[x], name="b", on="cpu")
    graph.add(first, name="c", after=a, on="cuda:0")
    text = graph_dot(graph)
    assert re.findall(r'subgraph (\w+) \{\n    label="([^"]*)"', text) == [
        ("cluster0", "cpu"),
        ("cluster1", "cuda:0"),
    ]
    arrows = dict(re.findall(r"(n\d -> n\d) \[(.*)\];", text))
    assert "penwidth=2.4" in arrows["n0 -> n1"]
    assert "dotted" in arrows["n1 -> n2"]
    assert "dashed" in arrows["n1 -> n3"]
    assert "style" not in arrows["n0 -> n2"]


QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def from_dot(quoted):
    """What Graphviz shows for a label: first escapes, then entities."""
    shown = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), quoted)
    return html.unescape(shown)


def legible(name):
    """A name as pictures can show it."""
    return "".join(
        c if re.fullmatch("[\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", c) else "\ufffd"
        for c in name
    )


@given(graphs(), st.text())
def test_any_name_can_be_written_in_dot(graph, title):
    text = graph_dot(graph, title=title)
    text.encode()
    bare = QUOTED.sub("", text)
    assert not re.search(r'["\\]', bare)
    assert bare.count("{") == bare.count("}")
    labels = [from_dot(found) for found in re.findall(r'\[label="((?:[^"\\]|\\.)*)"', text)]
    assert sorted(labels) == sorted(legible(node.name) for node in [*graph.sources, *graph.tasks])
    assert bare.count("->") == len(diagram(graph).arrows)


def named(*names):
    """A graph of tasks of these names."""
    graph = Graph()
    for name in names:
        graph.add(first, 1, name=name)
    return graph


@given(graphs(), st.integers(1, 12))
def test_any_graph_can_be_folded_and_drawn(graph, most):
    for i, task in enumerate(graph.tasks):
        object.__setattr__(
            task, "origin", task.origin._replace(module=("", "a", "a.b", "c.d.e")[i % 4])
        )
    ElementTree.fromstring(graph_svg(graph, most=most))
    folded = diagram(graph, most=most)
    assert not circle_in(downward(folded))
    names = [name for box in folded.boxes for name in box.names]
    assert sorted(names) == sorted(node.name for node in [*graph.sources, *graph.tasks])


# ---- pictures of many tasks


def height(svg):
    return float(ElementTree.fromstring(svg).get("height"))


def chain(count):
    """A chain of tasks without modules."""
    graph = Graph("chain")
    value = graph.input("x")
    for i in range(count):
        value = graph.add(first, value, name=f"t{i}")
    return graph


def test_a_picture_is_bounded_in_height_unless_the_caller_says_what_to_fold():
    for graph in (network(blocks=12, layers=8), chain(180), chain(2000)):
        assert height(graph_svg(graph)) < 2700


def test_phases_have_colours_of_their_own():
    svg = graph_svg(network())
    assert {"forward", "backward", "optimizer"} <= set(texts(svg))
    assert {"task", "task backward", "task optimizer"} <= {
        element.get("class") for element in elements(svg, "rect") if element.get("class")
    }
    assert "forward" not in texts(graph_svg(chain(3)))


def test_a_label_that_is_too_long_keeps_its_end():
    graph = Graph()
    x = graph.input("x")
    add(graph, "model.encoder.layers.0.attention.query", x)
    add(graph, "model.encoder.layers.1.attention.query", x)
    shown = [text for text in texts(graph_svg(graph)) if text.endswith("query")]
    assert shown == ["…0.attention.query", "…1.attention.query"]
