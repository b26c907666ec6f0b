"""Give a schedule the state that it keeps on devices.

On an imagined machine a tensor of the caller stands for the one on the device. On a real one, state
that is elsewhere is copied to its device before a run, once, and again when other code has changed
it: when the caller's tensor is another one, has other memory, or its version counter has moved.
Torch counts no version where it updates the statistics of a batch norm, nor where an optimizer is
fused. So small buffers are compared element by element, and a step of an optimizer counts as a
change of its parameters. Nothing reveals a write through ``tensor.data`` or NumPy.

The copies are only read, so the caller's tensors are never out of date.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autosched._lib.aliasing import are_apart, extents, first_meeting
from autosched._lib.copying import span
from autosched.errors import HazardError
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.runtime.backends import Backend

__all__ = ["Kept", "moves_to"]

Move = Callable[[Any], Any]  # returns a copy of a tensor on a device


def moves_to(machine: Machine, backend: str | Backend) -> dict[str, Move]:
    """Return, by accelerator, what copies tensors there; none where these are imagined.

    >>> moves_to(Machine.emulated(gpus=1), "emulated")
    {}
    """
    is_located = backend in ("accelerator", "replay") or hasattr(backend, "place")
    if machine.imagined or not is_located:
        return {}
    return {name: _move_to(place) for name, place in machine.physical.items() if place}


class Kept:
    """The state that a schedule of ``graph`` keeps; ``moves`` copy tensors to physical devices."""

    def __init__(self, graph: Graph, moves: Mapping[str, Move]):
        self._sources = graph.kept
        homes = {name: graph.value(name).home for name in graph.kept}
        self._moves = {name: moves[home] for name, home in homes.items() if home and home in moves}
        self._others = {name: source for name, source in graph.kept.items() if name != source}
        self._written = [
            value.name
            for value in graph.sources
            if value.tensor is None and graph.last_version(value.index)
        ]
        self._copies: dict[str, _Copy] = {}

    def inputs(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of a run, with state on its devices.

        Raises HazardError if a task writes memory of which there is a copy.
        """
        if not self._moves and not self._others:
            return given
        if self._moves and self._written:
            self._check_apart(given)
        found = dict(given)
        for name, source in self._others.items():
            if source in given:
                found[name] = _another(given[source])
        for name, move in self._moves.items():
            if (tensor := found.get(name)) is not None:
                found[name] = self._current(name, tensor, move)
        return found

    def wrote(self, given: Mapping[str, Any]) -> None:
        """Note that a run may have written its inputs."""
        if self._written and _TABLES:
            forget(given[name] for name in self._written if name in given)

    def forget(self, tensors: set[int]) -> None:
        """Drop the copies of tensors, given by their identities."""
        for name, copy in list(self._copies.items()):
            if id(copy.source) in tensors:
                self._copies.pop(name, None)

    def _current(self, name: str, tensor: Any, move: Move) -> Any:
        copy = self._copies.get(name)
        if copy is None or not copy.is_of(tensor):
            copy = _Copy.of(tensor, move)
            if copy is None:
                return tensor
            self._copies[name] = copy
            _watch(self)
        return copy.tensor

    def _check_apart(self, given: Mapping[str, Any]) -> None:
        """Raise HazardError if a task writes memory of state of which there is a copy."""
        if are_apart(given.values()):
            return
        written = {*self._written}
        copied = {self._sources[name] for name in self._moves}
        owned = [(name, extent) for name, item in given.items() for extent in extents(item)]
        pair = first_meeting(owned, lambda a, b: {a, b} <= written | copied and a != b)
        if pair is not None and not written.isdisjoint(pair):
            a, b = pair
            raise HazardError(
                f"{a!r} and {b!r} share memory, and {(a if a in written else b)!r} is written in "
                "place; pass a clone, or make one a view of the other in the graph"
            )


@dataclass(frozen=True)
class _Copy:
    """A copy of a tensor on a device: of which tensor, in which memory, and of which version.

    ``memory`` shares that memory, so that nothing else comes to its address. ``elements`` are those
    at that time, of a tensor whose version does not show each write.
    """

    tensor: Any
    source: Any
    memory: Any
    version: int | None
    elements: Any

    @classmethod
    def of(cls, source: Any, move: Move) -> _Copy | None:
        """Copy a tensor; None for what is not an ordinary one."""
        torch = sys.modules["torch"]
        if not isinstance(source, torch.Tensor) or source.layout is not torch.strided:
            return None
        memory = source.detach()
        is_counted = isinstance(source, torch.nn.Parameter) or source.dim() > 1
        elements = None if is_counted else memory.clone()
        return cls(move(memory), source, memory, _version(source), elements)

    def is_of(self, source: Any) -> bool:
        """Whether a tensor is the source, and unchanged."""
        memory = self.memory
        is_same = (
            source is self.source
            and self.version is not None
            and self.version == _version(source)
            and source.data_ptr() == memory.data_ptr()
            and source.shape == memory.shape
            and source.stride() == memory.stride()
            and source.dtype is memory.dtype
        )
        return is_same and (self.elements is None or _are_equal(self.elements, memory))


def _another(tensor: Any) -> Any:
    """Return another object for the same memory, since objects have devices on imagined machines."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _version(tensor: Any) -> int | None:
    """Return the version of a tensor; None of one of inference mode, which has none."""
    return None if tensor.is_inference() else int(tensor._version)


def _are_equal(one: Any, other: Any) -> bool:
    return bool(sys.modules["torch"].equal(one, other))


def _move_to(device: str) -> Move:
    """Return a function that copies tensors to a torch device, with their strides."""

    def move(tensor: Any) -> Any:
        if tensor.device == sys.modules["torch"].device(device):
            return tensor
        if tensor.is_contiguous() or not tensor.numel():
            return tensor.to(device)
        row = tensor.as_strided((span(tensor),), (1,)).to(device)
        return row.as_strided(tensor.shape, tensor.stride())

    return move


# ---- changes that no version counter shows

_TABLES: weakref.WeakSet[Kept] = weakref.WeakSet()
_HOOKS: list[Any] = []


def forget(tensors: Iterable[Any]) -> None:
    """Let all schedules copy tensors again, because they may have been written."""
    found = set(map(id, tensors))
    for table in list(_TABLES):
        table.forget(found)


def _watch(table: Kept) -> None:
    """Let steps of optimizers count as changes of parameters of which a table has copies."""
    _TABLES.add(table)
    if not _HOOKS:
        optimizer = sys.modules["torch"].optim.optimizer
        _HOOKS.append(optimizer.register_optimizer_step_post_hook(_note_step))


def _note_step(optimizer: Any, *_: Any) -> None:
    if _TABLES:
        forget(item for group in optimizer.param_groups for item in group["params"])
