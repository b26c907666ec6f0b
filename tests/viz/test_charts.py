"""Line and bar charts: that they show their numbers, and hide nothing."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.errors import ChartError
from autosched.viz import Bar, Line, bars_svg, lines_svg
from autosched.viz.charts import TRUNCATED
from autosched.viz.svg import SERIES
from tests.viz.test_viz import texts

MEASURED = Line(
    "measured", [(1, 0.020, 0.018, 0.023), (2, 0.014), (8, 0.010, 0.009, 0.011)], "points"
)
PREDICTED = Line("predicted", [(1, 0.019), (2, 0.012), (4, 0.011), (8, 0.010)], "dashed")


def data(svg, tone, dashed=None):
    """The points of each path in a colour: of lines, error bars, and samples in the legend."""
    found = []
    for path in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path"):
        style = path.get("style", "")
        if f"stroke: {tone}" in style and (
            dashed is None or dashed == ("stroke-dasharray" in style)
        ):
            numbers = re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path.get("d"))
            found.append([(float(x), float(y)) for x, y in numbers])
    return found


def markers(svg, tone):
    """The positions of markers of a colour, without the one in the legend."""
    uses = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}use")
    mine = [use for use in uses if f"fill: {tone}" in use.get("style", "")]
    return [(float(use.get("x")), float(use.get("y"))) for use in mine][:-1]


def test_points_are_where_their_numbers_say():
    svg = lines_svg([MEASURED], title="a pipeline", x="chunks", y="time", y_unit="s")
    (x1, y1), (x2, y2), (x8, y8) = markers(svg, SERIES[0][0])
    assert (x2 - x1) / (x8 - x1) == pytest.approx(1 / 7, abs=1e-3)
    assert (y2 - y1) / (y8 - y1) == pytest.approx(0.6, abs=1e-3)
    assert {"a pipeline", "chunks", "time (ms)", "measured", "1", "2", "8"} <= set(texts(svg))


def test_equal_factors_are_equally_far_apart_on_a_logarithmic_axis():
    svg = lines_svg([Line("a", [(1, 1), (2, 1), (4, 1), (64, 1)])], log_x=True)
    x = [x for x, _ in markers(svg, SERIES[0][0])]
    places = [(at - x[0]) / (x[-1] - x[0]) for at in x]
    assert places == pytest.approx([0, 1 / 6, 1 / 3, 1], abs=1e-3)


def test_error_bars_end_where_they_say():
    svg = lines_svg([MEASURED], y_unit="s")
    (_, y1), *_, (_, y8) = markers(svg, SERIES[0][0])
    pixels = (y8 - y1) / 0.010
    bars = sorted(path for path in data(svg, SERIES[0][0]) if path[0][0] == path[-1][0])
    assert len(bars) == 2  # a point without ends has none
    lengths = [abs(bar[0][1] - bar[-1][1]) for bar in bars]
    assert lengths == pytest.approx([0.005 * pixels, 0.002 * pixels], abs=0.02)


def test_styles_differ_by_lines_and_markers():
    svg = lines_svg([MEASURED, PREDICTED, Line("both", [(1, 0.01), (2, 0.02)])])
    first, second, third = (SERIES[i][0] for i in range(3))
    assert len(markers(svg, first)) == 3
    assert markers(svg, second) == []
    assert len(data(svg, second, dashed=True)) == 2  # one in the legend
    assert len(data(svg, third, dashed=False)) == 2
    assert len(markers(lines_svg([Line("one", [(1, 2)], "dashed")]), first)) == 1


def test_named_series_are_in_the_legend():
    names = [f"device number {i}" for i in range(9)]
    svg = lines_svg([*(Line(name, [(0, i)]) for i, name in enumerate(names)), Line("", [(0, 0)])])
    assert sorted(text for text in texts(svg) if text in names) == names
    assert " _hidden" in texts(lines_svg([Line("_hidden", [(0, 1)])]))


@pytest.mark.parametrize(
    ("unit", "most", "name"),
    [
        *[("s", 2.5e-6, "held (us)"), ("s", 12.0, "held (s)"), ("s", 3600.0, "held (s)")],
        *[("B", 2.5e9, "held (GB)"), ("B/s", 2.5e3, "held (kB/s)"), ("", 2.5, "held")],
        ("images", 2.5e6, "held (images)"),
    ],
)
def test_axes_have_a_unit_with_a_suitable_prefix(unit, most, name):
    assert name in texts(lines_svg([Line("", [(0, 0), (1, most)])], y="held", y_unit=unit))


@pytest.mark.parametrize("item", [float("nan"), float("inf"), "3", None, True, 10**400])
def test_numbers_that_are_not_finite_are_refused(item):
    with pytest.raises(ChartError, match="'load' must be a finite number, got"):
        lines_svg([Line("load", [(1, item)])])
    with pytest.raises(ChartError, match="'load' must be a finite number, got"):
        bars_svg([Bar("load", item if item is not None else "none")])


def test_malformed_lines_and_bars_are_refused_by_name():
    message = r"line 'load' must be \(x, y\) or \(x, y, low, high\), got \(1, 2, 3\)"
    with pytest.raises(ChartError, match=message):
        lines_svg([Line("load", [(1, 2, 3)])])
    message = "'load' must be one of 'solid', 'dashed', 'points', got 'dotted'"
    with pytest.raises(ChartError, match=message):
        lines_svg([Line("load", [(1, 2)], "dotted")])
    with pytest.raises(ChartError, match="'load' must be more than 0 on a logarithmic axis, got 0"):
        lines_svg([Line("load", [(0, 2)])], log_x=True)
    with pytest.raises(ChartError, match="'load' has an error bar with one end"):
        bars_svg([Bar("load", 1, low=0)])


def test_an_axis_that_does_not_start_at_0_is_marked():
    close, far = Line("a", [(1, 0.020), (2, 0.019)]), Line("a", [(1, 0.020), (2, 0.001)])
    assert TRUNCATED in texts(lines_svg([close], y="makespan", y_unit="s"))
    for lines in ([far], [], [Line("", [(1, 3), (2, 4), (3, 9)])]):
        svg = lines_svg(lines, y="makespan", y_unit="s")
        assert TRUNCATED not in texts(svg)
        assert texts(svg).count("0") + texts(svg).count("0.0") >= 1


def test_lines_that_coincide_are_dashed_and_equal_ones_are_named():
    points = [(1, 20.0), (2, 10.0), (4, 5.0)]
    other = [(1, 20.0), (2, 10.0), (4, 1.0)]
    lines = [Line("a", points), Line("b", other), Line("c", points), Line("d", [(1, 3), (2, 2)])]
    svg = lines_svg(lines)
    dashed = [bool(data(svg, SERIES[i][0], dashed=True)) for i in range(4)]
    assert dashed == [False, True, True, False]
    assert {"a", "b", "c (as a)", "d"} <= set(texts(svg))


numbers = st.one_of(st.floats(-1e9, 1e9), st.integers(-20, 20), st.floats(-1e-6, 1e-6))
points = st.one_of(st.tuples(numbers, numbers), st.tuples(numbers, numbers, numbers, numbers))
names = st.text(max_size=12)
styles = st.sampled_from(["solid", "dashed", "points"])
units = st.sampled_from(["", "s", "B", "B/s", "FLOP/s", "images"])


@settings(max_examples=5)
@given(
    st.lists(st.builds(Line, names, st.lists(points, max_size=6), styles), max_size=8),
    *[names, names, units, units],
)
def test_any_lines_give_a_chart(lines, title, x, x_unit, y_unit):
    svg = lines_svg(lines, title=title, x=x, y="y", x_unit=x_unit, y_unit=y_unit)
    assert svg == lines_svg(lines, title=title, x=x, y="y", x_unit=x_unit, y_unit=y_unit)
    ElementTree.fromstring(svg)
    assert not re.search(r'd="[^"]*(nan|inf)', svg)


# ---- bars


def boxes(svg, i):
    """Left and right ends of the bars of a series."""
    tone = SERIES[i][0]
    found = [path for path in data(svg, tone) if len(path) in (4, 5)]
    return [(min(x for x, _ in path), max(x for x, _ in path)) for path in found]


def test_bars_start_at_0_and_are_as_long_as_their_values():
    svg = bars_svg([Bar("a", 2.0), Bar("b", 3.0), Bar("c", -1.0)], unit="s")
    a, b, c = boxes(svg, 0)
    assert a[0] == b[0] == pytest.approx(c[1])
    lengths = [right - left for left, right in (a, b, c)]
    assert [length / lengths[2] for length in lengths] == pytest.approx([2, 3, 1], abs=1e-3)
    assert {"2 s", "3 s", "-1 s"} <= set(texts(svg))


def test_bars_of_one_name_are_together_and_every_other_series_is_hollow():
    drawn = [Bar(name, 1, series=series) for name in "ab" for series in ("measured", "predicted")]
    svg = bars_svg(drawn)
    assert [text for text in texts(svg) if text in ("a", "b")] == ["a", "b"]
    assert {"measured", "predicted"} <= set(texts(svg))
    assert f"fill: #ffffff; stroke: {SERIES[1][0]}" in svg
    assert f"fill: #ffffff; stroke: {SERIES[0][0]}" not in svg


@settings(max_examples=5)
@given(
    st.lists(
        st.one_of(
            st.builds(Bar, names, numbers, series=names),
            st.builds(Bar, names, numbers, numbers, numbers, names),
        ),
        max_size=8,
    ),
    *[names, names, units],
)
def test_any_bars_give_a_chart(drawn, title, x, unit):
    svg = bars_svg(drawn, title=title, x=x, unit=unit)
    assert svg == bars_svg(drawn, title=title, x=x, unit=unit)
    ElementTree.fromstring(svg)


# ---- all charts


def test_colours_differ_and_have_dark_counterparts():
    svg = lines_svg([Line(f"line {i}", [(i, i)]) for i in range(6)])
    for light, dark in SERIES:
        assert markers(svg, light)
        assert f'[style*="fill: {light}"]{{fill:{dark}!important}}' in svg


def test_without_matplotlib_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ChartError, match=re.escape('pip install "autosched[viz]"')):
        bars_svg([Bar("a", 1.0)])


def test_settings_of_the_user_and_pyplot_are_left_alone():
    code = """
import sys, matplotlib
matplotlib.rcParams["font.size"] = 30
from autosched.viz import Bar, bars_svg
assert "font-size: 9px" in bars_svg([Bar("a", 1.0)], title="t")
assert matplotlib.rcParams["font.size"] == 30
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
