"""PNG and PDF of our drawings, files by their suffix, and what notebooks show."""

import io
import re
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.errors import ChartError
from autosched.viz import (
    charts,
    gantt_svg,
    graph_svg,
    picture,
)
from tests.viz.test_viz import SMALL, elements, texts, training_step


def schedule():
    return asc.schedule(
        training_step(), asc.Machine.emulated(gpus=2), costs=asc.Costs(default_seconds=1e-3)
    )


# ---- as pictures


def pixels(png):
    import matplotlib.image

    return matplotlib.image.imread(io.BytesIO(png))


def test_every_drawing_has_a_png_and_a_pdf():
    drawings = [
        gantt_svg(SMALL, title="$x^2$ <&>", measured=SMALL),
        graph_svg(training_step(), title="step"),
        charts.lines({"a": [(1, 2), (2, 3)], "b": [(1, 2)]}, title="lines", x="x", y="y"),
        charts.bars([("a", "one", 1.0), ("矩阵", "one", 2.0)], title="bars", x="x"),
    ]
    for svg in drawings:
        found = pixels(picture(svg))
        root = ElementTree.fromstring(svg)
        size = [root.get(key) for key in ("height", "width")]
        scale = 2 * 96 / 72 if size[0].endswith("pt") else 2
        assert found.shape[:2] == pytest.approx(
            [scale * float(length.removesuffix("pt")) for length in size], abs=2
        )
        assert found[..., :3].std() > 0.01
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
    assert found[4, -40][:3].min() == 1.0


def test_text_is_visible():
    """Text that finds no font would be left out."""
    with_title, without = (picture(charts.bars([], title=title, x="")) for title in ("title", " "))
    assert (pixels(with_title)[:60, :, :3] < 0.3).any()
    assert not (pixels(without)[:60, :, :3] < 0.3).any()


@pytest.mark.parametrize(("kind", "module"), [("png", "resvg_py"), ("pdf", "svg2pdf_py")])
def test_without_a_converter_the_error_names_what_to_install(kind, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    svg = gantt_svg(SMALL)
    with pytest.raises(ChartError, match=re.escape('pip install "autosched[viz]"')):
        picture(svg, kind)


# ---- in files


HEADS = {"svg": b"<svg ", "png": b"\x89PNG", "pdf": b"%PDF", "dot": b"digraph"}


@pytest.mark.parametrize("suffix", HEADS)
def test_a_graph_is_drawn_as_its_files_name_says(suffix, tmp_path):
    training_step().draw(tmp_path / f"graph.{suffix}", {"h0": "cuda:0"})
    assert (tmp_path / f"graph.{suffix}").read_bytes().startswith(HEADS[suffix])


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_a_schedule_is_drawn_as_its_files_name_says(suffix, tmp_path):
    schedule().draw(tmp_path / f"schedule.{suffix}", measured=SMALL)
    assert (tmp_path / f"schedule.{suffix}").read_bytes().startswith(HEADS[suffix])


def test_a_schedule_is_drawn_as_wide_and_as_large_as_wanted(tmp_path):
    made = schedule()
    look = {"copies": False, "width": 500, "title": "small", "font_size": 9}
    made.draw(tmp_path / "small.svg", **look)
    svg = (tmp_path / "small.svg").read_text()
    assert "small" in texts(svg)
    assert "copy" not in texts(svg)
    assert ElementTree.fromstring(svg).get("width") == "500"


def test_other_suffixes_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ChartError, match=r"\.svg, \.png, \.pdf, \.dot, got '.*graph\.jpg'"):
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


# ---- memory


@settings(max_examples=5)
@given(st.sampled_from(["png", "pdf"]), st.text(max_size=8))
def test_any_name_can_be_in_a_picture(kind, name):
    assert picture(gantt_svg(SMALL, title=name), kind)
