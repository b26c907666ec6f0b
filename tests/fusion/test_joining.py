"""Which steps of a plan are joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.fusion.joining import Step, joined, makespan
from autosched.program.program import Stream

CPU = [Stream("cpu", name) for name in ("compute", *(f"compute{i}" for i in range(1, 5)))]
STREAMS = [*CPU[:3], Stream("cuda:0", "compute"), Stream("cuda:0", "compute1")]


@st.composite
def plans(draw: st.DrawFn) -> list[Step]:
    """Draw a plan in which the steps of a device wait equally long.

    Launches, too, take equally long. Seconds are whole numbers, so that their sums are exact.
    """
    seconds = st.integers(0, 5).map(float)
    streams = draw(st.lists(st.sampled_from(STREAMS), min_size=1, max_size=3, unique=True))
    known = {device: (draw(seconds), draw(seconds)) for device in ("cpu", "cuda:0")}
    steps: list[Step] = []
    for i in range(draw(st.integers(2, 12))):
        before = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set[int]()
        own = draw(st.sampled_from([*((stream,) for stream in streams), *combinations(streams, 2)]))
        joinable = draw(st.sampled_from([True, True, True, False]))
        steps.append(Step(own, draw(seconds), before, joinable, *known[own[0].device]))
    return steps


@settings(max_examples=settings().max_examples * 20)
@given(plans())
def test_groups_are_steps_of_a_plan_that_is_not_longer(steps: list[Step]) -> None:
    groups = joined(steps)
    numbers = [i for group in groups for i in group]
    assert len(numbers) == len({*numbers})
    for group in groups:
        assert len(group) > 1
        assert all(steps[i].joinable and len(steps[i].streams) == 1 for i in group)
        assert len({steps[i].streams[0].device for i in group}) == 1
    before = reference(steps, [], [])
    assert makespan(steps) == before < math.inf
    assert any(reference(steps, groups, places) <= before for places in product(*groups))
    others = [step._replace(before=[*step.before][::-1]) for step in steps]
    assert joined(steps) == joined(others) == groups


def reference(
    steps: Sequence[Step], groups: Sequence[Sequence[int]], places: Sequence[int]
) -> float:
    """Return the makespan with groups in these places, infinite if cyclic."""
    place = {i: i for i in range(len(steps))}
    for group, at in zip(groups, places, strict=True):
        place |= dict.fromkeys(group, at)
    keys = {*place.values()}

    def together(i: int, j: int) -> bool:
        return not {*steps[i].streams}.isdisjoint(steps[j].streams)

    before = {j: {i for i in keys if i < j and together(i, j)} for j in keys}
    for j, step in enumerate(steps):
        before[place[j]] |= {place[i] for i in step.before} - {place[j]}
    ends: dict[int, float] = {}
    while remaining := keys - ends.keys():
        ready = [j for j in remaining if before[j] <= ends.keys()]
        if not ready:
            return math.inf
        for j in ready:
            waits = {i: 0.0 if together(i, j) else steps[j].wait_seconds for i in before[j]}
            start = max((ends[i] + wait for i, wait in waits.items()), default=0.0)
            ends[j] = start + seconds_of([steps[i] for i in place if place[i] == j])
    return max(ends.values(), default=0.0)


def seconds_of(steps: Sequence[Step]) -> float:
    """Return the seconds of steps that are launched together, once."""
    launches = [min(step.launch_seconds, step.seconds) for step in steps]
    rest = (step.seconds - launch for step, launch in zip(steps, launches, strict=True))
    return max(launches) + sum(rest)


def test_waits_are_saved_where_they_cost_more_than_they_gain() -> None:
    own, other = CPU[:2]
    chain = [Step(((own, other)[i % 2],), 1.0, [i - 1] if i else [], True, 5.0) for i in range(6)]
    assert makespan(chain) == 6 + 5 * 5
    assert joined(chain) == [[0, 1, 2, 3, 4, 5]]
    apart = [Step((own,), 9.0, [], True, 5.0), Step((other,), 9.0, [], True, 5.0)]
    assert joined([*apart, Step((own,), 1.0, [0, 1], False, 5.0)]) == []


def test_a_step_saves_no_longer_launch_than_it_takes() -> None:
    """Joined views, which take no time, made plans seem shorter."""
    own, other = CPU[:2]
    view, task = (Step((own,), seconds, [], launch_seconds=1.0) for seconds in (0.0, 1.0))
    assert joined([view, task, Step((other,), 0.0, [0], False, 1.0)]) == []


def test_the_order_in_which_steps_before_are_named_makes_no_difference() -> None:
    """Sets of the same numbers may have different orders."""
    # The last step can be joined with one of the three before it.
    short = [Step((CPU[i],), 1.0, []) for i in range(3)]
    long = [Step((CPU[3],), 0.5, [], False) for _ in range(6)]
    for before in ([0, 1, 8], [1, 8, 0], [8, 1, 0]):
        last = Step((CPU[4],), 1.0, before)
        assert joined([*short[:2], *long, short[2], last]) == [[0, 9]]
