"""Divide a program into segments that can be recorded and replayed whole.

Work on the host, copies between physical devices, and frees of host memory remain outside segments.
Everything else is on one physical device, and is divided by ``program.units``.

Knows no function and no tensor, and not how a segment is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count

from autosched._lib.topological import topological_order
from autosched.graph.flow import ragged
from autosched.lowering.events import insert_events
from autosched.lowering.hazards import Hazards
from autosched.program.program import (
    Copy,
    Free,
    Instruction,
    Program,
    Record,
    Run,
    Stream,
    Wait,
    occupied,
)
from autosched.program.units import Before, predecessors, units, where_is


@dataclass(frozen=True)
class Segment:
    """A part of a program that is on one physical ``device``. It begins and ends on ``stream``.

    Its ``program`` forks from that stream to its others, and joins them to it. ``positions`` are
    those that its runs, copies and frees have in the whole program, in the order of ``program``.
    """

    device: str
    stream: Stream
    program: Program
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Segmented:
    """A program in which each segment is one run.

    ``parts`` are the meaning of its runs, copies and frees: a segment, or an instruction of the
    whole program, by its position. Events have numbers that neither the whole program nor another
    segment uses.
    """

    whole: Program
    program: Program
    parts: tuple[Segment | int, ...]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, in issue order."""
        return tuple(part for part in self.parts if isinstance(part, Segment))

    @cached_property
    def works(self) -> list[Segment | int | None]:
        """The meaning of each instruction of ``program``; None for events."""
        rest = iter(self.parts)
        return [None if isinstance(i, (Record, Wait)) else next(rest) for i in self.program]

    @cached_property
    def positions(self) -> list[int]:
        """A position in the whole program for each instruction of ``program``.

        An event has that of the instruction before it.
        """
        found = [0]
        for part in self.works:
            first = part.positions[0] if isinstance(part, Segment) else part
            found.append(found[-1] if first is None else first)
        return found[1:]

    @cached_property
    def everything(self) -> Program:
        """All instructions, for creating streams and events."""
        programs = [self.whole, self.program, *(segment.program for segment in self.segments)]
        return Program(tuple(chain.from_iterable(program.instructions for program in programs)))


def segmented(program: Program, device: Mapping[str, str | None]) -> Segmented:
    r"""Divide a program into segments.

    ``device`` is the physical one of each name; None for the host.

    >>> program = Program.parse("cuda:0/compute run a\ncuda:0/compute run b\n"
    ... "cuda:0/compute record e0\ncuda:0/copy-out wait e0\ncuda:0/copy-out copy b -> cpu\n"
    ... "cuda:0/compute run c")
    >>> cut = segmented(program, {"cuda:0": "cuda:0", "cpu": None})
    >>> cut.parts[0].positions, cut.parts[1], cut.parts[2].positions
    ((0, 1), 4, (5,))
    """
    # 1. Find the units: the instructions of a segment, or a single one; and their predecessors.
    before = predecessors(program)
    where = {i: where_is(program.instructions[i], device) for i in before}
    parted = units(program, before, where)
    unit = {i: number for number, members in enumerate(parted) for i in members}
    needs: list[list[int]] = []
    for number, members in enumerate(parted):
        found = {unit[p] for i in members for p in before[i]}
        needs.append(sorted(found - {number}))
    # 2. Order them, and make a segment, or keep the instruction.
    fresh = count(1 + max((i.event for i in program if isinstance(i, Record)), default=-1))
    works: list[Run | Copy | Free] = []
    parts: list[Segment | int] = []
    order = topological_order(needs, [members[0] for members in parted])
    for number in order:
        first = parted[number][0]
        on = where[first]
        if on is None:
            parts.append(first)
            works.append(_work(program, first))
        else:
            segment = _segment(program, on, parted[number], before, fresh)
            parts.append(segment)
            works.append(Run(segment.stream, f"segment-{len(works)}"))
    # 3. Insert events between them.
    at = {number: position for position, number in enumerate(order)}
    after = [sorted(at[p] for p in needs[number]) for number in order]
    between = _with_events(works, after, fresh)
    return Segmented(
        program, Program(tuple(between), program.inputs, program.outputs), tuple(parts)
    )


def _segment(
    program: Program, device: str, members: Sequence[int], before: Before, fresh: count[int]
) -> Segment:
    """Return a segment of these members, on the stream that has most of them."""
    works = [_work(program, i) for i in members]
    streams = Counter(stream for work in works for stream in occupied(work))
    runs = Counter(work.stream for work in works if isinstance(work, Run))
    main = max(streams, key=lambda stream: (runs[stream], streams[stream]))
    others = [stream for stream in streams if stream != main]
    order = _branch_by_branch(program, members, before, [main, *others])
    at = {i: position for position, i in enumerate(order)}
    after = [sorted(at[p] for p in before[i] if p in at) for i in order]
    inner = _with_events([_work(program, i) for i in order], after, fresh)
    fork: list[Instruction] = []
    join: list[Instruction] = []
    if others:
        begun = next(fresh)
        fork = [Record(main, begun), *(Wait(stream, begun) for stream in others)]
    for stream in others:
        end = next(fresh)
        join += [Record(stream, end), Wait(main, end)]
    return Segment(device, main, Program((*fork, *inner, *join)), tuple(order))


def _branch_by_branch(
    program: Program, members: Sequence[int], before: Before, streams: Sequence[Stream]
) -> list[int]:
    """Return members in an order that stays on a stream as long as possible.

    A recorded graph is replayed on the smallest number of streams only if its branches were
    recorded one by one, the main one first.
    """
    lines = {
        stream: [i for i in reversed(members) if program.instructions[i].stream == stream]
        for stream in streams
    }
    left = set(members)
    order: list[int] = []

    def is_ready(stream: Stream) -> bool:
        return bool(lines[stream]) and left.isdisjoint(before[lines[stream][-1]])

    while left:
        stream = next(stream for stream in streams if is_ready(stream))
        while is_ready(stream):
            order.append(lines[stream].pop())
            left.remove(order[-1])
    return order


def _work(program: Program, i: int) -> Run | Copy | Free:
    instruction = program.instructions[i]
    assert isinstance(instruction, (Run, Copy, Free))
    return instruction


def _with_events(
    works: Sequence[Run | Copy | Free], after: Sequence[Sequence[int]], fresh: Iterable[int]
) -> list[Instruction]:
    """Return instructions with new events that order each after the positions in ``after``."""
    result: list[Instruction] = []
    numbers: dict[int, int] = {}
    numbering = iter(fresh)
    for instruction in insert_events(works, Hazards(*ragged(after), (), (), (), *ragged(()))):
        match instruction:
            case Record(stream, event):
                numbers[event] = numbers[event] if event in numbers else next(numbering)
                result.append(Record(stream, numbers[event]))
            case Wait(stream, event):
                result.append(Wait(stream, numbers[event]))
            case _:
                result.append(instruction)
    return result
