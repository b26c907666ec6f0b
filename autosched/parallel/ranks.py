"""Training steps over several ranks: where a step lies, and how its processes agree.

Where: names, hosts, generators and leads. On a machine without ranks, the rank of every device is
None, and names are plain.

How: before a step, each rank tells its rows, and a digest of the kind of its batch, model and
optimizer, in one small exchange. So all take the same plan, or all raise the same error. Rank 0's
model and optimizer count: all get them before the first step, and after a rank has changed its own.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autosched import Machine, ScheduleError
from autosched._lib.containers import leaves
from autosched.machine.cluster import joined
from autosched.parallel.batches import rows_of
from autosched.parallel.plans import Key, Plans
from autosched.runtime.ranks.exchange import ReceiveBuffer, description_of, in_host_memory, rows

if TYPE_CHECKING:
    from autosched.parallel.step import Planned

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
        lines: Callable[[bool], Sequence[str]],
        has_changed: Callable[[], bool],
        plans: Plans[Any],
    ) -> Agreed | None:
        """Return the rows of each rank; None if the state of a rank has changed.

        Then rank 0's is to be broadcast, and all is to be asked again. ``find_key`` returns what
        identifies the kind on this rank, and ``lines`` describe it, also its ``numbers`` if that is
        asked for; ``plans`` of it that other ranks lack are dropped. Raises on all ranks what a
        function raises on one, and ScheduleError where they differ, or where one has no valid batch.
        """
        error: Exception | None = None
        key = Key(())
        rows = digest = known = flags = 0
        try:
            key = find_key()
            rows = rows_of(batch, least=0)
            digest = zlib.crc32(repr((self._digest(key, lines), key.numbers)).encode())
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
            self._group.compare("to compare batches", "its step", self._lines(key, lines(True)))
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

    def _digest(self, key: Key, lines: Callable[[bool], Sequence[str]]) -> int:
        found = self._digests.get(key)
        if found is None:
            if len(self._digests) >= _REMEMBERED:
                self._digests.clear()
            text = repr(self._lines(key, lines(False)))
            found = self._digests[key] = zlib.crc32(text.encode())
        return found

    def _lines(self, key: Key, lines: Sequence[str]) -> list[str]:
        """Add a line for what is watched, which is compared by its history alone."""
        number = self._numbers.setdefault(key.watched, len(self._numbers))
        what = "train() or eval(), attributes, hooks"
        return [*lines, f"model and loss in state {number} of those seen: {what}"]


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


def described(
    batch: Sequence[Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    settings: Iterable[tuple[dict[str, Any], str]] = (),
) -> list[str]:
    """Describe what decides on a plan, in lines that are the same on all ranks.

    ``settings`` of the optimizer, groups and names of numbers there, are left out.
    """
    items = [_stable(leaf) for _, leaf in leaves(batch)]  # whatever the number of rows
    trains = [parameter.requires_grad for parameter in model.parameters()]
    frozen = [i for i, trained in enumerate(trains) if not trained]
    groups = [] if optimizer is None else optimizer.param_groups
    omitted = {(id(group), name) for group, name in settings}
    options = [
        f"{name} = {_stable(item)} in group {number}"
        for number, group in enumerate(groups)
        for name, item in group.items()
        if name != "params" and (id(group), name) not in omitted
    ]
    held = {} if optimizer is None else optimizer.state
    parameters = (p for group in groups for p in group["params"])
    state = (
        f"{_stable(held.get(parameter, {}))} as state of parameter {number}"
        for number, parameter in enumerate(parameters)
    )
    return [
        f"a batch of {len(items)} items",
        *(f"item {i} of the batch is {text}" for i, text in enumerate(items)),
        f"a model of {len(trains)} parameters, of which {frozen} are frozen",
        *(f"an optimizer with {text}" for text in (*options, *state)),
    ]


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


# ---- the state of rank 0, on all ranks


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


def state_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model and of an optimizer's state, in one order."""
    yield from model.parameters()
    yield from model.buffers()
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
