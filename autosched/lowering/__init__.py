"""From a placement to a program: a chain of passes, each from instructions to instructions.

    streams   each task gets a compute stream of its device            -> runs
    copies    what is read elsewhere travels, as early as it exists    -> runs and copies
    or spill  the same where memory is limited, as late as it can      -> runs, copies and frees
    hazards   what touches the same memory, and how long that lives    (read by the next)
    or plain  both at once, where nothing is written in place
    events    records and waits, as few as keep every hazard; and,
    frees     on the same walk, memory goes back where that costs
              no wait                                                  -> + records, waits and frees

Knows no times and no costs: the placement has decided where and in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosched.graph.graph import Graph
from autosched.lowering.copies import insert_copies
from autosched.lowering.events import insert_events
from autosched.lowering.functional import insert_plainly, is_plain
from autosched.lowering.hazards import alone, find_hazards
from autosched.lowering.spill import spill_copies
from autosched.lowering.streams import assign_streams
from autosched.machine.machine import Machine
from autosched.placement import Placement, check, home
from autosched.program.program import Copy, Free, Program, Run

__all__ = ["lower"]


def lower(
    graph: Graph,
    machine: Machine,
    placement: Placement,
    outputs: Mapping[str, str] | None = None,
    nbytes: Sequence[float] | None = None,
) -> Program:
    """Return the program that runs a graph as placed; ``outputs`` says on which device an output is wanted.

    With ``nbytes``, those of each value by its index, no device holds more than its memory, in
    whichever order its streams come to take it; copies leave as late as they may, whatever the
    placement says. Raises ScheduleError for placements that break a constraint, where no link
    leads, and where memory does not suffice.
    """
    check(placement, graph, machine)
    tasks = [graph.task(name) for name in placement.order]
    runs = assign_streams(graph, machine, tasks, placement.device)
    instructions: Sequence[Run | Copy | Free]
    if nbytes is None and is_plain(graph, machine):
        instructions, places, hazards = insert_plainly(
            graph, machine, tasks, runs, outputs or {}, placement.copies
        )
    else:
        if nbytes is None:
            instructions, places = insert_copies(
                graph, machine, tasks, runs, outputs or {}, placement.copies
            )
        else:
            instructions, places = spill_copies(graph, machine, tasks, runs, outputs or {}, nbytes)
        hazards = find_hazards(graph, machine, tasks, instructions, places)
    lone = frozenset() if machine.contention else alone(instructions, hazards)
    program = insert_events(instructions, hazards, lone)
    return Program(
        tuple(program),
        inputs=tuple((value.name, home(graph, machine, value)) for value in graph.sources),
        outputs=tuple(places.items()),
    )
