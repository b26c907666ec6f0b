"""Determine which thread issues each instruction, and for how long that keeps it busy.

A thread issues one instruction after another, in the order of the program. Work for an accelerator
starts when it has been issued at the earliest, and a thread does not wait for it. Streams that wait
for a CPU are issued by threads of their own, all others by the calling thread (see
``program.units``). The thread of a CPU stream does its work itself. A thread can issue a
wait only after another has issued the record.

In a replayed run, each unit of a program (see ``program.units``) is issued as one graph, with its
first instruction. Its records and waits are part of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.cycles import Edge
from autosched.costs.costs import Replay
from autosched.problem import Problem
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
from autosched.program.units import predecessors, units, waiting_for_host, where_is


class Issuing(NamedTuple):
    """The threads that issue a program. Streams are positions in ``program.streams``."""

    seconds: NDArray[np.float64]  # of each instruction
    thread: NDArray[np.int64]  # of each stream, from 0; the calling thread has the last number
    blocks: NDArray[np.bool_]  # by stream: a CPU's, whose thread is busy until its work ends
    begin: NDArray[np.float64]  # one number: when the threads begin

    @property
    def total(self) -> float:
        """The seconds of all threads together."""
        return float(self.begin[0] + self.seconds.sum())

    @classmethod
    def free(cls, program: Program) -> Issuing:
        """Return the threads of a program that is issued in no time."""
        streams = len(program.streams)
        return cls.of([0.0] * len(program), [0] * streams, [False] * streams, 0.0)

    @classmethod
    def of(
        cls, seconds: list[float], thread: list[int], blocks: list[bool], begin: float
    ) -> Issuing:
        """Return the same of lists."""
        return cls(
            np.array(seconds, float),
            np.array(thread, np.int64),
            np.array(blocks, bool),
            np.array([begin], float),
        )


def issuing(program: Program, problem: Problem) -> Issuing | None:
    """Return the threads that issue a program; None if issuing takes no time.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> made = asc.schedule(graph, asc.Machine.emulated(gpus=1), policy="single")
    >>> issuing(made.program, made.problem) is None
    True
    """
    machine = problem.machine
    costs = problem.costs
    if not costs.has_issuing(machine.devices):
        return None
    streams = program.streams
    gpu = {stream for stream in streams if machine.device(stream.device).is_accelerator}
    waiting = waiting_for_host(program, gpu)
    seconds = [_seconds(instruction, problem) for instruction in program]
    if costs.replay is not None:
        _issue_units(seconds, program, problem, costs.replay)
    return Issuing.of(
        seconds,
        thread=[i if stream in waiting else len(streams) for i, stream in enumerate(streams)],
        blocks=[stream not in gpu for stream in streams],
        begin=0.0 if costs.replay is None else costs.replay.call,
    )


def _seconds(instruction: Instruction, problem: Problem) -> float:
    device = problem.machine.device(instruction.stream.device)
    if isinstance(instruction, Run):
        return problem.costs.issue_seconds(problem.graph.task(instruction.task), device)
    if not device.is_accelerator or isinstance(instruction, Free):
        return 0.0
    return device.issue_seconds if isinstance(instruction, Copy) else device.event_seconds


def _issue_units(seconds: list[float], program: Program, problem: Problem, replay: Replay) -> None:
    """Let the first instruction of each unit issue all of it, as a graph."""
    before = predecessors(program)
    where = {i: where_is(program.instructions[i], problem.machine.physical) for i in before}
    replayed = {program.instructions[i].stream for i, device in where.items() if device is not None}
    for i, instruction in enumerate(program):
        if isinstance(instruction, (Record, Wait)) and instruction.stream in replayed:
            seconds[i] = 0.0
    for members in units(program, before, where):
        if where[members[0]] is None:
            continue
        nodes = 0.0
        for i in members:
            seconds[i] = 0.0
            match program.instructions[i]:
                case Run(_, task):
                    nodes += problem.costs.launches(problem.graph.task(task))
                case Copy():
                    nodes += 1
        seconds[members[0]] = replay.graph + nodes * replay.node if nodes else 0.0


class System:
    """The points in time of a run, as nodes, and what each waits for, over runs.

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
