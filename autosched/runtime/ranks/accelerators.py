"""Run the part of a rank that has accelerators.

A copy between accelerators of two ranks goes by way of their hosts, unless a network joins them
directly. Lowering makes three copies of it, and events and waits order these:

    device -> host      on the accelerator's copy stream, into page-locked memory
    host -> host        the send waits on the host for the event of the copy before it
    host -> device      issued when the receive has ended, from page-locked memory

What is received for an accelerator arrives in page-locked memory, which serves every run. The
program frees it behind the event of the copy to the device, and a run ends behind all copies.

Each stream of a host has a thread, as have the streams that wait for one, so no wait for another
rank delays what an accelerator can do meanwhile. All others are issued by the calling thread, which
never waits in gloo: Control-C would be held back.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, Receive, Send
from autosched.runtime.backends.accelerator import Accelerator
from autosched.runtime.ranks.backend import Ranks
from autosched.runtime.ranks.exchange import Exchange
from autosched.runtime.ranks.messages import Landing

__all__ = ["AcceleratorRanks", "backend_of"]

Version = tuple[str, int]  # of a value


class AcceleratorRanks(Ranks, Accelerator):
    """See ``autosched.runtime.backends``: the accelerators of a rank, its CPUs, and its wire."""

    def open(self, program: Program, machine: Machine) -> None:
        """Take streams and threads. Raises MachineError outside of a cluster."""
        self.attach(program, machine)
        Accelerator.open(self, program, _own_devices(machine))
        self.exchanges = Staged(self, machine)
        self.threads = {
            stream: str(stream) if stream in self.own_thread else None for stream in program.streams
        }


class Staged(Exchange):
    """The sends and receives of a rank between hosts; some values go on to an accelerator."""

    def __init__(self, backend: AcceleratorRanks, machine: Machine):
        part = backend.part
        self.on_accelerators = set(backend.streams)
        self.onward: Set[Version] = {
            (copy.value, copy.version)
            for copy in part
            if isinstance(copy, Copy) and copy.stream in self.on_accelerators
        }
        super().__init__(part, machine.ranks, backend.session, backend.first_tag)

    def carries(self, half: Send | Receive) -> bool:
        """Whether a copy is between hosts."""
        return half.stream not in self.on_accelerators

    def landing(self, half: Send | Receive, header: Any) -> Landing:
        """Return memory for a value, page-locked if an accelerator reads it."""
        return Landing(header, pinned=(half.value, half.version) in self.onward)


def _own_devices(machine: Machine) -> Machine:
    """Return a machine of the devices of this rank."""
    own = {*machine.here}
    devices = [device for device in machine.devices if device.name in own]
    links = [link for link in machine.links if {link.source, link.destination} <= own]
    return Machine(devices, links, contention=machine.contention)


def backend_of(part: Program, whole: Program) -> Ranks:
    """Return the backend for a rank's part of a program."""
    devices = {stream.device for stream in part.streams}
    on_cpus = all(device.partition(":")[0] == "cpu" for device in devices)
    return Ranks(whole) if on_cpus else AcceleratorRanks(whole)
