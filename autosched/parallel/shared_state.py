"""The state of a model and an optimizer on all ranks, which some give to the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from autosched import ScheduleError
from autosched.parallel.planned import Planned
from autosched.parallel.ranks import Agreement

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
        mine = "restored" if self._restored else ""
        if self._agreement.texts("the state", mine)[0]:
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
        owners: dict[int, int] = {}  # ranks, by the ids of tensors
        if self._trained is not None:
            tensors = self._trained.state.tensors()
            ranks = self._trained.owners.items()
            owners = {id(tensors[name]): rank for name, rank in ranks if name in tensors}
        agreement.together("the state", lambda: self._give(agreement, owners))
        self.is_stale = False
        self.note()

    def _give(self, agreement: Agreement, owners: Mapping[int, int]) -> None:
        """Give all ranks what each owns; what has no owner is rank 0's.

        Tensors keep their memory. Raises ScheduleError, on all ranks, where models differ in shape.
        """
        for rank in sorted({0, *owners.values()}):
            what = f"the state of rank {rank}"
            own = self._owned_by(rank, owners)
            given = agreement.broadcast(own, what, rank)
            agreement.together(what, partial(_check, own, given, rank))
            if given is not own:
                self._take(given)

    def _owned_by(self, rank: int, owners: Mapping[int, int]) -> dict[str, Any]:
        """Return the parameters and buffers of one rank, and what the optimizer has of them.

        All is on the CPU. What the optimizer has is by name, with the names of those tensors that
        are on an accelerator.
        """

        def is_owned(tensor: torch.Tensor) -> bool:
            return owners.get(id(tensor), 0) == rank

        state = self._optimizer.state
        own = {name: tensor for name, tensor in self._tensors().items() if is_owned(tensor)}
        return {
            "model": {name: tensor.detach().cpu() for name, tensor in own.items()},
            "optimizer": [
                _held(state.get(item, {})) if is_owned(item) else None for item in self._trainable()
            ],
        }

    def _take(self, given: Mapping[str, Any]) -> None:
        with torch.no_grad():
            own = self._tensors()
            for name, new in given["model"].items():
                own[name].copy_(new)
            for parameter, held in zip(self._trainable(), given["optimizer"], strict=True):
                if held is not None:
                    items, beside = held
                    moved = {name: items[name].to(parameter.device) for name in beside}
                    _adopt(self._optimizer, parameter, {**items, **moved})

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(itertools.chain(self._model.named_parameters(), self._model.named_buffers()))

    def _trainable(self) -> list[torch.Tensor]:
        """Return the parameters of the optimizer, in the order in which its state numbers them."""
        return [item for group in self._optimizer.param_groups for item in group["params"]]

    def here(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a step's state that this process has."""
        if not self.is_stale or self._trained is None:
            return state
        tensors = self._trained.state.tensors()
        others = {id(tensors[name]) for name in self._trained.elsewhere}
        kept = self._model.state_dict(keep_vars=True)
        moments = state["optimizer"]["state"]
        own = [i for i, item in enumerate(self._trainable()) if id(item) not in others]
        return {
            **state,
            "model": {n: t for n, t in state["model"].items() if id(kept[n]) not in others},
            "optimizer": {
                **state["optimizer"],
                "state": {i: moments[i] for i in own if i in moments},
            },
        }


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
