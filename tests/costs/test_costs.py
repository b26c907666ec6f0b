"""Costs: which entry wins, the roofline by hand, and what is refused."""

import math
import re
from fractions import Fraction

import pytest

from autosched.costs.costs import Costs, Work
from autosched.errors import ScheduleError
from autosched.graph.graph import Graph
from autosched.machine.machine import Device

CPU = Device("cpu", flops_per_second=1e9, bytes_per_second=1e8, launch_seconds=0.5)
GPU = Device("cuda:0", flops_per_second=1e12, bytes_per_second=1e11, launch_seconds=0)


def identity(x):
    return x


@pytest.fixture
def graph():
    """Return x, plain(x), known(x) with costs that the user gave, and view = x.T."""
    graph = Graph("g")
    x = graph.input("x")
    graph.add(identity, x, name="plain")
    graph.add(identity, x, name="known", seconds={"cpu": 3.0}, nbytes=8)
    graph.add(identity, x.T, name="after_view")
    return graph


@pytest.mark.parametrize(
    ("work", "device", "seconds"),
    [
        (Work(2e9, 1e6), CPU, 2.5),  # bound by compute
        (Work(1e6, 3e8), CPU, 3.5),  # bound by memory
        (Work(0, 0), CPU, 0.5),
        (Work(1e12, 1e11), GPU, 1.0),  # the ridge
    ],
)
def test_the_roofline_takes_the_slower_of_compute_and_memory(work, device, seconds):
    assert work.seconds(device) == seconds


def test_what_is_given_first_wins(graph):
    plain, known = graph.task("plain"), graph.task("known")
    costs = Costs(default_seconds=7.0)
    assert costs.task_seconds(plain, CPU) == 7.0
    worked = Costs(work={"plain": Work(1e9, 0), "known": Work(1e9, 0), "T": Work(1e9, 0)})
    assert worked.task_seconds(plain, CPU) == 1.5
    assert worked.task_seconds(known, CPU) == 3.0
    assert worked.task_seconds(graph.task("T"), CPU) == 0
    told = worked.override(seconds={"plain": 2.0, "known": 4.0, "T": 5.0})
    assert [told.task_seconds(graph.task(name), CPU) for name in ("plain", "known", "T")] == [
        2.0,
        4.0,
        5.0,
    ]


def test_a_table_per_device_forbids_the_devices_it_leaves_out(graph):
    assert Costs().task_seconds(graph.task("known"), GPU) == math.inf
    costs = Costs.table(seconds={"plain": {"cuda:0": 2}})
    assert costs.task_seconds(graph.task("plain"), GPU) == 2.0
    assert costs.task_seconds(graph.task("plain"), CPU) == math.inf


def test_bytes_come_from_the_table_the_user_or_the_default(graph):
    costs = Costs(default_nbytes=5)
    assert [costs.value_nbytes(graph.value(name)) for name in ("plain", "known")] == [5, 8]
    assert Costs.table({}, nbytes={"known": 0}).value_nbytes(graph.value("known")) == 0


def test_an_override_leaves_the_original_as_it_was():
    costs = Costs.table(seconds={"a": 1.0, "b": 2.0}, nbytes={"a": 3})
    changed = costs.override(seconds={"a": {"cpu": 4.0}}, nbytes={"b": 5})
    assert (costs.seconds, costs.nbytes) == ({"a": 1.0, "b": 2.0}, {"a": 3})
    assert (changed.seconds, changed.nbytes) == ({"a": {"cpu": 4.0}, "b": 2.0}, {"a": 3, "b": 5})
    assert costs.override() == costs


def test_an_override_keeps_work_and_defaults():
    costs = Costs(work={"a": Work(1, 1)}, default_seconds=2.0, default_nbytes=3.0).override(
        seconds={"b": 1.0}
    )
    assert (costs.work, costs.default_seconds, costs.default_nbytes) == (
        {"a": Work(1, 1)},
        2.0,
        3.0,
    )


def refused(message):
    return pytest.raises(ScheduleError, match=f"^{re.escape(message)}$")


NO_NUMBERS = [-1, -0.5, math.nan, "fast", None, True, 10**400, Fraction(10**400, 3), -math.inf, 1j]


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_numbers_that_cannot_be_seconds(number):
    for seconds in (number, {"cpu": 1.0, "cuda:0": number}):
        with refused(f"seconds of 'a' must be a number, 0 or more, got {number!r}"):
            Costs.table(seconds={"a": seconds})
    with refused(f"default_seconds must be a number, 0 or more, got {number!r}"):
        Costs(default_seconds=number)


@pytest.mark.parametrize("number", [*NO_NUMBERS, math.inf])
def test_numbers_that_cannot_be_bytes_or_work(number):
    message = f"must be a number, 0 or more, and finite, got {number!r}"
    with refused(f"nbytes of 'a' {message}"):
        Costs().override(nbytes={"a": number})
    with refused(f"default_nbytes {message}"):
        Costs(default_nbytes=number)
    with refused(f"flops of work {message}"):
        Work(number, 0)
    with refused(f"nbytes of work {message}"):
        Work(0, number)


def test_tables_that_are_none():
    with refused("seconds must be a table by name, got 3"):
        Costs.table(3)
    with refused("nbytes must be a table by name, got ['a']"):
        Costs(nbytes=["a"])
    with refused("work of 'a' must be Work(flops, nbytes), got 3"):
        Costs(work={"a": 3})
    with refused("default_seconds must be a number, 0 or more, got {'cpu': 1.0}"):
        Costs(default_seconds={"cpu": 1.0})


@pytest.mark.parametrize("number", [0, 0.0, 3, Fraction(1, 3)])
def test_numbers_that_can_be_costs(number):
    assert Costs.table(seconds={"a": number}, nbytes={"a": number}).seconds["a"] == number
    assert Costs.table(seconds={"a": math.inf, "b": {"cpu": math.inf}}).seconds["a"] == math.inf


def test_a_misspelt_name_is_named(graph):
    Costs.table(seconds={"plain": 1.0}, nbytes={"x": 1}).check(graph)
    with pytest.raises(
        ScheduleError, match=r"^costs give seconds for 'plan', which graph 'g' does not have$"
    ):
        Costs.table(seconds={"plain": 1.0, "plan": 1.0}).check(graph)
    with pytest.raises(
        ScheduleError, match=r"^costs give nbytes for 'y', which graph 'g' does not have$"
    ):
        Costs.table({}, nbytes={"y": 1}).check(graph)
    with pytest.raises(
        ScheduleError, match=r"^costs give work for 'y', which graph 'g' does not have$"
    ):
        Costs(work={"y": Work(1, 1)}).check(graph)


def test_costs_come_back_from_json() -> None:
    costs = Costs(work={"mul": Work(1, 2.5)}).override(
        {"a": {"cpu": 1, "cuda:0": math.inf}, "b": 0.5}, {"a": 8}
    )
    assert Costs.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not the JSON of costs: it must be an object, got a list"),
        ("{", "not the JSON of costs: not JSON"),
        ('{"seconds": {"a": -1}}', "seconds of 'a' must be a number, 0 or more, got -1"),
    ],
)
def test_what_is_no_json_of_costs_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Costs.from_json(text)
