"""Training steps that data_parallel, pipeline and model_parallel return.

Called with a batch, a step trains the model by one step of the optimizer. It plans once for each
kind of batch and of state. The model is the user's own, and the first replica. A tensor of another
replica is copied again when the version counter of the model's tensor shows that other code changed
it, so users need not report changes.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from autosched import RunTimeoutError, Schedule, ScheduleError
from autosched._lib.copying import clone
from autosched._lib.fetching import fetched_ahead
from autosched._lib.gc_pause import without_collecting
from autosched.frontends.specializations import Found, Key, Specializations
from autosched.parallel.batches import rows_cut, rows_of
from autosched.parallel.checkpoints import own_residuals, read, write
from autosched.parallel.ranks import SharedState, described, label_on, same_rows
from autosched.parallel.step_graph import Held
from autosched.parallel.training import Planned, Training, torch_device

if TYPE_CHECKING:
    from autosched._lib.process_group import ProcessGroup


_FETCHED = 2  # batches: that of the present step, and the next one


_Counts = tuple[int, ...] | None  # the rows of each rank, if there are several
_Tensors = Mapping[str, Any]  # of a call: the batch, and what the model and the optimizer hold


def _close(value: tuple[_Counts, Planned]) -> None:
    value[1].schedule.close()


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
        # With the rows of each rank, if there are several.
        self._known = Specializations[tuple[_Counts, Planned]](
            training.step, [training.model, training.loss_fn, training.optimizer], _close
        )
        self._known.varying = training.varying
        self._guard = threading.RLock()
        self._last: Planned | None = None
        self._shared = SharedState(self._group, self.model, self.optimizer)
        self._described: tuple[Key | None, int] = None, 0  # the key of the last step, its digest
        self._histories: dict[Hashable, int] = {}  # numbers of what code could read, in order
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
            planned, given = self._agreed_plan(batch)
            try:
                inputs = self._inputs(planned, given)
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
            ended = [future for future in self._futures if future.done()]
            failed = self._is_lost or any(future.exception() is not None for future in ended)
            if failed or last is None or last.built.places or last.switches:
                self.wait()
            self._futures = [future for future in self._futures if future not in ended]
            found = self._find(batch) if self._futures else None
            inputs: dict[str, Any]
            if found and found.value and found.value[1] is last and found.inputs is not None:
                planned = found.value[1]
                own = self._batch_inputs(planned, found.inputs)
                inputs = {**self._same_inputs, **planned.numbers(found.inputs), **own}
            else:
                self.wait()
                planned, given = self._agreed_plan(batch)
                self._in_flight = planned
                inputs = self._inputs(planned, given)
                own = self._batch_inputs(planned, given)
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
        return self._of(batch)[0].schedule

    def inputs(self, *batch: Any) -> dict[str, Any]:
        """Return the inputs for the schedule of such a call, to run or profile it separately."""
        with self._guard:
            return self._inputs(*self._of(batch))

    def notes(self, *batch: Any) -> Mapping[str, Any]:
        """Return the decisions for calls like this one, and their reasons, by name."""
        return self._of(batch)[0].notes

    def close(self) -> None:
        """Close all schedules, and drop them and the replicas' tensors."""
        with self._guard:
            self._known.close()
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

    def _of(self, batch: Sequence[Any]) -> tuple[Planned, _Tensors]:
        """Return the plan of a call like this one, and the call's tensors, for inspection.

        On several ranks it is collective only if there was no such step before.
        """
        with self._guard:
            self.wait()
            found = self._find(batch)
            if self._group is None or found.value is not None:
                return self._planned(batch, found, None if found.value is None else found.value[0])
            return self._agreed_plan(batch)

    def _find(
        self, batch: Sequence[Any], fits: Callable[[tuple[_Counts, Planned]], bool] | None = None
    ) -> Found[tuple[_Counts, Planned]]:
        """Return what is known of a call, of which learning rate schedulers are told."""
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            vars(self.optimizer).setdefault("_opt_called", True)  # as ``optimizer.step()`` does
        return self._known.find(batch, {}, fits)

    def _agreed_plan(self, batch: Sequence[Any]) -> tuple[Planned, _Tensors]:
        """Return the plan of a call, on which all ranks agree, and the call's tensors, by name.

        Ranks have the same state then.
        """
        if self._group is None:
            return self._planned(batch, self._find(batch), None)
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
        counts = agreed if self._divided else (same_rows(agreed),)
        found = self._find(batch, lambda value: value[0] == counts)
        return self._planned(batch, found, counts)

    def _agreed(self, group: ProcessGroup, batch: Sequence[Any]) -> tuple[int, ...] | None:
        """Return the rows of each rank; None if a rank's state has changed.

        Then rank 0's is to be broadcast, and all is to be asked again. Plans that other ranks lack
        are dropped. Raises ScheduleError, on all ranks, where they differ, or where one has no valid
        batch.
        """
        key: Key | None = None

        def own() -> list[int]:
            nonlocal key
            key = self._find(batch).key
            if self._described[0] is not key:
                lines = self._lines(batch, key, numbers=False)
                self._described = key, zlib.crc32(repr(lines).encode())
            numbers = self._described[1], self._training.present
            digest = zlib.crc32(repr(numbers).encode())
            known = sorted(entry.value[0] or () for _, entry in self._known.like(key))
            plans = zlib.crc32(repr(known).encode())
            return [rows_of(batch, least=0), digest, plans, self._shared.has_changed()]

        rows, digests, plans, changed = zip(*group.gather("a training step", own), strict=True)
        if any(changed):
            return None
        assert key is not None
        if len({*digests}) > 1:
            lines = self._lines(batch, key, numbers=True)
            group.compare("to compare batches", "its step", lines)
            raise ScheduleError("ranks differ in what decides on a plan")
        if len({*plans}) > 1:
            for number, _ in self._known.like(key):
                self._known.drop(number)
        if not any(rows):
            raise ScheduleError("a batch needs a row on one rank at least")
        return rows

    def _planned(
        self, batch: Sequence[Any], found: Found[tuple[_Counts, Planned]], counts: _Counts
    ) -> tuple[Planned, _Tensors]:
        """Return the plan of a call, a new one if necessary, and the call's tensors, by name."""
        if found.value is not None and found.inputs is not None:
            return found.value[1], found.inputs
        if found.value is not None:
            planned = found.value[1]
        else:
            self._known.missed(found)
            rows = (rows_of(batch),) if counts is None else counts
            move_model(self.model, self.optimizer, self._training.capture_device)
            with without_collecting():
                planned = self._training.together(lambda: self._plan(batch, rows)).chosen()
            if self._training.capture_device is not None:
                gc.collect()  # of captures, whose tensors are on an accelerator
            if self._group is not None and any(one.counters for one in planned.settings):
                kind = type(self.optimizer).__name__
                raise ScheduleError(
                    f"{kind} compares its counters of steps, which ranks could do differently; "
                    "use another optimizer on several ranks"
                )
            self._activate(planned)  # guards are for tensors where they will be
        return planned, self._known.store(found, (counts, planned), planned.settings)

    def _lines(self, batch: Sequence[Any], key: Key, numbers: bool) -> list[str]:
        """Describe such a step; its ``numbers`` are settings of the optimizer that may change.

        What code can read is compared by its history alone.
        """
        settings = () if numbers else self._training.settings.settings().values()
        lines = described(batch, self.model, self.optimizer, settings)
        read = key.objects, key.settings
        history = self._histories.setdefault(read, len(self._histories))
        what = "train() or eval(), attributes, hooks"
        return [*lines, f"model and loss in state {history} of those seen: {what}"]

    def _inputs(self, planned: Planned, given: _Tensors) -> dict[str, Any]:
        """Return the inputs of a run, from the tensors and numbers of a call by name."""
        self._shared.train_by(planned)
        if planned is not self._last:
            self._activate(planned)
            given = {**given, **planned.state.tensors()}
        inputs = self._batch_inputs(planned, given) | planned.numbers(given)
        for label, held in planned.state_here.items():
            source = given[held.name]
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
        return inputs

    def _batch_inputs(self, planned: Planned, tensors: _Tensors) -> dict[str, Any]:
        """Return the inputs that are the batch; one process divides it among all ranks."""
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
        for attributes, name, item in planned.switches:
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
        if self._last is not None:
            self._last.release()
        self._last = planned
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
