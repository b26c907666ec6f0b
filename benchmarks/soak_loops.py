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
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from _report import options, publish, table
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.policies import POLICIES
from autosched.program.program import Run, Wait
from autosched.testing import graphs, machines

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.laws.test_loops import (
    carried,
    changed,
    check_interleaving,
    is_accepted,
    looped,
    reference_accepts,
)

EXAMPLES = 250  # under one seed
INTERLEAVINGS = 3
MOST_IN_FLIGHT = 4


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


def soak(number: int, examples: int) -> Counter[str]:
    """Check so many graphs with a seed; return the number of checks of each name."""
    torch.set_num_threads(1)
    done: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(
        graph=graphs(state=True),
        machine=machines(),
        policy=st.sampled_from(["auto", *POLICIES]),
        in_flight=st.integers(1, MOST_IN_FLIGHT),
        number=st.integers(0, 999),
    )
    def test(
        graph: asc.Graph, machine: asc.Machine, policy: str, in_flight: int, number: int
    ) -> None:
        done.update(attack(graph, machine, policy, in_flight, number))

    test()
    return done


def main() -> None:
    chosen = options(__doc__)
    batches, processes = (2, 2) if chosen.quick else (40, 2)
    examples = 25 if chosen.quick else EXAMPLES
    start, done = time.perf_counter(), Counter[str]()
    with ProcessPoolExecutor(processes) as pool:
        for number, found in enumerate(pool.map(soak, range(batches), [examples] * batches)):
            done += found
            if not chosen.quick:
                shown = f"{number + 1} of {batches}: {done['graphs']:,} graphs"
                print(shown, file=sys.stderr, flush=True)
    minutes = (time.perf_counter() - start) / 60
    summary = (
        f"Failures: 0, in {minutes:.0f} minutes of {processes} processes; seeds 0 to {batches - 1}."
    )
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
