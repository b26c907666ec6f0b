"""autosched.testing: what it draws can be scheduled, and what it checks is wrong where it says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import autosched as asc
from autosched.errors import InterleavingError
from autosched.testing import check, machines_for
from autosched.testing.comparing import bits, difference
from tests.strategies import graphs, inputs_for

X = torch.linspace(-1, 1, 6).reshape(2, 3)


# ---- check


def two_layers() -> asc.Graph:
    graph = asc.Graph("two layers")
    x, w = graph.inputs("x", "w")
    h = torch.relu(x @ w)
    w -= 0.1 * (x.t() @ h)
    graph.output(y=h @ w.t(), h=h)
    return graph


def test_a_good_graph_passes_and_its_examples_are_as_they_were() -> None:
    examples = {"x": X.clone(), "w": torch.ones(3, 2)}
    torch.manual_seed(5)
    expected, torch_state = bits(examples), torch.random.get_rng_state()
    found = check(two_layers(), examples=examples, interleavings=2)
    assert found.schedules == 16 * 6
    assert found.programs > 5
    assert found.interleavings == 2 * found.programs
    assert str(found).startswith(f"96 schedules, {found.programs} distinct programs, ")
    assert bits(examples) == expected
    assert torch.equal(torch.random.get_rng_state(), torch_state)


@settings(max_examples=settings().max_examples // 3)  # each is run 4 times in each of 6 ways
@given(graph=graphs(most=8))
def test_sampled_graphs_pass(graph: asc.Graph) -> None:
    machine = asc.Machine.emulated(gpus=3, cpu_streams=2)
    check(graph, machine, examples=inputs_for(graph), interleavings=4)


def test_machines_have_what_constraints_name() -> None:
    graph = asc.Graph()
    with graph.on("cuda:6"):
        x = graph.input("x")
    y = graph.add(torch.neg, x, on="xpu:0")
    graph.output(graph.add(torch.neg, y, seconds={"cpu:3": 1.0}, name="z"))
    assert all(
        {"cpu", "cuda:6", "xpu:0", "cpu:3"} <= set(machine.names) for machine in machines_for(graph)
    )
    assert check(graph, examples={"x": X}, interleavings=2).schedules > 16


def test_a_policy_that_finds_no_schedule_is_left_out_unless_all_are() -> None:
    def refuses(*_: object) -> asc.Placement:
        raise asc.ScheduleError("not with me")

    graph, examples = two_layers(), {"x": X, "w": torch.ones(3, 2)}
    machine = asc.Machine.emulated(gpus=1)
    assert check(graph, machine, examples=examples, policies=[refuses, "single"]).schedules == 1
    with pytest.raises(asc.ScheduleError, match="not with me"):
        check(graph, machine, examples=examples, policies=[refuses])


def test_shared_state_is_restored_after_each_run() -> None:
    graph, model, total = (
        asc.Graph(),
        torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)),
        torch.zeros(()),
    )
    optimizer = torch.optim.Adam(model.parameters())

    def train(x: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        with torch.enable_grad():
            loss = model(x).square().sum()
            loss.backward()
        optimizer.step()
        return loss.detach()

    loss = graph.add(train, graph.input("x"), optimizer)
    graph.constant(total, "total").add_(loss)
    graph.output(loss, y=graph.value("total"))
    before = bits(list(model.state_dict().values()))
    check(graph, examples={"x": X}, interleavings=4)
    assert bits(list(model.state_dict().values())) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state_dict()["state"]
    assert total == 0


def failing(graph: asc.Graph, machine: asc.Machine | None = None, **facts: object) -> str:
    with pytest.raises(AssertionError) as error:
        check(graph, machine, examples={"x": X}, **facts)
    assert isinstance(error.value, InterleavingError)
    return str(error.value)


def sharing_a_list() -> asc.Graph:
    """One task appends what another looks for, and the graph says nothing of it."""
    graph, notes = asc.Graph("notes"), []

    def first(x: torch.Tensor) -> torch.Tensor:
        notes.clear()
        return x * 2

    def second(x: torch.Tensor) -> torch.Tensor:
        notes.append("second")
        return x * 3

    def third(x: torch.Tensor) -> torch.Tensor:
        return x * 1.0 if "second" in notes else x + 0.5

    x = graph.input("x")
    graph.output(*(graph.add(fn, x, name=fn.__name__) for fn in (first, second, third)))
    return graph


def test_the_report_has_the_difference_its_first_task_and_a_call_to_repeat_it() -> None:
    report = failing(sharing_a_list())
    assert (
        "graph 'notes' does not do what its serial run does: output 'third' differs in 6 of 6 numbers, by up to 0.5"
        in report
    )
    assert "first task that differs   'third' on cpu, added at " in report
    assert __file__ in report
    assert "cpu (3), with so many compute streams" in report
    assert "Likely causes: a task draws random numbers without random=True" in report
    assert "run second" in report
    (again,) = [
        line.partition("again")[2].strip()
        for line in report.splitlines()
        if line.startswith("  again")
    ]
    with pytest.raises(InterleavingError) as error:
        eval(again, {"asc": asc, "graph": sharing_a_list(), "examples": {"x": X}})
    assert str(error.value).partition("first task")[0] == report.partition("first task")[0]


def test_a_task_that_only_fails_when_another_is_late_is_reported_with_its_error() -> None:
    graph, found = asc.Graph(), {}
    x = graph.input("x")
    graph.output(
        graph.add(lambda x: found.setdefault("it", x * 2), x, name="put"),
        graph.add(lambda x: found.pop("it") + x, x, name="get"),
    )
    machine = asc.Machine([asc.Device("cpu", streams=2)], imagined=True)
    report = failing(graph, machine, policies=["heft"])
    assert "raises TaskError: task 'get' on cpu failed: KeyError: 'it'" in report
    assert (
        "check(graph, machine, examples=examples, policies=['heft'], interleavings=20, seed=0)"
        in report
    )


def test_nondeterministic_graphs_are_distinguished_from_wrong_schedules() -> None:
    graph, count = asc.Graph("counting"), [0]

    def counted(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x + count[0]

    graph.output(graph.add(counted, graph.add(torch.neg, graph.input("x")), name="counted"))
    message = failing(graph)
    assert message.startswith(
        "two serial runs of graph 'counting' with the same inputs and seed differ, first in task 'counted'"
    )
    assert __file__ in message


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.data.mul_(2).sum(),
        lambda x: torch.from_numpy(np.add(x.numpy(), 1, out=x.numpy())).sum(),
    ],
)
def test_a_write_that_version_counters_miss_is_named(
    write: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    graph = asc.Graph()
    graph.output(graph.add(write, graph.input("x"), name="sneaky"))
    with pytest.raises(
        asc.HazardError, match=r"task 'sneaky' wrote its argument 'x' in place without declaring it"
    ):
        check(graph, examples={"x": X})


# ---- comparing


@pytest.mark.parametrize(
    ("expected", "found", "said"),
    [
        (torch.zeros(2), torch.zeros(2), None),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), None),
        (torch.zeros(2), torch.zeros(3), "is torch.float32[3] instead of torch.float32[2]"),
        (
            torch.zeros(2),
            torch.tensor([2.0, float("nan")]),
            "differs in 2 of 2 numbers, by up to 2; 1 are NaN on one",
        ),
        (torch.zeros(2), -torch.zeros(2), "differs in bits but not in numbers"),
        (np.zeros(2), np.array([0.0, 3.0]), "differs in 1 of 2 numbers, by up to 3"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "['a'][1] is 3 instead of 2"),
        ({"a": 1}, {"b": 1}, "has the leaves [\"['b']\"] instead of [\"['a']\"]"),
        (1, 1.0, "is float instead of int"),
        (float("nan"), float("nan"), None),
        (0.0, -0.0, "is -0.0 instead of 0.0"),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), None),
        (torch.ones(2, 1)[:, :1].t()[:, :1], torch.ones(1, 1), None),
        ("a", None, "is NoneType instead of str"),
    ],
)
def test_differences_are_described(expected: object, found: object, said: str | None) -> None:
    how = difference(expected, found)
    assert how == said or (said is not None and how is not None and how.startswith(said))


# ---- what is imported, and when


def test_state_that_tasks_keep_from_run_to_run_hides_no_race() -> None:
    """With the same numbers in each run, what the run before left is what this one should read."""
    kept = torch.zeros(2, 3).numpy()

    def put(x: torch.Tensor) -> torch.Tensor:
        kept[:] = x.numpy()
        return x + 1

    def get(x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(kept.copy())

    def made(*tasks: Callable[[torch.Tensor], torch.Tensor]) -> asc.Graph:
        graph = asc.Graph()
        x = graph.input("x")
        graph.output(*[graph.add(task, x * 2) for task in tasks])
        return graph

    assert "output 'get' differs in" in failing(made(put, get))
    # A task that reads what the run before has left is reported, too.
    assert "first in task 'get', " in failing(made(get, put))


def test_tasks_may_refuse_other_numbers() -> None:
    def strict(x: torch.Tensor) -> torch.Tensor:
        assert x.sum() == 1
        return x * 2

    graph = asc.Graph()
    graph.output(y=graph.add(strict, graph.input("x")))
    assert asc.testing.check(graph, examples={"x": torch.tensor([0.25, 0.75])}).schedules
