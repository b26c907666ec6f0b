"""Schedule: what goes into it, what it says of itself, and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import replace

import pytest
import torch

import autosched as asc
from autosched.policies import POLICIES
from autosched.scheduling import planning
from tests.sample_policies import placed

TWO_GPUS = asc.Machine.emulated(gpus=2)
ONE_EACH = {"cuda:0": 1.0, "cuda:1": 1.0}


def fork(machine_seconds=1.0, nbytes=None):
    """x -> a, b -> both."""
    graph = asc.Graph("fork")
    x = graph.input("x")
    a = graph.add(torch.sin, x, name="a", seconds=machine_seconds, nbytes=nbytes)
    b = graph.add(torch.cos, x, name="b", seconds=machine_seconds, nbytes=nbytes)
    graph.output(both=graph.add(torch.add, a, b, name="both", seconds=0.0))
    return graph


# ---- planning


def test_progress_is_a_bar_or_a_function_of_the_callers(capsys):
    graph, told = asc.Graph(), []
    for i, seconds in enumerate((3, 3, 2, 2, 2)):  # lists need 7 s, and 6 s are possible
        graph.add(int, name=f"t{i}", seconds=seconds)
    one = asc.Machine.emulated(gpus=1)
    asc.schedule(
        graph, one, policy="search", progress=lambda part, makespan: told.append((part, makespan))
    )
    assert (told[0], told[-1]) == ((0.0, 7.0), (1.0, 6.0))
    asc.schedule(graph, one, policy="search", progress=False)
    assert capsys.readouterr().err == ""
    asc.schedule(graph, one, policy="search", progress=True)
    assert capsys.readouterr().err.endswith("100%, best 6 s\033[K\r\033[K")


# ---- running


def test_inputs_and_outputs_are_where_they_are_said_to_be():
    schedule = asc.schedule(
        fork(),
        TWO_GPUS,
        policy=placed("cuda:0"),
        inputs={"x": "cuda:0"},
        outputs={"both": "cuda:1"},
    )
    assert schedule.program.inputs == (("x", "cuda:0"),)
    assert schedule.program.outputs == (("both", "cuda:1"),)


# ---- policies


def test_a_policy_is_given_the_problem():
    graph, costs, seen = fork(), asc.Costs(default_seconds=1), []

    def policy(problem):
        seen.append(problem)
        return placed("cpu")(problem)

    schedule = asc.schedule(graph, TWO_GPUS, policy=policy, costs=costs, outputs="cuda:1")
    (given,) = seen
    assert (str(given.graph), given.machine, given.costs) == (str(graph), TWO_GPUS, costs)
    assert given.constraints.outputs == dict(schedule.program.outputs)
    assert given.goal == ("makespan", 1)


def test_a_schedule_is_copied_and_pickled_without_what_policies_have_read():
    graph = asc.Graph()
    graph.output(y=graph.add(abs, graph.input("x"), seconds=1.0))
    schedule = asc.schedule(graph, TWO_GPUS, policy="heft", backend="host")
    assert schedule.problem.lists.group == [0]
    for twin in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert (str(twin), twin(x=-3)) == (str(schedule), {"y": 3})


def test_auto_takes_two_devices_when_copies_are_cheap():
    schedule = asc.schedule(fork(ONE_EACH | {"cpu": 9.0}, nbytes=25e6), TWO_GPUS)
    assert {schedule.placement.device[name] for name in "ab"} == {"cuda:0", "cuda:1"}
    assert 1 < schedule.makespan < 1.1


def test_auto_takes_one_device_when_copies_cost_more_than_they_gain():
    schedule = asc.schedule(fork(ONE_EACH | {"cpu": 9.0}, nbytes=50e9), TWO_GPUS)
    assert len(set(schedule.placement.device.values())) == 1
    assert 2 <= schedule.makespan < 2.1


# ---- what it says of itself


def test_makespan_serial_seconds_bound_and_gap():
    """Copies of 0.51 s bring x to a; a and b share a device, though two would do, and one result would travel."""
    machine = asc.Machine(
        [asc.Device("cpu"), asc.Device("cuda:0"), asc.Device("cuda:1")],
        [asc.Link("cpu", f"cuda:{i}", 1e9, 0.01) for i in range(2)],
    )
    graph = fork({"cuda:0": 2.0, "cuda:1": 2.0})
    schedule = asc.schedule(
        graph,
        machine,
        policy=placed("cuda:0"),
        costs=asc.Costs.table({}, nbytes={"x": 0.5e9}),
    )
    assert schedule.makespan == schedule.simulate().makespan == 0.51 + 4
    assert schedule.serial_seconds == 0.51 + 4
    assert schedule.lower_bound == pytest.approx(0.51 + 2 + 0.01)
    assert schedule.gap == pytest.approx(4.51 / 2.52 - 1)


def test_an_empty_graph_has_an_empty_schedule():
    with asc.schedule(asc.Graph("nothing"), TWO_GPUS) as schedule:
        assert (str(schedule), schedule.makespan, schedule.gap, schedule()) == ("", 0, 0, {})


def test_it_prints_as_its_program_and_is_shown_with_its_size():
    schedule = asc.schedule(fork(), TWO_GPUS, policy=placed("cpu"))
    assert str(schedule) == str(schedule.program)
    assert (
        repr(schedule)
        == "<Schedule of 'fork': 3 tasks, 5 instructions on 1 streams, 2 s predicted>"
    )


def test_examples_give_estimated_costs():
    """A product of two 1000 x 1000 matrices: 2e9 operations, at 5e10 a second on the CPU, and 4 MB to copy."""
    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    graph.output(z=x @ y)
    example = torch.empty(1000, 1000, device="meta")
    schedule = asc.schedule(
        graph, TWO_GPUS, policy=placed("cpu"), examples={"x": example, "y": example}
    )
    assert schedule.makespan == pytest.approx(0.04, rel=0.01)
    assert schedule.costs.value_nbytes(schedule.graph.value("x")) == 4e6
    assert (
        asc.schedule(graph, TWO_GPUS, policy=placed("cpu")).makespan == asc.Costs().default_seconds
    )


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"policy": "best"},
            asc.ScheduleError,
            "unknown policy 'best'; known are 'auto', 'single', .*'search', 'exact', or pass a function",
        ),
        (
            {"policy": lambda graph, machine, costs: None},
            asc.ScheduleError,
            "a policy is a function of one problem, .* cannot be called with one: missing a required arg",
        ),
        ({"policy": lambda *_: {"a": "cpu"}}, asc.ScheduleError, r"must return a Placement, got \{'a': 'cpu'\}"),
        ({"policy": lambda *_: asc.Placement({}, ())}, asc.ScheduleError, "orders 0 tasks, the graph has 3"),
        ({"policy": placed("cuda:7")}, asc.MachineError, "the machine has no device 'cuda:7'"),
        (
            {"costs": asc.Costs.table({"z": 1})},
            asc.ScheduleError,
            "costs give seconds for 'z', which graph 'fork' does",
        ),
        ({"costs": asc.Costs.table({}, {"z": 1})}, asc.ScheduleError, "costs give nbytes for 'z', which graph 'fork'"),
        ({"inputs": {"z": "cpu"}}, asc.GraphError, "inputs= names 'z', which is no input; inputs are 'x'"),
        ({"inputs": {"x": "cuda:7"}}, asc.MachineError, "the machine has no device 'cuda:7'; it has 'cpu', 'cuda:0'"),
        ({"outputs": {"z": "cpu"}}, asc.ScheduleError, "outputs= names 'z', which is no output"),
        ({"outputs": {"both": "cuda:7"}}, asc.MachineError, "the machine has no device 'cuda:7'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        asc.schedule(fork(), TWO_GPUS, **options)


@pytest.mark.parametrize("policy", ["auto", *POLICIES])
def test_a_device_that_the_machine_lacks_is_refused(policy):
    graph = asc.Graph()
    graph.add(abs, graph.input("x"), on="cuda:2")
    with pytest.raises(
        asc.MachineError,
        match="the machine has no device 'cuda:2'; it has 'cpu', 'cuda:0', 'cuda:1'",
    ):
        asc.schedule(graph, TWO_GPUS, policy=policy)


@pytest.mark.parametrize("policy", ["auto", *POLICIES])
def test_devices_that_no_link_joins_are_refused(policy):
    graph = asc.Graph()
    graph.output(
        y=graph.add(abs, graph.add(abs, graph.input("x"), name="a", on="p"), name="b", on="q")
    )
    machine = asc.Machine([asc.Device("p"), asc.Device("q")])
    with pytest.raises(asc.ScheduleError, match="no link joins"):
        asc.schedule(graph, machine, policy=policy)


def test_a_program_changed_by_hand_is_proved_before_it_runs():
    graph = asc.Graph()
    graph.output(y=graph.input("x") + 1)
    made = asc.schedule(graph, asc.Machine.emulated(gpus=1))
    changed = replace(made, program=replace(made.program, outputs=()))
    with pytest.raises(asc.ProgramError, match="outputs"):
        changed(x=1)


def test_a_task_that_cannot_be_estimated_is_named_in_a_warning():
    graph = asc.Graph()
    graph.output(y=graph.add(lambda x: x.numpy().sum(), graph.input("x"), name="far"))
    with pytest.warns(
        UserWarning, match=r"no estimate for 'far', taken to cost 10 us \(.*\); give seconds="
    ):
        asc.schedule(graph, asc.Machine.emulated(gpus=1), examples={"x": torch.ones(2)})


def test_of_plans_that_end_as_early_the_one_with_the_fewest_copies_is_taken(monkeypatch):
    machine = asc.Machine(
        [asc.Device("cpu"), asc.Device("cpu:1")], [asc.Link("cpu", "cpu:1", float("inf"), 0)]
    )
    graph = asc.Graph()
    graph.output(
        b=graph.add(
            abs, graph.add(abs, graph.input("x"), name="a", seconds=1.0), name="b", seconds=1.0
        )
    )
    plans = [asc.Placement({"a": "cpu", "b": last}, ("a", "b")) for last in ("cpu:1", "cpu")]
    monkeypatch.setattr(
        planning, "candidates", lambda *_: [lambda *_, plan=plan: plan for plan in plans]
    )
    assert asc.schedule(graph, machine).placement.device == {"a": "cpu", "b": "cpu"}


def test_what_is_no_machine_and_no_backend_is_refused_at_once():
    graph = asc.Graph()
    with pytest.raises(asc.MachineError, match="machine must be a Machine, got 'emulated'"):
        asc.schedule(graph, "emulated")  # type: ignore[arg-type]
    with pytest.raises(asc.ScheduleError, match="unknown backend 'cuda'"):
        asc.schedule(graph, asc.Machine.emulated(), backend="cuda")


@pytest.mark.parametrize("on", [True, False])
def test_planning_leaves_the_garbage_collector_as_it_was(on: bool) -> None:
    seen: list[bool] = []

    def policy(problem: asc.Problem) -> asc.Placement:
        seen.append(gc.isenabled())
        raise asc.ScheduleError("no")

    was_on = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with pytest.raises(asc.ScheduleError):
            asc.schedule(asc.Graph(), asc.Machine.emulated(gpus=1), policy=policy)
        assert seen == [False]
        assert gc.isenabled() is on
    finally:
        (gc.enable if was_on else gc.disable)()
