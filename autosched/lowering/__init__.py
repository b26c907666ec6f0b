"""From a placement to a program: a chain of passes, each from instructions to instructions.

    streams   each task gets a compute stream of its device            -> runs
    copies    what is read elsewhere travels, as early as it exists    -> runs and copies
    or spill  the same where memory is limited, as late as it can      -> runs, copies and frees
    hazards   what touches the same memory, and how long that lives    (read by the next two)
    events    records and waits, as few as keep every hazard           -> + records and waits
    frees     memory goes back where no stream has to wait for it      -> + frees

Knows no times and no costs: the placement has decided where and in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosched.graph import Graph
from autosched.lowering.copies import insert_copies
from autosched.lowering.events import insert_events
from autosched.lowering.frees import insert_frees
from autosched.lowering.hazards import find_hazards
from autosched.lowering.spill import spill_copies
from autosched.lowering.streams import assign_streams
from autosched.machine import Machine
from autosched.placement import Placement, check, home
from autosched.program import Copy, Free, Program, Run

__all__ = ["lower"]


def lower(
    graph: Graph,
    machine: Machine,
    placement: Placement,
    outputs: Mapping[str, str] | None = None,
    nbytes: Sequence[float] | None = None,
) -> Program:
    """Return the program that runs a graph as placed; ``outputs`` says on which device an output is wanted.

    With ``nbytes``, those of each value by its index, no device holds more than its memory, in whichever order its
    streams come to take it. Raises ScheduleError for placements that break a constraint, where no link leads, and
    where memory does not suffice.
    """
    check(placement, graph, machine)
    runs = assign_streams(graph, machine, placement)
    instructions: Sequence[Run | Copy | Free]
    instructions, places = (
        insert_copies(graph, machine, runs, outputs or {})
        if nbytes is None
        else spill_copies(graph, machine, runs, outputs or {}, nbytes)
    )
    hazards = find_hazards(graph, machine, instructions, places)
    program = insert_frees(insert_events(instructions, hazards.after), hazards.blocks)
    return Program(
        tuple(program),
        inputs=tuple((value.name, home(graph, machine, value)) for value in graph.sources),
        outputs=tuple(places.items()),
    )
