"""Lower bounds from unavoidable copies and the copy streams that carry them.

Knows where tasks may run and what they read; no order. Copy streams are one per device and
direction, not one per pair of devices, because all copies out of a device share its port.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from autosched.bounds.load import shared
from autosched.bounds.relaxation import Array, Relaxation, links, readers
from autosched.machine.machine import Machine
from autosched.problem import Problem

__all__ = ["copies", "places"]


class _Copy(NamedTuple):
    """A copy that must be made from one of some devices to one of others; both are bit sets."""

    nbytes: float
    pageable: bool
    sources: int
    destinations: int


def copies(relaxed: Relaxation, machine: Machine) -> float:
    """Return the time that copy streams need for copies that constraints force.

    A datum is copied if none of the devices where it may be produced, or where it is, may run a
    reader. It is copied from there, or from the host if memory is short and it may have been
    spilled. Copies out of devices and into devices are two loads, each distributed optimally. A
    copy between a CPU and an accelerator occupies a stream of the accelerator alone. Data that no
    link carries are forwarded by other devices, and count nothing. Without contention the result is
    0.
    """
    if not machine.contention:
        return 0.0
    short = any(
        math.isfinite(device.nbytes) for device in machine.devices if device.name != machine.host
    )
    host = 1 << machine.names.index(machine.host) if short else 0
    forced = _forced(relaxed)
    coming = [
        copy._replace(sources=copy.sources | host) for of_datum in forced for copy in of_datum
    ]
    # Where memory is short, a datum may be spilled to the host once, and be reloaded as often
    # as necessary.
    leaving = [copy for of_datum in forced for copy in (of_datum[:1] if short else of_datum)]
    leaving = [copy._replace(destinations=copy.destinations | host) for copy in leaving]
    return max(
        _load(relaxed.problem, coming, into=True), _load(relaxed.problem, leaving, into=False)
    )


def places(relaxed: Relaxation) -> list[int]:
    """Return by task the devices where its whole group can run, as a bit set."""
    bits = np.isfinite(relaxed.seconds) @ np.array(
        [1 << p for p in range(len(relaxed.streams))], object
    )
    group = relaxed.group.tolist()
    found = dict.fromkeys(group, -1)
    for here, devices in zip(group, bits, strict=True):
        found[here] &= devices
    return [found[here] for here in group]


def _forced(relaxed: Relaxation) -> list[list[_Copy]]:
    """Return for each datum copies that are all necessary and pairwise different."""
    problem = relaxed.problem
    t = problem.lists
    possible = places(relaxed)
    users = readers(problem)
    back = dict(problem.returns)
    found = []
    for datum in dict.fromkeys([*back, *range(len(users))]):
        maker = t.maker[datum]
        sources = 1 << t.home[datum] if maker < 0 else possible[maker]
        others = [u for u in users[datum] if maker < 0 or t.group[u] != t.group[maker]]
        ends = [possible[task] for task in others]
        if datum in back:
            ends.append(1 << back[datum])
        taken = sources
        copies = []
        for destinations in sorted(dict.fromkeys(ends), key=int.bit_count):
            if sources and destinations and not destinations & taken:
                taken |= destinations
                pageable = t.row[datum] >= len(problem.devices)
                copies.append(_Copy(t.nbytes[datum], pageable, sources, destinations))
        found.append(copies)
    return found


def _load(problem: Problem, copies: Sequence[_Copy], into: bool) -> float:
    """Return how long the copy streams into devices, or out of them, are busy at least."""
    devices = range(len(problem.devices))
    holds = problem.tables.holds_in if into else problem.tables.holds_out
    held = holds[: len(devices) ** 2].reshape(len(devices), -1).astype(bool)

    @cache
    def rate(pageable: bool, sources: int, destinations: int) -> Array:
        """Return latency and seconds per byte by device.

        Infinite latency where no such copy is possible.
        """
        table = np.stack(links(problem, pageable))
        table = np.where(held & np.isfinite(table), table, 0.0)
        q = [p for p in devices if sources >> p & 1]
        p = [p for p in devices if destinations >> p & 1 and (into or not sources >> p & 1)]
        found = np.zeros((2, len(devices)))
        found[0] = math.inf
        if into:
            inner = table[:, q][:, :, p]
            found[:, p] = np.where(np.equal.outer(q, p), math.inf, inner).min(axis=1)
        else:
            found[:, q] = table[:, q][:, :, p].min(axis=2)
        return found

    rows = [each[0] + copy.nbytes * each[1] for copy in copies for each in (rate(*copy[1:]),)]
    return shared(np.array(rows), np.ones(len(devices))) if rows else 0.0
