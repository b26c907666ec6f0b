"""Memory and links over time: what stands at which height, and when."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.errors import ChartError
from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline
from autosched.viz import links_svg, memory_svg
from autosched.viz.over_time import LIMIT, _busy, _rates
from autosched.viz.svg import SERIES
from tests.viz.test_charts import data
from tests.viz.test_viz import SMALL, anything, texts, timelines

HELD = {"cuda:0": [(0.0, 1e9), (0.002, 3e9), (0.003, 1e9), (0.004, 0.0)], "cpu": [(0.0, 5e6)]}


def test_each_device_has_a_row_with_its_peak_and_its_share_of_the_memory():
    shown = texts(memory_svg(HELD, limits={"cuda:0": 4e9, "cpu": 1e9}, title="bytes"))
    expected = ["cuda:0: peak 3 GB, 75% of 4 GB", "cpu: peak 5 MB, under 1% of 1 GB"]
    assert {"bytes", *expected} <= set(shown)


def test_a_curve_changes_its_height_when_memory_does():
    curve = data(memory_svg({"cuda:0": HELD["cuda:0"]}), SERIES[0][0])[0][:8]
    x, y = [point[0] for point in curve], [point[1] for point in curve]
    heights = [(y[-1] - at) / (y[-1] - min(y)) for at in y]
    assert heights == pytest.approx([1 / 3, 1 / 3, 1, 1, 1 / 3, 1 / 3, 0, 0], abs=1e-3)
    times = [(at - x[0]) / (x[-1] - x[0]) for at in x]
    assert times == pytest.approx([0, 0.5, 0.5, 0.75, 0.75, 1, 1, 1], abs=1e-3)


def test_the_peak_is_a_point_and_a_near_limit_a_line():
    svg = memory_svg(HELD, limits={"cuda:0": 4e9, "cpu": 1e9})
    assert svg.count(f'style="fill: {SERIES[0][0]}; stroke: #ffffff"') == 2
    assert LIMIT in texts(svg)
    assert len(data(svg, SERIES[1][0])) == 2  # one in the legend
    assert LIMIT not in texts(memory_svg(HELD))


def test_measured_memory_is_dashed_in_the_same_rows():
    svg = memory_svg(HELD, measured={"cuda:0": [(0.0, 0.0), (0.002, 3.5e9)]})
    assert "cuda:0: peak 3 GB, measured 3.5 GB" in texts(svg)
    assert len(data(svg, SERIES[1][0], dashed=True)) == 2


def test_no_finite_number_is_no_memory():
    with pytest.raises(ChartError, match="memory of 'cpu' must be a finite number, got inf"):
        memory_svg({"cpu": [(0.0, float("inf"))]})


def test_a_curve_has_few_points_and_keeps_its_peak():
    steps = [(i / 1000, 5.0 + i % 7) for i in range(100_000)]
    steps[67_890] = (67.89, 20.0)
    svg = memory_svg({"cpu": steps})
    assert "cpu: peak 20 B" in texts(svg)
    assert len(svg) < 500_000


def test_links_show_bytes_per_second_and_how_long_they_are_busy():
    copies = [
        Span(
            "copy", "x", (Stream("cpu", "copy-out"), Stream("cuda:0", "copy-in")), 0.0, 1.0, 0, 4e9
        ),
        Span("copy", "y", (Stream("cuda:0", "copy-out"),), 0.5, 2.0, 1, 3e9),
        Span("run", "a", (Stream("cuda:0", "compute"),), 0.0, 4.0, 2),
    ]
    shown = texts(links_svg(Timeline.of(copies, [])))
    assert [text for text in shown if "busy" in text] == [
        "all links: busy 50%, 7 GB, at most 6 GB/s",
        "cpu → cuda:0: busy 25%, 4 GB, at most 4 GB/s",
        "cuda:0/copy-out: busy 38%, 3 GB, at most 2 GB/s",
    ]


def test_without_bytes_links_are_in_use_or_not():
    svg = links_svg(SMALL)
    assert "copies in progress" in texts(svg)
    assert not [text for text in texts(svg) if "B/s" in text]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(1, 99)), max_size=8))
def test_the_area_below_a_rate_is_what_was_moved(copies):
    stream = (Stream("cuda:0", "copy-in"),)
    spans = [
        Span("copy", "x", stream, start, start + took, i, nbytes)
        for i, (start, took, nbytes) in enumerate(copies)
    ]
    rates = _rates(spans, is_known=True)
    moved = sum(rate * (later - time) for (time, rate), (later, _) in pairwise(rates))
    assert moved == pytest.approx(sum(span.nbytes for span in spans))
    assert rates[-1][1] == 0
    covered = {second for start, took, _ in copies for second in range(start, start + took)}
    assert _busy(spans) == len(covered)


numbers = st.floats(0, 1e15)


@settings(max_examples=5)
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


@settings(max_examples=5)
@given(timelines(), anything)
def test_the_links_of_any_timeline_can_be_drawn(timeline, title):
    ElementTree.fromstring(links_svg(timeline, title=title, measured=timeline))
