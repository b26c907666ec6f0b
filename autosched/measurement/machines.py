"""Describe the local machine with measured links, streams and times of issuing."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import torch

from autosched.errors import MachineError
from autosched.machine.machine import Device, Machine
from autosched.measurement.cache import MeasurementCache
from autosched.measurement.hardware import torch_device
from autosched.measurement.issuing import issuing_seconds
from autosched.measurement.links import Track, measured_links
from autosched.measurement.stream_sharing import COUNTS, sharing, worthwhile_streams
from autosched.scheduling.arguments import checked_count

__all__ = ["measure_machine"]


def measure_machine(
    machine: Machine | None = None,
    *,
    repeat: int = 9,
    cache: bool | str | os.PathLike[str] | None = None,
    track: Track = iter,
) -> Machine:
    """Return ``machine`` with links, streams and times of issuing as measured.

    The default is ``Machine.local()``. A link has the rate and latency of the line through copies
    of 1 KiB to 64 MiB, in its slower direction. An accelerator has as many streams as are faster
    than fewer for kernels too small to fill it; larger kernels run one after another anyway. Its
    ``issue_seconds`` and ``event_seconds`` are those of calls of torch.
    ``cache`` and ``track`` as for ``measure_costs``. Raises MachineError for an emulated machine.

    Of ``Machine.cluster()`` all ranks call this, and get the same machine: each measures its own
    devices, and one pair of ranks on one host and one on two hosts measure the network.

    >>> measure_machine(Machine.local(gpus=0)) == Machine.local(gpus=0)
    True
    """
    machine = Machine.local() if machine is None else machine
    if machine.imagined:
        raise MachineError("an emulated machine has nothing to measure; measure Machine.local()")
    checked_count(repeat, "repeat", 1)
    own = partial(_measured_machine, repeat=repeat, cache=cache, track=track)
    if machine.rank is None:
        return own(machine)
    from autosched.measurement.ranks import measured_cluster

    return measured_cluster(machine, repeat, own)


def _measured_machine(
    machine: Machine, repeat: int, cache: bool | str | os.PathLike[str] | None, track: Track
) -> Machine:
    """Return the machine of one process as measured."""
    cached = MeasurementCache(cache)
    made = measured_links(machine, repeat=repeat, cached=cached, track=track)
    physical = list(map(torch_device, made.devices))
    devices = [
        _measured(device, where, physical.count(where), cached)
        for device, where in zip(made.devices, physical, strict=True)
    ]
    cached.save()
    return Machine(devices, made.links, contention=made.contention, network=made.network)


def _measured(
    device: Device, where: torch.device, sharers: int, cached: MeasurementCache
) -> Device:
    """Return an accelerator with its share of worthwhile streams, and issuing; a CPU unchanged."""
    if where.type == "cpu":
        return device
    readings = [(count, sharing(where, count, cached=cached)) for count in COUNTS]
    issue, event = issuing_seconds(where, cached=cached)
    streams = max(1, worthwhile_streams(readings) // sharers)
    return replace(device, streams=streams, issue_seconds=issue, event_seconds=event)
