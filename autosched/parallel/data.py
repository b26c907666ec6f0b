"""Data parallelism: each device trains a replica of the model on its share of the batch, and gradients are summed.

One graph: the sum of one bucket of gradients goes on while backward makes the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, Literal

import torch

from autosched import Machine, Schedule, ScheduleError
from autosched.parallel.buckets import SIZES, buckets
from autosched.parallel.compress import Compression
from autosched.parallel.grid import Built, Grid
from autosched.parallel.planning import Trained, batch_homes, devices_of, shares, torch_device
from autosched.parallel.reduce import STRATEGIES
from autosched.parallel.step import Planned, Step
from autosched.parallel.template import Loss, Template
from autosched.parallel.updates import Bucket

__all__ = ["data_parallel"]


def data_parallel(
    model: torch.nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    machine: Machine | None = None,
    *,
    devices: Sequence[str] | None = None,
    reduction: str = "auto",
    buckets: Sequence[float] | Literal["auto"] = SIZES,
    compression: Compression | None = None,
    accumulate: int = 1,
    batch_norm: Literal["replica", "synchronised"] = "replica",
    averages: bool = True,
    **options: Any,
) -> Step:
    """Return a training step that shares each batch out among devices.

    Batch norms normalise a replica's rows by their own statistics, and the first replica's running statistics are the
    model's, as with ``nn.DataParallel``; or, ``batch_norm="synchronised"``, by those of all replicas' rows, as one
    device would that has the whole batch. Other buffers that a step writes and reads, such as a running centre, are at
    the beginning of a step what the first replica left.
    """
    machine = Machine.local() if machine is None else machine
    if batch_norm not in _BATCH_NORMS:
        raise ScheduleError(f"batch_norm must be {' or '.join(map(repr, _BATCH_NORMS))}, got {batch_norm!r}")
    if reduction != "auto" and reduction not in STRATEGIES:
        raise ScheduleError(f"reduction must be 'auto' or one of {', '.join(map(repr, STRATEGIES))}, got {reduction!r}")
    chosen = devices_of(machine, devices)
    place = torch_device(machine, chosen[0])
    trained = Trained(model, loss_fn, optimizer, machine, averages, options, place)
    system = _DataParallel(trained, chosen, reduction, buckets, compression, accumulate, batch_norm == _BATCH_NORMS[1])
    return Step(model, loss_fn, optimizer, machine, system.plan, place)


class _DataParallel:
    def __init__(
        self,
        trained: Trained,
        devices: tuple[str, ...],
        reduction: str,
        sizes: Sequence[float] | Literal["auto"],
        compression: Compression | None,
        accumulate: int,
        synchronised: bool,
    ):
        self.trained, self.devices, self.reduction, self.sizes = trained, devices, reduction, sizes
        self.compression, self.accumulate = compression, accumulate
        self.synchronised = synchronised and len(devices) > 1

    def plan(self, batch: Sequence[Any], rows: int) -> Planned:
        """Capture what a batch needs, and choose what is predicted to be fastest."""
        cuts = tuple(shares(share, self.accumulate) for share in shares(rows, len(self.devices)))
        cuts += ((),) * (len(self.devices) - len(cuts))
        rounds = list(zip_longest(*cuts, fillvalue=0))
        if self.synchronised and any(sum(sizes) == 1 for sizes in rounds):
            self.trained.passes(batch, [1], rows)  # torch says so if batch norms cannot do with one row
        passes = self.trained.passes(batch, chain(*cuts), rows, self.synchronised)
        one = next(iter(passes.values()))
        plans = {
            (strategy, tuple(sizes)): self._plan(passes, cuts, sizes, strategy, batch_homes(one, batch))
            for sizes in self._sizes(one)
            for strategy in self._strategies()
        }
        (strategy, _), (made, built, grid) = min(plans.items(), key=lambda item: item[1][0].makespan)
        notes = {
            "reduction": strategy,
            "buckets": tuple(tuple(bucket.parameters) for bucket in grid.buckets),
            "tried": {choice: plan[0].makespan for choice, plan in plans.items()},
        }
        return Planned(made, built, one, grid.updates[0].state, notes)

    def _strategies(self) -> Sequence[str]:
        if self.reduction != "auto":
            return (self.reduction,)
        few = len(self.devices) <= _MOST_FOR_A_RING
        return [name for name in STRATEGIES if few or name != "ring"] if len(self.devices) > 1 else ("sum",)

    def _sizes(self, one: Template) -> list[Sequence[float]]:
        """Return the sizes of buckets to try."""
        if self.sizes != "auto":
            return [self.sizes]
        total = sum(one.examples[name].nbytes for name in one.gradients)
        return [(float(total),), *((total / parts,) for parts in (2, 4, 8, 16)), SIZES]

    def _plan(
        self,
        passes: dict[int, Template],
        cuts: tuple[tuple[int, ...], ...],
        sizes: Sequence[float],
        strategy: str,
        homes: Mapping[str, str],
    ) -> tuple[Schedule, Built, Grid]:
        one = next(iter(passes.values()))
        several = len(self.devices) > 1
        tensors = {name: one.examples[name] for name in one.gradients}
        ready = [(name, tensor.nbytes, tensor.dtype) for name, tensor in tensors.items()]
        grouped = buckets(ready, sizes) if several else (tuple(tensors),)
        made = tuple(Bucket(0, {name: tensors[name] for name in names}) for names in grouped)
        stage = {task.name: 0 for one in passes.values() for task in one.graph.tasks}
        first, more = self.trained.pieces(passes, stage, self.accumulate > 1, buckets=grouped)
        grid = Grid(
            "data parallel", self.trained.machine, tuple((device,) for device in self.devices), cuts, first, more,
            made, self.trained.updates(one, made, several), homes=homes, reduction=strategy,
            compression=self.compression,
        )  # fmt: skip
        return *self.trained.scheduled(grid), grid


_BATCH_NORMS = ("replica", "synchronised")
_MOST_FOR_A_RING = 16  # devices: a ring has n * n tasks
