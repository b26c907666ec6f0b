"""Find the slowdown at which this CPU can emulate a machine.

Compares what all devices and links do concurrently with the measured performance of this CPU:
products of matrices, sums of long vectors, and the time to issue a task. Knows no graph but one of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autosched.costs.costs import Costs
from autosched.graph.graph import Graph
from autosched.machine.machine import Device, Link, Machine
from autosched.measurement.stopwatch import median_seconds
from autosched.policies import in_order
from autosched.runtime.backends.emulated import Emulated, rounded_up
from autosched.scheduling.planning import schedule

__all__ = ["emulation_slowdown"]

_SIZE = 384  # of square matrices
_LENGTH = 1 << 21  # of vectors, 8 MiB each
_TASKS = 40
_REPEAT = 5


def emulation_slowdown(machine: Machine) -> int:
    """Return the factor for ``Machine.slower`` at which this CPU keeps up with a machine."""
    a = torch.ones(_SIZE, _SIZE)
    b = torch.ones(_SIZE, _SIZE)
    flops = 2 * _SIZE**3 / _seconds(lambda: torch.mm(a, b))
    x = torch.ones(_LENGTH)
    y = torch.empty(_LENGTH)
    nbytes = 2 * x.nbytes / _seconds(lambda: y.copy_(x))
    issued = _issuing()
    devices = [device for device in machine.devices if not device.is_storage]
    launches = [device.launch_seconds for device in devices if device.launch_seconds]
    return rounded_up(
        max(
            1.0,
            _finite_sum(device.flops_per_second for device in devices) / flops,
            _finite_sum(device.bytes_per_second for device in devices) / nbytes,
            _finite_sum(link.bytes_per_second for link in machine.links) / nbytes,
            *(len(devices) * issued / seconds for seconds in launches),
        )
    )


def _finite_sum(rates: Iterable[float]) -> float:
    return sum(rate for rate in rates if rate < math.inf)


def _seconds(call: Callable[[], Any]) -> float:
    with torch.no_grad():
        return max(median_seconds(call, _REPEAT), 1e-9)


def _issuing() -> float:
    """Return the seconds to issue an emulated task without computation, one after another."""
    graph = Graph("issuing")
    x = graph.input("x")
    for number in range(_TASKS):
        x = graph.add(abs, x, name=f"task{number}", on=f"cuda:{number % 2}", seconds=0.0)
    graph.output(x=x)
    devices = [Device("cpu"), Device("cuda:0"), Device("cuda:1")]
    links = [Link("cpu", name, math.inf) for name in ("cuda:0", "cuda:1")]
    fast = Machine(devices, [*links, Link("cuda:0", "cuda:1", 1e30)], imagined=True)
    with schedule(graph, fast, policy=in_order({}), costs=Costs(), backend=Emulated()) as made:
        made(x=1)
        return _seconds(lambda: made(x=1)) / _TASKS
