"""Add the micro-batches of all replicas to a graph, with collectives between them.

Replicas go through a pass level by level. All collectives of one level by the same operator are
combined into one. One device combines the shares, so all replicas read the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosched import Graph, Machine, ScheduleError, Value
from autosched.parallel.costs import memory_task
from autosched.parallel.micro_batch import MicroBatch
from autosched.parallel.sync_batch_norm import COLLECTIVES

__all__ = ["Instance", "include"]


@dataclass(frozen=True)
class Instance:
    """A micro-batch in the graph of a step: the device of each stage, and its values by name."""

    rows: int
    micro_batch: MicroBatch
    devices: Sequence[str]
    prefix: str
    values: dict[str, Value]

    def output(self, label: str) -> Value:
        """Return the value that is an output."""
        graph = self.micro_batch.graph
        return self.values[graph.values[graph.outputs[label]].name]


def include(graph: Graph, instances: Sequence[Instance], machine: Machine, name: str) -> None:
    """Add the tasks of micro-batches, one of each replica, with the collectives between them.

    Raises ScheduleError for micro-batches with different collectives.
    """
    first = instances[0]
    levels = [one.micro_batch.levels for one in instances]
    for one, own in zip(instances, levels, strict=True):
        if [level.collectives for level in own] != [level.collectives for level in levels[0]]:
            raise ScheduleError(
                f"batch norms can be synchronised where replicas have the same, but the model has "
                f"others for {one.rows} rows than for {first.rows}"
            )
    for number, same_level in enumerate(zip(*levels, strict=True)):
        for one, level in zip(instances, same_level, strict=True):
            part = one.micro_batch
            on = {task: one.devices[role.stage] for task, role in part.roles.items()}
            made = graph.include(
                part.graph, one.values, prefix=one.prefix, seconds=part.seconds,
                nbytes=part.nbytes, on=on, only=level.tasks,
            )  # fmt: skip
            one.values.update(made)
        for operator, names in same_level[0].collectives.items():
            shares = [[one.values[argument] for argument in names.values()] for one in instances]
            nbytes = [first.micro_batch.nbytes[argument] for argument in names.values()]
            label = graph.fresh(f"{name}-{number + 1}")
            devices = [one.devices[0] for one in instances]
            results = _collective(graph, machine, operator, shares, devices, nbytes, label)
            for one, values in zip(instances, results, strict=True):
                one.values.update(zip(names, values, strict=True))


def _collective(
    graph: Graph, machine: Machine, operator: Callable[..., Any], shares: Sequence[list[Value]],
    devices: Sequence[str], nbytes: Sequence[int], name: str,
) -> list[list[Value]]:  # fmt: skip
    """Combine values of replicas on the first one's device; return the values that each reads.

    ``shares`` are several values of each replica, of so many bytes each.
    """
    if len(shares) == 1:
        return [shares[0]]
    size = sum(nbytes)
    combine, launches = COLLECTIVES[operator]
    packed = [own[0] for own in shares]
    if len(nbytes) > 1:
        packed = [
            memory_task(
                graph, machine, device, pack, own, accessed=2 * size,
                name=f"{name}.pack.{device}", nbytes=size,
            )
            for own, device in zip(shares, devices, strict=True)
        ]  # fmt: skip
    made = memory_task(
        graph, machine, devices[0], combine, packed, accessed=2 * len(shares) * size,
        launches=launches, name=name, nbytes=size,
    )  # fmt: skip
    if len(nbytes) == 1:
        return [[made] for _ in shares]
    return [
        memory_task(
            graph, machine, device, unpack, made, own, accessed=2 * size, launches=len(own),
            name=f"{name}.unpack.{device}", outputs=len(own), nbytes=max(nbytes),
        )
        for own, device in zip(shares, devices, strict=True)
    ]  # fmt: skip


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the concatenation of tensors as one flat tensor."""
    return torch.cat(list(tensors), 1)


def unpack(tensor: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the parts of a packed tensor, in the shapes and dtypes of other tensors."""
    parts = torch.split(tensor, [item.shape[1] for item in like], 1)
    return tuple(part.to(item.dtype, copy=True) for part, item in zip(parts, like, strict=True))
