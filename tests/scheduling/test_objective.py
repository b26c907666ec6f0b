"""Schedules that minimize the period, and how many runs are in flight."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.errors import ScheduleError
from autosched.simulation.simulate import simulate
from tests.strategies import graphs, machines

FAST = asc.Machine.emulated(gpus=2, bytes_per_second=1e30, latency=0.0)


def chain(*seconds, nbytes=0):
    graph = asc.Graph("chain")
    value = graph.input("x")
    for i, each in enumerate(seconds):
        value = graph.add(abs, value, name=f"t{i}", seconds=each, nbytes=nbytes)
    graph.output(y=value)
    return graph


def test_one_run_is_in_flight_by_default():
    schedule = asc.schedule(chain(3.0, 2.0), FAST)
    assert schedule.program.in_flight == 1
    assert schedule.period == schedule.makespan == 5.0


def test_the_period_is_minimized_by_stages_of_equal_load():
    schedule = asc.schedule(chain(3.0, 2.0, 1.0, 4.0, 2.0), FAST, objective="period", in_flight=9)
    assert schedule.period == 5.0
    assert len(set(schedule.placement.device.values())) == 3


def test_the_fewest_runs_that_reach_the_period_are_in_flight():
    schedule = asc.schedule(chain(4.0, 4.0, 4.0), FAST, objective="period")
    assert (schedule.program.in_flight, schedule.period) == (3, 4.0)


def test_one_run_is_in_flight_where_more_gain_nothing():
    schedule = asc.schedule(chain(4.0), FAST, objective="period")
    assert (schedule.program.in_flight, schedule.period) == (1, 4.0)


def test_few_runs_in_flight_are_taken_into_account():
    # Three stages would take 6 with copies, and two runs in flight need 3 + 1 / 2 at least.
    slow = asc.Machine.emulated(gpus=2, bytes_per_second=1.0, latency=0.0)
    graph = chain(2.0, 2.0, 2.0, nbytes=2)
    found = asc.schedule(graph, slow, objective="period", in_flight=2)
    assert found.period == min(
        asc.schedule(graph, slow, policy=split(found), in_flight=2).period for split in SPLITS
    )


def _assigned(devices):
    def policy(problem):
        names = tuple(task.name for task in problem.graph.tasks)
        return asc.Placement(dict(zip(names, devices, strict=True)), names)

    return lambda found: policy


DEVICES = "cpu", "cuda:0", "cuda:1"
SPLITS = [_assigned((a, b, c)) for a in DEVICES for b in DEVICES for c in DEVICES]


@pytest.mark.parametrize("link", ["pcie4", "nvlink4"])
def test_data_for_all_stages_keep_none_waiting(link, tmp_path):
    # Direct copies to all GPUs would keep the first copy-out stream until the last stage is done.
    graph = asc.Graph()
    machine = asc.Machine.emulated(gpus=4, link=link)
    seconds = dict.fromkeys(machine.accelerators, 1.0) | {"cpu": 100.0}
    value = first = graph.add(abs, graph.input("x"), name="first", seconds=seconds, nbytes=8)
    for i in range(7):
        value = graph.add(max, value, first, name=f"t{i}", seconds=seconds, nbytes=8)
    graph.output(y=value)
    found = asc.schedule(graph, machine, objective="period", in_flight=16)
    assert found.period == 2.0
    assert any(send.source for send in found.placement.copies)
    once = asc.schedule(graph, machine, policy=lambda *_: found.placement)
    once.save(tmp_path / "plan.json")
    assert asc.load(tmp_path / "plan.json", graph).placement == found.placement


def test_memory_reduces_the_runs_in_flight():
    graph = chain(1.0, 1.0, nbytes=100)
    machine = asc.Machine([asc.Device("cpu", nbytes=750.0)])
    with pytest.warns(RuntimeWarning, match=r"5 runs in flight need 1,100 B of memory on 'cpu'"):
        schedule = asc.schedule(graph, machine, costs=asc.Costs(default_nbytes=100), in_flight=5)
    assert schedule.program.in_flight == 3
    assert schedule.peak_bytes == {"cpu": 700.0}


def test_no_warning_where_the_number_is_chosen():
    graph = chain(1.0, 1.0, nbytes=100)
    machine = asc.Machine([asc.Device("cpu", nbytes=750.0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asc.schedule(graph, machine, costs=asc.Costs(default_nbytes=100), objective="period")


def test_memory_over_time_never_exceeds_the_footprint_of_a_loop():
    schedule = asc.schedule(chain(3.0, 2.0, 3.0, nbytes=100), FAST, objective="period", in_flight=3)
    timeline = schedule.simulate(runs=8)
    for device, steps in schedule.memory(timeline).items():
        assert max(nbytes for _, nbytes in steps) <= schedule.peak_bytes[device]
        assert steps[-1][1] == steps[0][1]


@pytest.mark.parametrize("options", [{"objective": "speed"}, {"in_flight": 0}, {"in_flight": 1.5}])
def test_other_words_and_numbers_are_refused(options):
    with pytest.raises(ScheduleError):
        asc.schedule(chain(1.0), FAST, **options)


@settings(max_examples=30)
@given(
    graph=graphs(),
    machine=machines(),
    runs=st.integers(1, 4),
    policy=st.sampled_from(["heft", "round_robin", "auto"]),
)
def test_law_no_period_is_below_its_bound_and_runs_approach_it(graph, machine, runs, policy):
    costs = asc.Costs(default_seconds=1.0, default_nbytes=1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # memory may allow fewer runs
        schedule = asc.schedule(
            graph, machine, policy=policy, costs=costs, in_flight=runs, objective="period"
        )
    assert schedule.period >= schedule.period_bound * (1 - 1e-9)
    many = 12 * 5
    longer, shorter = (
        simulate(schedule.program, schedule.problem, n).makespan for n in (2 * many, many)
    )
    assert longer - shorter == pytest.approx(many * schedule.period, rel=1e-6, abs=1e-9)
