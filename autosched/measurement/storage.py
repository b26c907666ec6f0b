"""Measure how fast a storage device is read."""

from __future__ import annotations

import os
import statistics
import time

import torch

from autosched.errors import MachineError
from autosched.graph.files import StoredTensor
from autosched.machine.machine import Machine
from autosched.measurement.links import SIZES, fitted
from autosched.scheduling.arguments import checked_count

__all__ = ["measure_storage"]


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
    others = [device for device in machine.devices if device.name != name]
    links = [link for link in machine.links if name not in (link.source, link.destination)]
    return Machine(others, links, contention=machine.contention).with_storage(*line, name=name)


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
