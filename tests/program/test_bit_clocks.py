"""Bit clocks know exactly what of one run happens before what of the next."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from autosched.program.bit_clocks import BitClocks
from autosched.program.program import Copy, Program, Run, Wait
from tests.laws.test_teeth import thrown_together
from tests.reference import happens_before_of_runs


@given(program=thrown_together(), seed=st.integers(0, 999))
def test_bit_clocks_know_what_happens_before_what_of_the_next_run(
    program: Program, seed: int
) -> None:
    source = random.Random(seed)
    lines = list(program.instructions)
    for wait in [line for line in lines if isinstance(line, Wait)]:
        moved = replace(wait, ago=source.randrange(1, 3))
        lines.insert(source.randrange(len(lines)), moved)
    loop = Program(tuple(lines), in_flight=2)
    expected = happens_before_of_runs(loop, 2)
    work = [at for at, line in enumerate(lines) if isinstance(line, (Run, Copy))]
    mark = {at: 1 << at for at in work}
    clocks = BitClocks()
    for at, line in enumerate(lines):
        clocks.issue(line, mark.get(at, 0))
    clocks.begin_run()
    for at, line in enumerate(lines):
        known = clocks.before(line)
        after = clocks.issue(line)
        for k in work:
            happens = bool(expected[len(lines) + at] >> k & 1)
            assert bool(after & mark[k]) == happens
            if at in work:
                assert bool(known & mark[k]) == happens
