"""Detect and undo changes to objects outside a function's arguments.

Such objects are named as in the function's source. What a capture changes there is found, reported
and put back, so a capture that fails leaves everything as it was. A step that leaves anything but
tensors changed cannot be captured, because a counter, for example, would make each call need a
recapture. An exception are switches: an attribute that holds a word, True, False or None is left as
the step leaves it. Knows no graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import FunctionType, NoneType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from autosched.frontends.reach import Reach

__all__ = ["Surroundings"]

_PLAIN = (bool, int, float, complex, str, bytes, tuple)
_COUNTING = (
    LRScheduler,
    torch.amp.GradScaler,
)  # change with each step, except for the attributes that code mentions


class Surroundings:
    """The objects reached from ``roots``; ``modules`` have paths as names.

    >>> model = torch.nn.Identity()
    >>> around = Surroundings([model], {"": model})
    >>> model.count = 1
    >>> around.change(), around.restore(), hasattr(model, "count")
    ("attribute 'count' of the module is 1", None, False)
    """

    def __init__(self, roots: Iterable[Any], modules: Mapping[str, torch.nn.Module]):
        reach = Reach(roots, written=True)
        self.found = found = reach.found()
        self._paths: dict[int, str] = {}
        for key, module in modules.items():
            for path, part in module.named_modules():
                name = ".".join(filter(None, (key, path)))
                whose = f"module {name!r}" if name else "the module"
                self._paths |= {id(part.__dict__): whose, id(part._parameters): whose}
        for item in found:
            if isinstance(item, torch.optim.Optimizer):
                kind = type(item).__name__
                self._paths |= {
                    id(group): f"group {i} of {kind}" for i, group in enumerate(item.param_groups)
                }
        self._owners = {
            id(vars(item)): item
            for item in found
            if isinstance(getattr(item, "__dict__", None), dict)
        }
        self._variables = {
            id(cell): name
            for item in found
            if isinstance(item, FunctionType)
            for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True)
        }
        self._globals = {id(item.__globals__) for item in found if isinstance(item, FunctionType)}
        self._legal = set(map(id, _legal(found)))
        own = [vars(item) for item in found if isinstance(item, _COUNTING)]
        held = [*reach.containers, *own]
        self._lists = [(item, item.copy()) for item in held if isinstance(item, list)]
        self._tables = [(item, item.copy()) for item in held if isinstance(item, dict)]
        self._entries = [(item, name, item[name]) for item, name in reach.entries if name in item]
        self._cells = [
            (item, item.cell_contents) for item, name in reach.attributes if name == "cell_contents"
        ]

    def name_of(self, wanted: Any) -> str | None:
        """Return the name of an object that is held here; None if it is not."""
        variable = next(
            (self._variable(cell) for cell, item in self._cells if item is wanted), None
        )
        if variable is not None:
            return variable
        lists = ((items, i, item) for items, old in self._lists for i, item in enumerate(old))
        tables = ((table, key, item) for table, old in self._tables for key, item in old.items())
        found = (slot for slot in chain(self._entries, tables, lists) if slot[2] is wanted)
        return next((self._called(container, key) for container, key, _ in found), None)

    def _variable(self, cell: Any) -> str:
        return f"variable {self._variables.get(id(cell), '?')!r}"

    def _called(self, container: Any, key: Any) -> str:
        if id(container) in self._paths:
            return f"attribute {key!r} of {self._paths[id(container)]}"
        if id(container) in self._globals:
            return f"global {key!r}"
        if id(container) in self._owners:
            return f"attribute {key!r} of a {type(self._owners[id(container)]).__name__}"
        return f"{self.name_of(container) or f'a {type(container).__name__}'}[{key!r}]"

    def change(self) -> str | None:
        """Return a description of the first change; None if there is none."""
        return next(self._changes(), None)

    def switched(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return the attributes that hold a word, True, False or None, and did not: the object's, the name, it.

        A number may run on with each step; this can be left again as the function leaves it.
        """
        found = [(table, name, old.get(name)) for table, old in self._tables for name in table]
        found += [
            (table, name, item) for table, name, item in self._entries if isinstance(table, dict)
        ]
        own = [(table, name, old) for table, name, old in found if id(table) in self._owners]
        return [
            (table, name, table[name])
            for table, name, old in own
            if _is_switch(table.get(name, 0), old)
        ]

    def _changes(self) -> Iterator[str]:
        switched = [(id(table), name) for table, name, _ in self.switched()]
        for cell, item in self._cells:
            if not _same(cell.cell_contents, item):
                yield f"{self._variable(cell)} is {_shown(cell.cell_contents)}"
        for namespace, name, item in self._entries:
            if not _same(namespace.get(name), item) and (id(namespace), name) not in switched:
                yield f"{self._called(namespace, name)} is {_shown(namespace.get(name))}"
        for items, old_items in self._lists:
            if len(items) != len(old_items) or not all(map(_same, items, old_items)):
                yield f"{self.name_of(items) or 'a list'} has other items"
        for table, old in self._tables:
            state = isinstance(self._owners.get(id(table)), torch.nn.Module)
            for key in {**old, **table} if id(table) not in self._legal else ():
                known = self._is_private(table, key) or (id(table), key) in switched
                known = known or (
                    state and isinstance(table.get(key), torch.Tensor)
                )  # which is looked after elsewhere
                if not known and not _same(table.get(key), old.get(key)):
                    yield f"{self._called(table, key)} is {_shown(table.get(key))}"

    def _is_private(self, table: Any, key: Any) -> bool:
        """Whether this is internal state of torch."""
        owner = self._owners.get(id(table))
        if isinstance(owner, torch.nn.RNNBase) and str(key).startswith("_flat_weight"):
            return True
        known = isinstance(owner, torch.optim.Optimizer) or type(owner).__module__.startswith(
            "torch."
        )
        return known and str(key).startswith("_")

    def restore(self) -> None:
        """Undo all changes."""
        for cell, item in self._cells:
            cell.cell_contents = item
        for namespace, name, item in self._entries:
            if isinstance(namespace, dict):
                namespace[name] = item
        for items, old_items in self._lists:
            items[:] = old_items
        for table, old in self._tables:
            table.clear()
            table.update(old)


def _legal(found: Iterable[Any]) -> Iterator[Any]:
    """Yield the containers that a step may change, because they are checked elsewhere."""
    for item in found:
        if isinstance(item, torch.optim.Optimizer):
            yield item.state
            yield from item.state.values()
        elif isinstance(item, torch.nn.Module):
            yield item._buffers


def _same(now: Any, before: Any) -> bool:
    return now is before or (
        type(now) is type(before) and isinstance(now, _PLAIN) and repr(now) == repr(before)
    )


def _is_switch(now: Any, before: Any) -> bool:
    kinds = (bool, str, NoneType)
    return (
        isinstance(now, kinds)
        and isinstance(before, (*kinds, torch.Tensor))
        and not _same(now, before)
    )


def _shown(item: Any) -> str:
    return "a tensor" if isinstance(item, torch.Tensor) else repr(item)[:80]
