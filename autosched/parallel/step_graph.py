"""Build the graph of a training step.

It has replicas of a model, times its stages, times micro-batches. Data parallelism is several
replicas of one stage, model parallelism is one replica of several stages, and a pipeline is several
micro-batches of that. Templates are included for each, gradients are accumulated and summed over
replicas, and each device updates its own parameters. Micro-batches are added one after another, as
in the serial run; the policy decides in which order a device computes them. So one graph serves all
pipeline orders, and dropout draws the same numbers as in the serial run. Knows templates and
devices; captures nothing and runs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch

from autosched import Graph, Machine, Value
from autosched.parallel.all_reduce import added, reduce
from autosched.parallel.clip import (
    coefficient,
    norms,
    norms_of_flat,
    order_of_norms,
    scale_,
    scaled,
)
from autosched.parallel.compression import Compression, exchange
from autosched.parallel.micro_batch import Pieces
from autosched.parallel.pipeline_schedules import Order
from autosched.parallel.replicas import Pass, include
from autosched.parallel.template import Place
from autosched.parallel.traffic import memory_seconds
from autosched.parallel.updates import Bucket, Update

__all__ = ["Built", "Grid", "build"]


@dataclass(frozen=True)
class Grid:
    """The parts of a step.

    * ``devices``: for each replica, the device of each stage.
    * ``rows``: for each replica, the rows of each micro-batch; the batch is cut in this order.
    * ``first``, ``more``: by number of rows, the first micro-batch, and further ones.
    * ``buckets``, ``updates``: which gradients are summed together, and the updates that use the
      sums.
    * ``order``: for each device of a replica, its pieces; by default one micro-batch after another.
    * ``reduction``: how replicas sum; with ``compression`` they exchange encoded gradients.
    """

    name: str
    machine: Machine
    devices: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    first: Mapping[int, Pieces]
    more: Mapping[int, Pieces]
    buckets: tuple[Bucket, ...]
    updates: tuple[Update, ...]
    order: Order | None = None
    homes: Mapping[str, str] = field(
        default_factory=dict
    )  # of the parts of the batch that are not on the host
    reduction: str = "sum"
    compression: Compression | None = None
    clip: float | None = None  # the largest norm of all gradients


@dataclass(frozen=True)
class Built:
    """A step's graph, the tasks of each device that have an order, and the meaning of inputs and outputs.

    ``state`` has for inputs (replica, name of the tensor that it holds); ``places`` where outputs
    are to be stored; ``residuals`` are inputs for compression, with their sizes. ``made`` has the
    bytes of the state that the optimizer creates, on each device; replicas other than the first
    have it only from the next step on.
    """

    graph: Graph
    sequences: Mapping[str, tuple[str, ...]]
    state: Mapping[str, tuple[int, str]]
    places: Mapping[str, Place]
    residuals: Mapping[str, tuple[str, int, torch.dtype]]
    made: Mapping[str, float]


def build(grid: Grid) -> Built:
    """Return the graph of a step."""
    return _Builder(grid).build()


class _Builder:
    def __init__(self, grid: Grid):
        self.grid, self.graph = grid, Graph(grid.name, generators=generators_of(grid.machine))
        self.inputs: dict[tuple[int, str], Value] = {}  # tensors that replicas hold
        self.names: dict[str, tuple[int, str]] = {}
        self.gradients: list[dict[str, Value]] = [{} for _ in grid.devices]
        self.left: list[dict[str, Value]] = [
            {} for _ in grid.devices
        ]  # instead of inputs, by micro-batches before
        self.tasks: dict[
            tuple[int, int, int, str], list[str]
        ] = {}  # by replica, micro-batch, stage and kind
        self.losses: list[Value] = []
        self.places: dict[str, Place] = {}
        self.residuals: dict[str, tuple[str, int, torch.dtype]] = {}
        self.made: dict[str, float] = {}
        pieces = next(iter(grid.first.values()))
        self.batch = {
            name: self._input(name, grid.homes.get(name), self._whole(name))
            for name in pieces.batch
        }

    def build(self) -> Built:
        for chunk, replicas in self._passes():
            passes = {
                replica: self._begin(replica, chunk, cut) for replica, cut in replicas.items()
            }
            include(
                self.graph,
                list(passes.values()),
                self.grid.machine,
                f"norms.m{chunk}" if chunk else "norms",
            )
            for replica, one in passes.items():
                self._finish(replica, chunk, one)
        self._outputs()
        several = len(self.grid.devices) > 1
        totals = [
            self._totals(number, bucket)
            for number, bucket in enumerate(self.grid.buckets)
            if several
        ]
        if self.grid.clip is not None and self.grid.buckets:
            self._clip(totals, self.grid.clip)
        for update in self.grid.updates:
            self._update(update, totals)
        self._hand_on()
        return Built(
            self.graph, self._sequences(), self.names, self.places, self.residuals, self.made
        )

    def _prefix(self, replica: int, chunk: int | None = None) -> str:
        """Return the prefix of names of a replica, and of a micro-batch."""
        several = f"r{replica}." if len(self.grid.devices) > 1 else ""
        return several + (
            f"m{chunk}." if chunk is not None and len(self.grid.rows[replica]) > 1 else ""
        )

    def _input(self, name: str, device: str | None, nbytes: int) -> Value:
        with self.graph.on(device) if device is not None else contextlib.nullcontext():
            return self.graph.input(name, nbytes=nbytes)

    def _whole(self, name: str) -> int:
        """Return the bytes of an input that is a part of the batch, for all micro-batches together."""
        pieces = [
            self._pieces(chunk, rows)
            for sizes in self.grid.rows
            for chunk, rows in enumerate(sizes)
        ]
        sizes = [one.nbytes[name] for one in pieces]
        return max(sizes) if name in pieces[0].whole else sum(sizes)

    def _held(self, replica: int, name: str, device: str | None, nbytes: int) -> Value:
        """Return the input for a tensor that a replica holds."""
        if (replica, name) not in self.inputs:
            label = self._prefix(replica) + name
            self.inputs[replica, name] = self._input(label, device, nbytes)
            self.names[label] = replica, name
        return self.inputs[replica, name]

    def _passes(self) -> list[tuple[int, dict[int, slice]]]:
        """Return micro-batches and their rows by replica.

        Of all replicas together if they exchange anything.
        """
        start = 0
        found = dict[tuple[int, int], dict[int, slice]]()
        for replica, sizes in enumerate(self.grid.rows):
            for chunk, rows in enumerate(sizes):
                alone = len(self._pieces(chunk, rows).levels) == 1
                found.setdefault((replica if alone else -1, chunk), {})[replica] = slice(
                    start, start + rows
                )
                start += rows
        return [(chunk, replicas) for (_, chunk), replicas in found.items()]

    def _pieces(self, chunk: int, rows: int) -> Pieces:
        return (self.grid.more if chunk else self.grid.first)[rows]

    def _begin(self, replica: int, chunk: int, cut: slice) -> Pass:
        """Find the values that forward and backward of a micro-batch read."""
        rows = cut.stop - cut.start
        prefix = self._prefix(replica, chunk)
        devices = self.grid.devices[replica]
        pieces = self._pieces(chunk, rows)
        values = {
            name: self.left[replica].get(
                name, self._held(replica, name, devices[stage], pieces.nbytes[name])
            )
            for name, stage in pieces.homes.items()
            if name not in self.batch and not name.startswith("sum.")
        }
        for name, leaf in self.batch.items():
            values[name] = leaf
            if rows < sum(map(sum, self.grid.rows)) and name not in pieces.whole:
                values[name] = self.graph.add(
                    getitem, leaf, cut, name=prefix + name, nbytes=pieces.nbytes[name]
                )
        if chunk:
            values.update((f"sum.{name}", value) for name, value in self.gradients[replica].items())
        return Pass(rows, pieces, devices, prefix, values)

    def _finish(self, replica: int, chunk: int, one: Pass) -> None:
        """Store the results of a micro-batch."""
        for name, piece in sorted(one.pieces.piece.items(), key=lambda item: item[1].part):
            self.tasks.setdefault((replica, chunk, piece.stage, piece.kind), []).append(
                one.prefix + name
            )
        self.losses.append(one.output("result"))
        template = one.pieces.template
        if not chunk:
            self.gradients[replica] = {
                name: one.output(output) for name, output in template.gradients.items()
            }
        self.left[replica].update((name, one.output(name)) for name in template.places)
        if not replica and chunk == len(self.grid.rows[0]) - 1:
            for name, place in template.places.items():
                self._keep(name, one.output(name), place)

    def _keep(self, name: str, value: Value, place: Place) -> None:
        if name not in self.places:
            self.places[name] = place
            self.graph.output(**{name: value})

    def _outputs(self) -> None:
        """Make the loss of the whole batch an output: losses are weighted already."""
        loss = self.losses[0]
        if len(self.losses) > 1:
            device = self.grid.devices[0][-1]
            loss = self.graph.add(
                added, self.losses, on=device, name="loss",
                seconds=memory_seconds(self.grid.machine, device, 8 * len(self.losses), len(self.losses) - 1), nbytes=4,
            )  # fmt: skip
        self.graph.output(loss=loss)
        if (
            not self.grid.updates
        ):  # only tried: then gradients take memory up to the end, as updates would let them
            for replica, gradients in enumerate(self.gradients):
                self.graph.output(
                    **{f"{self._prefix(replica)}{name}.grad": g for name, g in gradients.items()}
                )

    # ---- sums over replicas, updates, and the state for the next step

    def _update(self, update: Update, totals: Sequence[Sequence[Value]]) -> None:
        """Add the optimizer's tasks on each replica.

        The state that they leave on the first is the model's.
        """
        counted: dict[str, Value] = {}  # results of tasks on the host, for all replicas
        for replica, stages in enumerate(self.grid.devices):
            device = stages[update.stage]
            values = {
                name: self._held(replica, name, device, update.nbytes[name]) for name in update.held
            }
            values.update(
                (name, self._held(0, name, None, update.nbytes[name])) for name in update.counted
            )
            for number in update.buckets:
                if totals:
                    values[f"flat.{number}"] = totals[number][replica]
                    continue
                own = self.gradients[replica]
                values.update(
                    (f"gradients.{name}", own[name])
                    for name in self.grid.buckets[number].parameters
                )
            only = update.on_device if replica else [task.name for task in update.graph.tasks]
            found = self.graph.include(
                update.graph, {**counted, **values}, prefix=f"{self._prefix(replica)}b{update.buckets[0]}.", on=device,
                seconds=update.seconds, nbytes=update.nbytes, only=only,
            )  # fmt: skip
            self.made[device] = self.made.get(device, 0.0) + sum(update.begun.values())
            if not replica:
                counted = found
                for name, place in update.places.items():
                    self._keep(name, found[update.output(name)], place)

    def _hand_on(self) -> None:
        """Give all replicas the buffers that the first one has left and that they continue with."""
        pieces = next(iter(self.grid.first.values()))
        for name in pieces.template.carried:
            for replica, stages in enumerate(self.grid.devices):
                if replica and (replica, name) in self.inputs:
                    device = stages[pieces.homes[name]]
                    own = self.inputs[replica, name]
                    self.graph.add(
                        torch.Tensor.copy_, own, self.inputs[0, name], name=f"{self._prefix(replica)}{name}.copy_",
                        on=device, writes=own, outputs=(),
                        seconds=memory_seconds(self.grid.machine, device, 2 * pieces.nbytes[name]),
                    )  # fmt: skip

    def _totals(self, number: int, bucket: Bucket) -> list[Value]:
        """Return for each replica the sum of the gradients in a bucket."""
        grid = self.grid
        stage = bucket.stage
        active = [replica for replica, sizes in enumerate(grid.rows) if sizes]
        devices = [grid.devices[replica][stage] for replica in active]
        nbytes = bucket.numel * bucket.dtype.itemsize
        flats = [
            self.graph.add(
                flat, [self.gradients[replica][name] for name in bucket.parameters],
                name=f"{self._prefix(replica)}b{number}.flat", on=device,
                seconds=memory_seconds(grid.machine, device, 2 * nbytes), nbytes=nbytes,
            )
            for replica, device in zip(active, devices, strict=True)
        ]  # fmt: skip
        if grid.compression is not None:
            totals, kept = exchange(
                self.graph, flats, devices, grid.compression, machine=grid.machine, numel=bucket.numel,
                dtype=bucket.dtype, name=f"b{number}",
            )  # fmt: skip
            self.residuals.update(
                (n, (d, bucket.numel, bucket.dtype)) for n, d in zip(kept, devices, strict=False)
            )
        else:
            totals = reduce(
                self.graph, flats, devices, grid.reduction, machine=grid.machine, numel=bucket.numel,
                itemsize=bucket.dtype.itemsize, name=f"b{number}",
            )  # fmt: skip
        found = dict(zip(active, totals, strict=True))
        return [found.get(replica, totals[0]) for replica in range(len(grid.devices))]

    # ---- clipping

    def _clip(self, totals: list[list[Value]], limit: float) -> None:
        """Scale sums of gradients, in ``totals`` where there are several replicas, to a norm within the limit.

        The first replica computes the factor, so that all use the same.
        """
        parts = [self._norms(number, totals) for number in range(len(self.grid.buckets))]
        device = self.grid.devices[0][0]
        by, norm = self.graph.add(
            coefficient, parts, self._places_of_norms(), limit, name="clip", on=device,
            outputs=("clip.by", "clip.norm"),
            seconds=memory_seconds(self.grid.machine, device, 4 * sum(map(len, self._names())), 6), nbytes=4,
        )  # fmt: skip
        self.graph.output(grad_norm=norm)
        for number, bucket in enumerate(self.grid.buckets):
            nbytes = bucket.numel * bucket.dtype.itemsize
            for replica, stages in enumerate(self.grid.devices):
                how: dict[str, Any] = {
                    "name": f"{self._prefix(replica)}b{number}.clip", "on": stages[bucket.stage],
                    "seconds": memory_seconds(self.grid.machine, stages[bucket.stage], 2 * nbytes),
                }  # fmt: skip
                if totals:
                    totals[number][replica] = self.graph.add(
                        scaled, totals[number][replica], by, nbytes=nbytes, **how
                    )
                else:
                    own = [self.gradients[replica][name] for name in bucket.parameters]
                    self.graph.add(scale_, own, by, writes=own, outputs=(), **how)

    def _norms(self, number: int, totals: Sequence[Sequence[Value]]) -> Value:
        """Return the norms of the gradients of a bucket, of the first replica."""
        bucket = self.grid.buckets[number]
        device = self.grid.devices[0][self.grid.buckets[number].stage]
        how: dict[str, Any] = {
            "name": f"b{number}.norms", "on": device, "nbytes": bucket.dtype.itemsize * len(bucket.parameters),
            "seconds": memory_seconds(self.grid.machine, device, bucket.numel * bucket.dtype.itemsize, 2),
        }  # fmt: skip
        if not totals:
            own = [self.gradients[0][name] for name in bucket.parameters]
            of_own: Value = self.graph.add(norms, own, **how)
            return of_own
        layouts = [(tuple(tensor.shape), tensor.stride()) for tensor in bucket.parameters.values()]
        of_flat: Value = self.graph.add(norms_of_flat, totals[number][0], layouts, **how)
        return of_flat

    def _names(self) -> list[list[str]]:
        return [list(bucket.parameters) for bucket in self.grid.buckets]

    def _places_of_norms(self) -> list[tuple[int, int]]:
        """Return where norms are, by bucket and index there, in the order in which torch takes their norm."""
        place = {
            name: (part, i)
            for part, names in enumerate(self._names())
            for i, name in enumerate(names)
        }
        known = {
            name: tensor
            for bucket in self.grid.buckets
            for name, tensor in bucket.parameters.items()
        }
        held = next(iter(self.grid.first.values())).template.state.parameters
        return [
            place[name]
            for name in order_of_norms({name: known[name] for name in held if name in known})
        ]

    # ---- order

    def _sequences(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for replica, devices in enumerate(self.grid.devices):
            if self.grid.order is None:
                for (owner, _, stage, kind), tasks in self.tasks.items():
                    if (
                        owner == replica and kind != "R"
                    ):  # which runs as soon as it can, for others wait for it
                        found.setdefault(devices[stage], []).extend(tasks)
                continue
            for actions in self.grid.order:
                for stage, kind, chunk in actions:
                    tasks = self.tasks.get((replica, chunk, stage, kind), [])
                    found.setdefault(devices[stage], []).extend(tasks)
        return {device: tuple(tasks) for device, tasks in found.items()}


def generators_of(machine: Machine) -> dict[str, str]:
    """Return the generator of random numbers of each real accelerator.

    Logical devices on one share it.
    """
    if machine.imagined:
        return {}
    return {name: machine.device(name).physical or name for name in machine.accelerators}


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements of tensors in one."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
