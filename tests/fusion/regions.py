"""Regions without Inductor: what is compiled is the traced graph itself, so that results are eager ones."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st

import autosched as asc
from autosched.coarsening import merged
from autosched.codegen.composite import Composite
from autosched.fusion.candidates import unfusable
from autosched.fusion.inductor import unavailable
from autosched.fusion.region import Region

needs_compiler = pytest.mark.skipif(
    unavailable("cpu") is not None, reason=unavailable("cpu") or "compiles"
)

Compile = Callable[..., Any]


def itself(
    graph: torch.fx.GraphModule, args: Sequence[torch.Tensor], threads: int
) -> Callable[..., Any]:
    """Compile nothing."""
    return graph


@contextlib.contextmanager
def compiled_by(compile_graph: Compile = itself) -> Iterator[list[torch.fx.GraphModule]]:
    """Replace Inductor by a function; yield the list of graphs that are compiled."""
    graphs: list[torch.fx.GraphModule] = []

    def noted(graph: torch.fx.GraphModule, args: Sequence[torch.Tensor], threads: int) -> Any:
        graphs.append(graph)
        return compile_graph(graph, args, threads)

    with (
        mock.patch("autosched.fusion.region.compile_graph", noted),
        mock.patch("autosched.fusion.region._shared", weakref.WeakValueDictionary()),
        mock.patch("autosched.fusion.region.unavailable", return_value=None),
        mock.patch("autosched.fusion.fusing.unavailable", return_value=None),
    ):
        yield graphs


def region(fn: Callable[..., Any], inputs: int = 1, outputs: int = 1, threads: int = 1) -> Region:
    """Return a region of one task that calls this function of ``inputs`` tensors."""
    graph = asc.Graph()
    taken = graph.inputs(*(f"x{i}" for i in range(inputs)))
    made = graph.add(fn, *taken, outputs=None if outputs == 1 else outputs)
    return region_of(graph, [made] if outputs == 1 else made, threads)


def region_of(graph: asc.Graph, made: Sequence[asc.Value], threads: int = 1) -> Region:
    """Return a region of all tasks of a graph."""
    sources = [value.index for value in graph.sources]
    return Region(Composite(graph.tasks, sources, [value.index for value in made]), threads)


drawn_groups = st.lists(st.sampled_from("aaabc"), min_size=60, max_size=60)


def fused(graph: asc.Graph, drawn: Sequence[str]) -> asc.Graph:
    """Return the graph with these groups of tasks as regions, as far as they can be fused."""

    reasons = unfusable(graph, {})

    def make(composite: Composite) -> tuple[Callable[..., Any], None]:
        if any(task.name in reasons for task in composite.tasks):
            return composite, None  # a task with the views that it reads
        return Region(composite, 1), None

    tasks = [task for task in graph.tasks if not task.view and task.name not in reasons]
    groups = {task.name: group for task, group in zip(tasks, drawn, strict=False)}
    return merged(graph, groups, make)


def call(fn: Callable[..., Any], *args: Any) -> Any:
    """Call a region as a schedule does."""
    with torch.no_grad():
        return fn(*args)
