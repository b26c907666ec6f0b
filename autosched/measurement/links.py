"""Measure the latency and rate of links.

Copies of many sizes are timed in each direction, from and to page-locked and pageable host memory,
and a line is fitted to them. A link gets one rate for both directions, the lower one: the two
differ by less than a tenth, and separate rates would double the number of paths.

Copies are timed by the accelerator's events, except those of pageable memory, which block the
thread that issues them and are timed by the host's clock.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autosched.machine.machine import Link, Machine
from autosched.measurement.kept import Kept, real
from autosched.measurement.stopwatch import Stopwatch, settle, stopwatch

__all__ = ["SIZES", "Track", "Way", "fitted", "measured_links", "measured_ways"]

Track = Callable[[Sequence[Any]], Iterable[Any]]

SIZES = tuple(
    1 << n for n in (10, 13, 16, 18, 20, 22, 24, 26)
)  # bytes of the copies that are timed
_RATES = 1e6, 1e14  # bytes per second; readings beyond are rejected
_LATENCY = 0.1


@dataclass(frozen=True)
class Way:
    """One direction of a link, and the median seconds of copies by their bytes.

    ``pinned`` says whether host memory was.

    >>> [round(number, 3) for number in Way("cpu", "cuda:0", True, {1: 1.5, 3: 2.5}).line]
    [2.0, 1.0]
    """

    source: str
    destination: str
    pinned: bool
    seconds: Mapping[int, float]

    @property
    def line(self) -> tuple[float, float] | None:
        """Bytes per second and latency of the fitted line; None if there is none."""
        return fitted(self.seconds)


def measured_ways(
    machine: Machine, *, repeat: int = 9, kept: Kept | None = None, track: Track = iter
) -> list[Way]:
    """Return the times of copies in each direction of each link, and for host memory also those of pageable memory."""
    kept = kept or Kept(None)
    device = {d.name: real(d) for d in machine.devices}
    asked = []
    for link in machine.links:
        ends = link.source, link.destination
        on_host = {device[end].type for end in ends} >= {"cpu"} and device[ends[0]] != device[
            ends[1]
        ]
        asked += [
            (*way, pinned)
            for way in (ends, ends[::-1])
            for pinned in ([True, False] if on_host else [True])
        ]
    ways = []
    for source, destination, pinned in track(asked):
        copy = partial(_copies, device[source], device[destination], pinned, repeat, kept)
        ways.append(Way(source, destination, pinned, {size: copy(size) for size in SIZES}))
    return ways


def measured_links(
    machine: Machine, *, repeat: int = 9, kept: Kept | None = None, track: Track = iter
) -> Machine:
    """Return the machine with measured links: each is as fast as the slower of its two directions.

    A link without a measurable rate, or with an impossible one, is not changed, with a warning.
    """
    by_ends: dict[frozenset[str], list[Way]] = {}
    for way in measured_ways(machine, repeat=repeat, kept=kept, track=track):
        by_ends.setdefault(frozenset((way.source, way.destination)), []).append(way)
    links = [
        _link(link, by_ends[frozenset((link.source, link.destination))]) for link in machine.links
    ]
    return Machine(machine.devices, links, contention=machine.contention, imagined=machine.imagined)


def _link(link: Link, ways: Sequence[Way]) -> Link:
    lines = {
        pinned: _believed(link, [way for way in ways if way.pinned == pinned])
        for pinned in (True, False)
    }
    line = lines[True]
    pageable = lines[False]
    if line is None:
        return link
    slow = min(pageable[0], line[0]) if pageable is not None else link.pageable_bytes_per_second
    slow = slow if slow is None else min(slow, line[0])
    return replace(link, bytes_per_second=line[0], latency=line[1], pageable_bytes_per_second=slow)


def _believed(link: Link, ways: Sequence[Way]) -> tuple[float, float] | None:
    """Return the line through the slower copies of each size.

    None, and a warning, if it is impossible for a link.
    """
    if not ways:
        return None
    slower = {size: max(way.seconds[size] for way in ways) for size in ways[0].seconds}
    line = fitted(slower)
    if line is not None and _RATES[0] <= line[0] <= _RATES[1] and line[1] <= _LATENCY:
        return line
    what = "no rate" if line is None else f"{line[0]:.3g} bytes per second after {line[1]:.3g} s"
    warnings.warn(
        f"copies between {link.source!r} and {link.destination!r} show {what}, which no link has; it stays as it was",
        stacklevel=4,
    )
    return None


def fitted(seconds: Mapping[int, float]) -> tuple[float, float] | None:
    """Return bytes per second and latency of the line with the least squares of relative residuals.

    None if none rises.

    Noise only adds: so a copy counts as no longer than any larger one took. The latency is at least
    0.

    >>> [round(number, 3) for number in fitted({1: 1.5, 3: 2.5})], fitted({1: 9.0, 3: 9.0})
    ([2.0, 1.0], None)
    """
    sizes = sorted(seconds)
    if len(sizes) < 2 or not all(0 < seconds[size] < float("inf") for size in sizes):
        return None
    least = [min(seconds[larger] for larger in sizes[i:]) for i in range(len(sizes))]
    weights = [1 / taken**2 for taken in least]
    middle = sum(w * size for w, size in zip(weights, sizes, strict=True)) / sum(weights)
    mean = sum(w * taken for w, taken in zip(weights, least, strict=True)) / sum(weights)
    points = list(zip(weights, sizes, least, strict=True))
    slope = sum(w * (size - middle) * (taken - mean) for w, size, taken in points)
    slope /= sum(w * (size - middle) ** 2 for w, size, _ in points)
    latency = mean - slope * middle
    if latency < 0:  # then the line through nothing
        slope = sum(w * size * taken for w, size, taken in points) / sum(
            w * size**2 for w, size, _ in points
        )
        latency = 0.0
    return (1 / slope, latency) if slope > 0 else None


def _copies(
    source: torch.device,
    destination: torch.device,
    pinned: bool,
    repeat: int,
    kept: Kept,
    nbytes: int,
) -> float:
    """Return the median seconds of copies of one size."""
    name = f"{source} -> {destination}{'' if pinned else ' pageable'} {nbytes}"
    if earlier := kept.get("copy", name):
        return earlier[0]
    here, there = (_memory(nbytes, device, pinned) for device in (source, destination))
    copy = partial(there.copy_, here, non_blocking=True)
    timed = _by_events if pinned and {source.type, destination.type} != {"cpu"} else _by_host
    seconds = timed(copy, source, destination, repeat)
    kept.put((seconds, seconds), "copy", name)
    return seconds


def _memory(nbytes: int, device: torch.device, pinned: bool) -> torch.Tensor:
    pin = pinned and device.type == "cpu" and torch.accelerator.is_available()
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)


def _by_events(
    copy: Callable[[], Any], source: torch.device, destination: torch.device, repeat: int
) -> float:
    """Time copies on their stream: between accelerators that of the source."""
    settle(source, destination)
    watch: Stopwatch = stopwatch(source if source.type != "cpu" else destination)
    issued = watch.time([copy])[0].issued
    readings = [watch.time([copy], 2 * issued)[0] for _ in range(repeat)]
    counted = [reading for reading in readings if reading.clean] or readings
    return statistics.median(reading.seconds for reading in counted)


def _by_host(
    copy: Callable[[], Any], source: torch.device, destination: torch.device, repeat: int
) -> float:
    times = []
    for _ in range(repeat + 1):  # the first warms up
        settle(source, destination)
        start = time.perf_counter()
        copy()
        settle(source, destination)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
