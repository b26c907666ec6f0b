"""Data parallelism: replicas of a model on shares of the batch.

Each device trains a replica, and gradients are summed over the replicas. The step is one graph, so
one bucket of gradients is summed while backward computes the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Literal

import torch

from autosched import Costs, Machine, ScheduleError
from autosched.parallel.buckets import SIZES, buckets, check_sizes
from autosched.parallel.compression import Compression
from autosched.parallel.micro_batch import pieces_of
from autosched.parallel.step import Planned, Step
from autosched.parallel.step_graph import Grid
from autosched.parallel.template import BeforeStep, Loss, Template, accumulating
from autosched.parallel.training import (
    Sums,
    Trained,
    batch_homes,
    check_count,
    check_strategy,
    devices_of,
    shares,
)
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
    clip_grad_norm: float | None = None,
    before_step: BeforeStep | None = None,
    averages: bool = True,
    **options: Any,
) -> Step:
    """Return a training step that divides each batch among devices.

    Each device trains its own copy of the model on its share of the rows, gradients are summed, and
    each device updates its copy. The model and the optimizer are the user's own, on the first
    device, and so is ``state_dict``; copies are updated after changes between steps. The result of
    a step is that of the shares, ``batch[start:end]``, one after another, with gradients added in
    the order of devices; ``"ring"`` and ``"tree"`` add those of three or more in another order, and
    so does ``"exchange"`` on several nodes.

    * ``devices``: default: all accelerators. A batch of fewer rows than devices leaves some devices
      without rows.
    * ``reduction``: where gradients are summed: ``"sum"``, on the first device; ``"cpu"``, on the
      host; ``"ring"``; ``"tree"``; ``"exchange"``, a piece on each device, inside of nodes first;
      ``"auto"``: the one that is predicted to be fastest.
    * ``buckets``: bytes of gradients that are summed together: of the first bucket, and of the
      others; ``"auto"`` tries several.
    * ``compression``: ``Half()``, ``Int8()`` or ``TopK(share)``: send fewer bytes, and add what was
      not sent in later steps.
    * ``accumulate``: how many micro-batches each device computes, one after another, for one sum.
    * ``clip_grad_norm``: clip gradients, all together, by that norm as torch does;
      ``step.grad_norm`` is the norm before.
    * ``before_step``: a function of the model that changes gradients in another way, before the
      optimizer's step.
    * ``averages``: whether ``loss_fn`` averages over a batch; otherwise it sums.
    * ``options``: ``backend``, ``check``, ``costs``, ``nvtx``, ``outputs``, ``progress``,
      ``replay`` of ``schedule``.

    Batch norms normalise a replica's rows by their own statistics, and the first replica's running
    statistics are the model's, as with ``nn.DataParallel``; with ``batch_norm="synchronised"``, by
    those of all replicas' rows, as one device with the whole batch would. Other buffers that a step
    writes and reads, such as a running centre, have at the beginning of a step the value that the
    first replica left. Raises ScheduleError and MachineError for invalid arguments.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = data_parallel(model, torch.nn.MSELoss(), optimizer, Machine.emulated(gpus=2), backend="host")
    >>> step(torch.ones(6, 4), torch.zeros(6, 2)) > step(torch.ones(6, 4), torch.zeros(6, 2))
    tensor(True)
    """
    name = "data_parallel"
    trio = (model, loss_fn, optimizer)
    check_count("accumulate", accumulate)
    check_sizes(SIZES if buckets == "auto" else buckets)
    machine = Machine.local() if machine is None else machine
    if batch_norm not in _BATCH_NORMS:
        raise ScheduleError(
            f"batch_norm must be {' or '.join(map(repr, _BATCH_NORMS))}, got {batch_norm!r}"
        )
    chosen = devices_of(machine, devices)
    trained = Trained.of(
        name, trio, machine, chosen[0], averages, options, clip_grad_norm, before_step
    )
    synchronised = batch_norm == "synchronised" and len(chosen) > 1
    strategy = check_strategy(reduction)
    system = _DataParallel(
        trained, chosen, strategy, buckets, compression, accumulate, synchronised
    )
    return Step(model, loss_fn, optimizer, machine, system.plan, trained.place, before_step)


@dataclass(frozen=True)
class _DataParallel:
    trained: Trained
    devices: tuple[str, ...]
    strategy: str
    sizes: Sequence[float] | Literal["auto"]
    compression: Compression | None
    accumulate: int
    synchronised: bool

    def plan(self, batch: Sequence[Any], rows: int) -> Planned:
        """Capture the parts of a step for a batch, and choose the schedule that is predicted to be fastest."""
        cuts = tuple(shares(share, self.accumulate) for share in shares(rows, len(self.devices)))
        cuts += ((),) * (len(self.devices) - len(cuts))
        rounds = list(zip_longest(*cuts, fillvalue=0))
        if self.synchronised and any(sum(sizes) == 1 for sizes in rounds):
            self.trained.passes(
                batch, [1], rows
            )  # torch says so if batch norms cannot do with one row
        passes = self.trained.passes(batch, chain(*cuts), rows, self.synchronised)
        one = next(iter(passes.values()))
        homes = batch_homes(next(iter(passes.values())), batch)
        tried: dict[tuple[str, tuple[tuple[str, ...], ...]], float] = {}
        best: Planned | None = None
        for grouped, grid in self._grids(passes, cuts, homes):
            for name, (made, built) in self.trained.reduced(grid, Sums(self.strategy, ())).items():
                tried[name, grouped] = made.makespan
                if best is None or made.makespan < best.schedule.makespan:
                    notes = {"reduction": name, "buckets": grouped, "tried": tried}
                    best = Planned(made, built, one, grid.updates[0].state, notes)
        assert best is not None
        return best

    def _grids(
        self,
        passes: Mapping[int, Template],
        cuts: tuple[tuple[int, ...], ...],
        homes: Mapping[str, str],
    ) -> Iterator[tuple[tuple[tuple[str, ...], ...], Grid]]:
        """Yield ways to put gradients in buckets, by name, and the step for each."""
        one = next(iter(passes.values()))
        several = len(self.devices) > 1
        stage = {task.name: 0 for one in passes.values() for task in one.graph.tasks}
        further = {size: accumulating(one) for size, one in passes.items() if self.accumulate > 1}
        kinds = [
            {size: (t, Costs.estimate(t.graph, t.examples)) for size, t in found.items()}
            for found in (passes, further)
        ]
        tensors = {name: one.examples[name] for name in one.gradients}
        for grouped in self._groups(tensors) if several else [(tuple(tensors),)]:
            made = tuple(Bucket(0, {name: tensors[name] for name in names}) for names in grouped)
            first, more = (
                {
                    s: pieces_of(t, stage, c, self.trained.machine, buckets=grouped)
                    for s, (t, c) in kind.items()
                }
                for kind in kinds
            )
            yield grouped, Grid(
                "data parallel", self.trained.machine, tuple((device,) for device in self.devices), cuts, first, more,
                made, self.trained.updates(one, made, several), homes=homes, compression=self.compression,
            )  # fmt: skip

    def _groups(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[tuple[str, ...], ...]]:
        """Return buckets (names) to try, for gradients in the order in which they are made."""
        total = sum(tensor.nbytes for tensor in tensors.values())
        tried = (
            [SIZES, *((total / parts,) for parts in (1, 2, 4, 8, 16))]
            if self.sizes == "auto"
            else [self.sizes]
        )
        ready = [(name, tensor.nbytes, tensor.dtype) for name, tensor in tensors.items()]
        return list(dict.fromkeys(buckets(ready, sizes) for sizes in tried))


_BATCH_NORMS = ("replica", "synchronised")
