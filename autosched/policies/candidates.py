"""Candidates: the policies that ``policy="auto"`` tries, one device alone among them."""

from __future__ import annotations

from dataclasses import replace

from autosched.graph import Graph
from autosched.machine import Device, Machine
from autosched.policies.heft import heft
from autosched.policies.problem import Policy
from autosched.policies.round_robin import round_robin
from autosched.policies.single import single, single_on

__all__ = ["candidates"]

_SMALL = 2_000  # tasks, up to which there is time to lower and simulate what rarely wins


def candidates(graph: Graph, machine: Machine) -> tuple[Policy, ...]:
    """Return the policies to try; of equal devices that nothing is bound to, one is tried alone.

    >>> len(candidates(Graph(), Machine.emulated(gpus=8)))
    5
    """
    pinned = {task.device for task in graph.tasks} | {value.home for value in graph.sources}
    like: dict[Device, str] = {}
    for device in machine.devices:
        anonymous = replace(device, name=device.kind, physical=None)
        like.setdefault(device if device.name in pinned else anonymous, device.name)
    spread = (round_robin,) if len(graph) <= _SMALL else ()
    return (*map(single_on, like.values()), single, *spread, heft)
