"""Rough figures of common hardware: links, GPUs, CPUs and disks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping

from autosched.errors import MachineError
from autosched.machine.device import Device, Link, device_line, link_line
from autosched.machine.network import Network, network_line

__all__ = ["CPU_RATES", "DISK_LATENCY", "EVENT_SECONDS", "GPU", "ISSUE_SECONDS", "LINKS"]
__all__ += ["described", "links_of", "memory_of"]

# Achieved bytes per second in one direction (about 80% of the nominal rate), and seconds of
# latency.
LINKS: Mapping[str, tuple[float, float]] = {
    "pcie3": (12e9, 1e-5),
    "pcie4": (25e9, 1e-5),
    "pcie5": (50e9, 1e-5),
    "nvlink3": (240e9, 1e-5),
    "nvlink4": (360e9, 1e-5),
}
DISK_LATENCY = 1e-4  # seconds, of an SSD
# Factor on the rate, since the driver first copies all bytes to page-locked memory; reports range
# from 0.3 to 0.7.
_PAGEABLE = 0.5
CPU_RATES = (50e9, 10e9, 5e-6)
_USABLE = 15 / 16  # usable share of a GPU's memory; contexts, workspaces and rounding take the rest
_GPU_RATES = (20e12, 1e12, 5e-6)
GPU = Device("cuda:0", 1, *_GPU_RATES)
_ASSUMED = " (rates are assumed, not measured)"
ISSUE_SECONDS = 5e-6  # of Python and the driver, for an operator that is one kernel
EVENT_SECONDS = 1e-6


def described(
    devices: Iterable[Device], links: Iterable[Link], network: Network | None, imagined: bool
) -> Iterator[str]:
    """Yield a line of text for each part of a machine; rates of a real one may be assumed."""
    for device in devices:
        rates = device.flops_per_second, device.bytes_per_second, device.launch_seconds
        rough = rates in (CPU_RATES, _GPU_RATES)
        yield device_line(device) + (_ASSUMED if rough and not imagined else "")
    for link in links:
        rough = (link.bytes_per_second, link.latency) in LINKS.values() and not imagined
        yield link_line(link) + (_ASSUMED if rough else "")
    if network is not None:
        yield network_line(network)


def memory_of(kind: str, index: int, wanted: int, count: int) -> float:
    """Return the bytes of one of ``wanted`` logical devices that share ``count`` real ones."""
    import torch

    sharers = len(range(index, wanted, count))
    with contextlib.suppress(AssertionError, AttributeError, RuntimeError):
        properties = torch.get_device_module(kind).get_device_properties(index)
        return float(properties.total_memory) * _USABLE / sharers
    return math.inf  # torch does not report it


def links_of(
    gpus: list[str],
    link: str,
    bytes_per_second: float | None,
    latency: float | None,
    cpu: str = "cpu",
) -> list[Link]:
    """Return the links of a CPU with GPUs, and of these; figures that are given replace the named.

    Raises MachineError for an unknown name.
    """
    if not isinstance(link, str) or link not in LINKS:
        raise MachineError(f"unknown link {link!r}; known are {', '.join(map(repr, LINKS))}")
    between = LINKS[link]
    to_host = LINKS["pcie4" if link.startswith("nvlink") else link]

    def make(source: str, destination: str, rates: tuple[float, float]) -> Link:
        rate = rates[0] if bytes_per_second is None else bytes_per_second
        slow = rate * _PAGEABLE if source == cpu else None
        return Link(source, destination, rate, rates[1] if latency is None else latency, slow)

    pairs = [(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :]]
    return [make(cpu, gpu, to_host) for gpu in gpus] + [make(a, b, between) for a, b in pairs]
