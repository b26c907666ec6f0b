"""Join the processes that torchrun started, and gather their devices.

Each process, a *rank*, keeps one object for the ranks that it joined. It has the store through which
they agree. Tensors travel elsewhere.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

from autosched._lib.allowed import is_number
from autosched._lib.forks import forks
from autosched._lib.meeting import Meeting, common_token, connected
from autosched._lib.processes import identity
from autosched.errors import MachineError, RankError, shown
from autosched.machine.machine import Device, Link, Machine, Network
from autosched.machine.network import named_network

__all__ = ["HEARTBEAT", "Joined", "cluster", "current", "join", "joined", "leave", "rank_among"]

HEARTBEAT = 10.0
_MOMENT = 1.0  # seconds
_HOW = (
    "start the program by torchrun --nproc-per-node=2 ..., or call "
    "torch.distributed.init_process_group first"
)
# Of gloo between two processes on one host, over loopback.
_LOOPBACK = Network(6e9, latency=25e-6)
_NETWORK = Network(1e9, latency=5e-5, on_host=_LOOPBACK)  # 10 Gbit/s


@dataclass(eq=False)
class Joined:
    """The place of this process among its ranks. ``store`` is theirs alone."""

    rank: int
    size: int
    store: Any
    meeting: Meeting
    hosts: tuple[str, ...] = ()
    heartbeat: float | None = HEARTBEAT  # seconds after which a silent rank is given up
    process: int = field(default_factory=forks)


_current: list[Joined] = []


def joined() -> Joined:
    """Return what this process joined last. Raises MachineError if it joined nothing."""
    found = current()
    if found is None:
        raise MachineError("this process has joined no others; call Machine.cluster()")
    return found


def current() -> Joined | None:
    """Return what this process joined last, if anything; a forked one joined nothing.

    It keeps what its parent joined: to drop it would end threads that are not there.
    """
    found = _current[-1] if _current else None
    return found if found is not None and found.process == forks() else None


def rank_among(ranks: Mapping[str, int]) -> int | None:
    """Return the rank of this process, if it has joined others and ``ranks`` has its devices."""
    found = current() if ranks else None
    return found.rank if found is not None and found.rank in ranks.values() else None


def leave() -> None:
    """Forget what this process joined."""
    _current.clear()


def cluster(
    network: str | Network | None, timeout: float, heartbeat: float | None, local: Machine
) -> Machine:
    """Return the machine of all ranks. Collective: each rank calls it with its own machine."""
    from autosched.machine.sharing import described

    between = None if network is None else named_network(network)
    if heartbeat is not None and not (is_number(heartbeat) and 0 < heartbeat < math.inf):
        given = f"got {shown(heartbeat)}"
        raise MachineError(f"heartbeat must be a number of seconds above 0, or None, {given}")
    is_chosen = isinstance(network, Network)
    if current() is None:
        _join_by_torch(timeout)
    meeting = joined().meeting
    meeting.timeout = timeout
    joined().heartbeat = heartbeat
    mine = {"versions": _versions(), "host": socket.gethostname(), "machine": local.to_json()}
    mine |= described(local)
    text = meeting.agree(
        "Machine.cluster()", json.dumps(mine), lambda texts: _gathered(texts, between, is_chosen)
    )
    machine = Machine.from_json(text)
    hosts = {device.rank: device.host or "" for device in machine.devices}
    joined().hosts = tuple(hosts[rank] for rank in range(joined().size))
    return machine


def join(store: Any, rank: int, size: int, timeout: float) -> Joined:
    """Join the ranks that share a store of torch.distributed."""
    dist = _torch()
    own = dist.PrefixStore("autosched", store)
    own = dist.PrefixStore(common_token(own, rank, size, timeout), own)
    atexit.unregister(_end)  # once is enough
    atexit.register(_end)
    own.set(f"process/{rank}", identity())
    _current.append(Joined(rank, size, own, Meeting(own, rank, size, timeout)))
    return joined()


def _end() -> None:
    """Let others read what they agreed on: their store may end with this process."""
    found = current()
    if found is not None:
        found.meeting.end()


def _join_by_torch(timeout: float) -> None:
    """Join the ranks of torch.distributed, which is initialised if it is not."""
    dist = _torch()
    if dist.is_initialized():
        # The public functions of torch make no store from an initialised group.
        store = dist.distributed_c10d._get_default_store()
        join(store, dist.get_rank(), dist.get_world_size(), timeout)
        return
    rank, size = _environment()
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        found = join(store, rank, size, timeout)
    except RuntimeError as error:  # of torch
        if isinstance(error, MachineError):
            raise
        raise RankError(f"the ranks did not meet: {error}") from error
    # Restarted processes find what earlier ones wrote to a store of torchrun's, so ours is new.
    group = {"store": found.store, "rank": rank, "world_size": size}
    # torch gives up before this process does, whose exit may be a signal while a thread is in torch.
    make = partial(dist.init_process_group, "gloo", timeout=timedelta(seconds=timeout), **group)
    connected(make, lambda: None, timeout + _MOMENT)
    dist.distributed_c10d._set_pg_timeout(dist.default_pg_timeout)
    atexit.register(_destroy)


def _torch() -> Any:
    import torch.distributed

    return torch.distributed  # some of whose functions have no types


def _destroy() -> None:
    dist = _torch()
    if dist.is_initialized():
        dist.destroy_process_group()


def _environment() -> tuple[int, int]:
    """Return rank and number of ranks as torchrun gives them."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        what = f"Machine.cluster() needs other processes, and {missing[0]} is not set"
        raise MachineError(f"{what}; {_HOW}")
    rank, size = (os.environ[name] for name in names[:2])
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise MachineError(f"rank must be below the number of ranks, got {rank} and {size}; {_HOW}")
    return int(rank), int(size)


def _versions() -> dict[str, str]:
    """Return the versions that must be the same everywhere."""
    import torch

    own = sys.modules["autosched"]
    return {"autosched": str(own.__version__), "torch": str(torch.__version__)}


def _gathered(texts: Sequence[str], network: Network | None, is_chosen: bool) -> str:
    """Return the JSON of the machine of all ranks.

    Raises MachineError where their versions differ.
    """
    from autosched.machine.sharing import joining

    ranks = [json.loads(text) for text in texts]
    for rank, other in enumerate(ranks):
        for name, version in ranks[0]["versions"].items():
            if other["versions"].get(name) != version:
                found = other["versions"].get(name)
                raise MachineError(f"rank {rank} has {name} {found}, and rank 0 has {version}")
    hosts = [other["host"] for other in ranks]
    machines = [Machine.from_json(other["machine"]) for other in ranks]
    if network is None:
        network = _LOOPBACK if len({*hosts}) == 1 else _NETWORK
    return joint(machines, hosts, joining(network, is_chosen, hosts, ranks)).to_json()


def joint(machines: Sequence[Machine], hosts: Sequence[str], network: Network) -> Machine:
    """Return one machine with the devices of several; names are numbered over all.

    >>> both = joint([Machine.emulated(gpus=1)] * 2, ["a", "b"], Network(1e9))
    >>> both.names, both.device("cuda:1").physical
    (('cpu:0', 'cuda:0', 'cpu:1', 'cuda:1'), 'cuda:0')
    """
    devices: list[Device] = []
    links: list[Link] = []
    counts: dict[str, int] = {}
    for rank, (machine, host) in enumerate(zip(machines, hosts, strict=True)):
        names = dict(_renamed(machine.devices, counts))
        for device in machine.devices:
            physical = None if device.kind == "cpu" else device.physical or device.name
            changed = replace(device, name=names[device.name], physical=physical)
            devices.append(replace(changed, rank=rank, host=host))
        for link in machine.links:
            ends = names[link.source], names[link.destination]
            links.append(replace(link, source=ends[0], destination=ends[1]))
    return Machine(devices, links, contention=machines[0].contention, network=network)


def _renamed(devices: Iterable[Device], counts: dict[str, int]) -> Iterable[tuple[str, str]]:
    """Yield the names of devices with their names among all ranks; ``counts`` is kept."""
    for device in devices:
        number = counts.get(device.kind, 0)
        counts[device.kind] = number + 1
        yield device.name, f"{device.kind}:{number}"
