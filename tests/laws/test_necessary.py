"""``verify`` against the reference: on what lowering makes and on all that is nearly that, the two agree.

All that the addresses of bytes rule out, ``verify`` must refuse. And it may only refuse what the regions of the graph
rule out: it knows no shapes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.program.program import Instruction, Program, occupied
from autosched.verification.verify import verify
from tests.reference import Reference, RefusedError
from tests.sample_policies import policies
from tests.strategies import graphs, machines

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)


def refusal(program: Program, graph: asc.Graph) -> str | None:
    try:
        verify(program, graph)
    except asc.ProgramError as error:
        return str(error)
    return None


def reference_refusal(program: Program, graph: asc.Graph, cautious: bool = False) -> str | None:
    try:
        Reference(program, graph, cautious)
    except RefusedError as error:
        return str(error)
    return None


def agree(program: Program, graph: asc.Graph, what: str) -> bool:
    """Whether both accept a program; fail if only one does, and the regions do not tell why."""
    found, expected = refusal(program, graph), reference_refusal(program, graph)
    if found is not None and expected is None:
        expected = reference_refusal(program, graph, cautious=True)
    assert (found is None) == (expected is None), (
        f"{what}\nverify: {found}\nreference: {expected}\n{graph}\n\n{program}\n"
        + "\n".join(
            f"{t.name}: {t.dependencies} changes {t.changes} region {t.region}" for t in graph.tasks
        )
    )
    return found is None


def mutants(program: Program, source: random.Random) -> Iterator[tuple[str, Program]]:
    """All programs that differ by one instruction left out, swapped with the next, or on another stream."""
    lines = program.instructions

    def changed(what: str, *instructions: Instruction) -> tuple[str, Program]:
        return what, replace(program, instructions=tuple(instructions))

    for i, line in enumerate(lines):
        yield changed(f"without line {i}: {line}", *lines[:i], *lines[i + 1 :])
        if i:
            yield changed(
                f"line {i} one earlier: {line}",
                *lines[: i - 1],
                line,
                lines[i - 1],
                *lines[i + 1 :],
            )
        j = source.randrange(len(lines))
        rest = [*lines[:i], *lines[i + 1 :]]
        yield changed(f"line {i} moved to {j}: {line}", *rest[:j], line, *rest[j:])
        streams = [s for s in program.streams if s not in occupied(line)]
        if streams:
            yield changed(
                f"line {i} elsewhere: {line}",
                *lines[:i],
                replace(line, stream=source.choice(streams)),
                *lines[i + 1 :],
            )


def counts(graph: asc.Graph, program: Program, seed: int) -> tuple[int, int]:
    """Return how many mutants there are, and how many both accept."""
    made = [agree(mutant, graph, what) for what, mutant in mutants(program, random.Random(seed))]
    return len(made), sum(made)


@settings(max_examples=2 * settings().max_examples)  # each of them some 80 programs
@given(policy=policies, graph=graphs(most=10), machine=machines(), seed=st.integers(0, 999))
def test_verify_refuses_exactly_what_the_reference_refuses(
    policy: str, graph: asc.Graph, machine: asc.Machine, seed: int
) -> None:
    program = asc.schedule(graph, machine, policy=policy, costs=COSTS).program
    assert agree(program, graph, "as lowered")
    counts(graph, program, seed)


def test_the_mutants_are_of_both_kinds() -> None:
    """A test of the tests: some changes do no harm, most do."""
    found: list[tuple[int, int]] = []

    @given(graph=graphs(most=10), machine=machines(), seed=st.integers(0, 999))
    def collect(graph: asc.Graph, machine: asc.Machine, seed: int) -> None:
        found.append(
            counts(graph, asc.schedule(graph, machine, policy="heft", costs=COSTS).program, seed)
        )

    collect()
    tried, accepted = (sum(column) for column in zip(*found, strict=True))
    assert 0.02 * tried < accepted < 0.7 * tried
