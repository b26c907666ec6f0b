"""Write a graph as text: inputs, tasks and outputs, one a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autosched.graph.files import StoredTensor
from autosched.graph.task import Task

if TYPE_CHECKING:
    from autosched.graph.graph import Graph

__all__ = ["text_lines"]


def text_lines(graph: Graph) -> Iterator[str]:
    """Yield the lines of ``str(graph)``."""
    yield f"graph {graph.name}"
    for value in graph.sources:
        kind = "input" if value.tensor is None else "constant"
        yield f"  {kind} {value.name}" + (f" on {value.home}" if value.home else "")
    for task in graph.tasks:
        yield f"  {_line(graph, task)}"
    for values in graph.kept_together:
        yield f"  together {', '.join(graph.values[index].name for index in values)}"
    for label, index in graph.outputs.items():
        yield f"  output {label} = {graph.values[index].name}"


def _line(graph: Graph, task: Task) -> str:
    values = graph.values
    reads = [values[v].name + (f"@{version}" if version else "") for v, version in task.reads]
    facts = [f"reads {task.fn}"] if isinstance(task.fn, StoredTensor) else []
    facts += [f"writes {values[use.value].name}" for use in task.writes]
    facts += [f"after {graph.tasks[d.task].name}" for d in task.dependencies if d.kind == "order"]
    facts += [f"on {task.device}"] if task.device else []
    return f"{task.name}({', '.join(reads)})" + (": " + ", ".join(facts) if facts else "")
