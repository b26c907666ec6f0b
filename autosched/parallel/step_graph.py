"""Build the graph of a training step: replicas times stages times micro-batches.

Data parallelism is several replicas of one stage, model parallelism is one replica of several
stages, and a pipeline is several micro-batches of that.

1. The tasks of each micro-batch are included for each replica, and gradients are accumulated.
2. Gradients are reduced over replicas, bucket by bucket, and clipped.
3. Each device updates its own parameters.

On a machine of several ranks, each has its own inputs and outputs: rows of the batch, the state of
its replicas, and the loss. What the host computes for the optimizer is computed on each rank.

Micro-batches are added one after another, as in the serial run; the policy decides in which order a
device computes them. So one graph serves all pipeline schedules, and dropout generates the same
numbers as in the serial run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any, NamedTuple

import torch

from autosched import Graph, Machine, Value
from autosched.parallel import clip
from autosched.parallel.all_reduce import (
    Compression,
    added,
    all_reduce,
    compressed_all_reduce,
)
from autosched.parallel.costs import flat, memory_task, pack, relayed, unpack_
from autosched.parallel.micro_batch import MicroBatch, Size
from autosched.parallel.orders import Rows
from autosched.parallel.ranks import Layout, generators_of, label_on
from autosched.parallel.template import Place
from autosched.parallel.updates import Bucket, Update


def build(spec: StepSpec) -> StepGraph:
    """Return the graph of a step."""
    return _Builder(spec).build()


class _Builder:
    def __init__(self, spec: StepSpec):
        self.spec = spec
        self.machine = spec.machine
        self.layout = Layout(spec.machine, spec.devices)
        self.graph = Graph(spec.name, generators=generators_of(spec.machine))
        self.several = len(spec.devices) > 1
        self.counts: dict[int | None, int] | None = None
        if spec.divided and spec.machine.ranks:
            self.counts = dict.fromkeys(self.layout.ranks, 0)
            for replica, rows in enumerate(spec.rows):
                self.counts[self._rank(replica)] += sum(rows)
        # The replica whose buffers are the model's: the first one with rows.
        self.source = next(replica for replica, rows in enumerate(spec.rows) if rows)
        self.inputs: dict[tuple[int, str], Value] = {}  # by replica and name
        self.state: dict[str, Held] = {}
        self.numbers: dict[str, str] = {}
        self.gradients: list[dict[str, Value]] = [{} for _ in spec.devices]
        # Buffers as earlier micro-batches have left them, by replica.
        self.buffers: list[dict[str, Value]] = [{} for _ in spec.devices]
        # Tasks by replica, micro-batch, stage and kind.
        self.tasks: dict[tuple[int, int, int, str], list[str]] = {}
        self.losses: list[Value] = []
        self.places: dict[str, Made] = {}
        self.residuals: dict[str, tuple[str, int, torch.dtype]] = {}
        self.new_state: dict[str, float] = {}
        self.one = spec.one
        self.batch: dict[tuple[int | None, str], Value] = {}
        for name in self.one.template.batch:
            for replica, rows in enumerate(spec.rows):
                if rows:
                    self._batch_input(replica, name)

    def build(self) -> StepGraph:
        """Add everything in the order of the serial run."""
        spec = self.spec
        for device, nbytes in spec.held.items():
            input_on(self.graph, device, f"held.{device}", int(nbytes))
        # 1. Forward and backward of all micro-batches.
        starts: dict[int | None, int] = {}  # by the rank whose rows they are
        for replica, sizes in enumerate(spec.rows):
            owner = None if self.counts is None else self._rank(replica)
            for chunk, rows in enumerate(sizes):
                start = starts.get(owner, 0)
                starts[owner] = start + rows
                self._add_micro_batch(replica, chunk, slice(start, start + rows))
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
        batch = {value.name: key for key, value in self.batch.items()}
        return StepGraph(
            self.graph, self._sequences(), self.layout.ranks, self.counts, batch, self.state,
            self.numbers, self.places, self.residuals, self.new_state,
        )  # fmt: skip

    def _prefix(self, replica: int, chunk: int | None = None) -> str:
        """Return the prefix of names of a replica, and of a micro-batch."""
        has_chunks = chunk is not None and len(self.spec.rows[replica]) > 1
        return (f"r{replica}." if self.several else "") + (f"m{chunk}." if has_chunks else "")

    # ---- micro-batches

    def _micro_batch(self, chunk: int, rows: int) -> MicroBatch:
        return self.spec.micro_batches[rows, not chunk]

    def _batch_input(self, replica: int, name: str) -> Value:
        """Return the input for a part of the batch that a replica reads."""
        device = self.spec.devices[replica][self.one.input_stages[name]]
        rank = self.layout.rank(device)
        if (rank, name) not in self.batch:
            home = self.layout.batch_home(device, self.spec.homes.get(name))
            label, nbytes = label_on(rank, name), self._batch_nbytes(rank, name)
            self.batch[rank, name] = input_on(self.graph, home, label, nbytes)
        return self.batch[rank, name]

    def _batch_nbytes(self, rank: int | None, name: str) -> int:
        """Return the bytes of a part of the batch that a rank passes."""
        spec = self.spec
        sizes = [
            self._micro_batch(chunk, n).nbytes[name]
            for devices, rows in zip(spec.devices, spec.rows, strict=True)
            for chunk, n in enumerate(rows)
            if self.counts is None or self.layout.rank(devices[0]) == rank
        ]
        return max(sizes) if name in self.one.whole else sum(sizes)

    def _state_input(
        self, replica: int, name: str, stage: int, nbytes: int, on_host: bool = False,
        is_number: bool = False,
    ) -> Value:  # fmt: skip
        """Return the input for a tensor of a replica, on the device of a stage or its host."""
        if (replica, name) not in self.inputs:
            label = self._prefix(replica) + name
            device: str | None = self.spec.devices[replica][stage]
            if on_host:
                device = self.layout.host(self.layout.rank(device or ""))
            self.inputs[replica, name] = input_on(self.graph, device, label, nbytes)
            if is_number:
                self.numbers[label] = name
            else:
                self.state[label] = Held(replica, name, self.layout.leads(replica, stage))
        return self.inputs[replica, name]

    def _add_micro_batch(self, replica: int, chunk: int, cut: slice) -> None:
        """Add a micro-batch of a replica; note its tasks, loss, gradients and buffers."""
        rows = cut.stop - cut.start
        prefix = self._prefix(replica, chunk)
        devices = self.spec.devices[replica]
        part = self._micro_batch(chunk, rows)
        values = {}
        batch = part.template.batch
        for name, stage in part.input_stages.items():
            if name not in batch and not name.startswith("sum."):
                held = self._state_input(replica, name, stage, part.nbytes[name])
                values[name] = self.buffers[replica].get(name, held)
        is_cut = rows < self._rows_passed(replica)
        for name in batch:
            value = values[name] = self._batch_input(replica, name)
            if is_cut and name not in part.whole:
                nbytes = part.nbytes[name]
                values[name] = self.graph.add(
                    getitem, value, cut, name=prefix + name, nbytes=nbytes
                )
        if chunk:
            values.update((f"sum.{name}", value) for name, value in self.gradients[replica].items())
        on = {task: devices[role.stage] for task, role in part.roles.items()}
        outputs = self.graph.include(
            part.graph, values, prefix=prefix, seconds=part.seconds, nbytes=part.nbytes, on=on
        )
        for name, role in sorted(part.roles.items(), key=lambda item: item[1].part):
            if part.graph.task(name).device != "host":  # as of sizes that depend on data
                key = (replica, chunk, role.stage, role.kind)
                self.tasks.setdefault(key, []).append(prefix + name)
        self.losses.append(outputs["result"])
        if not chunk:
            gradients = part.template.gradients.items()
            self.gradients[replica] = {name: outputs[output] for name, output in gradients}
        places = part.template.places
        self.buffers[replica].update((name, outputs[name]) for name in places)
        if replica == self.source and chunk == len(self.spec.rows[replica]) - 1:
            for name, place in places.items():
                self._store_new(name, outputs[name], place, part.output_stage(name))

    def _store_new(self, name: str, value: Value, place: Place, stage: int) -> None:
        """Store what the last micro-batch of the first replica with rows left, on each rank."""
        if self.layout.leads(self.source, stage):
            self._add_state_output(self.source, name, value, place)
        for lead in self.layout.other_leads(stage, self.source):
            device = self.spec.devices[lead][stage]
            relayed = self._relayed(value, device, value.nbytes or 0)
            self._add_state_output(lead, name, relayed, place)

    def _rank(self, replica: int) -> int | None:
        return self.layout.rank(self.spec.devices[replica][0])

    def _rows_passed(self, replica: int) -> int:
        """Return the rows of the batch of which a replica has a part."""
        own = self._rank(replica)
        return sum(map(sum, self.spec.rows)) if self.counts is None else self.counts[own]

    def _add_state_output(self, replica: int, name: str, value: Value, place: Place) -> None:
        label = self._prefix(replica) + name if replica else name
        if label not in self.places:
            self.places[label] = Made(replica, place)
            self.graph.output(**{label: value})

    def _relayed(self, value: Value, device: str, nbytes: int) -> Value:
        """Return a value as one of another device."""
        return relayed(self.graph, value, device, nbytes, f"{value.name}.{device}")

    def _output_everywhere(self, name: str, value: Value, device: str) -> None:
        """Make a number, which a device has, an output on every rank."""
        for rank in self.layout.ranks:
            own = value
            if rank != self.layout.rank(device):
                own = self._relayed(value, self.layout.first_device(rank), 4)
            self.graph.output(**{label_on(rank, name): own})

    def _add_outputs(self) -> None:
        """Make the loss of the whole batch an output; losses are weighted already."""
        pairs = zip(self.spec.devices, self.spec.rows, strict=True)
        device = next(devices[-1] for devices, rows in pairs if rows)  # where a loss is
        count = len(self.losses)
        loss = self.losses[0]
        if count > 1:
            loss = memory_task(
                self.graph, self.machine, device, added, self.losses, accessed=8 * count,
                launches=count - 1, name="loss", nbytes=4,
            )  # fmt: skip
        self._output_everywhere("loss", loss, device)
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
            flats.append(self._bucket_task(bucket, device, flat, own, name=label, reuse=True))
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
        device = self.spec.devices[0][0]
        factor, norm = memory_task(
            self.graph, self.machine, device, clip.coefficient, norms, order,
            max_norm, accessed=4 * len(order), launches=6, name="clip",
            outputs=("clip.by", "clip.norm"), nbytes=4,
        )  # fmt: skip
        self._output_everywhere("grad_norm", norm, device)
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
        """Add the optimizer's tasks on each replica; those on hosts once for each rank."""
        # By rank, its lead, and the results of tasks on its host.
        hosts: dict[int | None, tuple[int, dict[str, Value]]] = {}
        stage = update.stage
        for replica, stages in enumerate(self.spec.devices):
            device = stages[stage]
            rank = self.layout.rank(device)
            leads = rank not in hosts
            lead, from_host = hosts.get(rank, (replica, {}))
            values = {}
            for name in update.device_inputs:
                values[name] = self._state_input(replica, name, stage, update.nbytes[name])
            for name in update.host_inputs:
                nbytes = update.nbytes[name]
                is_number = name in update.settings.names
                values[name] = self._state_input(lead, name, stage, nbytes, True, is_number)
            for number in update.buckets:
                if totals:
                    values[f"flat.{number}"] = totals[number][replica]
                    continue
                for name in self.spec.buckets[number].parameters:
                    values[f"gradients.{name}"] = self.gradients[replica][name]
            only = [task.name for task in update.graph.tasks] if leads else update.device_tasks
            found = self.graph.include(
                update.graph, {**from_host, **values}, on=device, seconds=update.seconds,
                prefix=f"{self._prefix(replica)}b{update.buckets[0]}.", nbytes=update.nbytes,
                only=only, host=self.layout.host(rank),
            )  # fmt: skip
            new = sum(update.new_state.values())
            self.new_state[device] = self.new_state.get(device, 0.0) + new
            if leads:
                hosts[rank] = replica, found
                for name, place in update.places.items():
                    self._add_state_output(replica, name, found[update.output(name)], place)
        _, made = next(iter(hosts.values()))
        for rank in self.layout.ranks:
            if rank not in hosts:
                self._send_new_state(update, made, rank)

    def _send_new_state(self, update: Update, made: Mapping[str, Value], rank: int | None) -> None:
        """Make new state an output of a rank that has other stages.

        So the optimizer has a state of one form on all ranks, and they capture the same steps.
        """
        for name in update.created:
            place, nbytes = update.places[name], update.new_state.get(name)
            device = self.layout.host(rank) if nbytes is None else self.layout.first_device(rank)
            value = self._relayed(made[update.output(name)], device or "", nbytes or 0)
            label = f"rank{rank}.{name}"
            self.places[label] = Made(None, place)
            self.graph.output(**{label: value})

    def _broadcast_buffers(self) -> None:
        """Copy the buffers of the first replica with rows to others: the next step begins with them.

        Those of a stage go in one message. Leads, whose buffers are their model's, get them in any
        case, and other replicas if they have rows.
        """
        by_stage: dict[int, list[str]] = {}
        for name in self.one.template.written_buffers:
            by_stage.setdefault(self.one.input_stages[name], []).append(name)
        for stage, names in by_stage.items():
            others = [
                replica
                for replica in range(len(self.spec.devices))
                if replica != self.source
                and (self.layout.leads(replica, stage) or (replica, names[0]) in self.inputs)
            ]
            if not others:
                continue
            nbytes = sum(self.one.nbytes[name] for name in names)
            label = f"buffers{stage}" if len(self.spec.devices[0]) > 1 else "buffers"
            packed = memory_task(
                self.graph, self.machine, self.spec.devices[self.source][stage], pack,
                [self.inputs[self.source, name] for name in names], accessed=2 * nbytes,
                name=f"{label}.pack", nbytes=nbytes,
            )  # fmt: skip
            for replica in others:
                own = [self._state_input(replica, n, stage, self.one.nbytes[n]) for n in names]
                memory_task(
                    self.graph, self.machine, self.spec.devices[replica][stage], unpack_, own, packed,
                    accessed=2 * nbytes, name=f"{self._prefix(replica)}{label}.unpack", writes=own,
                    outputs=(),
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


@dataclass(frozen=True)
class StepSpec:
    """The parts of a step.

    * ``devices``: for each replica, the device of each stage.
    * ``rows``: for each replica, the rows of each micro-batch; the batch is cut in this order.
    * ``micro_batches``: the first one, and further ones, which add their gradients to it.
    * ``buckets``, ``updates``: gradients that are reduced together, and the updates that use them.
    * ``order``: for each device of a replica, its actions; default: one micro-batch after another.
    * ``homes``: devices of the parts of the batch that are not on the host.
    * ``divided``: whether each rank passes rows of its own; otherwise it passes the whole batch.
    * ``reduction``: how gradients are reduced; with ``compression`` they are encoded.
    * ``max_norm``: the largest norm of all gradients.
    * ``held``: by device, bytes that it holds besides.
    """

    name: str
    machine: Machine
    devices: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    micro_batches: Mapping[Size, MicroBatch]
    buckets: tuple[Bucket, ...] = ()
    updates: tuple[Update, ...] = ()
    order: Rows | None = None
    homes: Mapping[str, str] = field(default_factory=dict)
    divided: bool = False
    reduction: str = "sum"
    compression: Compression | None = None
    max_norm: float | None = None
    held: Mapping[str, float] = field(default_factory=dict)

    @property
    def one(self) -> MicroBatch:
        """Any of the first micro-batches; what is not about rows is the same in all."""
        return next(one for (_, is_first), one in self.micro_batches.items() if is_first)

    def apart(self) -> StepSpec:
        """Return the step in which each operator is a task."""
        apart = {size: one.apart(self.machine) for size, one in self.micro_batches.items()}
        return replace(self, micro_batches=apart)


class Held(NamedTuple):
    """An input that is a tensor of a replica; ``leads``: of the model of its rank."""

    replica: int
    name: str
    leads: bool


class Made(NamedTuple):
    """An output that is stored in the model of its rank.

    It is of a ``replica``, unless that rank has none with this stage.
    """

    replica: int | None
    place: Place


@dataclass(frozen=True)
class StepGraph:
    """A step's graph, the ordered tasks of each device, and the meaning of inputs and outputs.

    ``batch`` has (rank, name of the tensor) of inputs that are the batch; ``state`` those that are
    state; ``numbers`` the names of those that are settings of the optimizer; ``places`` where
    outputs are to be stored; ``residuals`` device, size and dtype of inputs for compression.
    ``new_state`` has the bytes of the state that the optimizer creates, on each device; replicas
    other than the first have it only from the next step on. Each of ``ranks`` has a loss: see
    ``label_on``. ``counts`` are the rows that ranks pass, if each passes rows of its own.
    """

    graph: Graph
    sequences: Mapping[str, tuple[str, ...]]
    ranks: tuple[int | None, ...]
    counts: Mapping[int | None, int] | None
    batch: Mapping[str, tuple[int | None, str]]
    state: Mapping[str, Held]
    numbers: Mapping[str, str]
    places: Mapping[str, Made]
    residuals: Mapping[str, tuple[str, int, torch.dtype]]
    new_state: Mapping[str, float]
