"""Memory and links over time: what stands at which height, and when."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.errors import ChartError
from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline
from autosched.viz import links_svg, memory_svg
from autosched.viz.courses import ROW, _busy, _rates, _steps
from tests.viz.test_viz import SMALL, anything, classes, elements, texts, timelines

HELD = {"cuda:0": [(0.0, 1e9), (0.002, 3e9), (0.003, 1e9), (0.004, 0.0)], "cpu": [(0.0, 5e6)]}


def curves(svg):
    """The heights of each line, in the order of drawing, but for those in the legend."""
    found = [
        p
        for p in elements(svg, "path")
        if classes(p)[:2] == ["curve", "course"] and "h22" not in p.get("d")
    ]
    return [p.get("d") for p in found]


def test_each_device_has_a_row_with_its_peak_and_its_share_of_the_memory():
    shown = texts(memory_svg(HELD, limits={"cuda:0": 4e9, "cpu": 1e9}, title="bytes"))
    for text in (
        "bytes",
        "cuda:0",
        "cpu",
        "peak 3 GB",
        "75% of 4 GB",
        "peak 5 MB",
        "under 1% of 1 GB",
    ):
        assert text in shown


def test_a_line_changes_its_height_when_memory_does():
    (cpu, gpu) = curves(memory_svg(HELD))
    assert re.fullmatch(r"M[\d.]+ [\d.]+H[\d.]+V[\d.]+H[\d.]+", cpu)
    heights = [float(y) for y in re.findall(r"V([\d.]+)", gpu)]
    top, bottom = min(heights), max(heights)
    assert bottom - top == ROW
    assert [(bottom - y) / ROW for y in heights] == pytest.approx([1 / 3, 1, 1 / 3, 0], abs=1e-3)
    times = [float(x) for x in re.findall(r"H([\d.]+)", gpu)]
    assert [(x - times[0]) / (times[-1] - times[0]) for x in times] == pytest.approx(
        [0, 0.5, 0.75, 1, 1], abs=1e-3
    )


def test_the_peak_is_a_point_and_a_near_limit_a_line():
    svg = memory_svg(HELD, limits={"cuda:0": 4e9, "cpu": 1e9})
    assert len([p for p in elements(svg, "path") if "dot" in classes(p)]) == 2
    assert (
        len([p for p in elements(svg, "path") if classes(p) == ["limit"]]) == 2
    )  # one in the legend
    assert not [p for p in elements(memory_svg(HELD), "path") if "limit" in classes(p)]


def test_what_was_measured_is_dashed_in_the_same_rows():
    svg = memory_svg(HELD, measured={"cuda:0": [(0.0, 0.0), (0.002, 3.5e9)]})
    assert "measured 3.5 GB" in texts(svg)
    assert [
        ("dashed" in classes(p)) for p in elements(svg, "path") if "course" in classes(p)
    ].count(True) == 2


def test_no_finite_number_is_no_memory():
    with pytest.raises(ChartError, match="memory of 'cpu' must be a finite number, got inf"):
        memory_svg({"cpu": [(0.0, float("inf"))]})


def test_a_line_has_few_points_however_many_changes_there_are_and_keeps_its_peak():
    points = [(i / 1000, 5.0 + i % 7) for i in range(100_000)]
    points[12_345], points[67_890] = (12.345, 1.0), (67.89, 20.0)
    steps = _steps(points, 100.0)
    assert len(steps) < 10_000
    heights = [float(y) for y in re.findall(r"V([\d.]+)", steps)]
    assert (min(heights), max(heights)) == (1, 20)


def test_links_show_bytes_per_second_and_how_long_they_are_busy():
    copies = [
        Span(
            "copy", "x", (Stream("cpu", "copy-out"), Stream("cuda:0", "copy-in")), 0.0, 1.0, 0, 4e9
        ),
        Span("copy", "y", (Stream("cuda:0", "copy-out"),), 0.5, 2.0, 1, 3e9),
        Span("run", "a", (Stream("cuda:0", "compute"),), 0.0, 4.0, 2),
    ]
    shown = texts(links_svg(Timeline.of(copies, [])))
    for text in ("all links", "cpu → cuda:0", "cuda:0/copy-out"):
        assert text in shown
    assert "7 GB, at most 6 GB/s" in shown
    assert [text for text in shown if text.startswith("busy")] == [
        "busy 50%",
        "busy 25%",
        "busy 38%",
    ]


def test_without_bytes_links_are_in_use_or_not():
    svg = links_svg(SMALL)
    assert "in use" in texts(svg)
    assert not [text for text in texts(svg) if "B/s" in text]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(1, 99)), max_size=8))
def test_the_area_below_a_rate_is_what_was_moved(copies):
    stream = (Stream("cuda:0", "copy-in"),)
    spans = [
        Span("copy", "x", stream, start, start + took, i, nbytes)
        for i, (start, took, nbytes) in enumerate(copies)
    ]
    rates = _rates(spans, known=True)
    moved = sum(rate * (later - time) for (time, rate), (later, _) in pairwise(rates))
    assert moved == pytest.approx(sum(span.nbytes for span in spans))
    assert rates[-1][1] == 0
    covered = {second for start, took, _ in copies for second in range(start, start + took)}
    assert _busy(spans) == len(covered)


numbers = st.floats(0, 1e15)


@given(
    st.dictionaries(
        anything, st.lists(st.tuples(st.floats(0, 1e4), numbers).map(tuple), max_size=5)
    ),
    anything,
)
def test_any_names_and_amounts_give_well_formed_charts(courses, title):
    courses = {name: sorted(course) for name, course in courses.items()}
    ElementTree.fromstring(
        memory_svg(courses, title=title, limits=dict.fromkeys(courses, 1e9), measured=courses)
    )


@given(timelines(), anything)
def test_the_links_of_any_timeline_can_be_drawn(timeline, title):
    ElementTree.fromstring(links_svg(timeline, title=title, measured=timeline))
