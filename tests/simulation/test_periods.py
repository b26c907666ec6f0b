"""Runs in flight: predicted timelines of several runs, and the period, against a max-plus reference."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched._lib.cycles import maximum_cycle_ratio
from autosched.bounds.periods import period_bounds
from autosched.program.program import Copy, Program, Record, Run, Stream, Wait, occupied
from autosched.simulation.issuing import Issuing
from autosched.simulation.periods import period
from autosched.simulation.simulate import simulate, times

NEVER = -np.inf


def reference(program: Program, seconds: list[float], runs: int) -> list[float]:
    """Return when each run ends, by products of max-plus matrices: one for each instruction.

    The state is when each stream is free, when each event was last recorded in each of the last
    runs, when each of the last runs ended, and the end of this one so far.
    """
    deep = max([i.ago for i in program if isinstance(i, Wait)], default=0)
    names: list[object] = [*program.streams]
    events = dict.fromkeys(i.event for i in program if isinstance(i, Record))
    names += [(event, ago) for event in events for ago in range(deep + 1)]
    names += [("end", ago) for ago in range(program.in_flight + 1)]
    at = {name: k for k, name in enumerate(names)}

    def step(**rows: list[tuple[object, float]]) -> np.ndarray:
        """Return the matrix that sets an entry to the maximum of (entry, added seconds)."""
        made = np.where(np.eye(len(names), dtype=bool), 0.0, NEVER)
        for number, row in rows.items():
            made[int(number[1:])] = NEVER
            for name, added in row:
                made[int(number[1:]), at[name]] = added
        return made

    def put(name: object, *row: tuple[object, float]) -> np.ndarray:
        return step(**{f"_{at[name]}": list(row)})

    before = [put((e, ago), ((e, ago - 1), 0.0)) for e in events for ago in range(deep, 0, -1)]
    before += [
        put(("end", ago), (("end", ago - 1), 0.0)) for ago in range(program.in_flight, 0, -1)
    ]
    gate = ("end", program.in_flight)
    before += [put(("end", 0), (gate, 0.0))]
    before += [put(stream, (stream, 0.0), (gate, 0.0)) for stream in program.streams]
    for i, instruction in enumerate(program):
        match instruction:
            case Run() | Copy():
                streams = occupied(instruction)
                row = [(stream, seconds[i]) for stream in streams]
                both = {f"_{at[stream]}": row for stream in streams}
                before.append(step(**both))
                before.append(put(("end", 0), (("end", 0), 0.0), (streams[0], 0.0)))
            case Record(stream, event):
                before.append(put((event, 0), (stream, 0.0)))
            case Wait(stream, event, ago):
                before.append(put(stream, (stream, 0.0), ((event, ago), 0.0)))
    state = np.zeros(len(names))
    state[
        [at[name] for name in names if isinstance(name, tuple) and not isinstance(name, Stream)]
    ] = NEVER
    state[[at["end", ago] for ago in range(program.in_flight + 1)]] = 0.0
    ends = []
    for _ in range(runs):
        for matrix in before:
            state = (matrix + state).max(axis=1)
        ends.append(float(state[at["end", 0]]))
    return ends


@st.composite
def loops(draw) -> tuple[Program, list[float]]:
    """Return a loop on up to four streams, and the seconds of its instructions."""
    streams = [f"d{i}/compute" for i in range(draw(st.integers(1, 4)))]
    one = st.sampled_from(streams)
    lines = [f"{draw(st.integers(2, 4))} runs in flight"]
    tasks = draw(st.integers(1, 8))
    recorded = draw(st.sets(st.integers(0, tasks - 1), max_size=5))
    for i in range(tasks):
        stream = draw(one)
        for event in recorded:
            if draw(st.integers(0, 5)) == 0:
                ago = draw(st.integers(0 if event < i else 1, 2))
                old = f" of {ago} run{'s' * (ago > 1)} ago" if ago else ""
                lines.append(f"{stream} wait e{event}{old}")
        other = draw(one)
        copies = other != stream and draw(st.booleans())
        lines.append(f"{stream} copy v{i} -> {other}" if copies else f"{stream} run t{i}")
        lines += [f"{stream} record e{i}"] * (i in recorded)
    program = Program.parse("\n".join(lines))
    work = [isinstance(i, (Run, Copy)) for i in program]
    return program, [float(draw(st.integers(0, 9))) if works else 0.0 for works in work]


def ends(program: Program, seconds: list[float], runs: int, issued=None) -> list[float]:
    _, found = times(program, seconds, issued, runs)
    return list(itertools.accumulate(found.max(axis=1).tolist(), max))


@given(loops())
def test_runs_end_when_products_of_matrices_say(loop):
    program, seconds = loop
    assert ends(program, seconds, 9) == list(
        itertools.accumulate(reference(program, seconds, 9), max)
    )


@given(loops())
def test_the_period_is_what_each_run_takes_in_the_long_run(loop):
    program, seconds = loop
    found = ends(program, seconds, 100)
    # The cyclicity divides a product of runs in flight and of distances.
    assert period(program, seconds) == pytest.approx((found[-1] - found[-61]) / 60)


@given(loops(), st.data())
def test_the_period_counts_the_threads_that_issue(loop, data):
    program, seconds = loop
    count = len(program.streams)
    issue = [float(data.draw(st.integers(0, 3))) for _ in program]
    thread = [data.draw(st.sampled_from([i, count])) for i in range(count)]
    blocks = [data.draw(st.booleans()) for _ in range(count)]
    issued = Issuing.of(issue, thread, blocks, 1.0)
    found = ends(program, seconds, 160, issued)
    assert period(program, seconds, issued) == pytest.approx((found[-1] - found[-61]) / 60)


def test_more_runs_in_flight_never_take_longer():
    text = "{} runs in flight\na/c run x\na/c record e0\nb/c wait e0\nb/c run y"
    found = [period(Program.parse(text.format(n)), [3.0, 0, 0, 4.0]) for n in (1, 2, 3)]
    assert found == [7.0, 4.0, 4.0]


def test_a_cycle_over_two_runs_counts_half():
    assert maximum_cycle_ratio([2.0, 3.0, 1.0], [(0, 1, 0), (1, 0, 2), (2, 2, 1)]) == 2.5


def test_nothing_bounds_a_graph_without_cycles():
    assert maximum_cycle_ratio([2.0, 3.0], [(0, 1, 0)]) == 0.0


# ---- schedules


def pipeline(seconds):
    """Return a chain with a task on each GPU."""
    graph = asc.Graph("pipeline")
    value = graph.input("x")
    for i, each in enumerate(seconds):
        value = graph.add(abs, value, name=f"stage{i}", seconds=each, on=f"cuda:{i}")
    graph.output(y=value)
    return graph


def in_flight(schedule, runs):
    return replace(schedule, program=replace(schedule.program, in_flight=runs))


def test_stages_on_devices_overlap():
    graph = pipeline([3.0, 5.0, 4.0])
    machine = asc.Machine.emulated(gpus=3, bytes_per_second=1, latency=0.0)
    schedule = asc.schedule(graph, machine)
    assert schedule.period == schedule.makespan == 12.0
    assert in_flight(schedule, 2).period == 6.0
    loop = in_flight(schedule, 3)
    assert (loop.period, loop.period_bound) == (5.0, 5.0)
    spans = loop.simulate(runs=3).spans
    assert [(s.name, s.run, s.start) for s in spans if s.kind == "run" and s.name == "stage1"] == [
        ("stage1", 0, 3.0), ("stage1", 1, 8.0), ("stage1", 2, 13.0),
    ]  # fmt: skip


def test_a_carried_wait_is_an_arrow_between_runs():
    program = Program.parse(
        "2 runs in flight\na/c wait e0 of 1 run ago\na/c run x\nb/c run y\nb/c record e0"
    )
    graph = asc.Graph()
    graph.output(y=graph.add(abs, graph.add(abs, graph.input("i"), name="x"), name="y"))
    machine = asc.Machine([asc.Device("a"), asc.Device("b")])
    found = simulate(
        program, asc.Problem(graph, machine, asc.Costs.table({"x": 2.0, "y": 3.0})), runs=2
    )
    named = [(found.spans[a].name, found.spans[a].run, found.spans[b].run) for a, b in found.arrows]
    assert named == [("y", 0, 1)]
    assert [(s.name, s.run, s.start) for s in found.spans] == [
        ("x", 0, 0.0), ("y", 0, 0.0), ("x", 1, 3.0), ("y", 1, 3.0),
    ]  # fmt: skip


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_the_virtual_clock_runs_back_to_back_without_runs_in_flight(runs):
    schedule = asc.schedule(pipeline([3.0, 5.0]), asc.Machine.emulated(gpus=2))
    assert schedule.simulate(runs=runs).makespan == pytest.approx(runs * schedule.makespan)


def test_state_that_runs_hand_on_bounds_the_period():
    graph = asc.Graph()
    memory = graph.input("memory")
    first = graph.add(abs, memory, name="first", seconds=2.0)
    second = graph.add(abs, first, name="second", seconds=3.0)
    graph.add(max, memory, second, name="update", seconds=1.0, writes=[memory])
    graph.output(y=second)
    found = period_bounds(asc.Problem(graph, asc.Machine.emulated(gpus=2)), in_flight=8)
    assert found["carried"] == 6.0


def test_random_numbers_are_drawn_in_the_order_of_runs():
    graph = asc.Graph()
    first = graph.add(abs, graph.input("x"), seconds=2.0, random=True)
    between = graph.add(abs, first, seconds=3.0)
    graph.output(y=graph.add(abs, between, seconds=2.0, random=True))
    found = period_bounds(asc.Problem(graph, asc.Machine.emulated(gpus=2)), in_flight=8)
    assert found["carried"] == 7.0
    assert found["latency"] == 7.0 / 8


def with_streams(streams):
    machine = asc.Machine.emulated(gpus=2, latency=0.0)
    return asc.Machine([replace(d, streams=streams) for d in machine.devices], machine.links)


@pytest.mark.parametrize("apart", [True, False])
def test_a_write_waits_for_readers_of_the_same_memory_only(apart):
    """The task on the host reads its own memory, and the write is to a copy: runs need not alternate them."""
    graph = asc.Graph()
    x = graph.input("x", nbytes=0)
    graph.add(abs, x, name="read", seconds=8.0, on="cpu" if apart else "cuda:0")
    graph.add(abs, x, name="write", seconds=4.0, on="cuda:0", writes=[x], outputs=())
    machine = with_streams(2)
    schedule = asc.schedule(graph, machine, in_flight=2)
    carried = period_bounds(asc.Problem(graph, machine), in_flight=2)["carried"]
    assert (carried, schedule.period) == ((4.0, 8.0) if apart else (12.0, 12.0))
    assert schedule.period_bound <= schedule.period


@st.composite
def loops(draw):
    """Draw a graph whose tasks read and write two inputs on given devices, and the runs in flight."""
    graph = asc.Graph()
    values = [*graph.inputs("x", "y")]
    devices = st.sampled_from(["cpu", "cuda:0", "cuda:1", None])
    for _ in range(draw(st.integers(2, 7))):
        read, source = draw(st.sampled_from(values)), draw(st.sampled_from(values[:2]))
        facts = {"on": draw(devices), "seconds": float(draw(st.integers(0, 8)))}
        if draw(st.booleans()):
            graph.add(max, source, read, writes=[source], outputs=(), **facts)
        else:
            values.append(graph.add(max, source, read, random=draw(st.booleans()), **facts))
    return graph, draw(st.integers(2, 4))


@settings(max_examples=4 * settings().max_examples)
@given(loops(), st.sampled_from(["heft", "round_robin", "single"]), st.integers(1, 2))
def test_no_period_is_below_its_bound(loop, policy, streams):
    graph, in_flight = loop
    machine = with_streams(streams)
    schedule = asc.schedule(graph, machine, policy=policy, in_flight=in_flight)
    assert schedule.period >= schedule.period_bound * (1 - 1e-9)
