"""Cache the plans of calls, schedule graphs, and move a model's state to their devices."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import torch

import autosched as asc
from autosched import Graph, Machine, Schedule, Watch, in_order
from autosched._lib.recent import Recent

P = TypeVar("P")


class Key:
    """A key of a cache whose hash is computed once; ``numbers`` differ in equal keys.

    Its parts are the kind of the batch, what is ``watched``, and others.
    """

    def __init__(self, parts: tuple[Hashable, ...]):
        self.parts = parts
        self.numbers: Hashable = ()
        self._hash = hash(parts)

    @property
    def watched(self) -> Hashable:
        """What changes with the modules and functions that a plan has captured."""
        return self.parts[1]

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Key) and self.parts == other.parts)


class Plans(Generic[P]):
    """A cache of plans, closed by ``close()``, by ``with``, or by garbage collection."""

    def __init__(self) -> None:
        self._plans = Recent[Any, Any](lambda plan: plan.schedule.close())
        self._watch: Watch | None = None
        self._guard = threading.RLock()

    def close(self) -> None:
        """Close all schedules, and drop them."""
        with self._guard:
            self._plans.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cached(self, key: Hashable, plan: Callable[[], P]) -> P:
        """Return the plan of a key, a new one if necessary."""
        found: P = self._plans[key] if key in self._plans else plan()
        self._plans.use(key, found)
        return found

    def known(self, key: Hashable) -> int:
        """Return a number that tells which plans there are for a key, on several ranks."""
        counts = [counts for counts, other in self._plans if other == key]
        return zlib.crc32(repr(sorted(counts)).encode()) if counts else 0

    def drop(self, key: Hashable) -> None:
        """Close and drop the plans for a key."""
        for each in [each for each in self._plans if each[1] == key]:
            self._plans.pop(each).schedule.close()

    def _watched(self, *functions: Any) -> Hashable:
        """Return a key that changes with the modules and functions that a plan has captured."""
        if self._watch is None or not self._watch.holds():
            self._watch = Watch(*functions)
        return self._watch.key


def scheduled(
    graph: Graph,
    machine: Machine,
    sequences: Mapping[str, Sequence[str]],
    options: Mapping[str, Any],
) -> Schedule:
    """Return the schedule that runs each device's tasks in sequence; with ``fuse``, fused."""
    options = dict(options)
    fuse = options.pop("fuse", False)
    made = asc.schedule(graph, machine, policy=in_order(sequences), **options)
    return asc.fuse(made, compiler=fuse if callable(fuse) else None) if fuse else made


def torch_device(machine: Machine, device: str) -> str | None:
    """Return the torch device of a machine's device; None if it is the CPU, or emulated on it."""
    found = machine.device(device)
    return None if machine.imagined or found.kind == "cpu" else found.physical or device


def move_model(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: str | None
) -> None:
    """Move a model and its optimizer's state to one torch device, unless that is None."""
    if device is None:
        return
    model.to(device)
    for state in optimizer.state.values() if optimizer is not None else ():
        tensors = {name: item for name, item in state.items() if isinstance(item, torch.Tensor)}
        state.update((name, item.to(device)) for name, item in tensors.items() if item.dim())


def move_state(machine: Machine, state: Any, homes: Mapping[str, str]) -> None:
    """Move the tensors of a state, by name, to their devices, if these are physical."""
    for name, (place, tensor) in state.places().items():
        device = torch_device(machine, homes[name]) if name in homes else None
        if device is None or str(tensor.device) == device:
            continue
        moved = tensor.detach().to(device)
        if place[0] == "parameter":
            tensor.data = moved
        else:
            state.put(place, moved)
