"""The laws of programs that span several ranks, which run over a simulated wire."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched._lib.tree import flatten
from autosched.lowering import lower
from autosched.machine.machine import Machine
from autosched.program.clocks import ordered
from autosched.program.program import Copy, Program, Record, Run, Stream, Wait, occupied
from autosched.testing import contrary, uniform
from autosched.verification.verify import verify
from tests.clusters import clusters, parts_of, pinned
from tests.laws.test_necessary import refusal
from tests.sample_policies import policies
from tests.strategies import graphs, inputs_for, outcome
from tests.wire import MODES, run_parts

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
SELDOM = settings(max_examples=max(6, settings.default.max_examples // 2))


@st.composite
def on_ranks(draw: st.DrawFn, most_ranks: int = 5) -> tuple[asc.Graph, Machine]:
    machine = draw(clusters(most_ranks))
    return draw(graphs(machine.names, most=8)), machine


def scheduled(
    graph: asc.Graph, machine: Machine, policy: str = "round_robin", costs: asc.Costs = COSTS
) -> asc.Schedule:
    """A schedule, unless constraints put tasks that share state on two ranks."""
    try:
        return asc.schedule(graph, machine, policy=policy, costs=costs)
    except asc.ScheduleError as error:
        assume("one rank" not in str(error))
        raise


def nbytes(graph: asc.Graph) -> dict[str, int]:
    """The bytes of each value in a serial run."""
    found: dict[str, int] = {}
    twin = graph.snapshot()
    for task in graph.tasks:

        def spy(*args, task=task, **kwargs):
            returned = task.fn(*args, **kwargs)
            for index, item in task.results(returned):
                found[graph.values[index].name] = sum(leaf.nbytes for leaf in flatten(item))
            return returned

        twin.tasks[task.index] = replace(task, fn=spy)
    inputs = inputs_for(graph)
    twin.run_serial(**inputs)
    return found | {name: tensor.nbytes for name, tensor in inputs.items()}


def assert_equal(graph: asc.Graph, parts: Sequence[Program], seeds: Sequence[int] = (0, 1)) -> None:
    """Every mode, in some interleaving, gives the bits of the serial run."""
    expected = outcome(graph.run_serial, graph)
    sizes = nbytes(graph)
    chosen = uniform(seeds[0]), contrary(seeds[1]), contrary(seeds[0])
    for mode, choose in zip(MODES, chosen, strict=True):
        how = {"mode": mode, "choose": choose, "nbytes": sizes}
        found = outcome(lambda how=how, **inputs: run_parts(parts, graph, inputs, **how), graph)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected), mode


@given(policy=policies, drawn=on_ranks(), seed=st.integers(0, 999))
def test_the_parts_of_ranks_give_what_the_serial_run_gives(
    policy: str, drawn: tuple[asc.Graph, Machine], seed: int
) -> None:
    graph, machine = drawn
    program = scheduled(graph, machine, policy).program
    verify(program, graph, machine)
    assert_equal(graph, parts_of(program), (seed, seed + 1))


@given(drawn=on_ranks(), limit=st.sampled_from([150.0, 400.0]))
def test_ranks_with_little_memory_give_what_the_serial_run_gives(
    drawn: tuple[asc.Graph, Machine], limit: float
) -> None:
    graph, machine = drawn
    devices = [
        replace(d, nbytes=limit * 8 if "cuda" in d.name else d.nbytes) for d in machine.devices
    ]
    small = Machine(devices, machine.links, contention=machine.contention, network=machine.network)
    try:
        schedule = asc.schedule(graph, small, policy="heft", costs=COSTS)
    except asc.ScheduleError:  # too little of it
        return
    verify(schedule.program, graph, small)
    assert_equal(graph, parts_of(schedule.program))


@SELDOM
@given(drawn=on_ranks())
def test_nothing_can_be_left_out_and_texts_read_back(drawn: tuple[asc.Graph, Machine]) -> None:
    graph, machine = drawn
    program = scheduled(graph, machine).program
    assert Program.parse(str(program)) == program
    for part in parts_of(program):
        assert Program.parse(str(part)).instructions == part.instructions
    lines = program.instructions
    for i in range(len(lines)):
        left = replace(program, instructions=lines[:i] + lines[i + 1 :])
        assert refusal(left, graph), f"without line {i}: {lines[i]}\n{program}"


@given(drawn=on_ranks(3), seed=st.integers(0, 999))
def test_two_neighbours_exchanged_are_refused_or_harmless(
    drawn: tuple[asc.Graph, Machine], seed: int
) -> None:
    """No rank hangs in what ``verify`` accepts, whatever messages do."""
    graph, machine = drawn
    program = scheduled(graph, machine).program
    lines = program.instructions
    for i in random.Random(seed).sample(range(1, len(lines)), min(len(lines) - 1, 5)):
        swapped = (*lines[: i - 1], lines[i], lines[i - 1], *lines[i + 1 :])
        mutant = replace(program, instructions=swapped)
        if not refusal(mutant, graph):
            assert_equal(graph, parts_of(mutant), (seed, seed))


@SELDOM
@given(drawn=on_ranks())
def test_one_process_can_play_all_ranks(drawn: tuple[asc.Graph, Machine]) -> None:
    graph, machine = drawn
    scheduled(graph, machine)
    expected = outcome(graph.run_serial, graph)
    for backend in ("host", "virtual"):
        with asc.schedule(
            graph, machine, policy="round_robin", costs=COSTS, backend=backend
        ) as schedule:
            found = outcome(schedule, graph)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---- bounds


@given(policy=policies, drawn=on_ranks(3), nbytes=st.sampled_from([100, 1e5]))
def test_no_schedule_is_shorter_than_its_lower_bound(
    policy: str, drawn: tuple[asc.Graph, Machine], nbytes: float
) -> None:
    graph, machine = drawn
    made = scheduled(graph, machine, policy, asc.Costs(default_seconds=1e-5, default_nbytes=nbytes))
    assert made.lower_bound <= made.makespan * (1 + 1e-9)


# ---- clocks


@SELDOM
@given(drawn=on_ranks(3))
def test_clocks_know_exactly_what_happens_before_what(drawn: tuple[asc.Graph, Machine]) -> None:
    """Against a closure by brute force, in which a copy between ranks is two events."""
    graph, machine = drawn
    program = scheduled(graph, machine).program
    rank = dict(program.ranks)
    known: dict[Stream, set[int]] = {stream: set() for stream in program.streams}
    recorded: dict[int, set[int]] = {}
    work: list[int] = []  # lines of runs, copies, sends and receives
    pairs: dict[tuple[int, int], bool] = {}

    def ask(at: int, *streams: Stream) -> None:
        pairs.update(((k, at), any(k in known[own] for own in streams)) for k in work)

    def add(at: int, *streams: Stream) -> None:
        work.append(at)
        for own in streams:
            known[own].add(at)

    for i, instruction in enumerate(program):
        streams = occupied(instruction)
        own = streams[0]
        match instruction:
            case Copy() as copy if rank[copy.source] != rank[copy.destination]:
                ask(i, own)
                add(i, own)
                ask(len(program) + i, streams[1])
                known[streams[1]] |= known[own]
                add(len(program) + i, streams[1])
            case Run() | Copy():
                ask(i, *streams)
                for other in streams:
                    known[other] = set.union(*(known[each] for each in streams))
                add(i, *streams)
            case Record(_, event):
                ask(i, own)
                recorded[event] = set(known[own])
            case Wait(_, event):
                known[own] |= recorded[event]
                ask(i, own)
            case _:
                ask(i, own)
    before, at = np.array([*pairs], np.int64).reshape(-1, 2).T
    assert ordered(program, before, at).tolist() == [*pairs.values()]


# ---- frees


def test_memory_that_was_sent_is_freed_when_the_answer_has_come() -> None:
    """A receive tells which sends of its rank have ended."""
    graph = asc.Graph("ping pong")
    value = graph.input("x")
    for i in range(6):
        value = graph.add(torch.neg, value, name=f"t{i}", on=f"cpu:{i % 2}")
    graph.output(y=value)
    program = pinned(graph, Machine.emulated(0, hosts=2))
    lines = [str(line) for line in program.part(0)]
    assert lines.index("free t0") < lines.index("run t4")
    assert lines.index("free t2") < len(lines)


def test_tasks_with_shared_state_are_on_one_rank() -> None:
    graph = asc.Graph("noisy")
    x = graph.input("x")
    for i in range(6):
        x = graph.add(torch.rand_like, x, name=f"r{i}", random=True)
    graph.output(y=x)
    machine = Machine.emulated(1, hosts=3)
    for policy in ("round_robin", "heft"):
        placed = asc.schedule(graph, machine, policy=policy, costs=COSTS).placement
        assert len({machine.ranks[device] for device in placed.device.values()}) == 1


def test_shared_state_on_two_ranks_is_refused() -> None:
    graph = asc.Graph("noisy")
    x = graph.input("x")
    first = graph.add(torch.rand_like, x, name="first", random=True, on="cpu:0")
    graph.output(y=graph.add(torch.rand_like, first, name="second", random=True, on="cpu:1"))
    with pytest.raises(asc.ScheduleError, match=r"'first' and 'second' must be on one rank"):
        asc.schedule(graph, Machine.emulated(0, hosts=2), policy="heft", costs=COSTS)


@pytest.mark.parametrize("given", [{"in_flight": 2}, {"objective": "period"}])
def test_several_runs_in_flight_are_refused(given) -> None:
    graph, machine = asc.Graph(), Machine.emulated(0, hosts=2)
    graph.output(y=graph.input("x") + 1)
    with pytest.raises(asc.ScheduleError, match="one run at a time; use in_flight=1"):
        asc.schedule(graph, machine, **given)
    single = asc.schedule(graph, machine, costs=COSTS)
    with pytest.raises(asc.ScheduleError, match="one run at a time; use in_flight=1"):
        lower(single.problem, single.placement, in_flight=2)
    with pytest.raises(asc.ProgramError, match="one run at a time, and 3 are to be in flight"):
        verify(replace(single.program, in_flight=3), single.graph, machine)
