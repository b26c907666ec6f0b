"""Group the operators of a micro-batch into tasks.

A piece is a stage's forward, its backward, or a part of that. Pieces are named as in
``torch.distributed.pipelining``: F, forward; B, backward; or, separately, I, the part of backward
that earlier stages wait for, and W, gradients of weights, which is the rest of a stage's backward.
R draws the random numbers of a stage and waits for nothing. Pieces of several stages have the
stage's number: ``F0``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from autosched import Costs, Graph, Machine, Task, merge
from autosched.parallel.branches import branches
from autosched.parallel.collectives import Level, level_of, levels_of
from autosched.parallel.sync_batch_norm import EXCHANGES
from autosched.parallel.template import Template, maker_of

__all__ = ["Piece", "Pieces", "costs_of", "pieces_of"]


PieceKind = Literal["F", "B", "I", "W", "R"]


@dataclass(frozen=True)
class Piece:
    """A stage's forward (F), backward (B), or its two halves (I, W).

    Or the random numbers that forward needs (R).

    ``part`` numbers the parts into which buckets cut it, ``level`` those into which exchanges
    between replicas do.
    """

    stage: int
    kind: PieceKind
    part: int = 0
    level: int = 0


@dataclass(frozen=True)
class Pieces:
    """A template whose tasks are pieces.

    ``piece`` has the piece of each task, by name; ``seconds`` and ``nbytes`` the costs of tasks and
    values.
    """

    template: Template
    graph: Graph
    piece: Mapping[str, Piece]
    seconds: Mapping[str, Mapping[str, float]]
    nbytes: Mapping[str, int]

    @cached_property
    def homes(self) -> dict[str, int]:
        """The stage of each input: the first that reads it, 0 where none does."""
        values = self.graph.values
        found: dict[str, int] = {}
        for task in self.graph.tasks:
            for use in task.reads if task.name in self.piece else ():
                found.setdefault(values[values[use.value].root].name, self.piece[task.name].stage)
        return {name: found.get(name, 0) for name in self.graph.input_names}

    @property
    def batch(self) -> tuple[str, ...]:
        """The inputs that are the batch."""
        return self.template.batch

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The tasks, by the number of exchanges before them."""
        return levels_of(self.graph)

    @cached_property
    def whole(self) -> frozenset[str]:
        """Inputs of the batch that are not cut, but passed to all micro-batches: numbers."""
        return frozenset(name for name in self.batch if not self.template.examples[name].dim())


def pieces_of(
    template: Template,
    stage: Mapping[str, int],
    costs: Costs,
    machine: Machine,
    *,
    apart: bool = False,
    buckets: Sequence[Iterable[str]] = (),
    branching: bool = False,
) -> Pieces:
    """Merge a template's tasks into pieces; ``stage`` is the stage of each task, by name.

    With ``apart``, backward is cut into I and W; with ``buckets`` of parameters, it is cut where
    the gradients of each are ready; with ``branching``, stages are cut where some of their tasks
    need not wait for another one.
    """
    graph = template.graph
    label = _labels(template, stage, apart, buckets)
    if branching:
        label = _branched(graph, label, costs, machine)
    several = len({piece.stage for piece in label.values()}) > 1
    merged = merge(
        graph, {name: _name(piece, several, len(buckets) > 1) for name, piece in label.items()}
    )
    found = {
        task.name: label[next(part.name for part in (*task.parts, task) if not part.view)]
        for task in merged.tasks
        if not task.view and task.fn not in EXCHANGES
    }
    return Pieces(template, merged, found, *costs_of(merged, costs, machine))


def _name(piece: Piece, several: bool, buckets: bool) -> str:
    part = f".{piece.part}" if piece.part or (buckets and piece.kind not in "FR") else ""
    level = f"-{piece.level}" if piece.level else ""
    return f"{piece.kind}{piece.stage if several else ''}{part}{level}"


def _labels(
    template: Template, stage: Mapping[str, int], apart: bool, buckets: Sequence[Iterable[str]]
) -> dict[str, Piece]:
    """Return the piece of each task that is neither a view nor an exchange."""
    graph = template.graph
    backward = {task.index for task in graph.tasks if _is_backward(task)}
    stage = {task.name: stage_of(graph, task, stage) for task in graph.tasks if not task.view}
    inner = _waited_for(graph, stage, backward) if apart else backward
    part: dict[int, int] = {}
    for number, bucket in enumerate(buckets):
        for name in bucket:
            for index in _behind(graph, [_ready(template, name)], part.keys(), backward):
                part[index] = number
    found = {}
    level = level_of(graph, backward)
    drawn = _drawn(graph)
    for task in graph.tasks:
        if task.view or task.fn in EXCHANGES:
            continue
        kind: PieceKind = "R" if task.index in drawn else "F"
        if task.index in backward:
            kind = "B" if not apart else "I" if task.index in inner else "W"
        cut = part.get(task.index, max(len(buckets) - 1, 0)) if kind not in "FR" else 0
        found[task.name] = Piece(stage[task.name], kind, cut, level[task.index])
    return found


def _branched(
    graph: Graph, label: Mapping[str, Piece], costs: Costs, machine: Machine
) -> dict[str, Piece]:
    """Return pieces of which some are cut into parts."""
    device = machine.device((machine.accelerators or machine.names)[0])
    backward = {task.index for task in graph.tasks if _is_backward(task)}
    seconds = {name: costs.task_seconds(graph.task(name), device) for name in label}
    part = branches(graph, {name: piece.stage for name, piece in label.items()}, backward, seconds)
    return {
        name: piece if piece.kind == "R" else replace(piece, part=part[name])
        for name, piece in label.items()
    }


def _drawn(graph: Graph) -> set[int]:
    """Return the tasks that draw random numbers and depend on nothing, with those that make memory for them."""
    sources = {value.index for value in graph.sources}
    found: set[int] = set()
    for task in graph.tasks:
        before = [d.task for d in task.dependencies if d.kind == "data"]
        free = all(
            i in found or not (graph.tasks[i].reads or graph.tasks[i].random) for i in before
        )
        if task.random and free and sources.isdisjoint(use.value for use in task.reads):
            found.update((*before, task.index))
    return found


def _is_backward(task: Task) -> bool:
    """Whether a task belongs to backward, recomputes forward for it, or accumulates gradients."""
    return task.origin.phase == "backward" or task.name.startswith(("again.", "sum."))


def stage_of(graph: Graph, task: Task, stage: Mapping[str, int]) -> int:
    """Return the stage of a task.

    For one that accumulates gradients, that of the task that computes the last of them.
    """
    if task.name in stage:
        return stage[task.name]
    root = graph.values[graph.values[task.reads[-1].value].root]
    assert root.producer is not None
    return stage[graph.tasks[root.producer].name]


def _ready(template: Template, name: str) -> int:
    """Return the task after which a gradient is ready: the one that computes it, or adds it to a sum."""
    graph = template.graph
    output = template.gradients[name]
    return (
        maker_of(graph, output) if output in graph.outputs else graph.task(f"sum.{name}.add").index
    )


def _waited_for(graph: Graph, stage: Mapping[str, int], backward: Set[int]) -> set[int]:
    """Return the backward tasks that those of an earlier stage need.

    For the first stage, those at its beginning.
    """
    first = [graph.tasks[i] for i in sorted(backward) if stage.get(graph.tasks[i].name) == 0]
    start = next(
        (
            _key(task)
            for task in reversed(first)
            if task.origin.phase == "backward" and not task.view
        ),
        None,
    )
    found: set[int] = set()
    for i in sorted(backward, reverse=True):
        task = graph.tasks[i]
        own = stage.get(task.name, 0)
        for user in graph.users[i]:
            other = graph.tasks[user]
            leads_on = stage.get(other.name, own) < own
            in_the_first = own == 0 and _key(other) == start and _key(task) != start
            if user in found or leads_on or in_the_first:
                found.add(i)
    return found


def _key(task: Task) -> object:
    """Return a key that a backward task shares with its forward task."""
    return task.origin._replace(phase="")


def _behind(graph: Graph, tasks: Iterable[int], known: Set[int], among: Set[int]) -> list[int]:
    """Return these tasks and all their predecessors among some tasks, except the known ones."""
    found: dict[int, None] = {}
    pending = [i for i in tasks if i in among]
    while pending:
        i = pending.pop()
        if i not in found and i not in known:
            found[i] = None
            pending += [d.task for d in graph.tasks[i].dependencies if d.task in among]
    return list(found)


def costs_of(
    graph: Graph, costs: Costs, machine: Machine
) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Return the seconds of each task on each device, and the bytes of each value.

    Equal devices are asked once.
    """
    found: dict[str, dict[str, float]] = {}
    for task in graph.tasks:
        if task.view:
            continue
        known: dict[tuple[float, ...], float] = {}
        found[task.name] = {}
        for device in machine.devices:
            rates = (device.flops_per_second, device.bytes_per_second, device.launch_seconds)
            if rates not in known:
                known[rates] = costs.task_seconds(task, device)
            found[task.name][device.name] = known[rates]
    return found, {value.name: int(costs.value_nbytes(value)) for value in graph.values}
