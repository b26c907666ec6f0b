"""Where benchmarks run, and how calls are timed.

A rehearsal shows that the code works, in small and once; where there is no GPU, on a CPU that plays some. What it
measures means nothing.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import autosched as asc

WARM = 3  # calls of each, at least, and so many seconds, before anything counts
WARM_SECONDS = 0.3
SPIN_SECONDS = 0.2  # of products before each reading of the GPU's clock
SPIN_LIMIT = 5.0
AGREED = 0.02  # by which two readings in a row may differ
SLEEP = 1_000_000  # cycles


@dataclass(frozen=True)
class Rig:
    """A kind of machine, and how long a benchmark may take on it."""

    rehearse: bool = False
    quick: bool = False
    leave_out: frozenset[str] = frozenset()  # contestants

    @cached_property
    def device(self) -> torch.device:
        """Where tensors of the first GPU are."""
        return torch.device(self.names[0] if self.real else "cpu")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What machines here call their GPUs, of which two are always there, if only by name."""
        return self.machine(2).accelerators

    @cached_property
    def gpu(self) -> Any:
        """The module of torch with streams and events for code by hand: ``torch.cuda``; ``torch.cpu`` has idle ones."""
        return torch.get_device_module(self.device)

    @cached_property
    def real(self) -> int:
        """How many GPUs there are."""
        return torch.accelerator.device_count() if torch.accelerator.is_available() else 0

    @property
    def cuda(self) -> bool:
        """Whether they are NVIDIA's, or speak their language."""
        return self.device.type == "cuda"

    def machine(
        self, gpus: int = 1, *, streams: int = 1, nbytes: float = math.inf, cpu: bool = True
    ) -> asc.Machine:
        """Return a machine of so many GPUs, logical ones perhaps, each with so many compute streams and bytes."""
        found = (asc.Machine.local if self.real else asc.Machine.emulated)(gpus=gpus)
        devices = [
            device
            if device.kind == "cpu"
            else replace(device, streams=streams, nbytes=min(nbytes, device.nbytes))
            for device in found.devices
            if cpu or device.kind != "cpu"
        ]
        names = {device.name for device in devices}
        links = [link for link in found.links if {link.source, link.destination} <= names]
        return asc.Machine(devices, links, imagined=found.imagined)

    def random(self, *shape: int) -> Tensor:
        """Return random numbers on the first GPU, whose products are as large as they are."""
        return torch.rand(shape, device=self.device) * (2 / shape[-1])

    def pinned(self, *shape: int) -> Tensor:
        """Return random numbers in page-locked host memory."""
        made = torch.rand(shape) * (2 / shape[-1])
        return made.pin_memory() if self.real else made

    def settle(self) -> None:
        """Wait until all devices are at rest."""
        for index in range(self.real):
            torch.accelerator.synchronize(index)

    def warm_clocks(self) -> list[int]:
        """Compute until two readings of each GPU's clock agree; return how many were taken.

        A GPU at rest runs at a fraction of its clock, and every time measured then is too long.
        """
        return [self._warm_clock(index) for index in range(self.real if self.cuda else 0)]

    def _warm_clock(self, index: int) -> int:
        x = self.random(8, 8) if self.rehearse else self.random(4096, 4096)
        spin = 0.0 if self.rehearse else SPIN_SECONDS
        with torch.cuda.device(index):
            there = x.to(f"cuda:{index}")
            return readings_until_steady(lambda: _clock_reading(there, spin))

    def rounds(self, many: int) -> int:
        """Return how often something is measured that is usually measured ``many`` times."""
        return 2 if self.rehearse else max(3, many // 5) if self.quick else many


def readings_until_steady(read: Callable[[], float]) -> int:
    """Read until two readings in a row agree, or time is up; return how many were taken."""
    end, before = time.perf_counter() + SPIN_LIMIT, math.inf
    now, count = read(), 1
    while abs(now - before) > AGREED * now and time.perf_counter() < end:
        before, now, count = now, read(), count + 1
    return count


def _clock_reading(x: Tensor, spin: float) -> float:
    """Return the seconds of a sleep of so many cycles, after some products."""
    end = time.perf_counter() + spin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    while True:
        x.mm(x)
        torch.cuda.synchronize()
        if time.perf_counter() >= end:
            break
    first.record()
    torch.cuda._sleep(SLEEP)
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def race(
    rig: Rig, calls: Mapping[str, Callable[[], Any]], rounds: int, *, only_issue: bool = False
) -> dict[str, float]:
    """Return the median seconds of each call, until devices are at rest; or until it returns, with ``only_issue``.

    Calls take turns, and who begins changes from round to round, so that clocks and heat are the same for all.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for call in calls.values():
        _warm(rig, call)
    gc.collect()
    for turn in range(rig.rounds(rounds) if calls else 0):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_timed(rig, calls[name], only_issue))
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _warm(rig: Rig, call: Callable[[], Any]) -> None:
    """Call until kernels are compiled and chosen, memory is cached, and clocks are up."""
    end, left = (
        time.perf_counter() + (0.0 if rig.rehearse else WARM_SECONDS),
        1 if rig.rehearse else WARM,
    )
    while left > 0 or time.perf_counter() < end:
        _timed(rig, call, False)
        left -= 1


def _timed(rig: Rig, call: Callable[[], Any], only_issue: bool) -> float:
    rig.settle()
    start = time.perf_counter()
    kept = call()
    issued = time.perf_counter()
    rig.settle()
    end = time.perf_counter()
    del kept  # whose memory goes back behind the clock
    return (issued if only_issue else end) - start
