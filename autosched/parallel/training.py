"""Capture micro-batches and optimizer updates, and schedule a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import autosched
from autosched import (
    Device,
    Machine,
    MachineError,
    Schedule,
    ScheduleError,
    in_order,
)
from autosched.errors import MemoryLimitError
from autosched.frontends.settings import Varying
from autosched.frontends.state import State
from autosched.machine.machine import given_or_local
from autosched.parallel.all_reduce import MANY, STRATEGIES
from autosched.parallel.batches import first_rows
from autosched.parallel.clip import check_clip
from autosched.parallel.costs import Reusing
from autosched.parallel.ranks import group_of
from autosched.parallel.step_graph import Held, StepGraph, StepSpec, build
from autosched.parallel.template import (
    Loss,
    Template,
    hooks_of_step,
    pass_of,
    stateless,
    update_of,
    with_hoisted_random_numbers,
    with_random_numbers_once,
)
from autosched.parallel.updates import Bucket, Update, check_separable, updates_of

if TYPE_CHECKING:
    from autosched._lib.process_group import ProcessGroup

_OPTIONS = (*("backend", "check", "costs", "in_flight", "outputs", "progress", "replay", "fuse"),)


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
        if option not in _OPTIONS:
            raise ScheduleError(
                f"unexpected option {option}=: {name} decides itself where tasks run and in which "
                f"order, and takes {', '.join(_OPTIONS)}"
            )


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
        chosen = ([d for d in own if d.is_accelerator] or own for own in by_rank.values())
        return tuple(device.name for own in chosen for device in own)
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


def torch_device(machine: Machine, device: str) -> str | None:
    """Return the torch device of a machine's device; None if it is the CPU, or emulated on it."""
    found = machine.device(device)
    return None if machine.imagined or found.kind == "cpu" else found.physical or device


@dataclass(frozen=True)
class Planned:
    """The plan for a kind of batch: schedule, meaning of inputs and outputs, state.

    ``switches`` are attributes that a step changes, ``settings`` those of the optimizer that are
    inputs. ``spec`` holds the tensors with which all was captured, until this plan is chosen.
    """

    schedule: Schedule
    built: StepGraph
    switches: Sequence[tuple[dict[str, Any], str, Any]]
    state: Any
    notes: Mapping[str, Any]
    settings: tuple[Any, ...]
    spec: StepSpec | None

    def chosen(self) -> Planned:
        """Return the plan without that with which it was captured, and warn of what was guessed."""
        assert self.spec is not None
        template = self.spec.one.template
        template.estimate.warn(template.graph)
        return replace(self, spec=None)

    def numbers(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs that are settings of the optimizer, from those of a call by name."""
        numbers = self.built.numbers.items()
        return {label: given[name] for label, name in numbers if label in self.here}

    @cached_property
    def here(self) -> set[str]:
        """The inputs of this process."""
        return {*self.schedule.inputs_here}

    @cached_property
    def state_here(self) -> dict[str, Held]:
        """The inputs of this process that are state."""
        return {label: held for label, held in self.built.state.items() if label in self.here}

    @cached_property
    def owners(self) -> dict[str, int]:
        """By name of a tensor, the first rank whose model has it as trained; without ranks none."""
        ranks = self.schedule.machine.ranks
        found: dict[str, int] = {}
        for label, held in self.built.state.items():
            home = self.schedule.graph.value(label).home
            if held.leads and home in ranks:
                found[held.name] = min(found.get(held.name, ranks[home]), ranks[home])
        return found

    @cached_property
    def residuals_here(self) -> dict[str, tuple[str, int, torch.dtype]]:
        """The inputs of this process for compression."""
        return {label: one for label, one in self.built.residuals.items() if label in self.here}

    def release(self) -> None:
        """Give back the memory that tasks keep for the next step."""
        for task in self.schedule.graph.tasks:
            if isinstance(task.fn, Reusing):
                task.fn.release()


T = TypeVar("T")

# Of several ranks: those that add in the order of the devices.
_IN_ORDER = ("gather", "exchange", "sum")
_MOST_REPEATED = 2  # plans of which tasks are repeated
_ON_ONE_HOST = ("sum", "cpu", "ring", "exchange")


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
    group: ProcessGroup | None = None  # the ranks, if they are several
    varying: Varying = field(default_factory=Varying)
    name: str = "step"

    @classmethod
    def of(
        cls, name: str, trained: tuple[Any, Any, Any], machine: Machine | None,
        devices: Sequence[str] | None, options: Mapping[str, Any], averages: bool = True,
        clip_grad_norm: float | None = None,
    ) -> Training:  # fmt: skip
        """Check the arguments of a system of this name; ``trained``: model, loss and optimizer."""
        machine = given_or_local(machine)
        chosen = devices_of(machine, devices)
        check_trained(name, *trained)
        check_options(name, options)
        max_norm = check_clip(clip_grad_norm)
        group = group_of(name, machine, options)
        return cls(*trained, machine, chosen, options, averages, max_norm, group, name=name)

    @cached_property
    def step(self) -> Callable[..., Any]:
        """A function with the arguments of a step, in whose closure is what it trains."""
        compute, model, optimizer = stateless(self.loss_fn), self.model, self.optimizer

        def step(*batch: Any) -> Any:
            return compute, model, optimizer

        step.__qualname__ = self.name
        return step

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
        return do() if self.group is None else self.group.together("to plan", do)

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
        trained = self.model, self.loss_fn, self.optimizer, parameters
        if len(set(stages.values())) > 1 and hooks_of_step(self.optimizer):
            check_separable(update_of(*trained, hooks_alone=True).graph, stages)
        template = update_of(*trained, self.numbers)
        if any(task.random for task in template.graph.tasks) and (flat or len(buckets) > 1):
            raise ScheduleError(
                "the optimizer, or a hook of it, draws random numbers: replicas would draw "
                "different ones, and stages in another order than the whole model; train on one "
                "device"
            )
        return updates_of(template, buckets, numbers, self.machine, flat)

    def plans(self, spec: StepSpec, reduction: str, notes: Mapping[str, Any]) -> list[Planned]:
        """Return a step's plan with each reduction to try, as if memory had no limit.

        ``spec`` needs no updates yet. Collective on several ranks.
        """
        spec = replace(spec, updates=self.updates(spec.buckets, len(spec.devices) > 1))
        names: tuple[str, ...] = _IN_ORDER if self.machine.ranks else _ON_ONE_HOST
        if spec.compression is not None or len(spec.devices) == 1:
            names = ("none" if spec.compression is None else "compressed",)
        elif reduction != "auto":
            names = (reduction,)
        elif len(spec.devices) > MANY:
            names = ("exchange",)
        found = []
        switches, state = spec.one.template.switches, spec.updates[0].state
        settings = tuple(update.settings for update in spec.updates)
        for name in names:
            own = replace(spec, reduction=name)
            said = {**notes, "reduction": name}
            found.append(Planned(*self.scheduled(own), switches, state, said, settings, own))
        return found

    def best(self, plans: Iterable[Planned]) -> Planned:
        """Return the fastest of several plans that fits into memory.

        Where faster ones exceed it, tasks are repeated. Raises MemoryLimitError if none fits.
        """
        found: Planned | None = None
        errors = list[MemoryLimitError]()
        for plan in sorted(plans, key=lambda plan: plan.schedule.makespan):
            if found is not None and found.schedule.makespan <= plan.schedule.makespan:
                break
            if self.fits(plan.schedule):
                found = plan
            elif plan.spec and len(errors) < _MOST_REPEATED and found is None:
                try:
                    schedule, built = self.scheduled(plan.spec, limited=True)
                except MemoryLimitError as error:
                    errors.append(error)
                else:
                    found = replace(plan, schedule=schedule, built=built)
        if found is None:
            raise errors[0]
        return found

    def scheduled(self, spec: StepSpec, limited: bool = False) -> tuple[Schedule, StepGraph]:
        """Return a step's schedule, which runs each device's tasks in sequence.

        It may exceed the memory, unless it is ``limited``: then each operator is a task, and some
        are repeated.
        """
        options = dict(self.options)
        fuse = options.pop("fuse", False)
        built = build(replace(spec.apart() if limited else spec, max_norm=self.max_norm))
        self._check_memory(built)
        machine = self.machine if limited else self.machine.unlimited
        policy = in_order(built.sequences)
        made = autosched.schedule(built.graph, machine, policy=policy, **options)
        if limited or self.fits(made):
            made = replace(made, problem=replace(made.problem, machine=self.machine))
            if fuse:
                made = autosched.fuse(made, compiler=fuse if callable(fuse) else None)
        return made, built

    def fits(self, schedule: Schedule) -> bool:
        """Whether devices have the memory that a schedule takes."""
        peak = schedule.peak_bytes
        return all(peak[device.name] <= device.nbytes for device in self.machine.devices)

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


@dataclass
class Captures:
    """The captured micro-batches of one kind of batch, of which each is a part."""

    training: Training
    batch: Sequence[Any]
    rows: int  # of the batch

    def __post_init__(self) -> None:
        self._known: dict[int, Template] = {}

    def of(self, sizes: Iterable[int]) -> dict[int, Template]:
        """Return micro-batches of each size but 0. Collective on several ranks."""
        wanted = [size for size in dict.fromkeys(sizes) if size]
        new = [size for size in wanted if size not in self._known]
        self._known |= self.training.together(lambda: {size: self._captured(size) for size in new})
        return {size: self._known[size] for size in wanted}

    def _captured(self, size: int) -> Template:
        training = self.training
        part = first_rows(self.batch, size, training.capture_device)
        weight = size / self.rows if training.averages else 1.0
        one = pass_of(training.model, training.loss_fn, training.optimizer, part, weight)
        return with_hoisted_random_numbers(with_random_numbers_once(one))
