"""Where a training step lies on a machine of several ranks: names, hosts, generators, leads.

On a machine without ranks, the rank of every device is None, and names are plain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from autosched import Machine

__all__ = ["Layout", "generators_of", "label_on", "ranks_of"]


def ranks_of(machine: Machine, devices: Iterable[str]) -> tuple[int | None, ...]:
    """Return the ranks of some devices, each once, in order.

    >>> ranks_of(Machine.emulated(gpus=2, hosts=2), ["cuda:2", "cuda:0", "cuda:1"])
    (0, 1)
    """
    return tuple(
        sorted({machine.device(name).rank for name in devices}, key=lambda rank: rank or 0)
    )


def label_on(rank: int | None, name: str) -> str:
    """Return the name of a rank's own input or output; rank 0 has the plain one."""
    return f"rank{rank}.{name}" if rank else name


def generators_of(machine: Machine) -> dict[str, str]:
    """Return the random number generators of devices, by name; logical devices share one.

    Each rank has its own. Imagined accelerators use the generator of the CPU.
    """
    found = {}
    for device in machine.devices:
        rank = "" if device.rank is None else f"rank {device.rank}"
        own = device.is_accelerator and not machine.imagined
        name = " ".join(filter(None, (rank, (device.physical or device.name) if own else "")))
        if name:
            found[device.name] = name
    return found


@dataclass(frozen=True)
class Layout:
    """The replicas of a step, and the device of each stage of each of them.

    The tensors of the user's model on a rank are those of the *lead* of each stage: of the first
    replica that has the stage there.
    """

    machine: Machine
    devices: tuple[tuple[str, ...], ...]

    @cached_property
    def ranks(self) -> tuple[int | None, ...]:
        """The ranks that take part."""
        return ranks_of(self.machine, (device for stages in self.devices for device in stages))

    def rank(self, device: str) -> int | None:
        """Return the rank of a device."""
        return self.machine.device(device).rank

    def host(self, rank: int | None) -> str | None:
        """Return the CPU of a rank; None for the host of a machine without ranks."""
        if rank is None:
            return None
        cpus = (d.name for d in self.machine.devices if d.rank == rank and d.kind == "cpu")
        return next(cpus, None)

    def batch_home(self, device: str, given: str | None) -> str | None:
        """Return where a part of the batch is that a device reads; ``given``: where the user has it.

        Of several ranks, the one that reads it passes it.
        """
        rank = self.rank(device)
        if rank is None or given is None:
            return given if rank is None else self.host(rank)
        return device

    def leads(self, replica: int, stage: int) -> bool:
        """Whether a replica is the first one with a stage on that rank."""
        rank = self.rank(self.devices[replica][stage])
        return all(self.rank(other[stage]) != rank for other in self.devices[:replica])

    def other_leads(self, stage: int, replica: int) -> list[int]:
        """Return the leads of a stage on all ranks, except a replica."""
        others = (i for i in range(len(self.devices)) if i != replica)
        return [i for i in others if self.leads(i, stage)]

    def first_device(self, rank: int | None) -> str:
        """Return the first device of a step on a rank."""
        devices = (device for stages in self.devices for device in stages)
        return next(device for device in devices if self.rank(device) == rank)
