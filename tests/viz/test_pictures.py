"""PNG and PDF of our drawings, files by their suffix, and what notebooks show."""

import io
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.errors import ChartError
from autosched.viz import (
    Bar,
    Line,
    bars_svg,
    gantt_svg,
    graph_svg,
    lines_svg,
    links_svg,
    memory_svg,
    picture,
)
from autosched.viz.paint import light
from autosched.viz.shapes import Shape, Words, shapes
from tests.viz.test_courses import HELD
from tests.viz.test_viz import SMALL, classes, elements, graphs, texts, timelines, training_step


def schedule():
    return asc.schedule(
        training_step(), asc.Machine.emulated(gpus=2), costs=asc.Costs(default_seconds=1e-3)
    )


# ---- what is read of a drawing


@given(timelines(), graphs())
def test_all_boxes_and_words_of_a_drawing_are_read(timeline, graph):
    for svg in (gantt_svg(timeline, measured=timeline), graph_svg(graph)):
        found = shapes(svg)
        words = [
            "".join(run.text for run in item.runs)
            for item in found.items
            if isinstance(item, Words)
        ]
        assert words == texts(svg)
        closed = [
            item
            for item in found.items
            if isinstance(item, Shape) and item.path[-1].kind == "close"
        ]
        boxes = len(elements(svg, "rect")) - 2  # of the pattern
        heads = len([path for path in elements(svg, "path") if "line" in classes(path)])
        assert len(closed) == boxes + heads + sum(
            "copy" in classes(rect) for rect in elements(svg, "rect")
        )


def test_a_box_is_where_it_was_in_its_group_and_its_colours_are_those_of_the_style_sheet():
    rect = '<rect class="task critical" x="1" y="2" width="30" height="4"/>'
    body = f'<g transform="translate(10 5)" opacity="0.5">{rect}</g>'
    (box,) = shapes(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="autosched" width="50" height="20">{body}</svg>'
    ).items
    xs, ys = zip(*(point for step in box.path for point in step.points), strict=True)
    assert (min(xs), max(xs), min(ys), max(ys)) == (11, 41, 7, 11)
    assert (box.fill, box.stroke, box.width, box.opacity) == ("#0072b2", "#1f2328", 2, 0.5)


def test_a_later_rule_counts_more_and_one_for_two_classes_most():
    assert light("task copy")["fill"].startswith("url")
    assert light("thin critical")["stroke-width"] == ".6"
    assert light("critical")["stroke-width"] == "2"
    assert light("nothing") == {}


def test_an_arrow_ends_in_its_head():
    body = '<path class="line move" d="M0 0C0 5 10 5 10 20"/>'
    line, head = shapes(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="autosched" width="9" height="9">{body}</svg>'
    ).items
    tip = max((point for step in head.path for point in step.points), key=lambda point: point[1])
    assert tip == pytest.approx((10, 21.125), abs=1e-6)
    assert head.fill == line.stroke == "#e69f00"


def test_a_circle_is_read_as_one():
    body = '<path class="dot" d="M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z"/>'
    (dot,) = shapes(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="autosched" width="9" height="9">{body}</svg>'
    ).items
    ends = [step.points[-1] for step in dot.path if step.points]
    assert [abs(complex(*point)) for point in ends] == pytest.approx([4] * 5)
    assert ends[1] == pytest.approx((0, 4))


def test_other_drawings_are_refused():
    with pytest.raises(ValueError, match="expected a drawing of autosched"):
        shapes('<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>')


# ---- as pictures


def pixels(png):
    import matplotlib.image

    return matplotlib.image.imread(io.BytesIO(png))


def test_every_drawing_has_a_png_and_a_pdf():
    drawings = [
        gantt_svg(SMALL, title="$x^2$ <&>", measured=SMALL),
        graph_svg(training_step(), title="step", critical=["h0", "g0"]),
        memory_svg(HELD, limits={"cuda:0": 4e9}),
        links_svg(SMALL),
        lines_svg([Line("a", [(1, 2, 1, 3), (2, 3, 2, 4)]), Line("b", [(1, 2)], "points")]),
        bars_svg([Bar("a", 1.0, 0.9, 1.1), Bar("矩阵", 2.0)], title="bars"),
    ]
    for svg in drawings:
        found = pixels(picture(svg))
        width, height, _ = shapes(svg)
        assert found.shape[:2] == pytest.approx((2 * height, 2 * width), abs=1)
        assert picture(svg, "pdf").startswith(b"%PDF-")


def test_a_picture_has_the_colours_of_its_drawing_at_their_places():
    svg = gantt_svg(SMALL)
    found = pixels(picture(svg))
    boxes = {
        name: rest
        for name, *rest in ((r[0].text.split("\n")[0], r) for r in elements(svg, "rect") if len(r))
    }
    rect = boxes["task h"][0]
    x, y, height = (float(rect.get(key)) for key in ("x", "y", "height"))
    colour = found[round(2 * (y + height / 2)), round(2 * (x + 5))][:3] * 255
    assert [round(float(part)) for part in colour] == [0x00, 0x72, 0xB2]
    assert found[4, -4][:3].min() == 1.0


def test_one_drawing_gives_the_same_bytes_each_time():
    assert b"CreationDate" not in picture(bars_svg([Bar("a", 1.0)]), "pdf")
    for kind in ("png", "pdf"):
        assert picture(bars_svg([Bar("a", 1.0)]), kind) == picture(bars_svg([Bar("a", 1.0)]), kind)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ChartError, match=re.escape("pip install 'autosched[viz]'")):
        picture(bars_svg([Bar("a", 1.0)]))


def test_a_picture_of_another_kind_is_refused():
    with pytest.raises(ChartError, match="'png' or 'pdf', got 'gif'"):
        picture(bars_svg([]), "gif")


# ---- in files


HEADS = {"svg": b"<svg ", "png": b"\x89PNG", "pdf": b"%PDF", "dot": b"digraph", "mmd": b"flowchart"}


@pytest.mark.parametrize("suffix", HEADS)
def test_a_graph_is_drawn_as_its_files_name_says(suffix, tmp_path):
    training_step().draw(
        tmp_path / f"graph.{suffix}", {"h0": "cuda:0"}, critical=iter(["h0"]), group="module"
    )
    assert (tmp_path / f"graph.{suffix}").read_bytes().startswith(HEADS[suffix])


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_a_schedule_is_drawn_as_its_files_name_says(suffix, tmp_path):
    schedule().draw(tmp_path / f"schedule.{suffix}", measured=SMALL)
    assert (tmp_path / f"schedule.{suffix}").read_bytes().startswith(HEADS[suffix])


def test_other_suffixes_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ChartError, match=r"\.svg, \.png, \.pdf, \.dot, \.mmd, got '.*graph\.jpg'"):
        training_step().draw(tmp_path / "graph.jpg")
    with pytest.raises(ChartError, match=r"one of \.svg, \.png, \.pdf, got '.*schedule'"):
        schedule().draw(tmp_path / "schedule")
    assert list(tmp_path.iterdir()) == []


# ---- in notebooks


def test_graphs_schedules_and_timelines_show_themselves():
    plan = schedule()
    for item, heading in (
        (plan.graph, "<Graph 'step'"),
        (plan, "<Schedule of 'step'"),
        (plan.simulate(), "cpu"),
    ):
        shown = item._repr_mimebundle_()
        assert set(shown) == {"text/plain", "image/svg+xml", "text/html"}
        assert shown["text/plain"].startswith(heading)
        assert shown["image/svg+xml"] in shown["text/html"]
    assert "idle" in plan._repr_mimebundle_(include=None, exclude=None)["text/plain"]


def test_a_large_graph_is_shown_folded():
    graph = asc.Graph()
    value = graph.input("x")
    for _ in range(500):
        value = value + 1
    assert "500 tasks and 1 input in 2 boxes" in graph._repr_mimebundle_()["text/html"]


# ---- memory


def test_the_memory_of_a_schedule_is_that_of_its_prediction_or_of_a_run():
    plan = schedule()
    predicted = plan.memory()
    assert predicted == plan.memory(plan.simulate())
    assert set(predicted) == set(plan.machine.names)
    assert "peak" in " ".join(texts(memory_svg(predicted)))


@settings(max_examples=5)
@given(st.sampled_from(["png", "pdf"]), st.text(max_size=8))
def test_any_name_can_be_in_a_picture(kind, name):
    assert picture(bars_svg([Bar(name, 1.0)]), kind)
