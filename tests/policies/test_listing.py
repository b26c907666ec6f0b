"""Listing, portfolio and search: laws of plans made by kernels, compiled or not, over any graph on any machine."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched._lib import jit
from autosched._lib.jit import Mode
from autosched.errors import MachineError, ScheduleError
from autosched.graph.graph import Graph
from autosched.lowering import lower
from autosched.machine.machine import Machine
from autosched.placement import Placement, Send, check
from autosched.policies import heft, portfolio, search
from autosched.policies.base import listing
from autosched.policies.base.kernels import earliest_gap
from autosched.policies.base.listing import Listed, Listing
from autosched.policies.base.possible import Possible
from autosched.policies.local_search.annealer import Annealer, anneal, below, shift
from autosched.policies.local_search.portfolio import best_listed, members
from autosched.problem import Policy, Problem
from autosched.simulation.issuing import issuing
from autosched.simulation.simulate import durations, makespan
from tests.policies.test_policies import COSTS, TOPCUOGLU, breaks_a_rule, cases, processors

PLAIN, COMPILED = Mode(False), Mode(True)
KNOBS = ((0.0, 0.0), (4.0, 0.0), (0.5, 1.0))  # excess, ahead


@st.composite
def problems(draw: st.DrawFn, tasks: int = 12) -> tuple[Graph, Machine, Problem]:
    """Graphs that can be placed."""
    while True:
        graph, machine = draw(cases(tasks=tasks))
        try:
            problem = Problem(graph, machine, COSTS)
            Possible(problem)
            return graph, machine, problem
        except ScheduleError:
            pass


def listed(problem: Problem, mode: Mode = PLAIN) -> Listing:
    return Listing(problem.tables, mode)


def plans(made: Listing) -> list[Listed]:
    """Return plans of all sorts: forward, backward and turned round, placed anew, annealed."""
    found = []
    for excess, ahead in KNOBS:
        found.append(made.plan(made.order(made.mean), excess, ahead))
        found.append(made.placed(found[-1].device, made.by_start(found[-1].start)))
        back = made.backwards.plan(made.backwards.order(made.backwards.least), excess, ahead)
        found.append(made.placed(*made.mirrored(back)))
    found.append(annealed(made, found[0]).best)
    return found


def annealed(made: Listing, found: Listed, seed: int = 3, moves: int = 100) -> Annealer:
    annealer = Annealer(made, found, seed)
    annealer.move(moves, 0.2, 0.3)
    return annealer


def bits(found: Listed) -> list[Any]:
    return [np.asarray(item).tolist() for item in found]


def assert_is_plan(problem: Problem, found: Listed) -> None:
    """Hold a plan to what it says: data arrive before they are read, streams do one task at a time."""
    device, start, finish = (
        np.asarray(item).tolist() for item in (found.device, found.start, found.finish)
    )
    t = problem.lists
    for task, reads in enumerate(problem.reads):
        assert finish[task] == start[task] + problem.seconds[task][device[task]] < math.inf
        assert all(finish[before] <= start[task] for before in problem.before[task])
        for datum in reads:
            maker = t.maker[datum]
            where, since = (device[maker], finish[maker]) if maker >= 0 else (t.home[datum], 0.0)
            row = where if maker >= 0 else t.row[datum]
            seconds = problem.copy_seconds(datum, row, device[task])
            assert where == device[task] or since + seconds <= start[task]
    for p, streams in enumerate(t.streams):
        here = [(start[task], finish[task]) for task in range(len(device)) if device[task] == p]
        at_once = [sum(begin <= moment < end for begin, end in here) for moment, _ in here]
        assert max(at_once, default=0) <= streams
    assert max(finish) <= found.makespan


def predicted(graph: Graph, machine: Machine, placement: Placement) -> float:
    program = lower(asc.Problem(graph, machine), placement)
    asc.verify(program, graph, machine)
    problem = Problem(graph, machine, COSTS)
    return makespan(program, durations(program, problem), issuing(program, problem))


# ---- compiled or not


@given(problems(), st.sampled_from([0.0, 0.7, 5.0]))
def test_kernels_give_the_same_bits_compiled_or_not(case, issue):
    pytest.importorskip("numba")
    graph, machine, _ = case
    problem = Problem(graph, issued(machine, issue), COSTS)
    expected, found = plans(listed(problem)), plans(listed(problem, COMPILED))
    assert list(map(bits, found)) == list(map(bits, expected))


def test_compiled_kernels_count_no_references(monkeypatch):
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])  # what is loaded cannot be read
    made = listed(Problem(TOPCUOGLU, processors(3), COSTS), COMPILED)
    compiled = jit._compiled.__wrapped__(earliest_gap)
    assert compiled(made.planning, 0, 1.0, 1.0, math.inf) == (1.0, 0, 0)
    (code,) = compiled.inspect_llvm().values()
    assert "earliest_gap" in code
    assert "NRT_incref" not in code


def test_kernels_are_compiled_where_that_takes_less_time_than_the_work_done_without(monkeypatch):
    for name, value in (("_IN_USE", set()), ("_UNCOMPILED", {}), ("_REGISTERED", [])):
        monkeypatch.setattr(jit, name, value)
    monkeypatch.setattr(jit, "is_there", lambda: True)
    monkeypatch.setattr(jit, "_is_on_disk", lambda kernel: kernel is shift)
    assert jit.mode(1e5, shift).fast
    assert [jit.mode(1.2e6, shift, below).fast for _ in range(3)] == [False, False, True]
    assert [jit.mode(work, shift, anneal).fast for work in (1e5, 1e7)] == [False, True]
    jit._IN_USE.add(anneal)
    jit._REGISTERED.append(anneal)
    assert [jit.mode(work, anneal).fast for work in (1e3, 1e4)] == [False, True]


def test_kernels_on_disk_are_found_without_numba(monkeypatch, tmp_path):
    pytest.importorskip("numba")
    assert jit._compiled(below)(np.array([1, 1]), 1) == 0
    assert jit._is_on_disk.__wrapped__(below)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not jit._is_on_disk.__wrapped__(below)


def test_without_numba_all_is_plain(monkeypatch):
    monkeypatch.setattr(jit, "is_there", lambda: False)
    assert not jit.mode(math.inf).fast
    placed = search(moves=500)(asc.Problem(TOPCUOGLU, processors(3), COSTS))
    assert predicted(TOPCUOGLU, processors(3), placed) <= 80


def test_where_no_folder_can_be_written_to_kernels_are_compiled_for_the_process(monkeypatch):
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert jit._compiled.__wrapped__(shift).__name__ == "shift"


# ---- plans are plans


@given(problems())
def test_a_plan_keeps_to_what_data_and_streams_allow(case):
    graph, machine, problem = case
    made = listed(problem)
    for found in plans(made):
        assert_is_plan(problem, found)
        assert found.begins.tolist() == sorted(found.begins)
        placed = made.placement(problem, found)
        check(placed, asc.Problem(graph, machine))
        assert not breaks_a_rule(graph, machine, placed.device)


@pytest.mark.parametrize("most", [1, 2, 3])
@given(case=problems())
def test_plans_that_forget_gaps_are_plans(most, case):
    *_, problem = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "_MOST_GAPS", most)
        for found in plans(listed(problem)):
            assert_is_plan(problem, found)


@st.composite
def crossed(draw: st.DrawFn) -> tuple[Graph, Machine]:
    """Many data between equal devices of one stream each; nothing is written in place."""
    graph = Graph()
    for i in range(draw(st.integers(8, 14))):
        read = st.lists(st.sampled_from(graph.values), min_size=1, max_size=3, unique_by=id)
        read = draw(read) if i > 2 else []
        graph.add(
            int,
            *read,
            name=f"t{i}",
            seconds=draw(st.integers(1, 9)),
            nbytes=draw(st.integers(0, 9)),
        )
    return graph, processors(
        draw(st.integers(2, 4)), contention=draw(st.sampled_from([True, True, False]))
    )


def issued(machine: Machine, issue: float, event: float = 0.0) -> Machine:
    """Return the machine with these seconds to issue work to each device that is no CPU."""
    devices = [
        dataclasses.replace(device, issue_seconds=issue, event_seconds=event)
        for device in machine.devices
    ]
    return Machine(devices, machine.links, contention=machine.contention)


@given(crossed(), st.sampled_from([0.0, 1.0, 5.0]))
def test_a_program_ends_when_its_plan_says_or_earlier(case, issue):
    graph, machine = case[0], issued(case[1], issue)
    problem = Problem(graph, machine, COSTS)
    made = listed(problem)
    for found in plans(made):
        end = predicted(graph, machine, made.placement(problem, found))
        assert end <= found.makespan * (1 + 1e-9)


def test_a_plan_ends_when_what_was_written_is_back():
    graph = Graph()
    graph.add(
        int, graph.input("x"), name="w", writes=[graph.value("x")], seconds=2, on="p2", nbytes=0
    )
    machine = processors(2)
    problem = Problem(graph, machine, costs := asc.Costs(default_nbytes=3))
    made = listed(problem)
    found = made.plan(made.order(made.mean))
    assert found.makespan == 3 + 2 + 3
    assert made.placed(found.device, found.order).makespan == 8
    assert heft(asc.Problem(graph, machine, costs)).device == {"w": "p2"}


@given(problems(), st.data())
def test_copies_in_any_order_needless_or_impossible_ones_among_them_lower_to_a_program_that_verifies(
    case, data
):
    graph, machine, _ = case
    sends = st.builds(
        Send,
        st.sampled_from([value.name for value in graph.values]),
        st.integers(0, 2),
        st.sampled_from(machine.names),
        st.sampled_from([task.name for task in graph.tasks]),
        st.none() | st.sampled_from(machine.names),
    )
    placed = heft(asc.Problem(graph, machine, COSTS))
    copies = data.draw(st.permutations(placed.copies)), data.draw(st.lists(sends, max_size=20))
    predicted(graph, machine, dataclasses.replace(placed, copies=(*copies[0], *copies[1])))


@pytest.mark.parametrize("before", ["early", "made", "read"])
@pytest.mark.parametrize("writes", [False, True])
def test_a_copy_leaves_after_it_is_made_whatever_the_placement_says(writes, before):
    graph = asc.Graph()
    if writes:  # graphs without writes are lowered by other code
        graph.add(int, graph.input("x"), name="w", writes=[graph.value("x")], on="p1")
    made = graph.add(int, graph.add(int, name="early", on="p1"), name="made", on="p1")
    graph.add(int, made, name="read", on="p2")
    placed = heft(asc.Problem(graph, machine := processors(2), COSTS))
    copies = (Send("made", 0, "p2", before),)
    predicted(graph, machine, dataclasses.replace(placed, copies=copies))


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ((Send("z", 0, "cpu", "t"),), "copies 'z', which is no value of graph 'graph'"),
        ((Send("t", 0, "cpu", "z"),), "copies 't' before 'z', which is no task"),
        ((Send("t", 0, "tpu", "t"),), "tpu"),
        ((("t", 0, "cpu", "t"),), r"copies of a placement are a tuple of Send, got \(\('t', 0"),
        (3, "copies of a placement are a tuple of Send, got 3"),
    ],
)
def test_copies_of_what_is_not_known_are_named(copies, message):
    graph = Graph()
    graph.add(int, name="t")
    with pytest.raises((ScheduleError, MachineError), match=message):
        lower(asc.Problem(graph, Machine.emulated(gpus=1)), Placement({"t": "cpu"}, ("t",), copies))


# ---- better and better


@given(problems())
def test_the_portfolio_is_not_worse_than_heft_or_one_device_and_search_not_worse_than_the_portfolio(
    case,
):
    *_, problem = case
    made = listed(problem)
    best = best_listed(made, 6)
    order = range(len(problem.tasks))
    open_to_all = (
        np.isfinite(made.arrays.together.reshape(-1, made.devices))
        .all(axis=0)
        .nonzero()[0]
        .tolist()
    )
    alone = [made.placed([p for _ in order], order) for p in open_to_all]
    assert best.makespan <= min(
        found.makespan for found in (made.plan(made.order(made.mean)), *alone)
    )
    annealer, before = Annealer(made, best, seed=1), best.makespan
    for _ in range(4):
        annealer.move(30, 0.3)
        assert annealer.best.makespan == annealer.makespan <= before
        before = annealer.makespan
        annealer.restore_best()


def test_the_best_keeps_its_order_where_that_of_its_starts_would_end_later():
    """c is listed ahead of d and starts behind it: its data, not d's, are the first that b's device sends."""
    graph = Graph()
    reads = [
        graph.add(int, name=name, seconds=s, nbytes=n) for name, s, n in (("a", 1, 1), ("b", 2, 3))
    ]
    graph.add(int, *reads, name="c", seconds=3, nbytes=6)
    graph.add(int, *reads, name="d", seconds=5, nbytes=0)
    made = listed(Problem(graph, processors(3, contention=True), COSTS))
    found = made.placed([1, 0, 2, 0], [0, 1, 2, 3])
    assert (found.makespan, made.placed(found.device, made.by_start(found.start)).makespan) == (
        8,
        9,
    )
    assert Annealer(made, found).best.makespan == 8


@pytest.mark.parametrize("seed", range(10))
def test_one_device_is_busy_to_the_end_so_nothing_is_searched(seed, monkeypatch):
    monkeypatch.setattr("autosched.policies.local_search.search.Annealer", None)
    drawn = random.Random(seed)
    graph = asc.Graph()
    for number in range(30):  # the last bits of their sum depend on the order
        graph.add(abs, graph.input(f"x{number}"), seconds=drawn.random())
    machine = processors(1, contention=False)
    assert members(Problem(graph, machine, COSTS)) == 1
    found = search()(asc.Problem(graph, machine, COSTS))
    assert found.bound == pytest.approx(sum(task.seconds for task in graph.tasks), rel=1e-12)


def test_of_several_starts_the_best_is_taken():
    def ends(policy: Policy) -> float:
        return predicted(
            TOPCUOGLU, processors(3), policy(asc.Problem(TOPCUOGLU, processors(3), COSTS))
        )

    alone = [ends(search(seed=seed, moves=1000)) for seed in (4, 5)]
    assert ends(search(seed=4, moves=1000, starts=2)) == min(alone) < alone[0]


@pytest.mark.parametrize("budget", [{"moves": 300}, {"moves": 100, "starts": 3}, {"seconds": 0.05}])
def test_progress_goes_from_0_to_1_and_the_makespan_never_up(budget):
    told: list[tuple[float, float]] = []
    search(progress=lambda *now: told.append(now), **budget)(
        asc.Problem(TOPCUOGLU, processors(3), COSTS)
    )
    parts, makespans = map(list, zip(*told, strict=True))
    assert (parts[0], parts[-1]) == (0, 1)
    assert parts == sorted(parts)
    assert makespans == sorted(makespans, reverse=True)


@pytest.mark.parametrize("calls", [1, 2, 30])
def test_ctrl_c_keeps_the_best_so_far(calls):
    told: list[float] = []

    def interrupt(_: float, best: float) -> None:
        told.append(best)
        if len(told) == calls:
            raise KeyboardInterrupt

    placed = search(moves=300, progress=interrupt)(asc.Problem(TOPCUOGLU, processors(3), COSTS))
    assert len(told) == calls
    assert predicted(TOPCUOGLU, processors(3), placed) <= told[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({"seconds": item}, "^seconds must be a number, 0 or more")
            for item in (-1, math.nan, math.inf, "3", True)
        ),
        *(
            ({"seed": item}, "^seed must be a whole number, 0 or more")
            for item in (-1, 0.5, "3", None)
        ),
        ({"progress": 3}, "^progress must be True, False, None, or a function"),
    ],
)
def test_a_wrong_budget_is_named(given, message):
    with pytest.raises(ScheduleError, match=message):
        asc.schedule(TOPCUOGLU, processors(3), policy="search", **given)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("policy", [heft, portfolio, search(moves=10)])
def test_what_would_end_later_than_a_float_can_say_is_refused_without_warnings(policy):
    graph = Graph()
    graph.add(int, graph.add(int, name="a", seconds=1.7e308), name="b", seconds=1.7e308)
    with pytest.raises(ScheduleError, match="later than a float can say"):
        policy(asc.Problem(graph, processors(2), COSTS))


def test_what_must_stay_together_moves_together():
    graph = Graph()
    for i in range(6):
        part = graph.add(int, name=f"make{i}", seconds=1 + i % 3)[:2]
        graph.add(int, part, name=f"write{i}", writes=[part], outputs=(), seconds=2)
    machine = processors(3)
    problem = Problem(graph, machine, COSTS)
    listing = Listing(problem.tables, Mode(False))
    n = len(problem.tasks)
    annealer = Annealer(listing, listing.placed([0] * n, list(range(n))))
    for _ in range(20):
        annealer.move(20, 0.1)
        check(listing.placement(problem, annealer.best), problem)
    assert len(set(annealer.best.device)) == 3
