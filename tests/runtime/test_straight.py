"""Steps as lines of a function: they do what a loop over them does, and say which of them failed."""

from functools import partial
from operator import setitem

import pytest

from autosched.runtime.threads import draining
from autosched.runtime.threads.draining import Straight
from autosched.runtime.threads.tapes import Stretch


def steps_on(data):
    """Return steps of every kind."""
    return [
        (0, Stretch(data, [(0, pow, 3, 1, 2, 0), (1, str, 4, 3, -1, 3)])),
        (2, partial(data.append, "two")),
        (3, lambda: data.append("three")),
        (4, partial(setitem, data, 2, None)),
        (5, partial(sorted, data[1:3], reverse=True)),
    ]


@pytest.mark.parametrize("lines", [1, 2, 100])
def test_straight_steps_do_what_a_loop_over_them_does(lines, monkeypatch):
    monkeypatch.setattr(draining, "_LINES", lines)
    looped, lined = ([None, 2, 5, None, None] for _ in range(2))
    for _, step in steps_on(looped):
        step()
    Straight(steps_on(lined))()
    assert looped == lined == [None, 2, None, None, "32", "two", "three"]


@pytest.mark.parametrize("lines", [1, 2, 100])
@pytest.mark.parametrize("failing", range(4))
def test_the_step_that_raised_is_known_by_its_position(failing, lines, monkeypatch):
    monkeypatch.setattr(draining, "_LINES", lines)
    fails, works = partial(int, "no number"), partial(int, "7")
    data = [None, "7", "no number", None]
    chosen = [fails if i == failing else works for i in range(4)]
    made = Straight(
        [
            (
                10,
                Stretch(data, [(10 + i, int, 3, 2 if i == failing else 1, -1, 0) for i in (0, 1)]),
            ),
            (12, chosen[2]),
            (13, lambda: chosen[3]()),
        ]
    )
    with pytest.raises(ValueError, match="no number") as caught:
        made()
    assert made.position(caught.value) == 10 + failing
    assert made.position(ValueError("of no step")) == -1
