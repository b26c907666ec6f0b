"""Charts of numbers: that they show their numbers at the right places, and hide nothing."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.errors import ChartError
from autosched.viz import charts
from autosched.viz.svg import SERIES
from tests.viz.test_viz import anything, texts


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
    assert charts.TRUNCATED in texts(lines(close, unit="s"))
    assert charts.TRUNCATED not in texts(lines(far, unit="s"))
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
