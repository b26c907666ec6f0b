"""Hypothesis strategies for graphs, machines and inputs.

Graphs consist of small tensor tasks. A graph is sampled as a list of moves and then built, so that
a failing one shrinks to few moves. Every value holds float64 numbers in [-1, 1]; many values share
memory, some are empty.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from autosched.graph.graph import Graph, Value, called_with
from autosched.machine.machine import Device, Link, Machine

DEVICES = ("cpu", "cuda:0", "cuda:1", "cuda:2")

# ---- functions of tasks: for any shapes, with results in [-1, 1]


def mix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Make a tensor of the first's shape from all of both."""
    return torch.tanh(a * 0.7 + b.sum() * 0.3 + 0.1)


def two(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return two tensors, in a tree."""
    return torch.sin(a + b.sum()), {"second": torch.cos(a)}


def tree(pair: list[torch.Tensor], *, scale: float) -> torch.Tensor:
    """Take two tensors in a list, and a keyword."""
    return mix(*pair) * scale


def write(a: torch.Tensor, b: torch.Tensor) -> None:
    """Change the first in place, by all of the second."""
    a.mul_(0.5).add_(torch.tanh(b.sum()) * 0.5)


def noisy(a: torch.Tensor) -> torch.Tensor:
    """Use random numbers."""
    return a * 0.5 + torch.rand_like(a) * 0.5


def squash(a: torch.Tensor) -> torch.Tensor:
    """Return a single number, which can be assigned to any slice."""
    return torch.tanh(a.sum())


def rest(a: torch.Tensor) -> torch.Tensor:
    """Return a view that only ``aliases=`` declares."""
    return a[1:]


class Average(torch.nn.Module):
    """A module with state: a decaying average of all that it was called with."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        """Add to the average, and return a tensor of the same shape."""
        if a.is_meta:  # asks for the shape alone
            return torch.empty_like(a)
        self.average.mul_(0.5).add_(torch.tanh(a.sum()) * 0.5)
        return torch.tanh(a + self.average)


# ---- moves: each adds a task or a few to a graph, and returns the new values


def _pair(graph: Graph, a: Value, b: Value, **facts: Any) -> list[Value]:
    number = len(graph)
    first, others = graph.add(
        two, a, b, outputs=(f"first{number}", {"second": f"second{number}"}), **facts
    )
    return [first, others["second"]]


def _written(graph: Graph, a: Value, b: Value, **facts: Any) -> list[Value]:
    graph.add(write, a, b, writes=[a], outputs=(), **facts)
    return []


def _halves(graph: Graph, a: Value, b: Value, **facts: Any) -> list[Value]:
    low = a[:1]
    high = a[1:]
    graph.add(write, high, b, writes=high, outputs=(), **facts)
    return [low.mul_(0.75), high]


def _set_rows(graph: Graph, a: Value, b: Value, **facts: Any) -> list[Value]:
    a[1:] = graph.add(squash, b, **facts)
    return []


def _set_columns(graph: Graph, a: Value, b: Value, **facts: Any) -> list[Value]:
    a[..., :1] = graph.add(squash, b, **facts)
    return []


def _set_row(graph: Graph, a: Value, b: Value, **facts: Any) -> list[Value]:
    a[:1] = graph.add(mix, b, b, **facts)[:1]
    return []


def _out(graph: Graph, a: Value, b: Value, **facts: Any) -> list[Value]:
    part = a[1:]
    graph.add(torch.mul, part, 0.5, out=part, **facts)
    return [part]


def _average(graph: Graph) -> Average:
    """Return the module of a graph; all its tasks share one."""
    return next((task.fn for task in graph.tasks if isinstance(task.fn, Average)), Average())


def _constant(graph: Graph) -> Value:
    """Return the constant of a graph that tasks write."""
    if "constant" in graph.names:
        return graph.value("constant")
    return graph.constant(torch.full((3, 3), 0.5, dtype=torch.float64), "constant")


Move = Callable[..., list[Value]]

# For these ``on=`` may be given: their results are new memory, so no other constraint conflicts.
FRESH: Mapping[str, Move] = {
    "mix": lambda graph, a, b, **facts: [graph.add(mix, a, b, **facts)],
    "tree": lambda graph, a, b, **facts: [graph.add(tree, [a, b], scale=0.9, **facts)],
    "noisy": lambda graph, a, b, **facts: [graph.add(noisy, a, random=True, **facts)],
    "pair": _pair,
}
WRITES: Mapping[str, Move] = {
    "write": _written,
    "mul_": lambda graph, a, b, **facts: [a.mul_(0.75)][:0],
}
VIEWS: Mapping[str, Move] = {
    "rows": lambda graph, a, b, **facts: [a[1:]],
    "first row": lambda graph, a, b, **facts: [a[:1]],
    "every other row": lambda graph, a, b, **facts: [a[::2]],
    "columns": lambda graph, a, b, **facts: [a[:, :1]],
    "later columns": lambda graph, a, b, **facts: [a[:, 1:]],
    "reshape": lambda graph, a, b, **facts: [a.reshape(-1)],
    "contiguous": lambda graph, a, b, **facts: [a.contiguous()],
    "t": lambda graph, a, b, **facts: [a.t()],
    "transpose": lambda graph, a, b, **facts: [a.transpose(0, 1)],
    "narrow": lambda graph, a, b, **facts: [a.narrow(0, 1, 1)],
    "select": lambda graph, a, b, **facts: [a.select(0, -1)],
    "chunk": lambda graph, a, b, **facts: [*graph.add(torch.chunk, a, 2, outputs=2)],
    "split": lambda graph, a, b, **facts: [*graph.add(torch.tensor_split, a, 2, outputs=2)],
    "alias": lambda graph, a, b, **facts: [graph.add(rest, a, aliases=a, **facts)],
    "halves": _halves,
    "view.mul_": lambda graph, a, b, **facts: [a[1:].mul_(0.75)][:0],
    "set rows": _set_rows,
    "set columns": _set_columns,
    "set row": _set_row,
    "out": _out,
}
STATEFUL: Mapping[str, Move] = {
    "average": lambda graph, a, b, **facts: [graph.add(_average(graph), a, **facts)],
    "constant": lambda graph, a, b, **facts: _written(graph, _constant(graph), a, **facts),
}
MOVES = {**FRESH, **WRITES, **VIEWS, **STATEFUL}

# Conditions on the shapes of a move's two values; other moves take any.
NEEDS: Mapping[str, Callable[[torch.Size, torch.Size], bool]] = {
    "columns": lambda a, b: len(a) == 2,
    "later columns": lambda a, b: len(a) == 2,
    "transpose": lambda a, b: len(a) == 2,
    "narrow": lambda a, b: a[0] >= 2,
    "select": lambda a, b: len(a) == 2 and a[0] >= 1,
    "chunk": lambda a, b: a[0] >= 2,
    "set row": lambda a, b: a[1:] == b[1:] and min(a[0], b[0]) >= 1,
}


# ---- strategies


class _Sample(NamedTuple):
    """A move before its graph exists; values and a predecessor are numbers, modulo their count."""

    kind: str
    a: int
    b: int
    after: int | None
    on: str | None


@functools.cache  # Hypothesis builds strategies slowly
def _moves(
    devices: tuple[str, ...], most: int, views: bool, state: bool
) -> st.SearchStrategy[list[_Sample]]:
    left_out = {*(() if views else VIEWS), *(() if state else STATEFUL)}
    kinds = [kind for kind in MOVES if kind not in left_out]
    after = st.sampled_from([None] * 100 + [*range(30)])
    on = st.sampled_from([None] * len(devices) * 2 + [*devices])
    move = st.tuples(st.sampled_from(kinds), st.integers(0, 99), st.integers(0, 99), after, on)
    return st.lists(move.map(_Sample._make), min_size=1, max_size=most)


@st.composite
def graphs(
    draw: st.DrawFn,
    devices: Sequence[str] = DEVICES,
    most: int = 14,
    views: bool = True,
    state: bool = False,
) -> Graph:
    """Sample graphs of up to ``most`` moves.

    They have writes, views, several outputs, trees, random tasks, orders and constraints. They run
    on the results of ``inputs_for``, and every policy can schedule them on ``machines`` of the same
    devices. Without ``views`` no two values share memory. With ``state``, a run leaves some in a
    constant and in a module.
    """
    graph = Graph("drawn")
    values = list(graph.inputs("x", "y"))
    if draw(st.booleans()):
        with graph.on(draw(st.sampled_from(devices))):
            values.append(graph.input("z"))
    inputs = inputs_for(graph).items()
    meta = {graph.value(name).index: tensor.to("meta") for name, tensor in inputs}
    if state:
        values.append(_constant(graph))
        meta[values[-1].index] = values[-1].tensor.to("meta")
    for move in draw(_moves(tuple(devices), most, views, state)):
        values += _make(graph, values, meta, move)
    shown = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique_by=id))
    graph.output(*shown)
    return graph


def _make(
    graph: Graph, values: Sequence[Value], meta: dict[int, torch.Tensor], move: _Sample
) -> list[Value]:
    """Make a move, unless its values have unsuitable shapes; return the new values.

    ``meta`` has a meta tensor for each value, by index.
    """
    a = values[move.a % len(values)]
    b = values[move.b % len(values)]
    if move.kind in NEEDS and not NEEDS[move.kind](meta[a.index].shape, meta[b.index].shape):
        return []
    facts: dict[str, Any] = {}
    if graph.tasks and move.after is not None:
        facts["after"] = [graph.tasks[move.after % len(graph)]]
    if move.kind in FRESH and move.on is not None:
        facts["on"] = move.on
    before = len(graph)
    made = MOVES[move.kind](graph, a, b, **facts)
    with torch.device("meta"):
        for task in graph.tasks[before:]:
            args, kwargs = called_with(task, meta)
            assert task.fn is not None
            meta.update(task.results(task.fn(*args, **kwargs)))
    return made


@st.composite
def machines(draw: st.DrawFn, devices: Sequence[str] = DEVICES, most_streams: int = 3) -> Machine:
    """Sample machines of all these devices, of up to ``most_streams`` each, fully linked."""
    made = [Device(name, streams=draw(st.integers(1, most_streams))) for name in devices]
    links = []
    for a, b in itertools.combinations(devices, 2):
        rate = draw(st.sampled_from([1e7, 1e9]))
        links.append(Link(a, b, rate, draw(st.sampled_from([0.0, 1e-6]))))
    return Machine(made, links, contention=draw(st.booleans()), imagined=True)


def inputs_for(graph: Graph) -> dict[str, torch.Tensor]:
    """Return fresh inputs for a sampled graph, always the same."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.rand(2 + i, 3, dtype=torch.float64, generator=generator)
        for i, name in enumerate(graph.input_names)
    }


def outcome(run: Callable[..., Mapping[str, Any]], graph: Graph) -> dict[str, Any]:
    """Return what a run puts out, and what it leaves in its inputs."""
    torch.manual_seed(3)
    inputs = inputs_for(graph)
    return {**{f"output {label}": item for label, item in run(**inputs).items()}, **inputs}


def given_to(
    graph: Graph, runs: int, first: Mapping[str, torch.Tensor] | None = None
) -> list[dict[str, torch.Tensor]]:
    """Return the inputs of runs: those that tasks write are the same tensors in all, others are new."""
    first = inputs_for(graph) if first is None else first
    written = {name for name in first if graph.last_version(graph.value(name).index)}
    return [
        {name: item if name in written else item * 0.5**run for name, item in first.items()}
        for run in range(runs)
    ]
