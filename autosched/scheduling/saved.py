"""Convert schedules to JSON, without functions and tensors, and back.

The module opens no files, and runs nothing that it reads. Input is not trusted: a text is either
read as exactly what was written, or refused with a message that says what is wrong. This module
checks only that a graph is the one that was saved; ``verify`` checks the program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from autosched._lib.allowed import is_device, is_whole
from autosched._lib.json_reader import TEXT, each, json_data, one, parse, refuse, struct, table
from autosched._lib.text import difference
from autosched.costs.costs import READER as COSTS
from autosched.costs.costs import Costs
from autosched.errors import ScheduleError
from autosched.graph.graph import Graph, Task
from autosched.machine.machine import READER as MACHINE
from autosched.machine.machine import Machine
from autosched.placement import Placement, Send
from autosched.program.program import Instruction, Program, Run
from autosched.runtime.backends import BACKENDS
from autosched.runtime.check import Check

_FORMAT = 3


@dataclass(frozen=True)
class Saved:
    """The content of a saved schedule; ``graph`` is the description of its graph.

    ``devices`` are those that tasks are bound to. Raises ScheduleError where the program does not
    run the tasks on the devices and in the order of the placement.
    """

    graph: tuple[str, ...]
    machine: Machine
    costs: Costs
    placement: Placement
    program: Program
    backend: str
    check: Check
    devices: Mapping[str, str]

    def __post_init__(self) -> None:
        placed = [(task, self.placement.device.get(task)) for task in self.placement.order]
        runs = [(run.task, run.stream.device) for run in self.program if isinstance(run, Run)]
        for here, there in zip_longest(runs, placed, fillvalue=("nothing", "any device")):
            if here != there:
                what = "{} on {}".format
                raise ScheduleError(
                    f"the program runs {what(*here)} where the placement has {what(*there)}"
                )


# ---- the graph


def describe(graph: Graph) -> tuple[str, ...]:
    r"""Return a line for each input, constant, task, bond and output, without functions.

    The lines contain all that a schedule relies on. Devices are left out, because ``schedule(...,
    inputs=..., place=...)`` chooses some, and the placement must fit the others. Fields are
    separated by two spaces, and no name contains a space, so different graphs have different lines.

    >>> graph = Graph()
    >>> graph.output(y=graph.input("x").mul_(2) + 1)
    >>> print("\n".join(describe(graph)))
    input x
    task mul  reads x  writes x
    task add  reads x@1  makes add  data mul
    output add as y
    """
    values = graph.values
    sources = (
        f"{'input' if value.tensor is None else 'constant'} {value.name}" for value in graph.sources
    )
    tasks = (_describe_task(graph, task) for task in graph.tasks)
    together = (
        " ".join(["together", *(values[index].name for index in group)])
        for group in graph.kept_together
    )
    outputs = (f"output {values[i].name} as {label}" for label, i in graph.outputs.items())
    return (*sources, *tasks, *together, *outputs)


def _describe_task(graph: Graph, task: Task) -> str:
    values = graph.values
    fields = {
        "task": [task.name],
        "reads": [values[v].name + (f"@{version}" if version else "") for v, version in task.reads],
        "writes": [values[use.value].name for use in task.writes],
        "makes": [values[use.value].name for use in task.outputs],
        "sharing": [values[values[v].root].name for v, _ in task.outputs if values[v].root != v],
    }
    for before, kind in task.dependencies:
        fields.setdefault(kind, []).append(graph.tasks[before].name)
    words = [" ".join([field, *names]) for field, names in fields.items() if names]
    return "  ".join([*words, "view"] if task.view else words)


def check_graph(saved: Saved, graph: Graph, rank: int | None = None) -> None:
    """Raise ScheduleError with the first input, task or output that differs from the saved one.

    With a ``rank``, the graph is that rank's, and the saved one is that of rank 0.
    """
    if rank is None:
        names, what = ("saved", "given"), f"graph {graph.name!r} is not the one that was saved"
    else:
        names = "rank 0", f"rank {rank}"
        what = f"rank {rank}: its graph {graph.name!r} differs from rank 0's"
    if lines := difference(names[0], saved.graph, names[1], describe(graph)):
        raise ScheduleError(what + lines)


# ---- writing


def to_text(saved: Saved) -> str:
    """Return the JSON text, the same for the same schedule.

    Raises ScheduleError for what ``from_text`` would not read.
    """
    document = {
        "format": _FORMAT,
        "backend": saved.backend,
        "check": saved.check,
        "inputs": dict(saved.program.inputs),
        "outputs": dict(saved.program.outputs),
        "placement": {task: saved.placement.device[task] for task in saved.placement.order},
        "program": str(Program(saved.program.instructions)).splitlines(),
        "machine": json_data(saved.machine),
        "costs": json_data(saved.costs),
        "graph": saved.graph,
        "devices": dict(saved.devices),
    }
    if saved.program.in_flight > 1:
        document["in_flight"] = saved.program.in_flight
    if saved.placement.copies:
        document["copies"] = [send._asdict() for send in saved.placement.copies]
    if saved.placement.streams is not None:
        document["streams"] = saved.placement.streams
    text = json.dumps(document, indent=2) + "\n"
    if from_text(text).program != saved.program:
        what = "the program has parts that its text form does not show"
        raise ScheduleError(f"{what}, so it cannot be saved")
    return text


# ---- reading


def from_text(text: str) -> Saved:
    """Read the text of ``to_text``.

    Raises ScheduleError that says what is wrong, where, and what would be allowed.
    """
    saved: Saved = parse(text, _document)
    return saved


def _document(item: Any, place: str) -> Saved:
    if isinstance(item, dict) and "format" in item:
        _DOCUMENT["format"](item["format"], "format")  # first: else other messages would mislead
    saved: Saved = struct(_saved, _DOCUMENT, optional=_OPTIONAL)(item, place)
    return saved


def _saved(
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    placement: Mapping[str, str],
    program: Sequence[Instruction],
    format: int,
    machine: Machine,
    copies: tuple[Send, ...] = (),
    streams: int | None = None,
    in_flight: int = 1,
    **rest: Any,
) -> Saved:
    ends = tuple(inputs.items()), tuple(outputs.items())
    whole = Program(tuple(program), *ends, in_flight, tuple(machine.ranks.items()))
    placed = Placement(placement, tuple(placement), copies, streams=streams)
    return Saved(placement=placed, program=whole, machine=machine, **rest)


def _instruction(item: Any, place: str) -> Instruction:
    what = "an instruction, such as 'cpu/compute  run h', as print(schedule) shows them"
    try:
        (instruction,) = Program.parse(item if isinstance(item, str) else "").instructions
    except ValueError:  # a ProgramError, or not exactly one instruction
        refuse(place, what, item)
    return instruction


_check = one('true, false or "bytes"', lambda item: isinstance(item, bool) or item == "bytes")
_name = one("the name of a device, such as 'cpu' or 'cuda:0'", is_device)

_format = one(
    f"{_FORMAT}, the version that this autosched reads", lambda n: is_whole(n) and n == _FORMAT
)
_backend = one(
    f"one of {', '.join(BACKENDS)}", lambda item: isinstance(item, str) and item in BACKENDS
)

_source = one("the name of a device, or null", lambda item: item is None or is_device(item))
_version = one("a version: 0 or more", lambda n: is_whole(n) and n >= 0)

_SEND = {"value": TEXT, "version": _version, "device": _name, "before": TEXT, "source": _source}
_OPTIONAL = ["copies", "streams", "in_flight"]
_DOCUMENT = {
    "format": _format,
    "backend": _backend,
    "check": _check,
    "inputs": table(_name),
    "outputs": table(_name),
    "placement": table(_name),
    "copies": each(struct(Send, _SEND, optional=["source"])),
    "streams": one("a number of streams: 1 or more", lambda n: is_whole(n) and n >= 1),
    "program": each(_instruction),
    "in_flight": one("a number of runs: 2 or more", lambda n: is_whole(n) and n >= 2),
    "machine": MACHINE,
    "costs": COSTS,
    "graph": each(TEXT),
    "devices": table(_name),
}
