"""Capture micro-batches and updates, and schedule the step.

Leads from a model, a batch and devices to the graph of a step (``grid``), and to its schedule.
Captures micro-batches and updates for each number of rows that occurs. Does not decide which
devices are used or which alternatives are tried: its callers do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import autosched as asc
from autosched import Machine, MachineError, Schedule, ScheduleError, in_order
from autosched.parallel.all_reduce import STRATEGIES
from autosched.parallel.clip import check_clip
from autosched.parallel.rewrite import drawn_ahead
from autosched.parallel.step_graph import Built, Grid, build
from autosched.parallel.sync_batch_norm import Synchronised, check_norms
from autosched.parallel.template import BeforeStep, Loss, Template, hook_of, pass_of, update_of
from autosched.parallel.updates import Bucket, Update, check_apart, updates_of

__all__ = [
    "Sums",
    "Trained",
    "batch_homes",
    "check_count",
    "check_options",
    "check_strategy",
    "check_trained",
    "cut",
    "devices_of",
    "gather",
    "leaves",
    "settle",
    "shares",
    "torch_device",
]


@dataclass(frozen=True)
class Sums:
    """How gradients are to be summed over replicas: a strategy or ``"auto"``, and the sizes of buckets in bytes."""

    strategy: str
    sizes: tuple[float, ...]

    def strategies(self, replicas: int) -> tuple[str, ...]:
        """Return the strategies to try."""
        if self.strategy != "auto" or replicas == 1:
            return (self.strategy if replicas > 1 else "none",)
        return tuple(STRATEGIES) if replicas <= _MANY else _FOR_MANY


_MANY = 16  # replicas; above, strategies whose tasks grow with their number are not tried: a ring's n * n, ...
_FOR_MANY = ("tree", "exchange")  # ... whole tensors that come to one device


def check_trained(
    name: str, model: Any, loss_fn: Any, optimizer: Any, options: Mapping[str, Any]
) -> None:
    """Raise ScheduleError unless these can be trained, and are options of a system of this name."""
    for what, item, fits, kind in (
        ("model", model, isinstance(model, torch.nn.Module), "a torch.nn.Module"),
        (
            "loss_fn",
            loss_fn,
            callable(loss_fn),
            "a function of what the model returns and of a target",
        ),
        (
            "optimizer",
            optimizer,
            isinstance(optimizer, torch.optim.Optimizer),
            "a torch.optim.Optimizer",
        ),
    ):
        if not fits:
            raise ScheduleError(f"{what} of {name} must be {kind}, got {item!r}")
    check_options(name, options)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ScheduleError for options of ``schedule`` that a system of this name does not accept."""
    for option in options:
        if option in _DECIDED:
            why = f"{name} decides itself where tasks run and in which order"
        elif option in ("chunks", "checkpoint", "replicas", "schedule"):
            why = f"{name} has none; pipeline has"
        elif option in ("averages", "clip_grad_norm", "before_step"):
            why = "it is for training steps, with loss_fn= and optimizer="
        elif option not in _OPTIONS:
            why = f"{name} has none of this name"
        else:
            continue
        raise ScheduleError(
            f"unexpected option {option}=: {why}. Of schedule it takes {', '.join(_OPTIONS)}"
        )


_OPTIONS = ("backend", "check", "costs", "nvtx", "outputs", "progress", "replay")
_DECIDED = (
    "policy",
    "place",
    "inputs",
    "examples",
    "seconds",
    "seed",
)  # the last two are for policies that search


def check_count(what: str, count: Any) -> None:
    """Raise ScheduleError unless a batch can be cut into so many parts."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ScheduleError(f"{what}: a batch can be cut into 1 or more parts, got {count!r}")


def check_strategy(name: str) -> str:
    """Return a strategy for sums, or "auto". Raises ScheduleError for another word."""
    if name != "auto" and name not in STRATEGIES:
        raise ScheduleError(
            f"reduction must be 'auto' or one of {', '.join(map(repr, STRATEGIES))}, got {name!r}"
        )
    return name


@dataclass(frozen=True)
class Trained:
    """The model, loss and optimizer, the machine, and the options of ``schedule``, ``options``."""

    model: torch.nn.Module
    loss_fn: Loss
    optimizer: torch.optim.Optimizer
    machine: Machine
    averages: bool
    options: Mapping[str, Any]
    place: str | None = (
        None  # the torch device where the model is captured, if that is a real accelerator
    )
    clip: float | None = None  # the largest norm of all gradients
    before_step: BeforeStep | None = None  # other changes of gradients

    @classmethod
    def of(
        cls, name: str, trio: tuple[Any, Any, Any], machine: Machine, first: str, averages: bool,
        options: Mapping[str, Any], clip_grad_norm: float | None, before_step: BeforeStep | None,
    ) -> Trained:  # fmt: skip
        """Return what is trained by a system of this name: model, loss and optimizer.

        Raises ScheduleError.
        """
        check_trained(name, *trio, options)
        place = torch_device(machine, first)
        return cls(
            *trio, machine, averages, options, place, check_clip(clip_grad_norm), before_step
        )

    def passes(
        self, batch: Sequence[Any], sizes: Iterable[int], rows: int, synchronised: bool = False
    ) -> dict[int, Template]:
        """Capture micro-batches of each size, as parts of a batch of this many rows.

        ``synchronised``: batch norms exchange their statistics.
        """
        check_norms(self.model)
        return {
            size: drawn_ahead(pass_of(
                self.model, self.loss_fn, self.optimizer, cut(batch, size, self.place),
                size / rows if self.averages else 1.0, Synchronised if synchronised else contextlib.nullcontext,
            ))
            for size in dict.fromkeys(sizes) if size
        }  # fmt: skip

    def updates(self, one: Template, buckets: Sequence[Bucket], flat: bool) -> tuple[Update, ...]:
        """Capture the optimizer's updates of the parameters in buckets.

        Stage by stage if it mixes those of several.
        """
        found = self._updates(range(len(buckets)), buckets, flat)
        if all(len({buckets[number].stage for number in update.buckets}) == 1 for update in found):
            return tuple(found)
        stages: dict[int, list[int]] = {}
        for number, bucket in enumerate(buckets):
            stages.setdefault(bucket.stage, []).append(number)
        return tuple(
            update
            for numbers in stages.values()
            for update in self._updates(numbers, buckets, flat)
        )

    def _updates(
        self, numbers: Sequence[int], buckets: Sequence[Bucket], flat: bool
    ) -> list[Update]:
        parameters = {
            name: tensor for n in numbers for name, tensor in buckets[n].parameters.items()
        }
        if self.before_step is not None and len({buckets[n].stage for n in numbers}) > 1:
            stages = {name: buckets[n].stage for n in numbers for name in buckets[n].parameters}
            check_apart(hook_of(self.model, parameters, self.before_step).graph, stages)
        template = update_of(self.model, self.loss_fn, self.optimizer, parameters, self.before_step)
        if any(task.random for task in template.graph.tasks) and (flat or len(buckets) > 1):
            raise ScheduleError(
                "the optimizer, or before_step, draws random numbers: replicas would draw different ones, and stages "
                "in another order than the whole model; train on one device"
            )
        return updates_of(template, buckets, numbers, self.machine, flat)

    def reduced(self, grid: Grid, sums: Sums) -> dict[str, tuple[Schedule, Built]]:
        """Return a step's schedule for each strategy by which replicas may sum.

        Raises ScheduleError if none fits.
        """
        names = sums.strategies(len(grid.devices)) if grid.compression is None else ("compressed",)
        found = {}
        refused = list[ScheduleError]()
        for name in names:
            try:
                found[name] = self.scheduled(replace(grid, reduction=name))
            except ScheduleError as error:  # for which devices have no memory, as others may
                refused.append(error)
        if not found:
            raise refused[0]
        return found

    def scheduled(self, grid: Grid) -> tuple[Schedule, Built]:
        """Return a step's schedule."""
        built = build(replace(grid, clip=self.clip))
        self._check_memory(built)
        return asc.schedule(
            built.graph, self.machine, policy=in_order(built.sequences), **self.options
        ), built

    def _check_memory(self, built: Built) -> None:
        """Raise ScheduleError if devices cannot hold the state after this step.

        The next step would fail.
        """
        held = {**dict.fromkeys(self.machine.names, 0.0), **built.made}
        for value in built.graph.sources:
            if value.home in held:
                held[value.home] += value.nbytes or 0
        for device, nbytes in held.items():
            limit = self.machine.device(device).nbytes
            if nbytes > limit:
                raise ScheduleError(
                    f"device {device!r} has {limit:,.0f} B of memory, and its part of the model and of what the "
                    f"optimizer keeps takes {nbytes:,.0f} B; cut the model into more stages, with pipeline or "
                    f"model_parallel on more devices"
                )


def torch_device(machine: Machine, device: str) -> str | None:
    """Return the torch device of a machine's device; None if it is the CPU, or emulated on it."""
    found = machine.device(device)
    return None if machine.imagined or found.kind == "cpu" else found.physical or device


def gather(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: str | None
) -> None:
    """Move a model and its optimizer's state to one torch device, to be captured there.

    None: leave all.
    """
    if device is None:
        return
    model.to(device)
    for state in optimizer.state.values() if optimizer is not None else ():
        state.update(
            (k, v.to(device)) for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()
        )


def settle(machine: Machine, state: Any, homes: Mapping[str, str]) -> None:
    """Move the tensors of a state, by name, to their devices, if these are physical."""
    for name, (place, tensor) in state.places().items():
        device = torch_device(machine, homes[name]) if name in homes else None
        if device is not None and str(tensor.device) != device:
            there = tensor.detach().to(device)
            if place[0] == "parameter":
                tensor.data = there
            else:
                state.put(place, there)


def batch_homes(template: Template, batch: Sequence[Any]) -> dict[str, str]:
    """Return the devices of those tensors of a batch that are not on the CPU, by input."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    named = zip(template.batch, tensors, strict=True)
    return {name: str(tensor.device) for name, tensor in named if tensor.device.type != "cpu"}


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of tuples, lists and dicts."""
    if isinstance(tree, (tuple, list, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(item)
    else:
        yield tree


def devices_of(machine: Machine, devices: Sequence[str] | None) -> tuple[str, ...]:
    """Return the devices to use: those given, or all accelerators, or all there are.

    Raises MachineError.
    """
    if devices is None:
        return machine.accelerators or machine.names
    if isinstance(devices, str) or not devices or len(set(devices)) != len(devices):
        raise MachineError(
            f"devices= needs the names of one or more devices, each once, got {devices!r}"
        )
    return tuple(machine.device(device).name for device in devices)


def cut(batch: Any, rows: int, device: str | None = None) -> Any:
    """Return the first rows of all tensors in a batch, on a torch device."""
    if isinstance(batch, (tuple, list)):
        return type(batch)(cut(item, rows, device) for item in batch)
    if isinstance(batch, dict):
        return {key: cut(item, rows, device) for key, item in batch.items()}
    if not isinstance(batch, torch.Tensor):
        return batch
    first = batch[:rows] if batch.dim() else batch
    return first if device is None else first.to(device)


def shares(rows: int, count: int) -> tuple[int, ...]:
    """Cut this many rows into shares of nearly equal size, the larger ones first.

    Fewer if there are fewer rows.

    >>> shares(7, 2), shares(2, 3)
    ((4, 3), (1, 1))
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ScheduleError(f"a batch can be cut into 1 or more parts, got {count!r}")
    return tuple(rows // count + (number < rows % count) for number in range(min(rows, count)))
