"""Stress test: random graphs, machines, policies and interleavings, compared with serial runs.

Graphs have in-place writes, views, slices that overlap or do not, random numbers, constraints and
orders; machines have 1 to 8 devices. Each program must be proved, by ``verify`` and by the brute
force that it is tested against; have the same results, bit for bit, in every interleaving; and be
rejected without any one wait, copy, record or free. A failing example is shrunk and printed, with
its seed. Ends with code 1 if there is one.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from _report import options, publish, table
from _soaking import drawn, under_all_seeds
from hypothesis import strategies as st

import autosched as asc
from autosched.policies import POLICIES
from autosched.program.program import Copy, Free, Program, Record, Run, Wait
from autosched.testing import contrary, scattered, uniform
from autosched.testing.checking import Reference, Setting, attempt
from autosched.testing.comparing import bits
from tests.strategies import graphs, inputs_for, machines

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.reference import Reference as BruteForce
from tests.reference import RefusedError

DEVICES = ("cpu", *(f"cuda:{i}" for i in range(7)))
COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
POLICIES_TRIED = ["auto", *POLICIES, scattered(0), scattered(1)]
INTERLEAVINGS = 4


def attack(graph: asc.Graph, machine: asc.Machine, number: int) -> Iterator[str]:
    """Check the schedules of a graph; yield the name of each check."""
    reference = Reference(Setting(graph, inputs_for(graph), number))
    expected = bits(reference.results)
    programs = {
        asc.schedule(graph, machine, policy=policy, costs=COSTS).program
        for policy in POLICIES_TRIED
    }
    yield "graphs"
    yield from what_is_in(graph)
    for k, program in enumerate(sorted(programs, key=str)):
        yield "programs"
        asc.verify(program, graph, machine)
        try:
            BruteForce(program, graph)
        except RefusedError as refusal:
            raise AssertionError(
                f"accepted by verify alone ({refusal}):\n{graph}\n\n{program}"
            ) from None
        for choose in (None, contrary(number), contrary(number + 1), uniform(number))[
            :INTERLEAVINGS
        ]:
            left, error = attempt(reference.setting, program, graph, machine, choose)
            if error is not None:
                raise error
            assert bits(left) == expected, f"{graph}\n{program}"
            yield "interleavings"
        for item in program:
            yield type(item).__name__
        yield from refusals(program, graph, random.Random(number + k))


def what_is_in(graph: asc.Graph) -> Iterator[str]:
    for task in graph.tasks:
        yield "tasks"
        if task.writes:
            yield "writes in place"
        if any(graph.values[use.value].root != use.value for use in task.outputs):
            yield "views"
        if task.random:
            yield "random tasks"


def refusals(program: Program, graph: asc.Graph, source: random.Random) -> Iterator[str]:
    """Remove an instruction: the program must be rejected."""
    i = source.randrange(len(program)) if len(program) else None
    if i is None or not isinstance(program.instructions[i], (Wait, Copy, Record, Free, Run)):
        return
    rest = program.instructions[:i] + program.instructions[i + 1 :]
    try:
        asc.verify(replace(program, instructions=rest), graph)
    except asc.ProgramError:
        yield "refusals"
        return
    raise AssertionError(
        f"accepted without line {i}, {program.instructions[i]}:\n{graph}\n{program}"
    )


def check(data: st.DataObject, number: int) -> Iterator[str]:
    """Check the schedules of a drawn graph; yield the name of each check."""
    devices = DEVICES[: data.draw(st.integers(1, len(DEVICES)))]
    yield from attack(data.draw(graphs(devices)), data.draw(machines(devices)), number)
    yield f"on {len(devices)}"


def soak(number: int, examples: int) -> Counter[str]:
    """Check so many graphs with a seed; return the number of checks of each name."""
    return drawn(number, examples, check)


def main() -> None:
    chosen = options(__doc__)
    done, summary = under_all_seeds(soak, chosen.quick, "programs")
    shown = [
        "graphs",
        "tasks",
        "writes in place",
        "views",
        "random tasks",
        "programs",
        "interleavings",
        "refusals",
    ]
    rows = [[what, f"{done[what]:,}"] for what in shown]
    rows += [
        [f"{kind.__name__.lower()} instructions", f"{done[kind.__name__]:,}"]
        for kind in (Run, Copy, Wait, Free)
    ]
    rows += [
        [f"graphs on {k} device{'s' * (k > 1)}", f"{done[f'on {k}']:,}"]
        for k in range(1, len(DEVICES) + 1)
    ]
    publish(
        "soak",
        "Soak",
        [(__doc__ or "").strip(), table(["", "tried"], rows), summary],
        chosen,
        ("torch", "hypothesis"),
    )


if __name__ == "__main__":
    main()
