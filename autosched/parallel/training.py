"""Capture micro-batches and optimizer updates, and schedule a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from autosched import CaptureError, Device, Machine, MachineError, Schedule, ScheduleError
from autosched.frontends.settings import Varying
from autosched.frontends.state import State
from autosched.parallel.all_reduce import MANY, STRATEGIES
from autosched.parallel.batches import first_rows
from autosched.parallel.clip import check_clip
from autosched.parallel.plans import scheduled, torch_device
from autosched.parallel.ranks import Agreement, agreement_of
from autosched.parallel.step_graph import StepGraph, StepSpec, build
from autosched.parallel.template import (
    BeforeStep,
    Loss,
    Template,
    pass_of,
    update_of,
    with_hoisted_random_numbers,
    with_random_numbers_once,
)
from autosched.parallel.updates import Bucket, Update, check_separable, updates_of

_OPTIONS = (
    *("backend", "check", "costs", "in_flight", "nvtx", "outputs", "progress", "replay", "fuse"),
)
# The last two are for policies that search.
_DECIDED = ("policy", "place", "inputs", "examples", "seconds", "seed")


def check_trained(name: str, model: Any, loss_fn: Any, optimizer: Any) -> None:
    """Raise ScheduleError unless these can be trained by a system of this name."""
    is_module = isinstance(model, torch.nn.Module)
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    function = "a function of what the model returns and of a target"
    for what, item, fits, kind in (
        ("model", model, is_module, "a torch.nn.Module"),
        ("loss_fn", loss_fn, callable(loss_fn), function),
        ("optimizer", optimizer, is_optimizer, "a torch.optim.Optimizer"),
    ):
        if not fits:
            raise ScheduleError(f"{what} of {name} must be {kind}, got {item!r}")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ScheduleError for options that a system of this name does not accept."""
    for option in options:
        if option in _OPTIONS:
            continue
        why = f"{name} has none of this name"
        if option in _DECIDED:
            why = f"{name} decides itself where tasks run and in which order"
        elif option in ("chunks", "checkpoint", "replicas", "schedule"):
            why = f"{name} has none; pipeline has"
        raise ScheduleError(f"unexpected option {option}=: {why}. It takes {', '.join(_OPTIONS)}")


def check_strategy(name: str) -> str:
    """Return the name of a strategy, or "auto"; raise ScheduleError for another word."""
    if name != "auto" and name not in STRATEGIES:
        raise ScheduleError(
            f"reduction must be 'auto' or one of {', '.join(map(repr, STRATEGIES))}, got {name!r}"
        )
    return name


def devices_of(machine: Machine, devices: Sequence[str] | None) -> tuple[str, ...]:
    """Return the given devices; by default all accelerators, or all devices without any.

    Of several ranks, each has its own default. Raises MachineError for unknown and repeated ones,
    and where devices of other ranks leave this one without any.
    """
    if devices is None:
        by_rank: dict[int | None, list[Device]] = {}
        for device in machine.devices:
            by_rank.setdefault(device.rank, []).append(device)
        return tuple(name for own in by_rank.values() for name in _default(own))
    if isinstance(devices, str) or not devices or len(set(devices)) != len(devices):
        raise MachineError(
            f"devices= needs the names of one or more devices, each once, got {devices!r}"
        )
    found = tuple(machine.device(device).name for device in devices)
    ranks = {machine.device(device).rank for device in found}
    idle = [rank for rank in machine.ranks.values() if rank not in ranks]
    if idle and machine.rank is not None:
        raise MachineError(f"devices= leaves rank {idle[0]} without any; name one of each rank")
    return found


def _default(devices: Sequence[Device]) -> list[str]:
    found = [device.name for device in devices if device.is_accelerator]
    return found or [device.name for device in devices]


T = TypeVar("T")

# Of several ranks: those that add in the order of the devices.
_IN_ORDER = ("gather", "exchange", "sum")
_ON_ONE_HOST = ("sum", "cpu", "ring", "exchange")


def strategies(wanted: str, replicas: int, several_ranks: bool) -> tuple[str, ...]:
    """Return the strategies to try where gradients are to be reduced by one, or by ``"auto"``."""
    if replicas == 1:
        return ("none",)
    if wanted != "auto":
        return (wanted,)
    if replicas > MANY:
        return ("exchange",)
    return _IN_ORDER if several_ranks else _ON_ONE_HOST


@dataclass(frozen=True)
class Training:
    """What is trained, on which devices, and ``options`` of ``schedule``, and ``fuse``."""

    model: torch.nn.Module
    loss_fn: Loss
    optimizer: torch.optim.Optimizer
    machine: Machine
    devices: tuple[str, ...]
    options: Mapping[str, Any]
    averages: bool  # whether loss_fn averages over a batch
    max_norm: float | None
    before_step: BeforeStep | None
    agreement: Agreement | None = None  # with other ranks
    varying: Varying = field(default_factory=Varying)

    @classmethod
    def of(
        cls, name: str, trained: tuple[Any, Any, Any], machine: Machine | None,
        devices: Sequence[str] | None, options: Mapping[str, Any], averages: bool = True,
        clip_grad_norm: float | None = None, before_step: BeforeStep | None = None,
    ) -> Training:  # fmt: skip
        """Check the arguments of a system of this name; ``trained``: model, loss and optimizer."""
        machine = Machine.local() if machine is None else machine
        chosen = devices_of(machine, devices)
        check_trained(name, *trained)
        check_options(name, options)
        max_norm = check_clip(clip_grad_norm)
        made = agreement_of(name, machine, options)
        return cls(*trained, machine, chosen, options, averages, max_norm, before_step, made)

    @property
    def capture_device(self) -> str | None:
        """The torch device where the model is captured, if that is a real accelerator."""
        here = {*self.machine.here}
        return torch_device(self.machine, next(name for name in self.devices if name in here))

    @cached_property
    def settings(self) -> State:
        """The settings of the optimizer, such as learning rates."""
        return State({}, {"optimizer": self.optimizer}, {})

    @property
    def numbers(self) -> frozenset[str]:
        """The names of settings that vary from step to step, so that they are inputs."""
        return self.varying.names(self.settings)

    @property
    def present(self) -> tuple[Any, ...]:
        """The settings now."""
        return tuple(group[field] for group, field in self.settings.settings().values())

    def together(self, do: Callable[[], T]) -> T:
        """Return what a function returns; on several ranks raise on all what it raises on one."""
        return do() if self.agreement is None else self.agreement.together("to plan", do)

    @property
    def alone(self) -> Training:
        """The same on an imagined machine, for trials, which each rank plans by itself."""
        if self.machine.rank is None:
            return self
        devices = tuple(replace(device, imagined=True) for device in self.machine.devices)
        return replace(self, machine=replace(self.machine, devices=devices))

    def passes(self, batch: Sequence[Any], sizes: Iterable[int], rows: int) -> dict[int, Template]:
        """Capture micro-batches of each size, as parts of a batch of this many rows.

        Collective on several ranks.
        """

        def captured(size: int) -> Template:
            part = first_rows(batch, size, self.capture_device)
            weight = size / rows if self.averages else 1.0
            one = pass_of(self.model, self.loss_fn, self.optimizer, part, weight)
            return with_hoisted_random_numbers(with_random_numbers_once(one))

        def all_captured() -> dict[int, Template]:
            _check_norms(self.model)
            return {size: captured(size) for size in dict.fromkeys(sizes) if size}

        return self.together(all_captured)

    def updates(self, buckets: Sequence[Bucket], flat: bool) -> tuple[Update, ...]:
        """Capture the updates of the parameters in buckets; by stage if operators mix stages.

        Collective on several ranks.
        """

        def captured() -> tuple[Update, ...]:
            found = self._updates(range(len(buckets)), buckets, flat)
            if all(len({buckets[number].stage for number in one.buckets}) == 1 for one in found):
                return tuple(found)
            stages: dict[int, list[int]] = {}
            for number, bucket in enumerate(buckets):
                stages.setdefault(bucket.stage, []).append(number)
            by_stage = (self._updates(numbers, buckets, flat) for numbers in stages.values())
            return tuple(chain.from_iterable(by_stage))

        return self.together(captured)

    def _updates(
        self, numbers: Sequence[int], buckets: Sequence[Bucket], flat: bool
    ) -> list[Update]:
        parameters: dict[str, torch.Tensor] = {}
        stages: dict[str, int] = {}
        for bucket in (buckets[number] for number in numbers):
            parameters.update(bucket.parameters)
            stages.update(dict.fromkeys(bucket.parameters, bucket.stage))
        hook = self.before_step
        if hook is not None and len(set(stages.values())) > 1:
            alone = update_of(self.model, self.loss_fn, None, parameters, hook)
            check_separable(alone.graph, stages)
        template = update_of(
            self.model, self.loss_fn, self.optimizer, parameters, hook, self.numbers
        )
        if any(task.random for task in template.graph.tasks) and (flat or len(buckets) > 1):
            raise ScheduleError(
                "the optimizer, or before_step, draws random numbers: replicas would draw "
                "different ones, and stages in another order than the whole model; train on one "
                "device"
            )
        return updates_of(template, buckets, numbers, self.machine, flat)

    def reduced(self, spec: StepSpec, reduction: str) -> dict[str, tuple[Schedule, StepGraph]]:
        """Return a step's schedule for each strategy to try; raise ScheduleError if none fits."""
        names: tuple[str, ...] = ("compressed",)
        if spec.compression is None:
            names = strategies(reduction, len(spec.devices), bool(self.machine.ranks))
        found = {}
        errors = list[ScheduleError]()
        for name in names:
            try:
                found[name] = self.scheduled(replace(spec, reduction=name))
            except ScheduleError as error:  # too little memory, perhaps not with others
                errors.append(error)
        if not found:
            raise errors[0]
        return found

    def scheduled(self, spec: StepSpec) -> tuple[Schedule, StepGraph]:
        """Return a step's schedule."""
        built = build(replace(spec, max_norm=self.max_norm))
        self._check_memory(built)
        return scheduled(built.graph, self.machine, built.sequences, self.options), built

    def _check_memory(self, built: StepGraph) -> None:
        """Raise ScheduleError if devices cannot hold the state after this step.

        The next step would fail.
        """
        state = {**dict.fromkeys(self.machine.names, 0.0), **built.new_state}
        for value in built.graph.sources:
            if value.home in state:
                state[value.home] += value.nbytes or 0
        for device, nbytes in state.items():
            limit = self.machine.device(device).nbytes
            if nbytes > limit:
                raise ScheduleError(
                    f"device {device!r} has {limit:,.0f} B of memory, and its part of the model "
                    f"and of the optimizer's state takes {nbytes:,.0f} B; cut the model into more "
                    f"stages, with pipeline or model_parallel on more devices"
                )


def _check_norms(model: torch.nn.Module) -> None:
    """Raise CaptureError for a batch norm whose result depends on its count of batches."""
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or not module.training:
            continue
        if module.track_running_stats and module.momentum is None:
            raise CaptureError(
                f"batch norm {name!r} has momentum=None, so it reads its count of batches, whose "
                f"value a graph does not know; give it a number"
            )
