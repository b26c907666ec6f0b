"""Model parallelism: a model whose parts are on several devices.

For models that do not fit on one device. One batch goes through one stage after another. What needs
nothing from other stages, such as a second tower, does not wait for them; otherwise one device
works at a time. ``pipeline`` lets the stages work concurrently.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any, overload

import torch

import autosched as asc
from autosched import Costs, Graph, Machine, Schedule, ScheduleError, Watch, in_order
from autosched.parallel.micro_batch import pieces_of
from autosched.parallel.pipelined import Pipeline
from autosched.parallel.stages import Cuts, balanced, by_map
from autosched.parallel.step import KEPT, look, rows_of
from autosched.parallel.template import Loss, Template, forward_of
from autosched.parallel.training import (
    Sums,
    Trained,
    batch_homes,
    check_options,
    cut,
    devices_of,
    gather,
    leaves,
    settle,
    torch_device,
)
from autosched.parallel.tuning import SERIAL, Planner, Split

__all__ = ["Forward", "model_parallel"]


@overload
def model_parallel(
    model: torch.nn.Module,
    machine: Machine | None = None,
    *,
    devices: Sequence[str] | None = None,
    split: Split = "auto",
    loss_fn: None = None,
    optimizer: None = None,
    **options: Any,
) -> Forward: ...


@overload
def model_parallel(
    model: torch.nn.Module,
    machine: Machine | None = None,
    *,
    devices: Sequence[str] | None = None,
    split: Split = "auto",
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    **options: Any,
) -> Pipeline: ...


def model_parallel(
    model: torch.nn.Module,
    machine: Machine | None = None,
    *,
    devices: Sequence[str] | None = None,
    split: Split = "auto",
    loss_fn: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Forward | Pipeline:
    """Return the model as stages on several devices: its forward, or with loss and optimizer a training step.

    ``split`` is ``"auto"``, one stage per device, cut so that they take equally long and fit; or
    the devices of modules by patterns of their names, ``{"layer1": "cuda:0", "layer2.*":
    "cuda:1"}``, which also match the modules inside: the first match counts, and a module that no
    pattern matches joins the one that runs before it. ``options`` are those of ``data_parallel``,
    and for a training step ``averages``, ``clip_grad_norm`` and ``before_step`` of ``pipeline``.
    Raises ScheduleError for an impossible split.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> run = model_parallel(model, Machine.emulated(gpus=2), split={"0": "cuda:0", "2": "cuda:1"}, backend="host")
    >>> print(run.cuts(torch.ones(3, 4)))
    stage 0 on cuda:0: 0 ... 1, 0.01 ms; 9.6e-05 MB to the next
    stage 1 on cuda:1: 2, 0.005 ms
    >>> torch.equal(run(torch.ones(3, 4)), model(torch.ones(3, 4)))
    True
    """
    machine = Machine.local() if machine is None else machine
    chosen = devices_of(machine, devices)
    if (loss_fn is None) != (optimizer is None):
        raise ScheduleError(
            "a training step needs both loss_fn= and optimizer=; without both, it is forward alone"
        )
    if loss_fn is None or optimizer is None:
        check_options("model_parallel", options)
        return Forward(model, machine, chosen, split, options)
    how = {
        name: options.pop(name)
        for name in ("averages", "clip_grad_norm", "before_step")
        if name in options
    }
    trained = Trained.of(
        "model_parallel", (model, loss_fn, optimizer), machine, chosen[0], how.get("averages", True), options,
        how.get("clip_grad_norm"), how.get("before_step"),
    )  # fmt: skip
    return Pipeline(Planner(trained, chosen, split, 1, SERIAL, False, 1, Sums("sum", ())))


class Forward:
    """The forward of a model on several devices, without gradients.

    Closed by ``close()`` or by garbage collection.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        machine: Machine,
        devices: tuple[str, ...],
        split: Split,
        options: Mapping[str, Any],
    ):
        self.model = model
        self.machine = machine
        self.devices = devices
        self.split = split
        self.options = options
        self._known: dict[Hashable, tuple[Schedule, Template, Cuts]] = {}
        self._watch: Watch | None = None
        self._guard = threading.RLock()

    def __call__(self, *batch: Any) -> Any:
        """Return what the model returns."""
        with self._guard:
            planned, template, _ = self._of(batch)
            tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
            inputs = {**template.state.tensors(), **dict(zip(template.batch, tensors, strict=True))}
            outputs = planned(**{name: inputs[name] for name in planned.graph.input_names})
            return template.finish(outputs)

    def schedule(self, *batch: Any) -> Schedule:
        """Return the schedule of calls like this one."""
        with self._guard:
            return self._of(batch)[0]

    def cuts(self, *batch: Any) -> Cuts:
        """Return the stages: what they hold, on which device, and how long each takes."""
        with self._guard:
            return self._of(batch)[2]

    def close(self) -> None:
        """Close all schedules, and forget them."""
        with self._guard:
            for planned, _, _ in self._known.values():
                planned.close()
            self._known.clear()

    def __enter__(self) -> Forward:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def _of(self, batch: Sequence[Any]) -> tuple[Schedule, Template, Cuts]:
        if self._watch is None or not self._watch.holds():
            self._watch = Watch(self.model)
        key = tuple(look(leaf) for leaf in leaves(batch)), self._watch.key
        found = self._known.pop(key, None)
        self._known[key] = found = self._plan(batch) if found is None else found
        while len(self._known) > KEPT:
            self._known.pop(next(iter(self._known)))[0].close()
        return found

    def _plan(self, batch: Sequence[Any]) -> tuple[Schedule, Template, Cuts]:
        place = torch_device(self.machine, self.devices[0])
        gather(self.model, None, place)
        template = forward_of(self.model, cut(batch, rows_of(batch), place))
        costs = Costs.estimate(template.graph, template.examples)
        if isinstance(self.split, str):
            held = {name: float(tensor.nbytes) for name, tensor in template.state.tensors().items()}
            cuts = balanced(template.graph, costs, self.machine, self.devices, held)
        else:
            cuts = by_map(template.graph, costs, self.machine, self.split)
        pieces = pieces_of(
            template, cuts.stages(template.graph), costs, self.machine, branching=True
        )
        graph = Graph("model parallel")
        values = {}
        given = batch_homes(template, batch)
        for name, home in pieces.homes.items():
            device = given.get(name) if name in template.batch else cuts.devices[home]
            with graph.on(device) if device is not None else contextlib.nullcontext():
                values[name] = graph.input(name, nbytes=pieces.nbytes[name])
        on = {name: cuts.devices[piece.stage] for name, piece in pieces.piece.items()}
        outputs = graph.include(
            pieces.graph, values, on=on, seconds=pieces.seconds, nbytes=pieces.nbytes
        )
        graph.output(**outputs)
        homes = {name: value.home for name, value in values.items() if value.home is not None}
        settle(self.machine, template.state, homes)
        return (
            asc.schedule(graph, self.machine, policy=in_order({}), **self.options),
            template,
            cuts,
        )
