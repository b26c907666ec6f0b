"""The state of a model and an optimizer on all ranks, which some give to the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from autosched import ScheduleError
from autosched.parallel.agreement import Agreement
from autosched.parallel.planned import Planned

__all__ = ["SharedState", "parameters_of"]


class SharedState:
    """The state of a model and an optimizer on all ranks: who has which part, and as of when.

    ``is_stale`` where other ranks have newer parts. Without an agreement there is one process.
    """

    def __init__(
        self,
        agreement: Agreement | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ):
        self.is_stale = False
        self._agreement = agreement
        self._model = model
        self._optimizer = optimizer
        self._trained: Planned | None = None  # by which the last step was
        self._restored = False  # whether the state was loaded since the last step
        self._seen: list[tuple[torch.Tensor, int]] | None = None  # with versions

    def has_changed(self) -> bool:
        """Whether other code changed the state since the last step, as far as torch reports it."""
        if self._seen is None:
            return True
        now = [*state_tensors(self._model, self._optimizer)]
        return len(now) != len(self._seen) or any(
            tensor is not old or tensor._version != version
            for tensor, (old, version) in zip(now, self._seen, strict=True)
        )

    def note(self) -> None:
        """Remember the state that all ranks have."""
        if self._agreement is not None:
            now = state_tensors(self._model, self._optimizer)
            self._seen = [(tensor, tensor._version) for tensor in now]

    def note_step(self, has_new: bool) -> None:
        """Remember the state after a step; ``has_new`` tensors, or it wrote those from before."""
        if has_new or self._seen is None:
            self.note()
        else:
            self._seen = [(tensor, tensor._version) for tensor, _ in self._seen]

    def forget(self) -> None:
        """Take the state as changed, since which tensors a failed run has written is unknown."""
        self._seen = None

    def restored(self) -> None:
        """Note that this process has loaded a state, which is that of all ranks."""
        self._restored = True
        self.is_stale = False

    def broadcast(self) -> None:
        """Give all ranks the state of rank 0, or of those that have trained stages since.

        Collective.
        """
        if self._agreement is None:
            return
        if self._agreement.of_first("restored" if self._restored else ""):
            self._trained = None
        self._restored = False
        self._share(self._agreement)

    def train_by(self, planned: Planned) -> None:
        """Begin a step; first share the state if the last one had a stage on another rank."""
        if self._agreement is not None:
            last = {} if self._trained is None else self._trained.owners
            both = planned.owners.keys() & last.keys()
            if any(planned.owners[name] != last[name] for name in both):
                self._share(self._agreement)
        self._trained = planned
        self.is_stale = bool(planned.elsewhere)

    def _share(self, agreement: Agreement) -> None:
        """Give all ranks the state of those that own parts of it."""
        last = self._trained
        owners = {} if last is None else owners_of(last.state, last.owners)
        agreement.together(
            "the state", lambda: broadcast_state(agreement, self._model, self._optimizer, owners)
        )
        self.is_stale = False
        self.note()

    def here(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a step's state that this process has."""
        if not self.is_stale or self._trained is None:
            return state
        tensors = self._trained.state.tensors()
        others = {id(tensors[name]) for name in self._trained.elsewhere}
        return part_of(state, self._model, self._optimizer, lambda item: id(item) not in others)


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
    agreement.together(what, lambda: _check(tree, given, rank))
    with torch.no_grad():
        own = _tensors(model, lambda tensor: owners.get(id(tensor), 0) == rank)
        for name, new in given["model"].items():
            own[name].copy_(new)
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        for parameter, held in zip(parameters, given["optimizer"], strict=True):
            if held is not None:
                items, beside = held
                moved = {name: items[name].to(parameter.device) for name in beside}
                _adopt(optimizer, parameter, {**items, **moved})


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


def _tensors(
    model: torch.nn.Module, mine: Callable[[torch.Tensor], bool]
) -> dict[str, torch.Tensor]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach() for name, tensor in named if mine(tensor)}


def _tree(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, mine: Callable[[torch.Tensor], bool]
) -> dict[str, Any]:
    """Return what some parameters and buffers are, and what the optimizer has of them, on the CPU.

    What it has is by name, with the names of those tensors that are on an accelerator.
    """
    parameters = (item for group in optimizer.param_groups for item in group["params"])
    return {
        "model": {name: tensor.cpu() for name, tensor in _tensors(model, mine).items()},
        "optimizer": [_held(optimizer.state.get(p, {})) if mine(p) else None for p in parameters],
    }


def _held(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    tensors = {name: item for name, item in state.items() if isinstance(item, torch.Tensor)}
    beside = [name for name, item in tensors.items() if item.device.type != "cpu"]
    return {**state, **{name: item.cpu() for name, item in tensors.items()}}, beside


def _check(own: Mapping[str, Any], given: Mapping[str, Any], rank: int) -> None:
    """Raise ScheduleError with the first tensor in which a model differs from that of a rank."""
    facts = ({name: _facts(t) for name, t in tree["model"].items()} for tree in (own, given))
    here, there = facts
    for name in dict.fromkeys([*there, *here]):
        if here.get(name) != there.get(name):
            what = f"{name!r} of its model is {here.get(name, 'missing')}"
            raise ScheduleError(f"{what}, and that of rank {rank} is {there.get(name, 'missing')}")
    counts = len(own["optimizer"]), len(given["optimizer"])
    if counts[0] != counts[1]:
        what = f"its optimizer has {counts[0]} parameters"
        raise ScheduleError(f"{what}, that of rank {rank} {counts[1]}")


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
