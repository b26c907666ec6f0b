"""Training steps that data_parallel, pipeline and model_parallel return.

Called with a batch, a step trains the model by one step of the optimizer. It plans once for each
kind of batch and of state. The model is the user's own, and the first replica. A tensor of another
replica is copied again when the version counter of the model's tensor shows that other code changed
it, so users need not report changes.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from autosched import RunTimeoutError, Schedule, ScheduleError, Watch
from autosched._lib.copying import clone
from autosched._lib.fetching import fetched_ahead
from autosched._lib.gc_pause import without_collecting
from autosched._lib.recent import Recent
from autosched.parallel.batches import batch_inputs, key_of, rows_cut, rows_of
from autosched.parallel.checkpoints import own_residuals, read, write
from autosched.parallel.ranks import SharedState, described, label_on, same_rows
from autosched.parallel.step_graph import Held
from autosched.parallel.training import Planned, Training, torch_device

if TYPE_CHECKING:
    from autosched._lib.process_group import ProcessGroup


_WARNED = 5  # steps in turn that are planned again, from which there is a warning
_PARTS = "kind of batch", "attribute or hook of the model or a function", "parameter"
_FETCHED = 2  # batches: that of the present step, and the next one


class Key:
    """What is equal for calls that one schedule serves; its hash is computed once.

    Its parts are the kind of the batch, what is watched of modules and functions, and others.
    ``numbers`` differ in equal keys, and ``digest`` of a description is that of several ranks.
    """

    def __init__(self, parts: tuple[Hashable, ...]):
        self.parts = parts
        self.numbers: Hashable = ()
        self.digest: int | None = None
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Key) and self.parts == other.parts)


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


class Step:
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
        self._divided = divided  # whether each rank passes rows of its own
        self.model = training.model
        self.loss_fn = training.loss_fn
        self.optimizer = training.optimizer
        self.machine = training.machine
        self.grad_norm: torch.Tensor | None = None  # of the last step, before clipping
        self._training = training
        self._rank = training.machine.rank
        self._group = training.group
        self._plan = plan
        # By the rows of each rank, if there are several, and key.
        self._plans = Recent[tuple[Any, Key], Planned](lambda planned: planned.schedule.close())
        self._watch: Watch | None = None
        self._guard = threading.RLock()
        self._last: Planned | None = None
        self._shared = SharedState(self._group, self.model, self.optimizer)
        self._last_key = self._planned_for = Key(())
        self._histories: dict[Hashable, int] = {}  # numbers of what was watched, in order
        self._planned_anew = 0  # calls in turn
        self._has_warned = False
        self._copies: dict[tuple[str | None, str], _Copy] = {}  # by device and name
        self._residuals: dict[str, torch.Tensor] = {}
        # Steps in flight: all of one plan and, but for the batch, with the same inputs.
        self._futures: list[Future[torch.Tensor]] = []
        self._in_flight: Planned | None = None
        self._same_inputs: Mapping[str, torch.Tensor] = {}
        self._is_lost = False  # whether a step may be in flight that has no future here

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
                self._lose(planned)
                if self._group is not None:
                    self._group.fail_by(error)
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
        if self._group is not None:
            return self._done(batch)
        with self._guard:
            # The program of a step is a loop: it reads a parameter when the step before it has
            # updated that, while its batch is on the way already. It begins when those before it
            # have ended if it has another plan, or if they put new tensors into the optimizer.
            last = self._in_flight
            is_known = last is not None and self._plans.get((None, self._key(batch))) is last
            numbers = last.numbers() if is_known and last is not None else None
            ended = [future for future in self._futures if future.done()]
            failed = self._is_lost or any(future.exception() is not None for future in ended)
            is_same = last is not None and not (last.built.places or last.template.switches)
            if failed or numbers is None or not is_same:
                self.wait()
            else:
                self._futures = [future for future in self._futures if future not in ended]
            if self._futures and last is not None:
                planned = last
                own = self._batch_inputs(planned, batch)
                inputs: dict[str, Any] = {**self._same_inputs, **(numbers or {}), **own}
            else:
                planned = self._in_flight = self._agreed_plan(batch)
                inputs = self._inputs(planned, batch)
                own = self._batch_inputs(planned, batch)
                self._same_inputs = {n: inputs[n] for n in inputs.keys() - own.keys()}
            try:
                with torch.no_grad():  # gradients are taken inside
                    future = planned.schedule.submit_for(inputs, partial(self._ended, planned))
                self._futures.append(future)
            except BaseException:
                self._lose(planned)  # an interrupt may have come after the start
                raise
            return future

    def _lose(self, planned: Planned) -> None:
        """Note that a step without a future has failed, or was aborted and may still end."""
        self._in_flight = planned
        self._is_lost = True

    def _done(self, batch: Sequence[Any]) -> Future[torch.Tensor]:
        """Return the future of a step that has ended."""
        future: Future[torch.Tensor] = Future()
        try:
            future.set_result(self(*batch))
        except Exception as error:
            future.set_exception(error)
        return future

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all submitted steps have ended, also those that failed.

        Raises RunTimeoutError if that takes more than ``timeout`` seconds. Another thread that is
        submitting a step is waited for, too.
        """
        begin = time.perf_counter()
        patience = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if not self._guard.acquire(timeout=patience):
            raise RunTimeoutError("another thread goes on submitting or planning a step")
        try:
            if self._in_flight is None or not (self._futures or self._is_lost):
                return
            passed = time.perf_counter() - begin
            self._in_flight.schedule.wait(None if timeout is None else max(0.0, timeout - passed))
            if self._is_lost or any(future.exception() is not None for future in self._futures):
                # Which tensors a failed run has updated is unknown.
                self._copies.clear()
                self._shared.forget()
            self._futures = []
            self._is_lost = False
        finally:
            self._guard.release()

    def map(self, batches: Iterable[Sequence[Any]]) -> Iterator[torch.Tensor]:
        """Train on each batch of an iterable, and yield the losses.

        A thread fetches the next batch during a step. With the option ``in_flight``, so many steps
        are under way, or have losses that were not yielded: see ``submit``. Then up to so many
        further batches may have been used when the caller stops early.
        """
        most = self._training.options.get("in_flight", 1)
        if most == 1:
            for batch in fetched_ahead(batches, _FETCHED, tuple):
                yield self(*batch)
            return
        for future in fetched_ahead(batches, most, lambda batch: self.submit(*batch)):
            yield future.result()

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
            self._plans.close()
            self._copies.clear()
            self._in_flight = self._last = None
            self._same_inputs = {}
            self._futures = []
            self._is_lost = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

        On a machine of several ranks, all call it. It calls ``collect``, and what all have is
        written once, by one of them. A checkpoint is complete when this returns on rank 0.
        """
        with self._guard:
            self.collect()
            write(folder, self.state_dict(), self._rank is None)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore what ``save`` wrote, on as many ranks or on another number of them.

        On a machine of several ranks, all call it. With fewer replicas than before, a warning says
        that residuals of compression are dropped.
        """
        with self._guard:
            state = read(folder, self._rank is None)
            here = [device in self.machine.here for device in self._training.devices]
            self.load_state_dict({**state, "residuals": own_residuals(state["residuals"], here)})

    # ---- a call

    def _of(self, batch: Sequence[Any]) -> Planned:
        """Return the plan of a call like this one, for inspection.

        On several ranks it is collective only if there was no such step before.
        """
        with self._guard:
            self.wait()
            key = self._key(batch)
            known = [counts for counts, other in self._plans if other == key]
            if self._group is None or known:
                return self._planned(batch, key, known[-1] if known else None)
            return self._agreed_plan(batch)

    def _agreed_plan(self, batch: Sequence[Any]) -> Planned:
        """Return the plan of a call, on which all ranks agree; let them have the same state."""
        if self._group is None:
            return self._planned(batch, self._key(batch), None)
        agreed = None
        varying = vars(self._training.varying)
        before = deepcopy(varying)
        try:
            while agreed is None:
                agreed = self._agreed(self._group, batch)
                if agreed is None:
                    self._shared.broadcast()
        except BaseException:
            varying.update(before)  # a setting that changed on one rank alone
            raise
        key, counts = agreed
        return self._planned(batch, key, counts if self._divided else (same_rows(counts),))

    def _agreed(
        self, group: ProcessGroup, batch: Sequence[Any]
    ) -> tuple[Key, tuple[int, ...]] | None:
        """Return the key of a call and the rows of each rank; None if a rank's state has changed.

        Then rank 0's is to be broadcast, and all is to be asked again. Plans that other ranks lack
        are dropped. Raises ScheduleError, on all ranks, where they differ, or where one has no valid
        batch.
        """
        key = self._last_key

        def own() -> list[int]:
            nonlocal key
            key = self._key(batch)
            if key.digest is None:
                key.digest = zlib.crc32(repr(self._lines(batch, key, numbers=False)).encode())
            digest = zlib.crc32(repr((key.digest, key.numbers)).encode())
            known = sorted(counts for counts, other in self._plans if other == key)
            plans = zlib.crc32(repr(known).encode())
            return [rows_of(batch, least=0), digest, plans, self._shared.has_changed()]

        rows, digests, plans, changed = zip(*group.gather("a training step", own), strict=True)
        if any(changed):
            return None
        if len({*digests}) > 1:
            lines = self._lines(batch, key, numbers=True)
            group.compare("to compare batches", "its step", lines)
            raise ScheduleError("ranks differ in what decides on a plan")
        if len({*plans}) > 1:
            for each in [each for each in self._plans if each[1] == key]:
                self._plans.pop(each).schedule.close()
        if not any(rows):
            raise ScheduleError("a batch needs a row on one rank at least")
        return key, rows

    def _planned(self, batch: Sequence[Any], key: Key, counts: tuple[int, ...] | None) -> Planned:
        """Return the plan of a key and the rows of each rank, a new one if necessary."""
        found = self._plans.get((counts, key))
        if found is not None and found.numbers() is None:
            self._plans.pop((counts, key)).schedule.close()
            found = None
        self._note_plans(key, found is None)
        if found is None:
            rows = (rows_of(batch),) if counts is None else counts
            move_model(self.model, self.optimizer, self._training.capture_device)
            with without_collecting():
                found = self._training.together(lambda: self._plan(batch, rows))
            for settings in found.settings:
                if settings.counters and self._group is not None:
                    kind = type(self.optimizer).__name__
                    raise ScheduleError(
                        f"{kind} compares its counters of steps, which ranks could do differently; "
                        "use another optimizer on several ranks"
                    )
                self._training.varying.keep(self._training.numbers - settings.wanted)
        self._plans.use((counts, key), found)
        return found

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
        hooks = [item for name, item in vars(self.optimizer).items() if name.endswith("_hooks")]
        if self._watch is None or not self._watch.holds():
            self._watch = Watch(self.model, self.loss_fn, *hooks)
        # Identities are unique, because the plan references the parameters.
        parameters = tuple((id(p), p.requires_grad) for p in self.model.parameters())
        key = key_of(batch), self._watch.key, parameters, *self._optimizer_key()
        if self._last_key.parts != key:
            self._last_key = Key(key)
        if self._group is not None:
            self._last_key.numbers = self._training.present
        return self._last_key

    def _lines(self, batch: Sequence[Any], key: Key, numbers: bool) -> list[str]:
        """Describe such a step; its ``numbers`` are settings of the optimizer that may change.

        What is watched is compared by its history alone.
        """
        settings = () if numbers else self._training.settings.settings().values()
        lines = described(batch, self.model, self.optimizer, settings)
        history = self._histories.setdefault(key.parts[1], len(self._histories))
        what = "train() or eval(), attributes, hooks"
        return [*lines, f"model and loss in state {history} of those seen: {what}"]

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
            if self._last is not None:
                self._last.release()
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
        for label, made in planned.built.places.items():
            if label in outputs and (self._rank is not None or made.replica == 0):
                planned.state.put(made.place, outputs[label])
        for attributes, name, item in planned.template.switches:
            attributes[name] = item
        for copy in self._copies.values():
            copy.version = copy.source._version
        self._shared.note()
        rank = planned.built.ranks[0] if self._rank is None else self._rank
        self.grad_norm = outputs.get(label_on(rank, "grad_norm"))
        loss: torch.Tensor = outputs[label_on(rank, "loss")]
        return loss

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
        for name, (place, tensor) in planned.state.places().items():
            device = torch_device(self.machine, homes[name]) if name in homes else None
            if device is None or str(tensor.device) == device:
                continue
            moved = tensor.detach().to(device)
            if place[0] == "parameter":
                tensor.data = moved
            else:
                planned.state.put(place, moved)
        for key, copy in list(self._copies.items()):
            if key not in copied or not isinstance(copy.source, torch.nn.Parameter):
                del self._copies[key]


def move_model(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str | None
) -> None:
    """Move a model and its optimizer's state to one torch device, unless that is None."""
    if device is None:
        return
    model.to(device)
    for state in optimizer.state.values():
        tensors = {name: item for name, item in state.items() if isinstance(item, torch.Tensor)}
        state.update((name, item.to(device)) for name, item in tensors.items() if item.dim())
