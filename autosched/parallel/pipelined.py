"""Pipelines: stages of a model that work on different micro-batches concurrently.

Arguments that are not given are found by simulation: see ``study``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from autosched import Machine, ScheduleError
from autosched.parallel.buckets import SIZES, check_sizes
from autosched.parallel.pipeline_schedules import ORDERS
from autosched.parallel.stages import Cuts
from autosched.parallel.step import Step
from autosched.parallel.template import BeforeStep, Loss
from autosched.parallel.training import (
    Sums,
    Trained,
    check_count,
    check_strategy,
    devices_of,
)
from autosched.parallel.tuning import Planner, Split
from autosched.parallel.tuning_curve import Curve

__all__ = ["Pipeline", "pipeline"]


def pipeline(
    model: torch.nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    machine: Machine | None = None,
    *,
    devices: Sequence[str] | None = None,
    split: Split = "auto",
    chunks: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    checkpoint: bool = False,
    replicas: int = 1,
    reduction: str = "auto",
    buckets: Sequence[float] = SIZES,
    clip_grad_norm: float | None = None,
    before_step: BeforeStep | None = None,
    averages: bool = True,
    **options: Any,
) -> Pipeline:
    """Return a training step that cuts a model into stages, and batches into micro-batches.

    The result for a batch of any size is that of the model on its micro-batches one after another,
    with accumulated gradients. It equals that of the whole batch in one pass, except for rounding,
    and for batch norms, which see one micro-batch each. Each device keeps its part of the model,
    which remains the user's own: its ``state_dict`` is that of the plain model.

    * ``devices``: those of the stages, in order; default: all accelerators.
    * ``split``: as of ``model_parallel``; ``"auto"`` cuts so that stages take equally long, and
      fit.
    * ``chunks``: how many micro-batches; ``"auto"`` tries many by simulation: see ``curve``.
    * ``schedule``: ``"gpipe"``; ``"1f1b"``; ``"interleaved"``, with two stages per device;
      ``"zero-bubble"``, which computes gradients of weights when there is nothing else to do;
      ``"auto"`` tries all.
    * ``checkpoint``: compute forward again in backward instead of keeping its results: less memory,
      a third more time.
    * ``replicas``: how many pipelines share the batch, each on as many devices; their gradients are
      summed as in ``data_parallel``, whose ``reduction`` and ``buckets`` these are.
    * ``clip_grad_norm``: clip gradients, all together, by that norm as torch does;
      ``step.grad_norm`` is the norm before.
    * ``before_step``: a function of the model that changes gradients in another way, before the
      optimizer's step.
    * ``averages``: whether ``loss_fn`` averages over a batch; otherwise it sums. ``options`` are
      those of ``data_parallel``.

    Random numbers are drawn in the order of the micro-batches. Raises ScheduleError for invalid
    arguments.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = pipeline(model, torch.nn.MSELoss(), optimizer, Machine.emulated(gpus=2), chunks=2, backend="host")
    >>> step(torch.ones(6, 4), torch.zeros(6, 2)) > step(torch.ones(6, 4), torch.zeros(6, 2))
    tensor(True)
    """
    check_count("chunks", 1 if chunks == "auto" else chunks)
    check_sizes(buckets)
    machine = Machine.local() if machine is None else machine
    if schedule != "auto" and schedule not in ORDERS:
        raise ScheduleError(
            f"schedule must be 'auto' or one of {', '.join(map(repr, ORDERS))}, got {schedule!r}"
        )
    chosen = devices_of(machine, devices)
    trio = model, loss_fn, optimizer
    trained = Trained.of(
        "pipeline", trio, machine, chosen[0], averages, options, clip_grad_norm, before_step
    )
    if not isinstance(replicas, int) or replicas < 1 or len(chosen) % replicas:
        raise ScheduleError(
            f"{len(chosen)} devices cannot be shared by replicas={replicas!r}, each with as many"
        )
    sums = Sums(check_strategy(reduction), tuple(buckets))
    return Pipeline(Planner(trained, chosen, split, chunks, schedule, checkpoint, replicas, sums))


class Pipeline(Step):
    """A training step of a pipeline."""

    def __init__(self, planner: Planner):
        trained = planner.trained
        super().__init__(
            trained.model, trained.loss_fn, trained.optimizer, trained.machine, planner.plan, trained.place,
            trained.before_step,
        )  # fmt: skip
        self._planner = planner

    def cuts(self, *batch: Any) -> Cuts:
        """Return the stages that such a batch goes through: what they hold, on which device, how long each takes."""
        found: Cuts = self.notes(*batch)["cuts"]
        return found

    def curve(self, *batch: Any, chunks: Sequence[int] | None = None) -> Curve:
        """Return the predicted seconds of a step by order and number of micro-batches: the given numbers, or many."""
        with self._guard:
            return self._planner.study(batch).curve(chunks)
