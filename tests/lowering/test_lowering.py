"""Lowering: small graphs and the programs expected of them, as text; the fewest waits that there can be."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from textwrap import dedent

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networkx.algorithms import bipartite

import autosched as asc
from autosched.lowering import lower
from autosched.placement import Placement, Send
from autosched.problem import Constraints
from autosched.program.program import Copy, Free, Record, Run, Wait, occupied
from tests.strategies import graphs, machines
from tests.verification.test_verify import WRITTEN, fn, written

TWO_GPUS = asc.Machine.emulated(gpus=2)


def lowered(graph, machine=TWO_GPUS, outputs=None, order=None, **device):
    """Lower a graph whose tasks are placed by name, on the CPU if not said; return a verified program."""
    names = [task.name for task in graph.tasks]
    placement = asc.Placement(
        {name: device.get(name, "cpu") for name in names}, tuple(order or names)
    )
    program = lower(asc.Problem(graph, machine, constraints=Constraints(outputs or {})), placement)
    asc.verify(program, graph)
    return program


def assert_is(program, expected):
    assert str(program) == dedent(expected).strip()


def figure(device=None):
    """x -> h -> y."""
    graph = asc.Graph()
    with graph.on(device) if device else nullcontext():
        x = graph.input("x")
    graph.output(graph.add(fn, graph.add(fn, x, name="h"), name="y"))
    return graph


def test_one_device_needs_nothing_but_runs_and_frees():
    assert_is(
        lowered(figure()),
        """
        input x on cpu
        cpu/compute  run h
        cpu/compute  run y
        cpu/compute  free h
        output y on cpu
        """,
    )


def test_a_value_read_on_another_gpu_is_copied_as_soon_as_it_exists():
    assert_is(
        lowered(figure("cuda:0"), h="cuda:0", y="cuda:1"),
        """
        input x on cuda:0
        cuda:0/compute   run h
        cuda:0/compute   record e0
        cuda:0/copy-out  wait e0
        cuda:0/copy-out  copy h -> cuda:1/copy-in
        cuda:0/copy-out  record e1
        cuda:1/compute   wait e1
        cuda:1/compute   run y
        cuda:0/compute   wait e1
        cuda:0/compute   free h
        cuda:1/compute   record e2
        cuda:1/copy-in   wait e2
        cuda:1/copy-in   free h
        output y on cuda:1
        """,
    )


def test_without_contention_each_copy_has_a_stream_of_its_own_at_its_source():
    assert_is(
        lowered(
            figure("cuda:0"),
            asc.Machine.emulated(gpus=2, contention=False),
            {"y": "cpu"},
            h="cuda:0",
            y="cuda:1",
        ),
        """
        input x on cuda:0
        cuda:0/compute  run h
        cuda:0/compute  record e0
        cuda:0/copy-0   wait e0
        cuda:0/copy-0   copy h -> cuda:1
        cuda:0/copy-0   record e1
        cuda:1/compute  wait e1
        cuda:1/compute  run y
        cuda:1/compute  free h
        cuda:1/compute  record e2
        cuda:1/copy-1   wait e2
        cuda:1/copy-1   copy y -> cpu
        cuda:0/compute  wait e1
        cuda:0/compute  free h
        cuda:1/copy-1   record e3
        cuda:1/compute  wait e3
        cuda:1/compute  free y
        output y on cpu
        """,
    )


def test_an_input_written_elsewhere_is_copied_back_over_the_callers_behind_its_readers():
    assert_is(lowered(written(), write="cuda:0"), WRITTEN)


def test_a_reader_of_a_copy_elsewhere_does_not_hold_up_a_writer():
    graph = asc.Graph()
    with graph.on("cuda:0"):
        w = graph.input("w")
    read = graph.add(fn, w, name="read")
    graph.add(fn, w, name="write", writes=[w], outputs=())
    graph.output(read)
    assert_is(
        lowered(graph, read="cuda:1", write="cuda:0"),
        """
        input w on cuda:0
        cuda:0/copy-out  copy w -> cuda:1/copy-in
        cuda:0/copy-out  record e0
        cuda:1/compute   wait e0
        cuda:1/compute   run read
        cuda:0/compute   wait e0
        cuda:0/compute   run write
        cuda:1/compute   record e1
        cuda:1/copy-in   wait e1
        cuda:1/copy-in   free w
        output read on cuda:1
        """,
    )


def test_a_view_travels_alone_and_its_next_version_travels_again():
    graph = asc.Graph()
    with graph.on("cuda:0"):
        x = graph.input("x")
    a = graph.add(fn, x, name="a")
    view = a[0]
    early = graph.add(fn, view, name="early")
    graph.add(fn, a, name="write", writes=[a], outputs=())
    graph.output(early, graph.add(fn, view, name="late"))
    assert_is(
        lowered(graph, a="cuda:0", getitem="cuda:0", write="cuda:0", early="cuda:1"),
        """
        input x on cuda:0
        cuda:0/compute   run a
        cuda:0/compute   run getitem
        cuda:0/compute   record e0
        cuda:0/copy-out  wait e0
        cuda:0/copy-out  copy getitem -> cuda:1/copy-in
        cuda:0/copy-out  record e1
        cuda:1/compute   wait e1
        cuda:1/compute   run early
        cuda:0/compute   wait e1
        cuda:0/compute   run write
        cuda:0/compute   record e2
        cuda:0/copy-out  wait e2
        cuda:0/copy-out  copy getitem@1 -> cpu
        cuda:0/copy-out  record e3
        cpu/compute      wait e3
        cpu/compute      run late
        cpu/compute      free getitem@1
        cuda:0/compute   wait e3
        cuda:0/compute   free a@1
        cuda:1/compute   record e4
        cuda:1/copy-in   wait e4
        cuda:1/copy-in   free getitem
        output early on cuda:1
        output late on cpu
        """,
    )


def test_a_diamond_on_two_streams_waits_twice_and_frees_wait_only_at_the_end():
    """
    a -> b -> d
      -> c ->
    """
    graph = asc.Graph()
    a = graph.add(fn, name="a")
    b, c = graph.add(fn, a, name="b"), graph.add(fn, a, name="c")
    graph.output(graph.add(fn, b, c, name="d"))
    assert_is(
        lowered(graph, asc.Machine([asc.Device("cpu", streams=2)])),
        """
        cpu/compute   run a
        cpu/compute   record e0
        cpu/compute   run b
        cpu/compute1  wait e0
        cpu/compute1  run c
        cpu/compute1  record e1
        cpu/compute   wait e1
        cpu/compute   free a
        cpu/compute   run d
        cpu/compute   free b
        cpu/compute   record e2
        cpu/compute1  wait e2
        cpu/compute1  free c
        output d on cpu
        """,
    )


def test_branches_are_spread_evenly_over_too_few_streams():
    graph = asc.Graph()
    x = graph.add(fn, name="x")
    for block in range(3):
        branches = [graph.add(fn, graph.add(fn, x), name=f"{block}.{i}") for i in range(4)]
        x = graph.add(fn, *branches, name=f"join{block}")
    graph.output(x)
    program = lowered(graph, asc.Machine([asc.Device("cpu", streams=2)]))
    streams = {run.task: run.stream.name for run in program.instructions if isinstance(run, Run)}
    for block in range(3):
        on = [streams[f"{block}.{i}"] for i in range(4)]
        assert sorted(on) == ["compute", "compute", "compute1", "compute1"]


def test_memory_is_freed_under_the_version_of_the_value_that_owns_it():
    """A view that was taken behind a write is at a version of its own."""
    graph = asc.Graph()
    a = graph.add(fn, name="a")
    graph.add(fn, a, name="write", writes=[a], outputs=())
    view = a[0]
    graph.add(fn, a, name="again", writes=[a], outputs=())
    graph.output(graph.add(fn, view, name="y"))
    assert [str(i) for i in lowered(graph) if isinstance(i, Free)] == ["free a@2"]


def test_one_value_may_be_wanted_on_two_devices():
    graph = asc.Graph()
    y = graph.add(fn, name="y")
    graph.output(a=y, b=y, c=y)
    program = lowered(graph, outputs={"a": "cpu", "b": "cuda:1"}, y="cuda:0")
    assert program.outputs == (("a", "cpu"), ("b", "cuda:1"), ("c", "cuda:0"))


def test_a_device_that_no_link_leads_to_is_refused():
    machine = asc.Machine(
        [asc.Device("cpu"), asc.Device("cuda:0"), asc.Device("cuda:1")],
        [asc.Link("cpu", "cuda:0", 1)],
    )
    with pytest.raises(
        asc.ScheduleError,
        match="value 'h' is on 'cuda:0' and needed on 'cuda:1', but no link joins",
    ):
        lowered(figure(), machine, h="cuda:0", y="cuda:1")


def test_a_value_travels_on_from_where_it_is_when_no_link_leads_from_where_it_was_made():
    """cuda:0 -- cpu -- cuda:1: y is on the CPU because z reads it there."""
    machine = asc.Machine(
        [asc.Device("cpu"), asc.Device("cuda:0"), asc.Device("cuda:1")],
        [asc.Link("cpu", "cuda:0", 1), asc.Link("cpu", "cuda:1", 1)],
    )
    graph = asc.Graph()
    y = graph.add(fn, name="y")
    graph.output(graph.add(fn, y, name="z"), graph.add(fn, y, name="w"))
    program = lowered(graph, machine, y="cuda:0", z="cpu", w="cuda:1")
    ends = [(copy.source, copy.destination) for copy in program if isinstance(copy, Copy)]
    assert ends == [("cuda:0", "cpu"), ("cpu", "cuda:1")]


def test_a_value_goes_by_way_of_others_where_no_link_leads_to_its_reader():
    chain = ["cpu", "cuda:0", "cuda:1", "cuda:2"]
    links = [asc.Link(a, b, 1e9) for a, b in itertools.pairwise(chain)]
    machine = asc.Machine([*map(asc.Device, chain)], links)
    graph = asc.Graph()
    y = graph.add(fn, name="y", on="cuda:2")
    graph.output(z=graph.add(fn, y, name="z", on="cuda:0"))
    for policy in ("auto", "heft", "round_robin"):
        program = asc.schedule(graph, machine, policy=policy, outputs="cpu").program
        ends = [copy.destination for copy in program if isinstance(copy, Copy)]
        assert ends == ["cuda:1", "cuda:0", "cpu"]


@st.composite
def dags(draw, most=12):
    """Graphs of tasks that read some of the tasks before them."""
    graph = asc.Graph("drawn")
    values = []
    for i in range(draw(st.integers(1, most))):
        before = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else ()
        values.append(graph.add(fn, *(values[j] for j in sorted(before)), name=f"t{i}"))
    graph.output(*values)
    return graph


@given(graph=dags())
def test_waits_on_one_device_are_as_few_as_nimble_proves_possible(graph):
    """Reduced edges minus the size of a maximum matching between them (Kwon et al., NeurIPS 2020, theorem 3)."""
    program = lowered(graph, asc.Machine([asc.Device("cpu", streams=len(graph))]))
    names = [task.name for task in graph.tasks]
    edges = [(names[d.task], task.name) for task in graph.tasks for d in task.dependencies]
    reduced = nx.transitive_reduction(nx.DiGraph(edges))
    sides = nx.Graph([(("from", u), ("to", v)) for u, v in reduced.edges])
    matched = (
        len(bipartite.eppstein_matching(sides, [side for side in sides if side[0] == "from"])) // 2
    )
    assert sum(isinstance(i, Wait) for i in program) == reduced.number_of_edges() - matched


@given(graph=dags(), streams=st.integers(1, 3))
def test_frees_alone_cost_no_wait_while_there_is_work(graph, streams):
    """What is freed where is another matter than who waits for whom: with outputs kept, the waits are the same."""
    kept = graph
    freed = graph.snapshot()
    freed.outputs = {}
    machine = asc.Machine([asc.Device("cpu", streams=streams)])

    def working(program):
        last = max(i for i, instruction in enumerate(program) if isinstance(instruction, Run))
        return [i for i in program.instructions[: last + 1] if not isinstance(i, Free)]

    with_frees, without = lowered(freed, machine), lowered(kept, machine)
    assert working(with_frees) == working(without)


@settings(max_examples=max(50, settings.default.max_examples))  # few graphs show a late free
@given(graph=graphs(), machine=machines())
def test_memory_goes_back_at_the_first_place_where_that_costs_no_wait(graph, machine):
    """So no free could stand one run, copy or wait earlier; of those that wait at the end, none behind the last run."""
    program = asc.schedule(graph, machine, policy="round_robin").program
    lines = program.instructions
    last = max(i for i, line in enumerate(lines) if isinstance(line, (Run, Copy)))
    for i, line in enumerate(lines):
        if isinstance(line, Free):
            before = max(j for j in range(i) if isinstance(lines[j], (Run, Copy, Wait)))
            at = min(before, last + 1)
            earlier = replace(
                program, instructions=(*lines[:at], line, *lines[at:i], *lines[i + 1 :])
            )
            with pytest.raises(asc.ProgramError):
                asc.verify(earlier, graph)


@given(graph=graphs(), machine=machines())
def test_no_two_events_are_recorded_at_one_moment(graph, machine):
    """Between two records of a stream there is something that the second one stands for, and the first does not."""
    program = asc.schedule(graph, machine, policy="round_robin").program
    fresh = set()
    for line in program.instructions:
        if isinstance(line, Record):
            assert line.stream in fresh, f"e{line.event}\n{program}"
            fresh.remove(line.stream)
        elif isinstance(line, (Run, Copy, Wait)):
            fresh.update(occupied(line))


def test_a_copy_that_is_wished_for_after_its_reader_is_before_it():
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:0"):
        w = graph.input("w")
    graph.add(torch.add, w, x, name="reads", on="cuda:0", writes=[w])
    graph.output(y=graph.add(torch.neg, w, name="late", on="cuda:0"))
    machine = asc.Machine.emulated(gpus=1)
    order = ("reads", "late")
    wish = (Send("x", 0, "cuda:0", "late"),)
    placement = Placement(dict.fromkeys(order, "cuda:0"), order, wish)
    asc.verify(lower(asc.Problem(graph, machine), placement), graph, machine)
