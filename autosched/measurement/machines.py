"""Describe the local machine with measured links, storage and times of issuing.

Copies of many sizes are timed in each direction, from and to page-locked and pageable host memory,
and a line is fitted to them. A link gets one rate for both directions, the lower one: the two
differ by less than a tenth, and separate rates would double the number of paths. Copies are timed
by the accelerator's events, except those of pageable memory, which block the thread that issues
them and are timed by the host's clock.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from autosched.errors import MachineError
from autosched.graph.files import StoredTensor
from autosched.machine.machine import Device, Link, Machine, given_or_local
from autosched.measurement.hardware import torch_device
from autosched.measurement.stopwatch import (
    Call,
    EventWatch,
    Stopwatch,
    median,
    synchronize,
)
from autosched.scheduling.arguments import checked_count

Track = Callable[[Sequence[Any]], Iterable[Any]]

SIZES = tuple(1 << n for n in (10, 13, 16, 18, 20, 22, 24, 26))  # bytes of the timed copies
_RATES = 1e6, 1e14  # bytes per second; readings beyond are rejected
_LATENCY = 0.1
_CALLS = 64  # in a row: fewer than an accelerator's queue holds, so that the thread never waits
_REPEAT = 9


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
    ``track`` as for ``measure_costs``. Raises MachineError for an emulated machine, and for one of
    several ranks.

    >>> measure_machine(Machine.local(gpus=0)) == Machine.local(gpus=0)
    True
    """
    machine = given_or_local(machine)
    if machine.imagined:
        raise MachineError("an emulated machine has nothing to measure; measure Machine.local()")
    checked_count(repeat, "repeat", 1)
    if machine.ranks:
        raise MachineError(
            "a machine of several ranks is not measured; give the figures of its network to "
            "Machine.cluster(network=Network(...))"
        )
    made = measured_links(machine, repeat=repeat, track=track)
    return replace(made, devices=tuple(map(_measured, made.devices)))


def _measured(device: Device) -> Device:
    """Return an accelerator with its times to issue an operator, and a record or a wait."""
    where = torch_device(device)
    if where.type == "cpu":
        return device
    watch = EventWatch(where)
    x = torch.zeros(1, device=where)
    event = torch.Event(where)
    operator: Call = partial(torch.neg, x)
    both: list[Call] = [
        partial(event.record, watch.stream),
        partial(watch.stream.wait_event, event),
    ]
    issue, events = (_least(watch, calls) for calls in ([operator] * 2, both))
    return replace(device, issue_seconds=issue, event_seconds=events)


def _least(watch: EventWatch, calls: Sequence[Call]) -> float:
    """Return the least seconds to issue a call of those that are made in turn."""
    found = []
    for _ in range(_REPEAT):
        found.append(watch.time([*calls] * (_CALLS // len(calls)))[0].issued)
        synchronize(watch.device)
    return min(found)


# ---- links


def measured_links(machine: Machine, *, repeat: int = 9, track: Track = iter) -> Machine:
    """Return the machine with measured links: each is as fast as the slower of its two directions.

    A link without a measurable rate, or with an impossible one, is not changed, with a warning.
    Links of storage devices are left out: see ``measure_storage``.
    """
    where = {d.name: torch_device(d) for d in machine.devices if not d.is_storage}

    def measured(link: Link) -> Link:
        if not {link.source, link.destination} <= where.keys():
            return link
        ends = where[link.source], where[link.destination]
        line = _accepted_line(link, ends, True, repeat)
        if line is None:
            return link
        slow = link.pageable_bytes_per_second
        if ends[0] != ends[1] and "cpu" in (ends[0].type, ends[1].type):
            pageable = _accepted_line(link, ends, False, repeat)
            slow = slow if pageable is None else pageable[0]
        rate, latency = line
        slow = None if slow is None else min(slow, rate)
        return replace(link, bytes_per_second=rate, latency=latency, pageable_bytes_per_second=slow)

    return replace(machine, links=tuple(map(measured, track(machine.links))))


def _accepted_line(
    link: Link, ends: tuple[torch.device, torch.device], pinned: bool, repeat: int
) -> tuple[float, float] | None:
    """Return the line through the slower copies of each size; warn if no link can have it."""
    ways = ends, ends[::-1]
    line = fitted(
        {size: max(_copies(*way, pinned, repeat, size) for way in ways) for size in SIZES}
    )
    if line and _RATES[0] <= line[0] <= _RATES[1] and line[1] <= _LATENCY:
        return line
    what = "no rate" if line is None else f"{line[0]:.3g} bytes per second after {line[1]:.3g} s"
    names = f"{link.source!r} and {link.destination!r}"
    warnings.warn(
        f"copies between {names} show {what}, which no link has; it stays as it was", stacklevel=4
    )
    return None


def fitted(seconds: Mapping[int, float]) -> tuple[float, float] | None:
    """Return bytes per second and latency of the line with least squares of relative residuals.

    Noise only adds: so a copy counts as no longer than any larger one took. The latency is at least
    0. None if no line rises.

    >>> [round(number, 3) for number in fitted({1: 1.5, 3: 2.5})], fitted({1: 9.0, 3: 9.0})
    ([2.0, 1.0], None)
    """
    sizes = np.array(sorted(seconds), float)
    taken = np.array([seconds[size] for size in sorted(seconds)])
    if len(sizes) < 2 or not ((taken > 0) & (taken < np.inf)).all():
        return None
    least = np.minimum.accumulate(taken[::-1])[::-1]
    if least[0] == least[-1]:
        return None
    slope, latency = np.polyfit(sizes, least, 1, w=1 / least)
    if latency < 0:  # then the line through the origin
        relative = sizes / least
        slope, latency = relative.sum() / (relative @ relative), 0.0
    return float(1 / slope), float(latency)


def _copies(
    source: torch.device,
    destination: torch.device,
    pinned: bool,
    repeat: int,
    nbytes: int,
) -> float:
    """Time copies: on their stream, between accelerators that of the source; or by the host."""
    here, there = (_memory(nbytes, device, pinned) for device in (source, destination))
    has_events = pinned and {source.type, destination.type} != {"cpu"}

    def copy() -> None:
        there.copy_(here, non_blocking=True)
        if not has_events:
            synchronize(source, destination)

    synchronize(source, destination)
    on = source if source.type != "cpu" else destination
    watch = EventWatch(on) if has_events else Stopwatch()
    first, _ = watch.time([copy])
    found = median([watch.time([copy], 2 * first.issued)[0] for _ in range(repeat)])
    assert found is not None
    return found.seconds


def _memory(nbytes: int, device: torch.device, pinned: bool) -> torch.Tensor:
    pin = pinned and device.type == "cpu" and torch.accelerator.is_available()
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)


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
    machine = given_or_local(machine)
    if machine.imagined:
        raise MachineError("an emulated machine has nothing to measure; measure Machine.local()")
    checked_count(repeat, "repeat", 1)
    size = os.stat(path).st_size
    pinned = bool(machine.accelerators) and torch.accelerator.is_available()
    where = os.fspath(path)
    seconds = {
        nbytes: statistics.median(_read(where, nbytes, size, i, pinned) for i in range(repeat))
        for nbytes in SIZES
        if nbytes <= size
    }
    line = fitted(seconds)
    if line is None:
        raise MachineError(f"file {where!r} of {size:,} B is too small to measure its device")
    return machine.part({*machine.names} - {name}).with_storage(*line, name=name)


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
