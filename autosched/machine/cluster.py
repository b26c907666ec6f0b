"""Join the processes that torchrun started, and gather their devices. Each process is a *rank*."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from autosched._lib.forks import forks
from autosched.errors import AutoschedError, MachineError, RankError
from autosched.machine.machine import Device, Link, Machine, Network
from autosched.machine.network import named_network

if TYPE_CHECKING:
    from autosched._lib.process_group import ProcessGroup

__all__ = ["cluster", "current", "join", "joined", "leave", "rank_among"]

_HOW = (
    "start the program by torchrun --nproc-per-node=2 ..., or call "
    "torch.distributed.init_process_group first"
)
# Of gloo between two processes on one host, over loopback.
_LOOPBACK = Network(6e9, latency=25e-6)
_NETWORK = Network(1e9, latency=5e-5, on_host=_LOOPBACK)  # 10 Gbit/s
_PAUSE = 1e-3  # seconds between two looks at a store

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


def cluster(network: str | Network | None, timeout: float, local: Machine) -> Machine:
    """Return the machine of all ranks. Collective: each rank calls it with its own machine."""
    from autosched.machine.sharing import described

    between = None if network is None else named_network(network)
    if current() is None:
        _join_by_torch(timeout)
    group = joined()
    mine = {"versions": _versions(), "host": socket.gethostname(), "machine": local.to_json()}
    texts = group.texts("Machine.cluster()", json.dumps(mine | described(local)))
    machine, why = _gathered(texts, between, isinstance(network, Network))
    if why and group.rank == 0:
        what = "copies between GPUs of different ranks go by way of host memory"
        warnings.warn(f"{what}: {why}", RuntimeWarning, stacklevel=3)
    hosts = {device.rank: device.host or "" for device in machine.devices}
    group.hosts = [hosts[rank] for rank in range(group.size)]
    if machine.network is not None and machine.network.direct:
        group.join_devices(timeout)
    return machine


def join(store: Any, rank: int, size: int, timeout: float) -> ProcessGroup:
    """Join the processes that share a store of torch.distributed, in its default group."""
    dist = _torch()
    # Processes that are started again find what earlier ones wrote: so names are new.
    store = dist.PrefixStore(_token(store, rank, size, timeout), store)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    dist.distributed_c10d._set_pg_timeout(dist.default_pg_timeout)
    atexit.unregister(_destroy)  # once is enough
    atexit.register(_destroy)
    return _joined_in(store, timeout)


def _joined_in(store: Any, timeout: float) -> ProcessGroup:
    """Join the processes of the default group of torch.distributed."""
    from autosched._lib.process_group import ProcessGroup

    made = ProcessGroup(_torch().PrefixStore("autosched", store), timeout)
    _current.append((made, forks()))
    atexit.unregister(_close)
    atexit.register(_close)
    return made


def leave() -> None:
    """Leave the ranks that this process joined, and torch's group of them."""
    _close()
    _current.clear()
    _destroy()


def _close() -> None:
    if (found := current()) is not None:
        found.close()


def _destroy() -> None:
    dist = _torch()
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_by_torch(timeout: float) -> None:
    """Join the ranks of torch.distributed, which is initialised if it is not."""
    dist = _torch()
    try:
        if dist.is_initialized():
            # The public functions of torch make no store from an initialised group.
            _joined_in(dist.distributed_c10d._get_default_store(), timeout)
            return
        rank, size = _environment()
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        join(store, rank, size, timeout)
    except RuntimeError as error:  # of torch
        if isinstance(error, AutoschedError):
            raise
        raise RankError(f"the ranks did not meet: {error}") from error


def _token(store: Any, rank: int, size: int, timeout: float) -> str:
    """Return a text that these processes share, and that no earlier ones had.

    Each process writes a number that nobody else has, and rank 0 answers the last one of each.
    """
    mine = uuid.uuid4().hex
    store.set(f"hello/{rank}", mine)
    if rank:
        store.wait([f"token/{mine}"], timedelta(seconds=timeout))
        token = str(store.get(f"token/{mine}").decode())
        store.set(f"here/{token}/{rank}", "")
        return token
    missing = [*range(1, size)]
    deadline = time.monotonic() + timeout
    while missing:
        for other in missing:
            if store.check([f"hello/{other}"]):
                store.set(f"token/{store.get(f'hello/{other}').decode()}", mine)
        missing = [other for other in missing if not store.check([f"here/{mine}/{other}"])]
        if missing and time.monotonic() > deadline:
            raise RankError(f"rank {missing[0]} did not come within {timeout:g} s")
        time.sleep(_PAUSE)
    return mine


def _torch() -> Any:
    import torch.distributed

    return torch.distributed  # some of whose functions have no types


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


def _gathered(
    texts: Sequence[str], network: Network | None, is_chosen: bool
) -> tuple[Machine, str]:
    """Return the machine of all ranks, and why its GPUs exchange data by way of the hosts, if so.

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
    network, why = joining(network, is_chosen, hosts, ranks)
    return joint(machines, hosts, network), why


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
