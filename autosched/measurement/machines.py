"""Describe the local machine with measured links, storage and times of issuing."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from autosched.errors import MachineError
from autosched.graph.files import StoredTensor
from autosched.machine.machine import Device, Machine
from autosched.measurement.hardware import torch_device
from autosched.measurement.links import SIZES, Track, fitted, measured_links
from autosched.measurement.stopwatch import Call, EventWatch, synchronize
from autosched.scheduling.arguments import checked_count


def measure_machine(
    machine: Machine | None = None,
    *,
    repeat: int = 9,
    track: Track = iter,
) -> Machine:
    """Return ``machine`` with links and times of issuing as measured.

    The default is ``Machine.local()``. A link has the rate and latency of the line through copies
    of 1 KiB to 64 MiB, in its slower direction. ``issue_seconds`` and ``event_seconds`` of an
    accelerator are those of calls of torch: what a run adds to each instruction is far less.
    ``track`` as for ``measure_costs``. Raises MachineError for an emulated machine.

    Of ``Machine.cluster()`` all ranks call this, and get the same machine: each measures its own
    devices, and one pair of ranks on one host and one on two hosts measure the network.

    >>> measure_machine(Machine.local(gpus=0)) == Machine.local(gpus=0)
    True
    """
    machine = Machine.local() if machine is None else machine
    if machine.imagined:
        raise MachineError("an emulated machine has nothing to measure; measure Machine.local()")
    checked_count(repeat, "repeat", 1)
    own = partial(_measured_machine, repeat=repeat, track=track)
    if machine.rank is None:
        return own(machine)
    from autosched.measurement.ranks import measured_cluster

    return measured_cluster(machine, repeat, own)


def _measured_machine(machine: Machine, repeat: int, track: Track) -> Machine:
    """Return the machine of one process as measured."""
    made = measured_links(machine, repeat=repeat, track=track)
    return replace(made, devices=tuple(map(_measured, made.devices)))


def _measured(device: Device) -> Device:
    """Return an accelerator with its times of issuing; a CPU unchanged."""
    where = torch_device(device)
    if where.type == "cpu":
        return device
    issue, event = issuing_seconds(where)
    return replace(device, issue_seconds=issue, event_seconds=event)


_CALLS = 64  # in a row: fewer than an accelerator's queue holds, so that the thread never waits
_REPEAT = 9


# ---- issuing


def issuing_seconds(device: torch.device) -> tuple[float, float]:
    """Return the seconds to issue an operator, and to issue a record or a wait."""
    watch = EventWatch(device)
    x = torch.zeros(1, device=device)
    event = torch.Event(device)
    operator = [partial(torch.neg, x)] * _CALLS
    both: list[Call] = [
        partial(event.record, watch.stream),
        partial(watch.stream.wait_event, event),
    ]
    return _least(watch, operator), _least(watch, both * (_CALLS // 2))


def _least(watch: EventWatch, calls: Sequence[Call]) -> float:
    found = []
    for _ in range(_REPEAT):
        found.append(watch.time(calls)[0].issued)
        synchronize(watch.device)
    return min(found)


# ---- storage


def measure_storage(
    path: str | os.PathLike[str],
    machine: Machine | None = None,
    *,
    name: str = "disk:0",
    repeat: int = 5,
) -> Machine:
    """Return ``machine`` with the storage device on which the file ``path`` is, as measured.

    The default is ``Machine.local()``. The device is added, or its link replaced. The file is read
    in parts of 1 KiB to 64 MiB, as ``Graph.read`` would, and should be larger than those; the rate
    and the latency are those of the line through the medians. The operating system is asked to
    drop the file from memory before each read, which not all file systems do. Raises MachineError
    for an emulated machine and for a file that is too small.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(bytes(4 << 20))
    ...     measure_storage(file.name, Machine.local(gpus=0), repeat=1).storage
    ('disk:0',)
    """
    machine = Machine.local() if machine is None else machine
    if machine.imagined:
        raise MachineError("an emulated machine has nothing to measure; measure Machine.local()")
    checked_count(repeat, "repeat", 1)
    size = os.stat(path).st_size
    pinned = bool(machine.accelerators) and torch.accelerator.is_available()
    where = os.fspath(path)
    line = fitted(
        {
            nbytes: statistics.median(_read(where, nbytes, size, i, pinned) for i in range(repeat))
            for nbytes in SIZES
            if nbytes <= size
        }
    )
    if line is None:
        raise MachineError(f"file {where!r} of {size:,} B is too small to measure its device")
    others = tuple(device for device in machine.devices if device.name != name)
    links = tuple(link for link in machine.links if name not in (link.source, link.destination))
    return replace(machine, devices=others, links=links).with_storage(*line, name=name)


def _read(path: str, nbytes: int, size: int, number: int, pinned: bool) -> float:
    """Return the seconds of one read of so many bytes, from one of several positions."""
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    offset = number * nbytes % (size - nbytes + 1)
    stored = StoredTensor(path, "uint8", (nbytes,), offset, size)
    begun = time.perf_counter()
    stored.read(pinned)
    return time.perf_counter() - begun
