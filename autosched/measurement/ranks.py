"""Measure the network of a cluster, and the devices of all its ranks.

One pair of ranks on one host, and one on two hosts, exchange rows of many sizes, and a line is
fitted to the times, as for links. Other pairs are taken to be alike. Each rank measures its own
devices. All ranks get the same machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch

from autosched._lib.process_group import ProcessGroup
from autosched.machine.cluster import joined
from autosched.machine.machine import Device, Link, Machine, Network
from autosched.measurement.machines import SIZES, fitted, is_possible

__all__ = ["measured_cluster", "network_of"]

_SECONDS = 2.0  # for each size, about
Lines = Mapping[str, tuple[float, float]]  # by kind of pair, bytes per second and latency


def measured_cluster(machine: Machine, repeat: int, own: Callable[[Machine], Machine]) -> Machine:
    """Return the machine of all ranks with its network as measured. Collective.

    ``own`` measures the machine of one rank.
    """
    group = joined()
    lines: dict[str, Any] = {}
    for kind, pair in _pairs(machine).items():
        group.gather("measure_machine()", ())  # nobody else is busy
        if group.rank in pair:
            seconds = _seconds(group, *pair, repeat)
            lines |= {kind: fitted(seconds)} if group.rank == pair[0] else {}
    mine = own(_part(machine, group.rank))
    return _joined(machine, group.texts("measured machines", json.dumps([lines, mine.to_json()])))


def _pairs(machine: Machine) -> dict[str, tuple[int, int]]:
    """Return the first pair of ranks on one host, and the first on two, if there are any."""
    hosts = {machine.ranks[name]: host for name, host in machine.hosts.items()}
    found: dict[str, tuple[int, int]] = {}
    for a, b in combinations(hosts, 2):
        found.setdefault("near" if hosts[a] == hosts[b] else "far", (a, b))
        if len(found) == 2:
            break
    return found


def _seconds(group: ProcessGroup, first: int, second: int, repeat: int) -> dict[int, float]:
    """Return the least seconds of a row from one rank to the other, by size.

    The first one says how many round trips there are of each size, so that none takes long.
    """
    is_first = group.rank == first
    other = second if is_first else first
    out, back = group.way(first, second), group.way(second, first)
    steps = (out.send, back.recv) if is_first else (out.recv, back.send)
    found: dict[int, float] = {}
    rate = 0.0  # of the last size, seconds per byte in both directions
    try:
        for size in SIZES:
            trips = repeat if not rate else max(1, min(repeat, int(_SECONDS / (rate * size))))
            count = torch.tensor([1 + trips])  # the first one warms up
            steps[0]([count], other, 0).wait()
            row = torch.zeros(size, dtype=torch.uint8)
            seconds = []
            for _ in range(int(count)):
                begun = time.perf_counter()
                for step in steps:
                    step([row], other, 0).wait()
                seconds.append(time.perf_counter() - begun)
            rate = min(seconds[1:]) / size
            found[size] = min(seconds[1:]) / 2
    except RuntimeError as error:
        raise group.lost(f"to measure the network with rank {other}", other, error) from error
    return found


def _part(machine: Machine, rank: int) -> Machine:
    """Return the devices of a rank, and the links between them."""
    own = {name for name, number in machine.ranks.items() if number == rank}
    links = tuple(link for link in machine.links if {link.source, link.destination} <= own)
    devices = tuple(device for device in machine.devices if device.name in own)
    return replace(machine, devices=devices, links=links, network=None)


def _joined(machine: Machine, texts: Sequence[str]) -> Machine:
    """Return the machine, with what the ranks have measured."""
    lines: dict[str, Any] = {}
    devices: dict[str, Device] = {}
    links: dict[tuple[str, str], Link] = {}
    for found, text in map(json.loads, texts):
        lines |= found
        part = Machine.from_json(text)
        devices |= {device.name: device for device in part.devices}
        links |= {(link.source, link.destination): link for link in part.links}
    known = {kind: line for kind, line in lines.items() if is_possible(line)}
    return replace(
        machine,
        devices=tuple(devices[device.name] for device in machine.devices),
        links=tuple(links[link.source, link.destination] for link in machine.links),
        network=machine.network and network_of(machine.network, known),
    )


def network_of(network: Network, lines: Lines) -> Network:
    """Return a network with measured rates; ``"near"`` are those of ranks on one host.

    >>> network_of(Network(1e9, on_host=Network(5e9)), {"far": (2e9, 1e-4)})
    Network(bytes_per_second=2000000000.0, latency=0.0001, direct=False, \
on_host=Network(bytes_per_second=5000000000.0, latency=0.0, direct=False, on_host=None))
    >>> network_of(Network(1e9), {"near": (2e9, 0.0)}).bytes_per_second
    2000000000.0
    """
    near, far = (lines.get(kind) for kind in ("near", "far"))
    if near is not None and far is None and network.on_host is None:  # of one host
        far, near = near, None
    if far is not None:
        network = replace(network, bytes_per_second=far[0], latency=far[1])
    if near is not None:
        network = replace(network, on_host=Network(*near))
    return network
