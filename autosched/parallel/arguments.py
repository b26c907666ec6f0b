"""Check the arguments of data_parallel, model_parallel and pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosched import Device, Machine, MachineError, ScheduleError
from autosched.parallel.all_reduce import STRATEGIES

__all__ = ["check_options", "check_strategy", "check_trained", "devices_of"]

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
        elif option in ("averages", "clip_grad_norm", "before_step"):
            why = "it is for training steps, with loss_fn= and optimizer="
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
