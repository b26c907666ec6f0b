"""List the policies, and the limits on streams, that ``policy="auto"`` tries."""

from __future__ import annotations

from dataclasses import replace

from autosched.costs.costs import Costs
from autosched.graph.graph import Graph
from autosched.machine.machine import Device, Machine
from autosched.policies.literature.heft import heft
from autosched.policies.local_search.search import Progress, quick, search
from autosched.policies.local_search.splitting import split
from autosched.policies.round_robin import round_robin
from autosched.policies.single import single, single_on
from autosched.problem import Policy

__all__ = ["candidates", "splits", "stream_limits"]

_SMALL = 2_000  # tasks, up to which there is time to lower and simulate policies that rarely win


def candidates(
    graph: Graph,
    machine: Machine,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Policy, ...]:
    """Return the policies to try: one device alone, simple policies, and a search over many lists.

    Of identical devices to which nothing is bound, only one is tried alone. For large graphs none
    is, since the search includes that.

    >>> len(candidates(Graph(), Machine.emulated(gpus=8)))
    6
    """
    improved = quick if seconds is None else search(seconds, seed, progress=progress)
    if len(graph) > _SMALL:
        return (improved,)
    pinned = {task.device for task in graph.tasks} | {value.home for value in graph.sources}
    like: dict[Device, str] = {}
    for device in machine.devices:
        anonymous = replace(device, name=device.kind, physical=None)
        like.setdefault(device if device.name in pinned else anonymous, device.name)
    return (*map(single_on, like.values()), single, round_robin, heft, improved)


def splits(
    machine: Machine,
    in_flight: int | None,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Policy, ...]:
    """Return the policies that split a graph into stages: on all devices, and on fewer.

    A run passes through all stages, so few runs in flight may gain more from few stages.

    >>> len(splits(Machine.emulated(gpus=3), in_flight=3))
    3
    """
    most = len(machine.devices)
    counts = [most, *(n for n in (in_flight, 2) if n is not None and 1 < n < most)]
    each = None if seconds is None else seconds / len(dict.fromkeys(counts))
    return tuple(
        split(stages, seed, seconds=each, progress=progress) for stages in dict.fromkeys(counts)
    )


def stream_limits(machine: Machine, costs: Costs) -> tuple[int | None, ...]:
    """Return the limits on streams to try: halves of what there is, if issuing takes time."""
    if not costs.has_issuing(machine.devices):
        return (None,)
    limits: list[int | None] = [None]
    most = max((machine.device(name).streams for name in machine.accelerators), default=1)
    while most > 1:
        most //= 2
        limits.append(most)
    return tuple(limits)
