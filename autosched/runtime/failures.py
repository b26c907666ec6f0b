"""Describe what failed: a task with its arguments and line, or where each thread of a late run is.

The report says which instruction each thread executes or waits at, and which thread it waits for.
Knows positions in a program, and not how the threads got there or whether they will continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from autosched.errors import TaskError
from autosched.graph.graph import Graph
from autosched.program.program import (
    Copy,
    Instruction,
    Program,
    Record,
    Run,
    Stream,
    Wait,
    occupied,
)
from autosched.runtime.threads.runs import Place


def report(program: Program, graph: Graph, places: Mapping[str | None, Place | None]) -> str:
    r"""Return a line for each thread: what it runs, or what it waits for.

    >>> program = Program.parse("cpu/compute run slow\ncpu/compute record e0\ngpu/compute wait e0")
    >>> print(report(program, Graph(), {"gpu/compute": Place(2), "cpu/compute": Place(1)}))
        gpu/compute waits for e0, which cpu/compute records after 'slow'
        cpu/compute is at: record e0
    """
    return "\n".join(
        f"    {_line(program, graph, thread, place)}" for thread, place in places.items()
    )


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
    """Return the stream that records an event, and the instruction before it."""
    last: dict[Stream, Instruction] = {}
    for instruction in program:
        match instruction:
            case Record(stream, number) if number == event:
                before = f" after {_name(last[stream])}" if stream in last else " first of all"
                return f"{stream} records{before}"
            case Run() | Copy():
                last.update(dict.fromkeys(occupied(instruction), instruction))
    return "nobody records"


def _name(instruction: Instruction) -> str:
    return repr(instruction.task) if isinstance(instruction, Run) else f"'{instruction}'"


def failed(
    graph: Graph, instruction: Instruction, error: Exception, arguments: Sequence[Any]
) -> TaskError:
    """Return the error that names the copy, or the task, its arguments and the user's line."""
    what = f"{type(error).__name__}: {_shown(str, error)}"
    if not isinstance(instruction, Run):
        return TaskError(f"{instruction} on {instruction.stream} failed: {what}")
    task = graph.task(instruction.task)
    described = ", ".join(_shown(_described, item) for item in arguments)
    arrays = any(type(item).__name__ == "ndarray" for item in arguments)
    if arrays and isinstance(error, (AttributeError, TypeError)):
        described += "; a NumPy array is no tensor: pass torch.from_numpy(array)"
    return TaskError(
        f"task {task.name!r} on {instruction.stream.device} failed: {what}\n"
        f"    arguments: {described or 'none'}\n    added at {task.source}"
    )


def from_users_code(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first frames, which are of this package."""
    while trace and trace.tb_next and _is_own(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return trace


def _is_own(module: str) -> bool:
    return module.startswith("autosched.") and module != "autosched.demo"


def _shown(show: Callable[[Any], str], item: Any) -> str:
    """Return the text of a user's object, or a note that making it raises."""
    try:
        return show(item)
    except Exception as error:
        return f"<{type(item).__name__} that cannot be shown: {type(error).__name__}>"


def _described(item: Any) -> str:
    """Return dtype and shape of a tensor, otherwise the shortened repr."""
    if hasattr(item, "dtype") and hasattr(item, "shape"):
        return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    text = repr(item)
    return text if len(text) < 60 else text[:57] + "..."
