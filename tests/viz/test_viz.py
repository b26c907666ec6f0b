import operator
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.errors import ChartError
from autosched.graph.graph import Graph
from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline
from autosched.viz import gantt_svg, gantt_text, graph_svg
from autosched.viz.gantt import gantt_rows, ticks
from autosched.viz.layered_layout import GAP, layout
from autosched.viz.svg import LABEL, text_width

CPU_OUT = Stream("cpu", "copy-out")
IN, COMPUTE, OUT = (Stream("cuda:0", name) for name in ("copy-in", "compute", "copy-out"))
HOST = Stream("cpu", "compute")

# x is cut on the host and copied; h, y run on the GPU while the second copy goes on; the result
# goes back.
SMALL = Timeline.of(
    [
        Span("run", "cut", (HOST,), 0.0, 0.001, 0),
        Span("copy", "x", (CPU_OUT, IN), 0.001, 0.003, 1),
        Span("copy", "w", (CPU_OUT, IN), 0.003, 0.005, 2),
        Span("run", "h", (COMPUTE,), 0.003, 0.006, 3),
        Span("run", "y", (COMPUTE,), 0.006, 0.009, 4),
        Span("copy", "y", (OUT,), 0.009, 0.010, 5),
    ],
    [(0, 1), (1, 3), (2, 4), (4, 5)],
)


EXPECTED = """
cpu     compute   cut▌                                         90%
        copy-out      x░░░░░░░▏w░░░░░░▏                        60%
cuda:0  compute                h██████████▌y███████████▌       40%
        copy-in       x░░░░░░░▏w░░░░░░▏                        60%
        copy-out                                        y░░▏   90%
                  │0                   │5 ms                  idle
makespan 10 ms, 40% of copy time hidden behind compute
"""


def elements(svg, tag):
    return [
        e
        for e in ElementTree.fromstring(svg).iter()
        if e.tag == f"{{http://www.w3.org/2000/svg}}{tag}"
    ]


def classes(element):
    return element.get("class", "").split()


def titled(svg, *kinds):
    """The boxes with a tooltip, of the given classes: (first line of the tooltip, x, y, width, height, classes)."""
    found = []
    for rect in elements(svg, "rect"):
        if len(rect) and set(kinds) & set(classes(rect)):
            place = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
            found.append((rect[0].text.splitlines()[0], *place, classes(rect)))
    return found


def texts(svg):
    return ["".join(text.itertext()) for text in elements(svg, "text")]


# ---- Gantt


def test_tasks_of_phases_have_colours_of_their_own_in_a_chart():
    svg = gantt_svg(
        SMALL, phases={"cut": "forward", "h": "backward", "y": "optimizer", "x": "backward"}
    )
    looks = {
        name: [c for c in cls if c != "critical"] for name, *_, cls in titled(svg, "task", "copy")
    }
    assert looks["task h"] == ["task", "backward"]
    assert looks["task cut"] == ["task"]
    assert looks["copy x"] == ["copy"]
    assert {"forward", "backward", "optimizer"} <= set(texts(svg))
    assert "task" in texts(gantt_svg(SMALL))


def test_the_text_chart_of_a_small_timeline():
    assert gantt_text(SMALL, width=66) == EXPECTED.strip("\n")


def test_a_text_chart_counts_wide_characters_twice():
    spans = Span("run", "矩阵", (HOST,), 0.0, 0.5, 0), Span("run", "b", (HOST,), 0.5, 1.0, 1)
    assert (
        gantt_text(Timeline(spans), width=40).splitlines()[0]
        == "cpu  compute  矩阵█████▌b████████▌    0%"
    )


def test_a_text_chart_in_colour_is_the_same_text_with_the_critical_path_bold():
    coloured = gantt_text(SMALL, colour=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == gantt_text(SMALL)
    boxes = re.findall(r"\x1b\[([\d;]+)m(\w*)", coloured)
    assert (
        boxes.count(("1;34", "h"))
        == boxes.count(("1;33", "x")) / 2
        == boxes.count(("33", "w")) / 2
        == 1
    )
    assert "\x1b" not in gantt_text(SMALL)


def test_rows_stand_by_the_names_of_devices_whatever_began_first():
    timeline = Timeline.of(
        (Span("run", "a", (Stream(f"cuda:{i}", "compute"),), 10 - i, 20, i) for i in (2, 9, 10)), []
    )
    assert re.findall(r"cuda:\d+", gantt_text(timeline)) == ["cuda:2", "cuda:9", "cuda:10"]
    assert [text for text in texts(gantt_svg(timeline)) if "cuda" in text] == [
        "cuda:2",
        "cuda:9",
        "cuda:10",
    ]


def test_boxes_stand_where_and_as_long_as_their_spans_ran():
    boxes = titled(gantt_svg(SMALL), "task", "copy")
    spans = [(span, stream) for span in SMALL.spans for stream in span.streams]
    assert len(boxes) == len(spans)
    left = min(x for _, x, *_ in boxes)
    scale = max(x + width for _, x, _, width, *_ in boxes) - left
    by_span = {
        (name, round((x - left) / scale * 0.010, 4)): width for name, x, _, width, *_ in boxes
    }
    for span, _ in spans:
        kind = "task" if span.kind == "run" else "copy"
        width = by_span[f"{kind} {span.name}", round(span.start, 4)]
        assert width / scale == pytest.approx(span.seconds / SMALL.makespan, abs=1e-4)


def test_each_wait_is_one_arrow_from_the_end_of_a_span_to_the_start_of_another():
    svg = gantt_svg(SMALL)
    boxes = titled(svg, "task", "copy")
    arrows = [path.get("d") for path in elements(svg, "path") if "wait" in classes(path)][
        : len(SMALL.arrows)
    ]
    # The legend has one more, which stands last.
    assert (
        len([path for path in elements(svg, "path") if "wait" in classes(path)])
        == len(SMALL.arrows) + 1
    )
    for (a, b), d in zip(SMALL.arrows, arrows, strict=True):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", d)]
        first, second = SMALL.spans[a], SMALL.spans[b]
        ends = [x + w for name, x, _, w, *_ in boxes if name.endswith(f" {first.name}")]
        starts = [x for name, x, *_ in boxes if name.endswith(f" {second.name}")]
        assert min(abs(numbers[0] - x) for x in ends) < 0.02
        assert min(abs(numbers[-2] - x) for x in starts) < 0.02


def test_the_critical_path_is_outlined():
    outlined = [
        name for name, *_, kinds in titled(gantt_svg(SMALL), "task", "copy") if "critical" in kinds
    ]
    assert set(outlined) == {
        f"{'task' if s.kind == 'run' else 'copy'} {s.name}" for s in SMALL.critical_path()
    }
    assert "copy w" not in outlined


def test_measured_rows_stand_below_predicted_ones_on_the_same_axis():
    slow = [
        Span(s.kind, s.name, s.streams, 2 * s.start, 2 * s.end, s.instruction) for s in SMALL.spans
    ]
    boxes = titled(gantt_svg(SMALL, measured=Timeline(tuple(slow), SMALL.arrows)), "task", "copy")
    upper, lower = sorted((y, width) for name, _, y, width, *_ in boxes if name == "task h")
    assert lower[0] > upper[0]
    assert lower[1] == pytest.approx(2 * upper[1], abs=0.02)
    assert max(y for name, _, y, *_ in boxes if y < lower[0]) < lower[0]


def test_labels_of_narrow_boxes_are_beside_or_vertical_and_overlap_nothing():
    """Widths of boxes in milliseconds; 1 ms is about 8 pixels."""
    widths = [3, 1, 2.5, 2.5, 0.2, 1, 30, 2, 40]
    starts = [0, 3, 4, 6.5, 9, 20, 40, 70, 72]
    spans = [
        Span("run", f"task_{i}", (COMPUTE,), start * 1e-3, (start + width) * 1e-3, i)
        for i, (start, width) in enumerate(zip(starts, widths, strict=True))
    ]
    svg = gantt_svg(Timeline(tuple(spans)))
    boxes = {name: (x, y, w, h) for name, x, y, w, h, _ in titled(svg, "task")}
    labels = {"".join(t.itertext()): t for t in elements(svg, "text") if "label" in classes(t)}
    vertical = {name for name, t in labels.items() if t.get("transform")}
    beside = {name for name, t in labels.items() if "halo" in classes(t)}
    assert vertical == {"task_0", "task_2", "task_3", "task_7"}
    assert beside == {"task_5"}
    assert set(labels) - vertical - beside == {"task_6", "task_8"}
    for name in vertical:
        x, _, width, height = boxes[f"task {name}"]
        assert text_width(name, LABEL) <= height
        assert x < float(labels[name].get("x")) - 3 < x + width
    right = float(labels["task_5"].get("x")) + text_width("task_5", LABEL)
    assert right < boxes["task task_6"][0]


def test_boxes_closer_than_the_eye_can_tell_are_left_out():
    spans = tuple(
        Span("run", f"t{i}", (COMPUTE,), i * 1e-6, (i + 1) * 1e-6, i) for i in range(20_000)
    )
    assert 1_000 < len(titled(gantt_svg(Timeline(spans)), "task")) < 2_500


def free_copies():
    """Five copies on streams of their own; two at a time overlap."""
    spans = [Span("run", "a", (HOST,), 0.0, 1.0, 0)]
    for i in range(5):
        stream = Stream("cpu", f"copy-{i}")
        spans.append(Span("copy", f"x{i}", (stream,), 1.0 + i, 2.5 + i, i + 1))
    return Timeline.of(spans, [(0, i) for i in range(1, 6)])


def test_streams_of_one_copy_each_share_as_few_rows_as_overlap():
    rows = gantt_rows(free_copies())
    assert [(row.name, len(row.spans[0])) for row in rows] == [
        ("compute", 1),
        ("copies", 3),
        ("", 2),
    ]
    boxes = titled(gantt_svg(free_copies()), "copy")
    assert len({y for _, _, y, *_ in boxes}) == 2
    for i, (_, x, y, _width, _, _) in enumerate(boxes):
        assert all(y != box[2] or box[1] + box[3] <= x + 0.02 for box in boxes[:i])
    chart = gantt_text(free_copies(), 60).splitlines()
    assert [line[:13].split() for line in chart[:3]] == [["cpu", "compute"], ["copies"], []]


def test_a_chart_without_copies_has_rows_of_tasks_alone():
    svg = gantt_svg(SMALL, copies=False)
    assert not titled(svg, "copy")
    assert [name for name, *_ in titled(svg, "task")] == ["task cut", "task h", "task y"]
    assert "copy" not in texts(svg)
    assert len(gantt_text(SMALL, copies=False).splitlines()) == 2 + 2


def test_a_chart_is_as_wide_and_its_text_as_large_as_wanted():
    svg = ElementTree.fromstring(gantt_svg(SMALL, width=600, font_size=6))
    assert (svg.get("width"), svg.get("viewBox").split()[2]) == ("600", "1200")
    for options in (
        *({"width": width} for width in (100, float("nan"), float("inf"), None)),
        *({"font_size": size} for size in (0, 99)),
    ):
        with pytest.raises(ChartError, match="a chart must be at least 25 times font_size wide"):
            gantt_svg(SMALL, **options)


def test_a_chart_of_many_devices_is_of_one_page():
    spans = [
        Span("run", f"t{i}", (Stream(f"cuda:{i // 3}", f"compute-{i % 3}"),), 0.0, 1.0, i)
        for i in range(192)
    ]
    svg = gantt_svg(Timeline(tuple(spans)))
    assert float(ElementTree.fromstring(svg).get("height")) < 1600
    shown = texts(svg)
    assert {f"cuda:{i}" for i in range(64)} <= set(shown)


def test_labels_of_numbered_tasks_keep_their_numbers():
    spans = [Span("run", f"getitem_{i}", (HOST,), i * 1.0, i + 1.0, i) for i in range(10, 60)]
    svg = gantt_svg(Timeline(tuple(spans)))
    labels = ["".join(t.itertext()) for t in elements(svg, "text") if "label" in classes(t)]
    assert len(labels) == len(set(labels)) == 50


anything = st.text(max_size=12)


@st.composite
def timelines(draw):
    streams = draw(
        st.lists(st.builds(Stream, anything, anything), min_size=1, max_size=4, unique=True)
    )
    moments = st.floats(0, 1e3)
    spans = []
    for i in range(draw(st.integers(0, 6))):
        start, end = sorted([draw(moments), draw(moments)])
        kind = draw(st.sampled_from(["run", "copy"]))
        spans.append(Span(kind, draw(anything), (draw(st.sampled_from(streams)),), start, end, i))
    return Timeline.of(spans, [(i, i + 1) for i in range(len(spans) - 1)])


@given(timelines(), anything)
def test_any_names_give_well_formed_charts(timeline, title):
    svg = gantt_svg(timeline, title=title, measured=timeline)
    assert svg == gantt_svg(timeline, title=title, measured=timeline)
    ElementTree.fromstring(svg)
    assert len(gantt_text(timeline).splitlines()) == len(timeline.streams) + 2


# ---- DAG


def first(*args):
    return args[0]


def training_step(gpus=2):
    """Data parallel: each GPU has a part of x and makes a gradient of w; the host sums them and updates w in place."""
    graph = Graph("step")
    x, w = graph.inputs("x", "w")
    gradients = []
    for i in range(gpus):
        part = x[i]
        with graph.on(f"cuda:{i}"):
            h = graph.add(first, part, w, name=f"h{i}")
            gradients.append(graph.add(first, h, w, name=f"g{i}"))
    with graph.on("cpu"):
        total = graph.add(first, *gradients, name="total")
        graph.add(first, w, total, writes=[w], name="update")
    graph.output(w)
    return graph


def panels(svg):
    """The columns: left and right edge by the name in the header."""
    boxes = [r for r in elements(svg, "rect") if "column" in classes(r)]
    edges = [(float(r.get("x")), float(r.get("x")) + float(r.get("width"))) for r in boxes]
    names = ["".join(t.itertext()) for t in elements(svg, "text") if "strong" in classes(t)]
    return dict(zip(names, edges, strict=True))


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, "cuda:0 cpu"),
        (2, "cuda:0 cpu cuda:1"),
        (3, "cuda:0 cuda:1 cpu cuda:2"),
        (4, "cuda:0 cuda:1 cpu cuda:2 cuda:3"),
    ],
)
def test_the_host_is_in_the_middle(gpus, expected):
    columns = panels(graph_svg(training_step(gpus)))
    assert sorted(columns, key=columns.__getitem__) == expected.split()


def test_a_placement_counts_before_constraints_and_without_either_there_is_one_column():
    graph = Graph()
    x = graph.input("x")
    graph.add(first, x, name="a")
    assert panels(graph_svg(graph)) == {}
    assert set(panels(graph_svg(graph, {"a": "cuda:0"}))) == {"cpu", "cuda:0"}
    with graph.on("cuda:1"):
        graph.add(first, x, name="b")
    assert set(panels(graph_svg(graph))) == {"cpu", "cuda:1", "anywhere"}


def edges(svg):
    """The arrows of each kind, the one in the legend (outside the drawing's group) not counted."""
    (drawing,) = elements(svg, "g")
    kinds = [classes(path)[1] for path in drawing if path.tag.endswith("path")]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def test_arrows_tell_data_copies_and_order_apart():
    # data: x to its two parts, h to g twice, total and w to update; moved: each part, w (4), each
    # gradient. Both h and both g read w before it is written; what update waits for anyway is not
    # drawn.
    assert edges(graph_svg(training_step())) == {"data": 6, "move": 8}
    graph = Graph()
    x = graph.input("x")
    a = graph.add(first, x, name="a")
    graph.add(first, x, writes=[x], name="b")
    graph.add(first, name="c", after=a)
    assert edges(graph_svg(graph)) == {"order": 1, "anti": 1, "data": 2}


def test_inputs_and_views_stand_just_above_their_first_user():
    graph = Graph()
    x, w = graph.inputs("x", "w")
    a = graph.add(first, x, name="a")
    b = graph.add(first, a, name="b")
    graph.add(first, b, operator.getitem(w, 0), name="c")
    rows = {name: y for name, _, y, *_ in titled(graph_svg(graph), "task", "view", "input")}
    assert rows["x"] < rows["a"] == rows["w"] < rows["b"] == rows["getitem"] < rows["c"]


legal = st.text(min_size=1, max_size=12).filter(
    lambda s: not any(c.isspace() or c == "@" for c in s)
)
places = st.sampled_from([None, "cpu", "cuda:0", "cuda:1", "cuda:2"])


@st.composite
def graphs(draw):
    graph = Graph(draw(st.text()))
    names = draw(st.lists(legal, min_size=1, max_size=25, unique=True))
    values = [graph.input(names[0])]
    for name in names[1:]:
        used = draw(st.lists(st.sampled_from(values), max_size=3))
        after = draw(st.lists(st.sampled_from(values[1:]), max_size=2)) if len(values) > 1 else []
        writes = draw(st.lists(st.sampled_from(used), max_size=1)) if used else []
        values.append(
            graph.add(first, *used, name=name, after=after, writes=writes, on=draw(places))
        )
    return graph


@given(graphs(), st.text())
def test_any_graph_gives_a_well_formed_drawing_without_overlap(graph, title):
    svg = graph_svg(graph, title=title)
    assert svg == graph_svg(graph, title=title)
    count = len(graph.tasks) + len(graph.sources)
    nodes = titled(svg, "task", "input")
    assert len(nodes) == count
    for i, (_, x, y, width, height, _) in enumerate(nodes):
        for _, x2, y2, width2, height2, _ in nodes[:i]:
            assert x + width < x2 or x2 + width2 < x or y + height < y2 or y2 + height2 < y


@st.composite
def dags(draw):
    count = draw(st.integers(1, 25))
    column = [draw(st.integers(0, 3)) for _ in range(count)]
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(
        lambda p: p[0] < p[1]
    )
    return column, draw(st.lists(pairs, unique=True, max_size=40)) if count > 1 else []


@given(dags())
def test_edges_that_pass_ranks_meet_no_node_there(dag):
    column, arrows = dag
    width = [50.0 + 7 * (node % 5) for node in range(len(column))]
    found = layout(column, width, arrows)
    for (a, b), route in zip(arrows, found.routes, strict=True):
        assert found.rank[a] < found.rank[b]
        assert (route.passes is None) == (found.rank[a] + 1 == found.rank[b])
        for node, x in enumerate(found.x):
            if found.rank[a] < found.rank[node] < found.rank[b]:
                assert abs(route.passes - x) > width[node] / 2
    for node, x in enumerate(found.x):
        left, right = found.columns[column[node]]
        assert left <= x - width[node] / 2 < x + width[node] / 2 <= right
        for other in range(node):
            if found.rank[other] == found.rank[node]:
                assert abs(found.x[other] - x) >= (width[node] + width[other]) / 2 + GAP - 1e-6


@given(dags())
def test_edges_of_two_nodes_do_not_run_on_each_other_between_columns(dag):
    column, arrows = dag
    found = layout(column, [50.0] * len(column), arrows)
    passing = [
        (route.passes, found.rank[a], found.rank[b], a)
        for (a, b), route in zip(arrows, found.routes, strict=True)
        if route.passes is not None
        and not any(left <= route.passes <= right for left, right in found.columns)
    ]
    for i, (x, start, end, source) in enumerate(passing):
        for x2, start2, end2, source2 in passing[:i]:
            assert x != x2 or source == source2 or end <= start2 or end2 <= start


def test_a_wide_rank_is_broken_so_that_the_drawing_stays_narrow():
    graph = Graph()
    x = graph.input("x")
    for _ in range(100):
        graph.add(first, x)
    assert float(ElementTree.fromstring(graph_svg(graph)).get("width")) < 1_000


def test_hash_seeds_do_not_change_a_drawing():
    """Drawn by a process with another seed than this one."""
    script = "from tests.viz.test_viz import drawings; print(drawings())"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    assert done.stdout == f"{drawings()}\n"


def drawings():
    return "\n".join(
        (graph_svg(training_step(4)), gantt_svg(SMALL, measured=SMALL), gantt_text(SMALL))
    )


# ---- numbers


@given(st.floats(1e-9, 1e6), st.integers(1, 12))
def test_ticks_are_round_few_and_within_the_axis(end, most):
    times = [time for time, _ in ticks(end, most)]
    assert times[0] == 0
    assert len(times) <= most + 1
    assert times[-1] <= end * (1 + 1e-9)
