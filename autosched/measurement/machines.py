"""Describe the local machine with measured links and streams."""

from __future__ import annotations

import os
from dataclasses import replace

from autosched.errors import MachineError
from autosched.machine.machine import Device, Machine
from autosched.measurement.kept import Kept, real
from autosched.measurement.links import Track, measured_links
from autosched.measurement.probes import COUNTS, paying, sharing
from autosched.scheduling.arguments import checked_count

__all__ = ["measure_machine"]


def measure_machine(
    machine: Machine | None = None,
    *,
    repeat: int = 9,
    cache: bool | str | os.PathLike[str] | None = None,
    track: Track = iter,
) -> Machine:
    """Return ``machine`` with its links and the compute streams of its accelerators as measured.

    The default is ``Machine.local()``. A link has the rate and latency of the line through copies
    of 1 KiB to 64 MiB, in its slower direction. An accelerator has as many streams as are faster
    than fewer for kernels too small to fill it; larger kernels run one after another anyway.
    ``cache`` and ``track`` as for ``measure_costs``. Raises MachineError for an emulated machine.

    >>> measure_machine(Machine.local(gpus=0)) == Machine.local(gpus=0)
    True
    """
    machine = Machine.local() if machine is None else machine
    if machine.imagined:
        raise MachineError("an emulated machine has nothing to measure; measure Machine.local()")
    checked_count(repeat, "repeat", 1)
    kept = Kept(cache)
    made = measured_links(machine, repeat=repeat, kept=kept, track=track)
    behind = [real(device) for device in made.devices]
    devices = [_streamed(device, behind.count(real(device)), kept) for device in made.devices]
    kept.save()
    return Machine(devices, made.links, contention=made.contention)


def _streamed(device: Device, sharers: int, kept: Kept) -> Device:
    """Return a device with its share of the streams that are worthwhile.

    The streams of a CPU are not changed.
    """
    where = real(device)
    if where.type == "cpu":
        return device
    most = paying([(count, sharing(where, count, kept=kept)) for count in COUNTS])
    return replace(device, streams=max(1, most // sharers))
