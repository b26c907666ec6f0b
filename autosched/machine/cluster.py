"""The machine of all ranks: the processes that torchrun started, their devices, and their network.

Direct copies between accelerators of different ranks need accelerators that nobody else uses: NCCL
refuses one in two places. Otherwise copies go by way of host memory.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autosched._lib.forks import forks
from autosched.errors import MachineError
from autosched.machine.device import Device, Link, Network, named_network
from autosched.machine.machine import Machine

if TYPE_CHECKING:
    from autosched._lib.process_group import ProcessGroup

# Of gloo between two processes on one host, over loopback.
_LOOPBACK = Network(6e9, latency=25e-6)
_NETWORK = Network(1e9, latency=5e-5, on_host=_LOOPBACK)  # 10 Gbit/s

_current: list[tuple[ProcessGroup, int]] = []  # with the number of forks before


def joined() -> ProcessGroup:
    """Return the ranks that this process joined. Raises MachineError if it joined none."""
    found = current()
    if found is None:
        raise MachineError("this process has joined no others; call Machine.cluster()")
    return found


def current() -> ProcessGroup | None:
    """Return the ranks that this process joined, if any; a forked one joined none.

    It keeps what its parent joined: to drop it would end threads that are not there.
    """
    found, process = _current[-1] if _current else (None, 0)
    return found if process == forks() else None


def rank_among(ranks: Mapping[str, int]) -> int | None:
    """Return the rank of this process, if it has joined others and ``ranks`` has its devices."""
    found = current() if ranks else None
    return found.rank if found is not None and found.rank in ranks.values() else None


def enter(group: ProcessGroup) -> ProcessGroup:
    """Let this process be one of a group."""
    _current.append((group, forks()))
    atexit.unregister(_close)
    atexit.register(_close)
    return group


def leave() -> None:
    """Leave the ranks that this process joined, and torch's group of them."""
    from autosched._lib.process_group import destroy

    _close()
    _current.clear()
    destroy()


def _close() -> None:
    if (found := current()) is not None:
        found.close()


def cluster(network: str | Network | None, timeout: float, local: Machine) -> Machine:
    """Return the machine of all ranks. Collective: each rank calls it with its own machine."""
    from autosched._lib.process_group import meet

    between = None if network is None else named_network(network)
    group = current() or enter(meet(timeout))
    mine = {"versions": _versions(), "host": socket.gethostname(), "machine": local.to_json()}
    ranks = group.gather("Machine.cluster()", lambda: mine | described(local))
    machine, why = _gathered(ranks, between, isinstance(network, Network))
    if why and group.rank == 0:
        what = "copies between GPUs of different ranks go by way of host memory"
        warnings.warn(f"{what}: {why}", RuntimeWarning, stacklevel=3)
    hosts = {device.rank: device.host or "" for device in machine.devices}
    group.hosts = [hosts[rank] for rank in range(group.size)]
    if machine.network is not None and machine.network.direct:
        group.join_devices(timeout)
    return machine


def _versions() -> dict[str, str]:
    """Return the versions that must be the same everywhere."""
    import torch

    own = sys.modules["autosched"]
    return {"autosched": str(own.__version__), "torch": str(torch.__version__)}


def _gathered(
    ranks: Sequence[Mapping[str, Any]], network: Network | None, is_chosen: bool
) -> tuple[Machine, str]:
    """Return the machine of all ranks, and why its GPUs exchange data by way of the hosts, if so.

    Raises MachineError where their versions differ.
    """
    for rank, other in enumerate(ranks):
        for name, version in ranks[0]["versions"].items():
            if other["versions"].get(name) != version:
                found = other["versions"].get(name)
                raise MachineError(f"rank {rank} has {name} {found}, and rank 0 has {version}")
    hosts = [other["host"] for other in ranks]
    machines = [Machine.from_json(other["machine"]) for other in ranks]
    if network is None:
        network = _LOOPBACK if len({*hosts}) == 1 else _NETWORK
    network, why = joining(network, is_chosen, hosts, ranks)
    return joint(machines, hosts, network), why


def joint(machines: Sequence[Machine], hosts: Sequence[str], network: Network) -> Machine:
    """Return one machine with the devices of several; names are numbered over all.

    >>> both = joint([Machine([Device("cpu:0"), Device("cuda:0")])] * 2, ["a", "b"], Network(1e9))
    >>> both.names, both.device("cuda:1").physical
    (('cpu:0', 'cuda:0', 'cpu:1', 'cuda:1'), 'cuda:0')
    """
    devices: list[Device] = []
    links: list[Link] = []
    counts: dict[str, int] = {}
    for rank, (machine, host) in enumerate(zip(machines, hosts, strict=True)):
        names: dict[str, str] = {}
        for device in machine.devices:
            number = counts[device.kind] = counts.get(device.kind, -1) + 1
            name = names[device.name] = f"{device.kind}:{number}"
            has_own = machine.imagined or not device.is_accelerator
            physical = None if has_own else device.physical or device.name
            devices.append(replace(device, name=name, physical=physical, rank=rank, host=host))
        for link in machine.links:
            ends = names[link.source], names[link.destination]
            links.append(replace(link, source=ends[0], destination=ends[1]))
    return Machine(devices, links, contention=machines[0].contention, network=network)


# ---- accelerators


def own_share(gpus: int | None, cpu_streams: int) -> Machine:
    """Return the CPU and this rank's accelerators: ``gpus``, by default an equal share.

    Where the ranks of a host are more than its accelerators, several ranks use one. A process that
    torchrun did not start uses the current accelerator. Raises MachineError for accelerators where
    there is none.
    """
    import torch

    if gpus == 0 or not torch.accelerator.is_available():
        return Machine.local(gpus or 0, cpu_streams)
    count = torch.accelerator.device_count()
    here, size = torch.accelerator.current_device_index(), count
    if "LOCAL_RANK" in os.environ:
        here, size = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    each = max(1, count // size) if gpus is None else gpus
    whole = Machine.local(each * size, cpu_streams)
    own = whole.accelerators[here * each : (here + 1) * each]
    return whole.part({whole.host, *own})


def described(machine: Machine) -> dict[str, Any]:
    """Return what other ranks have to know of this rank's accelerators, as plain data."""
    if not machine.accelerators:
        return {"gpus": [], "nccl": False}
    import torch

    devices = [torch.device(name) for name in machine.physical.values() if name is not None]
    kinds = {device.type for device in devices}
    nccl = kinds == {"cuda"} and torch.distributed.is_nccl_available()
    return {"gpus": [*map(_identity, devices)], "nccl": nccl}


def _identity(device: Any) -> str:
    """Return what distinguishes an accelerator of a host: processes may name several alike."""
    import torch

    ask = getattr(torch.get_device_module(device.type), "get_device_properties", None)
    found = None if ask is None else getattr(ask(device), "uuid", None)
    return str(device if found is None else found)


def joining(
    network: Network, is_chosen: bool, hosts: Sequence[str], ranks: Sequence[Mapping[str, Any]]
) -> tuple[Network, str]:
    """Return the network, direct between accelerators where that is possible, or why it is not.

    ``is_chosen`` says that the user gave it as a ``Network``, which is kept as it is. Raises
    MachineError for a direct network where none is possible.
    """
    if sum(1 for rank in ranks if rank["gpus"]) < 2:
        return network, ""
    why = _not_direct(hosts, ranks)
    if is_chosen:
        if network.direct and why:
            raise MachineError(f"direct=True of a network needs NCCL, which cannot be used: {why}")
        return network, ""
    return replace(network, direct=not why), why


def _not_direct(hosts: Sequence[str], ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return why accelerators of different ranks cannot exchange data directly, if so."""
    users: dict[tuple[str, str], int] = {}
    for number, (host, rank) in enumerate(zip(hosts, ranks, strict=True)):
        if len(rank["gpus"]) > 1:
            return f"rank {number} has several, and torch has one communicator for two processes"
        for gpu in rank["gpus"]:
            if (user := users.setdefault((host, gpu), number)) != number:
                return f"devices of ranks {user} and {number} share a GPU of host {host}"
            if not rank["nccl"]:
                return f"torch of rank {number} has no NCCL"
    return ""
