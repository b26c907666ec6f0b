"""What stress tests have in common: random examples under many seeds, in several processes."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

EXAMPLES = 250  # under one seed
PROCESSES = 2


def drawn(
    number: int, examples: int, check: Callable[[st.DataObject, int], Iterable[str]]
) -> Counter[str]:
    """Check so many examples with a seed; return the number of checks of each name."""
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
    @given(data=st.data())
    def test(data: st.DataObject) -> None:
        done.update(check(data, number))

    test()
    return done


def under_all_seeds(
    soak: Callable[[int, int], Counter[str]], quick: bool, counted: str
) -> tuple[Counter[str], str]:
    """Call ``soak`` with seeds and numbers of examples; return all checks, and a summary."""
    batches = 2 if quick else 40
    examples = 25 if quick else EXAMPLES
    start, done = time.perf_counter(), Counter[str]()
    with ProcessPoolExecutor(PROCESSES) as pool:
        for number, found in enumerate(pool.map(soak, range(batches), [examples] * batches)):
            done += found
            if not quick:
                shown = f"{number + 1} of {batches}: {done[counted]:,} {counted}"
                print(shown, file=sys.stderr, flush=True)
    minutes = (time.perf_counter() - start) / 60
    took = f"in {minutes:.0f} minutes of {PROCESSES} processes"
    return done, f"Failures: 0, {took}; seeds 0 to {batches - 1}."
