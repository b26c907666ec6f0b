"""Noise: what becomes of plans when tasks and copies take more or less; plans that stay good."""

import pytest

import autosched as asc
from autosched.errors import ScheduleError
from autosched.lowering import lower
from autosched.policies import heft, robust, round_robin, single, single_on
from autosched.policies.noise import noisy_costs, noisy_makespans
from tests.policies.test_policies import COSTS, processors

WIDE = 6


def stages(count: int = 3) -> asc.Graph:
    """Stages of tasks side by side, each stage behind all tasks of the one before; ``p1`` is fast, and has little else.

    Side by side on all devices a stage takes 1 second, all on ``p1`` 1.04.
    """
    graph = asc.Graph()
    before: list[str] = []
    for stage in range(count):
        names = [f"s{stage}t{i}" for i in range(WIDE)]
        for i, name in enumerate(names):
            graph.add(int, name=name, seconds={"p1": 1.04 / WIDE, f"p{i + 2}": 1.0}, after=before)
        before = names
    return graph


def side_by_side(graph, machine, costs):
    return asc.Placement(
        {t.name: f"p{2 + t.index % WIDE}" for t in graph.tasks}, tuple(t.name for t in graph.tasks)
    )


MACHINE = processors(WIDE + 1)


def noisy_placement(graph, machine, costs, placement, noise, seed=0):
    """Return the median and the 95th percentile of the noisy makespans of a placement."""
    program = lower(graph, machine, placement, {})
    return noisy_makespans(program, graph, machine, costs, noise, seed=seed)


def test_noise_is_seeded_and_lies_within_its_bounds():
    made = asc.schedule(stages(), MACHINE, policy=side_by_side, costs=COSTS)
    parts = made.program, made.graph, MACHINE, COSTS
    median, worst = noisy_makespans(*parts, 0.2)
    assert 0.8 * made.makespan <= median < worst <= 1.2 * made.makespan
    assert noisy_makespans(*parts, 0.2) == (median, worst)
    assert noisy_makespans(*parts, 0.2, seed=1) != (median, worst)
    assert noisy_makespans(*parts, 0.0) == (made.makespan, made.makespan)


def test_copies_are_noisy_too():
    graph = asc.Graph()
    a = graph.add(int, name="a", seconds=0, nbytes=5, on="p1")
    graph.add(int, a, name="b", seconds=0, on="p2")
    median, worst = noisy_placement(
        graph, processors(2), COSTS, heft(graph, processors(2), COSTS), 0.2
    )
    assert 4 <= median < worst <= 6


def test_copies_of_two_values_do_not_share_their_luck():
    """Each takes 5 seconds, at the same time: the longer of two is longer than one in most runs."""
    graph = asc.Graph()
    for a in (graph.add(int, name=name, seconds=0, nbytes=5, on="p1") for name in "ab"):
        graph.add(int, a, seconds=0, on="p2")
    placement = heft(graph, processors(2), COSTS)
    median, _ = noisy_placement(graph, processors(2), COSTS, placement, 0.2)
    assert median > 5.2


def test_costs_as_they_might_be_change_each_task_on_all_devices_alike():
    graph = stages(1)
    task = graph.tasks[0]
    might = noisy_costs(graph, MACHINE, COSTS, 0.2, seed=0)
    first, second = (
        might.task_seconds(task, d) / COSTS.task_seconds(task, d) for d in MACHINE.devices[:2]
    )
    assert first == pytest.approx(second)
    assert 0.8 <= first <= 1.2
    assert might.task_seconds(task, MACHINE.devices[2]) == float("inf")


def test_a_plan_that_waits_for_the_slowest_of_many_loses_to_a_longer_one_under_noise():
    graph, pair = stages(), (side_by_side, single_on("p1"))
    nominal = [asc.schedule(graph, MACHINE, policy=policy, costs=COSTS).makespan for policy in pair]
    assert nominal == pytest.approx([3 * 1.0, 3 * 1.04])
    chosen = robust(0.2, policies=pair)(graph, MACHINE, COSTS)
    assert set(chosen.device.values()) == {"p1"}
    plans = side_by_side(graph, MACHINE, COSTS), chosen
    brittle, good = (noisy_placement(graph, MACHINE, COSTS, plan, 0.2, seed=9) for plan in plans)
    assert good[0] < 0.95 * brittle[0]
    assert good[1] < 0.95 * brittle[1]


def test_without_noise_the_shortest_is_robust():
    graph, pair = stages(), (single_on("p1"), side_by_side)
    assert robust(0.0, policies=pair)(graph, MACHINE, COSTS) == side_by_side(graph, MACHINE, COSTS)


def test_robust_is_as_good_as_each_that_it_tries_and_the_same_twice():
    graph = stages()
    chosen = robust(0.2)(graph, MACHINE, COSTS)
    assert robust(0.2)(graph, MACHINE, COSTS) == chosen
    worst = noisy_placement(graph, MACHINE, COSTS, chosen, 0.2)[1]
    for policy in (heft, single):
        assert (
            worst <= noisy_placement(graph, MACHINE, COSTS, policy(graph, MACHINE, COSTS), 0.2)[1]
        )


def test_robust_says_why_nothing_can_be_placed():
    graph = asc.Graph()
    graph.add(int, name="a", seconds={"p1": 1}, on="p2")
    with pytest.raises(ScheduleError, match="'a' can run nowhere"):
        robust()(graph, processors(2), COSTS)


@pytest.mark.parametrize("noise", [-0.1, 1.5, "20%", None])
def test_noise_that_is_no_share_is_refused(noise):
    with pytest.raises(ScheduleError, match=r"noise must be a share from 0 to 1, .* got"):
        robust(noise)


def test_a_comparison_under_noise_stars_what_stays_good():
    found = asc.compare(
        stages(), MACHINE, [side_by_side, single, round_robin], costs=COSTS, noise=0.2
    )
    shortest = min(found.rows, key=lambda row: row.makespan)
    assert (shortest.policy, found.best[0].policy) == ("side_by_side", "single")
    for row in found.rows:
        assert row.median <= row.worst
    head, columns, *_ = str(found).splitlines()
    assert head == "graph: predicted; median, and 95% of runs, with 20% of noise"
    assert columns.split()[-2:] == ["median", "95%"]


def test_a_comparison_without_noise_says_nothing_of_it():
    found = asc.compare(stages(1), MACHINE, [single], costs=COSTS)
    assert (found.noise, found.rows[0].median, found.rows[0].worst) == (None, None, None)
    assert "median" not in str(found)
    with pytest.raises(ScheduleError, match="noise must be a share"):
        asc.compare(stages(1), MACHINE, [single], costs=COSTS, noise=2)
