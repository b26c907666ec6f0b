"""Detect and undo changes to objects outside a function's arguments.

Such objects are named as in the function's source. A step that leaves anything but tensors changed
cannot be captured, because a counter, for example, would make each call need a recapture. Flags are
an exception: an attribute that holds a string, True, False or None may have another value
afterwards. Knows no graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import is_
from types import FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from autosched.errors import CaptureError
from autosched.frontends.reachability import Reach

__all__ = ["SideEffects", "TensorProperties"]

_VALUES = (bool, int, float, complex, str, bytes, tuple)
# Change with each step, except for the attributes that code mentions.
_COUNTERS = (LRScheduler, torch.amp.GradScaler)


class SideEffects:
    """The objects reached from ``roots``; ``modules`` have paths as names.

    >>> model = torch.nn.Identity()
    >>> effects = SideEffects([model], {"": model})
    >>> model.count = 1
    >>> effects.first(), effects.undo(), hasattr(model, "count")
    ("attribute 'count' of the module is 1", None, False)
    """

    def __init__(self, roots: Iterable[Any], modules: Mapping[str, torch.nn.Module]):
        reach = Reach(roots, written=True)
        self.found = found = reach.found()
        self._owners: dict[int, Any] = {}  # objects, by their attributes
        self._paths: dict[int, str] = {}  # names of attributes and of groups of optimizers
        self._variables: dict[int, str] = {}  # names of cells of closures
        self._globals: set[int] = set()
        self._state: set[int] = set()  # containers of tensors, which a step may change
        self._moments: set[int] = set()  # likewise, what they have for tensors
        own: list[dict[str, Any]] = []
        for item in found:
            if isinstance(getattr(item, "__dict__", None), dict):
                self._owners[id(vars(item))] = item
            if isinstance(item, FunctionType):
                names = item.__code__.co_freevars
                for name, cell in zip(names, item.__closure__ or (), strict=True):
                    self._variables[id(cell)] = name
                self._globals.add(id(item.__globals__))
            elif isinstance(item, torch.nn.Module):
                self._state.add(id(item._buffers))
            elif isinstance(item, torch.optim.Optimizer):
                moments = [held for key, held in item.state.items() if _is_tensor(key)]
                self._state.update(map(id, moments))
                self._moments.add(id(item.state))
                for i, group in enumerate(item.param_groups):
                    self._paths[id(group)] = f"group {i} of {type(item).__name__}"
            if isinstance(item, _COUNTERS):
                own.append(vars(item))
        for key, module in modules.items():
            for path, part in module.named_modules():
                name = ".".join(filter(None, (key, path)))
                owner = f"module {name!r}" if name else "the module"
                self._paths |= {id(part.__dict__): owner, id(part._parameters): owner}
        containers = [*reach.containers, *own]
        self._lists = [(item, item.copy()) for item in containers if isinstance(item, list)]
        self._dicts = [(item, item.copy()) for item in containers if isinstance(item, dict)]
        self._entries = [(item, name, item[name]) for item, name in reach.entries if name in item]
        cells = [item for item, name in reach.attributes if name == "cell_contents"]
        self._cells = [(cell, cell.cell_contents) for cell in cells]

    def substitute(self, twins: Mapping[int, torch.Tensor]) -> None:
        """Put other tensors in the places of some, given by their ids; ``undo`` undoes it.

        They may be in tuples there.
        """
        in_lists = ((items, i, item) for items, old in self._lists for i, item in enumerate(old))
        in_dicts = ((items, key, item) for items, old in self._dicts for key, item in old.items())
        entries: Iterable[Any] = (slot for slot in self._entries if isinstance(slot[0], dict))
        for container, key, item in chain(in_lists, in_dicts, entries):
            if (twin := _substituted(item, twins)) is not item:
                container[key] = twin
        for cell, item in self._cells:
            cell.cell_contents = _substituted(item, twins)

    def name_of(self, wanted: Any) -> str | None:
        """Return the name of an object that was reached, or None."""
        for cell, item in self._cells:
            if item is wanted:
                return self._variable(cell)
        in_lists = ((items, i, item) for items, old in self._lists for i, item in enumerate(old))
        in_dicts = ((items, key, item) for items, old in self._dicts for key, item in old.items())
        for container, key, item in chain(self._entries, in_dicts, in_lists):
            if item is wanted:
                return self._slot(container, key)
        return None

    def _variable(self, cell: Any) -> str:
        return f"variable {self._variables.get(id(cell), '?')!r}"

    def _slot(self, container: Any, key: Any) -> str:
        if id(container) in self._paths:
            return f"attribute {key!r} of {self._paths[id(container)]}"
        if id(container) in self._globals:
            return f"global {key!r}"
        if id(container) in self._owners:
            return f"attribute {key!r} of a {type(self._owners[id(container)]).__name__}"
        return f"{self.name_of(container) or f'a {type(container).__name__}'}[{key!r}]"

    def first(self) -> str | None:
        """Return a description of the first change; None if there is none."""
        return next(self._changes(), None)

    def switched(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return changed flags: an object's attributes, a name, the new value.

        A number may change with each step; a flag can be set after each run of the graph.
        """
        found = [(items, name, old.get(name)) for items, old in self._dicts for name in items]
        found += [(items, *old) for items, *old in self._entries if isinstance(items, dict)]
        return [
            (items, name, items[name])
            for items, name, old in found
            if id(items) in self._owners and _is_switched(items.get(name, 0), old)
        ]

    def _changes(self) -> Iterator[str]:
        switched = {(id(items), name) for items, name, _ in self.switched()}
        for cell, item in self._cells:
            if not _same(cell.cell_contents, item):
                yield f"{self._variable(cell)} is {_shown(cell.cell_contents)}"
        for namespace, name, item in self._entries:
            if not _same(namespace.get(name), item) and (id(namespace), name) not in switched:
                yield f"{self._slot(namespace, name)} is {_shown(namespace.get(name))}"
        for items, old_items in self._lists:
            if len(items) != len(old_items) or not all(map(_same, items, old_items)):
                yield f"{self.name_of(items) or 'a list'} has other items"
        for table, old in self._dicts:
            for key in {**old, **table} if id(table) not in self._state else ():
                known = (id(table), key) in switched or self._is_known(table, key)
                known |= id(table) in self._moments and _is_tensor(key)
                if not known and not _same(table.get(key), old.get(key)):
                    yield f"{self._slot(table, key)} is {_shown(table.get(key))}"

    def _is_known(self, attributes: dict[Any, Any], key: Any) -> bool:
        """Whether an attribute is state or internal to torch."""
        owner = self._owners.get(id(attributes))
        if isinstance(owner, torch.nn.Module) and isinstance(attributes.get(key), torch.Tensor):
            return True
        if isinstance(owner, torch.nn.RNNBase) and str(key).startswith("_flat_weight"):
            return True
        is_private = str(key).startswith("_") and not _is_tensor(attributes.get(key))
        return is_private and type(owner).__module__.startswith("torch.")

    def undo(self) -> None:
        """Undo all changes."""
        for cell, item in self._cells:
            cell.cell_contents = item
        for namespace, name, item in self._entries:
            if isinstance(namespace, dict):
                namespace[name] = item
        for items, old_items in self._lists:
            items[:] = old_items
        for table, old in self._dicts:
            table.clear()
            table.update(old)


def _substituted(item: Any, twins: Mapping[int, torch.Tensor]) -> Any:
    """Return the twin of a tensor; of a tuple, one with twins; and anything else as it is."""
    if not isinstance(item, tuple):
        return twins.get(id(item), item)
    parts = [_substituted(part, twins) for part in item]
    if all(map(is_, parts, item)):
        return item
    return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)


def _same(now: Any, before: Any) -> bool:
    return now is before or (
        type(now) is type(before) and isinstance(now, _VALUES) and repr(now) == repr(before)
    )


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)


def _is_switched(now: Any, before: Any) -> bool:
    """Whether a flag, or tensor, is another flag now."""
    flags = (bool, str, NoneType)
    was_flag = isinstance(before, (*flags, torch.Tensor))
    return isinstance(now, flags) and was_flag and not _same(now, before)


def _shown(item: Any) -> str:
    return "a tensor" if isinstance(item, torch.Tensor) else repr(item)[:80]


class _Properties(NamedTuple):
    memory: int
    requires_grad: bool
    grad: tuple[int, int] | None


class TensorProperties:
    """Properties of tensors that no operator changes, and their autograd history."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = tensors
        self.histories = {name: tensor.grad_fn for name, tensor in tensors.items()}
        self.before = {name: _properties(tensor) for name, tensor in tensors.items()}

    def rewritten(self) -> list[str]:
        """Return the names of tensors with another history now."""
        before = self.histories
        return [name for name, item in self.tensors.items() if item.grad_fn is not before[name]]

    def check(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise CaptureError if a property has changed; gradients of parameters may."""
        own = set(map(id, parameters))
        for name, tensor in self.tensors.items():
            before = self.before[name]
            now = _properties(tensor)
            if now.memory != before.memory:
                raise CaptureError(
                    f"{name!r} has other memory after the step; write in place, with copy_"
                )
            if id(tensor) in own and now.requires_grad != before.requires_grad:
                raise CaptureError(
                    f"requires_grad of {name!r} changes in the step; change it between calls"
                )
            if id(tensor) not in own and now.grad != before.grad:
                raise CaptureError(
                    f"a gradient is stored at {name!r}, which is not a parameter of a module or "
                    "optimizer; torch.autograd.grad returns it instead"
                )


def _properties(tensor: torch.Tensor) -> _Properties:
    grad = tensor.grad if tensor.is_leaf else None
    seen = None if grad is None else (id(grad), grad._version)
    return _Properties(tensor.untyped_storage()._cdata, tensor.requires_grad, seen)
