"""Turn a placement into a program.

Lowering is a chain of passes, each from instructions to instructions:

    streams        assign each task a compute stream of its device     -> runs
    copies         copy values to their readers as early as possible   -> runs and copies
    or spill       the same with limited memory, as late as possible   -> runs, copies and frees
    hazards        find conflicting accesses and lifetimes of blocks   (used by the next)
    events         insert as few records and waits as enforce every
                   hazard; in the same walk, free memory where that
                   costs no wait                                       -> + records, waits and frees
    carried        in a loop: waits for the run before; memory that
                   would be freed at the end is released when the run
                   has ended                                           -> + records and waits
    ranks          hazards, events and frees where a machine spans
                   several ranks: a copy between them is two lines

Before these, ``resident_state`` chooses devices for state that stays there between runs. Sufficient
memory changes nothing: ``fitted`` lowers again with a limit only if ``peaks`` exceed the memory
of a device. Then allocations are ordered by events after the frees that make room, so the limit holds
for every interleaving of streams, not only in issue order.

Lowering knows no times; of costs it knows the bytes of values alone. The placement has decided
devices and order.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.errors import ScheduleError
from autosched.lowering.carried import insert_carried
from autosched.lowering.copies import insert_copies
from autosched.lowering.events import insert_events
from autosched.lowering.hazards import find_hazards
from autosched.lowering.ranks import insert_by_rank
from autosched.lowering.spill import spill_copies
from autosched.lowering.streams import assign_streams
from autosched.placement import Placement, check
from autosched.problem import Problem
from autosched.program.program import Copy, Free, Program, Run
from autosched.simulation.footprint import peaks

__all__ = ["fits", "fitted", "lower"]


def lower(
    problem: Problem, placement: Placement, *, limited: bool = False, in_flight: int = 1
) -> Program:
    """Return the program of a placement.

    If it is ``limited``, no device holds more than its memory for any interleaving of its streams;
    copies are then as late as possible, whatever the placement says. With ``in_flight`` > 1, the
    program is a loop. Raises ScheduleError for placements that break a constraint, for missing
    links, where memory does not suffice, and for a limited loop: frees make room within one run
    only. Several ranks execute one run at a time.
    """
    if in_flight < 1:
        raise ScheduleError(f"in_flight= must be a number of runs, 1 or more, got {in_flight!r}")
    if in_flight > 1 and limited:
        raise ScheduleError(
            f"memory is limited, and {in_flight} runs in flight share it; "
            "only a program of one run makes room for itself"
        )
    graph = problem.graph
    machine = problem.machine
    if in_flight > 1 and machine.ranks:
        raise ScheduleError("several ranks execute one run at a time; use in_flight=1")
    check(placement, problem)
    named = {task.name: task for task in graph.tasks}
    tasks = [named[name] for name in placement.order]
    runs = assign_streams(graph, machine, tasks, placement)
    instructions: Sequence[Run | Copy | Free]
    if limited:
        instructions, places = spill_copies(problem, tasks, runs)
    else:
        instructions, places = insert_copies(problem, tasks, runs, placement.copies)
    if machine.ranks:
        program = insert_by_rank(problem, instructions, places)
    else:
        hazards = find_hazards(problem, instructions, places)
        program = insert_events(instructions, hazards, ends=in_flight == 1)
    homes = problem.homes
    if in_flight > 1:
        program = insert_carried(program, graph, homes)
    return Program(
        tuple(program),
        inputs=tuple((value.name, homes[value.index]) for value in graph.sources),
        outputs=tuple(places.items()),
        in_flight=in_flight,
        ranks=tuple(machine.ranks.items()),
    )


def fits(program: Program, problem: Problem) -> bool:
    """Return whether every device has enough memory at all times, for any progress of threads."""
    device = problem.machine.device
    return all(most <= device(name).nbytes for name, most in peaks(program, problem).items())


def fitted(problem: Problem, placement: Placement) -> Program:
    """Lower a placement to a program that fits the memory of each device.

    The program is that of ``lower`` if it fits. Otherwise copies are late, allocations wait for
    frees, and values that do not fit are spilled to another device and reloaded. Raises
    MemoryLimitError if that does not suffice, and ScheduleError as ``lower`` does.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.add(abs, graph.input("x"), name="y", nbytes=8, on="cuda:0"))
    >>> placement = Placement({"y": "cuda:0"}, ("y",))
    >>> fitted(Problem(graph, asc.Machine.emulated(gpus=1)), placement).outputs
    (('y', 'cuda:0'),)
    """
    program = lower(problem, placement)
    if not problem.is_limited or fits(program, problem):
        return program
    return lower(problem, placement, limited=True)
