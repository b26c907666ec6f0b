"""Give a run the state that its schedule keeps on devices.

On an imagined machine a tensor of the caller stands for the one on the device. On a real one, state
that is elsewhere is copied to its device before a run, once, and again when other code has changed
it: when the caller's tensor is another one, has other memory, or its version counter has moved.
Torch counts no version where it updates the statistics of a batch norm, nor where an optimizer is
fused. So small buffers are compared element by element, and a step of an optimizer counts as a
change of its parameters. Nothing reveals a write through ``tensor.data`` or NumPy. The copies are
only read, so the caller's tensors are never out of date.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autosched._lib.aliasing import are_apart, check_written
from autosched._lib.copying import span
from autosched.machine.machine import Machine
from autosched.problem import Problem
from autosched.program.program import Program
from autosched.runtime.backends import Backend

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


class ResidentState:
    """The state that a schedule keeps; of several ranks, each has that on its devices."""

    def __init__(self, problem: Problem, backend: str | Backend, program: Program):
        graph = problem.graph
        machine = problem.machine
        inputs = [value for value in graph.sources if value.tensor is None]
        source = {value.name: value.copy_of or value.name for value in inputs}
        resident = problem.constraints.resident
        homes = {name: problem.homes[graph.value(name).index] for name in resident}
        moves = moves_to(machine, backend)
        self._is_rank = machine.rank is not None
        if self._is_rank:
            homes = {}
            names = [name for name, at in program.inputs if at in machine.here and name in source]
            self._renamed = {name: source[name] for name in names}
        else:
            self._renamed = {name: source[name] for name in resident if name != source[name]}
        self._moves = {name: (home, moves[home]) for name, home in homes.items() if home in moves}
        self._moved = {source[name] for name in self._moves}
        self._written = {value.name for value in inputs if graph.last_version(value.index)}
        self._copies: dict[str, _Copy] = {}

    def inputs(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of a run, with state on its devices.

        Raises HazardError if a task writes memory of which there is a copy.
        """
        if not self._moves and not self._renamed:
            return given
        if self._moves and self._written:
            self._check_apart(given)
        found = {} if self._is_rank else dict(given)
        for name, source in self._renamed.items():
            if source in given:
                found[name] = given[source]
        for name, (device, move) in self._moves.items():
            if (tensor := found.get(name)) is not None:
                found[name] = self._current(name, tensor, device, move)
        return found

    def wrote(self, given: Mapping[str, Any]) -> None:
        """Note that a run may have written its inputs."""
        if self._written and _COPIES:
            forget(given[name] for name in self._written if name in given)

    def _current(self, name: str, tensor: Any, device: str, move: Move) -> Any:
        """Return the copy of a tensor; a new one if the tensor was changed."""
        copy = self._copies.get(name)
        if copy is None or not copy.is_of(tensor):
            copy = _COPIES.get((id(tensor), device))  # of another schedule
            if copy is None or not copy.is_of(tensor):
                copy = _copied(tensor, device, move)
            if copy is None:
                return tensor
            self._copies[name] = copy
        return copy.tensor

    def _check_apart(self, given: Mapping[str, Any]) -> None:
        """Raise HazardError if a task writes memory of state of which there is a copy."""
        if are_apart(given.values()):
            return
        written = self._written

        def matters(a: str, b: str) -> bool:
            return (a in written and b in self._moved) or (b in written and a in self._moved)

        cure = "; pass a clone, or make one a view of the other in the graph"
        check_written(given, written, matters, cure)


@dataclass(eq=False)
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

    def is_of(self, source: Any) -> bool:
        """Whether a tensor is the source, and unchanged."""
        memory = self.memory
        is_same = (
            source is self.source
            and self.version is not None
            and self.version == source._version
            and source.data_ptr() == memory.data_ptr()
            and source.shape == memory.shape
            and source.stride() == memory.stride()
            and source.dtype is memory.dtype
        )
        if not is_same or self.elements is None:
            return is_same
        return bool(sys.modules["torch"].equal(self.elements, memory))


# The copies that schedules hold, which they share, by the source's identity and the device.
_COPIES: weakref.WeakValueDictionary[tuple[int, str], _Copy] = weakref.WeakValueDictionary()
_HOOKS: list[Any] = []


def _copied(source: Any, device: str, move: Move) -> _Copy | None:
    """Copy a tensor to a device; None for what is not an ordinary one."""
    torch = sys.modules["torch"]
    if not isinstance(source, torch.Tensor) or source.layout is not torch.strided:
        return None
    if not _HOOKS:
        optimizer = sys.modules["torch.optim.optimizer"]
        _HOOKS.append(optimizer.register_optimizer_step_post_hook(_note_step))
    memory = source.detach()
    is_counted = isinstance(source, torch.nn.Parameter) or source.dim() > 1
    elements = None if is_counted else memory.clone()
    version = None if source.is_inference() else source._version  # those have none
    copy = _COPIES[id(source), device] = _Copy(move(memory), source, memory, version, elements)
    return copy


def forget(tensors: Iterable[Any]) -> None:
    """Let all schedules copy tensors again, because they may have been written."""
    found = set(map(id, tensors))
    for copy in list(_COPIES.values()):
        if id(copy.source) in found:
            copy.version = None


def _note_step(optimizer: Any, *_: Any) -> None:
    """Let a step of an optimizer count as a change of its parameters."""
    if _COPIES:
        forget(item for group in optimizer.param_groups for item in group["params"])


def _move_to(device: str) -> Move:
    """Return a function that copies tensors to a torch device, with their strides."""

    def move(tensor: Any) -> Any:
        if tensor.is_contiguous() or not tensor.numel():
            return tensor.to(device)
        row = tensor.as_strided((span(tensor),), (1,)).to(device)
        return row.as_strided(tensor.shape, tensor.stride())

    return move
