"""Pipelines: stages of a model that work on different micro-batches concurrently.

Arguments that are not given are found by simulation: see ``tuning``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from autosched import Machine, ScheduleError
from autosched.parallel.arguments import check_strategy
from autosched.parallel.batches import check_count, rows_of
from autosched.parallel.buckets import SIZES, check_sizes
from autosched.parallel.pipeline_schedules import ORDERS
from autosched.parallel.stages import Cuts
from autosched.parallel.step import Step
from autosched.parallel.template import BeforeStep, Loss
from autosched.parallel.training import Reduction, Training
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
    which remains the user's own: its ``state_dict`` is unchanged.

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

    On a machine of several ranks, all call this and pass the same batches, of which each reads what
    its stages need; all get the loss. Rank 0's model counts at the beginning. Later each rank has
    the state of its own stages: see ``step.collect()``.

    Random numbers are generated in the order of the micro-batches, on several ranks each from the
    generator of its stage's rank. Raises ScheduleError for invalid arguments.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> how = {"machine": Machine.emulated(gpus=2), "chunks": 2, "backend": "host"}
    >>> step = pipeline(model, torch.nn.MSELoss(), optimizer, **how)
    >>> step(torch.ones(6, 4), torch.zeros(6, 2)) > step(torch.ones(6, 4), torch.zeros(6, 2))
    tensor(True)
    """
    check_count("chunks", 1 if chunks == "auto" else chunks)
    check_sizes(buckets)
    if schedule != "auto" and schedule not in ORDERS:
        raise ScheduleError(
            f"schedule must be 'auto' or one of {', '.join(map(repr, ORDERS))}, got {schedule!r}"
        )
    trained = (model, loss_fn, optimizer)
    training = Training.of(
        "pipeline", trained, machine, devices, options, averages, clip_grad_norm, before_step
    )
    count = len(training.devices)
    if not isinstance(replicas, int) or replicas < 1 or count % replicas:
        raise ScheduleError(
            f"{count} devices cannot be divided among replicas={replicas!r}, each with as many"
        )
    how = Reduction(check_strategy(reduction), tuple(buckets))
    return Pipeline(Planner(training, split, chunks, schedule, checkpoint, replicas, how))


class Pipeline(Step):
    """A training step of a pipeline."""

    def __init__(self, planner: Planner):
        super().__init__(planner.training, planner.plan, divided=False)
        self._planner = planner

    def cuts(self, *batch: Any) -> Cuts:
        """Return the stages of such a batch: their modules, devices and seconds."""
        found: Cuts = self.notes(*batch)["cuts"]
        return found

    def curve(self, *batch: Any, chunks: Sequence[int] | None = None) -> Curve:
        """Return the predicted seconds of a step by order and number of micro-batches.

        By default, many numbers are tried.
        """
        with self._guard:
            return self._planner.study(batch, rows_of(batch)).curve(chunks)
