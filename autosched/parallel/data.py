"""Data parallelism: replicas of a model on shares of the batch.

Each device trains a replica, and gradients are summed over the replicas. The step is one graph, so
one bucket of gradients is summed while backward computes the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal

import torch

from autosched import AutoschedError, CaptureError, Machine, ScheduleError
from autosched.parallel.all_reduce import SIZES, Compression, buckets, check_sizes
from autosched.parallel.batches import batch_homes, check_count, divided, shares
from autosched.parallel.costs import tabulated
from autosched.parallel.micro_batch import MicroBatch, Size, micro_batch_of
from autosched.parallel.ranks import ranks_of
from autosched.parallel.step import Step
from autosched.parallel.step_graph import StepSpec
from autosched.parallel.template import Loss, Template, accumulating
from autosched.parallel.training import Captures, Planned, Training, check_strategy
from autosched.parallel.updates import Bucket

_Names = tuple[tuple[str, ...], ...]  # of the gradients in each bucket
_Division = tuple[int | None, ...]


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
    shares: Shares = "auto",
    clip_grad_norm: float | None = None,
    averages: bool = True,
    **options: Any,
) -> Step:
    """Return a training step that divides each batch among devices.

    Each device trains its own copy of the model on its share of the rows, gradients are summed, and
    each device updates its copy. The model and the optimizer are the user's own, on the first
    device, and so is ``state_dict``; copies are updated after changes between steps. The result of
    a step is that of the shares, ``batch[start:end]``, one after another, with gradients added in
    the order of devices; ``"ring"`` adds those of three or more in another order, and so does
    ``"exchange"`` on several nodes.

    * ``devices``: default: all accelerators. A batch of fewer rows than devices leaves some devices
      without rows.
    * ``reduction``: where gradients are summed: ``"sum"``, on the first device; ``"cpu"``, on the
      host; ``"ring"``; ``"exchange"``, a chunk on each device, inside of nodes first; ``"gather"``, all
      on each device; ``"auto"``: the one that is predicted to be fastest, over
      several ranks of those that add in the order of devices.
    * ``buckets``: bytes of gradients that are summed together: of the first bucket, and of the
      others; ``"auto"`` tries several.
    * ``compression``: ``Half()``, ``Int8()`` or ``TopK(share)``: send fewer bytes, and add what was
      not sent in later steps.
    * ``accumulate``: how many micro-batches each device computes, one after another, for one sum.
    * ``shares``: numbers, one for each device, in whose proportion rows are divided; a device with
      0 takes no part, and the first other one has the user's model. ``"auto"``: equal shares, or
      for devices that differ those by speed, also without the slowest, if these are predicted to
      be faster; where none of these fit, less on devices with less memory. ``notes`` has it.
    * ``clip_grad_norm``: clip gradients, all together, by that norm as torch does;
      ``step.grad_norm`` is the norm before. Hooks of the optimizer's step may change them, too.
    * ``averages``: whether ``loss_fn`` averages over a batch; otherwise it sums.
    * ``options``: ``backend``, ``check``, ``costs``, ``in_flight``, ``outputs``, ``progress``,
      ``replay`` of ``schedule``; and ``fuse``, for regions compiled by Inductor.

    Batch norms normalise a replica's rows by their own statistics, and the running statistics of the
    first replica with rows are the model's, as with ``nn.DataParallel``. Other buffers that a step
    writes and reads, such as a running centre, have at the beginning of a step the value that the
    first replica with rows left.

    On a machine of ``Machine.cluster`` each rank passes rows of its own, and gets the loss of all.
    Rank 0's model and optimizer count. Where ranks differ in a step, all raise the same error.

    Raises ScheduleError and MachineError for invalid arguments.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> machine = Machine.emulated(gpus=2)
    >>> step = data_parallel(model, torch.nn.MSELoss(), optimizer, machine, backend="host")
    >>> step(torch.ones(6, 4), torch.zeros(6, 2)) > step(torch.ones(6, 4), torch.zeros(6, 2))
    tensor(True)
    """
    check_count("accumulate", accumulate)
    check_sizes(SIZES if buckets == "auto" else buckets)
    trained = (model, loss_fn, optimizer)
    training = Training.of(
        "data_parallel", trained, machine, devices, options, averages, clip_grad_norm
    )
    check_shares(shares, [training.machine.device(name).rank for name in training.devices])
    how = (check_strategy(reduction), buckets, compression, accumulate, shares)
    return Step(training, lambda batch, counts: _Study(training, *how, batch, counts).best())


@dataclass
class _Study:
    """The captures and plans for one kind of batch; ``counts`` are the rows that each rank passes."""

    training: Training
    reduction: str
    sizes: Sequence[float] | Literal["auto"]
    compression: Compression | None
    accumulate: int
    shares: Shares
    batch: Sequence[Any]
    counts: Sequence[int]

    def __post_init__(self) -> None:
        self.machine = self.training.machine
        self.devices = self.training.devices
        self.captures = Captures(self.training, self.batch, sum(self.counts))
        self.is_enough = False  # memory, for a plan in which nothing is repeated

    def best(self) -> Planned:
        """Return the fastest plan of all divisions of the rows that fit."""
        found = list[Planned]()
        errors = list[AutoschedError]()
        for weights in (self._weights(), self._by_memory()):
            for division in dict.fromkeys(map(self._division, weights)):
                try:
                    found.append(self.planned(division))
                except (ScheduleError, CaptureError) as error:  # too little memory, or one row
                    errors.append(error)
            if self.is_enough:
                break
        if not found:
            raise errors[0]
        return min(found, key=lambda plan: plan.schedule.makespan)

    # ---- divisions: the rows of each device, None for those that take no part

    def _weights(self) -> list[Sequence[float]]:
        """Return the shares to try: equal ones, and those by speed, also without the slowest."""
        if self.shares != "auto":
            return [self.shares]
        found: list[Sequence[float]] = [[1.0] * len(self.devices)]
        devices = [self.machine.device(name) for name in self.devices]
        rates = {(d.flops_per_second, d.bytes_per_second, d.launch_seconds) for d in devices}
        if len(rates) == 1:
            return found
        # Of a micro-batch; batch norms refuse one row.
        size = max(2, -(-max(self.counts) // (self.accumulate * len(devices))))
        (one,) = self.captures.of([size]).values()
        table, _ = tabulated(one.graph, one.estimate.costs, self.machine)
        seconds = [sum(own[name] for own in table.values()) for name in self.devices]
        order = sorted(seconds)
        slowest = [a for a, b in pairwise(order) if b > ALIKE * a]  # of those that are kept
        for limit in [order[-1], *reversed(slowest)] if slowest else []:
            found.append([float(own <= limit) for own in seconds])
            found.append([1 / own if own <= limit else 0.0 for own in seconds])
        return found

    def _by_memory(self) -> list[Sequence[float]]:
        """Return the shares to try if none of those fits whole: devices with less memory get less."""
        limits = [self.machine.device(name).nbytes for name in self.devices]
        if self.shares != "auto" or min(limits) == max(limits):
            return []
        parts = (0.5, 0.25, 0.125, 0.0)
        return [[part if own < max(limits) else 1.0 for own in limits] for part in parts]

    def _division(self, weights: Sequence[float]) -> _Division:
        """Divide the rows of each rank; all ranks take part, if without rows."""
        found: list[int | None] = [None] * len(self.devices)
        ranks = [self.machine.device(name).rank for name in self.devices]
        known = ranks_of(self.machine, self.devices)
        groups = [[i for i, own in enumerate(ranks) if own == rank] for rank in known]
        if len(self.counts) == 1:  # one process passes all rows
            groups = [[*chain(*groups)]]
        for rows, own in zip(self.counts, groups, strict=True):
            chosen = [weights[i] for i in own]
            if not any(chosen):
                chosen = [1.0] * len(own)
            for i, weight, share in zip(own, chosen, divided(rows, chosen), strict=True):
                found[i] = share if weight else None
        taking_part = {rank for rank, own in zip(ranks, found, strict=True) if own is not None}
        pairs = zip(ranks, found, strict=True)
        return tuple(own if rank in taking_part else 0 for rank, own in pairs)

    # ---- plans

    def planned(self, division: _Division) -> Planned:
        """Return the fastest plan of a division, of all reductions and buckets."""
        training = self.training
        devices = [
            name for name, own in zip(self.devices, division, strict=True) if own is not None
        ]
        # 1. Divide each share into micro-batches.
        cuts = tuple(shares(own, self.accumulate) for own in division if own is not None)
        # 2. Capture each size, as the first micro-batch and as a further one.
        first = self.captures.of(chain(*cuts))
        one = next(iter(first.values()))
        templates = {(size, True): template for size, template in first.items()}
        if self.accumulate > 1:
            templates |= {(size, False): accumulating(t) for size, t in first.items()}
        # 3. Schedule the step with each reduction and all buckets.
        tried: dict[tuple[str, _Names], float] = {}
        plans = list[Planned]()
        tensors = {name: one.examples[name] for name in one.gradients}
        notes = {"tried": tried, "shares": dict(zip(devices, map(sum, cuts), strict=True))}
        for names in self._buckets(tensors, len(devices)):
            made = tuple(Bucket(0, {n: one.examples[n] for n in group}) for group in names)
            spec = StepSpec(
                "data parallel", training.machine, tuple((device,) for device in devices),
                cuts, self._micro_batches(templates, names), made,
                homes=batch_homes(one, self.batch), divided=True, compression=self.compression,
            )  # fmt: skip
            plans += training.plans(spec, self.reduction, {**notes, "buckets": names})
        for plan in plans:
            tried[plan.notes["reduction"], plan.notes["buckets"]] = plan.schedule.makespan
            self.is_enough |= training.fits(plan.schedule)
        return training.best(plans)

    def _micro_batches(
        self, templates: Mapping[Size, Template], buckets: _Names
    ) -> dict[Size, MicroBatch]:
        found = {}
        for size, template in templates.items():
            stage = {task.name: 0 for task in template.graph.tasks}
            found[size] = micro_batch_of(template, stage, self.machine, buckets=buckets)
        return found

    def _buckets(self, tensors: Mapping[str, torch.Tensor], count: int) -> list[_Names]:
        """Return buckets to try, for gradients in the order in which they are computed."""
        if count == 1:
            return [(tuple(tensors),)]
        total = sum(tensor.nbytes for tensor in tensors.values())
        sizes: list[Sequence[float]] = [SIZES, *((total / parts,) for parts in (1, 2, 4, 8, 16))]
        if self.sizes != "auto":
            sizes = [self.sizes]
        ready = [(name, tensor.nbytes, tensor.dtype) for name, tensor in tensors.items()]
        return list(dict.fromkeys(buckets(ready, size) for size in sizes))


# ---- shares by speed and memory


Shares = Sequence[float] | Literal["auto"]

ALIKE = 1.1  # devices that differ by less get equal shares


def check_shares(shares: Any, ranks: Sequence[int | None]) -> None:
    """Raise ScheduleError unless shares are ``"auto"``, or one number for each device.

    ``ranks`` are those of the devices; each needs one with rows.
    """
    fits = isinstance(shares, Sequence) and len(shares) == len(ranks)
    if isinstance(shares, str):
        fits = shares == "auto"
    elif fits and all(isinstance(one, (int, float)) and 0 <= one < math.inf for one in shares):
        fits = {rank for rank, one in zip(ranks, shares, strict=True) if one} == {*ranks}
    else:
        fits = False
    if not fits:
        raise ScheduleError(
            f"shares must be 'auto' or a sequence of {len(ranks)} numbers, one for each device, 0 "
            f"for one that takes no part while others of its rank do, got {shares!r}"
        )
