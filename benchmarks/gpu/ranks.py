"""Copies between GPUs of processes, beside code by hand: over NCCL, or by way of page-locked host memory and gloo.

A tensor goes round the GPUs of two to four processes. Where there is one GPU, two processes use it, and copies go by
way of host memory. With more, each process has one, and they go over NCCL. By hand is the same, with one buffer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
HOPS = 8
SIZES = {"1 MiB": 1 << 20, "64 MiB": 1 << 26}
REHEARSED = {"4 KiB": 1 << 12}
BY_HAND = 1.1  # times the code by hand
PATIENCE = 150  # seconds for all processes
MOST = 4  # processes


def cases(rig: Any) -> dict[str, Callable[[], Any]]:
    """Return a case for each size."""
    sizes = REHEARSED if rig.rehearse else SIZES
    return {
        f"a hop of {name} between ranks": partial(_case, rig, nbytes)
        for name, nbytes in sizes.items()
    }


def _case(rig: Any, nbytes: int) -> Any:
    from _record import Case, Promise

    if not rig.real:
        return Case(left_out={"everybody": "there is no GPU, nor a simulated one"})
    played = torch.get_device_module(rig.device).get_device_name() == "a played GPU"
    ranks = max(2, min(MOST, torch.accelerator.device_count()))
    found = _launched({"nbytes": nbytes, "rounds": rig.rounds(50), "played": played}, ranks)
    seconds = {name: found[name] for name in ("by hand", "autosched")}
    ratio = seconds["autosched"] / seconds["by hand"]
    notes = {"way": found["way"], "GPUs of the ranks": found["devices"]}
    promises = [Promise("autosched / by hand", ratio, most=BY_HAND)]
    return Case(seconds, promises, notes=notes)


def _launched(asked: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Run so many processes, as torchrun does; return what rank 0 prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    place |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, json.dumps(asked)]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [each.communicate(timeout=PATIENCE)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    if any(each.returncode for each in processes):
        raise RuntimeError(f"the ranks ended with {[each.returncode for each in processes]}")
    return dict(json.loads(printed[0].splitlines()[-1]))


# ---- in each of the processes


def touch(x: torch.Tensor) -> None:
    """Change a tensor, in no time."""
    x[:1].add_(1)


def around(ranks: int) -> Any:
    """Return a graph whose value is changed on one GPU after the other."""
    import autosched as asc

    graph = asc.Graph("around")
    with graph.on("cuda:0"):
        value = graph.input("x").clone()
    for hop in range(HOPS):
        with graph.on(f"cuda:{(hop + 1) % ranks}"):
            graph.add(touch, value, writes=[value], outputs=(), name=f"hop{hop}")
    graph.output(y=value)
    return graph


def by_hand(
    x: torch.Tensor, buffer: torch.Tensor, pinned: torch.Tensor | None, rank: int, ranks: int
) -> torch.Tensor:
    """Send, receive and change as the graph does; without ``pinned``, over NCCL."""
    y = x.clone() if rank == 0 else buffer
    for hop in range(HOPS):
        source, target = hop % ranks, (hop + 1) % ranks
        if rank == source:
            _send(y, pinned, target)
        if rank == target:
            _receive(y, pinned, source)
            touch(y)
    return y


def _send(y: torch.Tensor, pinned: torch.Tensor | None, peer: int) -> None:
    if pinned is None:
        _over_nccl(dist.isend, y, peer)
        return
    pinned.copy_(y, non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    dist.send(pinned, peer)


def _receive(y: torch.Tensor, pinned: torch.Tensor | None, peer: int) -> None:
    if pinned is None:
        _over_nccl(dist.irecv, y, peer)
        return
    torch.accelerator.current_stream().synchronize()  # what it has still to read
    dist.recv(pinned, peer)
    y.copy_(pinned, non_blocking=True)


_groups: list[Any] = []


def _over_nccl(operation: Any, y: torch.Tensor, peer: int) -> None:
    if not _groups:
        _groups.append(dist.new_group(backend="nccl", device_id=y.device))
    for work in dist.batch_isend_irecv([dist.P2POp(operation, y, peer, _groups[0])]):
        work.wait()


def measure(nbytes: int, rounds: int) -> dict[str, Any]:
    """Return the least seconds of a hop by hand and of a schedule, which take turns."""
    import autosched as asc

    machine = asc.Machine.cluster()
    rank, ranks = machine.rank, len({*machine.ranks.values()})
    assert rank is not None
    device = torch.device(machine.physical[f"cuda:{rank}"] or "")
    torch.accelerator.set_device_index(device.index)
    staged = machine.network is None or not machine.network.direct
    x = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8).to(device)
    buffer = torch.empty_like(x)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if staged else None
    least = {"by hand": float("inf"), "autosched": float("inf")}
    with asc.schedule(around(ranks), machine, inputs={"x": "cuda:0"}) as schedule:
        given = {"x": x} if rank == 0 else {}
        calls = {
            "by hand": lambda: by_hand(x, buffer, pinned, rank, ranks),
            "autosched": lambda: schedule(**given),
        }
        schedule(**given)
        for _ in range(rounds):
            for name, call in calls.items():
                call()
                torch.accelerator.synchronize(device)
                dist.barrier()
                begun = time.perf_counter()
                call()
                torch.accelerator.synchronize(device)
                least[name] = min(least[name], (time.perf_counter() - begun) / HOPS)
        found, expected = schedule(**given), by_hand(x, buffer, pinned, rank, ranks)
        if found and not torch.equal(found["y"].cpu(), expected.cpu()):
            raise RuntimeError("the schedule gives another result than the code by hand")
    way = "page-locked host memory" if staged else "NCCL"
    return {**least, "way": way, "devices": [machine.physical[f"cuda:{r}"] for r in range(ranks)]}


def _played() -> contextlib.AbstractContextManager[Any]:
    from autosched.simulated_gpus import playing

    return playing(1, seed=1)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    with _played() if asked["played"] else contextlib.nullcontext():
        measured = measure(asked["nbytes"], asked["rounds"])
        if os.environ["RANK"] == "0":
            print(json.dumps(measured))
