"""Divide the accelerators of a host among its ranks, and say whether they can exchange data directly.

Direct copies between accelerators of different ranks need accelerators that nobody else uses: NCCL
refuses one in two places. Otherwise copies go by way of host memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autosched.errors import MachineError
from autosched.machine.machine import Machine
from autosched.machine.network import Network

__all__ = ["described", "joining", "own_share"]


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
    devices = [device for device in whole.devices if device.kind == "cpu" or device.name in own]
    names = {device.name for device in devices}
    return Machine(
        devices, [link for link in whole.links if {link.source, link.destination} <= names]
    )


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
    """Return what distinguishes an accelerator from the others of its host.

    Processes may see different accelerators under one name.
    """
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
            if (host, gpu) in users:
                return (
                    f"devices of ranks {users[host, gpu]} and {number} share a GPU of host {host}"
                )
            users[host, gpu] = number
            if not rank["nccl"]:
                return f"torch of rank {number} has no NCCL"
    return ""
