"""Hypothesis strategies: graphs of small tensor tasks, machines, and inputs to run them with.

A graph is drawn as a list of moves and then built, so that a failing one shrinks to few moves. Every value holds
float64 numbers in [-1, 1]; tasks accept any shapes, empty ones too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from autosched.graph import Graph, Value
from autosched.machine import Device, Link, Machine

DEVICES = ("cpu", "cuda:0", "cuda:1", "cuda:2")


def mix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tanh(a * 0.7 + b.sum() * 0.3 + 0.1)


def two(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.sin(a + b.sum()), {"second": torch.cos(a)}


def tree(pair: list[torch.Tensor], *, scale: float) -> torch.Tensor:
    return mix(*pair) * scale


def write(a: torch.Tensor, b: torch.Tensor) -> None:
    a.mul_(0.5).add_(torch.tanh(b.sum()) * 0.5)


def noisy(a: torch.Tensor) -> torch.Tensor:
    return a * 0.5 + torch.rand(a.shape, dtype=a.dtype) * 0.5


def _pair(graph: Graph, a: Value, b: Value, **facts: Any) -> list[Value]:
    number = len(graph)
    first, rest = graph.add(two, a, b, outputs=(f"first{number}", {"second": f"second{number}"}), **facts)
    return [first, rest["second"]]


def _written(graph: Graph, a: Value, b: Value, **facts: Any) -> list[Value]:
    graph.add(write, a, b, writes=[a], outputs=(), **facts)
    return []


MOVES: dict[str, Callable[..., list[Value]]] = {
    "mix": lambda graph, a, b, **facts: [graph.add(mix, a, b, **facts)],
    "tree": lambda graph, a, b, **facts: [graph.add(tree, [a, b], scale=0.9, **facts)],
    "noisy": lambda graph, a, b, **facts: [graph.add(noisy, a, random=True, **facts)],
    "pair": _pair,
    "write": _written,
    "add_": lambda graph, a, b, **facts: [a.mul_(0.75)][:0],
    "view": lambda graph, a, b, **facts: [a[1:]],
    "reshape": lambda graph, a, b, **facts: [a.reshape(-1)],
}


@st.composite
def graphs(draw: st.DrawFn, devices: tuple[str, ...] = DEVICES, most: int = 14, views: bool = True) -> Graph:
    """Graphs with in-place writes, views, several outputs, trees, random tasks, order edges and constraints."""
    graph = Graph("drawn")
    values = list(graph.inputs("x", "y"))
    if draw(st.booleans()):
        with graph.on(draw(st.sampled_from(devices))):
            values.append(graph.input("z"))
    kinds = [kind for kind in MOVES if views or kind not in ("view", "reshape")]
    for _ in range(draw(st.integers(1, most))):
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        kind = draw(st.sampled_from(kinds))
        facts: dict[str, Any] = {}
        if graph.tasks and draw(st.integers(0, 4)) == 0:
            facts["after"] = [draw(st.sampled_from(graph.tasks))]
        if draw(st.integers(0, 3)) == 0 and kind in ("mix", "tree", "pair", "noisy"):
            facts["on"] = draw(st.sampled_from(devices))
        values += MOVES[kind](graph, a, b, **facts)
    shown = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique_by=id))
    graph.output(*shown)
    return graph


@st.composite
def machines(draw: st.DrawFn, devices: tuple[str, ...] = DEVICES, most_streams: int = 3) -> Machine:
    """Machines of all these devices, fully linked, of one to three compute streams each, with contention or without."""
    made = [Device(name, streams=draw(st.integers(1, most_streams))) for name in devices]
    links = [
        Link(a, b, bytes_per_second=draw(st.sampled_from([1e7, 1e9])), latency=draw(st.sampled_from([0.0, 1e-6])))
        for i, a in enumerate(devices)
        for b in devices[i + 1 :]
    ]
    return Machine(made, links, contention=draw(st.booleans()), imagined=True)


def inputs_for(graph: Graph) -> dict[str, torch.Tensor]:
    """Fresh inputs, always the same."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.rand(2 + i, 3, dtype=torch.float64, generator=generator) for i, name in enumerate(graph.input_names)
    }
