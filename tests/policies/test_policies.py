"""Policies: what each decides, on published examples and on small graphs; that all of them obey the rules, on any."""

from __future__ import annotations

import itertools
import math

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched._lib.jit import Mode
from autosched.costs.costs import Costs
from autosched.errors import MachineError, ScheduleError
from autosched.graph.graph import Graph, Value
from autosched.machine.machine import Device, Link, Machine
from autosched.placement import Placement, check
from autosched.policies import POLICIES, heft, round_robin, single, single_on
from autosched.policies.base.listing import Listing
from autosched.policies.base.possible import Possible
from autosched.problem import Problem
from autosched.scheduling.planning import schedule

COSTS = Costs()


def replay(graph: Graph, machine: Machine, placement: Placement) -> dict[str, tuple[float, float]]:
    """Return when each task starts and ends: in order, each on the stream that is free first, copies when needed."""
    free = {device.name: [0.0] * device.streams for device in machine.devices}
    copy_streams = dict.fromkeys(itertools.product(machine.names, ("in", "out")), 0.0)
    made = {(value.index, 0): (0.0, value.home or machine.host) for value in graph.sources}
    arrived: dict[tuple[int, int, str], float] = {}
    spans: dict[str, tuple[float, float]] = {}
    for name in placement.order:
        task, device = graph.task(name), placement.device[name]
        ready = [spans[graph.tasks[d.task].name][1] for d in task.dependencies]
        for use in task.reads:
            since, source = made[use]
            if source != device and (*use, device) not in arrived:
                held = [(source, "out"), (device, "in")] if machine.contention else []
                if (source == "cpu") != (device == "cpu"):
                    held = [stream for stream in held if stream[0] != "cpu"]
                start = max([since, *(copy_streams[stream] for stream in held)])
                nbytes = COSTS.value_nbytes(graph.values[use.value])
                arrived[*use, device] = start + machine.copy_seconds(source, device, nbytes)
                copy_streams.update(dict.fromkeys(held, arrived[*use, device]))
            ready.append(since if source == device else arrived[*use, device])
        stream = min(range(len(free[device])), key=free[device].__getitem__)
        start = max([*ready, free[device][stream]])
        free[device][stream] = end = start + COSTS.task_seconds(task, machine.device(device))
        spans[name] = start, end
        for value, version in task.writes:
            made.update({(member, version + 1): (end, device) for member in graph.members(value)})
        made.update(dict.fromkeys(task.outputs, (end, device)))
    return spans


def makespan(graph: Graph, machine: Machine, placement: Placement) -> float:
    return max(end for _, end in replay(graph, machine, placement).values())


# ---- the classic model: published examples, with tasks and processors numbered from 1


def processors(count: int, *, contention: bool = False) -> Machine:
    devices = [Device(f"p{i}") for i in range(1, count + 1)]
    links = [
        Link(a.name, b.name, bytes_per_second=1) for a, b in itertools.combinations(devices, 2)
    ]
    return Machine(devices, links, contention=contention)


def example(seconds: str, edges: str, order: str = "") -> Graph:
    """Read rows of seconds per processor, and edges as ``from-to bytes``; tasks may be added in another order."""
    rows = {str(task): row.split() for task, row in enumerate(seconds.split(";"), 1)}
    dag = nx.DiGraph()
    for task in order.split() or rows:
        dag.add_node(
            task, seconds={f"p{i}": float(number) for i, number in enumerate(rows[task], 1)}
        )
    for edge in edges.split(","):
        ends, nbytes = edge.split()
        dag.add_edge(*ends.split("-"), nbytes=float(nbytes))
    return Graph.from_networkx(dag)


# Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002, figure 2 and table 1.
TOPCUOGLU = example(
    "14 16 9; 13 19 18; 11 13 19; 13 8 17; 12 13 10; 13 16 9; 7 15 11; 5 11 14; 18 12 20; 21 7 16",
    "1-2 18, 1-3 12, 1-4 9, 1-5 11, 1-6 14, 2-8 19, 2-9 16, 3-7 23, 4-8 27, 4-9 23, 5-9 13, 6-8 15, 7-10 17, 8-10 11, "
    "9-10 13",
)
# Arabnejad, Barbosa, IEEE TPDS 25(3), 2014.
ARABNEJAD = example(
    "22 21 36; 22 18 18; 32 27 43; 7 10 4; 29 27 35; 26 17 24; 14 25 30; 29 23 36; 15 21 8; 13 16 33",
    "1-2 17, 1-3 31, 1-4 29, 1-5 13, 1-6 7, 2-8 3, 2-9 30, 3-7 16, 4-8 11, 4-9 7, 5-9 57, 6-8 5, 7-10 9, 8-10 42, "
    "9-10 7",
)
# Three small ones that papers on list scheduling use.
SAMPLE = example(
    "17 28 17; 26 11 14; 30 13 27; 6 25 3; 12 2 12; 7 8 23; 23 16 29; 12 14 11",
    "1-2 13, 1-3 10, 1-4 24, 1-5 16, 2-7 19, 3-6 18, 4-7 23, 5-7 10, 6-8 10, 7-8 11",
)
YC_LEE = example(
    "11 13 9; 10 15 11; 9 12 14; 11 16 10; 15 11 19; 12 9 5; 10 14 13; 11 15 10",
    "1-2 11, 1-3 17, 1-4 14, 1-5 11, 2-6 13, 3-6 10, 4-6 19, 4-7 13, 5-7 27, 6-8 21, 7-8 13",
)
KUAN = (
    "5 3 4; 3 2 7; 2 4 9; 7 5 3; 8 6 7; 3 4 8; 4 3 2; 2 3 4; 4 5 3; 6 4 5",
    "1-2 3, 1-5 8, 1-6 9, 2-3 6, 2-4 4, 5-8 6, 5-9 6, 6-9 3, 3-7 5, 4-7 3, 7-10 7, 8-10 4, 9-10 8",
)


@pytest.mark.parametrize(
    ("order", "expected"), [("1 2 3 4 5 6 7 8 9 10", 30), ("1 2 6 3 4 5 7 8 9 10", 31)]
)
def test_heft_breaks_ties_by_insertion_order(order, expected):
    """Tasks 3 and 6 have the same rank, and which goes first decides the makespan."""
    graph, machine = example(*KUAN, order), processors(3)
    assert makespan(graph, machine, heft(asc.Problem(graph, machine, COSTS))) == expected


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (TOPCUOGLU, [108, 77, 80, 80, 69, 63.333, 42.667, 35.667, 44.333, 14.667]),
        (ARABNEJAD, [169, 114.333, 102.667, 110, 129.667, 119.333, 52.667, 92, 42.333, 20.667]),
    ],
    ids=["Topcuoglu", "Arabnejad"],
)
def test_upward_ranks_are_those_of_the_paper(graph, expected):
    problem = Problem(graph, processors(3), COSTS)
    listing = Listing(problem.tables, Mode(False))
    assert listing.mean.tolist() == pytest.approx(expected, abs=1e-3)


def test_heft_plans_the_schedule_of_the_paper():
    machine = processors(3)
    placement = heft(asc.Problem(TOPCUOGLU, machine, COSTS))
    spans = replay(TOPCUOGLU, machine, placement)
    shown = [f"{placement.device[task.name]}@{spans[task.name][0]:.0f}" for task in TOPCUOGLU.tasks]
    assert " ".join(shown) == "p3@0 p1@27 p3@9 p2@18 p3@28 p2@26 p3@38 p1@57 p2@56 p2@73"


EXAMPLES = {
    "Topcuoglu": TOPCUOGLU,
    "Arabnejad": ARABNEJAD,
    "Sample": SAMPLE,
    "YCLee": YC_LEE,
    "Kuan": example(*KUAN),
}
MAKESPANS = [80, 133, 84, 88, 30]  # of HEFT; the first two are published
TIMED = {name: POLICIES[name] for name in ("heft", "portfolio")}


def test_schedules_of_published_examples_take_as_long_as_published():
    made = [schedule(graph, processors(3), policy="heft") for graph in EXAMPLES.values()]
    assert [plan.makespan for plan in made] == MAKESPANS


# ---- heft


def fork(count: int, nbytes: int) -> Graph:
    """One task, and ``count`` of 4 seconds that each read a result of its own."""
    graph = Graph()
    parts = graph.add(int, name="root", outputs=count, seconds=1, nbytes=nbytes, on="p1")
    for i, part in enumerate(parts):
        graph.add(int, part, name=f"leaf{i}", seconds=4)
    return graph


def linked(*names: str) -> Machine:
    """Devices with contention, all linked, at one byte per second."""
    return Machine(
        [Device(name) for name in names],
        [Link(a, b, 1) for a, b in itertools.combinations(names, 2)],
    )


def add_urgent(graph: Graph, value: Value, on: str, then_on: str) -> None:
    """Add a reader of one second that ranks above all that are added later, for what comes after it is long."""
    graph.add(int, value, name="urgent", seconds=1, on=on)
    graph.add(int, name="long", seconds=1000, on=then_on, after="urgent")


@pytest.mark.parametrize(
    ("names", "expected"),
    [("p1 p2 p3", "p2"), ("cpu cpu:1 cpu:2", "cpu:1"), ("cuda:0 cuda:1 cpu", "cpu")],
    ids=["accelerators", "CPUs", "accelerators to a CPU, whose side holds nothing"],
)
def test_heft_lets_copies_into_a_device_follow_one_another(names, expected):
    first, second, there = names.split()
    graph = Graph()
    a = graph.add(int, name="a", seconds=1, nbytes=10, on=first)
    b = graph.add(int, name="b", seconds=1, nbytes=10, on=second)
    add_urgent(graph, a, on=there, then_on=first)
    graph.add(int, b, name="c", seconds={second: 15, there: 1})
    assert heft(asc.Problem(graph, linked(first, second, there), COSTS)).device["c"] == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [("p1 p2 p3", "p1"), ("cpu cpu:1 cpu:2", "cpu"), ("cpu cuda:0 cuda:1", "cuda:1")],
    ids=["accelerators", "CPUs", "a CPU, whose side holds nothing, to accelerators"],
)
def test_heft_lets_copies_out_of_a_device_follow_one_another(names, expected):
    here, first, second = names.split()
    graph = Graph()
    a, b = graph.add(int, name="root", outputs=("a", "b"), seconds=1, nbytes=10, on=here)
    add_urgent(graph, a, on=first, then_on=first)
    graph.add(int, b, name="c", seconds={here: 15, second: 1})
    assert heft(asc.Problem(graph, linked(here, first, second), COSTS)).device["c"] == expected


def test_heft_lets_the_copies_of_one_task_follow_one_another():
    graph = Graph()
    a = graph.add(int, name="a", seconds=1, nbytes=10, on="p1")
    b = graph.add(int, name="b", seconds=1, nbytes=10, on="p2")
    graph.add(int, a, b, name="c", seconds={"p1": 6, "p3": 1})
    assert heft(asc.Problem(graph, linked("p1", "p2", "p3"), COSTS)).device["c"] == "p1"

    graph = Graph()
    a, b = graph.add(int, name="root", outputs=("a", "b"), seconds=1, nbytes=10, on="cuda:0")
    graph.add(int, a, b, name="c", seconds={"cuda:0": 16, "cpu": 1})
    assert heft(asc.Problem(graph, linked("cpu", "cuda:0"), COSTS)).device["c"] == "cuda:0"


def test_heft_copies_first_what_exists_first():
    graph = Graph()
    late = graph.add(int, name="late", seconds=10, nbytes=5, on="p1")
    early = graph.add(int, name="early", seconds=1, nbytes=5, on="p2")
    graph.add(int, late, early, name="c", seconds={"p1": 8, "p3": 1})
    assert heft(asc.Problem(graph, linked("p1", "p2", "p3"), COSTS)).device["c"] == "p3"


def test_heft_copies_a_datum_to_a_device_once():
    graph = Graph()
    x = graph.add(int, name="x", seconds=1, nbytes=10, on="p1")
    add_urgent(graph, x, on="p2", then_on="p3")
    graph.add(int, x, name="c", seconds={"p1": 15, "p2": 2})
    assert heft(asc.Problem(graph, linked("p1", "p2", "p3"), COSTS)).device["c"] == "p2"


def test_heft_sends_a_group_where_all_of_it_is_quick():
    graph = Graph()
    y = graph.add(int, name="y", seconds={"cpu": 1, "cuda:0": 2})
    part = y[:2]
    graph.add(int, part, name="write", writes=[part], outputs=(), seconds={"cpu": 9, "cuda:0": 1})
    placement = heft(asc.Problem(graph, Machine.emulated(gpus=1), COSTS))
    assert set(placement.device.values()) == {"cuda:0"}


def test_heft_orders_by_planned_start_and_no_task_of_no_seconds_before_what_it_needs():
    graph = Graph()
    a = graph.add(int, name="a", seconds=0)
    b = graph.add(int, a, name="b", seconds=0)
    graph.add(int, b, name="c", seconds=0)
    graph.add(int, name="long", seconds=5)
    assert heft(asc.Problem(graph, processors(1), COSTS)).order == ("long", "a", "b", "c")


@pytest.mark.parametrize(("small_gaps", "found"), [(20, True), (80, False)])
def test_heft_looks_into_so_many_gaps_and_then_behind_all(small_gaps, found):
    graph = Graph()
    for i in range(small_gaps + 1):
        hold = graph.add(
            int,
            name=f"hold{i}",
            seconds=12 if i == small_gaps else 5,
            on="p2",
            after=graph.tasks[-2:],
        )
        graph.add(int, hold, name=f"step{i}", seconds=4, on="p1")
    graph.add(
        int, name="end", seconds=1000, on="p3", after=graph.tasks
    )  # lets all of these rank above the next
    graph.add(int, name="late", seconds=6, on="p1")
    order = heft(asc.Problem(graph, processors(3), COSTS)).order
    assert order.index(f"step{small_gaps - 1}") < order.index("late")
    assert (order.index("late") < order.index(f"step{small_gaps}")) is found


@pytest.mark.parametrize("name", TIMED)
def test_copies_are_planned_where_they_stand_in_line(name):
    graph, real = fork(6, nbytes=3), processors(3, contention=True)
    blind, aware = (
        TIMED[name](asc.Problem(graph, machine, COSTS)) for machine in (processors(3), real)
    )
    assert makespan(graph, real, aware) < makespan(graph, real, blind)


@pytest.mark.parametrize("name", TIMED)
def test_all_streams_of_a_device_are_used(name):
    graph = Graph()
    for task in "abc":
        graph.add(int, name=task, seconds={"cpu": 2, "cuda:0": 5})
    machine = Machine([Device("cpu", streams=2), Device("cuda:0")], Machine.emulated(gpus=1).links)
    assert makespan(graph, machine, TIMED[name](asc.Problem(graph, machine, COSTS))) <= 5


# ---- single and round robin


def test_single_weighs_seconds_and_copies():
    graph = Graph()
    graph.add(int, graph.input("x"), name="y", seconds={"cpu": 3, "cuda:0": 1}, nbytes=0)
    slow, quick = (Machine.emulated(gpus=1, latency=latency) for latency in (2.5, 1.5))
    assert single(asc.Problem(graph, slow, COSTS)).device == {"y": "cpu"}
    assert single(asc.Problem(graph, quick, COSTS)).device == {"y": "cuda:0"}


def test_single_counts_a_copy_once_and_the_way_back_of_an_input_that_is_written():
    graph = Graph()
    w = graph.input("w")
    graph.add(int, w, name="read", seconds={"cpu": 3, "cuda:0": 1})
    graph.add(int, w, name="write", writes=[w], outputs=(), seconds={"cpu": 3, "cuda:0": 1})
    for latency, device in ((1.9, "cuda:0"), (2.1, "cpu")):
        placement = single(asc.Problem(graph, Machine.emulated(gpus=1, latency=latency), COSTS))
        assert placement == Placement({"read": device, "write": device}, ("read", "write"))


def test_single_on_leaves_tasks_where_they_must_be():
    graph = Graph()
    graph.add(int, name="free")
    graph.add(int, name="fixed", on="cpu")
    graph.add(int, name="elsewhere", seconds={"cpu": 2, "cuda:0": 1})
    placement = single_on("cuda:1")(asc.Problem(graph, Machine.emulated(gpus=2), COSTS))
    assert placement.device == {"free": "cuda:1", "fixed": "cpu", "elsewhere": "cuda:0"}


def test_single_on_a_device_that_the_machine_lacks():
    with pytest.raises(
        MachineError, match=r"the machine has no device 'cuda:7'; it has 'cpu', 'cuda:0'"
    ):
        single_on("cuda:7")(asc.Problem(Graph(), Machine.emulated(gpus=1), COSTS))


def test_round_robin_deals_groups_and_skips_what_is_fixed():
    graph = Graph()
    a = graph.add(int, name="a")
    part = a[1:]
    graph.add(int, name="fixed", on="cuda:0")
    graph.add(int, part, name="b")
    graph.add(int, name="c", seconds={"cpu": 1, "cuda:1": 1})
    graph.add(int, name="d")
    placement = round_robin(asc.Problem(graph, Machine.emulated(gpus=2), COSTS))
    assert [f"{name} {device}" for name, device in placement.device.items()] == [
        "a cpu", "getitem cpu", "fixed cuda:0", "b cuda:0", "c cuda:1", "d cpu",
    ]  # fmt: skip


# ---- where nothing is possible


def refused(graph: Graph, machine: Machine, name: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        POLICIES[name](asc.Problem(graph, machine, COSTS))
    return str(caught.value)


@pytest.mark.parametrize("name", POLICIES)
def test_seconds_that_no_allowed_device_has(name):
    graph = Graph()
    graph.add(int, name="a", on="cuda:0", seconds={"cpu": 1})
    assert refused(graph, Machine.emulated(gpus=1), name) == (
        "task 'a' can run nowhere: of 'cuda:0' no device is left, for its seconds, or those of what shares its memory, "
        "are finite on 'cpu'"
    )


@pytest.mark.parametrize("name", POLICIES)
def test_an_empty_graph(name):
    assert POLICIES[name](asc.Problem(Graph(), processors(2), COSTS)) == Placement({}, ())


# ---- any graph, any machine

NAMES = ("cpu", "cuda:0", "cuda:1", "cpu:1")


@st.composite
def machines(draw: st.DrawFn, most: int = 4) -> Machine:
    """One to four devices of one or two streams, joined by links or by way of others."""
    names = NAMES[: draw(st.integers(1, most))]
    devices = [Device(name, streams=draw(st.integers(1, 2))) for name in names]
    missing = draw(st.sampled_from([0, 0, 2]))
    links = [
        Link(
            a,
            b,
            bytes_per_second=draw(st.sampled_from([1, 4, math.inf])),
            latency=draw(st.integers(0, 2)),
        )
        for a, b in itertools.combinations(names, 2)
        if not missing or a == names[0] or draw(st.integers(0, missing))
    ]
    return Machine(devices, links, contention=draw(st.booleans()))


@st.composite
def graphs(draw: st.DrawFn, names: tuple[str, ...], most: int = 9) -> Graph:
    """Tasks with seconds, on some devices none; writes in place; views; order edges; constraints."""
    graph = Graph()
    values = [graph.input("x")]
    if draw(st.booleans()):
        with graph.on(draw(st.sampled_from(names))):
            values.append(graph.input("z"))
    times = st.integers(0, 9)
    for i in range(draw(st.integers(1, most) | st.integers(most // 2, most))):
        read = draw(st.lists(st.sampled_from(values), max_size=3, unique_by=id))
        kind = draw(
            st.sampled_from(
                ["make", "make", "make", "write", "view", "alias"] if read else ["make"]
            )
        )
        if kind == "view":
            values.append(read[0][1:])
            continue
        some = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        graph.add(
            int,
            *read,
            name=f"t{i}",
            writes=read[:1] if kind == "write" else (),
            aliases=read[0] if kind == "alias" else None,
            after=draw(st.lists(st.sampled_from(graph.tasks), max_size=1)) if graph.tasks else (),
            on=draw(st.sampled_from([None, None, None, *names])),
            seconds=draw(times | st.fixed_dictionaries(dict.fromkeys(some, times))),
            nbytes=draw(times),
        )
        values.append(graph.value(f"t{i}"))
    return graph


@st.composite
def cases(draw: st.DrawFn, devices: int = 4, tasks: int = 9) -> tuple[Graph, Machine]:
    machine = draw(machines(devices))
    return draw(graphs(machine.names, tasks)), machine


def breaks_a_rule(graph: Graph, machine: Machine, device: dict[str, str]) -> bool:
    """Whether a task takes forever where it is."""
    return any(
        math.isinf(COSTS.task_seconds(task, machine.device(device[task.name])))
        for task in graph.tasks
    )


@pytest.mark.parametrize("name", POLICIES)
@given(case=cases())
def test_what_a_policy_returns_obeys_the_rules_and_is_always_the_same(name, case):
    graph, machine = case
    try:
        placement = POLICIES[name](asc.Problem(graph, machine, COSTS))
    except ScheduleError:
        return
    check(placement, asc.Problem(graph, machine))
    assert not breaks_a_rule(graph, machine, placement.device)
    again = POLICIES[name](asc.Problem(graph, machine, COSTS))
    assert (list(again.device.items()), again.order) == (
        list(placement.device.items()),
        placement.order,
    )


@pytest.mark.parametrize("name", POLICIES)
@given(case=cases(devices=3, tasks=5))
def test_a_policy_refuses_only_what_cannot_be(name, case):
    """Up to three devices always link up as an interval graph, where ruling out never ends in a dead end."""
    graph, machine = case
    try:
        POLICIES[name](asc.Problem(graph, machine, COSTS))
    except ScheduleError:
        try:
            allowed = asc.Problem(graph, machine).choices
        except ScheduleError:
            return
        for picked in itertools.product(*allowed.devices):
            together = all(
                picked[task] == picked[group] for task, group in enumerate(allowed.group)
            )
            device = {task.name: picked[task.index] for task in graph.tasks}
            assert not together or breaks_a_rule(graph, machine, device), f"{device} is possible"


@given(case=cases())
def test_heft_puts_each_task_by_rank_where_it_ends_first(case):
    problem = Problem(*case, COSTS)
    try:
        made = heft(problem).device
    except ScheduleError:
        return
    possible, listing = Possible(problem), Listing(problem.tables, Mode(False))
    order = listing.order(listing.mean)
    device = [0] * len(order)
    for count, task in enumerate(order, 1):
        ends = []
        for p in possible.devices(task):
            device[task] = p
            start = listing.placed(device, order[:count]).start[task]
            ends.append((start + problem.together[task][p], p))
        device[task] = possible.settle(task, [min(ends)[1]])
    assert [*made.values()] == [problem.devices[p] for p in device]


# ---- policies of one's own


def backwards(problem: asc.Problem) -> asc.Placement:
    possible = asc.Possible(problem)
    for task in reversed(range(len(problem.graph.tasks))):
        possible.settle(task, reversed(possible.devices(task)))
    return possible.placement()


def test_a_policy_of_ones_own_places_what_was_captured():
    """Without what ``Possible`` knows it was told that some task "must be with '2.t'", and could not know which."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.ones(3, 4)
    graph = asc.capture(step, x)
    losses = []
    with asc.schedule(
        graph, asc.Machine.emulated(gpus=2), policy=backwards, backend="virtual"
    ) as schedule:
        assert "cuda:1" in schedule.placement.device.values()
        losses += [float(schedule(x)["result"].detach()) for _ in range(2)]
    assert losses[1] < losses[0]


def test_a_policy_is_told_where_a_task_can_still_go():
    graph = asc.Graph()
    a = graph.add(abs, graph.input("x"), name="a", on="cuda:0")
    graph.add(abs, a, name="b")
    possible = asc.Possible(asc.Problem(graph, asc.Machine.emulated(gpus=2)))
    assert (possible.devices(0), possible.devices(1)) == ((1,), (0, 1, 2))
    assert not possible.choose(0, 2)
    assert possible.devices(0) == (1,)
    with pytest.raises(
        asc.ScheduleError, match="task 'a' can go to none of 'cpu', 'cuda:1'; it can go to 'cuda:0'"
    ):
        possible.settle(0, [0, 2])
    with pytest.raises(
        asc.ScheduleError, match="no device is chosen yet for task 'b'; settle each task"
    ):
        possible.placement()
    assert possible.settle(1, [2]) == 2
    assert possible.placement([0, 1]).device == {"a": "cuda:0", "b": "cuda:1"}


BIG = 10**30  # above what 64 bits hold


@pytest.mark.parametrize(
    ("policy", "tasks"),
    [
        *(("auto", 5), ("portfolio", 5), ("portfolio", 400)),
        pytest.param("auto", 400, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("device", "link", "costs"),
    [
        ({}, {"bytes_per_second": BIG}, {}),
        ({}, {"bytes_per_second": BIG, "pageable_bytes_per_second": BIG}, {}),
        ({}, {"bytes_per_second": 1, "latency": BIG}, {}),
        (
            {
                "flops_per_second": BIG,
                "bytes_per_second": BIG,
                "launch_seconds": BIG,
                "nbytes": BIG,
            },
            {},
            {},
        ),
        ({}, {}, {"seconds": BIG}),
        ({}, {}, {"seconds": {"cpu": BIG, "cuda:0": 1}}),
        ({}, {}, {"nbytes": BIG}),
    ],
)
def test_numbers_may_be_whole_and_as_large_as_floats(tasks, device, link, costs, policy):
    graph = Graph()
    values = [graph.input("x")]
    for i in range(tasks):
        values.append(graph.add(abs, values[i // 2], **{"seconds": 1e-3, "nbytes": 1000} | costs))
    graph.output(values[-1])
    devices = [Device("cpu"), Device("cuda:0", **device)]
    machine = Machine(devices, [Link("cpu", "cuda:0", **{"bytes_per_second": 1000} | link)])
    made = schedule(graph, machine, policy=policy)
    assert made.makespan > 0
    assert made.gap >= 0
