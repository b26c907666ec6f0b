"""Define devices, links and networks as plain data.

They know no machine, no task and no tensor. A link has one rate for both directions, the slower
one: the two differ by less than a tenth, and two rates would double the number of paths.

A *rank* is a process that holds some devices. Within a rank, links join devices one by one. Between
ranks, one network joins the CPUs of all of them alike, so that a cluster of 1,000 ranks needs no
million links. A copy between devices that no link joins goes by way of the CPUs of their ranks, or of
other devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from autosched._lib.allowed import device_name, is_device, is_number, is_storage, is_whole
from autosched._lib.text import count
from autosched.errors import MachineError, shown

_Part = TypeVar("_Part", "Device", "Link", "Network")

# Achieved bytes per second in one direction (about 80% of the nominal rate), and seconds of
# latency. They are rough; the latency is that of a message between two processes.
NETWORKS: Mapping[str, tuple[float, float]] = {
    "ethernet10": (1e9, 5e-5),
    "ethernet25": (2.5e9, 5e-5),
    "ethernet100": (10e9, 5e-5),
    "infiniband200": (20e9, 2e-5),
    "infiniband400": (40e9, 2e-5),
}
_STREAMS = 24  # torch reuses its 32 streams per device round robin, and copies need some of them


@dataclass(frozen=True)
class Device:
    """A device, named as in torch: ``"cpu"``, ``"cuda:0"``, ``torch.device("cuda:0")`` or 0.

    ``streams`` is the number of compute streams that it may use (up to 24; a CPU up to 1024).
    ``flops_per_second`` and ``bytes_per_second`` of memory are rates of the device, which one
    stream can reach and several share, and ``launch_seconds`` is the time to launch an operator.
    ``nbytes`` of memory is a hard limit: no schedule holds more there. ``physical`` is the torch
    device that the name stands for, if it differs (several logical devices on one GPU).
    ``imagined`` devices are emulated; devices of ``Machine.emulated`` are, and so is a copy with
    other rates.

    ``issue_seconds`` is the time for which a thread of the host is busy issuing an operator or a
    copy to an accelerator, ``event_seconds`` the same for a record or a wait. One thread issues all
    streams that do not wait for the CPU, so these times add up over streams, while launches on
    different streams overlap. 0, the default, means that issuing is free.

    Devices named ``"disk:0"``, ``"disk:1"`` are storage devices. They run no tasks but those of
    ``Graph.read``, have one stream, and are linked to the host alone; their rates mean nothing.

    ``rank`` is the number of the process that holds the device, where a machine spans several;
    ``host`` is the name of the computer on which that process runs, for pictures and messages.

    >>> Device("cuda:1").kind
    'cuda'
    """

    name: str
    streams: int = 1
    flops_per_second: float = 10e12
    bytes_per_second: float = 1e12
    launch_seconds: float = 5e-6
    nbytes: float = math.inf  # of memory
    physical: str | None = None
    issue_seconds: float = 0.0
    event_seconds: float = 0.0
    rank: int | None = None
    host: str | None = None
    # Not saved: the JSON of the machine has it.
    imagined: bool = field(default=False, compare=False, repr=False, metadata={"saved": False})

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", device_name(self.name))
        object.__setattr__(self, "physical", device_name(self.physical))
        if not is_device(self.name):
            what = "a device is named as in torch, 'cpu' or 'cuda:0'"
            raise MachineError(f"{what}, got {self.name!r}")
        most = 1024 if self.kind == "cpu" else 1 if self.is_storage else _STREAMS
        if not is_whole(self.streams) or not 1 <= self.streams <= most:
            raise MachineError(
                f"device {self.name!r} has {shown(self.streams)} streams; 1 to {most} are possible"
            )
        _check_numbers(self, "flops_per_second", "bytes_per_second", "nbytes", is_above_0=True)
        _check_numbers(self, "launch_seconds", "issue_seconds", "event_seconds")
        is_rank = is_whole(self.rank) and (self.rank or 0) >= 0
        for name, fits, what in (
            ("physical", is_device(self.physical), "as 'cuda:0'"),
            ("rank", is_rank, "a whole number, 0 or more,"),
            ("host", isinstance(self.host, str), "a name"),
        ):
            if (given := getattr(self, name)) is not None and not fits:
                wanted = f"{name} of device {self.name!r} must be {what} or None"
                raise MachineError(f"{wanted}, got {shown(given)}")

    @property
    def kind(self) -> str:
        """The part of the name before the colon: ``"cpu"``, ``"cuda"``, ``"disk"``."""
        return self.name.partition(":")[0]

    @property
    def hardware(self) -> tuple[str | None, str]:
        """The host and the name of the physical device, which several names may stand for."""
        return self.host, self.physical or self.name

    @property
    def is_storage(self) -> bool:
        """Whether this is a storage device, from which ``Graph.read`` reads: ``"disk:0"``."""
        return is_storage(self.name)

    @property
    def is_accelerator(self) -> bool:
        """Whether threads of the host issue its work: not that of a CPU or a storage device."""
        return self.kind != "cpu" and not self.is_storage

    @property
    def has_issuing(self) -> bool:
        """Whether work for this device has to be issued, and that takes time."""
        return self.is_accelerator and (self.issue_seconds > 0 or self.event_seconds > 0)


@dataclass(frozen=True)
class Link:
    """A link between two devices, with the same rate in both directions.

    The directions do not disturb each other. A copy takes ``latency`` (seconds) plus its bytes
    divided by the rate. A link with ``bytes_per_second=inf, latency=0`` is
    free. ``pageable_bytes_per_second`` is the rate of copies from or to host memory that is not
    page-locked, at most ``bytes_per_second``; None, the default, means the same rate. The model
    ignores that such a copy also blocks the thread that issues it.

    >>> Link("cpu", "cuda:0", bytes_per_second=1e9, latency=1e-5).seconds(1e9)
    1.00001
    """

    source: str
    destination: str
    bytes_per_second: float
    latency: float = 0.0
    pageable_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", device_name(self.source))
        object.__setattr__(self, "destination", device_name(self.destination))
        _check_numbers(self, "bytes_per_second", is_above_0=True)
        _check_numbers(self, "latency")
        if self.pageable_bytes_per_second is not None:
            _check_numbers(self, "pageable_bytes_per_second", is_above_0=True)
            if self.pageable_bytes_per_second > self.bytes_per_second:
                raise MachineError(
                    f"pageable_bytes_per_second of {shown(self)} must be at most bytes_per_second"
                )

    def seconds(self, nbytes: float, pageable: bool = False) -> float:
        """Return the seconds of a copy, from or to ``pageable`` host memory or other memory."""
        rate = self.pageable_bytes_per_second if pageable else None
        return self.latency + nbytes / (self.bytes_per_second if rate is None else rate)


def device_line(device: Device) -> str:
    """Describe a device in one line of text."""
    if device.is_storage:
        return f"{device.name}: storage"
    memory = "" if math.isinf(device.nbytes) else f", {device.nbytes / 2**30:.0f} GiB"
    physical = f" (on {device.physical})" if device.physical not in (None, device.name) else ""
    issue = f", {_figure(device.issue_seconds * 1e6)} us to issue" if device.has_issuing else ""
    rank = "" if device.rank is None else f" of rank {device.rank}"
    return (
        f"{device.name}{rank}: {_figure(device.flops_per_second / 1e9)} GFLOP/s, "
        f"{_figure(device.bytes_per_second / 1e9)} GB/s, "
        f"{_figure(device.launch_seconds * 1e6)} us to launch{issue}, "
        f"{count(device.streams, 'compute stream')}{memory}{physical}"
    )


def link_line(link: Link) -> str:
    """Describe a link in one line of text."""
    slow = link.pageable_bytes_per_second
    pageable = "" if slow is None else f", {_figure(slow / 1e9)} GB/s of pageable memory"
    return f"{link.source} <-> {link.destination}: {_rates(link)}{pageable}"


def _check_numbers(item: Device | Link, *names: str, is_above_0: bool = False) -> None:
    """Raise MachineError unless these are numbers, 0 or more; or above 0, and perhaps infinite."""
    for name in names:
        number = getattr(item, name)
        fits = isinstance(number, (int, float)) and is_number(number, infinite=is_above_0)
        if not fits or (is_above_0 and number == 0):
            what = "a number above 0" if is_above_0 else "a number, 0 or more"
            raise MachineError(f"{name} of {shown(item)} must be {what}")


def _figure(number: float) -> str:
    """Return a number as text: four significant digits, or the whole integer part.

    >>> _figure(20_000.0), _figure(0.25)
    ('20,000', '0.25')
    """
    return f"{number:,.4g}" if number < 1000 or math.isinf(number) else f"{number:,.0f}"


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


def slower(item: _Part, factor: float) -> _Part:
    """Return a device, a link or a network with its rates divided, and its times multiplied."""
    changed: dict[str, Any] = {}
    for name in (part.name for part in fields(item)):
        value = getattr(item, name)
        if isinstance(value, Network):
            changed[name] = slower(value, factor)
        elif value is not None and name.endswith("_per_second"):
            changed[name] = value / factor
        elif name == "latency" or name.endswith("_seconds"):
            changed[name] = value * factor
    return replace(item, **changed)


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


def _rates(link: Link | Network) -> str:
    return f"{_figure(link.bytes_per_second / 1e9)} GB/s, {_figure(link.latency * 1e6)} us"
