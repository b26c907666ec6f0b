"""Enumerate the interleavings of a run of a program up to equivalence.

Two interleavings are equivalent if they have the same order between any two conflicting
instructions, that is, any two that access the same resource, one of them changing it; equivalent
interleavings have the same result. Dynamic partial-order reduction (Flanagan & Godefroid, POPL
2005) visits one of each class, and finds conflicts while it runs, because threads branch. The
streams of a program do not branch: its conflicts are known before it runs. So a class is a choice
of direction for each conflict that no event orders, such that there is no cycle, and each class is
visited exactly once. A program without races has one class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, cycle
from typing import Any, NamedTuple

from autosched.errors import AutoschedError
from autosched.graph.graph import Graph
from autosched.graph.regions import Region
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, Record, Run, Stream, Wait, occupied
from autosched.runtime.memory import Memory
from autosched.runtime.threads.interleaver import Choose
from autosched.testing.checking import Setting, attempt

_Resource = tuple[str, object]  # a slot, state that tasks share, or an order by ``after=``


def interleavings(program: Program, graph: Graph) -> Iterator[tuple[str, ...]]:
    """Yield one interleaving of each class: the streams that continue, one after another.

    Run one with ``Virtual(following(it))``. A program without races has a single class; with races
    there may be very many, so take some (``itertools.islice``). The first is equivalent to the
    order of issue. Raises KeyError for a program that reads a value that was never computed there.
    """
    for before in _classes(_ordered(program), races(program, graph)):
        # Sort by the number of predecessors: a linear order that extends the partial one.
        order = sorted(range(len(program)), key=lambda at: before[at].bit_count())
        yield tuple(name for at in order for name in _steps(program, at))


def races(program: Program, graph: Graph) -> list[tuple[int, int]]:
    """Return the pairs of positions with a conflict that no event orders."""
    before = _ordered(program)
    touched = footprints(program, graph)
    pairs = combinations(range(len(program)), 2)
    return [(a, b) for a, b in pairs if not before[b] >> a & 1 and touched[a].conflicts(touched[b])]


class _Bytes(NamedTuple):
    """A region of the memory of some slots."""

    block: int
    region: Region
    written: bool

    def conflicts(self, other: _Bytes) -> bool:
        is_written = self.written or other.written
        return self.block == other.block and is_written and self.region.overlaps(other.region)


class Footprint(NamedTuple):
    """The resources that an instruction reads and changes, and the regions of memory."""

    read: frozenset[_Resource]
    changed: frozenset[_Resource]
    memory: tuple[_Bytes, ...]

    def conflicts(self, other: Footprint) -> bool:
        """Whether the order of the two instructions matters."""
        if self.changed & (other.read | other.changed) or other.changed & self.read:
            return True
        return any(a.conflicts(b) for a in self.memory for b in other.memory)


def footprints(program: Program, graph: Graph) -> list[Footprint]:
    """Return what each instruction accesses: slots, their memory, and state that tasks share."""
    memory = Memory(program, graph)
    found = []
    for i, instruction in enumerate(program):
        reads = memory.reads.get(i, [])
        blocks = [memory.sharing[slot][0] for slot in reads]
        made = [slot for slot in memory.made.get(i, []) if slot is not None]
        touched = list[_Bytes]()
        changed: set[_Resource] = {("slot", slot) for slot in (*made, *memory.freed.get(i, []))}
        if isinstance(instruction, Run):
            task = graph.task(instruction.task)
            for use, block in zip(task.reads, blocks, strict=True):
                region = graph.touched(task, use.value) or graph.values[use.value].region
                touched.append(_Bytes(block, region, use in task.writes))
            before = ((d.task, task.index) for d in task.dependencies if d.kind == "order")
            after = ((task.index, user) for user in graph.users[task.index])
            changed |= {("order", pair) for pair in (*before, *after)}
            changed |= {("state", id(item)) for item in task.shared}
        elif isinstance(instruction, Copy):
            touched.append(_Bytes(blocks[0], graph.value(instruction.value).region, False))
            for slot in made if instruction.overwrite else ():
                touched.append(_Bytes(memory.sharing[slot][0], Region(), True))
        read = frozenset(("slot", slot) for slot in reads)
        found.append(Footprint(read, frozenset(changed), tuple(touched)))
    return found


def following(choices: Sequence[str]) -> Choose:
    """Return a choice, for the backend ``Virtual``, that repeats this list of stream names.

    It runs one of ``interleavings``.
    """
    turn = cycle(choices)
    return lambda ready: next(turn)


def _ordered(program: Program) -> list[int]:
    """Return, as a bit mask for each position, its predecessors by streams and events."""
    before: list[int] = []
    clocks: dict[Stream, int] = {}  # by stream, the predecessors of its next instruction
    events: dict[int, int] = {}
    for i, instruction in enumerate(program):
        streams = occupied(instruction)
        mask = 0
        if isinstance(instruction, Wait) and not instruction.ago:
            mask = events.get(instruction.event, 0)
        for stream in streams:
            mask |= clocks.get(stream, 0)
        before.append(mask)
        clocks.update(dict.fromkeys(streams, mask | 1 << i))
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
    """Return the streams of an instruction; a copy on two first synchronizes with the second."""
    own, *others = [str(stream) for stream in occupied(program.instructions[at])]
    return [*others, own, *others]


class Explored(NamedTuple):
    """An interleaving and its result.

    ``choices`` are the names of the streams that continued, one after another; ``left`` is the
    resulting state (outputs, inputs, state of tasks), and ``error`` the error if a step raised.
    """

    choices: tuple[str, ...]
    left: Mapping[str, Any]
    error: AutoschedError | None


def explore(
    program: Program, graph: Graph, machine: Machine, *, examples: Mapping[str, Any], seed: int = 0
) -> Iterator[Explored]:
    """Yield the result of each of the ``interleavings`` of a program.

    Freed memory is overwritten with NaN.
    """
    setting = Setting(graph, examples, seed)
    for choices in interleavings(program, graph):
        yield Explored(choices, *attempt(setting, program, graph, machine, following(choices)))
