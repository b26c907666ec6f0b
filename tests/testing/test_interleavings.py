"""All interleavings of small programs: one of each class is enough, and none is forgotten.

Brute force stands beside: it drives the same backend through every choice there is, and knows no
conflicts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import islice

from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.program.program import Instruction, Program, Record, Run, Stream, Wait
from autosched.testing.checking import Reference, Setting, attempt
from autosched.testing.comparing import bits
from tests.interleavings import explore, races
from tests.strategies import graphs, inputs_for, machines

TWO = ("cpu", "cuda:0")
CPU = asc.Machine([asc.Device("cpu", streams=4)], imagined=True)
MOST = 100  # interleavings that brute force tries


def of(left: dict[str, object], error: Exception | None) -> Hashable:
    """What a run comes to: the bits of all that it leaves, or an error (which one is a matter of who is faster)."""
    return "an error" if error is not None else bits(left)


def explored(program: Program, graph: asc.Graph, machine: asc.Machine) -> list[Hashable]:
    runs = explore(program, graph, machine, examples=inputs_for(graph))
    return [of(dict(run.left), run.error) for run in runs]


def by_brute_force(program: Program, graph: asc.Graph, machine: asc.Machine) -> Iterator[Hashable]:
    """Run in every order of choices there is, the last one changed first."""
    setting = Setting(graph, inputs_for(graph), 0)
    path: list[int] = []  # of each choice, which was taken
    while True:
        ready_counts: list[int] = []

        def choose(ready: list[str], ready_counts: list[int] = ready_counts) -> str:
            if len(ready_counts) == len(path):
                path.append(0)
            ready_counts.append(len(ready))
            return ready[path[len(ready_counts) - 1]]

        yield of(*attempt(setting, program, graph, machine, choose))
        del path[len(ready_counts) :]
        while path and path[-1] + 1 == ready_counts[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1


def without(program: Program, *positions: int) -> Program:
    kept = tuple(item for i, item in enumerate(program.instructions) if i not in positions)
    return replace(program, instructions=kept)


# ---- laws


@given(graph=graphs(), machine=machines())
def test_a_program_that_cannot_race_has_one_class_and_it_ends_like_the_serial_run(
    graph: asc.Graph, machine: asc.Machine
) -> None:
    for policy in ("round_robin", "heft"):
        program = asc.schedule(graph, machine, policy=policy).program
        reference = Reference(Setting(graph, inputs_for(graph), 0))
        assert races(program, graph) == []
        assert explored(program, graph, machine) == [bits(reference.results)]


@settings(max_examples=settings().max_examples // 3)  # each tries up to MOST interleavings
@given(graph=graphs(TWO, most=3), machine=machines(TWO, most_streams=2), data=st.data())
def test_one_interleaving_of_each_class_gives_every_result_that_all_of_them_give(
    graph: asc.Graph, machine: asc.Machine, data: st.DataObject
) -> None:
    program = asc.schedule(graph, machine, policy="round_robin").program
    waits = [i for i, instruction in enumerate(program) if isinstance(instruction, Wait)]
    left_out = data.draw(st.lists(st.sampled_from(waits), min_size=1, max_size=3)) if waits else []
    racy = without(program, *left_out)
    everything = list(islice(by_brute_force(racy, graph, machine), MOST + 1))
    assume(len(everything) <= MOST)
    classes = explored(racy, graph, machine)
    assert set(classes) == set(everything)
    assert len(classes) <= len(everything)


@st.composite
def thrown_together(draw: st.DrawFn) -> tuple[Program, asc.Graph]:
    """Tasks on one device, on any of three streams, with some of the waits that they need."""
    graph = draw(graphs(("cpu",), most=4, views=draw(st.booleans())))
    instructions: list[Instruction] = []
    for task in graph.tasks:
        stream = Stream("cpu", draw(st.sampled_from("abc")))
        recorded = [item.event for item in instructions if isinstance(item, Record)]
        if recorded and draw(st.booleans()):
            instructions.append(Wait(stream, draw(st.sampled_from(recorded))))
        instructions.append(Run(stream, task.name))
        if draw(st.booleans()):
            instructions.append(Record(stream, len(recorded)))
    inputs = tuple((name, "cpu") for name in graph.input_names)
    return Program(
        tuple(instructions), inputs, tuple((label, "cpu") for label in graph.outputs)
    ), graph


@given(drawn=thrown_together())
def test_interleavings_are_complete_where_tasks_race_for_memory(
    drawn: tuple[Program, asc.Graph],
) -> None:
    program, graph = drawn
    everything = list(islice(by_brute_force(program, graph, CPU), MOST + 1))
    assume(len(everything) <= MOST)
    assert set(explored(program, graph, CPU)) == set(everything)
