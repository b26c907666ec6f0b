"""Predict the steady-state seconds per run of a loop.

The start times of a loop are a linear system over maximum and sum: each instruction starts when
the last of its predecessors has ended, of the same run or of earlier ones. Since run r begins when
run r - ``in_flight`` has ended, all instructions depend on each other over the runs. The system is
then eventually periodic: from some run on, times repeat after a number of runs c, increased by c
periods. The period is the maximum cycle ratio of the system: see ``_lib.cycles``. So it is exact,
and no number of runs must be guessed. That holds for the model of ``simulate``, for submission
without delay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autosched._lib.cycles import Edge, maximum_cycle_ratio
from autosched.program.program import Copy, Program, Record, Run, Stream, Wait, occupied
from autosched.simulation.issuing import Issuing
from autosched.simulation.simulate import makespan

_NEARLY = 1.01  # of the best period


class Period(NamedTuple):
    """Seconds per run, and the cycle that bounds them, as positions with distances in runs.

    ``cycle`` has pairs of a run or copy and the distance to the next, in order of time. ``gated``
    says that it contains the rule that run r begins when run r - ``in_flight`` has ended, ``issued``
    that it contains the issuing of an instruction that takes time.
    """

    seconds: float
    cycle: tuple[tuple[int, int], ...] = ()
    gated: bool = False
    issued: bool = False


def period(program: Program, seconds: Sequence[float], issued: Issuing | None = None) -> Period:
    r"""Return the period, given the seconds of each instruction, and of issuing it.

    >>> lines = ["2 runs in flight", "cpu/compute run a", "cpu/compute record e0"]
    >>> lines += ["cuda:0/compute wait e0", "cuda:0/compute run b"]
    >>> loop = Program.parse("\n".join(lines))
    >>> period(loop, [3.0, 0.0, 0.0, 2.0]).seconds
    3.0
    """
    if program.in_flight == 1:
        return Period(makespan(program, seconds, issued), gated=True)
    system = _System(program, seconds, issued)
    ratio, cycle = maximum_cycle_ratio(system.seconds, system.edges)
    return system.described(ratio, cycle)


def fewest_in_flight(
    program: Program, seconds: Sequence[float], issued: Issuing | None, most: int
) -> int:
    """Return the fewest runs in flight, up to ``most``, with nearly the period of ``most``.

    ``program`` is a loop with any number of them; nearly means within 1%.
    """

    def at(count: int) -> float:
        return period(replace(program, in_flight=count), seconds, issued).seconds

    best = _NEARLY * at(most)
    single = makespan(program, seconds, issued)
    if single <= best or most == 1:
        return 1
    # A run takes the makespan at least, and so do as many periods.
    counts = range(max(2, math.ceil(single / best)), most)
    return next((count for count in counts if at(count) <= best), most)


class _System:
    """The nodes of a run, and what each waits for, over runs.

    Node 0 is the beginning of a run, and the last node its end. Between are a node for each
    instruction, and where issuing takes time, one before it for its issuing; and one for each
    thread, for the call.
    """

    def __init__(self, program: Program, seconds: Sequence[float], issued: Issuing | None):
        self.program = program
        self.seconds = [0.0]
        self.node: list[int] = []  # of each instruction
        self.issue: list[int] = []  # of each instruction, its issuing
        self.free: list[int] = []  # by instruction, when its stream is free after it
        self.edges: list[Edge] = []
        self.threads: list[int] = []  # nodes of calls
        if issued is not None:
            calls = len(program.streams) + 1
            self.threads = list(range(1, 1 + calls))
            self.seconds += [float(issued.begin[0])] * calls
        for i in range(len(program)):
            if issued is not None:
                self.issue.append(len(self.seconds))
                self.seconds.append(float(issued.seconds[i]))
            self.node.append(len(self.seconds))
            self.seconds.append(seconds[i])
        self.end = len(self.seconds)
        self.seconds.append(0.0)
        self.edges += [(self.end, 0, program.in_flight)]
        self.edges += [*self._stream_order(), *self._waits(self.node)]
        if issued is not None:
            self.edges += [*self._thread_order(issued), *self._waits(self.issue)]
            self.edges += [
                (issue, self.node[i], 0)
                for i, (issue, instruction) in enumerate(zip(self.issue, program, strict=True))
                if not isinstance(instruction, Wait)
            ]

    def _stream_order(self) -> Iterator[Edge]:
        """Yield the order of each stream, within a run and over runs; a record keeps none waiting."""
        heads: list[tuple[Stream, int]] = []  # with nothing of the same run before them
        last: dict[Stream, int] = {}
        ends: dict[Stream, int] = {}  # the last run or copy
        for node, instruction in zip(self.node, self.program, strict=True):
            for stream in occupied(instruction):
                if stream in last:
                    yield (last[stream], node, 0)
                else:
                    heads.append((stream, node))
                if not isinstance(instruction, Record):
                    last[stream] = node
                if isinstance(instruction, (Run, Copy)):
                    ends[stream] = node
            self.free.append(last.get(instruction.stream, 0))
        yield from ((0, node, 0) for _, node in heads)
        yield from ((last[stream], node, 1) for stream, node in heads if stream in last)
        yield from ((node, self.end, 0) for node in ends.values())

    def _waits(self, nodes: Sequence[int]) -> Iterator[Edge]:
        """Yield what waits wait for; ``nodes`` are those of instructions, or of their issuing."""
        recorded = {
            i.event: node
            for node, i in zip(nodes, self.program, strict=True)
            if isinstance(i, Record)
        }
        for node, instruction in zip(nodes, self.program, strict=True):
            if isinstance(instruction, Wait) and instruction.event in recorded:
                yield (recorded[instruction.event], node, instruction.ago)

    def _thread_order(self, issued: Issuing) -> Iterator[Edge]:
        """Yield the order in which each thread issues, and what a CPU's thread does itself."""
        number = {stream: i for i, stream in enumerate(self.program.streams)}
        last: dict[int, list[int]] = {}
        for i, instruction in enumerate(self.program):
            stream = number[instruction.stream]
            thread = int(issued.thread[stream])
            yield from (
                (node, self.issue[i], 0) for node in last.get(thread, [self.threads[thread]])
            )
            last[thread] = [self.issue[i], *[self.free[i]] * bool(issued.blocks[stream])]
        for thread, call in enumerate(self.threads):
            yield (0, call, 0)
            yield from ((node, call, 1) for node in last.get(thread, ()))

    def described(self, ratio: float, cycle: Sequence[tuple[int, int]]) -> Period:
        position = {node: i for i, node in enumerate(self.node)}
        issuing = {*self.issue, *self.threads}
        found: list[tuple[int, int]] = []
        apart = 0  # before the first instruction of the list
        for node, distance in cycle:
            at = position.get(node)
            if at is not None and isinstance(self.program.instructions[at], (Run, Copy)):
                found.append((at, distance))
            elif found:
                found[-1] = found[-1][0], found[-1][1] + distance
            else:
                apart += distance
        if found:
            found[-1] = found[-1][0], found[-1][1] + apart
        nodes = {node for node, _ in cycle}
        return Period(
            ratio,
            tuple(found),
            self.end in nodes,
            any(self.seconds[node] > 0 for node in nodes & issuing),
        )
