"""Training steps over several ranks: where a step lies, and how its processes agree.

Where: names, hosts, generators and leads. On a machine without ranks, the rank of every device is
None, and names are plain.

How: before a step, each rank tells its rows, and a digest of ``described`` batch, model and optimizer,
in one small exchange. So all take the same plan, or all raise the same error. Rank 0's model and
optimizer count: all get them before the first step, and after a rank has changed its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from autosched import Machine, ScheduleError
from autosched._lib.containers import leaves
from autosched.machine.cluster import joined

if TYPE_CHECKING:
    from autosched._lib.process_group import ProcessGroup
    from autosched.parallel.training import Planned


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


def group_of(name: str, machine: Machine, options: Mapping[str, Any]) -> ProcessGroup | None:
    """Return the ranks of a machine; None in one process. Raises ScheduleError for ``in_flight``."""
    if machine.rank is None:
        return None
    if options.get("in_flight", 1) != 1:
        raise ScheduleError(f"in_flight= of {name} is for one process; leave it out")
    return joined()


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
    optimizer: torch.optim.Optimizer,
    settings: Iterable[tuple[dict[str, Any], str]] = (),
) -> list[str]:
    """Describe what decides on a plan, in lines that are the same on all ranks.

    ``settings`` of the optimizer, groups and names of numbers there, are left out.
    """
    items = [_stable(leaf) for _, leaf in leaves(batch)]  # whatever the number of rows
    trains = [parameter.requires_grad for parameter in model.parameters()]
    frozen = [i for i, trained in enumerate(trains) if not trained]
    groups = optimizer.param_groups
    omitted = {(id(group), name) for group, name in settings}
    options = [
        f"{name} = {_stable(item)} in group {number}"
        for number, group in enumerate(groups)
        for name, item in group.items()
        if name != "params" and (id(group), name) not in omitted
    ]
    state = (
        f"{_stable(optimizer.state.get(parameter, {}))} as state of parameter {number}"
        for number, parameter in enumerate(_trainable(optimizer))
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


# ---- the state of rank 0, on all ranks


class SharedState:
    """The state of a model and an optimizer on all ranks: who has which part, and as of when.

    ``is_stale`` where other ranks have newer parts. Without a group there is one process.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ):
        self.is_stale = False
        self._group = group
        self._model = model
        self._optimizer = optimizer
        self._trained: Planned | None = None  # by which the last step was
        self._restored = False  # whether the state was loaded since the last step
        # Tensors, which keep their ids, and these with versions.
        self._seen: tuple[list[torch.Tensor], list[tuple[int, int]]] | None = None

    def has_changed(self) -> bool:
        """Whether other code changed the state since the last step, as far as torch reports it."""
        return self._seen is None or self._seen[1] != _versions(self._all())

    def note(self) -> None:
        """Remember the state that all ranks have."""
        if self._group is not None:
            now = [*self._all()]
            self._seen = now, _versions(now)

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
        if self._group is None:
            return
        if self._group.gather("the state", lambda: self._restored)[0]:
            self._trained = None
        self._restored = False
        self._share(self._group)

    def train_by(self, planned: Planned) -> None:
        """Begin a step; first share the state if the last one had a stage on another rank."""
        if self._group is not None:
            last = {} if self._trained is None else self._trained.owners
            both = planned.owners.keys() & last.keys()
            if any(planned.owners[name] != last[name] for name in both):
                self._share(self._group)
        self._trained = planned
        here = {held.name for held in planned.state_here.values() if held.leads}
        self.is_stale = self._group is not None and not planned.owners.keys() <= here

    def _share(self, group: ProcessGroup) -> None:
        """Give all ranks what each owns; what has no owner is rank 0's.

        Tensors keep their memory. Raises ScheduleError, on all ranks, where models differ in shape.
        """
        parameters = _trainable(self._optimizer)
        named = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        facts = [f"{name!r} of the model is {t.dtype} {(*t.shape,)}" for name, t in named.items()]
        counts = f"an optimizer of {len(parameters)} parameters"
        group.compare("to compare models", "its state", [*facts, counts])
        owners: dict[int, int] = {}  # ranks, by the ids of tensors
        if self._trained is not None:
            tensors = self._trained.state.tensors()
            ranks = self._trained.owners.items()
            owners = {id(tensors[name]): rank for name, rank in ranks if name in tensors}
        own = [number for number, p in enumerate(parameters) if owners.get(id(p), 0) == group.rank]
        said = group.gather(
            "the state of an optimizer", lambda: [[n, self._held(parameters[n])] for n in own]
        )
        with torch.no_grad():
            for tensor in named.values():
                _give(group, tensor, owners.get(id(tensor), 0))
            for root, held in enumerate(said):
                for number, items in held:
                    self._take(group, root, parameters[number], items)
        self.is_stale = False
        self.note()

    def _held(self, parameter: torch.Tensor) -> list[Any]:
        """Describe what the optimizer has of a parameter: names, with dtypes and shapes of tensors."""
        state = self._optimizer.state.get(parameter, {})
        found: list[Any] = []
        for name, item in state.items():
            if isinstance(item, torch.Tensor):
                dtype = str(item.dtype).removeprefix("torch.")
                found.append([name, [dtype, list(item.shape), item.device.type != "cpu"], None])
            elif isinstance(item, (bool, int, float, str, type(None))):
                found.append([name, None, item])
            else:
                what = f"{name!r} of the optimizer's state is {type(item).__name__}"
                raise ScheduleError(f"{what}; ranks can exchange tensors and numbers")
        return found

    def _take(self, group: ProcessGroup, root: int, parameter: Any, items: Sequence[Any]) -> None:
        """Give all ranks what one has of a parameter, as it described it."""
        if not items:
            self._optimizer.state.pop(parameter, None)
            return
        state = self._optimizer.state[parameter]
        for name in state.keys() - {name for name, *_ in items}:
            del state[name]
        for name, facts, item in items:
            if facts is None:
                state[name] = item
                continue
            dtype, shape, beside = getattr(torch, facts[0]), facts[1], facts[2]
            old = state.get(name)
            if not isinstance(old, torch.Tensor) or (old.dtype, [*old.shape]) != (dtype, shape):
                device = parameter.device if beside else "cpu"
                state[name] = torch.empty(shape, dtype=dtype, device=device)
            _give(group, state[name], root)

    def _all(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of the model and of the optimizer's state, in one order."""
        yield from self._model.parameters()
        yield from self._model.buffers()
        for held in self._optimizer.state.values():
            yield from (item for item in held.values() if isinstance(item, torch.Tensor))


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return what identifies tensors and their contents."""
    return [(id(tensor), tensor._version) for tensor in tensors]


def _trainable(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in the order in which its state numbers them."""
    return [item for group in optimizer.param_groups for item in group["params"]]


def _give(group: ProcessGroup, tensor: torch.Tensor, root: int) -> None:
    """Give all ranks the contents of one's tensor, in place; through the memory of hosts."""
    if not tensor.numel():
        return
    if group.rank == root:
        row = tensor.detach().cpu().contiguous()
    else:
        row = torch.empty(tensor.shape, dtype=tensor.dtype)
    group.broadcast(row.view(-1), root, "the state")
    if group.rank != root:
        tensor.copy_(row)
