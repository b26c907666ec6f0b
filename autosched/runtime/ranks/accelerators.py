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

Where there are direct copies, one thread issues all streams of accelerators, in the order of the
program, as NCCL demands. A host that waits for an accelerator then also watches the wire: if that
is lost, what it waits for may never happen, or have no meaning.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from typing import Any

from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, Receive, Send, Stream
from autosched.runtime.backends import Step, Transfer
from autosched.runtime.backends.accelerator import Accelerator
from autosched.runtime.ranks.backend import Ranks
from autosched.runtime.ranks.direct import Direct, direct_arcs, number_of
from autosched.runtime.ranks.exchange import Exchange
from autosched.runtime.ranks.messages import ReceiveBuffer, in_host_memory
from autosched.runtime.ranks.nccl import Connect, nccl_communicator

__all__ = ["AcceleratorRanks", "backend_of"]

Version = tuple[str, int]  # of a value
_ISSUING = "accelerators"  # a thread


class AcceleratorRanks(Ranks, Accelerator):
    """See ``autosched.runtime.backends``: the accelerators of a rank, its CPUs, and its wires."""

    direct: Direct | None = None

    def __init__(self, whole: Program | None = None):
        super().__init__(whole)
        self.arcs = set() if whole is None else direct_arcs(whole)

    def open(self, program: Program, machine: Machine) -> None:
        """Take streams and threads. Raises MachineError outside of a cluster."""
        self.attach(program, machine)
        Accelerator.open(self, program, self.own_devices(machine))
        self.direct = self._direct(program, machine)
        self.threads = {stream: self._issuing(stream) for stream in program.streams}
        self.exchanges = Staged(self, machine)

    def _issuing(self, stream: Stream) -> str | None:
        if self.direct is not None:
            return _ISSUING if stream in self.streams else str(stream)
        return str(stream) if stream in self.own_thread else None

    def own_devices(self, machine: Machine) -> Machine:
        """Return a machine of the devices of this rank."""
        own = {name for name, rank in machine.ranks.items() if rank == self.session.rank}
        devices = [device for device in machine.devices if device.name in own]
        links = [link for link in machine.links if {link.source, link.destination} <= own]
        return Machine(devices, links, contention=machine.contention)

    def connect(self, device: str) -> Connect:
        """Return what makes communicators of an accelerator of this rank, for the wire of now."""
        name = f"nccl {self.session.generation}"
        place = number_of(device), self.devices[device]
        return nccl_communicator(*place, self.session.store, name)

    def _direct(self, part: Program, machine: Machine) -> Direct | None:
        halves = [
            (half, f"{half}, instruction {i + 1} of {len(part)}")
            for i, half in enumerate(part)
            if isinstance(half, (Send, Receive)) and half.stream in self.streams
        ]
        if not halves:
            return None
        parts = machine.ranks, self.session, self.first_tag, self.arcs, self.devices, self.connect
        return Direct(halves, *parts)

    def exchange(self, half: Send | Receive) -> Transfer:
        """Return the function that starts to send or to receive a value."""
        if self.direct is not None and half.stream in self.streams:
            return self.direct.transfer(half)
        return super().exchange(half)

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Wait for copies between ranks, or for an accelerator."""
        made = self.events[event]
        if self.direct is None or made is None or stream in self.streams:
            return super().wait(stream, event)
        until = self.direct.until

        def step() -> None:
            until(made, f"event {event} of an accelerator")
            self.pinned.unstage()

        return step

    def ending(self, thread: str | None) -> Step | None:
        """Return what a thread does at the end of a run: wait for its copies."""
        if self.direct is None or thread != _ISSUING:
            return super().ending(thread)
        return self.direct.ending([self.streams[stream] for stream in self.direct.streams])

    def begin(self, stopped: Any) -> None:
        """Begin a run, together with the other ranks if it is the first one."""
        super().begin(stopped)
        if self.direct is not None:
            self.direct.begin(self.exchanges.wire)


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
        parts = machine.ranks, backend.threads, backend.session, backend.first_tag
        super().__init__(part, *parts)

    def carries(self, half: Send | Receive) -> bool:
        """Whether a copy is between hosts."""
        return half.stream not in self.on_accelerators

    def buffer(self, half: Send | Receive, header: Any) -> ReceiveBuffer:
        """Return memory for a value, page-locked if an accelerator reads it."""
        pinned = (half.value, half.version) in self.onward
        return ReceiveBuffer(header, partial(in_host_memory, pinned=pinned), mark=True)


def backend_of(part: Program, whole: Program) -> Ranks:
    """Return the backend for a rank's part of a program."""
    devices = {stream.device for stream in part.streams}
    on_cpus = all(device.partition(":")[0] == "cpu" for device in devices)
    return Ranks(whole) if on_cpus else AcceleratorRanks(whole)
