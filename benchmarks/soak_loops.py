"""Stress test of runs in flight: random loops and interleavings, compared with serial runs.

Graphs have in-place writes of inputs and constants, views, slices that overlap or do not, random
numbers, constraints and orders; 1 to 4 runs are in flight on 1 to 4 devices. Each loop must be
proved, by ``verify`` and by the brute force that it is tested against; be rejected without any one
wait for an earlier run; and have the results of runs one after another, bit for bit, in every
interleaving. A failing example is shrunk and printed, with its seed. Ends with code 1 if there is
one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from _report import options, publish, table
from _soaking import drawn, under_all_seeds
from hypothesis import strategies as st

import autosched as asc
from autosched.policies import POLICIES
from autosched.program.program import Run, Wait
from tests.strategies import graphs, machines

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.laws.test_loops import (
    carried,
    changed,
    check_interleaving,
    is_accepted,
    looped,
    reference_accepts,
)

INTERLEAVINGS = 3
MOST_IN_FLIGHT = 4
SEEDS = st.integers(0, 999)  # of interleavings


def attack(
    graph: asc.Graph, machine: asc.Machine, policy: str, in_flight: int, number: int
) -> Iterator[str]:
    """Check the loop of a graph; yield the name of each check."""
    _, loop = looped(graph, machine, policy, in_flight)
    yield "graphs"
    yield f"{in_flight} in flight"
    for item in loop:
        if isinstance(item, Run):
            yield "tasks"
        if isinstance(item, Wait):
            yield "carried waits" if item.ago else "waits of the same run"
    asc.verify(loop, graph, machine)
    if in_flight > 1:
        assert reference_accepts(loop, graph), f"accepted by verify alone:\n{graph}\n{loop}"
        yield "loops that the brute force accepts"
    for at in carried(loop):
        wait = loop.instructions[at]
        assert not is_accepted(changed(loop, at), graph), f"without {wait}:\n{graph}\n{loop}"
        yield "carried waits that cannot be left out"
    for k in range(INTERLEAVINGS):
        check_interleaving(loop, graph, number + k)
        yield "interleavings"


def check(data: st.DataObject, number: int) -> Iterator[str]:
    """Check a drawn loop; yield the name of each check."""
    graph, machine = data.draw(graphs(state=True)), data.draw(machines())
    policy = data.draw(st.sampled_from(["auto", *POLICIES]))
    in_flight = data.draw(st.integers(1, MOST_IN_FLIGHT))
    yield from attack(graph, machine, policy, in_flight, data.draw(SEEDS))


def soak(number: int, examples: int) -> Counter[str]:
    """Check so many loops with a seed; return the number of checks of each name."""
    return drawn(number, examples, check)


def main() -> None:
    chosen = options(__doc__)
    done, summary = under_all_seeds(soak, chosen.quick, "graphs")
    rows = [[what, f"{count:,}"] for what, count in sorted(done.items())]
    publish(
        "soak_loops",
        "Soak: runs in flight",
        [(__doc__ or "").strip(), table(["", "tried"], rows), summary],
        chosen,
        ("torch", "hypothesis"),
    )


if __name__ == "__main__":
    main()
