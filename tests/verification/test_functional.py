"""Plain graphs: what is proved at once is what ``verify`` proves step by step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched import lowering
from autosched._lib.jit import Mode, mode
from autosched.graph.flow import flow
from autosched.lowering import lower
from autosched.placement import Placement, Send
from autosched.program.program import Copy, Free, Program, Run, Wait
from autosched.testing.strategies import DEVICES, graphs, machines
from autosched.verification.functional import proves
from tests.laws.test_necessary import mutants, refusal
from tests.sample_policies import policies, under_every_policy

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
STEPS, ARRAYS = Mode(False), Mode(True)


def fn(*_: object) -> None:
    raise AssertionError("nothing runs here")


@st.composite
def plain(draw: st.DrawFn, most: int = 8, devices: Sequence[str] = DEVICES) -> asc.Graph:
    """Draw graphs in which nothing is written in place: several results, orders, constraints, results nobody uses."""
    graph = asc.Graph("plain")
    values = list(graph.inputs("a", "b"))
    for i in range(draw(st.integers(1, most))):
        reads = draw(st.lists(st.sampled_from(values), max_size=3))
        after = draw(st.lists(st.sampled_from(graph.tasks), max_size=2)) if i else []
        on = draw(st.sampled_from([None] * 4 + ["host", *devices]))
        count = draw(st.sampled_from([1, 1, 1, 2]))
        values += graph.add(fn, *reads, after=after, on=on, outputs=count)
    graph.output(*dict.fromkeys(draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))))
    return graph


@under_every_policy
@given(policy=policies, graph=plain(), machine=machines(), seed=st.integers(0, 999))
def test_what_is_proved_at_once_is_what_is_proved_step_by_step(
    policy: str, graph: asc.Graph, machine: asc.Machine, seed: int
) -> None:
    program = asc.schedule(graph, machine, policy=policy, costs=COSTS).program
    assert proves(program, graph, machine.host, STEPS)
    source = random.Random(seed)
    for what, mutant in source.sample(found := [*mutants(program, source)], min(len(found), 5)):
        assert proves(mutant, graph, None, STEPS) == (refusal(mutant, graph) is None), (
            f"{what}\n{mutant}"
        )


@given(policy=policies, graph=plain(), machine=machines())
def test_of_a_loop_it_proves_each_run_by_itself(
    policy: str, graph: asc.Graph, machine: asc.Machine
) -> None:
    placement = asc.schedule(graph, machine, policy=policy, costs=COSTS).placement
    loop = lower(graph, machine, placement, in_flight=2)
    assert proves(loop, graph, machine.host, STEPS)
    lines = loop.instructions
    kept = replace(loop, instructions=tuple(i for i in lines if not isinstance(i, Free)))
    assert proves(kept, graph, machine.host, STEPS)  # memory is released when the run has ended
    for at, wait in enumerate(lines):
        if isinstance(wait, Wait):
            other = (*lines[:at], replace(wait, ago=1), *lines[at + 1 :])
            assert not proves(replace(loop, instructions=other), graph, machine.host, STEPS)


@settings(max_examples=max(8, settings.default.max_examples // 2))
@given(policy=policies, graph=plain(), machine=machines())
def test_plain_graphs_are_lowered_at_once_as_they_are_step_by_step(
    policy: str, graph: asc.Graph, machine: asc.Machine
) -> None:
    placement = asc.schedule(graph, machine, policy=policy, costs=COSTS).placement
    outputs = dict.fromkeys(list(graph.outputs)[:1], DEVICES[-1])
    at_once = lower(graph, machine, placement, outputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "is_functional", lambda *_: False)
        assert str(lower(graph, machine, placement, outputs)) == str(at_once)


def test_a_copy_goes_where_the_placement_says() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    for name in ("first", "second", "reads"):
        graph.output(**{name: graph.add(fn, x, name=name)})
    order = ("first", "second", "reads")
    device = {"first": "cpu", "second": "cpu", "reads": "cuda:0"}
    placement = Placement(device, order, (Send("x", 0, "cuda:0", "second"),))
    lines = lower(graph, asc.Machine.emulated(gpus=1), placement).instructions
    names = [
        line.task if isinstance(line, Run) else line.destination
        for line in lines
        if isinstance(line, (Run, Copy))
    ]
    assert names[:4] == ["first", "cuda:0", "second", "reads"]


@settings(max_examples=max(8, settings.default.max_examples // 3))
@given(graph=plain(), machine=machines(), seed=st.integers(0, 999))
def test_compiled_it_proves_the_same(graph: asc.Graph, machine: asc.Machine, seed: int) -> None:
    program = asc.schedule(graph, machine, policy="round_robin", costs=COSTS).program
    source = random.Random(seed)
    for what, mutant in [("as lowered", program), *source.sample([*mutants(program, source)], 2)]:
        assert proves(mutant, graph, None, ARRAYS) == proves(mutant, graph, None, STEPS), (
            f"{what}\n{mutant}"
        )


@given(graph=graphs(), machine=machines())
def test_of_graphs_that_are_not_plain_it_proves_nothing(
    graph: asc.Graph, machine: asc.Machine
) -> None:
    program = asc.schedule(graph, machine, policy="round_robin", costs=COSTS).program
    assert not proves(program, graph, machine.host, STEPS) or graph.is_plain


def large() -> tuple[asc.Graph, asc.Schedule]:
    """Return a graph so large that it is proved at once."""
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
    assert proves(made.program, graph, made.machine.host, ARRAYS)
    assert mode(len(made.program)).fast
    asc.verify(made.program, graph, made.machine)
    at = next(i for i, line in enumerate(made.program.instructions) if isinstance(line, Free))
    lines = made.program.instructions[:at] + made.program.instructions[at + 1 :]
    with pytest.raises(asc.ProgramError, match="is never freed"):
        asc.verify(replace(made.program, instructions=lines), graph, made.machine)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("input a on cpu", "input c on cpu"),
        ("output y on cuda:0", "output z on cuda:0"),
        ("run y", "run x"),
        ("free a", "free c"),
        ("copy a <-", "copy a@1 <-"),
        ("copy a <- cpu", "copy a <- cpu overwriting"),
    ],
)
def test_names_that_fit_nothing_are_not_proved(old: str, new: str) -> None:
    graph = asc.Graph()
    graph.output(y=graph.add(fn, graph.input("a"), name="y", on="cuda:0"))
    text = str(asc.schedule(graph, asc.Machine.emulated(gpus=1)).program)
    text = "\n".join(" ".join(line.split()) for line in text.splitlines())
    assert proves(Program.parse(text), graph, None, STEPS)
    assert text.count(old) >= 1
    assert not proves(Program.parse(text.replace(old, new)), graph, None, STEPS)


def test_the_flow_of_a_graph_that_grows_grows() -> None:
    graph = asc.Graph()
    y = graph.add(fn, graph.input("x"))
    assert flow(graph).makes.tolist() == []
    graph.output(y=y)
    assert flow(graph).makes.tolist() == [y.index]
    graph.add(fn, y)
    assert flow(graph).reads.tolist() == [0, y.index]
