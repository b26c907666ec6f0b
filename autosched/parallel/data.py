"""Data parallelism: replicas of a model on shares of the batch.

Each device trains a replica, and gradients are summed over the replicas. The step is one graph, so
one bucket of gradients is summed while backward computes the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any, Literal

import torch

from autosched import Costs, Machine, ScheduleError
from autosched.parallel.arguments import check_strategy
from autosched.parallel.batches import batch_homes, check_count, shares
from autosched.parallel.buckets import SIZES, buckets, check_sizes
from autosched.parallel.compression import Compression
from autosched.parallel.micro_batch import MicroBatch, micro_batch_of
from autosched.parallel.planned import Planned
from autosched.parallel.ranks import ranks_of
from autosched.parallel.step import Step
from autosched.parallel.step_spec import StepSpec
from autosched.parallel.template import BeforeStep, Loss, Template, accumulating
from autosched.parallel.training import Reduction, Training
from autosched.parallel.updates import Bucket

__all__ = ["data_parallel"]

_BATCH_NORMS = ("replica", "synchronised")
_Names = tuple[tuple[str, ...], ...]  # of the gradients in each bucket


def data_parallel(
    model: torch.nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    machine: Machine | None = None,
    *,
    devices: Sequence[str] | None = None,
    reduction: str = "auto",
    exact: bool = True,
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
    the order of devices; ``"ring"`` adds those of three or more in another order, and so does
    ``"exchange"`` on several nodes.

    * ``devices``: default: all accelerators. A batch of fewer rows than devices leaves some devices
      without rows.
    * ``reduction``: where gradients are summed: ``"sum"``, on the first device; ``"cpu"``, on the
      host; ``"ring"``; ``"exchange"``, a chunk on each device, inside of nodes first; ``"gather"``, all
      on each device; ``"auto"``: the one that is predicted to be fastest, over
      several ranks of those that add in the order of devices.
    * ``exact``: ``False`` permits the all-reduce of torch.distributed over several ranks,
      ``"library"``, which adds in an order of its own; ``"auto"`` tries it, too. All ranks get the
      same bits. Each element of the sum of ``n`` gradients ``g`` differs from the exact one by at
      most ``k * u / (1 - k * u) * sum(|g|)``, with ``k = n - 1``, ``u`` half the ``eps`` of their
      dtype, as for any order (Higham, "Accuracy and stability of numerical algorithms", 2nd ed.,
      section 4.2). One process adds in the order of ranks, and without ranks nothing changes.
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
    * ``options``: ``backend``, ``check``, ``costs``, ``in_flight``, ``nvtx``, ``outputs``,
      ``progress``, ``replay`` of ``schedule``; and ``fuse``, for regions compiled by Inductor.

    Batch norms normalise a replica's rows by their own statistics, and the first replica's running
    statistics are the model's, as with ``nn.DataParallel``; with ``batch_norm="synchronised"``, by
    those of all replicas' rows, as one device with the whole batch would. Other buffers that a step
    writes and reads, such as a running centre, have at the beginning of a step the value that the
    first replica left.

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
    if batch_norm not in _BATCH_NORMS:
        raise ScheduleError(
            f"batch_norm must be {' or '.join(map(repr, _BATCH_NORMS))}, got {batch_norm!r}"
        )
    trained = (model, loss_fn, optimizer)
    training = Training.of(
        "data_parallel", trained, machine, devices, options, averages, clip_grad_norm, before_step
    )
    synchronised = batch_norm == "synchronised" and len(training.devices) > 1
    how = Reduction(check_strategy(reduction, exact), (), exact)
    system = _DataParallel(training, how, buckets, compression, accumulate, synchronised)
    return Step(training, system.plan)


@dataclass(frozen=True)
class _DataParallel:
    training: Training
    reduction: Reduction
    sizes: Sequence[float] | Literal["auto"]
    compression: Compression | None
    accumulate: int
    synchronised: bool

    def plan(self, batch: Sequence[Any], counts: Sequence[int]) -> Planned:
        """Return the plan that is predicted to be fastest, of all reductions and buckets.

        ``counts`` are the rows that each rank passes.
        """
        training = self.training
        count = len(training.devices)
        rows = sum(counts)
        # 1. Divide the rows among replicas, and each share into micro-batches.
        cuts = tuple(shares(share, self.accumulate) for share in self._shares(counts))
        if self.synchronised and any(sum(sizes) == 1 for sizes in zip_longest(*cuts, fillvalue=0)):
            training.passes(batch, [1], rows)  # torch refuses batch norms of one row
        # 2. Capture each size, as the first micro-batch and as a further one.
        first = training.passes(batch, chain(*cuts), rows, self.synchronised)
        more = {size: accumulating(t) for size, t in first.items() if self.accumulate > 1}
        one = next(iter(first.values()))
        costs = [
            {size: Costs.estimate(t.graph, t.examples) for size, t in templates.items()}
            for templates in (first, more)
        ]
        # 3. Schedule the step with each reduction and all buckets.
        tried: dict[tuple[str, _Names], float] = {}
        best: Planned | None = None
        for names in self._groups({name: one.examples[name] for name in one.gradients}):
            made = tuple(Bucket(0, {n: one.examples[n] for n in group}) for group in names)
            spec = StepSpec(
                "data parallel", training.machine, tuple((device,) for device in training.devices),
                cuts, self._micro_batches(first, costs[0], names),
                self._micro_batches(more, costs[1], names), made,
                training.updates(made, count > 1), homes=batch_homes(one, batch),
                counts=self._counts(cuts), compression=self.compression,
            )  # fmt: skip
            reduced = training.reduced(spec, self.reduction)
            for name, (schedule, built) in reduced.items():
                tried[name, names] = schedule.makespan
                if best is None or schedule.makespan < best.schedule.makespan:
                    notes = {"reduction": name, "buckets": names, "tried": tried}
                    settings = tuple(update.settings for update in spec.updates)
                    best = Planned(schedule, built, one, spec.updates[0].state, notes, settings)
        assert best is not None
        return best

    @cached_property
    def _replicas(self) -> dict[int | None, list[int]]:
        machine, devices = self.training.machine, self.training.devices
        found: dict[int | None, list[int]] = {rank: [] for rank in ranks_of(machine, devices)}
        for replica, device in enumerate(devices):
            found[machine.device(device).rank].append(replica)
        return found

    def _shares(self, counts: Sequence[int]) -> list[int]:
        """Return the rows of each replica; the replicas of a rank divide what it passes."""
        own = [*self._replicas.values()]
        if len(counts) == 1:  # one process passes all rows
            own = [[replica for replicas in own for replica in replicas]]
        found = [0] * len(self.training.devices)
        for rows, replicas in zip(counts, own, strict=True):
            divided = shares(rows, len(replicas))
            for replica, share in zip(replicas, divided, strict=False):
                found[replica] = share
        return found

    def _counts(self, cuts: Sequence[Sequence[int]]) -> dict[int | None, int] | None:
        """Return the rows of each rank; None without ranks."""
        if [*self._replicas] == [None]:
            return None
        return {
            rank: sum(sum(cuts[replica]) for replica in replicas)
            for rank, replicas in self._replicas.items()
        }

    def _micro_batches(
        self, templates: Mapping[int, Template], costs: Mapping[int, Costs], buckets: _Names
    ) -> dict[int, MicroBatch]:
        machine = self.training.machine
        found = {}
        for size, template in templates.items():
            stage = {task.name: 0 for task in template.graph.tasks}
            found[size] = micro_batch_of(template, stage, costs[size], machine, buckets=buckets)
        return found

    def _groups(self, tensors: Mapping[str, torch.Tensor]) -> list[_Names]:
        """Return buckets to try, for gradients in the order in which they are computed."""
        if len(self.training.devices) == 1:
            return [(tuple(tensors),)]
        total = sum(tensor.nbytes for tensor in tensors.values())
        sizes: list[Sequence[float]] = [SIZES, *((total / parts,) for parts in (1, 2, 4, 8, 16))]
        if self.sizes != "auto":
            sizes = [self.sizes]
        ready = [(name, tensor.nbytes, tensor.dtype) for name, tensor in tensors.items()]
        return list(dict.fromkeys(buckets(ready, size) for size in sizes))
