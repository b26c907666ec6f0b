"""Build the graph of a training step: replicas times stages times micro-batches.

Data parallelism is several replicas of one stage, model parallelism is one replica of several
stages, and a pipeline is several micro-batches of that.

1. The tasks of each micro-batch are included for each replica, and gradients are accumulated.
2. Gradients are reduced over replicas, bucket by bucket, and clipped.
3. Each device updates its own parameters.

Micro-batches are added one after another, as in the serial run; the policy decides in which order a
device computes them. So one graph serves all pipeline schedules, and dropout generates the same
numbers as in the serial run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch

from autosched import Graph, Machine, Value
from autosched.parallel import clip
from autosched.parallel.all_reduce import added, all_reduce
from autosched.parallel.compression import Compression, compressed_all_reduce
from autosched.parallel.costs import memory_task
from autosched.parallel.micro_batch import MicroBatch
from autosched.parallel.pipeline_schedules import Order
from autosched.parallel.replicas import Instance, include
from autosched.parallel.template import Place
from autosched.parallel.updates import Bucket, Update

__all__ = ["StepGraph", "StepSpec", "build", "input_on"]


@dataclass(frozen=True)
class StepSpec:
    """The parts of a step.

    * ``devices``: for each replica, the device of each stage.
    * ``rows``: for each replica, the rows of each micro-batch; the batch is cut in this order.
    * ``first``, ``more``: by number of rows, the first micro-batch, and further ones.
    * ``buckets``, ``updates``: gradients that are reduced together, and the updates that use them.
    * ``order``: for each device of a replica, its actions; default: one micro-batch after another.
    * ``homes``: devices of the parts of the batch that are not on the host.
    * ``reduction``: how gradients are reduced; with ``compression`` they are encoded.
    * ``max_norm``: the largest norm of all gradients.
    """

    name: str
    machine: Machine
    devices: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    first: Mapping[int, MicroBatch]
    more: Mapping[int, MicroBatch]
    buckets: tuple[Bucket, ...]
    updates: tuple[Update, ...]
    order: Order | None = None
    homes: Mapping[str, str] = field(default_factory=dict)
    reduction: str = "sum"
    compression: Compression | None = None
    max_norm: float | None = None


@dataclass(frozen=True)
class StepGraph:
    """A step's graph, the ordered tasks of each device, and the meaning of inputs and outputs.

    ``state`` has (replica, name of the tensor) of inputs; ``places`` where outputs are to be
    stored; ``residuals`` device, size and dtype of inputs for compression. ``new_state`` has the
    bytes of the state that the optimizer creates, on each device; replicas other than the first
    have it only from the next step on.
    """

    graph: Graph
    sequences: Mapping[str, tuple[str, ...]]
    state: Mapping[str, tuple[int, str]]
    places: Mapping[str, Place]
    residuals: Mapping[str, tuple[str, int, torch.dtype]]
    new_state: Mapping[str, float]


def build(spec: StepSpec) -> StepGraph:
    """Return the graph of a step."""
    return _Builder(spec).build()


class _Builder:
    def __init__(self, spec: StepSpec):
        self.spec = spec
        self.machine = spec.machine
        self.graph = Graph(spec.name, generators=_generators(spec.machine))
        self.several = len(spec.devices) > 1
        self.inputs: dict[tuple[int, str], Value] = {}  # by replica and name
        self.state: dict[str, tuple[int, str]] = {}
        self.gradients: list[dict[str, Value]] = [{} for _ in spec.devices]
        # Buffers as earlier micro-batches have left them, by replica.
        self.buffers: list[dict[str, Value]] = [{} for _ in spec.devices]
        # Tasks by replica, micro-batch, stage and kind.
        self.tasks: dict[tuple[int, int, int, str], list[str]] = {}
        self.losses: list[Value] = []
        self.places: dict[str, Place] = {}
        self.residuals: dict[str, tuple[str, int, torch.dtype]] = {}
        self.new_state: dict[str, float] = {}
        self.one = next(iter(spec.first.values()))
        self.batch = {
            name: input_on(self.graph, spec.homes.get(name), name, self._batch_nbytes(name))
            for name in self.one.template.batch
        }

    def build(self) -> StepGraph:
        """Add everything in the order of the serial run."""
        spec = self.spec
        # 1. Forward and backward of all micro-batches.
        for chunk, replicas in self._chunks():
            parts = {r: self._instance(r, chunk, rows) for r, rows in replicas.items()}
            label = f"norms.m{chunk}" if chunk else "norms"
            include(self.graph, list(parts.values()), self.machine, label)
            for replica, part in parts.items():
                self._store_results(replica, chunk, part)
        self._add_outputs()
        # 2. Reduction over replicas, and clipping.
        buckets = spec.buckets if self.several else ()
        totals = [self._reduce(number, bucket) for number, bucket in enumerate(buckets)]
        if spec.max_norm is not None and spec.buckets:
            self._clip(totals, spec.max_norm)
        # 3. Updates.
        for update in spec.updates:
            self._update(update, totals)
        self._broadcast_buffers()
        return StepGraph(
            self.graph, self._sequences(), self.state, self.places, self.residuals, self.new_state
        )

    def _prefix(self, replica: int, chunk: int | None = None) -> str:
        """Return the prefix of names of a replica, and of a micro-batch."""
        has_chunks = chunk is not None and len(self.spec.rows[replica]) > 1
        return (f"r{replica}." if self.several else "") + (f"m{chunk}." if has_chunks else "")

    # ---- micro-batches

    def _micro_batch(self, chunk: int, rows: int) -> MicroBatch:
        return (self.spec.more if chunk else self.spec.first)[rows]

    def _batch_nbytes(self, name: str) -> int:
        """Return the bytes of a part of the batch, of all micro-batches together."""
        parts = [self._micro_batch(i, n) for rows in self.spec.rows for i, n in enumerate(rows)]
        sizes = [part.nbytes[name] for part in parts]
        return max(sizes) if name in parts[0].whole else sum(sizes)

    def _state_input(self, replica: int, name: str, device: str | None, nbytes: int) -> Value:
        """Return the input for a tensor of a replica."""
        if (replica, name) not in self.inputs:
            label = self._prefix(replica) + name
            self.inputs[replica, name] = input_on(self.graph, device, label, nbytes)
            self.state[label] = replica, name
        return self.inputs[replica, name]

    def _chunks(self) -> list[tuple[int, dict[int, slice]]]:
        """Return micro-batches: their number, and their rows by replica.

        Those of all replicas are together if they have collectives.
        """
        start = 0
        found: dict[tuple[int, int], dict[int, slice]] = {}
        for replica, sizes in enumerate(self.spec.rows):
            for chunk, rows in enumerate(sizes):
                is_alone = len(self._micro_batch(chunk, rows).levels) == 1
                key = (replica if is_alone else -1, chunk)
                found.setdefault(key, {})[replica] = slice(start, start + rows)
                start += rows
        return [(chunk, replicas) for (_, chunk), replicas in found.items()]

    def _instance(self, replica: int, chunk: int, cut: slice) -> Instance:
        """Return a micro-batch of a replica, with the values that it reads."""
        rows = cut.stop - cut.start
        prefix = self._prefix(replica, chunk)
        devices = self.spec.devices[replica]
        part = self._micro_batch(chunk, rows)
        values = {}
        for name, stage in part.input_stages.items():
            if name not in self.batch and not name.startswith("sum."):
                held = self._state_input(replica, name, devices[stage], part.nbytes[name])
                values[name] = self.buffers[replica].get(name, held)
        is_cut = rows < sum(map(sum, self.spec.rows))
        for name, value in self.batch.items():
            values[name] = value
            if is_cut and name not in part.whole:
                nbytes = part.nbytes[name]
                values[name] = self.graph.add(
                    getitem, value, cut, name=prefix + name, nbytes=nbytes
                )
        if chunk:
            values.update((f"sum.{name}", value) for name, value in self.gradients[replica].items())
        return Instance(rows, part, devices, prefix, values)

    def _store_results(self, replica: int, chunk: int, one: Instance) -> None:
        """Note the tasks, loss, gradients and buffers of a micro-batch."""
        roles = one.micro_batch.roles
        for name, role in sorted(roles.items(), key=lambda item: item[1].part):
            key = (replica, chunk, role.stage, role.kind)
            self.tasks.setdefault(key, []).append(one.prefix + name)
        self.losses.append(one.output("result"))
        template = one.micro_batch.template
        if not chunk:
            gradients = template.gradients.items()
            self.gradients[replica] = {name: one.output(output) for name, output in gradients}
        self.buffers[replica].update((name, one.output(name)) for name in template.places)
        if not replica and chunk == len(self.spec.rows[0]) - 1:
            for name, place in template.places.items():
                self._add_state_output(name, one.output(name), place)

    def _add_state_output(self, name: str, value: Value, place: Place) -> None:
        if name not in self.places:
            self.places[name] = place
            self.graph.output(**{name: value})

    def _add_outputs(self) -> None:
        """Make the loss of the whole batch an output; losses are weighted already."""
        loss = self.losses[0]
        count = len(self.losses)
        if count > 1:
            loss = memory_task(
                self.graph, self.machine, self.spec.devices[0][-1], added, self.losses,
                accessed=8 * count, launches=count - 1, name="loss", nbytes=4,
            )  # fmt: skip
        self.graph.output(loss=loss)
        if not self.spec.updates:  # a trial: gradients stay in memory, as they would for updates
            for replica, gradients in enumerate(self.gradients):
                names = {f"{self._prefix(replica)}{n}.grad": g for n, g in gradients.items()}
                self.graph.output(**names)

    # ---- reduction, clipping, updates

    def _reduce(self, number: int, bucket: Bucket) -> list[Value]:
        """Return for each replica the sum of the gradients in a bucket."""
        spec = self.spec
        active = [replica for replica, rows in enumerate(spec.rows) if rows]
        devices = [spec.devices[replica][bucket.stage] for replica in active]
        flats = []
        for replica, device in zip(active, devices, strict=True):
            own = [self.gradients[replica][name] for name in bucket.parameters]
            label = f"{self._prefix(replica)}b{number}.flat"
            flats.append(self._bucket_task(bucket, device, flat, own, name=label))
        name = f"b{number}"
        if spec.compression is not None:
            totals, residuals = compressed_all_reduce(
                self.graph, flats, devices, spec.compression, machine=self.machine,
                numel=bucket.numel, dtype=bucket.dtype, name=name,
            )  # fmt: skip
            for residual, device in zip(residuals, devices, strict=False):
                self.residuals[residual] = (device, bucket.numel, bucket.dtype)
        else:
            totals = all_reduce(
                self.graph, flats, devices, spec.reduction, machine=self.machine,
                numel=bucket.numel, itemsize=bucket.dtype.itemsize, name=name,
            )  # fmt: skip
        found = dict(zip(active, totals, strict=True))
        return [found.get(replica, totals[0]) for replica in range(len(spec.devices))]

    def _bucket_task(
        self, bucket: Bucket, device: str, fn: Callable[..., Any], *args: Any, **options: Any
    ) -> Value:
        """Add a task that reads and writes all gradients of a bucket."""
        options = {"accessed": 2 * bucket.nbytes, "nbytes": bucket.nbytes, **options}
        made: Value = memory_task(self.graph, self.machine, device, fn, *args, **options)
        return made

    def _clip(self, totals: list[list[Value]], max_norm: float) -> None:
        """Scale gradients, or their ``totals`` over replicas, to a norm of at most ``max_norm``.

        The first replica computes the factor, so that all use the same.
        """
        buckets = self.spec.buckets
        # 1. The norms of each bucket, on its device.
        norms: list[Value] = []
        for number, bucket in enumerate(buckets):
            tensors = bucket.parameters.values()
            how: dict[str, Any] = {
                "name": f"b{number}.norms", "accessed": bucket.nbytes, "launches": 2,
                "nbytes": bucket.dtype.itemsize * len(tensors),
            }  # fmt: skip
            device = self.spec.devices[0][bucket.stage]
            if totals:
                layouts = [(tuple(tensor.shape), tensor.stride()) for tensor in tensors]
                call: Any = (clip.norms_of_flat, totals[number][0], layouts)
            else:
                call = (clip.norms, [self.gradients[0][name] for name in bucket.parameters])
            norms.append(self._bucket_task(bucket, device, *call, **how))
        # 2. The factor, from the norms in torch's order.
        order = self._norm_positions()
        factor, norm = memory_task(
            self.graph, self.machine, self.spec.devices[0][0], clip.coefficient, norms, order,
            max_norm, accessed=4 * len(order), launches=6, name="clip",
            outputs=("clip.by", "clip.norm"), nbytes=4,
        )  # fmt: skip
        self.graph.output(grad_norm=norm)
        # 3. Each replica scales its gradients.
        for number, bucket in enumerate(buckets):
            for replica, devices in enumerate(self.spec.devices):
                device = devices[bucket.stage]
                label = f"{self._prefix(replica)}b{number}.clip"
                if totals:
                    total = totals[number][replica]
                    total = self._bucket_task(
                        bucket, device, clip.scaled, total, factor, name=label
                    )
                    totals[number][replica] = total
                    continue
                own = [self.gradients[replica][name] for name in bucket.parameters]
                how = {"name": label, "writes": own, "outputs": (), "nbytes": None}
                self._bucket_task(bucket, device, clip.scale_, own, factor, **how)

    def _norm_positions(self) -> list[tuple[int, int]]:
        """Return bucket and index of each norm, in the order in which torch combines them."""
        tensors: dict[str, torch.Tensor] = {}
        position: dict[str, tuple[int, int]] = {}
        for number, bucket in enumerate(self.spec.buckets):
            tensors.update(bucket.parameters)
            position.update((name, (number, i)) for i, name in enumerate(bucket.parameters))
        names = [name for name in self.one.template.state.parameters if name in tensors]
        ordered = clip.order_of_norms({name: tensors[name] for name in names})
        return [position[name] for name in ordered]

    def _update(self, update: Update, totals: Sequence[Sequence[Value]]) -> None:
        """Add the optimizer's tasks on each replica; the first one's state is the model's."""
        from_host: dict[str, Value] = {}  # results of tasks on the host, for all replicas
        for replica, stages in enumerate(self.spec.devices):
            device = stages[update.stage]
            values = {}
            for name in update.device_inputs:
                values[name] = self._state_input(replica, name, device, update.nbytes[name])
            for name in update.host_inputs:
                values[name] = self._state_input(0, name, None, update.nbytes[name])
            for number in update.buckets:
                if totals:
                    values[f"flat.{number}"] = totals[number][replica]
                    continue
                for name in self.spec.buckets[number].parameters:
                    values[f"gradients.{name}"] = self.gradients[replica][name]
            only = update.device_tasks if replica else [task.name for task in update.graph.tasks]
            found = self.graph.include(
                update.graph, {**from_host, **values}, on=device, seconds=update.seconds,
                prefix=f"{self._prefix(replica)}b{update.buckets[0]}.", nbytes=update.nbytes,
                only=only,
            )  # fmt: skip
            new = sum(update.new_state.values())
            self.new_state[device] = self.new_state.get(device, 0.0) + new
            if not replica:
                from_host = found
                for name, place in update.places.items():
                    self._add_state_output(name, found[update.output(name)], place)

    def _broadcast_buffers(self) -> None:
        """Copy the buffers of the first replica, with which the next step begins, to the others."""
        for name in self.one.template.broadcast_buffers:
            stage = self.one.input_stages[name]
            for replica, stages in enumerate(self.spec.devices):
                if not replica or (replica, name) not in self.inputs:
                    continue
                own = self.inputs[replica, name]
                memory_task(
                    self.graph, self.machine, stages[stage], torch.Tensor.copy_, own,
                    self.inputs[0, name], accessed=2 * self.one.nbytes[name],
                    name=f"{self._prefix(replica)}{name}.copy_", writes=own, outputs=(),
                )  # fmt: skip

    def _sequences(self) -> dict[str, tuple[str, ...]]:
        """Return the tasks of each device in the order of the pipeline schedule."""
        found: dict[str, list[str]] = {}
        for replica, devices in enumerate(self.spec.devices):
            if self.spec.order is None:
                for (owner, _, stage, kind), tasks in self.tasks.items():
                    # Random numbers (R) are generated as early as possible: others wait for them.
                    if owner == replica and kind != "R":
                        found.setdefault(devices[stage], []).extend(tasks)
                continue
            for actions in self.spec.order:
                for stage, kind, chunk in actions:
                    tasks = self.tasks.get((replica, chunk, stage, kind), [])
                    found.setdefault(devices[stage], []).extend(tasks)
        return {device: tuple(tasks) for device, tasks in found.items()}


def input_on(graph: Graph, device: str | None, name: str, nbytes: int) -> Value:
    """Declare an input, on a device if one is given."""
    with graph.on(device) if device is not None else contextlib.nullcontext():
        return graph.input(name, nbytes=nbytes)


def _generators(machine: Machine) -> dict[str, str]:
    """Return the random number generator of each accelerator; logical devices share it."""
    if machine.imagined:
        return {}
    return {name: machine.device(name).physical or name for name in machine.accelerators}


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements of tensors in one."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
