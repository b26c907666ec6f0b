"""The state of a model and an optimizer as one tree, which one rank gives to all others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autosched import ScheduleError
from autosched.parallel.agreement import Agreement

__all__ = ["broadcast_state", "state_tensors"]


def state_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model and of an optimizer's state, in one order."""
    yield from model.parameters()
    yield from model.buffers()
    for held in optimizer.state.values():
        yield from (item for item in held.values() if isinstance(item, torch.Tensor))


def broadcast_state(
    agreement: Agreement, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Give all ranks the model and the optimizer's state of rank 0. Collective.

    Tensors keep their memory. Raises ScheduleError, on all ranks, where models differ in shape.
    """
    tree = _tree(model, optimizer)
    given = agreement.broadcast(tree)
    if given is tree:
        agreement.together("the state of rank 0", lambda: None)
        return
    agreement.together("the state of rank 0", lambda: _check(tree, given))
    with torch.no_grad():
        for own, new in zip(tree["model"].values(), given["model"].values(), strict=True):
            own.copy_(new)
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        for parameter, held in zip(parameters, given["optimizer"], strict=True):
            _adopt(optimizer, parameter, held)


def _tree(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    parameters = (item for group in optimizer.param_groups for item in group["params"])
    return {
        "model": {name: tensor.detach() for name, tensor in named},
        "optimizer": [dict(optimizer.state.get(parameter, {})) for parameter in parameters],
    }


def _check(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ScheduleError with the first tensor in which a model differs from that of rank 0."""
    facts = ({name: _facts(t) for name, t in tree["model"].items()} for tree in (own, given))
    here, there = facts
    for name in dict.fromkeys([*there, *here]):
        if here.get(name) != there.get(name):
            what = f"{name!r} of its model is {here.get(name, 'missing')}"
            raise ScheduleError(f"{what}, and that of rank 0 is {there.get(name, 'missing')}")
    counts = len(own["optimizer"]), len(given["optimizer"])
    if counts[0] != counts[1]:
        raise ScheduleError(f"its optimizer has {counts[0]} parameters, that of rank 0 {counts[1]}")


def _facts(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _adopt(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, held: Mapping[str, Any]
) -> None:
    """Let the state of a parameter be this."""
    if not held:
        optimizer.state.pop(parameter, None)
        return
    old = optimizer.state[parameter]
    for name in old.keys() - held.keys():
        del old[name]
    for name, item in held.items():
        here = old.get(name)
        is_like = isinstance(item, torch.Tensor) and isinstance(here, torch.Tensor)
        if is_like and (here.shape, here.dtype) == (item.shape, item.dtype):
            here.copy_(item)
        else:
            old[name] = item
