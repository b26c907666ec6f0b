"""Enumerate the interleavings of a program up to equivalence, or sample them.

Two interleavings are equivalent if they have the same order between any two conflicting
instructions, that is, any two that access the same thing, one of them changing it; equivalent
interleavings end alike. Dynamic partial-order reduction (Flanagan & Godefroid, POPL 2005) visits
one of each class, and finds conflicts while it runs, because threads branch. The threads of a
program here do not branch: its conflicts are known before it runs. So a class is a choice of
direction for each conflict that no event orders, such that there is no cycle, and each class is
visited exactly once. A program without races has one class.

Knows programs and what instructions access; runs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, cycle
from typing import NamedTuple

from autosched.graph.graph import Graph
from autosched.graph.regions import Region
from autosched.program.program import Copy, Program, Record, Run, Stream, Wait, occupied
from autosched.runtime.memory import Memory
from autosched.runtime.threads.interleaver import Choose

__all__ = ["Footprint", "contrary", "following", "footprints", "interleavings", "races", "uniform"]

_Thing = tuple[str, object]  # a slot, state that tasks share, an order that was asked for


def interleavings(program: Program, graph: Graph) -> Iterator[tuple[str, ...]]:
    r"""Yield one interleaving of each class: the names of the streams that continue, one after another.

    Run one with ``Virtual(following(it))``. A program without races has a single class; with races
    there may be very many, so take some (``itertools.islice``). The first is equivalent to the
    order of issue. Raises KeyError for a program that reads a value which was never put there.

    >>> graph = Graph()
    >>> _ = graph.input("x").add_(1).mul_(10)
    >>> program = Program.parse("input x on cpu\n cpu/a run add\n cpu/b run mul")  # with no wait between them
    >>> list(interleavings(program, graph))
    [('cpu/a', 'cpu/b'), ('cpu/b', 'cpu/a')]
    """
    for before in _classes(_ordered(program), races(program, graph)):
        # Sort by the number of predecessors: a linear order that extends the partial one.
        order = sorted(range(len(program)), key=lambda at: before[at].bit_count())
        yield tuple(name for at in order for name in _steps(program, at))


def races(program: Program, graph: Graph) -> list[tuple[int, int]]:
    """Return the pairs of positions that access the same thing, one changing it, and that no event orders."""
    before = _ordered(program)
    touched = footprints(program, graph)
    pairs = combinations(range(len(program)), 2)
    return [(a, b) for a, b in pairs if not before[b] >> a & 1 and touched[a].conflicts(touched[b])]


class _Bytes(NamedTuple):
    """A part of the memory of some slots."""

    block: int
    part: Region
    written: bool

    def meets(self, other: _Bytes) -> bool:
        return (
            self.block == other.block
            and (self.written or other.written)
            and self.part.overlaps(other.part)
        )


class Footprint(NamedTuple):
    """The things that an instruction reads and writes, and the parts of memory."""

    read: frozenset[_Thing]
    changed: frozenset[_Thing]
    memory: tuple[_Bytes, ...]

    def conflicts(self, other: Footprint) -> bool:
        """Whether the order of the two matters."""
        if self.changed & (other.read | other.changed) or other.changed & self.read:
            return True
        return any(a.meets(b) for a in self.memory for b in other.memory)


def footprints(program: Program, graph: Graph) -> list[Footprint]:
    """Return what each instruction accesses: slots, their memory, and state that tasks share."""
    memory = Memory(program, graph, lambda device: None)
    found = []
    for i, instruction in enumerate(program):
        reads = memory.reads.get(i, [])
        freed = memory.freed.get(i, [])
        made = [slot for slot in memory.made.get(i, []) if slot is not None]
        touched = list[_Bytes]()
        shared = set[_Thing]()
        if isinstance(instruction, Run):
            task = graph.task(instruction.task)
            for use, slot in zip(task.reads, reads, strict=True):
                part = graph.touched(task, use.value) or graph.values[use.value].region
                touched.append(_Bytes(memory.sharing[slot][0], part, use in task.writes))
            shared = {("state", id(item)) for item in task.shared}
            shared |= {
                ("order", (d.task, task.index)) for d in task.dependencies if d.kind == "order"
            }
            shared |= {("order", (task.index, user)) for user in graph.users[task.index]}
        elif isinstance(instruction, Copy):
            touched.append(
                _Bytes(memory.sharing[reads[0]][0], graph.value(instruction.value).region, False)
            )
            touched += [
                _Bytes(memory.sharing[slot][0], Region(), True)
                for slot in made
                if instruction.overwrite
            ]
        read = frozenset(("slot", slot) for slot in reads)
        changed = frozenset({("slot", slot) for slot in (*made, *freed)} | shared)
        found.append(Footprint(read, changed, tuple(touched)))
    return found


def following(choices: Sequence[str]) -> Choose:
    """Return a choice of streams that follows a list, run after run: used to run one of ``interleavings``."""
    turn = cycle(choices)
    return lambda ready: next(turn)


def contrary(seed: int) -> Choose:
    """Return a choice that favours some streams over others, so that unordered instructions are far apart."""
    source = random.Random(seed)
    rank: dict[str, float] = {}
    return lambda ready: max(ready, key=lambda name: rank.setdefault(name, source.random()))


def uniform(seed: int) -> Choose:
    """Return a choice that takes any stream that can continue."""
    return random.Random(seed).choice


def _ordered(program: Program) -> list[int]:
    """Return, for each position, its predecessors by streams and events, as the bits of a number."""
    before: list[int] = []
    behind: dict[Stream, int] = {}  # by stream, the predecessors of its next instruction
    events: dict[int, int] = {}
    for i, instruction in enumerate(program):
        streams = occupied(instruction)
        mask = events.get(instruction.event, 0) if isinstance(instruction, Wait) else 0
        for stream in streams:
            mask |= behind.get(stream, 0)
        before.append(mask)
        behind.update(dict.fromkeys(streams, mask | 1 << i))
        if isinstance(instruction, Record):
            events[instruction.event] = mask | 1 << i
    return before


def _classes(before: list[int], pairs: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield each order that extends ``before`` and orders the two of every pair."""
    for k, (a, b) in enumerate(pairs):
        if not before[b] >> a & 1 and not before[a] >> b & 1:
            yield from _classes(_joined(before, a, b), pairs[k + 1 :])
            yield from _classes(_joined(before, b, a), pairs[k + 1 :])
            return
    yield before


def _joined(before: list[int], a: int, b: int) -> list[int]:
    """Return the order with ``a`` before ``b``, transitively closed."""
    new = before[a] | 1 << a
    return [mask | new if at == b or mask >> b & 1 else mask for at, mask in enumerate(before)]


def _steps(program: Program, at: int) -> list[str]:
    """Return the streams of an instruction: a copy on two streams first synchronizes with the second."""
    own, *others = [str(stream) for stream in occupied(program.instructions[at])]
    return [*others, own, *others]
