"""Programs of graphs in which nothing is written in place; those that are drawn are in ``laws/test_necessary.py``."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.graph.flow import flow
from autosched.lowering import lower
from autosched.placement import Placement, Send
from autosched.problem import Constraints
from autosched.program.program import Copy, Free, Program, Run
from tests.sample_policies import policies
from tests.strategies import DEVICES, machines

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)


def fn(*_: object) -> None:
    raise AssertionError("nothing runs here")


@st.composite
def plain(draw: st.DrawFn) -> asc.Graph:
    """Draw graphs in which nothing is written in place: several results, orders, constraints, results nobody uses."""
    graph = asc.Graph("plain")
    values = list(graph.inputs("a", "b"))
    for i in range(draw(st.integers(1, 8))):
        reads = draw(st.lists(st.sampled_from(values), max_size=3))
        after = draw(st.lists(st.sampled_from(graph.tasks), max_size=2)) if i else []
        on = draw(st.sampled_from([None] * 4 + [*DEVICES]))
        count = draw(st.sampled_from([1, 1, 1, 2]))
        values += graph.add(fn, *reads, after=after, on=on, outputs=count)
    graph.output(*dict.fromkeys(draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))))
    return graph


@settings(max_examples=max(8, settings.default.max_examples // 2))
@given(policy=policies, graph=plain(), machine=machines())
def test_hazards_of_values_that_do_not_change_are_found_at_once_as_step_by_step(
    policy: str, graph: asc.Graph, machine: asc.Machine
) -> None:
    placement = asc.schedule(graph, machine, policy=policy, costs=COSTS).placement
    outputs = dict.fromkeys(list(graph.outputs)[:1], DEVICES[-1])
    at_once = lower(asc.Problem(graph, machine, constraints=Constraints(outputs)), placement)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asc.Graph, "changing", property(lambda graph: {*range(len(graph.values))}))
        assert str(
            lower(asc.Problem(graph, machine, constraints=Constraints(outputs)), placement)
        ) == str(at_once)


def test_a_copy_goes_where_the_placement_says() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    for name in ("first", "second", "reads"):
        graph.output(**{name: graph.add(fn, x, name=name)})
    order = ("first", "second", "reads")
    device = {"first": "cpu", "second": "cpu", "reads": "cuda:0"}
    placement = Placement(device, order, (Send("x", 0, "cuda:0", "second"),))
    lines = lower(asc.Problem(graph, asc.Machine.emulated(gpus=1)), placement).instructions
    names = [
        line.task if isinstance(line, Run) else line.destination
        for line in lines
        if isinstance(line, (Run, Copy))
    ]
    assert names[:4] == ["first", "cuda:0", "second", "reads"]


def large() -> tuple[asc.Graph, asc.Schedule]:
    """Return a graph so large that its clocks are compiled."""
    graph = asc.Graph("large")
    layer = list(graph.inputs(*"abcd"))
    for _ in range(400):
        layer = [
            graph.add(fn, *pair, nbytes=8)
            for pair in zip(layer, layer[1:] + layer[:1], strict=True)
        ]
    graph.output(*layer)
    return graph, asc.schedule(graph, asc.Machine.emulated(gpus=4), policy="round_robin")


def test_of_a_large_program_too_the_fault_is_named() -> None:
    graph, made = large()
    asc.verify(made.program, graph, made.machine)
    at = next(i for i, line in enumerate(made.program.instructions) if isinstance(line, Free))
    lines = made.program.instructions[:at] + made.program.instructions[at + 1 :]
    with pytest.raises(asc.ProgramError, match="is never freed"):
        asc.verify(replace(made.program, instructions=lines), graph, made.machine)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("input a on cpu", "input c on cpu", "the program's inputs are ['c'], the graph's ['a']"),
        ("output y on cuda:0", "output z on cuda:0", "outputs are ['z'], the graph's ['y']"),
        ("run y", "run x", "has no task 'x'"),
        ("free a", "free c", "'c' on cuda:0 is not there to be freed"),
        ("copy a <-", "copy a@1 <-", "'a' (version 1) on cpu is read but"),
        ("copy a <- cpu", "copy a <- cpu overwriting", "is no input that lives on cuda:0"),
    ],
)
def test_names_that_fit_nothing_are_refused(old: str, new: str, message: str) -> None:
    graph = asc.Graph()
    graph.output(y=graph.add(fn, graph.input("a"), name="y", on="cuda:0"))
    text = str(asc.schedule(graph, asc.Machine.emulated(gpus=1)).program)
    text = "\n".join(" ".join(line.split()) for line in text.splitlines())
    asc.verify(Program.parse(text), graph)
    assert text.count(old) >= 1
    with pytest.raises(asc.ProgramError, match=re.escape(message)):
        asc.verify(Program.parse(text.replace(old, new)), graph)


def test_the_flow_of_a_graph_that_grows_grows() -> None:
    graph = asc.Graph()
    y = graph.add(fn, graph.input("x"))
    assert flow(graph).makes.tolist() == []
    graph.output(y=y)
    assert flow(graph).makes.tolist() == [y.index]
    graph.add(fn, y)
    assert flow(graph).reads.tolist() == [0, y.index]
