"""Planning: from a model, a batch and devices to the grid of a step, and its schedule.

Captures what micro-batches and updates are, for each number of rows that occurs. Knows no system: which devices there
are, and what is tried, others say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import autosched as asc
from autosched import Costs, Graph, Machine, MachineError, Schedule, ScheduleError, Value, in_order
from autosched.parallel.grid import Built, Grid, build
from autosched.parallel.pieces import Pieces, pieces_of
from autosched.parallel.template import Loss, Template, accumulating, pass_of, update_of
from autosched.parallel.updates import Bucket, Update, updates_of

__all__ = ["Trained", "devices_of", "settle", "shares"]


@dataclass(frozen=True)
class Trained:
    """What is trained, where, and how schedules are made: options of ``schedule`` are ``options``."""

    model: torch.nn.Module
    loss_fn: Loss
    optimizer: torch.optim.Optimizer
    machine: Machine
    averages: bool
    options: Mapping[str, Any]

    def passes(self, batch: Sequence[Any], sizes: Iterable[int], rows: int) -> dict[int, Template]:
        """Capture what micro-batches of each size do, as parts of a batch of so many rows."""
        return {
            size: pass_of(
                self.model, self.loss_fn, self.optimizer, cut(batch, size),
                weight=size / rows if self.averages else 1.0, rows=size,
            )
            for size in dict.fromkeys(sizes) if size
        }  # fmt: skip

    def pieces(
        self, passes: Mapping[int, Template], stage: Mapping[str, int], several: bool, **how: Any
    ) -> tuple[dict[int, Pieces], dict[int, Pieces]]:
        """Return the pieces of first and of further micro-batches, by their size; ``several``: there are any."""
        first = {size: self._pieces(one, stage, **how) for size, one in passes.items()}
        more = {size: self._pieces(accumulating(one), stage, **how) for size, one in passes.items() if several}
        return first, more

    def _pieces(self, template: Template, stage: Mapping[str, int], **how: Any) -> Pieces:
        costs = Costs.estimate(template.graph, template.examples)
        return pieces_of(template, stage, costs, self.machine, **how)

    def updates(self, one: Template, buckets: Sequence[Bucket], flat: bool) -> tuple[Update, ...]:
        """Capture what the optimizer does to the parameters in buckets, stage by stage."""
        found: list[Update] = []
        for stage in dict.fromkeys(bucket.stage for bucket in buckets):
            numbers = [number for number, bucket in enumerate(buckets) if bucket.stage == stage]
            parameters = {name: tensor for n in numbers for name, tensor in buckets[n].parameters.items()}
            template = update_of(self.model, self.loss_fn, self.optimizer, parameters)
            found += updates_of(template, buckets, numbers, self.machine, flat)
        return tuple(found)

    def scheduled(self, grid: Grid) -> tuple[Schedule, Built]:
        """Return a step's schedule."""
        built = build(grid)
        return asc.schedule(built.graph, self.machine, policy=in_order(built.sequences), **self.options), built


def settle(graph: Graph, machine: Machine, state: Any) -> None:
    """Move the tensors of a state to the devices where a graph has them, if these are real."""
    if machine.imagined:
        return
    for name, (place, tensor) in state.places().items():
        value = graph.names.get(name)
        if isinstance(value, Value) and value.producer is None and value.home is not None:
            device = machine.device(value.home)
            there = tensor.detach().to(device.physical or device.name)
            if place[0] == "parameter":
                tensor.data = there
            elif there.device != tensor.device:
                state.put(place, there)


def devices_of(machine: Machine, devices: Sequence[str] | None) -> tuple[str, ...]:
    """Return the devices to use: those given, or all accelerators, or all there are. Raises MachineError."""
    if devices is None:
        return machine.accelerators or machine.names
    if isinstance(devices, str) or not devices or len(set(devices)) != len(devices):
        raise MachineError(f"devices= needs the names of one or more devices, each once, got {devices!r}")
    return tuple(machine.device(device).name for device in devices)


def cut(batch: Any, rows: int) -> Any:
    """Return the first rows of all tensors in a batch."""
    if isinstance(batch, (tuple, list)):
        return type(batch)(cut(item, rows) for item in batch)
    if isinstance(batch, dict):
        return {key: cut(item, rows) for key, item in batch.items()}
    return batch[:rows] if isinstance(batch, torch.Tensor) and batch.dim() else batch


def shares(rows: int, count: int) -> tuple[int, ...]:
    """Cut so many rows into shares as even as can be, the larger ones first; fewer where there are not so many rows.

    >>> shares(7, 2), shares(2, 3)
    ((4, 3), (1, 1))
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ScheduleError(f"a batch can be cut into 1 or more parts, got {count!r}")
    return tuple(rows // count + (number < rows % count) for number in range(min(rows, count)))
