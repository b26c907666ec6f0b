"""Pipeline orders, and the policy that keeps an order: bubbles by formula, limits, no order that hangs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.parallel.pipeline_schedules import (
    Action,
    Order,
    gpipe,
    interleaved,
    one_f_one_b,
    stage_devices,
    zero_bubble,
)
from autosched.testing.checking import scattered
from tests.strategies import graphs, machines

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
CASES = [(p, m) for p in range(1, 9) for m in (*range(1, 18), 24, 31, 32)]
SHAPES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def needed(action: Action, stages: int) -> Iterator[Action]:
    """Yield what an action waits for."""
    stage, kind, chunk = action
    if kind == "F" and stage:
        yield Action(stage - 1, "F", chunk)
    if kind in ("B", "I"):
        yield Action(stage, "F", chunk)
        if stage < stages - 1:
            yield Action(stage + 1, kind, chunk)
    if kind == "W":
        yield Action(stage, "I", chunk)


def serial(order: Order) -> list[Action]:
    """Return the actions as one device would do them: micro-batch by micro-batch."""
    actions = list(itertools.chain(*order))
    halves = "W" in {action.kind for action in actions}
    stages = range(1 + max(action.stage for action in actions))
    backward = [(stage, kind) for stage in reversed(stages) for kind in ("IW" if halves else "B")]
    pieces = [*((stage, "F") for stage in stages), *backward]
    chunks = range(1 + max(action.chunk for action in actions))
    return [Action(stage, kind, chunk) for chunk in chunks for stage, kind in pieces]


def graph_of(order: Order, nbytes: int = 0) -> asc.Graph:
    """Return the graph of a pipeline: each action a task on the device where its stage is."""
    where = stage_devices(order)
    graph, made = asc.Graph("pipeline"), {}
    for action in serial(order):
        before = [made[other] for other in needed(action, len(where))]
        made[action] = graph.add(
            len,
            *before,
            name=str(action),
            on=f"cuda:{where[action.stage]}",
            seconds=SECONDS[action.kind],
            nbytes=nbytes,
        )
    return graph


def machine_of(devices: int, bytes_per_second: float = 1e30) -> asc.Machine:
    names = ["cpu", *(f"cuda:{rank}" for rank in range(devices))]
    links = [asc.Link(a, b, bytes_per_second, 0.0) for a, b in itertools.combinations(names, 2)]
    return asc.Machine(map(asc.Device, names), links)


def sequences_of(order: Order) -> dict[str, list[str]]:
    return {
        f"cuda:{rank}": [str(action) for action in actions] for rank, actions in enumerate(order)
    }


def scheduled(order: Order, machine: asc.Machine | None = None, nbytes: int = 0) -> asc.Schedule:
    policy = asc.in_order(sequences_of(order))
    return asc.schedule(graph_of(order, nbytes), machine or machine_of(len(order)), policy=policy)


def bubble(order: Order, makespan: float) -> float:
    busy = sum(SECONDS[action.kind] for action in itertools.chain(*order))
    return 1 - busy / (len(order) * makespan)


def on_paper(order: Order, seconds: dict[str, float] = SECONDS, copy: float = 0.0) -> float:
    """Return when an order ends; each device does its actions one by one, and copies disturb nobody."""
    where = stage_devices(order)
    ends: dict[Action, float] = {}
    free, position = [0.0] * len(order), [0] * len(order)
    waiting = list(range(len(order)))
    while waiting:
        rank = waiting.pop()
        while position[rank] < len(order[rank]):
            action = order[rank][position[rank]]
            before = list(needed(action, len(where)))
            if not all(other in ends for other in before):
                break
            arrivals = [ends[other] + copy * (where[other.stage] != rank) for other in before]
            free[rank] = ends[action] = max([free[rank], *arrivals]) + seconds[action.kind]
            position[rank] += 1
            waiting += [
                where[s] for s in (action.stage - 1, action.stage + 1) if 0 <= s < len(where)
            ]
    assert len(ends) == sum(map(len, order)), "devices wait for each other"
    return max(free)


def most_held(actions: Sequence[Action]) -> int:
    """Return of how many forwards a device holds the activations at most."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(itertools.accumulate(change[action.kind] for action in actions))


def ran(schedule: asc.Schedule) -> dict[str, list[str]]:
    """Return the tasks of a program by device, in the order in which they are issued."""
    found: dict[str, list[str]] = {}
    for line in str(schedule.program).splitlines():
        where, _, what = line.partition("  ")
        if what.strip().startswith("run "):
            found.setdefault(where.partition("/")[0], []).append(what.split()[1])
    return found


# ---- orders


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
def test_the_bubble_of_gpipe_and_1f1b_follows_its_formula(order):
    for p, m in CASES:
        assert bubble(order(p, m), on_paper(order(p, m))) == pytest.approx((p - 1) / (m + p - 1)), (
            p,
            m,
        )


def test_the_bubble_of_interleaved_follows_its_formula_for_any_number_of_micro_batches():
    for p, m in CASES:
        order = interleaved(p, m)
        formula = (p - 1) / (2 * m + p - 1)
        if m >= p:
            assert bubble(order, on_paper(order)) == pytest.approx(formula), (p, m)
        else:
            assert bubble(order, on_paper(order)) > formula, (p, m)


def test_the_bubble_of_zero_bubble_follows_its_formula():
    for p, m in CASES:
        order = zero_bubble(p, m)
        formula = (p - 1) / (6 * m + p - 1)
        assert bubble(order, on_paper(order)) >= formula - 1e-9, (p, m)
        if m >= 2 * p - 1:
            assert bubble(order, on_paper(order)) == pytest.approx(formula), (p, m)


@pytest.mark.parametrize("name", SHAPES)
@given(p=st.integers(1, 6), m=st.integers(1, 14))
def test_every_order_has_each_action_once_and_can_be_run(name, p, m):
    order = SHAPES[name](p, m)
    assert len(order) == p
    assert Counter(itertools.chain(*order)) == Counter(serial(order))
    assert {action.chunk for action in order[0]} == set(range(m))
    schedule = scheduled(order)
    assert ran(schedule) == sequences_of(order)
    assert schedule.makespan == pytest.approx(on_paper(order))


def test_orders_hold_no_more_activations_than_they_say():
    for p, m in CASES:
        assert [most_held(actions) for actions in gpipe(p, m)] == [m] * p
        assert [most_held(actions) for actions in one_f_one_b(p, m)] == [
            min(m, p - rank) for rank in range(p)
        ]
        largest = -(-m // max(1, m // p))
        assert m % p or largest == p
        limits = [2 * (p - rank - 1) + largest + 1 for rank in range(p)]
        held = [most_held(actions) for actions in interleaved(p, m)]
        assert all(most <= limit for most, limit in zip(held, limits, strict=True)), (p, m)
        assert max(map(most_held, zero_bubble(p, m))) <= min(2 * m, 2 * p), (p, m)


def test_stages_are_placed_cyclically_or_in_a_v():
    assert stage_devices(one_f_one_b(3, 2)) == (0, 1, 2)
    assert stage_devices(interleaved(3, 2)) == (0, 1, 2, 0, 1, 2)
    assert stage_devices(zero_bubble(3, 2)) == (0, 1, 2, 2, 1, 0)


# ---- the policy


@given(graph=graphs(), machine=machines(), seed=st.integers(0, 3))
def test_any_order_that_a_placement_has_is_kept(graph, machine, seed):
    wanted = scattered(seed)(asc.Problem(graph, machine))
    sequences = {
        name: [task for task in wanted.order if wanted.device[task] == name]
        for name in machine.names
    }
    policy = asc.in_order(sequences)
    schedule = asc.schedule(graph, machine, policy=policy)
    assert schedule.placement.device == wanted.device
    assert ran(schedule) == {name: tasks for name, tasks in sequences.items() if tasks}
    assert policy(asc.Problem(graph, machine)) == schedule.placement


def test_tasks_in_no_sequence_start_when_they_can():
    """A gradient is added where it is made, before the next one is: they must not pile up."""
    order, graph, made = one_f_one_b(2, 3), asc.Graph(), {}
    for action in serial(order):
        device = f"cuda:{action.stage}"
        before = [made[other] for other in needed(action, 2)]
        made[action] = graph.add(len, *before, name=str(action), on=device, seconds=2.0)
        if action.kind == "B":
            graph.add(
                len, made[action], name=f"sum{action.chunk}-{action.stage}", on=device, seconds=0.1
            )
    issued = ran(asc.schedule(graph, machine_of(2), policy=asc.in_order(sequences_of(order))))
    assert " ".join(issued["cuda:0"]) == "0F0 0F1 0B0 sum0-0 0F2 0B1 sum1-0 0B2 sum2-0"
    assert " ".join(issued["cuda:1"]) == "1F0 1B0 sum0-1 1F1 1B1 sum1-1 1F2 1B2 sum2-1"


def test_tasks_in_no_sequence_come_before_those_that_have_one():
    """Gradients are sent while backward goes on, though what packs them was added behind all of backward."""
    graph = asc.Graph()
    backward = [graph.add(len, name=f"b{i}", on="cuda:0", seconds=2.0) for i in range(3)]
    for i, gradient in enumerate(backward):
        packed = graph.add(len, gradient, name=f"pack{i}", on="cuda:0", seconds=0.1)
        graph.add(len, packed, name=f"sum{i}", on="cuda:1", seconds=0.1)
    issued = ran(
        asc.schedule(graph, machine_of(2), policy=asc.in_order({"cuda:0": ["b0", "b1", "b2"]}))
    )
    assert " ".join(issued["cuda:0"]) == "b0 pack0 b1 pack1 b2 pack2"


def test_a_copy_does_not_wait_for_one_that_can_start_only_later():
    """Copies to one device run in order of issue. Were tasks issued as they start, the short one's would come last."""
    graph = asc.Graph()
    long = graph.add(len, name="long", on="cuda:0", seconds=3.0, nbytes=1)
    first = graph.add(len, name="first", on="cuda:1", seconds=1.0, nbytes=0)
    short = graph.add(len, first, name="short", on="cuda:1", seconds=1.0, nbytes=1)
    graph.add(len, short, name="soon", on="cuda:2", seconds=1.0)
    graph.add(len, long, name="late", on="cuda:2", seconds=1.0)
    schedule = asc.schedule(graph, machine_of(3), policy=asc.in_order({"cuda:2": ["soon", "late"]}))
    assert schedule.placement.order == ("first", "short", "long", "soon", "late")
    assert schedule.makespan == pytest.approx(4.0)


def test_a_copy_delayed_by_another_copy_delays_no_task():
    graph = asc.Graph()
    large = graph.add(len, name="large", on="cuda:0", seconds=1.0, nbytes=8)
    small = graph.add(len, name="small", on="cuda:1", seconds=1.5, nbytes=1)
    graph.add(len, large, name="last", on="cuda:2", seconds=1.0)
    graph.add(
        len, small, name="late", on="cuda:2", seconds=1.0
    )  # not at 2.5, but at 10: the large copy goes first
    begun = graph.add(len, name="begun", on="cuda:2", seconds=5.0)
    graph.add(len, begun, name="ready", on="cuda:2", seconds=1.0)
    schedule = asc.schedule(graph, machine_of(3, bytes_per_second=1.0), policy=asc.in_order({}))
    assert ran(schedule)["cuda:2"] == ["begun", "ready", "last", "late"]
    assert schedule.makespan == pytest.approx(11.0)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        (
            {"cuda:0": ["0B0", "0F0"]},
            "'0B0' needs '0F0', which comes after '0B0' in the sequence of 'cuda:0'",
        ),
        (
            {"cuda:0": ["0F1", "0B1", "0F0"], "cuda:1": ["1F0", "1F1"]},
            "'0B1' needs '1F1', which comes after '1F0' in the sequence of 'cuda:1', "
            "which needs '0F0', which comes after '0B1' in the sequence of 'cuda:0'",
        ),
    ],
)
def test_a_sequence_that_contradicts_the_graph_names_the_dependencies(sequences, message):
    graph = graph_of(one_f_one_b(2, 2))
    with pytest.raises(asc.ScheduleError) as raised:
        asc.schedule(graph, machine_of(2), policy=asc.in_order(sequences))
    assert str(raised.value) == f"sequences contradict the graph: {message}"


def _bound() -> asc.Graph:
    graph = asc.Graph()
    x = graph.add(len, name="x", on="cuda:0")
    graph.add(len, x, name="y", on="cuda:1")
    graph.add(len, x, name="free")
    return graph


@pytest.mark.parametrize(
    ("sequences", "error", "message"),
    [
        (
            {"cuda:0": ["x"]},
            asc.ScheduleError,
            "task 'free' is in no sequence and is bound to no device",
        ),
        (
            {"cuda:1": ["x"]},
            asc.ScheduleError,
            "'x' is in the sequence of 'cuda:1', but must run on 'cuda:0'",
        ),
        ({"cuda:0": ["x"], "cuda:1": ["x"]}, asc.ScheduleError, "'x' is in sequences twice"),
        ({"cuda:0": ["free", "z"]}, asc.GraphError, "no task 'z'"),
        ({"cuda:7": ["free"]}, asc.MachineError, "cuda:7"),
    ],
)
def test_invalid_sequences_are_rejected(sequences, error, message):
    with pytest.raises(error, match=message):
        asc.schedule(_bound(), machine_of(2), policy=asc.in_order(sequences))


def test_tasks_that_share_memory_must_be_in_sequences_of_one_device():
    graph = asc.Graph()
    w = graph.input("w")
    graph.together(w)
    graph.add(len, w, name="one", writes=w)
    graph.add(len, w, name="other", writes=w)
    with pytest.raises(
        asc.ScheduleError,
        match="'one' is in the sequence of 'cuda:0' and 'other' in that of 'cuda:1'",
    ):
        asc.schedule(
            graph, machine_of(2), policy=asc.in_order({"cuda:0": ["one"], "cuda:1": ["other"]})
        )
    schedule = asc.schedule(graph, machine_of(2), policy=asc.in_order({"cuda:1": ["other"]}))
    assert schedule.placement.device == {"one": "cuda:1", "other": "cuda:1"}


def test_a_task_with_infinite_seconds_is_named():
    graph = asc.Graph()
    graph.add(len, name="x", on="cuda:0", seconds={"cuda:1": 1.0})
    with pytest.raises(
        asc.ScheduleError, match="task 'x' must run on 'cuda:0', but its seconds there are infinite"
    ):
        asc.schedule(graph, machine_of(2), policy=asc.in_order({}))


def test_the_policy_copies_its_arguments():
    sequences = {"cuda:0": ["0F0", "0F1", "0B0", "0B1"]}
    policy = asc.in_order(sequences)
    sequences["cuda:0"].reverse()
    assert ran(asc.schedule(graph_of(gpipe(1, 2)), machine_of(1), policy=policy)) == {
        "cuda:0": ["0F0", "0F1", "0B0", "0B1"]
    }
