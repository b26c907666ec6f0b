"""Exact placements: that they are optimal, and that what they prove is true."""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
import threading
from collections.abc import Sequence

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.lowering import lower
from autosched.lowering.copies import copy_streams
from autosched.placement import Placement, check
from autosched.policies import exact, heft, search
from autosched.simulation.simulate import simulate
from tests.policies.test_policies import ARABNEJAD, TOPCUOGLU, processors
from tests.strategies import graphs, machines

pytest.importorskip("ortools")

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
CLASSIC = {
    "Topcuoglu": (TOPCUOGLU, 73),
    "Arabnejad": (ARABNEJAD, 113),
}  # proved by other programs too


def best_of_all(graph: asc.Graph, machine: asc.Machine, costs: asc.Costs) -> float:
    """Return the least makespan of all placements: each choice of devices, with tasks and copies in each order."""
    allowed = asc.Problem(graph, machine).choices
    best = math.inf
    for devices in itertools.product(*allowed.devices):
        if all(
            devices[first] == device for first, device in zip(allowed.group, devices, strict=True)
        ):
            travelling = [
                (use.value, device)
                for task, device in zip(graph.tasks, devices, strict=True)
                for use in task.reads
                if where(graph, machine, devices, use.value) != device
            ]
            for copies in (
                itertools.permutations(dict.fromkeys(travelling))
                if machine.contention
                else [travelling]
            ):
                for order in itertools.permutations(range(len(devices))):
                    best = min(best, end_of(graph, machine, costs, devices, order, copies))
    return best


def where(graph: asc.Graph, machine: asc.Machine, devices: Sequence[str], value: int) -> str:
    maker = graph.values[value].producer
    return machine.host if maker is None else devices[maker]


def end_of(
    graph: asc.Graph,
    machine: asc.Machine,
    costs: asc.Costs,
    devices: Sequence[str],
    order: Sequence[int],
    copies: Sequence[tuple[int, str]],
) -> float:
    """Return when all has ended if tasks start in this order, and so do copies; infinite if it never ends."""
    free: dict[object, float] = {}  # by stream, or device
    there = {(value.index, machine.host): 0.0 for value in graph.sources}
    left, tasks = list(copies), list(order)
    while left or tasks:
        if left and (left[0][0], source := where(graph, machine, devices, left[0][0])) in there:
            value, device = left.pop(0)
            held = [stream for stream in copy_streams(machine, source, device, len(left)) if stream]
            start = max([there[value, source], *(free.get(stream, 0.0) for stream in held)])
            nbytes, link = costs.value_nbytes(graph.values[value]), machine.link(source, device)
            there[value, device] = end = start + link.latency + nbytes / link.bytes_per_second
            free.update(dict.fromkeys(held, end))
        else:
            task = graph.tasks[tasks.pop(0)] if tasks else None
            if task is None or any(
                (use.value, devices[task.index]) not in there for use in task.reads
            ):
                return math.inf
            device = devices[task.index]
            start = max([free.get(device, 0.0), *(there[use.value, device] for use in task.reads)])
            free[device] = end = start + costs.task_seconds(task, machine.device(device))
            there.update({(use.value, device): end for use in task.outputs})
    return max([0.0, *free.values(), *there.values()])


@pytest.mark.parametrize("name", CLASSIC)
def test_the_optima_of_worked_examples_are_found_and_proved(name):
    graph, optimum = CLASSIC[name]
    schedule = asc.schedule(graph, processors(3), policy="exact")
    assert (schedule.makespan, schedule.lower_bound, schedule.gap) == (optimum, optimum, 0)


@st.composite
def tiny(draw: st.DrawFn) -> tuple[asc.Graph, asc.Machine, asc.Costs]:
    """Draw a graph whose tasks read inputs and what others make, a machine of two devices, and costs, whole or not."""
    graph, unit = asc.Graph(), draw(st.sampled_from([1.0, 1 / 3]))
    contention, gpu = draw(st.booleans()), draw(st.booleans())
    machine = processors(2, contention=contention)
    if gpu:
        machine = asc.Machine.emulated(
            gpus=1, bytes_per_second=1.0, latency=0.0, contention=contention
        )
    numbers, nbytes = st.integers(0, 6).map(lambda number: number * unit), {}
    values = [graph.input("x"), graph.input("w")]
    for i in range(draw(st.integers(1, 3 if contention else 4))):
        read = draw(st.lists(st.sampled_from(values), unique=True, max_size=2))
        seconds = {name: draw(numbers) for name in machine.names}
        values += graph.add(max, *read, name=f"t{i}", seconds=seconds, outputs=(f"a{i}", f"b{i}"))
    nbytes = {value.name: draw(numbers) for value in values}
    return graph, machine, asc.Costs(nbytes=nbytes)


@settings(max_examples=40)
@given(tiny())
def test_nothing_is_better_and_that_is_proved(case):
    graph, machine, costs = case
    schedule = asc.schedule(graph, machine, policy="exact", costs=costs)
    optimum = best_of_all(schedule.graph, machine, costs)
    assert schedule.makespan == pytest.approx(optimum)
    assert schedule.placement.bound == pytest.approx(optimum, rel=1e-5)


@settings(max_examples=settings().max_examples // 3)  # each may take the time that it is given
@given(graphs(), machines())
def test_no_bound_is_above_a_makespan(graph, machine):
    found = asc.schedule(graph, machine, policy=exact(seconds=0.3), costs=COSTS)
    check(found.placement, asc.Problem(found.graph, machine))
    other = asc.schedule(graph, machine, policy="heft", costs=COSTS)
    assert found.placement.bound <= min(found.makespan, other.makespan) * (1 + 1e-9)


@settings(max_examples=10)
@given(tiny())
def test_given_time_it_finds_the_same(case):
    graph, machine, costs = case
    plans = [
        asc.schedule(graph, machine, policy=p, costs=costs)
        for p in (exact(), exact(5.0), search(5.0))
    ]
    assert plans[1].makespan == plans[2].makespan == pytest.approx(plans[0].makespan, rel=1e-5)
    assert (
        plans[1].placement.bound
        == plans[2].placement.bound
        == pytest.approx(plans[0].placement.bound, rel=1e-5)
    )


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 15)), min_size=1, max_size=12),
    st.integers(2, 4),
)
def test_devices_that_are_alike_are_planned_as_any_others(tasks, count):
    graph, values = asc.Graph(), []
    for i, (seconds, readers) in enumerate(tasks):
        read = [value for k, value in enumerate(values[-4:]) if readers >> k & 1]
        values.append(graph.add(max, *read, name=f"t{i}", seconds=seconds))
    machine = processors(count, contention=False)
    dear = asc.Costs(
        nbytes={value.name: 1e-3 for value in values}
    )  # so little that rounding hides it, but not alike
    free = asc.schedule(graph, machine, policy=exact(5.0), costs=asc.Costs(default_nbytes=0))
    assert free.placement.bound == free.makespan
    assert asc.schedule(graph, machine, policy=exact(5.0), costs=dear).makespan == pytest.approx(
        free.makespan, abs=0.1
    )


def test_in_place_writes_may_overtake_readers_so_the_solver_proves_nothing_then():
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=graph.add(abs, x, name="read"))
    graph.add(abs, x, name="write", writes=[x])
    machine = asc.Machine.emulated(gpus=1)
    assert exact()(asc.Problem(graph, machine, COSTS)).bound == max(
        asc.bounds(asc.Problem(graph, machine, COSTS)).values()
    )


def wide(tasks: int, width: int) -> asc.Graph:
    """Return layers of tasks, each reading three of those before, too many to be proved in a moment."""
    dag = nx.DiGraph()
    for task in range(tasks):
        dag.add_node(
            task, seconds={f"p{i + 1}": float(1 + (task * 37 + i * 59) % 97) for i in range(4)}
        )
        for k in range(3):
            if (before := task - width - (task * 7 + k * 5) % width) >= 0:
                dag.add_edge(before, task, nbytes=float((task * 31 + k * 17) % 150))
    return asc.Graph.from_networkx(dag)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_it_with_the_best_so_far():
    graph, machine = wide(150, 12), processors(4, contention=False)
    interrupt = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    placement = exact(seconds=10)(
        asc.Problem(graph, machine, COSTS)
    )  # the first second is for the start
    interrupt.join()
    assert interrupt.finished.is_set()
    ends = [
        simulate(lower(asc.Problem(graph, machine), p), asc.Problem(graph, machine, COSTS))
        for p in (placement, heft(asc.Problem(graph, machine, COSTS)))
    ]
    assert 0 < placement.bound < ends[0].makespan <= ends[1].makespan


def test_without_a_time_limit_it_plans_the_same_again():
    graph, machine = wide(10, 3), processors(4, contention=True)
    placements = [exact()(asc.Problem(graph, machine, COSTS)) for _ in range(2)]
    assert placements[0] == placements[1]


def test_progress_is_told():
    told = []
    exact(seconds=5, progress=lambda *news: told.append(news))(
        asc.Problem(wide(16, 4), processors(4, contention=False), COSTS)
    )
    parts, makespans = zip(*told, strict=True)
    assert all(0 <= part <= 1 for part in parts)
    assert list(makespans) == sorted(makespans, reverse=True)


def test_without_or_tools_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(asc.ScheduleError, match=r"pip install 'autosched\[exact\]'"):
        asc.schedule(wide(4, 2), processors(4, contention=False), policy="exact")


def test_a_graph_without_tasks_is_placed():
    assert exact()(asc.Problem(asc.Graph(), processors(1, contention=True), COSTS)) == Placement(
        {}, ()
    )
