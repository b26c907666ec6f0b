"""Progress: where each thread of a run stands, and who waits for whom, in words.

Sees places in a program. How the threads got there, and whether they will get further, it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping

from autosched.graph import Graph
from autosched.program import Copy, Instruction, Program, Record, Run, Stream, Wait, occupied
from autosched.workers import Place

__all__ = ["report"]


def report(program: Program, graph: Graph, places: Mapping[str | None, Place | None]) -> str:
    r"""Return a line for each thread: what it runs, or what it waits for.

    >>> program = Program.parse("cpu/compute run slow\ncpu/compute record e0\ngpu/compute wait e0")
    >>> print(report(program, Graph(), {"gpu/compute": Place(2), "cpu/compute": Place(1)}))
        gpu/compute waits for e0, which cpu/compute records behind 'slow'
        cpu/compute is at: record e0
    """
    return "\n".join(f"    {_line(program, graph, thread, place)}" for thread, place in places.items())


def _line(program: Program, graph: Graph, thread: str | None, place: Place | None) -> str:
    if place is None or place.position < 0:
        return f"{thread or 'the rest'} {'has ended' if place is None else 'has not begun'}"
    instruction = program.instructions[place.position]
    stream = thread or str(instruction.stream)
    match instruction:
        case Wait(_, event) if place.how != "before":
            return f"{stream} waits for e{event}, which {_recorder(program, event)}"
        case Copy() if place.how == "waiting":
            others = [str(other) for other in occupied(instruction) if str(other) != stream]
            return f"{stream} waits for {' and '.join(others)}, to {instruction} together"
        case Run(_, task) if place.how == "in":
            return f"{stream} runs task {task!r} (added at {graph.task(task).source})"
    return f"{stream} is {'before' if place.how == 'before' else 'at'}: {instruction}"


def _recorder(program: Program, event: int) -> str:
    """Return which stream records an event, behind what."""
    last: dict[Stream, Instruction] = {}
    for instruction in program:
        match instruction:
            case Record(stream, number) if number == event:
                behind = _name(last[stream]) if stream in last else "nothing at all"
                return f"{stream} records behind {behind}"
            case Run() | Copy():
                last.update(dict.fromkeys(occupied(instruction), instruction))
    return "nobody records"


def _name(instruction: Instruction) -> str:
    return repr(instruction.task) if isinstance(instruction, Run) else f"'{instruction}'"
