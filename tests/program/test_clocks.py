"""Clocks know exactly what of one run happens before what of the next."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autosched._lib.jit import Mode
from autosched.program.clocks import ordered
from autosched.program.program import Copy, Program, Run, Wait
from tests.laws.test_teeth import thrown_together
from tests.reference import happens_before_of_runs


@given(program=thrown_together(), seed=st.integers(0, 999), fast=st.booleans())
def test_clocks_know_what_happens_before_what_of_the_next_run(
    program: Program, seed: int, fast: bool
) -> None:
    source = random.Random(seed)
    lines = list(program.instructions)
    for wait in [line for line in lines if isinstance(line, Wait)]:
        moved = replace(wait, ago=source.randrange(1, 3))
        lines.insert(source.randrange(len(lines)), moved)
    loop = Program(tuple(lines), in_flight=2)
    expected = happens_before_of_runs(loop, 2)
    work = [at for at, line in enumerate(lines) if isinstance(line, (Run, Copy))]
    asked = [at for at in work if source.random() < 0.7]
    count = len(lines)
    pairs = [(k, b) for b in range(2 * count) for k in asked if k < b]
    before, at = np.array(pairs, np.int64).reshape(-1, 2).T
    found = ordered(loop, before, at, runs=2, how=Mode(fast)).tolist()
    assert found == [bool(expected[b] >> k & 1) for k, b in pairs]
