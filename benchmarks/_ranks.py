"""Ranks for benchmarks: processes on this host, which join as those of torchrun do."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch

import autosched as asc

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["autosched", "torch.distributed"])


def launch(size: int, job: Callable[..., Any], *args: Any) -> tuple[list[Any], Any]:
    """Start ranks; return their processes, and a queue of their results."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    results = CONTEXT.Queue()
    processes = []
    for rank in range(size):
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": port}
        place |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        processes.append(CONTEXT.Process(target=run, args=(place, results, job, args)))
        processes[-1].start()
    return processes, results


def run(place: dict[str, str], results: Any, job: Callable[..., Any], args: Sequence[Any]) -> None:
    """Do a job in a rank."""
    os.environ |= place
    torch.set_num_threads(1)
    found = job(asc.Machine.cluster(), results, *args)
    if found is not None:
        results.put(found)
