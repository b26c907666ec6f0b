"""Charts: where numbers stand and how they are written, and that all of them can be read, whatever they are."""

import itertools
import re
from decimal import Decimal
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.errors import ChartError
from autosched.viz import Bar, Line, bars_svg, lines_svg
from autosched.viz.paint import TITLE, text_width
from autosched.viz.scale import Scale
from tests.viz.test_viz import classes, elements, texts


def described(svg, tag, cls):
    """The elements of a class that say something when pointed at: what they say, and the element."""
    found = [e for e in elements(svg, tag) if cls in classes(e) and len(e)]
    return [(e[0].text.splitlines(), e) for e in found]


def markers(svg):
    """The place of each marker, by what it says."""
    return {
        tuple(told): tuple(map(float, re.findall(r"-?[\d.]+", e.get("transform"))))
        for told, e in described(svg, "path", "dot")
    }


def bars(svg):
    """Left and right end of each bar, by what it says."""
    return {
        tuple(told): (float(e.get("x")), float(e.get("x")) + float(e.get("width")))
        for told, e in described(svg, "rect", "bar")
    }


def written(svg):
    """The middle of each text of the picture, by what it is."""
    return {text: ((left + right) / 2, y) for text, left, right, _, y in boxes(svg)}


def boxes(svg):
    """The texts that can be seen, and the boxes that they fill: left, right, top, bottom."""
    for element in elements(svg, "text"):
        if not (text := "".join(element.itertext())):
            continue
        size = TITLE if "title" in classes(element) else 12.0
        width = text_width(text, size)
        x, y = float(element.get("x")), float(element.get("y"))
        left = x - width * (
            0.5 if "middle" in classes(element) else 1.0 if "end" in classes(element) else 0.0
        )
        yield text, left, left + width, y - 0.75 * size, y


def check_picture(svg):
    """Every text is inside of the frame and meets no other; so is all that is drawn, at numbers that are some."""
    frame = ElementTree.fromstring(svg)
    wide, high = float(frame.get("width")), float(frame.get("height"))
    seen = list(boxes(svg))
    for i, (text, left, right, top, bottom) in enumerate(seen):
        assert left + 0.01 >= 0, text
        assert right <= wide + 0.01, text
        assert 0 <= top < bottom <= high, text
        for other, left2, right2, top2, bottom2 in seen[:i]:
            assert right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top, (
                text,
                other,
            )
    for x, y in markers(svg).values():
        assert 0 <= x <= wide
        assert 0 <= y <= high
    for left, right in bars(svg).values():
        assert 0 <= left <= right <= wide
    for path in elements(svg, "path"):
        assert not re.search("nan|inf", path.get("d"))
        if {"curve", "whisker", "error", "axis", "grid"} & set(classes(path)):
            for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d")):
                assert 0 <= float(x) <= wide
                assert 0 <= float(y) <= high


# ---- lines

MEASURED = Line(
    "measured", [(1, 0.020, 0.018, 0.023), (2, 0.014), (8, 0.010, 0.009, 0.011)], "points"
)
PREDICTED = Line("predicted", [(1, 0.019), (2, 0.012), (4, 0.011), (8, 0.010)], "dashed")


@pytest.fixture
def chart():
    return lines_svg([MEASURED], title="a pipeline", x="chunks", y="time", y_unit="s")


def test_points_stand_where_their_numbers_say(chart):
    places = markers(chart)
    (x1, y1), (x2, y2), (x8, y8) = places.values()
    assert (x2 - x1) / (x8 - x1) == pytest.approx(1 / 7, abs=1e-3)
    assert (y2 - y1) / (y8 - y1) == pytest.approx(0.6, abs=1e-3)
    at = written(chart)
    assert at["1"][0] == pytest.approx(x1)
    assert at["8"][0] == pytest.approx(x8)
    assert at["20"][1] == pytest.approx(y1 + 4)
    assert at["10"][1] == pytest.approx(y8 + 4)


def test_equal_factors_are_equally_far_apart_on_a_logarithmic_axis():
    svg = lines_svg([Line("", [(1, 1), (2, 1), (4, 1), (64, 1)])], log_x=True)
    x = [x for x, _ in markers(svg).values()]
    assert [(at - x[0]) / (x[-1] - x[0]) for at in x] == pytest.approx(
        [0, 1 / 6, 1 / 3, 1], abs=1e-3
    )
    assert [text for text in texts(svg) if text in ("1", "2", "4", "64")][:4] == [
        "1",
        "2",
        "4",
        "64",
    ]


@pytest.mark.parametrize("log_x", [False, True])
def test_a_single_point_stands_in_the_middle(log_x):
    ((x, _),) = markers(lines_svg([Line("", [(5, 1)])], log_x=log_x)).values()
    one, two = markers(lines_svg([Line("", [(4, 1), (5, 1)])], log_x=log_x)).values()
    assert x == pytest.approx((one[0] + two[0]) / 2)


def test_error_bars_end_where_they_say(chart):
    ends = [path.get("d") for path in elements(chart, "path") if "whisker" in classes(path)]
    assert len(ends) == 2  # a point without ends has none
    at = written(chart)
    pixels = (at["0"][1] - at["20"][1]) / 0.020
    x, bottom, top = map(float, re.match(r"M([\d.]+) ([\d.]+)V([\d.]+)", ends[0]).groups())
    assert x == next(iter(markers(chart).values()))[0]
    assert bottom == pytest.approx(at["0"][1] - 4 - 0.018 * pixels, abs=0.02)
    assert top == pytest.approx(at["0"][1] - 4 - 0.023 * pixels, abs=0.02)


def test_a_point_says_its_numbers(chart):
    assert list(markers(chart)) == [
        ("measured", "1: 20 ms (18 ms to 23 ms)"),
        ("measured", "2: 14 ms"),
        ("measured", "8: 10 ms (9 ms to 11 ms)"),
    ]


def test_styles_are_told_apart_by_lines_and_markers():
    svg = lines_svg([MEASURED, PREDICTED, Line("both", [(1, 0.01), (2, 0.02)])])
    curves = [classes(path) for path in elements(svg, "path") if "curve" in classes(path)]
    assert [kinds[1] for kinds in curves] == [
        "dashed",
        "solid",
        "dashed",
        "solid",
    ]  # in the legend, and below it
    assert [told[0] for told, _ in described(svg, "path", "dot")] == ["measured"] * 3 + ["both"] * 2
    assert len({path.get("d") for path in elements(svg, "path") if "dot" in classes(path)}) == 2


def test_a_dashed_line_of_one_point_is_seen():
    assert len(markers(lines_svg([Line("one", [(1, 2)], "dashed")]))) == 1


def test_each_series_has_a_colour_of_its_own():
    svg = lines_svg([Line(f"line {i}", [(i, i)]) for i in range(6)])
    tones = [group.get("class") for group in elements(svg, "g")]
    assert len(set(tones)) == 6
    style = elements(svg, "style")[0].text
    light, dark = style.split("@media")
    for part in (light, dark):
        assert len(set(re.findall(r"\.series\d\{color:(#\w+)", part))) == 6


def test_the_legend_names_what_has_a_name_in_as_many_lines_as_it_takes():
    names = [f"device number {i}" for i in range(9)]
    svg = lines_svg([*(Line(name, [(0, i)]) for i, name in enumerate(names)), Line("", [(0, 0)])])
    at = written(svg)
    assert [text for text in texts(svg) if text in names] == names
    assert len({at[name][1] for name in names}) > 1
    assert not any("device" in text for text in texts(lines_svg([Line("", [(0, 1)])])))


@pytest.mark.parametrize(
    ("unit", "most", "name"),
    [
        ("s", 2.5e-6, "held (us)"),
        ("s", 12.0, "held (s)"),
        ("s", 3600.0, "held (s)"),
        ("B", 2.5e9, "held (GB)"),
        ("B/s", 2.5e3, "held (kB/s)"),
        ("images", 2.5e6, "held (10⁶ images)"),
        ("", 2.5e-7, "held (10⁻⁹)"),
        ("", 2.5, "held"),
    ],
)
def test_axes_say_their_unit_with_the_prefix_that_suits_it(unit, most, name):
    assert name in texts(lines_svg([Line("", [(0, 0), (1, most)])], y="held", y_unit=unit))


def test_the_y_axis_begins_at_0_unless_that_would_hide_differences():
    assert "0" in written(lines_svg([Line("", [(1, 3), (2, 4), (3, 9)])]))
    near = written(lines_svg([Line("", [(1, 1000.1), (2, 1000.2)])]))
    assert {"1,000.10", "1,000.20"} <= set(near)
    assert "0" not in near


def test_a_tick_stands_at_each_point_where_there_is_room_and_else_at_round_numbers():
    few = lines_svg([Line("", [(x, 1.0) for x in (1, 3, 7, 12)])])
    assert {"1", "3", "7", "12"} <= set(texts(few))
    many = lines_svg([Line("", [(x, 1.0) for x in range(1, 500, 3)])])
    assert {"100", "200", "300", "400"} <= set(texts(many))
    assert "4" not in texts(many)
    assert "0.123456789" not in texts(lines_svg([Line("", [(0.123456789, 1), (2, 1)])]))


@pytest.mark.parametrize(
    "x", [(1000, 1040, 2000), (123456.78901, 123456.78905), (1e16, 1e16 + 2), (0, 1e-5, 1)]
)
def test_numbers_of_an_axis_keep_their_distance_however_long_they_are(x):
    svg = lines_svg([Line("", [(at, 1.0) for at in x])])
    check_picture(svg)
    lowest = max(y for *_, y in boxes(svg))
    row = [(left, right) for _, left, right, _, y in boxes(svg) if y == lowest]
    assert all(left - right >= 15 for (_, right), (left, _) in itertools.pairwise(row))


def test_the_y_axis_ends_at_a_number_above_all_that_is_drawn(chart):
    at = written(chart)
    assert at["25"][1] - 4 < min(y for _, y in markers(chart).values())
    assert at["25"][1] == min(y for text, (_, y) in at.items() if text.isdigit())


@pytest.mark.parametrize("item", [float("nan"), float("inf"), "3", None, True, 10**400])
def test_what_is_no_finite_number_is_refused(item):
    with pytest.raises(ChartError, match="'load' must be a finite number, got"):
        lines_svg([Line("load", [(1, item)])])
    with pytest.raises(ChartError, match="'load' must be a finite number, got"):
        bars_svg([Bar("load", item if item is not None else "none")])


def test_malformed_lines_and_bars_are_refused_by_name():
    with pytest.raises(
        ChartError, match=r"line 'load' must be \(x, y\) or \(x, y, low, high\), got \(1, 2, 3\)"
    ):
        lines_svg([Line("load", [(1, 2, 3)])])
    with pytest.raises(
        ChartError, match="'load' must be one of 'solid', 'dashed', 'points', got 'dotted'"
    ):
        lines_svg([Line("load", [(1, 2)], "dotted")])
    with pytest.raises(ChartError, match="'load' must be more than 0 on a logarithmic axis, got 0"):
        lines_svg([Line("load", [(0, 2)])], log_x=True)
    with pytest.raises(ChartError, match="'load' has an error bar with one end"):
        bars_svg([Bar("load", 1, low=0)])


numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1e3, 1e3),
    st.integers(-20, 20),
    st.sampled_from(
        [0.0, -0.0, 5e-324, 1.7e308, -1.7e308, 1.0, 1.0000000000000002, 1e-9, 1e16, 1e16 + 2]
    ),
)
points = st.one_of(st.tuples(numbers, numbers), st.tuples(numbers, numbers, numbers, numbers))
names = st.text(max_size=12)
styles = st.sampled_from(["solid", "dashed", "points"])
units = st.sampled_from(["", "s", "B", "B/s", "FLOP/s", "images"])


@given(
    st.lists(st.builds(Line, names, st.lists(points, max_size=6), styles), max_size=8),
    names,
    names,
    units,
    units,
)
def test_any_lines_give_a_picture_in_which_all_can_be_read(lines, title, x, x_unit, y_unit):
    svg = lines_svg(lines, title=title, x=x, y="y", x_unit=x_unit, y_unit=y_unit)
    assert svg == lines_svg(lines, title=title, x=x, y="y", x_unit=x_unit, y_unit=y_unit)
    check_picture(svg)
    shown = sum(
        len(line.points) for line in lines if line.style != "dashed" or len(line.points) == 1
    )
    assert len(described(svg, "path", "dot")) == shown


positive = st.one_of(st.floats(5e-324, 1.7e308), st.floats(1e-3, 1e3), st.integers(1, 10**6))


@given(st.lists(st.tuples(positive, numbers), max_size=8))
def test_any_logarithmic_axis_gives_a_picture_in_which_all_can_be_read(drawn):
    check_picture(lines_svg([Line("", drawn)], log_x=True))


# ---- bars


def test_bars_begin_at_0_and_are_as_long_as_their_values():
    svg = bars_svg([Bar("a", 2.0), Bar("b", 3.0), Bar("c", -1.0)], unit="s")
    a, b, c = bars(svg).values()
    assert a[0] == b[0] == pytest.approx(c[1])
    lengths = [right - left for left, right in (a, b, c)]
    assert [length / lengths[2] for length in lengths] == pytest.approx([2, 3, 1], abs=1e-3)


def test_values_stand_behind_the_ends_of_bars_and_of_their_error_bars():
    svg = bars_svg([Bar("a", 2.0), Bar("b", 3.0, 2.5, 3.5), Bar("c", -1.0, -1.25, -0.75)], unit="s")
    at = {text: (left, right) for text, left, right, *_ in boxes(svg)}
    (_, a), (_, b), (c, _) = bars(svg).values()
    whiskers = [path.get("d") for path in elements(svg, "path") if "error" in classes(path)]
    ends = [tuple(map(float, re.match(r"M([\d.]+) [\d.]+H([\d.]+)", d).groups())) for d in whiskers]
    assert at["2 s"][0] > a
    assert at["3 s"][0] > ends[0][1] > b
    assert at["-1 s"][1] < ends[1][0] < c


def test_bars_of_one_name_stand_together_under_one_name():
    drawn = [Bar(name, 1, series=series) for name in "ab" for series in ("measured", "predicted")]
    svg = bars_svg(drawn)
    assert texts(svg)[:2] == ["measured", "predicted"]
    assert [text for text in texts(svg) if text in ("a", "b")] == ["a", "b"]
    told = described(svg, "rect", "bar")
    assert [lines for lines, _ in told] == [[bar.name, bar.series, "1"] for bar in drawn]
    tops = [float(e.get("y")) for _, e in told]
    assert tops[1] - tops[0] == tops[3] - tops[2] < tops[2] - tops[1]
    assert ["hollow" in classes(e) for _, e in told] == [False, True, False, True]


@given(
    st.lists(
        st.one_of(
            st.builds(Bar, names, numbers, series=names),
            st.builds(Bar, names, numbers, numbers, numbers, names),
        ),
        max_size=8,
    ),
    names,
    names,
    units,
)
def test_any_bars_give_a_picture_in_which_all_can_be_read(drawn, title, x, unit):
    svg = bars_svg(drawn, title=title, x=x, unit=unit)
    assert svg == bars_svg(drawn, title=title, x=x, unit=unit)
    check_picture(svg)
    assert len(described(svg, "rect", "bar")) == len(drawn)


# ---- scales


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        ("0", "10", ["0", "2", "4", "6", "8", "10"]),
        ("0", "1", ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ("-3", "3.5", ["-2", "0", "2"]),
        (
            "1000.1",
            "1000.2",
            ["1,000.10", "1,000.12", "1,000.14", "1,000.16", "1,000.18", "1,000.20"],
        ),
        ("0", "250000", ["0", "50,000", "100,000", "150,000", "200,000", "250,000"]),
        ("0", "2.5e7", ["0", "5", "10", "15", "20", "25"]),
    ],
)
def test_ticks_are_round_and_have_equally_many_digits(low, high, expected):
    scale = Scale(Decimal(low), Decimal(high))
    assert list(scale.marked(scale.ticks(6)).values()) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        ("1", "30", ["1", "2", "5", "10", "20"]),
        ("0.001", "5000", ["0.001", "0.01", "0.1", "1", "10", "100", "1,000"]),
        ("1e-12", "1e12", ["10⁻¹²", "10⁻⁸", "0.0001", "1", "10,000", "10⁸", "10¹²"]),
        ("2e7", "2e8", ["2·10⁷", "5·10⁷", "10⁸", "2·10⁸"]),
    ],
)
def test_ticks_of_logarithmic_scales_are_powers_or_their_parts(low, high, expected):
    scale = Scale(Decimal(low), Decimal(high), log=True)
    assert list(scale.marked(scale.ticks(7)).values()) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0.00123456", "1.23 ms"),
        ("0.0999", "99.9 ms"),
        ("0.9996", "1,000 ms"),
        ("0", "0 ms"),
        ("1e-9", "10⁻⁶ ms"),
    ],
)
def test_values_are_written_to_three_digits_in_the_unit_of_their_scale(value, text):
    assert Scale(Decimal(0), Decimal("0.9996"), "s").short(Decimal(value)) == text


@given(numbers, numbers, st.integers(1, 10))
def test_ticks_are_on_the_scale_and_no_more_than_asked_for(a, b, most):
    scale = Scale.over([Decimal(repr(float(a))), Decimal(repr(float(b)))])
    ticks = scale.ticks(most)
    assert len(ticks) <= most + 1
    assert all(scale.low <= tick <= scale.high and 0 <= scale.at(tick) <= 1 for tick in ticks)


@given(numbers, numbers, st.integers(6, 10))
def test_a_rounded_scale_begins_and_ends_at_ticks(a, b, most):
    scale = Scale.over([Decimal(repr(float(a))), Decimal(repr(float(b)))])
    whole = scale.rounded(most)
    assert whole.low <= scale.low < scale.high <= whole.high
    first, *_, last = whole.ticks(most)
    assert (first, last) == (whole.low, whole.high)
    assert len(whole.ticks(most)) <= most + 1


# ---- what a chart must not hide


def test_an_axis_that_does_not_begin_at_0_says_so():
    cut = "axis cut: it does not begin at 0"
    close, far = Line("a", [(1, 0.020), (2, 0.019)]), Line("a", [(1, 0.020), (2, 0.001)])
    assert f"makespan (ms), {cut}" in lines_svg([close], y="makespan", y_unit="s")
    assert cut in lines_svg([close])
    assert cut not in lines_svg([far], y="makespan", y_unit="s")
    assert cut not in lines_svg([])


def test_lines_that_lie_on_others_are_dashed_and_those_that_are_the_same_say_so():
    points = [(1, 20.0), (2, 10.0), (4, 5.0)]
    lines = [
        Line("a", points),
        Line("b", [(1, 20.0), (2, 10.0), (4, 1.0)]),
        Line("c", points),
        Line("d", [(1, 3.0), (2, 2.0)]),
    ]
    root = ElementTree.fromstring(lines_svg(lines))
    curves = [
        e.get("class")
        for e in root.iter()
        if "curve" in e.get("class", "") and "L" in e.get("d", "")
    ]
    assert curves == ["curve solid", "curve solid apart", "curve solid apart", "curve solid"]
    words = [e.text for e in root.iter() if e.text]
    assert [word for word in words if word in ("a", "b", "c (as a)", "d")] == [
        "a",
        "b",
        "c (as a)",
        "d",
    ]
