"""Check that a program fits a machine: its devices, streams, links and ranks."""

from __future__ import annotations

from autosched.errors import ProgramError
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, excerpt

__all__ = ["check_machine"]


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
