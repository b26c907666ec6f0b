"""Exchange values between replicas in the middle of a pass.

Replicas go through a pass together, level by level (``levels``). All exchanges of one level by the
same operator are combined into one. One device combines the shares, so all replicas get the same
bits. Knows pieces, and how an operator combines shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosched import Graph, Machine, ScheduleError, Value
from autosched.parallel.micro_batch import Pieces
from autosched.parallel.sync_batch_norm import EXCHANGES
from autosched.parallel.traffic import memory_seconds

__all__ = ["Pass", "include"]


@dataclass(frozen=True)
class Pass:
    """A micro-batch: its rows, its pieces, the device of each stage, and by name its values in a step's graph."""

    rows: int
    pieces: Pieces
    devices: Sequence[str]
    prefix: str
    values: dict[str, Value]

    def output(self, label: str) -> Value:
        """Return the value that is an output."""
        graph = self.pieces.graph
        return self.values[graph.values[graph.outputs[label]].name]


def include(graph: Graph, passes: Sequence[Pass], machine: Machine, name: str) -> None:
    """Add the tasks of micro-batches, one of each replica, with the exchanges between them.

    Raises ScheduleError for micro-batches with different exchanges.
    """
    levels = [one.pieces.levels for one in passes]
    for one, found in zip(passes, levels, strict=True):
        if [level.exchanges for level in found] != [level.exchanges for level in levels[0]]:
            raise ScheduleError(
                f"batch norms can be synchronised where replicas have the same, but the model has others for "
                f"{one.rows} rows than for {passes[0].rows}"
            )
    for number, together in enumerate(zip(*levels, strict=True)):
        for one, level in zip(passes, together, strict=True):
            pieces = one.pieces
            made = graph.include(
                pieces.graph, one.values, prefix=one.prefix, seconds=pieces.seconds, nbytes=pieces.nbytes,
                on={task: one.devices[piece.stage] for task, piece in pieces.piece.items()}, only=level.tasks,
            )  # fmt: skip
            one.values.update(made)
        for operator in together[0].exchanges:
            _exchange(graph, passes, number, operator, machine, name)


def _exchange(
    graph: Graph,
    passes: Sequence[Pass],
    level: int,
    operator: Callable[..., Any],
    machine: Machine,
    name: str,
) -> None:
    """Replace the values of micro-batches at the end of a level by those of all replicas together."""
    pairs = passes[0].pieces.levels[level].exchanges[operator]
    read = exchange(
        graph, [[one.values[given] for given in pairs.values()] for one in passes],
        [one.devices[0] for one in passes], operator, machine=machine,
        nbytes=[passes[0].pieces.nbytes[given] for given in pairs.values()], name=graph.fresh(f"{name}-{level + 1}"),
    )  # fmt: skip
    for one, values in zip(passes, read, strict=True):
        one.values.update(zip(pairs, values, strict=True))


def exchange(
    graph: Graph,
    shares: Sequence[Sequence[Value]],
    devices: Sequence[str],
    operator: Callable[..., Any],
    *,
    machine: Machine,
    nbytes: Sequence[int],
    name: str,
) -> list[list[Value]]:
    """Combine the shares of replicas on the first one's device.

    Return the value that each reads then.

    ``shares`` are values by replica, several of so many bytes each, and ``devices`` where they are.
    All read the same bits.
    """
    if len(shares) == 1:
        return [list(own) for own in shares]
    size, (together, launches) = sum(nbytes), EXCHANGES[operator]
    here = list(zip(shares, devices, strict=True))
    packed = [own[0] for own in shares]
    if len(nbytes) > 1:
        packed = [
            graph.add(
                pack, list(own), name=f"{name}.pack.{device}", on=device, nbytes=size,
                seconds=memory_seconds(machine, device, 2 * size),
            )
            for own, device in here
        ]  # fmt: skip
    made = graph.add(
        together, packed, name=name, on=devices[0], nbytes=size,
        seconds=memory_seconds(machine, devices[0], 2 * len(shares) * size, launches),
    )  # fmt: skip
    if len(nbytes) == 1:
        return [[made] for _ in shares]
    return [
        graph.add(
            unpack, made, list(own), name=f"{name}.unpack.{device}", on=device, outputs=len(own), nbytes=max(nbytes),
            seconds=memory_seconds(machine, device, 2 * size, len(own)),
        )
        for own, device in here
    ]  # fmt: skip


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the concatenation of tensors as one flat tensor."""
    return torch.cat(list(tensors), 1)


def unpack(tensor: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the parts of a packed tensor, in the shapes and dtypes of other tensors."""
    parts = torch.split(tensor, [item.shape[1] for item in like], 1)
    return tuple(part.to(item.dtype, copy=True) for part, item in zip(parts, like, strict=True))
