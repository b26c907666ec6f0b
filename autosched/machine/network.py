"""Define networks, which join the devices of different ranks.

A *rank* is a process that holds some devices. Within a rank, links join devices one by one. Between
ranks, one network joins the CPUs of all of them alike, so that a cluster of 1,000 ranks needs no
million links. A copy between devices that no link joins goes by way of the CPUs of their ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autosched.errors import MachineError
from autosched.machine.device import Device, Link

__all__ = ["NETWORKS", "Network", "named_network", "network_line"]

# Achieved bytes per second in one direction (about 80% of the nominal rate), and seconds of
# latency. They are rough; the latency is that of a message between two processes.
NETWORKS: Mapping[str, tuple[float, float]] = {
    "ethernet10": (1e9, 5e-5),
    "ethernet25": (2.5e9, 5e-5),
    "ethernet100": (10e9, 5e-5),
    "infiniband200": (20e9, 2e-5),
    "infiniband400": (40e9, 2e-5),
}


@dataclass(frozen=True)
class Network:
    """A network between the CPUs of all ranks, with the same rate for each pair.

    With ``direct`` it joins accelerators of different ranks, too, without a stop in host memory.
    Ranks of one host have the rate and latency of ``on_host``, if that is given.

    >>> network = Network(10e9, latency=5e-5, on_host=Network(20e9))
    >>> network.direct, network.on_host.bytes_per_second
    (False, 20000000000.0)
    """

    bytes_per_second: float
    latency: float = 0.0
    direct: bool = False
    on_host: Network | None = None

    def __post_init__(self) -> None:
        Link("cpu:0", "cpu:1", self.bytes_per_second, self.latency)  # checks both
        if not isinstance(self.direct, bool):
            raise MachineError(f"direct of a network must be True or False, got {self.direct!r}")
        near = self.on_host
        if near is not None and (not isinstance(near, Network) or near.on_host is not None):
            given = f"got {near!r}"
            raise MachineError(f"on_host of a network must be a network of one host, {given}")

    def link(self, source: Device, destination: Device) -> Link | None:
        """Return the link between devices of two ranks, or None."""
        if source.rank is None or destination.rank is None or source.rank == destination.rank:
            return None
        on_hosts = (source.kind == "cpu") + (destination.kind == "cpu")
        if on_hosts == 2 or (self.direct and not on_hosts):
            is_near = source.host is not None and source.host == destination.host
            used = self.on_host if is_near and self.on_host is not None else self
            return Link(source.name, destination.name, used.bytes_per_second, used.latency)
        return None

    def slower(self, factor: float) -> Network:
        """Return this network with its rate divided and its latency multiplied by ``factor``."""
        rate = self.bytes_per_second / factor
        near = self.on_host and self.on_host.slower(factor)
        latency = self.latency * factor
        return replace(self, bytes_per_second=rate, latency=latency, on_host=near)


def named_network(network: str | Network) -> Network:
    """Return a network of this name in ``NETWORKS``, or the network itself."""
    if isinstance(network, Network):
        return network
    if not isinstance(network, str) or network not in NETWORKS:
        known = ", ".join(map(repr, NETWORKS))
        raise MachineError(f"unknown network {network!r}; known are {known}, or a Network")
    return Network(*NETWORKS[network])


def network_line(network: Network) -> str:
    """Describe a network in one line of text."""
    ends = "CPUs, and accelerators," if network.direct else "CPUs"
    rates = _rates(network)
    if network.on_host is not None:
        rates += f"; on one host {_rates(network.on_host)}"
    return f"network between the {ends} of all ranks: {rates}"


def _rates(network: Network) -> str:
    return f"{network.bytes_per_second / 1e9:,.4g} GB/s, {network.latency * 1e6:,.4g} us"
