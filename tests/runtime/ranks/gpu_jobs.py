"""What ranks with GPUs do in tests: each function runs in a process of its own.

The GPU of a process is a real one, which all share, or a simulated one for each. Where GPUs are told
to be a process's own, copies between them go over NCCL, which is played over gloo for simulated ones.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed

import autosched as asc
from autosched._lib import process_group
from autosched._lib.process_group import _lose
from autosched.machine.cluster import joined
from autosched.simulated_gpus import playing
from tests.gpu.for_gpus import there
from tests.runtime.ranks.jobs import _ended, deviations
from tests.strategies import inputs_for

RUNS = 3
ANSWER = 1 << 20  # added to tags
BROKEN: list[str] = []  # rules of NCCL
THREADS: set[int] = set()  # that have issued copies
PENDING: dict[bool, list[bool]] = {}  # whether the last send, and receive, is awaited

# The first meta kernel imports many modules: once, in the server of which all processes are forks.
torch.sin(torch.empty(1, device="meta")).add(1)


class PlayedNccl:
    """What a group of NCCL has, for GPUs of several processes that are simulated in each.

    A copy blocks the host until the other rank has begun its half, so ranks that issue copies in
    different orders never end: that is harder than NCCL, and as legal. ``BROKEN`` notes other rules:

        one thread     issues all copies of a rank
        in flight      a stream waits for a send before the next one of its GPU, and so for receives
        device         the current device of the thread that issues is the GPU of the rank
        bytes          are what is copied: NCCL knows few dtypes
    """

    def __init__(self, group: Any):
        self.group = group

    def send(self, rows: Sequence[torch.Tensor], peer: int, tag: int) -> PlayedWork:
        """Send a row; the receiver answers."""
        if any(row.dtype != torch.uint8 for row in rows):
            BROKEN.append("bytes: a row has another dtype")
        self.group.send([row.cpu() for row in rows], peer, tag).wait()
        self.group.recv([torch.empty(1)], peer, tag + ANSWER).wait()
        return self.issued(True)

    def recv(self, rows: Sequence[torch.Tensor], peer: int, tag: int) -> PlayedWork:
        """Receive a row, and answer."""
        (row,) = rows
        arrived = torch.empty(row.shape, dtype=row.dtype)
        self.group.recv([arrived], peer, tag).wait()
        self.group.send([torch.empty(1)], peer, tag + ANSWER).wait()
        row.copy_(arrived)
        return self.issued(False)

    def issued(self, is_send: bool) -> PlayedWork:
        """Note the rules that a copy breaks; return its work."""
        THREADS.add(threading.get_ident())
        if len(THREADS) > 1:
            BROKEN.append("one thread: copies are issued from several")
        if PENDING.get(is_send, [True]) == []:
            BROKEN.append("in flight: a copy is issued before its stream awaits the last")
        if torch.cuda.current_device() != joined().rank:
            BROKEN.append(
                f"device: a copy is issued where {torch.cuda.current_device()} is current"
            )
        PENDING[is_send] = []
        return PlayedWork(PENDING[is_send])

    def abort(self) -> None:
        """End all that is pending."""
        _lose(self.group, joined().rank, joined().size)


class PlayedWork:
    """A copy that has ended when it was issued."""

    def __init__(self, awaited: list[bool]):
        self.awaited = awaited

    def wait(self) -> None:
        """Note that the stream waits for it."""
        self.awaited.append(True)


@contextlib.contextmanager
def gpus(seed: int | None, each: int = 0) -> Iterator[Any]:
    """Simulate GPUs, if a seed is given, whose streams go on in another order for each.

    With ``each``, so many are a process's own.
    """
    for known in (BROKEN, THREADS, PENDING):
        known.clear()
    with contextlib.ExitStack() as stack:
        size = joined().size * each or 1
        played = None if seed is None else stack.enter_context(playing(size, seed))
        if played is not None and seed % 2:
            played.eagerness = 0.0  # nothing runs before it has to
        if each:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("LOCAL_RANK", str(joined().rank))
            patch.setenv("LOCAL_WORLD_SIZE", str(joined().size))
            if played is not None:
                make = torch.distributed.new_group

                def new_group(backend: str, **options: Any) -> Any:
                    made = make(backend="gloo", **options)
                    return PlayedNccl(made) if backend == "nccl" else made

                patch.setattr(torch.distributed, "is_nccl_available", lambda: True)
                patch.setattr(torch.distributed, "new_group", new_group)
                patch.setattr(process_group, "_set_timeout", lambda *_: None)
        yield played


def alone(machine: asc.Machine) -> asc.Machine:
    """Return the devices of all ranks as those of one process, on this process's GPUs."""
    devices = [replace(device, rank=None, host=None) for device in machine.devices]
    known = {frozenset((link.source, link.destination)) for link in machine.links}
    missing = [asc.Link(*pair, 1e9) for pair in combinations(machine.names, 2)]
    links = [link for link in missing if frozenset((link.source, link.destination)) not in known]
    return asc.Machine(devices, [*machine.links, *links])


def run_on_gpus(
    graph: asc.Graph, policy: str, seed: int | None, outputs: str | None, each: int = 0
) -> list[str]:
    """Run a drawn graph on all ranks; return what differs from a run in one process."""
    with gpus(seed, each):
        machine = asc.Machine.cluster(gpus=each or None)
        assert machine.network is not None
        assert machine.network.direct == bool(each)
        try:
            schedule = asc.schedule(graph, machine, policy=policy, outputs=outputs)
        except asc.ScheduleError as error:
            return [f"refused: {error}"]
        expected = run_alone(graph, machine, schedule)
        wrong = []
        with schedule:
            for _ in range(RUNS):
                given = there(machine, schedule.graph, inputs_for(graph))
                wrong += deviations(schedule, given, expected)
        return wrong + BROKEN


def run_alone(graph: asc.Graph, machine: asc.Machine, schedule: asc.Schedule) -> dict[str, Any]:
    """Return on the host the outputs of a run in this process, and the inputs as it leaves them."""
    single = alone(machine)
    placement = schedule.placement
    with asc.schedule(graph, single, policy=lambda *_: placement) as one:
        given = there(single, one.graph, inputs_for(graph))
        found = {**given, **one.run_serial(**given)}
    return {name: item.cpu() for name, item in found.items()}


def exchange(seed: int | None, fails: bool) -> list[str]:
    """Let GPUs send to each other at once, and a task of rank 0 fail in the third run, or none."""
    runs = [0]

    def double(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if fails and runs[0] == 3 and not joined().rank:
            raise ValueError("of a test")
        return x * 2

    graph = asc.Graph("exchange")
    values = []
    for rank in range(joined().size):
        with graph.on(f"cpu:{rank}"):
            x = graph.input(f"x{rank}")
        values.append(graph.add(double, x, name=f"double{rank}", on=f"cuda:{rank}"))
    for rank in range(joined().size):
        with graph.on(f"cuda:{rank}"):
            graph.output(**{f"y{rank}": values[rank - 1] + values[rank]})
    with gpus(seed, 1), asc.schedule(graph, asc.Machine.cluster(gpus=1, timeout=5)) as schedule:
        ended = [_ended(schedule, torch.ones(3)) for _ in range(4)]
    return ended + BROKEN
