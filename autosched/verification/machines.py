"""Check that a program fits a machine: its devices, streams, links and ranks."""

from __future__ import annotations

from autosched._lib.allowed import is_storage
from autosched.errors import ProgramError
from autosched.graph.graph import Graph, Task, Value
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, Run, excerpt

__all__ = ["check_machine", "check_storage"]


def check_machine(program: Program, machine: Machine) -> None:
    """Check a program against the devices, compute streams and links of a machine."""
    if dict(program.ranks) != machine.ranks:
        raise ProgramError(
            "the devices of the program are of other ranks than those of the machine (law: rank)"
        )
    computing: dict[str, int] = {}
    for stream in program.streams:
        if stream.device not in machine.names:
            raise ProgramError(
                f"stream {stream} is on no device of the machine: {', '.join(machine.names)} (law: "
                "place)"
            )
        if not stream.name.startswith("copy-"):
            computing[stream.device] = computing.get(stream.device, 0) + 1
            most = machine.device(stream.device).streams
            if computing[stream.device] > most:
                raise ProgramError(
                    f"{stream} is one compute stream too many: the device has {most} (law: place)"
                )
    ends = dict.fromkeys(
        [(i.source, i.destination) for i in program.instructions if type(i) is Copy]
    )
    apart = [pair for pair in ends if machine.link(*pair) is None]
    for at, copy in enumerate(program.instructions if apart else ()):
        if isinstance(copy, Copy) and (copy.source, copy.destination) in apart:
            what = f"no link joins {copy.source} and {copy.destination}"
            raise ProgramError(excerpt(program, at, "place", what, None))


def check_storage(program: Program, graph: Graph) -> None:
    """Check that nothing but reads runs on storage, and that nothing is copied to it."""
    for at, each in enumerate(program.instructions):
        if isinstance(each, Copy) and is_storage(each.destination):
            what = f"{each.value!r} is copied to {each.destination}, which is only read"
            raise ProgramError(excerpt(program, at, "place", what, None))
        if isinstance(each, Run) and is_storage(each.stream.device):
            task = graph.names.get(each.task)
            if isinstance(task, (Task, Value)) and not graph.task(each.task).reads_file:
                what = f"task {each.task!r} cannot run on {each.stream.device}, which is storage"
                raise ProgramError(excerpt(program, at, "place", what, None))
