"""Data parallelism: replicas of a model on shares of the batch.

Each device trains a replica, and gradients are summed over the replicas. The step is one graph, so
one bucket of gradients is summed while backward computes the next.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch

from autosched import Costs, Machine, ScheduleError
from autosched.parallel.all_reduce import SIZES, Compression, buckets, check_sizes
from autosched.parallel.batches import batch_homes, check_count, divided, shares
from autosched.parallel.costs import tabulated
from autosched.parallel.micro_batch import MicroBatch, micro_batch_of
from autosched.parallel.ranks import ranks_of
from autosched.parallel.step import Planned, Step
from autosched.parallel.step_graph import StepSpec
from autosched.parallel.template import BeforeStep, Loss, Template, accumulating
from autosched.parallel.training import Training, check_strategy
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
    * ``buckets``: bytes of gradients that are summed together: of the first bucket, and of the
      others; ``"auto"`` tries several.
    * ``compression``: ``Half()``, ``Int8()`` or ``TopK(share)``: send fewer bytes, and add what was
      not sent in later steps.
    * ``accumulate``: how many micro-batches each device computes, one after another, for one sum.
    * ``shares``: numbers, one for each device, in whose proportion rows are divided; a device with
      0 takes no part, and the first other one has the user's model. ``"auto"``: equal shares of
      devices that are equally fast; otherwise, or where those do not fit, the division that is
      predicted to be fastest, also without the slowest. ``notes`` has it.
    * ``clip_grad_norm``: clip gradients, all together, by that norm as torch does;
      ``step.grad_norm`` is the norm before.
    * ``before_step``: a function of the model that changes gradients in another way, before the
      optimizer's step.
    * ``averages``: whether ``loss_fn`` averages over a batch; otherwise it sums.
    * ``options``: ``backend``, ``check``, ``costs``, ``in_flight``, ``nvtx``, ``outputs``,
      ``progress``, ``replay`` of ``schedule``; and ``fuse``, for regions compiled by Inductor.

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
        "data_parallel", trained, machine, devices, options, averages, clip_grad_norm, before_step
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
        self.captured: dict[int, Template] = {}

    def best(self) -> Planned:
        """Return the fastest plan of all divisions of the rows."""
        shares = self.shares
        weights = [1.0] * len(self.devices) if shares == "auto" else shares
        first = self._by_weights(weights)
        found = list[Planned]()
        errors = list[ScheduleError]()
        try:
            found.append(self.planned(first))
        except ScheduleError as error:  # too little memory, perhaps not with other shares
            errors.append(error)
        speeds = self._speeds([rows or 0 for rows in first]) if shares == "auto" else None
        for division in [] if speeds is None else self._divisions(speeds):
            with contextlib.suppress(ScheduleError):
                found.append(self.planned(division))
        if not found:
            raise errors[0]
        return min(found, key=lambda plan: plan.schedule.makespan)

    # ---- divisions: the rows of each device, None for those that take no part

    def _groups(self) -> list[tuple[int, list[int]]]:
        """Return rows, and the devices (indices) among which they are divided."""
        devices = range(len(self.devices))
        ranks = ranks_of(self.machine, self.devices)
        own = [[i for i in devices if self._rank(i) == rank] for rank in ranks]
        if len(self.counts) == 1:  # one process passes all rows
            own = [[*chain(*own)]]
        return list(zip(self.counts, own, strict=True))

    def _rank(self, device: int) -> int | None:
        return self.machine.device(self.devices[device]).rank

    def _by_weights(self, weights: Sequence[float]) -> _Division:
        found: list[int | None] = [None] * len(self.devices)
        for rows, own in self._groups():
            if any(chosen := [weights[i] for i in own]):
                for i, share in zip(own, divided(rows, chosen), strict=True):
                    found[i] = share if weights[i] else None
        return self._with_all_ranks(found)

    def _with_all_ranks(self, rows: Sequence[int | None]) -> _Division:
        """Return a division in which each rank takes part, if without rows."""
        ranks = {self._rank(i) for i, own in enumerate(rows) if own is not None}
        return tuple(own if self._rank(i) in ranks else 0 for i, own in enumerate(rows))

    def _divisions(self, speeds: Sequence[Speed]) -> Iterator[_Division]:
        """Yield equal shares and those by speed, of all devices and without the slowest.

        The memory that they need is estimated, so there are divisions that leave some of it free.
        """
        tried = set[_Division]()
        for kept in slowest_last(speeds):
            equal = self._by_weights([i in kept for i in range(len(speeds))])
            balanced = (self._balanced(speeds, kept, free) for free in (0.0, 0.2, 0.4))
            for division in (equal, *balanced):
                if division is not None and division not in tried:
                    tried.add(division)
                    yield division

    def _balanced(
        self, speeds: Sequence[Speed], kept: Collection[int], free: float
    ) -> _Division | None:
        found: list[int | None] = [None] * len(speeds)
        least = 2 * self.accumulate  # batch norms refuse one row
        for rows, group in self._groups():
            own = [i for i in group if i in kept] or group
            shares = balanced(rows, [speeds[i].with_free(free) for i in own], least)
            if shares is None:
                return None
            for i, share in zip(own, shares, strict=True):
                found[i] = share or None
        return self._with_all_ranks(found)

    def _speeds(self, even: Sequence[int]) -> list[Speed] | None:
        """Return what devices can do; None if equal shares suit them."""
        devices = [self.machine.device(name) for name in self.devices]
        limits = [device.nbytes for device in devices]
        rates = {(d.flops_per_second, d.bytes_per_second, d.launch_seconds) for d in devices}
        if len(rates) == len({*limits}) == 1:
            return None
        # 1. Seconds and bytes for micro-batches of two sizes.
        parts = self.accumulate
        large = -(-max(self.counts) // parts)
        sizes = (large // 2, large) if large > 3 else (large, 2 * large)
        templates = self._passes(sizes)
        (low, high) = (self._seconds(templates[size]) for size in sizes)
        peaks = [0.0, 0.0]
        if min(limits) < math.inf:
            peaks = [self._peak(size) for size in sizes]
        # 2. Those for any number of rows.
        grown = sizes[1] - sizes[0]
        nbytes = (peaks[1] - peaks[0]) / grown
        found = []
        for own, other, limit in zip(low, high, limits, strict=True):
            row = max(0.0, other - own) / grown
            most = (limit - peaks[0]) / nbytes + sizes[0] if nbytes > 0 else math.inf
            found.append(Speed(parts * max(0.0, own - row * sizes[0]), row, parts * most))
        ends = [speed.fixed + rows * speed.row for speed, rows in zip(found, even, strict=True)]
        fits = all(rows <= speed.most for speed, rows in zip(found, even, strict=True))
        return None if fits and max(ends) <= ALIKE * min(ends) else found

    def _seconds(self, one: Template) -> list[float]:
        """Return the seconds of a micro-batch on each device."""
        costs = Costs.estimate(one.graph, one.examples)
        table, _ = tabulated(one.graph, costs, self.machine)
        return [sum(seconds[name] for seconds in table.values()) for name in self.devices]

    def _peak(self, size: int) -> float:
        """Return the bytes that a replica needs for micro-batches, with what it sends and adds."""
        machine = self.machine
        free = tuple(replace(device, nbytes=math.inf) for device in machine.devices)
        training = replace(
            self.training, machine=replace(machine, devices=free), devices=self.devices[:1]
        )
        rows = size * self.accumulate
        plan = replace(self, training=training.alone, counts=[rows]).planned((rows,))
        gradients = (plan.template.examples[name].nbytes for name in plan.template.gradients)
        return plan.schedule.peak_bytes[self.devices[0]] + 2 * sum(gradients)

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
        first = self._passes(chain(*cuts))
        more = {size: accumulating(t) for size, t in first.items() if self.accumulate > 1}
        one = next(iter(first.values()))
        costs = [
            {size: Costs.estimate(t.graph, t.examples) for size, t in templates.items()}
            for templates in (first, more)
        ]
        # 3. Schedule the step with each reduction and all buckets.
        tried: dict[tuple[str, _Names], float] = {}
        best: Planned | None = None
        tensors = {name: one.examples[name] for name in one.gradients}
        for names in self._buckets(tensors, len(devices)):
            made = tuple(Bucket(0, {n: one.examples[n] for n in group}) for group in names)
            spec = StepSpec(
                "data parallel", training.machine, tuple((device,) for device in devices),
                cuts, self._micro_batches(first, costs[0], names),
                self._micro_batches(more, costs[1], names), made,
                training.updates(made, len(devices) > 1), homes=batch_homes(one, self.batch),
                counts=self._counts(devices, cuts), compression=self.compression,
            )  # fmt: skip
            reduced = training.reduced(spec, self.reduction)
            for name, (schedule, built) in reduced.items():
                tried[name, names] = schedule.makespan
                if best is None or schedule.makespan < best.schedule.makespan:
                    notes = {"reduction": name, "buckets": names, "tried": tried}
                    notes["shares"] = dict(zip(devices, map(sum, cuts), strict=True))
                    settings = tuple(update.settings for update in spec.updates)
                    best = Planned(schedule, built, one, spec.updates[0].state, notes, settings)
        assert best is not None
        return best

    def _passes(self, sizes: Iterable[int]) -> dict[int, Template]:
        """Capture micro-batches of each size, unless that was done."""
        wanted = [size for size in dict.fromkeys(sizes) if size]
        new = [size for size in wanted if size not in self.captured]
        self.captured.update(self.training.passes(self.batch, new, sum(self.counts)))
        return {size: self.captured[size] for size in wanted}

    def _counts(
        self, devices: Sequence[str], cuts: Sequence[Sequence[int]]
    ) -> dict[int | None, int] | None:
        """Return the rows of each rank; None without ranks."""
        ranks = [self.machine.device(name).rank for name in devices]
        if {*ranks} == {None}:
            return None
        found = dict.fromkeys(ranks_of(self.machine, devices), 0)
        for rank, sizes in zip(ranks, cuts, strict=True):
            found[rank] += sum(sizes)
        return found

    def _micro_batches(
        self, templates: Mapping[int, Template], costs: Mapping[int, Costs], buckets: _Names
    ) -> dict[int, MicroBatch]:
        found = {}
        for size, template in templates.items():
            stage = {task.name: 0 for task in template.graph.tasks}
            found[size] = micro_batch_of(
                template, stage, costs[size], self.machine, buckets=buckets
            )
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
_GRAINS = 4096  # parts of a batch that are given to devices, one after another


@dataclass(frozen=True)
class Speed:
    """The seconds of a device for a step: a fixed part, and for each row; ``most`` rows fit."""

    fixed: float
    row: float
    most: float = math.inf

    def with_free(self, share: float) -> Speed:
        """Return the device of which a share of the rows that fit stays free."""
        return replace(self, most=(1 - share) * self.most)


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


def balanced(rows: int, devices: Sequence[Speed], least: int = 2) -> tuple[int, ...] | None:
    """Divide rows so that the device that ends last ends early; None if they do not fit.

    A device gets no rows, or ``least`` or more.

    >>> balanced(10, [Speed(0, 1), Speed(0, 4)])
    (8, 2)
    >>> balanced(10, [Speed(0, 1, most=5), Speed(0, 4)])
    (5, 5)
    """
    grain = max(1, rows // _GRAINS)
    found = [0] * len(devices)
    ends = [(one.fixed + grain * one.row, i) for i, one in enumerate(devices)]
    heapq.heapify(ends)
    left = rows
    while left and ends:
        _, i = heapq.heappop(ends)
        taken = min(grain, left, math.floor(min(rows, devices[i].most)) - found[i])
        if taken > 0:
            found[i] += taken
            left -= taken
            heapq.heappush(ends, (devices[i].fixed + (found[i] + grain) * devices[i].row, i))
    small = [i for i, own in enumerate(found) if 0 < own < least]
    if small and not left and len(small) < sum(map(bool, found)):
        others = [Speed(0, 1, 0) if i in small else one for i, one in enumerate(devices)]
        return balanced(rows, others, least)
    return None if left else tuple(found)


def slowest_last(devices: Sequence[Speed]) -> list[list[int]]:
    """Return the indices of all devices, then without the slowest ones, and so on.

    >>> slowest_last([Speed(0, 4), Speed(0, 1), Speed(0, 1.01)])
    [[1, 2, 0], [1, 2]]
    """
    order = sorted(range(len(devices)), key=lambda i: devices[i].row)
    rates = [devices[i].row for i in order]
    cuts = [k for k in range(1, len(order)) if rates[k] > ALIKE * rates[k - 1]]
    return [order[:k] for k in (len(order), *reversed(cuts))]
