"""Training steps over several ranks: where a step lies, and how its processes agree.

Where: names, hosts, generators and leads. On a machine without ranks, the rank of every device is
None, and names are plain.

How: before a step, each rank tells its rows, and a digest of the kind of its batch, model and
optimizer, in one small exchange. So all take the same plan, or all raise the same error. Rank 0's
model and optimizer count: all get them before the first step, and after a rank has changed its own.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from autosched import Machine, ScheduleError
from autosched._lib.containers import leaves
from autosched.machine.cluster import joined
from autosched.parallel.batches import rows_of
from autosched.parallel.plans import Key, Plans
from autosched.runtime.ranks.messages import ReceiveBuffer, description_of, in_host_memory, rows

__all__ = ["Agreed", "Agreement", "Kind", "Layout", "agreement_of", "generators_of", "kind_of"]
__all__ += ["label_on", "ranks_of", "same_rows"]

_FAILED, _CHANGED = 1, 2  # flags
_REMEMBERED = 64  # kinds


# ---- where


def ranks_of(machine: Machine, devices: Iterable[str]) -> tuple[int | None, ...]:
    """Return the ranks of some devices, each once, in order.

    >>> ranks_of(Machine.emulated(gpus=2, hosts=2), ["cuda:2", "cuda:0", "cuda:1"])
    (0, 1)
    """
    return tuple(
        sorted({machine.device(name).rank for name in devices}, key=lambda rank: rank or 0)
    )


def label_on(rank: int | None, name: str) -> str:
    """Return the name of a rank's own input or output; rank 0 has the plain one."""
    return f"rank{rank}.{name}" if rank else name


def generators_of(machine: Machine) -> dict[str, str]:
    """Return the random number generators of devices, by name; logical devices share one.

    Each rank has its own. Imagined accelerators use the generator of the CPU.
    """
    found = {}
    for device in machine.devices:
        rank = "" if device.rank is None else f"rank {device.rank}"
        own = device.is_accelerator and not machine.imagined
        name = " ".join(filter(None, (rank, (device.physical or device.name) if own else "")))
        if name:
            found[device.name] = name
    return found


@dataclass(frozen=True)
class Layout:
    """The replicas of a step, and the device of each stage of each of them.

    The tensors of the user's model on a rank are those of the *lead* of each stage: of the first
    replica that has the stage there.
    """

    machine: Machine
    devices: tuple[tuple[str, ...], ...]

    @cached_property
    def ranks(self) -> tuple[int | None, ...]:
        """The ranks that take part."""
        return ranks_of(self.machine, (device for stages in self.devices for device in stages))

    def rank(self, device: str) -> int | None:
        """Return the rank of a device."""
        return self.machine.device(device).rank

    def host(self, rank: int | None) -> str | None:
        """Return the CPU of a rank; None for the host of a machine without ranks."""
        if rank is None:
            return None
        cpus = (d.name for d in self.machine.devices if d.rank == rank and d.kind == "cpu")
        return next(cpus, None)

    def batch_home(self, device: str, given: str | None) -> str | None:
        """Return where a part of the batch is that a device reads; ``given``: where the user has it.

        Of several ranks, the one that reads it passes it.
        """
        rank = self.rank(device)
        if rank is None or given is None:
            return given if rank is None else self.host(rank)
        return device

    def leads(self, replica: int, stage: int) -> bool:
        """Whether a replica is the first one with a stage on that rank."""
        rank = self.rank(self.devices[replica][stage])
        return all(self.rank(other[stage]) != rank for other in self.devices[:replica])

    def other_leads(self, stage: int, replica: int) -> list[int]:
        """Return the leads of a stage on all ranks, except a replica."""
        others = (i for i in range(len(self.devices)) if i != replica)
        return [i for i in others if self.leads(i, stage)]

    def first_device(self, rank: int | None) -> str:
        """Return the first device of a step on a rank."""
        devices = (device for stages in self.devices for device in stages)
        return next(device for device in devices if self.rank(device) == rank)


# ---- agreement


class Kind(NamedTuple):
    """What decides on a plan, on one rank; ``watched`` is compared by its history alone.

    ``settings`` are those of the optimizer that differ in equal keys: see ``Key.numbers``.
    """

    batch: tuple[str, ...]
    parameters: tuple[bool, ...]
    optimizer: tuple[str, ...]
    settings: tuple[str, ...]
    watched: Hashable


class Agreed(NamedTuple):
    """The rows of each rank in a step, and what identifies its kind on this rank."""

    key: Key
    counts: tuple[int, ...]


class Agreement:
    """The agreements of one step's processes."""

    def __init__(self) -> None:
        self._group = joined()
        self._digests: dict[Hashable, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self.together = self._group.together
        self.texts = self._group.texts

    def step(
        self,
        batch: Sequence[Any],
        find_key: Callable[[], Key],
        kind: Callable[[], Kind],
        has_changed: Callable[[], bool],
        plans: Plans[Any],
    ) -> Agreed | None:
        """Return the rows of each rank; None if the state of a rank has changed.

        Then rank 0's is to be broadcast, and all is to be asked again. ``find_key`` returns what
        identifies the kind on this rank; ``plans`` of it that other ranks lack are dropped. Raises
        on all ranks what a function raises on one, and ScheduleError where they differ, or where
        one has no valid batch.
        """
        error: Exception | None = None
        key = Key(())
        rows = digest = known = flags = 0
        try:
            key = find_key()
            rows = rows_of(batch, least=0)
            digest = zlib.crc32(repr((self._digest(key, kind), key.numbers)).encode())
            known = plans.known(key)
            flags = _CHANGED * has_changed()
        except Exception as raised:
            error = raised
            flags = _FAILED
        except KeyboardInterrupt as raised:
            self._group.fail_by(raised)
            raise
        found = self._group.gather("a training step", [rows, digest, known, flags])
        if any(flags & _FAILED for *_, flags in found):
            self.together("a batch", lambda: _raise(error))
        if any(flags & _CHANGED for *_, flags in found):
            return None
        if any(digest != found[0][1] for _, digest, *_ in found):
            self._group.compare("to compare batches", "its step", self._lines(kind()))
            raise ScheduleError("ranks differ in what decides on a plan")
        if any(known != found[0][2] for _, _, known, _ in found):
            plans.drop(key)
        counts = tuple(rows for rows, *_ in found)
        if not any(counts):
            raise ScheduleError("a batch needs a row on one rank at least")
        return Agreed(key, counts)

    def broadcast(self, value: Any, what: str, root: int) -> Any:
        """Return the value of one rank, a tree of tensors and plain data, on each rank."""
        is_here = root == self._group.rank
        text = json.dumps(description_of(value)) if is_here else ""
        description = json.loads(self.texts(what, text)[root])
        buffer = None if is_here else ReceiveBuffer(description, in_host_memory)
        for row in rows(value) if buffer is None else buffer.rows:
            self._group.broadcast(row, root, what)
        if buffer is None:
            return value
        buffer.spread()
        return buffer.value

    def give_up(self, error: BaseException) -> None:
        """Let all ranks fail because of an error here, unless all have raised it."""
        if error is not self._group.raised:
            self._group.fail_by(error)

    def _digest(self, key: Hashable, kind: Callable[[], Kind]) -> int:
        found = self._digests.get(key)
        if found is None:
            if len(self._digests) >= _REMEMBERED:
                self._digests.clear()
            lines = self._lines(kind()._replace(settings=()))
            found = self._digests[key] = zlib.crc32(repr(lines).encode())
        return found

    def _lines(self, kind: Kind) -> list[str]:
        """Return lines of text that are the same on all ranks; see ``_compare``."""
        number = self._numbers.setdefault(kind.watched, len(self._numbers))
        frozen = [i for i, trains in enumerate(kind.parameters) if not trains]
        return [
            f"a batch of {len(kind.batch)} items",
            *(f"item {i} of the batch is {text}" for i, text in enumerate(kind.batch)),
            f"a model of {len(kind.parameters)} parameters, of which {frozen} are frozen",
            *(f"an optimizer with {text}" for text in (*kind.settings, *kind.optimizer)),
            f"model and loss in state {number} of those seen: train() or eval(), attributes, hooks",
        ]


def agreement_of(name: str, machine: Machine, options: Mapping[str, Any]) -> Agreement | None:
    """Return what ranks agree by; None in one process. Raises ScheduleError for ``in_flight``."""
    if machine.rank is None:
        return None
    if options.get("in_flight", 1) != 1:
        raise ScheduleError(f"in_flight= of {name} is for one process; leave it out")
    return Agreement()


def same_rows(counts: Sequence[int]) -> int:
    """Return the rows of a batch that all ranks pass. Raises ScheduleError where they differ."""
    for rank, count in enumerate(counts):
        if count != counts[0]:
            what = f"rank {rank} passes {count} rows, and rank 0 {counts[0]}"
            raise ScheduleError(f"{what}; all ranks of such a step pass the same batch")
    return counts[0]


def kind_of(
    batch: Sequence[Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    functions: Hashable,
    settings: Iterable[tuple[dict[str, Any], str]] = (),
) -> Kind:
    """Describe what decides on a plan, in words that are the same on all ranks.

    ``functions`` is a key that changes with the functions that a step calls, and ``settings`` are
    groups of the optimizer and names of numbers there.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    numbers = {(id(group), name) for group, name in settings}
    varying: list[str] = []
    options: list[str] = []
    for number, group in enumerate(groups):
        for name, item in group.items():
            if name != "params":
                found = varying if (id(group), name) in numbers else options
                found.append(f"{name} = {_stable(item)} in group {number}")
    held = {} if optimizer is None else optimizer.state
    parameters = (p for group in groups for p in group["params"])
    state = (
        f"{_stable(held.get(parameter, {}))} as state of parameter {number}"
        for number, parameter in enumerate(parameters)
    )
    items = tuple(_stable(leaf) for _, leaf in leaves(batch))  # whatever the number of rows
    trains = tuple(parameter.requires_grad for parameter in model.parameters())
    return Kind(items, trains, (*options, *state), tuple(varying), functions)


def _stable(item: Any) -> str:
    """Describe an item in words that are the same in all processes."""
    if isinstance(item, torch.Tensor):
        order = sorted(range(1, item.dim()), key=item.stride, reverse=True)
        layout = "" if order == [*range(1, item.dim())] else f", dimensions in memory {order}"
        shape = ", ".join(["rows", *map(str, item.shape[1:])]) if item.dim() else ""
        dtype = str(item.dtype).removeprefix("torch.")
        return f"a tensor of {dtype} ({shape}) on {item.device.type}{layout}"
    if isinstance(item, (bool, int, float, complex, str, bytes, type(None), torch.dtype)):
        return repr(item)
    if isinstance(item, (tuple, list)):
        return f"{type(item).__name__} of {', '.join(map(_stable, item))}"
    if isinstance(item, Mapping):
        return ", ".join(f"{name}: {_stable(part)}" for name, part in item.items())
    return type(item).__name__


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
