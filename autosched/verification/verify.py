"""Prove that a program cannot race.

The program is walked once with vector clocks and checked against these laws:

    order       accesses to the same memory, and tasks with ``after=``, are ordered by streams and
                events
    events      each event is recorded once, and earlier in the list than its waits
    presence    what is read is present: made on this device, or copied to it, and not freed; on the
                device of a task that writes a value, that value and its views are in one memory;
                parts of a value are written in one memory, and then touched there
    single      each task runs once, each version is on a device at most once at a time
    free        memory is freed once, on the stream that allocated it, after all its uses; only
                inputs, constants and outputs are kept, and in a loop what is released when the
                run has ended
    result      outputs, and the inputs that tasks wrote, end where the program says
    place       tasks run where they are constrained to, and with those that the graph keeps with
                them; only tasks that read files run on storage, to which nothing is copied; where a
                machine is given, on its devices and links, and on no more compute streams than it
                has

``ranks`` has the laws of programs that span several ranks.

The proof derives from the graph what must be ordered. It shares only the clock arithmetic with
lowering. It is one walk; its time grows with instructions times streams. Of a loop, this pass
proves each run by itself, since waits for earlier runs have no effect in the first run; that the
runs do not race with each other is proved by unrolling the loop (``loops``).
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.errors import ProgramError
from autosched.graph.graph import HOST, STORAGE, Graph
from autosched.machine.machine import Machine
from autosched.program.program import Program, Receive, Send
from autosched.verification.loops import check_runs, check_waits
from autosched.verification.machines import check_machine, check_storage
from autosched.verification.parts import joined
from autosched.verification.verifier import check_run

__all__ = ["verify"]


def verify(
    program: Program | Sequence[Program], graph: Graph, machine: Machine | None = None
) -> None:
    """Raise ProgramError if some legal interleaving could differ from the serial run.

    If the graph has grown since the program was made, pass ``schedule.graph``, which has not.
    Instead of a program that spans several ranks, the parts of all ranks can be passed. Then it is
    proved, too, that no rank waits for ever.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> x = graph.input("x")
    >>> graph.output(y=x + 1)
    >>> asc.verify(asc.Program.parse("input x on cpu"), graph)
    Traceback (most recent call last):
    autosched.errors.ProgramError: task 'add' never runs
    """
    if isinstance(program, Sequence) and all(isinstance(part, Program) for part in program):
        program = joined(program)
    if not isinstance(program, Program):
        raise ProgramError(
            f"verify needs a Program, got {program!r}; Program.parse reads one from text"
        )
    if any(type(i) is Send or type(i) is Receive for i in program):
        raise ProgramError("this is the part of one rank; pass a list of the parts of all ranks")
    if machine is not None:
        check_machine(program, machine)
    check_waits(program)
    check_storage(program, graph)
    at: dict[str, str | None] = {HOST: None, STORAGE: None}
    if machine is not None:
        at = {HOST: machine.host, STORAGE: (*machine.storage, machine.host)[0]}
    memory = check_run(program, graph, at)
    if program.in_flight > 1:
        check_runs(program, graph, memory)
