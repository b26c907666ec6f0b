"""Processes that play ranks: a pool for many jobs, and others that may die.

They are forks of a server that has imported torch, so starting one takes milliseconds. A job is a
function of a module; it finds the ranks joined, and its arguments and result are pickled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

from autosched._lib import process_group
from autosched.machine import cluster

KINDS = "", "gpu_", "captured_", "training_"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("tests.runtime.ranks." + kind + "jobs" for kind in KINDS),
        "torch._functorch.aot_autograd",  # captures import it when they begin
    ]
)
BOUND = 30.0  # seconds that any wait may take


class JobError(Exception):
    """A job raised in a rank; the message has the traceback there."""


def serve(port: int, pipe: Any) -> None:
    """Do jobs until there are no more."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the test has ended
        while True:
            number, *rest = pipe.recv()
            pipe.send(done(dist.PrefixStore(str(number), store), *rest))


def done(store: Any, rank: int, size: int, timeout: float, job: Any, args: Any) -> tuple[Any, str]:
    """Do a job as one of the ranks; return its result, or what it raised."""
    try:
        cluster.enter(process_group.join(store, rank, size, timeout))
        result = job(*args)
    except BaseException as error:
        return (type(error).__name__, str(error)), traceback.format_exc()
    finally:
        cluster.leave()
    return result, ""


def until(holds: Any) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Ranks:
    """Processes of a pool; each takes part in jobs of so many ranks, which meet in ``timeout``."""

    def __init__(self, timeout: float = BOUND) -> None:
        self.timeout = timeout
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.workers: list[Any] = []
        self.jobs = 0

    def start(self, job: Any, size: int, *args: Any) -> list[Any]:
        """Start a job on so many ranks; return their processes."""
        while len(self.workers) < size:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve, args=(self.store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        self.jobs += 1
        for rank, (_, pipe) in enumerate(self.workers[:size]):
            pipe.send((self.jobs, rank, size, self.timeout, job, args))
        return [process for process, _ in self.workers[:size]]

    def results(self, size: int) -> list[tuple[Any, str]]:
        """Return for each rank its result, and a traceback if it raised; None for the dead."""
        found = []
        for process, pipe in self.workers[:size]:
            try:
                assert pipe.poll(BOUND), f"rank {len(found)} hangs"
                found.append(pipe.recv())
            except EOFError:
                process.join(BOUND)
                found.append((process.exitcode, "dead"))
        return found

    def run(self, job: Any, size: int, *args: Any) -> list[Any]:
        """Do a job on so many ranks; return their results. Raises JobError."""
        self.start(job, size, *args)
        found = self.results(size)
        for rank, (_, error) in enumerate(found):
            if error:
                raise JobError(f"rank {rank}: {error}")
        return [result for result, _ in found]

    def run_drawn(self, job: Any, size: int, *args: Any) -> None:
        """Do a job that returns what is wrong; check that it is nothing, or refused on all ranks."""
        found = self.run(job, size, *args)
        if not all(wrong and wrong[0].startswith("refused") for wrong in found):
            assert found == [[]] * size

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self.workers:
            pipe.close()
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self.workers.clear()
