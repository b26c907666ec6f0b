"""The law of options: together they make a schedule that keeps its promises, or are refused in words."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Collection
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from tests.laws.test_laws import assert_equals_serial
from tests.sample_policies import policies
from tests.strategies import graphs, inputs_for, machines

COSTS = [asc.Costs(default_seconds=seconds, default_nbytes=100) for seconds in (0.0, 1e-5)]
LIMITS = st.sampled_from([float("inf"), 1e4, 1000.0])


def options(graph: asc.Graph, machine: asc.Machine) -> dict[str, st.SearchStrategy[Any]]:
    """Return what each option of ``schedule`` may be."""
    device = st.sampled_from(machine.names)

    def by_name(names: Collection[str]) -> st.SearchStrategy[Any]:
        return st.dictionaries(st.sampled_from(["*", *names]), device, max_size=2)

    return {
        "policy": policies,
        "seconds": st.sampled_from([None, None, None, 0.001]),
        "seed": st.integers(0, 3),
        "progress": st.sampled_from([None, False, lambda part, best: None]),
        "costs": st.sampled_from([None, *COSTS]),
        "examples": st.sampled_from([None, inputs_for(graph)]),
        "inputs": device | by_name(graph.input_names),
        "outputs": device | by_name(graph.outputs),
        "place": by_name([task.name for task in graph.tasks]),
        "backend": st.sampled_from([None, "host", "virtual", "emulated"]),
        "check": st.sampled_from([False, True, "bytes"]),
        "replay": st.booleans(),
        "in_flight": st.sampled_from([None, 1, 2, 3]),
        "objective": st.sampled_from(["makespan", "period"]),
    }


def test_every_option_is_drawn() -> None:
    known = options(asc.Graph(), asc.Machine.emulated(gpus=1))
    assert [*inspect.signature(asc.schedule).parameters] == ["graph", "machine", *known]


@given(st.data(), graphs(most=2) | graphs(most=8), machines(), LIMITS)
def test_any_options_make_a_right_schedule_or_are_refused(
    data: st.DataObject, graph: asc.Graph, machine: asc.Machine, nbytes: float
) -> None:
    machine = machine.limited(nbytes) if nbytes < float("inf") else machine
    how = data.draw(st.fixed_dictionaries({}, optional=options(graph, machine)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            schedule = asc.schedule(graph, machine, **how)
        except (asc.GraphError, asc.MachineError, asc.ScheduleError):
            return
        assert_keeps_its_promises(schedule, graph)


def assert_keeps_its_promises(schedule: asc.Schedule, graph: asc.Graph) -> None:
    rounding = 1 + 1e-9
    assert schedule.lower_bound <= schedule.makespan * rounding
    assert schedule.period_bound <= schedule.period * rounding
    machine = schedule.machine
    for name, peak in schedule.peak_bytes.items():
        assert peak <= machine.device(name).nbytes * rounding
    assert asc.Program.parse(str(schedule)) == schedule.program
    assert str(schedule.explain())
    with tempfile.TemporaryDirectory() as folder:
        schedule.save(f"{folder}/plan.json")
        again = asc.load(f"{folder}/plan.json", graph)
    assert again.text == schedule.text
    assert (again.makespan, again.period) == (schedule.makespan, schedule.period)
    if machine.contention:  # else it is for planning
        with again:
            assert_equals_serial(again, graph, runs=2)
