"""Which steps of a plan are joined."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autosched.fusion.joining import Step, joined, makespan
from autosched.program.program import Stream

STREAMS = [Stream("cpu", "compute"), Stream("cpu", "compute1"), Stream("cuda:0", "compute")]


@st.composite
def plans(draw: st.DrawFn) -> list[Step]:
    steps: list[Step] = []
    for i in range(draw(st.integers(0, 12))):
        before = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set[int]()
        streams = draw(st.lists(st.sampled_from(STREAMS), min_size=1, max_size=2, unique=True))
        seconds = float(draw(st.integers(0, 20)))
        joinable = draw(st.sampled_from([True, True, False]))
        steps.append(Step(tuple(streams), seconds, before, joinable, 5.0, 0.0))
    return steps


@given(plans())
def test_groups_are_disjoint_joinable_on_one_device_and_have_no_cycle(steps: list[Step]) -> None:
    groups = joined(steps)
    numbers = [i for group in groups for i in group]
    assert len(numbers) == len({*numbers})
    assert all(len(group) > 1 for group in groups)
    for group in groups:
        assert all(steps[i].joinable and len(steps[i].streams) == 1 for i in group)
        assert len({steps[i].streams[0].device for i in group}) == 1
    place = {i: group[0] for group in groups for i in group}
    before = {
        (place.get(j, j), place.get(i, i)) for i, step in enumerate(steps) for j in step.before
    }
    remaining = {place.get(i, i) for i in range(len(steps))}
    while remaining:
        ready = {
            i for i in remaining if not any(j in remaining for j, k in before if k == i and j != i)
        }
        assert ready
        remaining -= ready


def test_waits_are_saved_where_they_cost_more_than_they_gain() -> None:
    own, other = STREAMS[:2]
    chain = [Step(((own, other)[i % 2],), 1.0, [i - 1] if i else [], True, 5.0) for i in range(6)]
    assert makespan(chain) == 6 + 5 * 5
    assert joined(chain) == [[0, 1, 2, 3, 4, 5]]
    apart = [Step((own,), 9.0, [], True, 5.0), Step((other,), 9.0, [], True, 5.0)]
    assert joined([*apart, Step((own,), 1.0, [0, 1], False, 5.0)]) == []


def test_a_step_saves_no_longer_launch_than_it_takes() -> None:
    """Joined views, which take no time, made plans seem shorter."""
    own, other = STREAMS[:2]
    view, task = (Step((own,), seconds, [], launch_seconds=1.0) for seconds in (0.0, 1.0))
    assert joined([view, task, Step((other,), 0.0, [0], False, 1.0)]) == []


def test_the_order_in_which_steps_before_are_named_makes_no_difference() -> None:
    """Sets of the same numbers may have different orders."""
    cpu = [Stream("cpu", f"compute{i}") for i in range(5)]
    # The last step can be joined with one of the three before it.
    short = [Step((cpu[i],), 1.0, []) for i in range(3)]
    long = [Step((cpu[3],), 0.5, [], False) for _ in range(6)]
    for before in ([0, 1, 8], [1, 8, 0], [8, 1, 0]):
        last = Step((cpu[4],), 1.0, before)
        assert joined([*short[:2], *long, short[2], last]) == [[0, 9]]
