"""Charts of numbers: that they show their numbers at the right places, and hide nothing."""

import re
import subprocess
import sys
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.errors import ChartError
from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline
from autosched.viz import charts
from autosched.viz.charts import LIMIT, TRUNCATED, _rates
from autosched.viz.svg import SERIES
from tests.viz.test_viz import SMALL, anything, texts, timelines

HELD = {"cuda:0": [(0.0, 1e9), (0.002, 3e9), (0.003, 1e9), (0.004, 0.0)], "cpu": [(0.0, 5e6)]}


def data(svg, tone):
    """The points of each path in a colour: of lines, bars, and samples in the legend."""
    found = []
    for path in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path"):
        if f"stroke: {tone}" in path.get("style", ""):
            numbers = re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path.get("d"))
            found.append([(float(x), float(y)) for x, y in numbers])
    return found


def markers(svg, tone):
    """The positions of markers of a colour, without the one in the legend."""
    uses = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}use")
    mine = [use for use in uses if f"fill: {tone}" in use.get("style", "")]
    return [(float(use.get("x")), float(use.get("y"))) for use in mine][:-1]


def lines(series, title="t", x="x", y="y", **options):
    return charts.lines(series, title=title, x=x, y=y, **options)


# ---- lines


def test_points_are_where_their_numbers_say():
    points = [(1, 0.020), (2, 0.014), (8, 0.010)]
    svg = lines({"measured": points}, title="a pipeline", x="chunks", y="time", unit="s")
    (x1, y1), (x2, y2), (x8, y8) = markers(svg, SERIES[0][0])
    assert (x2 - x1) / (x8 - x1) == pytest.approx(1 / 7, abs=1e-3)
    assert (y2 - y1) / (y8 - y1) == pytest.approx(0.6, abs=1e-3)
    assert {"a pipeline", "chunks", "time", "10 ms", "measured", "1", "2", "8"} <= set(texts(svg))


def test_equal_factors_are_equally_far_apart_on_a_logarithmic_axis():
    svg = lines({"a": [(1, 1), (2, 1), (4, 1), (64, 1)]}, log_x=True)
    x = [x for x, _ in markers(svg, SERIES[0][0])]
    places = [(at - x[0]) / (x[-1] - x[0]) for at in x]
    assert places == pytest.approx([0, 1 / 6, 1 / 3, 1], abs=1e-3)


def test_an_axis_that_does_not_start_at_0_is_marked():
    close, far = {"a": [(1, 0.020), (2, 0.019)]}, {"a": [(1, 0.020), (2, 0.001)]}
    assert TRUNCATED in texts(lines(close, unit="s"))
    assert TRUNCATED not in texts(lines(far, unit="s"))
    assert "0 us" in texts(lines(far, unit="s"))


def test_colours_differ_and_have_dark_counterparts():
    svg = lines({f"line {i}": [(i, i)] for i in range(6)})
    for light, dark in SERIES:
        assert markers(svg, light)
        assert f'[style*="fill: {light}"]{{fill:{dark}!important}}' in svg


# ---- bars


def boxes(svg, i):
    """Left and right ends of the bars of a series."""
    found = [path for path in data(svg, SERIES[i][0]) if len(path) in (4, 5)]
    return [(min(x for x, _ in path), max(x for x, _ in path)) for path in found]


def test_bars_start_at_0_and_are_as_long_as_their_values():
    svg = charts.bars([("a", "", 2.0), ("b", "", 3.0)], title="t", x="x", unit="s")
    a, b = boxes(svg, 0)
    assert a[0] == b[0]
    assert (b[1] - b[0]) / (a[1] - a[0]) == pytest.approx(1.5, abs=1e-3)
    assert {"2 s", "3 s"} <= set(texts(svg))


def test_bars_of_one_name_are_together_and_every_other_series_is_hollow():
    drawn = [(name, series, 1.0) for name in "ab" for series in ("measured", "predicted")]
    svg = charts.bars(drawn, title="t", x="x")
    assert [text for text in texts(svg) if text in ("a", "b")] == ["a", "b"]
    assert {"measured", "predicted"} <= set(texts(svg))
    assert f"fill: #ffffff; stroke: {SERIES[1][0]}" in svg
    assert f"fill: #ffffff; stroke: {SERIES[0][0]}" not in svg


@settings(max_examples=5)
@given(st.lists(st.tuples(anything, anything, st.floats(0, 1e9)), max_size=8), anything)
def test_any_bars_give_a_chart(drawn, title):
    svg = charts.bars(drawn, title=title, x=title)
    assert svg == charts.bars(drawn, title=title, x=title)
    ElementTree.fromstring(svg)


# ---- memory and links


def test_each_device_has_a_row_with_its_peak_and_its_share_of_the_memory():
    svg = charts.memory(HELD, limits={"cuda:0": 4e9, "cpu": 1e9}, title="bytes")
    expected = ["cuda:0: peak 3 GB, 75% of 4 GB", "cpu: peak 5 MB, under 1% of 1 GB"]
    assert {"bytes", LIMIT, *expected} <= set(texts(svg))
    assert svg.count(f'style="fill: {SERIES[0][0]}; stroke: #ffffff"') == 2
    assert len(data(svg, SERIES[1][0])) == 2  # a near limit, and one in the legend
    assert LIMIT not in texts(charts.memory(HELD, limits={}, title=""))


def test_a_curve_changes_its_height_when_memory_does():
    svg = charts.memory({"cuda:0": HELD["cuda:0"]}, limits={}, title="")
    curve = data(svg, SERIES[0][0])[0][:8]
    x, y = [point[0] for point in curve], [point[1] for point in curve]
    heights = [(y[-1] - at) / (y[-1] - min(y)) for at in y]
    assert heights == pytest.approx([1 / 3, 1 / 3, 1, 1, 1 / 3, 1 / 3, 0, 0], abs=1e-3)
    times = [(at - x[0]) / (x[-1] - x[0]) for at in x]
    assert times == pytest.approx([0, 0.5, 0.5, 0.75, 0.75, 1, 1, 1], abs=1e-3)


def test_a_curve_has_few_points_and_keeps_its_peak():
    steps = [(i / 1000, 5.0 + i % 7) for i in range(100_000)]
    steps[67_890] = (67.89, 20.0)
    svg = charts.memory({"cpu": steps}, limits={}, title="")
    assert "cpu: peak 20 B" in texts(svg)
    assert len(svg) < 500_000


def test_links_show_bytes_per_second_and_how_long_they_are_busy():
    both = (Stream("cpu", "copy-out"), Stream("cuda:0", "copy-in"))
    copies = [
        Span("copy", "x", both, 0.0, 1.0, 0, 4e9),
        Span("copy", "y", (Stream("cuda:0", "copy-out"),), 0.5, 2.0, 1, 3e9),
        Span("run", "a", (Stream("cuda:0", "compute"),), 0.0, 4.0, 2),
    ]
    shown = texts(charts.links(Timeline.of(copies, []), title=""))
    assert [text for text in shown if "busy" in text] == [
        "all links: busy 50%, 7 GB, at most 6 GB/s",
        "cpu → cuda:0: busy 25%, 4 GB, at most 4 GB/s",
        "cuda:0/copy-out: busy 38%, 3 GB, at most 2 GB/s",
    ]


def test_without_bytes_links_are_in_use_or_not():
    svg = charts.links(SMALL, title="")
    assert "copies in progress" in texts(svg)
    assert not [text for text in texts(svg) if "B/s" in text]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(1, 99)), max_size=8))
def test_the_area_below_a_rate_is_what_was_moved(copies):
    stream = (Stream("cuda:0", "copy-in"),)
    spans = [
        Span("copy", "x", stream, start, start + took, i, nbytes)
        for i, (start, took, nbytes) in enumerate(copies)
    ]
    rates, busy = _rates(spans, is_known=True)
    moved = sum(rate * (later - time) for (time, rate), (later, _) in pairwise(rates))
    assert moved == pytest.approx(sum(span.nbytes for span in spans))
    assert rates[-1][1] == 0
    covered = {second for start, took, _ in copies for second in range(start, start + took)}
    assert busy == len(covered)


steps = st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e15)), max_size=5).map(sorted)


@settings(max_examples=5)
@given(st.dictionaries(anything, steps), timelines(), anything)
def test_any_names_and_amounts_give_well_formed_charts(courses, timeline, title):
    limits = dict.fromkeys(courses, 1e9)
    ElementTree.fromstring(charts.memory(courses, title=title, limits=limits))
    ElementTree.fromstring(charts.links(timeline, title=title))


# ---- matplotlib


def test_without_matplotlib_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ChartError, match=re.escape('pip install "autosched[viz]"')):
        charts.bars([("a", "", 1.0)], title="t", x="x")


def test_settings_of_the_user_and_pyplot_are_left_alone():
    code = """
import sys, matplotlib
matplotlib.rcParams["font.size"] = 30
from autosched.viz import charts
assert "font-size: 9px" in charts.bars([("a", "", 1.0)], title="t", x="x")
assert matplotlib.rcParams["font.size"] == 30
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
