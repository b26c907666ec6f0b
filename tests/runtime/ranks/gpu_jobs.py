"""What ranks with GPUs do in tests: each function runs in a process of its own.

The GPU of a process is a real one, which all share, or a simulated one for each. Where GPUs are told
to be a process's own, copies between them go over NCCL, which is played over gloo for simulated ones.
"""

from __future__ import annotations

import contextlib
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
from tests.runtime.ranks.jobs import equal
from tests.strategies import inputs_for

RUNS = 3

# The first meta kernel imports many modules: once, in the server of which all processes are forks.
torch.sin(torch.empty(1, device="meta")).add(1)


class PlayedNccl:
    """What a group of NCCL has, for GPUs of several processes that are simulated in each.

    A copy ends when it is issued, and so blocks the host: that is harder than NCCL, and as legal.
    """

    def __init__(self, group: Any):
        self.group = group

    def send(self, rows: Sequence[torch.Tensor], peer: int, tag: int) -> PlayedNccl:
        """Send a row."""
        self.group.send([row.cpu() for row in rows], peer, tag).wait()
        return self

    def recv(self, rows: Sequence[torch.Tensor], peer: int, tag: int) -> PlayedNccl:
        """Receive a row."""
        (row,) = rows
        arrived = torch.empty(row.shape, dtype=row.dtype)
        self.group.recv([arrived], peer, tag).wait()
        row.copy_(arrived)
        return self

    def wait(self) -> None:
        """Do nothing: it has ended."""

    def abort(self) -> None:
        """End all that is pending."""
        _lose(self.group, joined().rank, joined().size)


@contextlib.contextmanager
def gpus(seed: int | None, each: int = 0) -> Iterator[Any]:
    """Simulate GPUs, if a seed is given, whose streams go on in another order for each.

    With ``each``, so many are a process's own.
    """
    with contextlib.ExitStack() as stack:
        size = joined().size * each or 1
        played = None if seed is None else stack.enter_context(playing(size, seed))
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
        here = {*machine.here}
        wrong = []
        with schedule:
            inputs = {name for name, device in schedule.program.inputs if device in here}
            outputs_here = {name for name, device in schedule.program.outputs if device in here}
            for number in range(RUNS):
                given = there(machine, schedule.graph, inputs_for(graph))
                found = schedule(**{name: given[name] for name in schedule.inputs_here})
                if found.keys() != outputs_here:
                    wrong.append(f"run {number}: outputs {[*found]}")
                left = {**found, **{name: given[name] for name in given if name in inputs}}
                wrong += [
                    f"run {number}: {name} is {item}, expected {expected[name]}\n{schedule}"
                    for name, item in left.items()
                    if not equal(item.cpu(), expected[name])
                ]
        return wrong


def run_alone(graph: asc.Graph, machine: asc.Machine, schedule: asc.Schedule) -> dict[str, Any]:
    """Return on the host the outputs of a run in this process, and the inputs as it leaves them."""
    single = alone(machine)
    placement = schedule.placement
    with asc.schedule(graph, single, policy=lambda *_: placement) as one:
        given = there(single, one.graph, inputs_for(graph))
        found = {**given, **one.run_serial(**given)}
    return {name: item.cpu() for name, item in found.items()}


def chain(hops: int) -> asc.Graph:
    """Return a graph whose value goes from the GPU of one rank to that of the other, and back."""
    graph = asc.Graph("chain")
    value = graph.input("x")
    for hop in range(hops):
        with graph.on(f"cuda:{hop % 2}"):
            value = torch.sin(value) + 1
    graph.output(y=value)
    return graph


def pass_on(seed: int | None) -> list[bool]:
    """Return whether each run of a chain gives what it gives on the CPU, with other inputs each time."""
    right = []
    with gpus(seed) as simulated:
        if simulated is not None:
            simulated.eagerness = 0.0  # nothing runs before it has to
        machine = asc.Machine.cluster()
        with asc.schedule(chain(5), machine) as schedule:
            for number in range(4):
                x = torch.full((100,), float(number))
                found = schedule(**dict.fromkeys(schedule.inputs_here, x))
                expected = chain(5).run_serial(x=x)["y"]
                right += [torch.allclose(item.cpu(), expected) for item in found.values()]
    return right


def keep_memory(seed: int | None) -> tuple[list[bool], int]:
    """Return whether what a GPU reads is page-locked, and how many addresses it has in ten runs."""
    with gpus(seed):
        machine = asc.Machine.cluster()
        with asc.schedule(chain(4), machine) as schedule:
            for _ in range(10):
                schedule(**{name: torch.ones(100) for name in schedule.inputs_here})
            exchanges = schedule._executor.backend.exchanges
            seen = [each._buffer.value for each in exchanges._receives]
            places = {item.data_ptr() for item in seen}
            return [item.is_pinned() for item in seen], len(places) - len(seen)
