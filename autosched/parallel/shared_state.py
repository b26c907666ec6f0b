"""The state of a model and an optimizer as trees, which some ranks give to all others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from autosched import ScheduleError
from autosched.parallel.agreement import Agreement

__all__ = ["broadcast_state", "owners_of", "parameters_of", "part_of", "state_tensors"]


def parameters_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield each parameter once, some times faster than ``model.parameters()``."""
    return _distinct(module._parameters for module in _modules_of(model))


def _modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and all modules in it, each once."""
    found, known = [model], {id(model)}
    for module in found:
        for part in module._modules.values():
            if part is not None and id(part) not in known:
                known.add(id(part))
                found.append(part)
    return found


def _distinct(held: Iterable[Mapping[str, torch.Tensor | None]]) -> Iterator[torch.Tensor]:
    """Yield each tensor once, in order."""
    tensors = (item for items in held for item in items.values() if item is not None)
    return iter({id(tensor): tensor for tensor in tensors}.values())


def state_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model and of an optimizer's state, in one order."""
    modules = _modules_of(model)
    yield from _distinct(module._parameters for module in modules)
    yield from _distinct(module._buffers for module in modules)
    for held in optimizer.state.values():
        yield from (item for item in held.values() if isinstance(item, torch.Tensor))


def broadcast_state(
    agreement: Agreement,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    owners: Mapping[int, int],
) -> None:
    """Give all ranks the model and the optimizer's state of those that own them. Collective.

    ``owners`` has the ranks of parameters and buffers, by identity; what it lacks is rank 0's.
    Tensors keep their memory. Raises ScheduleError, on all ranks, where models differ in shape.
    """
    for rank in sorted({0, *owners.values()}):
        _broadcast_from(rank, agreement, model, optimizer, owners)


def _broadcast_from(
    rank: int,
    agreement: Agreement,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    owners: Mapping[int, int],
) -> None:
    """Give all ranks what one of them owns."""
    tree = _tree(model, optimizer, lambda tensor: owners.get(id(tensor), 0) == rank)
    given = agreement.broadcast(tree, rank)
    what = f"the state of rank {rank}"
    if given is tree:
        agreement.together(what, lambda: None)
        return
    agreement.together(what, lambda: _check(tree, given))
    with torch.no_grad():
        for own, new in zip(tree["model"].values(), given["model"].values(), strict=True):
            own.copy_(new)
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        for parameter, held in zip(parameters, given["optimizer"], strict=True):
            if held is not None:
                _adopt(optimizer, parameter, held)


def owners_of(state: Any, ranks: Mapping[str, int]) -> dict[int, int]:
    """Return the ranks that own tensors, by identity, from ranks by name."""
    tensors = state.tensors()
    return {id(tensors[name]): rank for name, rank in ranks.items() if name in tensors}


def part_of(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    is_here: Callable[[torch.Tensor], bool],
) -> dict[str, Any]:
    """Return what is here of a step's state."""
    tensors = model.state_dict(keep_vars=True)
    moments = state["optimizer"]["state"]
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    own = [number for number, item in enumerate(parameters) if is_here(item)]
    return {
        **state,
        "model": {name: t for name, t in state["model"].items() if is_here(tensors[name])},
        "optimizer": {**state["optimizer"], "state": {n: moments[n] for n in own if n in moments}},
    }


def _tree(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, mine: Callable[[torch.Tensor], bool]
) -> dict[str, Any]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    parameters = (item for group in optimizer.param_groups for item in group["params"])
    return {
        "model": {name: tensor.detach() for name, tensor in named if mine(tensor)},
        "optimizer": [dict(optimizer.state.get(p, {})) if mine(p) else None for p in parameters],
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
