"""The parts of which a step's graph is built, and the meaning of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from autosched import Graph, Machine
from autosched.parallel.compression import Compression
from autosched.parallel.micro_batch import MicroBatch
from autosched.parallel.pipeline_schedules import Order
from autosched.parallel.template import Place
from autosched.parallel.updates import Bucket, Update

__all__ = ["Held", "Made", "StepGraph", "StepSpec"]


@dataclass(frozen=True)
class StepSpec:
    """The parts of a step.

    * ``devices``: for each replica, the device of each stage.
    * ``rows``: for each replica, the rows of each micro-batch; the batch is cut in this order.
    * ``first``, ``more``: by number of rows, the first micro-batch, and further ones.
    * ``buckets``, ``updates``: gradients that are reduced together, and the updates that use them.
    * ``order``: for each device of a replica, its actions; default: one micro-batch after another.
    * ``homes``: devices of the parts of the batch that are not on the host.
    * ``counts``: by rank, the rows that it passes; default: each rank passes the whole batch.
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
    counts: Mapping[int | None, int] | None = None
    reduction: str = "sum"
    compression: Compression | None = None
    max_norm: float | None = None


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
    ``label_on``. ``counts`` are those of the spec.
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
