"""The tests of the tests: what verify refuses does go wrong, and what orders it claims are there.

A happens-before relation by brute force stands beside the vector clocks, and programs with a wait
left out are run in all their interleavings: one gives a wrong result, or there is a reason why none
does.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched._lib.tree import transform
from autosched.graph.graph import Task, Value
from autosched.program.clocks import ordered
from autosched.program.program import (
    Copy,
    Free,
    Instruction,
    Program,
    Record,
    Run,
    Stream,
    Wait,
    occupied,
)
from autosched.testing import contrary
from autosched.testing.checking import Setting, attempt
from autosched.testing.comparing import bits
from autosched.verification.verify import verify
from tests.interleavings import explore, races
from tests.strategies import graphs, inputs_for, machines

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)


def happens_before(program: Program) -> set[tuple[int, int]]:
    """All pairs (a, b) of positions where a surely ends before b begins, by closing the obvious ones: O(n^3)."""
    pairs = set()
    for b, later in enumerate(program.instructions):
        for a in range(b):
            earlier = program.instructions[a]
            same_stream = set(occupied(earlier)) & set(occupied(later))
            event = (
                isinstance(earlier, Record)
                and isinstance(later, Wait)
                and earlier.event == later.event
            )
            if same_stream or event:
                pairs.add((a, b))
    for middle in range(len(program)):
        before = [a for a, b in pairs if b == middle]
        after = [b for a, b in pairs if a == middle]
        pairs |= {(a, b) for a in before for b in after}
    return pairs


@given(graph=graphs(most=8), machine=machines())
def test_vector_clocks_know_exactly_what_happens_before_what(
    graph: asc.Graph, machine: asc.Machine
) -> None:
    assert_clocks_know(asc.schedule(graph, machine, policy="round_robin", costs=COSTS).program)


@st.composite
def thrown_together(draw: st.DrawFn) -> Program:
    """Runs, copies on one or two streams, records and waits in any order, as no schedule would have them."""
    streams = [Stream("cuda:0", name) for name in "abcd"]
    instructions: list[Instruction] = []
    for i in range(draw(st.integers(8, 20))):
        one, other = draw(st.permutations(streams))[:2]
        recorded = [item.event for item in instructions if isinstance(item, Record)]
        kinds: list[Instruction] = [
            Run(one, f"t{i}"),
            Copy(one, f"t{i}", 0, "cuda:0", "cuda:1", other),
        ]
        kinds += [Copy(one, f"t{i}", 0, "cuda:0", "cuda:1"), Record(one, len(recorded))] + [
            Wait(one, event) for event in recorded
        ]
        instructions.append(draw(st.sampled_from(kinds)))
    return Program(tuple(instructions))


@given(program=thrown_together())
def test_vector_clocks_know_what_happens_before_what_in_any_list(program: Program) -> None:
    assert_clocks_know(program)


def test_clocks_know_who_waited_before_a_copy_alone_and_who_waited_behind_it() -> None:
    program = Program.parse(
        """
        cpu/copy-0  copy x -> cuda:0
        cpu/copy-0  record e0
        cuda:0/a    run t
        cuda:0/a    record e1
        cuda:0/a    wait e0
        cuda:0/a    record e2
        cuda:0/b    wait e1
        cuda:0/b    run behind_t_alone
        cuda:0/c    wait e2
        cuda:0/c    run behind_both
        """
    )
    assert_clocks_know(program)


def assert_clocks_know(program: Program) -> None:
    expected = happens_before(program)
    lines = program.instructions
    work = [a for a, line in enumerate(lines) if isinstance(line, (Run, Copy))]
    pairs = [(a, b) for b in range(len(lines)) for a in work if a < b]
    before, at = np.array(pairs, np.int64).reshape(-1, 2).T
    found = ordered(program, before, at).tolist()
    assert found == [pair in expected for pair in pairs]


def corpus(n: int, views: bool):
    """Programs with a wait left out, each with its graph and machine: the same always."""
    source = random.Random(5)
    found: list[tuple[Program, asc.Graph, asc.Machine]] = []

    @settings(max_examples=3 * n, derandomize=True, database=None)
    @given(graph=graphs(views=views), machine=machines(most_streams=2))
    def collect(graph: asc.Graph, machine: asc.Machine) -> None:
        program = asc.schedule(graph, machine, policy="round_robin", costs=COSTS).program
        waits = [
            i for i, instruction in enumerate(program.instructions) if isinstance(instruction, Wait)
        ]
        if waits and len(found) < n:
            left_out = source.choice(waits)
            kept = program.instructions[:left_out] + program.instructions[left_out + 1 :]
            found.append((replace(program, instructions=kept), graph, machine))

    collect()
    return found


def verdict(program: Program, graph: asc.Graph, machine: asc.Machine, refusal: str) -> str:
    """What is the harm in a refused program, by all of its interleavings. If there is none in any, why that is.

    ``wrong``: some result differs, or there is none. ``unused``: a task sees other bytes, but no result depends on it.
    ``asked``: the user asked for an order that no bytes need. ``apart``: what races has no bytes in common.
    """
    setting = Setting(graph, inputs_for(graph), 3)
    expected: dict[str, Hashable] = {}
    results = setting.run(lambda inputs: watched(graph, expected).run_serial(**inputs))
    seen: dict[str, Hashable] = {}
    spied, unused = watched(graph, seen), False
    for run in explore(program, spied, machine, examples=setting.examples, seed=3):
        if run.error is not None or bits(dict(run.left)) != bits(results):
            return "wrong"
        unused = unused or seen != expected
        seen.clear()
    if unused:
        return "unused"
    if "after which" in refusal:
        return "asked"
    return (
        "apart"
        if not any(meet(program, graph, *pair) for pair in races(program, graph))
        else "unexplained"
    )


def watched(graph: asc.Graph, seen: dict[str, Hashable]) -> asc.Graph:
    """A copy of a graph whose tasks note what they are given, and what they return and leave behind."""

    def spy(task: Task) -> Task:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = bits((args, kwargs))
            result = task.fn(*args, **kwargs)
            seen[task.name] = given, bits((args, kwargs, result))
            return result

        return replace(task, fn=call)

    twin = graph.snapshot()
    twin.tasks[:] = map(spy, graph.tasks)
    return twin


def meet(program: Program, graph: asc.Graph, a: int, b: int) -> bool:
    """Whether two instructions touch a number that one of them changes, where the serial run has its values."""
    data = graph.bind(inputs_for(graph))
    for task in graph.tasks:
        args, kwargs = transform(
            lambda x: data[x.index] if isinstance(x, Value) else x, (task.args, task.kwargs)
        )
        data.update(task.results(task.fn(*args, **kwargs)))

    def touched(at: int) -> tuple[set[int], set[int]]:
        match program.instructions[at]:
            case Run(_, name):
                task = graph.task(name)
                uses, changes = (*task.reads, *task.outputs), [*task.writes, *task.outputs]
                return numbers(data, [use.value for use in uses]), numbers(
                    data, [use.value for use in changes]
                )
            case Copy(_, name, overwrite=overwrite):
                value = graph.value(name).index
                return numbers(data, [value]), numbers(data, [value] if overwrite else [])
            case Free(_, name):
                freed = numbers(data, graph.members(graph.value(name).index))
                return freed, freed
        return set(), set()

    (used_a, changed_a), (used_b, changed_b) = touched(a), touched(b)
    return bool(changed_a & used_b or changed_b & used_a)


def numbers(data: dict[int, torch.Tensor], values: Iterable[int]) -> set[int]:
    """The addresses of the numbers that tensors hold."""
    found: set[int] = set()
    for tensor in [data[value] for value in values]:
        storage = tensor.untyped_storage()
        offsets = torch.arange(storage.nbytes() // tensor.itemsize).as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        found |= {
            storage.data_ptr() + tensor.itemsize * offset for offset in offsets.flatten().tolist()
        }
    return found


@pytest.mark.parametrize("views", [False, True])
def test_every_wait_left_out_gives_a_wrong_result_in_some_interleaving_or_has_a_reason_not_to(
    views: bool,
) -> None:
    verdicts: list[str] = []
    for program, graph, machine in corpus(24, views):
        with pytest.raises(asc.ProgramError) as refusal:
            verify(program, graph)
        verdicts.append(verdict(program, graph, machine, str(refusal.value)))
        assert verdicts[-1] != "unexplained", f"{refusal.value}\n{graph}\n{program}"
        assert (
            views or verdicts[-1] != "apart"
        )  # without views nothing is refused for what two tasks do not share
    assert len(verdicts) == 24
    assert verdicts.count("wrong") >= 19, verdicts


@given(graph=graphs(), machine=machines(), seed=st.integers(0, 1000))
def test_what_verify_accepts_is_right_in_the_most_contrary_interleavings(
    graph: asc.Graph, machine: asc.Machine, seed: int
) -> None:
    program = asc.schedule(graph, machine, policy="round_robin", costs=COSTS).program
    setting = Setting(graph, inputs_for(graph), 3)
    expected = bits(setting.run(lambda inputs: graph.run_serial(**inputs)))
    for number in range(seed, seed + 3):
        left, error = attempt(setting, program, graph, machine, contrary(number))
        assert error is None
        assert bits(left) == expected
