"""Define machines, real or imagined, as plain data.

A machine knows rates and latencies, no task and no tensor. Only ``Machine.local`` and the functions
that it calls import torch.

A GPU's memory counts for 15/16 of its size. Contexts, workspaces (32 MiB for each stream that
multiplies matrices, on Hopper) and rounding (512 B for each block, up to 1 MiB for large ones) are
not predicted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal

from autosched._lib.allowed import device_name, is_device, is_number, is_storage, is_whole
from autosched._lib.json_reader import each, json_data, parse, perhaps, record
from autosched.errors import MachineError, ScheduleError, listed, shown
from autosched.machine.device import (
    Device,
    Link,
    Network,
    device_line,
    link_line,
    named_network,
    network_line,
    slower,
)

__all__ = ["LINKS", "READER", "Device", "Link", "Machine", "Network"]

# ---- rough figures of common hardware

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


def memory_of(kind: str, index: int, wanted: int, count: int) -> float:
    """Return the bytes of one of ``wanted`` logical devices that share ``count`` real ones."""
    import torch

    sharers = len(range(index, wanted, count))
    with contextlib.suppress(AssertionError, AttributeError, RuntimeError):
        properties = torch.get_device_module(kind).get_device_properties(index)
        return float(properties.total_memory) * _USABLE / sharers
    return math.inf  # torch does not report it


def links_of(
    gpus: list[str], link: str, bytes_per_second: float | None, latency: float | None
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
        slow = rate * _PAGEABLE if source == "cpu" else None
        return Link(source, destination, rate, rates[1] if latency is None else latency, slow)

    pairs = [(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :]]
    return [make("cpu", gpu, to_host) for gpu in gpus] + [make(a, b, between) for a, b in pairs]


# ---- machines


@dataclass(frozen=True)
class Machine:
    """Devices and links. Devices without a link exchange data by way of others.

    With ``contention`` (the default) copies occupy copy streams: copies that leave a device run one
    after another, and so do copies that enter it. Without, copies take time but occupy nothing, as
    in most of the literature. ``imagined`` machines are emulated. By default a machine is imagined
    if one of its devices is, so a machine made of the devices of ``Machine.emulated``, or of copies
    of them, is emulated, too.

    A machine may span several ranks, that is, processes, on one host or many; then each of its
    devices has a ``rank``. A ``network`` joins the CPUs of all ranks.

    >>> machine = Machine.emulated(gpus=2, link="pcie4")
    >>> machine.names
    ('cpu', 'cuda:0', 'cuda:1')
    >>> machine.copy_seconds("cpu", "cuda:1", 25_000_000)
    0.00101
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    contention: bool = True
    imagined: bool = False
    network: Network | None = None

    def __init__(
        self,
        devices: Iterable[Device],
        links: Iterable[Link] = (),
        *,
        contention: bool = True,
        imagined: bool | None = None,
        network: Network | None = None,
    ):
        for field, items in (("devices", devices), ("links", links)):
            if not isinstance(items, Iterable):
                raise MachineError(f"{field} of a machine must be a list, got {items!r}")
        given = tuple(devices)
        if imagined is None:
            imagined = any(getattr(device, "imagined", False) for device in given)
        marked = tuple(
            replace(device, imagined=imagined)
            if getattr(device, "imagined", imagined) != imagined
            else device
            for device in given
        )
        parts = {"devices": marked, "links": tuple(links), "contention": contention}
        for name, part in (parts | {"imagined": imagined, "network": network}).items():
            object.__setattr__(self, name, part)
        self._check()

    # ---- constructors

    @classmethod
    def local(
        cls,
        gpus: int | None = None,
        cpu_streams: int | Literal["auto"] = 1,
        *,
        storage: float | None = None,
    ) -> Machine:
        """Return the machine on which this process runs, as ``torch.accelerator`` reports it.

        ``gpus`` is the number of GPUs to use (default: all); a larger number makes logical devices
        that share the real ones. ``cpu_streams`` is the number of tasks that the CPU may run
        concurrently; they share its intra-op threads. ``"auto"`` allows as many as there are
        threads: ``policy="auto"`` uses fewer where they are predicted to be faster, best by measured
        costs, and fusion measures 1, 2, 4, ... The memory of a GPU is reduced by a share that tasks
        cannot use; logical devices have equal parts of it. Rates are rough defaults; profiles
        replace them. ``storage`` as for ``with_storage``. Raises MachineError for GPUs where there
        is none.
        """
        import torch

        kind = "cuda"
        count = 0
        if torch.accelerator.is_available():
            kind = str(torch.accelerator.current_accelerator())
            count = torch.accelerator.device_count()
        wanted = count if gpus is None else gpus
        _check_count("gpus", wanted)
        if wanted and not count:
            hint = f"Machine.emulated(gpus={gpus}) emulates them"
            raise MachineError(f"this machine has no accelerator, but gpus={gpus}; {hint}")
        if cpu_streams == "auto":
            cpu_streams = torch.get_num_threads()
        names = [f"{kind}:{i}" for i in range(wanted)]
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        devices = [Device("cpu", cpu_streams, *CPU_RATES, nbytes=memory)]
        gpu = replace(GPU, issue_seconds=ISSUE_SECONDS, event_seconds=EVENT_SECONDS)
        for i, name in enumerate(names):
            nbytes = memory_of(kind, i % count, wanted, count)
            devices.append(replace(gpu, name=name, physical=f"{kind}:{i % count}", nbytes=nbytes))
        made = cls(devices, links_of(names, "pcie4", None, None))
        return made if storage is None else made.with_storage(storage)

    @classmethod
    def cluster(
        cls,
        *,
        gpus: int | None = None,
        cpu_streams: int = 1,
        network: str | Network | None = None,
        timeout: float = 60.0,
    ) -> Machine:
        """Join the processes that torchrun started; return the machine of all their devices.

        ``gpus`` is the number of GPUs of this process. By default the processes of a host have
        equal shares, and share GPUs if there are too few. All have ``timeout`` seconds to come. The
        default ``network`` is loopback on one host, else 10 Gbit/s, as assumed. Unless it is a
        ``Network``, it is direct between GPUs if each process has one of its own, and NCCL is
        there. Raises MachineError, and RankError for missing ranks.
        """
        from autosched.machine.cluster import cluster, own_share

        return cluster(network, timeout, own_share(gpus, cpu_streams))

    @classmethod
    def emulated(
        cls,
        gpus: int = 2,
        link: str | None = None,
        *,
        bytes_per_second: float | None = None,
        latency: float | None = None,
        nbytes: float = math.inf,
        contention: bool = True,
        cpu_streams: int = 1,
        storage: float | None = None,
        hosts: int | None = None,
        network: str | Network = "ethernet100",
    ) -> Machine:
        """Return an imagined machine of one CPU and ``gpus`` GPUs, which this CPU emulates.

        The emulation is in real time. A task whose real work takes longer here than on the GPU also
        takes longer: see ``slower``. ``link`` is a name in ``LINKS`` (default ``"pcie4"``); NVLink
        connects the GPUs, and PCIe 4 connects them to the CPU. ``bytes_per_second`` and ``latency``
        (seconds) override the named link. ``nbytes`` is the memory of each GPU; host memory has no
        limit. ``storage`` as for ``with_storage``.

        ``hosts`` makes a cluster of as many such hosts, each held by one rank. Devices are numbered
        over all of them: ``cpu:1`` is the CPU of host 1, ``cuda:2`` its first GPU if there are two
        for each. ``network`` joins the CPUs: a name in ``NETWORKS``, or a ``Network``. Raises
        MachineError for unknown names.

        >>> Machine.emulated(gpus=1, hosts=2).names
        ('cpu:0', 'cuda:0', 'cpu:1', 'cuda:1')
        """
        _check_count("gpus", gpus)
        gpu = replace(GPU, nbytes=nbytes)
        cpu = Device("cpu", cpu_streams, *CPU_RATES)
        names = [f"cuda:{i}" for i in range(gpus)]
        devices = [cpu, *(replace(gpu, name=name) for name in names)]
        links = links_of(names, link or "pcie4", bytes_per_second, latency)
        made = cls(devices, links, contention=contention, imagined=True)
        if hosts is not None:
            from autosched.machine.cluster import joint

            _check_count("hosts", hosts, least=1)
            known = [f"host {rank}" for rank in range(hosts)]
            made = joint([made] * hosts, known, named_network(network))
        return made if storage is None else made.with_storage(storage)

    def with_storage(
        self, bytes_per_second: float, latency: float = DISK_LATENCY, *, name: str = "disk:0"
    ) -> Machine:
        """Return this machine with a storage device more, from which ``Graph.read`` reads.

        A read takes ``latency`` (seconds) plus its bytes divided by the rate. ``measure_storage``
        measures both. Raises MachineError for names unlike ``"disk:1"``, and for several ranks.

        >>> machine = Machine.emulated(gpus=1).with_storage(2e9)
        >>> machine.storage, machine.copy_seconds("disk:0", "cpu", 2e9)
        (('disk:0',), 1.0001)
        """
        if not is_device(name) or not is_storage(name):
            raise MachineError(f"a storage device is named 'disk:0' or 'disk:1', got {name!r}")
        if self.ranks:
            raise MachineError("a machine of several ranks has no storage devices")
        link = Link(name, self.host, bytes_per_second, latency)
        return replace(self, devices=(*self.devices, Device(name)), links=(*self.links, link))

    def slower(self, factor: float) -> Machine:
        """Return this machine with every rate divided and every latency multiplied by ``factor``.

        A slow CPU can then emulate a fast machine in real time: all ratios stay. A run that this
        CPU cannot keep up with says which factor it needs. Raises MachineError unless the factor
        is above 0.
        """
        if not is_number(factor) or factor == 0:
            raise MachineError(f"a machine can be slower by a number above 0, got {shown(factor)}")
        return replace(
            self,
            devices=tuple(slower(device, factor) for device in self.devices),
            links=tuple(slower(link, factor) for link in self.links),
            network=self.network and slower(self.network, factor),
        )

    def limited(self, nbytes: float) -> Machine:
        """Return this machine with at most so many bytes of memory on each accelerator.

        Schedules hold no more there: what does not fit is recomputed or spilled. Raises MachineError
        unless it is a number above 0.

        >>> Machine.emulated(gpus=1).limited(24e9).device("cuda:0").nbytes
        24000000000.0
        """
        if not is_number(nbytes) or nbytes == 0:
            raise MachineError(f"memory must be bytes above 0, such as 24e9, got {shown(nbytes)}")
        return self.with_devices(
            lambda d: replace(d, nbytes=min(d.nbytes, float(nbytes))) if d.is_accelerator else d
        )

    @cached_property
    def unlimited(self) -> Machine:
        """The machine with memory for everything on each device."""
        return self.with_devices(lambda device: replace(device, nbytes=math.inf))

    @cached_property
    def with_one_stream(self) -> Machine:
        """The machine with one compute stream on each device."""
        return self.with_devices(lambda device: replace(device, streams=1))

    def with_devices(self, change: Callable[[Device], Device]) -> Machine:
        """Return this machine with each device as ``change`` returns it."""
        return replace(self, devices=tuple(map(change, self.devices)))

    def part(self, names: Container[str]) -> Machine:
        """Return the machine of these devices, and of the links between them."""
        links = [k for k in self.links if k.source in names and k.destination in names]
        devices = [device for device in self.devices if device.name in names]
        return replace(self, devices=tuple(devices), links=tuple(links))

    # ---- queries

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the devices."""
        return tuple(device.name for device in self.devices)

    @cached_property
    def host(self) -> str:
        """The default device of inputs and constants: the first CPU, or else the first device."""
        cpus = (device.name for device in self.devices if device.kind == "cpu")
        return next(cpus, self.computing[0])

    @cached_property
    def computing(self) -> tuple[str, ...]:
        """The names of the devices that run tasks and hold their data: not of storage devices."""
        return tuple(device.name for device in self.devices if not device.is_storage)

    @cached_property
    def storage(self) -> tuple[str, ...]:
        """The names of the storage devices."""
        return tuple(device.name for device in self.devices if device.is_storage)

    @cached_property
    def accelerators(self) -> tuple[str, ...]:
        """The names of the devices that are neither CPUs nor storage devices."""
        return tuple(device.name for device in self.devices if device.is_accelerator)

    @cached_property
    def physical(self) -> dict[str, str | None]:
        """The physical device of each name; None for those of the host, and for storage.

        >>> Machine.emulated(gpus=1).physical
        {'cpu': None, 'cuda:0': 'cuda:0'}
        """
        return {d.name: (d.physical or d.name) if d.is_accelerator else None for d in self.devices}

    def device(self, name: str) -> Device:
        """Return a device by name. Raises MachineError if there is none."""
        known = device_name(name)
        found = self._by_name.get(known) if isinstance(known, str) else None
        if found is None:
            has = ", ".join(map(repr, self.names))
            raise MachineError(f"the machine has no device {name!r}; it has {has}")
        return found

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of each device, sorted by rank; empty if the machine does not span several.

        >>> Machine.emulated(gpus=0, hosts=2).ranks
        {'cpu:0': 0, 'cpu:1': 1}
        """
        ranks = [(device.name, device.rank) for device in self.devices if device.rank is not None]
        return dict(sorted(ranks, key=itemgetter(1)))

    @cached_property
    def hosts(self) -> dict[str, str]:
        """The host of each device, or else its rank, if the machine spans several ranks."""
        return {d.name: d.host or f"rank {d.rank}" for d in self.devices if d.rank is not None}

    @property
    def rank(self) -> int | None:
        """The rank of this process, if it has joined others that have these devices; else None."""
        from autosched.machine.cluster import rank_among

        return None if self.imagined else rank_among(self.ranks)

    @property
    def here(self) -> tuple[str, ...]:
        """The names of the devices of this process: all of them, if there are no ranks."""
        return tuple(n for n in self.names if self.rank in (None, self.ranks.get(n)))

    def link(self, source: str, destination: str) -> Link | None:
        """Return the link between two devices, or None."""
        ends = device_name(source), device_name(destination)
        if self.network is not None and ends not in self._by_ends:  # all would be millions
            near, far = map(self._by_name.get, ends)
            known = None if near is None or far is None else self.network.link(near, far)
            self._by_ends[ends] = known
        return self._by_ends.get(ends)

    def route(self, source: str, destination: str) -> tuple[str, ...]:
        """Return the devices that a copy passes, with both ends; empty if there is no way.

        Where no link joins the ends, it goes by way of the CPUs of their ranks, or else of other
        devices, over as few links as possible.

        >>> Machine.emulated(gpus=1, hosts=2).route("cuda:0", "cuda:1")
        ('cuda:0', 'cpu:0', 'cpu:1', 'cuda:1')
        """
        near, far = map(self.front, (source, destination))
        for stops in ((), (near,), (far,), (near, far)):
            way = (source, *stops, destination)
            if None not in way and len({*way}) == len(way) and all(map(self.link, way, way[1:])):
                return way
        ways: dict[str, tuple[str, ...]] = {source: (source,)}
        for name in (queue := [source]):
            for other in self._neighbours.get(name, ()):
                if other not in ways:
                    ways[other] = (*ways[name], other)
                    queue.append(other)
        return ways.get(destination, ())

    def copy_seconds(
        self, source: str, destination: str, nbytes: float, pageable: bool = False
    ) -> float:
        """Return the seconds of a copy: 0 on one device, infinity without a way.

        ``pageable`` says whether it is from or to host memory that is not page-locked. Where no
        link joins the devices, these are the seconds of all copies on the way: see ``route``.

        >>> Machine.emulated(gpus=1).copy_seconds("cpu", "cuda:0", 25_000_000, pageable=True)
        0.00201
        """
        source, destination = device_name(source), device_name(destination)
        if source == destination:
            return 0.0
        if (link := self.link(source, destination)) is not None:
            return link.seconds(nbytes, pageable)
        way = self.route(source, destination)
        links = [link for ends in pairwise(way) if (link := self.link(*ends)) is not None]
        return sum(link.seconds(nbytes, pageable) for link in links) if links else math.inf

    def front(self, name: str) -> str | None:
        """Return the CPU that receives and sends for the rank of a device, if there is one."""
        return self._front.get(self.ranks.get(name))

    @cached_property
    def _front(self) -> dict[int | None, str]:
        """The first CPU of each rank, which receives for it and sends."""
        cpus = (device for device in reversed(self.devices) if device.kind == "cpu")
        return {device.rank: device.name for device in cpus if device.rank is not None}

    @cached_property
    def _by_name(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _by_ends(self) -> dict[tuple[str, str], Link | None]:
        found: dict[tuple[str, str], Link | None] = {}
        for link in self.links:
            found[link.source, link.destination] = found[link.destination, link.source] = link
        return found

    @cached_property
    def _neighbours(self) -> dict[str, list[str]]:
        """The devices to which copies go from each device, apart from a network's: none is storage."""
        found: dict[str, list[str]] = {}
        for link in self.links:
            ends = link.source, link.destination
            for source, destination in (ends, ends[::-1]):
                if not is_storage(destination):
                    found.setdefault(source, []).append(destination)
        return found

    def __repr__(self) -> str:
        lines = []
        for device in self.devices:
            rates = device.flops_per_second, device.bytes_per_second, device.launch_seconds
            rough = rates in (CPU_RATES, _GPU_RATES) and not self.imagined
            lines.append(device_line(device) + _ASSUMED * rough)
        for link in self.links:
            rough = (link.bytes_per_second, link.latency) in LINKS.values() and not self.imagined
            lines.append(link_line(link) + _ASSUMED * rough)
        return "\n".join([*lines, *map(network_line, filter(None, [self.network]))])

    # ---- JSON

    def to_json(self) -> str:
        """Return the machine as JSON; infinite rates and memory are the string "inf"."""
        return json.dumps(json_data(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Read the text of ``to_json``. Raises MachineError naming what is malformed.

        >>> machine = Machine.emulated(gpus=1)
        >>> Machine.from_json(machine.to_json()) == machine
        True
        """
        try:
            machine: Machine = parse(text, READER)
        except ScheduleError as error:
            raise MachineError(f"not the JSON of a machine: {error}") from error
        return machine

    def _check(self) -> None:
        if not self.devices:
            raise MachineError("a machine needs at least one device")
        for device in self.devices:
            if not isinstance(device, Device):
                raise MachineError(f"a machine's devices must be Device, got {device!r}")
        if len(self._by_name) < len(self.names):
            name = next(name for name in self.names if self.names.count(name) > 1)
            raise MachineError(f"device {name!r} occurs twice")
        if 0 < len(self.ranks) < len(self.names):
            name = next(name for name in self.names if name not in self.ranks)
            raise MachineError(f"device {name!r} has no rank, and others have one")
        if not isinstance(self.network, Network | None):
            raise MachineError(f"network must be a Network or None, got {self.network!r}")
        for link in self.links:
            if not isinstance(link, Link):
                raise MachineError(f"a machine's links must be Link, got {link!r}")
            for end in (link.source, link.destination):
                self.device(end)
            if link.source == link.destination:
                raise MachineError(f"a link joins two devices, got {link.source!r} twice")
        self._check_storage()
        if len(self._by_ends) != 2 * len(self.links):
            pairs = [frozenset((link.source, link.destination)) for link in self.links]
            twice = next(sorted(pair) for pair in pairs if pairs.count(pair) > 1)
            ends = " and ".join(map(repr, twice))
            raise MachineError(f"devices {ends} have two links; one works both ways")
        for flag in ("contention", "imagined"):
            if not isinstance(getattr(self, flag), bool):
                raise MachineError(f"{flag} must be True or False, got {getattr(self, flag)!r}")

    def _check_storage(self) -> None:
        """Raise MachineError unless each storage device is linked to the host alone."""
        if not self.computing:
            raise MachineError("a machine needs a device that is no storage device")
        for name in self.storage:
            pairs = [{link.source, link.destination} for link in self.links]
            ends = set().union(*(pair - {name} for pair in pairs if name in pair))
            if ends != {self.host}:
                raise MachineError(
                    f"storage device {name!r} must be linked to the host, {self.host!r}, alone; "
                    f"it is linked to {listed(sorted(ends))}"
                )


def given_or_local(machine: Machine | None) -> Machine:
    """Return the machine, by default the local one. Raises MachineError for other types."""
    if machine is None:
        return Machine.local()
    if not isinstance(machine, Machine):
        hint = "Machine.local() and Machine.emulated() make one"
        raise MachineError(f"machine must be a Machine, got {shown(machine)}; {hint}")
    return machine


def _check_count(name: str, count: Any, least: int = 0) -> None:
    if not is_whole(count) or count < least:
        raise MachineError(f"{name} must be a whole number, {least} or more, got {count!r}")


READER = record(
    Machine,
    devices=each(record(Device)),
    links=each(record(Link)),
    network=perhaps(record(Network, on_host=perhaps(record(Network)))),
)
