"""Prove that the runs of a loop cannot race with each other.

``verify`` proves one run, in which waits for earlier runs have no effect. This module unrolls the
loop twice and checks that conflicting accesses of the two runs are ordered: those to the memory of
inputs and constants that tasks write, and the use of state that tasks share. All other memory
belongs to one run. The number of runs in flight does not matter: that a run begins after an earlier
one has ended only adds order, and never between a run and the next.

Two runs suffice for any number of runs:

* What is ordered between the first two runs is ordered between any run and the next. For streams
  and waits order these in the same way, and waits that have no effect in the first run only add to
  that. No wait for more than one run ago orders anything between the first two, or may be relied
  on, since these alone can already be in flight together.
* What is ordered between each run and the next is ordered between all runs. Let ``a`` and ``b``
  conflict. One writes, so it conflicts with its own repetitions, too. If ``a`` does, ``a`` of a run
  happens before ``a`` of the next, and so on, up to the run before that of ``b``; likewise for
  ``b``. Tasks that share state are ordered within each run: it suffices that the last of a run
  happens before the first of the next.

A program that spans several ranks is no loop: they execute one run at a time.

The requirements come from the graph and the accesses that ``verify`` found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, starmap
from typing import NamedTuple, NoReturn

import numpy as np

from autosched._lib.allowed import is_whole
from autosched.errors import ProgramError
from autosched.graph.graph import Graph
from autosched.graph.regions import Region
from autosched.program.clocks import ordered
from autosched.program.program import Copy, Program, Record, Run, Wait, excerpt
from autosched.verification.conflicts import Conflicts


class Access(NamedTuple):
    """An access to a region of memory by the instruction at a position."""

    at: int
    region: Region
    writes: bool


class _Need(NamedTuple):
    """An instruction that must follow one of the run before, since both use something."""

    at: int
    before: int
    shared: str


def check_waits(program: Program) -> None:
    """Raise ProgramError for waits of earlier runs that are impossible, counts below 1, and ranks."""
    if not is_whole(program.in_flight) or program.in_flight < 1:
        raise ProgramError(
            f"the runs in flight must be a number, 1 or more, got {program.in_flight!r}"
        )
    if program.in_flight > 1 and program.ranks:
        raise ProgramError(
            f"several ranks execute one run at a time, and {program.in_flight} are to be in flight "
            "(law: rank)"
        )
    carried = [(k, i) for k, i in enumerate(program) if isinstance(i, Wait) and i.ago]
    records = [i for i in program if isinstance(i, Record)] if carried else []
    events = {i.event for i in records}
    for at, wait in carried:
        what = f"event e{wait.event} of an earlier run is waited for"
        if program.in_flight == 1:
            raise ProgramError(excerpt(program, at, "events", f"{what} in a single run", None))
        if not is_whole(wait.ago) or wait.ago < 0:
            what = f"{what}, but {wait.ago!r} is no number of runs"
            raise ProgramError(excerpt(program, at, "events", what, None))
        if wait.event not in events:
            raise ProgramError(excerpt(program, at, "events", f"{what} but never recorded", None))


def check_runs(program: Program, graph: Graph, memory: Mapping[str, Sequence[Access]]) -> None:
    """Raise ProgramError if conflicting accesses of different runs may happen in any order.

    ``memory`` has the accesses of one run to each input and constant, in issue order.
    """
    needs = [*_in_memory(memory), *_in_state(program, graph)]
    if not needs:
        return
    needs.sort(key=lambda need: need.at)
    before = np.array([need.before for need in needs])
    at = np.array([need.at for need in needs])
    found = ordered(program, before, at + len(program), runs=2)
    if not found.all():
        need = needs[int(found.argmin())]
        _fail(program, need.at, need.before, need.shared)


def _in_memory(memory: Mapping[str, Sequence[Access]]) -> Iterator[_Need]:
    """Yield the accesses that conflict with some of the run before, which they must follow."""
    for name, accesses in memory.items():
        if not any(access.writes for access in accesses):
            continue
        unrolled = Conflicts()
        for repetition in range(2):
            for number, access in enumerate(accesses):
                who = number + repetition * len(accesses)
                if access.writes:
                    conflicts = [*chain(*unrolled.write(access.region, who))]
                else:
                    conflicts = unrolled.read(access.region, who)
                earlier = [accesses[k] for k in conflicts if k < len(accesses)]
                for before in earlier if repetition else ():
                    shared = f"the memory of {name!r}"
                    yield _Need(access.at, before.at, shared)


def _in_state(program: Program, graph: Graph) -> Iterator[_Need]:
    """Yield the first task of a run that uses each item of shared state, and the last one."""
    ran = {run.task: at for at, run in enumerate(program) if isinstance(run, Run)}
    span: dict[int, tuple[int, int, str]] = {}
    for task in graph.tasks:
        at = ran[task.name]
        for item in task.shared:
            first, last, _ = span.get(id(item), (at, at, ""))
            kind = type(item).__name__.lstrip("_")
            span[id(item)] = min(first, at), max(last, at), f"the state of the same {kind}"
    yield from starmap(_Need, dict.fromkeys(span.values()))


def _fail(program: Program, at: int, before: int, shared: str) -> NoReturn:
    later, earlier = in_words(program, at), in_words(program, before)
    what = (
        f"{later} must follow {earlier} of the run before, which is not waited for: both use "
        f"{shared}"
    )
    raise ProgramError(excerpt(program, at, "order", what, before))


def in_words(program: Program, at: int) -> str:
    """Return in words the task or the copy that accesses memory at a position."""
    instruction = program.instructions[at]
    if isinstance(instruction, Run):
        return f"task {instruction.task!r}"
    assert isinstance(instruction, Copy)
    return f"the copy of {instruction.value!r} to {instruction.destination}"
