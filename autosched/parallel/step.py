"""Training steps that data_parallel, pipeline and model_parallel return.

Called with a batch, a step trains the model by one step of the optimizer. It plans once for each
kind of batch and of state. The model is the user's own, and the first replica. A tensor of another
replica is copied again when the version counter of the model's tensor shows that other code changed
it, so users need not report changes. Knows no device's work: a planner decides what runs.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from autosched import Machine, Schedule, ScheduleError, Watch
from autosched.parallel.step_graph import Built
from autosched.parallel.template import BeforeStep, Loss, Template
from autosched.parallel.training import gather, leaves, settle, torch_device

__all__ = ["KEPT", "Planned", "Step", "look", "rows_of"]

KEPT = 8  # kinds of calls, those used last, as ``compile`` keeps them


@dataclass(frozen=True)
class Planned:
    """The plan for a kind of batch: a schedule, the meaning of its inputs and outputs, and the holders of state."""

    schedule: Schedule
    built: Built
    template: Template
    state: Any
    notes: Mapping[str, Any]


@dataclass
class _Copy:
    """A replica's copy of a tensor, and the source with its version.

    The source's memory is kept alive.
    """

    tensor: torch.Tensor
    source: torch.Tensor
    memory: torch.Tensor
    version: int

    def follows(self, source: torch.Tensor) -> bool:
        """Whether the source is unchanged."""
        same = self.source is source and self.memory.data_ptr() == source.data_ptr()
        return same and self.version == source._version


class Step:
    """One training step of a model on several devices.

    Closed by ``close()`` or by garbage collection.

    Between steps the model and the optimizer may be changed, but not through
    ``tensor.data.mul_(...)`` and similar calls, which torch does not report: use ``with
    torch.no_grad(): tensor.mul_(...)``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Loss,
        optimizer: torch.optim.Optimizer | None,
        machine: Machine,
        plan: Callable[[Sequence[Any], int], Planned],
        place: str | None,
        before_step: BeforeStep | None = None,
    ):
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.machine = machine
        self._plan = plan  # the torch device where the model is captured, if that is a real one
        self._place = place
        self._before_step = before_step
        self._known: dict[Hashable, Planned] = {}
        self._watch: Watch | None = None
        self._last: Planned | None = None
        self._copies: dict[tuple[int, str], _Copy] = {}
        self._residuals: dict[str, torch.Tensor] = {}
        self._guard = threading.RLock()
        self.grad_norm: torch.Tensor | None = (
            None  # of the last step, before it was clipped; None where it is not
        )

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Train on a batch, whose last item is the target; return the loss, detached.

        All tensors of the batch are cut along their first dimension. Raises ScheduleError for those
        that differ there.
        """
        with self._guard:
            planned = self._of(batch)
            inputs, held = self._inputs(planned, batch)
            try:
                with torch.no_grad():  # gradients are taken inside
                    outputs = planned.schedule(**inputs)
            except BaseException:
                self._copies.clear()  # which tensors were updated is unknown
                raise
            self._leave(planned, outputs, held)
            self.grad_norm = outputs.get("grad_norm")
            loss: torch.Tensor = outputs["loss"]
            return loss

    def schedule(self, *batch: Any) -> Schedule:
        """Return the schedule of calls like this one."""
        with self._guard:
            return self._of(batch).schedule

    def inputs(self, *batch: Any) -> dict[str, torch.Tensor]:
        """Return the inputs for the schedule of such a call, to run or profile it separately."""
        with self._guard:
            return self._inputs(self._of(batch), batch)[0]

    def notes(self, *batch: Any) -> Mapping[str, Any]:
        """Return the decisions for calls like this one, and their reasons."""
        with self._guard:
            return self._of(batch).notes

    def close(self) -> None:
        """Close all schedules, and drop them and the replicas' tensors."""
        with self._guard:
            for planned in self._known.values():
                planned.schedule.close()
            self._known.clear()
            self._copies.clear()
            self._last = None

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model, of the optimizer, and the residuals of compression."""
        optimizer = self.optimizer.state_dict() if self.optimizer is not None else {}
        return {
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "residuals": dict(self._residuals),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; the model's state is that of the plain model."""
        with self._guard:
            self.model.load_state_dict(state["model"])
            if self.optimizer is not None and state.get("optimizer"):
                self.optimizer.load_state_dict(state["optimizer"])
            self._residuals = {
                name: tensor.clone() for name, tensor in state.get("residuals", {}).items()
            }

    # ---- a call

    def _of(self, batch: Sequence[Any]) -> Planned:
        key = self._kind(batch)
        planned = self._known.pop(key, None)
        if planned is None:
            rows = rows_of(batch)
            gather(self.model, self.optimizer, self._place)
            with _without_collecting():
                planned = self._plan(batch, rows)
                self._last = None
        self._known[key] = planned
        while len(self._known) > KEPT:
            self._known.pop(next(iter(self._known))).schedule.close()
        return planned

    def _kind(self, batch: Sequence[Any]) -> Hashable:
        """Return a key that is equal for calls that one schedule serves."""
        if self._watch is None or not self._watch.holds():
            hooks = () if self._before_step is None else (self._before_step,)
            self._watch = Watch(self.model, self.loss_fn, *hooks)
        parameters = tuple(
            (id(p), p.requires_grad) for p in self.model.parameters()
        )  # the plan keeps them alive
        return (
            tuple(look(leaf) for leaf in leaves(batch)),
            self._watch.key,
            parameters,
            *self._optimizing(),
        )

    def _optimizing(self) -> Iterator[Hashable]:
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            yield tuple((name, look(item)) for name, item in group.items() if name != "params")
            for parameter in group["params"]:
                held = self.optimizer.state.get(parameter, {})
                yield tuple((name, look(item)) for name, item in held.items())

    def _inputs(
        self, planned: Planned, batch: Sequence[Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the inputs of a run, and the present tensors of model and optimizer, by name."""
        if planned is not self._last:
            self._begin(planned)
            self._last = planned
        names = planned.template.batch
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
        inputs = dict(zip(names, tensors, strict=True))
        held = planned.state.tensors()
        for label, (replica, name) in planned.built.state.items():
            inputs[label] = (
                self._copy(planned, label, replica, name, held[name]) if replica else held[name]
            )
        for name, (device, numel, dtype) in planned.built.residuals.items():
            kept = self._residuals.get(name)
            if kept is None or (kept.numel(), kept.dtype) != (numel, dtype):
                self._residuals[name] = torch.zeros(
                    numel, dtype=dtype, device=torch_device(self.machine, device)
                )
            inputs[name] = self._residuals[name]
        return inputs, held

    def _copy(
        self, planned: Planned, label: str, replica: int, name: str, source: torch.Tensor
    ) -> torch.Tensor:
        """Return a replica's tensor; a new copy if the model's was changed since."""
        found = self._copies.get((replica, name))
        if found is None or not found.follows(source):
            home = planned.schedule.graph.value(label).home
            place = torch_device(self.machine, home) if home is not None else None
            with torch.no_grad():
                tensor = (
                    _copied(source.detach()) if place is None else source.detach().clone().to(place)
                )
            found = self._copies[replica, name] = _Copy(
                tensor, source, source.detach(), source._version
            )
        return found.tensor

    def _leave(
        self,
        planned: Planned,
        outputs: Mapping[str, torch.Tensor],
        held: Mapping[str, torch.Tensor],
    ) -> None:
        """Store the results of a run, and note that replicas are as new as the model."""
        for name, place in planned.built.places.items():
            planned.state.put(place, outputs[name])
        for attributes, name, item in planned.template.switches:
            attributes[name] = item
        for copy in self._copies.values():
            copy.version = copy.source._version

    def _begin(self, planned: Planned) -> None:
        """Move the model to the devices of this plan.

        Replicas copy the buffers of the first again.
        """
        homes = {
            name: planned.schedule.graph.value(label).home
            for label, (r, name) in planned.built.state.items()
            if not r
        }
        settle(
            self.machine,
            planned.state,
            {name: home for name, home in homes.items() if home is not None},
        )
        for replica, name in list(self._copies):
            if not isinstance(self._copies[replica, name].source, torch.nn.Parameter):
                del self._copies[replica, name]


def _copied(source: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same address modulo a cache line, because kernels of CPUs depend on it."""
    copy = source.clone()
    if (
        source.device.type != "cpu"
        or not source.data_ptr() % _LINE
        or copy.stride() != source.stride()
    ):
        return copy
    size = source.element_size()
    room = torch.empty(source.numel() + _LINE // size, dtype=source.dtype)
    start = (source.data_ptr() - room.data_ptr()) % _LINE // size
    return room.as_strided(source.shape, source.stride(), start).copy_(source)


_LINE = 64  # bytes


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Pause garbage collection.

    Graphs are many objects without cycles, and planning took a third longer.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def rows_of(batch: Sequence[Any]) -> int:
    """Return the size of the first dimension of all tensors in a batch.

    Raises ScheduleError if there is none.
    """
    sizes = [
        leaf.shape[0] for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    if not sizes or min(sizes) != max(sizes) or not sizes[0]:
        found = ", ".join(map(str, dict.fromkeys(sizes))) or "none"
        raise ScheduleError(
            f"tensors of a batch need one first dimension, of 1 or more, to be cut along; got {found}"
        )
    return int(sizes[0])


def look(item: Any) -> Hashable:
    """Return the properties of an item that a schedule depends on."""
    if isinstance(item, torch.Tensor):
        return tuple(item.shape), item.stride(), item.dtype, item.device
    return type(item), item if isinstance(item, Hashable) else repr(item)
