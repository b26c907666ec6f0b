"""Training steps that data_parallel, pipeline and model_parallel return.

Called with a batch, a step trains the model by one step of the optimizer. It plans once for each
kind of batch and of state. The model is the user's own, and the first replica. A tensor of another
replica is copied again when the version counter of the model's tensor shows that other code changed
it, so users need not report changes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from autosched import RunTimeoutError, Schedule, ScheduleError
from autosched._lib.copying import clone
from autosched._lib.fetching import fetched_ahead
from autosched._lib.gc_pause import without_collecting
from autosched._lib.recent import MOST
from autosched.parallel.batches import batch_inputs, key_of, rows_cut, rows_of
from autosched.parallel.checkpoints import read, shared_out, write
from autosched.parallel.costs import Reusing
from autosched.parallel.plans import Key, Plans, move_model, move_state, torch_device
from autosched.parallel.ranks import SharedState, described, label_on, same_rows
from autosched.parallel.step_graph import Held, StepGraph
from autosched.parallel.template import Place, Template
from autosched.parallel.training import Training


@dataclass(frozen=True)
class Planned:
    """The plan for a kind of batch: schedule, meaning of inputs and outputs, state.

    ``settings`` are those of the optimizer that are inputs.
    """

    schedule: Schedule
    built: StepGraph
    template: Template
    state: Any
    notes: Mapping[str, Any]
    settings: tuple[Any, ...]

    def numbers(self) -> dict[str, float] | None:
        """Return the settings of the optimizer that are inputs; None if it needs another plan."""
        found: dict[str, float] = {}
        for settings in self.settings:
            values = settings.reader(self.state)()
            if values is None:
                return None
            found.update(values)
        numbers = self.built.numbers.items()
        return {label: found[name] for label, name in numbers if label in self.here}

    @cached_property
    def here(self) -> set[str]:
        """The inputs of this process."""
        return {*self.schedule.inputs_here}

    @cached_property
    def state_here(self) -> dict[str, Held]:
        """The inputs of this process that are state."""
        return {label: held for label, held in self.built.state.items() if label in self.here}

    @cached_property
    def places_here(self) -> dict[str, Place]:
        """The places of that state, by name of a tensor."""
        known = self.state.places()
        return {held.name: known[held.name][0] for held in self.state_here.values()}

    @cached_property
    def owners(self) -> dict[str, int]:
        """By name of a tensor, the first rank whose model has it as trained; without ranks none."""
        ranks = self.schedule.machine.ranks
        found: dict[str, int] = {}
        for label, held in self.built.state.items():
            home = self.schedule.graph.value(label).home
            if held.leads and home in ranks:
                found[held.name] = min(found.get(held.name, ranks[home]), ranks[home])
        return found

    @cached_property
    def elsewhere(self) -> set[str]:
        """The tensors, by name, that other ranks train, and this process does not."""
        if self.schedule.machine.rank is None:
            return set()
        return self.owners.keys() - {held.name for held in self.state_here.values() if held.leads}

    @cached_property
    def residuals_here(self) -> dict[str, tuple[str, int, torch.dtype]]:
        """The inputs of this process for compression."""
        return {label: one for label, one in self.built.residuals.items() if label in self.here}

    def release(self) -> None:
        """Give back the memory that tasks keep for the next step."""
        for task in self.schedule.graph.tasks:
            if isinstance(task.fn, Reusing):
                task.fn.release()

    @property
    def is_repeated(self) -> bool:
        """Whether the next step may begin meanwhile: it has the same tensors and attributes."""
        return not self.built.places and not self.template.switches


_WARNED = 5  # steps in turn that are planned again, from which there is a warning
_PARTS = "kind of batch", "attribute or hook of the model or a function", "parameter"


@dataclass
class _Copy:
    """A replica's copy of a tensor, and the source with its version and its memory."""

    tensor: torch.Tensor
    source: torch.Tensor
    memory: torch.Tensor
    version: int

    def is_current(self, source: torch.Tensor) -> bool:
        same = self.source is source and self.memory.data_ptr() == source.data_ptr()
        return same and self.version == source._version


class Step(Plans[Planned]):
    """One training step of a model on several devices.

    Closed by ``close()``, by a ``with`` statement, or by garbage collection. ``grad_norm`` is the
    norm of the gradients in the last step before they were clipped; None if they are not clipped.

    Between steps the model and the optimizer may be changed, but not through
    ``tensor.data.mul_(...)`` and similar calls, which torch does not report: use ``with
    torch.no_grad(): tensor.mul_(...)``.
    """

    def __init__(
        self,
        training: Training,
        plan: Callable[[Sequence[Any], Sequence[int]], Planned],
        divided: bool = True,
    ):
        super().__init__()
        self._divided = divided  # whether each rank passes rows of its own
        self.model = training.model
        self.loss_fn = training.loss_fn
        self.optimizer = training.optimizer
        self.machine = training.machine
        self.grad_norm: torch.Tensor | None = None  # of the last step, before clipping
        self._training = training
        self._rank = training.machine.rank
        self._agreement = training.agreement
        self._counts: dict[Hashable, tuple[int, ...]] = {}  # that were agreed last, by key
        self._plan = plan
        self._last: Planned | None = None
        self._shared = SharedState(self._agreement, self.model, self.optimizer)
        self._last_key = self._planned_for = Key(())
        self._planned_anew = 0  # calls in turn
        self._has_warned = False
        self._copies: dict[tuple[str | None, str], _Copy] = {}  # by device and name
        self._residuals: dict[str, torch.Tensor] = {}
        self._under_way = UnderWay()

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Train on a batch, whose last item is the target; return the loss, detached.

        All tensors of the batch are cut along their first dimension. Raises ScheduleError for those
        that differ there.
        """
        with self._guard:
            self.wait()
            planned = self._agreed_plan(batch)
            try:
                inputs = self._inputs(planned, batch)
                with torch.no_grad():  # gradients are taken inside
                    outputs = planned.schedule.run_with(inputs, is_agreed=True)
                return self._ended(planned, outputs)
            except BaseException as error:
                self._under_way.lose(planned)
                if self._agreement is not None:
                    self._agreement.give_up(error)
                raise

    def submit(self, *batch: Any) -> Future[torch.Tensor]:
        """Start a training step, and return the future of its loss immediately.

        Steps have the results of calls one after another. At most ``in_flight`` are under way,
        which is an option of ``data_parallel`` and ``pipeline``, by default 1: ``submit`` waits
        until there is room. Call ``wait()`` before the model or the optimizer is read or changed,
        except for numbers, such as a learning rate that is no tensor, and do not write to a batch
        before its step has ended. If a step raises, those after it that are under way raise
        CancelledRunError. Over several ranks a step ends before this returns.
        """
        if self._agreement is not None:
            return done(self, batch)
        with self._guard:
            under_way = self._under_way
            last = under_way.plan
            is_same = last is not None and self._plans.get((None, self._key(batch))) is last
            numbers = last.numbers() if is_same else None
            if under_way.look() or numbers is None or not last.is_repeated:
                self.wait()
            if under_way.is_idle:
                planned = self._agreed_plan(batch)
                inputs = self._inputs(planned, batch)
                own = self._batch_inputs(planned, batch)
                under_way.inputs = {name: inputs[name] for name in inputs.keys() - own.keys()}
            else:
                planned = last
                own = self._batch_inputs(planned, batch)
                inputs = {**under_way.inputs, **(numbers or {}), **own}
            finish = partial(self._ended, planned)
            return under_way.submit(planned, inputs, finish)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all submitted steps have ended, also those that failed.

        Raises RunTimeoutError if that takes more than ``timeout`` seconds. Another thread that is
        submitting a step is waited for, too.
        """
        with holding(self._guard, timeout) as left:
            if self._under_way.wait(left):
                self._forget_state()

    def map(self, batches: Iterable[Sequence[Any]]) -> Iterator[torch.Tensor]:
        """Train on each batch of an iterable, and yield the losses.

        A thread fetches the next batch during a step. With the option ``in_flight``, so many steps
        are under way, or have losses that were not yielded: see ``submit``. Then up to so many
        further batches may have been used when the caller stops early.
        """
        most = self._training.options.get("in_flight", 1)
        return results(self.submit, self, batches, most)

    def schedule(self, *batch: Any) -> Schedule:
        """Return the schedule of calls like this one."""
        return self._of(batch).schedule

    def inputs(self, *batch: Any) -> dict[str, Any]:
        """Return the inputs for the schedule of such a call, to run or profile it separately."""
        with self._guard:
            return self._inputs(self._of(batch), batch)

    def notes(self, *batch: Any) -> Mapping[str, Any]:
        """Return the decisions for calls like this one, and their reasons, by name."""
        return self._of(batch).notes

    def close(self) -> None:
        """Close all schedules, and drop them and the replicas' tensors."""
        with self._guard:
            super().close()
            self._copies.clear()
            self._under_way = UnderWay()
            self._last = None

    # ---- state

    def collect(self) -> None:
        """Bring the model and the optimizer of each rank up to date.

        On a machine of several ranks, all call it. It is needed where ranks train different stages:
        otherwise all have the same state after each step.
        """
        with self._guard:
            self.wait()
            self._shared.broadcast()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model, of the optimizer, and the residuals of compression.

        Raises ScheduleError where other ranks train stages, and ``collect`` was not called.
        """
        if self._shared.is_stale:
            raise ScheduleError(
                "other ranks train some stages of this model: call collect() on all ranks before "
                "state_dict(), or save()"
            )
        return self._state()

    def _state(self) -> dict[str, Any]:
        self.wait()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "residuals": dict(self._residuals),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; ``state["model"]`` is the model's own state."""
        with self._guard:
            self.wait()
            self.model.load_state_dict(state["model"])
            if state.get("optimizer"):
                self.optimizer.load_state_dict(state["optimizer"])
            residuals = state.get("residuals", {})
            self._residuals = {name: tensor.clone() for name, tensor in residuals.items()}
            self._shared.restored()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``state_dict`` to a folder, by ``torch.distributed.checkpoint``.

        On a machine of several ranks, all call it: each writes its part, and what all have is
        written once. A checkpoint is complete when this returns on rank 0.
        """
        with self._guard:
            write(folder, self._shared.here(self._state()), self._rank is None)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore what ``save`` wrote, on as many ranks or on another number of them.

        On a machine of several ranks, all call it. With fewer replicas than before, residuals of
        compression are added up.
        """
        with self._guard:
            state = read(folder, self._rank is None)
            here = [device in self.machine.here for device in self._training.devices]
            self.load_state_dict({**state, "residuals": shared_out(state["residuals"], here)})

    # ---- a call

    def _of(self, batch: Sequence[Any]) -> Planned:
        """Return the plan of a call like this one, for inspection.

        On several ranks it is collective only if there was no such step before.
        """
        with self._guard:
            self.wait()
            key = self._key(batch)
            if self._agreement is None or key in self._counts:
                return self._planned(batch, key, self._counts.get(key))
            return self._agreed_plan(batch)

    def _agreed_plan(self, batch: Sequence[Any]) -> Planned:
        """Return the plan of a call, on which all ranks agree; let them have the same state."""
        find_key = partial(self._key, batch)
        agreement = self._agreement
        if agreement is None:
            return self._planned(batch, find_key(), None)
        shared = self._shared
        found = None
        varying = vars(self._training.varying)
        before = deepcopy(varying)
        try:
            while found is None:
                found = agreement.step(
                    batch, find_key, partial(self._lines, batch), shared.has_changed, self
                )
                if found is None:
                    shared.broadcast()
        except BaseException:
            varying.update(before)  # a setting that changed on one rank alone
            raise
        key, counts = found
        counts = counts if self._divided else (same_rows(counts),)
        if len(self._counts) >= MOST:
            self._counts.clear()
        self._counts[key] = counts
        return self._planned(batch, key, counts)

    def _planned(self, batch: Sequence[Any], key: Key, counts: tuple[int, ...] | None) -> Planned:
        """Return the plan of a key and the rows of each rank, a new one if necessary."""

        def plan() -> Planned:
            rows = (rows_of(batch),) if counts is None else counts
            move_model(self.model, self.optimizer, self._training.capture_device)
            self._leave_last()
            with without_collecting():
                planned = self._training.together(lambda: self._plan(batch, rows))
            for settings in planned.settings:
                if settings.counters and self._agreement is not None:
                    kind = type(self.optimizer).__name__
                    raise ScheduleError(
                        f"{kind} compares its counters of steps, which ranks could do differently; "
                        "use another optimizer on several ranks"
                    )
                self._training.varying.keep(self._training.numbers - settings.wanted)
            return planned

        known = self._plans.get((counts, key))
        if known is not None and known.numbers() is None:
            self._plans.pop((counts, key)).schedule.close()
        self._note_plans(key, (counts, key) not in self._plans)
        return self._cached((counts, key), plan)

    def _note_plans(self, key: Key, is_new: bool) -> None:
        """Warn once if each call is planned again."""
        before, self._planned_for = self._planned_for, key
        self._planned_anew = self._planned_anew + 1 if is_new else 0
        if self._planned_anew == _WARNED and not self._has_warned:
            self._has_warned = True
            pairs = zip(_PARTS, before.parts, key.parts, strict=False)
            changed = [name for name, old, new in pairs if old != new]
            warnings.warn(
                f"each of the last {_WARNED} steps was planned again, because of another "
                f"{changed[0] if changed else 'setting or state of the optimizer'}; do not change "
                "it in each step, or make what changes a tensor, as in lr=torch.tensor(...)",
                RuntimeWarning,
                stacklevel=5,
            )

    def _key(self, batch: Sequence[Any]) -> Key:
        """Return a key that is equal for calls that one schedule serves."""
        hook = self._training.before_step
        hooks = [item for name, item in vars(self.optimizer).items() if name.endswith("_hooks")]
        watched = self._watched(self.model, self.loss_fn, hook, *hooks)
        # Identities are unique, because the plan references the parameters.
        parameters = tuple((id(p), p.requires_grad) for p in self.model.parameters())
        key = key_of(batch), watched, parameters, *self._optimizer_key()
        if self._last_key.parts != key:
            self._last_key = Key(key)
        if self._agreement is not None:
            self._last_key.numbers = self._training.present
        return self._last_key

    def _lines(self, batch: Sequence[Any], numbers: bool) -> list[str]:
        """Describe such a step; its ``numbers`` are settings of the optimizer that may change."""
        settings = () if numbers else self._training.settings.settings().values()
        return described(batch, self.model, self.optimizer, settings)

    def _optimizer_key(self) -> Iterator[Hashable]:
        training = self._training
        inputs = training.settings.items_of(training.numbers)
        for group in self.optimizer.param_groups:
            rest = inputs.get(id(group), set())
            yield frozenset(rest)
            rest = group.keys() - rest - {"params"}
            yield tuple((name, key_of(item)) for name, item in group.items() if name in rest)
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                yield tuple((name, key_of(item)) for name, item in state.items())

    def _inputs(self, planned: Planned, batch: Sequence[Any]) -> dict[str, Any]:
        self._shared.train_by(planned)
        if planned is not self._last:
            self._leave_last()
            self._activate(planned)
            self._last = planned
        inputs = self._batch_inputs(planned, batch)
        tensors = planned.state.tensors_at(planned.places_here)
        for label, held in planned.state_here.items():
            source = tensors[held.name]
            inputs[label] = (
                source if self._is_own(held) else self._copy(planned, label, held, source)
            )
        for name, (device, numel, dtype) in planned.residuals_here.items():
            residual = self._residuals.get(name)
            place = torch_device(self.machine, device)
            if residual is None or (residual.numel(), residual.dtype) != (numel, dtype):
                self._residuals[name] = torch.zeros(numel, dtype=dtype, device=place)
            elif place is not None:  # another device may have had this share
                self._residuals[name] = residual.to(place)
            inputs[name] = self._residuals[name]
        return {**inputs, **(planned.numbers() or {})}

    def _batch_inputs(self, planned: Planned, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the inputs that are the batch; one process divides it among all ranks."""
        tensors = batch_inputs(planned.template, batch)
        built = planned.built
        if self._rank is not None or built.counts is None:
            return {
                label: tensors[name]
                for label, (rank, name) in built.batch.items()
                if self._rank is None or rank == self._rank
            }
        counts = [*built.counts.values()]
        numbers = {rank: number for number, rank in enumerate(built.counts)}
        return {
            label: rows_cut(tensors[name], counts, numbers[rank])
            for label, (rank, name) in built.batch.items()
        }

    def _is_own(self, item: Held) -> bool:
        """Whether the user's model of this process has the tensor of an input."""
        return not item.replica if self._rank is None else item.leads

    def _copy(self, planned: Planned, label: str, held: Held, source: torch.Tensor) -> torch.Tensor:
        """Return a replica's tensor; a new copy if the model's was changed since."""
        key = planned.schedule.graph.value(label).home, held.name
        found = self._copies.get(key)
        if found is None or not found.is_current(source):
            home, _ = key
            place = torch_device(self.machine, home) if home is not None else None
            own = source.detach()
            with torch.no_grad():
                tensor = clone(own) if place is None else own.clone().to(place)
            found = self._copies[key] = _Copy(tensor, source, own, source._version)
        return found.tensor

    def _ended(self, planned: Planned, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Store the results of a run, and note that replicas are as new as the model.

        Return the loss.
        """
        has_new = bool(planned.template.switches)
        for label, made in planned.built.places.items():
            if label in outputs and (self._rank is not None or made.replica == 0):
                planned.state.put(made.place, outputs[label])
                has_new = True
        for attributes, name, item in planned.template.switches:
            attributes[name] = item
        for copy in self._copies.values():
            copy.version = copy.source._version
        self._shared.note_step(has_new)
        rank = planned.built.ranks[0] if self._rank is None else self._rank
        self.grad_norm = outputs.get(label_on(rank, "grad_norm"))
        loss: torch.Tensor = outputs[label_on(rank, "loss")]
        return loss

    def _forget_state(self) -> None:
        """Take all copies as outdated: which tensors a failed run has updated is unknown."""
        self._copies.clear()
        self._shared.forget()

    def _leave_last(self) -> None:
        """Let the last plan keep no memory; another one is used now."""
        if self._last is not None:
            self._last.release()
        self._last = None

    def _activate(self, planned: Planned) -> None:
        """Move the model to the devices of this plan; drop copies of buffers, and unused ones."""
        homes = {}
        copied = set()
        for label, held in planned.state_here.items():
            home = planned.schedule.graph.value(label).home
            if not self._is_own(held):
                copied.add((home, held.name))
            elif home is not None:
                homes[held.name] = home
        move_state(self.machine, planned.state, homes)
        for key, copy in list(self._copies.items()):
            if key not in copied or not isinstance(copy.source, torch.nn.Parameter):
                del self._copies[key]


# ---- steps in flight
#
# Steps write parameters and the optimizer's state in place. So the program of a step is a loop: a
# step reads a parameter when the step before it has updated it, while its batch is on the way
# already. Steps that are under way have one plan and the same tensors, except for the batch. A step
# begins when those before it have ended if it has another plan, or if they put new tensors into the
# optimizer, such as the first moments.


_FETCHED = 2  # batches: that of the present step, and the next one


class UnderWay:
    """The submitted steps of one plan: ``plan`` is None before the first one.

    ``inputs`` are those that are the same in each step.
    """

    def __init__(self) -> None:
        self.plan: Any = None
        self.inputs: Mapping[str, torch.Tensor] = {}
        self._futures: list[Future[Any]] = []
        self._is_lost = False  # whether a step may be under way that has no future here

    @property
    def is_idle(self) -> bool:
        """Whether all steps have ended, and none failed unnoticed."""
        return not self._futures and not self._is_lost

    def submit(
        self,
        plan: Planned,
        inputs: dict[str, torch.Tensor],
        finish: Callable[[Mapping[str, Any]], Any],
    ) -> Future[Any]:
        """Start a step; return its future, with the result of ``finish``."""
        self.plan = plan
        try:
            with torch.no_grad():  # gradients are taken inside
                future = plan.schedule.submit_for(inputs, finish)
            self._futures.append(future)
        except BaseException:
            self.lose(plan)  # an interrupt may have come after the start
            raise
        return future

    def lose(self, plan: Planned) -> None:
        """Note that a step without a future has failed, or was aborted and may still end."""
        self.plan = plan
        self._is_lost = True

    def look(self) -> bool:
        """Return whether a step failed; forget those that have ended otherwise."""
        ended = [future for future in self._futures if future.done()]
        if any(future.exception() is not None for future in ended):
            return True
        self._futures = [future for future in self._futures if future not in ended]
        return self._is_lost

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all steps have ended; return whether one failed.

        Raises RunTimeoutError if that takes longer.
        """
        if self.plan is None or self.is_idle:
            return False
        self.plan.schedule.wait(timeout)
        failed = self._is_lost or any(future.exception() is not None for future in self._futures)
        self._futures = []
        self._is_lost = False
        return failed


def results(
    submit: Callable[..., Any], call: Callable[..., Any], batches: Iterable[Any], most: int
) -> Iterator[Any]:
    """Yield the results of steps on batches, in order; at most so many are under way.

    If that is one, a step begins when its result is asked for. A thread fetches the next batch.
    """
    if most == 1:
        for batch in fetched_ahead(batches, _FETCHED, tuple):
            yield call(*batch)
        return
    for future in fetched_ahead(batches, most, lambda batch: submit(*batch)):
        yield future.result()


@contextlib.contextmanager
def holding(guard: Any, timeout: float | None) -> Iterator[float | None]:
    """Hold a lock; yield how many seconds are left.

    Raises RunTimeoutError if another thread holds it for longer.
    """
    begin = time.perf_counter()
    patience = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
    if not guard.acquire(timeout=patience):
        raise RunTimeoutError("another thread goes on submitting or planning a step")
    try:
        yield None if timeout is None else max(0.0, begin + timeout - time.perf_counter())
    finally:
        guard.release()


def done(call: Callable[..., Any], batch: Iterable[Any]) -> Future[Any]:
    """Return the future of a call that has ended."""
    future: Future[Any] = Future()
    try:
        future.set_result(call(*batch))
    except Exception as error:
        future.set_exception(error)
    return future
