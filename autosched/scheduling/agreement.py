"""Schedules that several ranks make together: one plans, and all check it.

Rank 0 plans, and the others get the text of its saved schedule. Each compares it with its own graph,
verifies it, and executes its part. Where one of them raises, all do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from autosched._lib.tree import flatten
from autosched.errors import GraphError, ScheduleError, listed
from autosched.graph.graph import Graph
from autosched.machine.cluster import joined
from autosched.machine.machine import Machine
from autosched.program.program import Program
from autosched.scheduling.arguments import check_arguments
from autosched.scheduling.saved import Saved, from_text

T = TypeVar("T")


def agreed(graph: Graph, plan: Callable[[], str], join: Callable[[Saved, int], T]) -> T:
    """Return what ``join`` makes on this rank of the schedule that rank 0 plans. Collective.

    ``plan`` returns the text of a schedule, on rank 0. What is raised on one is raised on all ranks.
    """
    group = joined()
    group.together("schedule()", partial(check_arguments, graph=graph))
    texts = group.gather("the plan of schedule()", lambda: "" if group.rank else plan())
    saved = from_text(texts[0])
    return group.together("schedule(), to verify", partial(join, saved, group.rank))


class OwnInputs:
    """The inputs that live on this rank, or of which there is one for it, by name."""

    def __init__(self, graph: Graph, machine: Machine, program: Program):
        self.graph = graph
        self.rank = machine.rank
        here = [graph.value(name) for name, device in program.inputs if device in machine.here]
        names = {value.copy_of or value.name for value in here}
        self.names = tuple(name for name in graph.input_names if name in names)
        self._first: dict[str, Any] = {}  # shapes and dtypes in the first call
        if machine.rank is not None:  # ranks agree that a call is of the same program
            number = zlib.crc32(str(program).encode())
            self._call = f"a call of a schedule of {graph.name!r}, number {number:x}"

    def of(self, inputs: dict[str, Any], is_agreed: bool) -> dict[str, Any]:
        """Return those of some inputs; all, if there are no ranks.

        Unless ``is_agreed`` that all ranks make such a call, it is collective. Raises GraphError for
        missing and unknown ones, and ScheduleError for other shapes than in the first call, on all
        ranks.
        """
        if self.rank is None:
            return inputs
        if is_agreed:
            return {name: inputs[name] for name in self.names}
        return joined().together(self._call, partial(self._checked, inputs))

    def _checked(self, inputs: dict[str, Any]) -> dict[str, Any]:
        graph = self.graph
        if missing := [name for name in self.names if name not in inputs]:
            given = f"rank {self.rank} misses input {missing[0]!r} of graph {graph.name!r}"
            raise GraphError(f"{given}; the inputs that live there are {listed(self.names)}")
        if len(inputs) > len(self.names) and (unknown := inputs.keys() - {*graph.input_names}):
            given = f"graph {graph.name!r} was given {min(unknown)!r}, which is no input"
            raise GraphError(f"{given}; its inputs are {listed(graph.input_names)}")
        found = {name: inputs[name] for name in self.names}
        for name, item in found.items():
            shapes = _shapes(item)
            first = self._first.setdefault(name, shapes)
            if first != shapes:
                raise ScheduleError(
                    f"rank {self.rank}: input {name!r} has {_described(shapes)}, and had "
                    f"{_described(first)} in the first call; shapes and dtypes over ranks are those "
                    "of the first call: make a schedule for each"
                )
        return found


def _shapes(item: Any) -> tuple[Any, ...]:
    """Return shape and dtype of each tensor of an input."""
    if hasattr(item, "shape") and hasattr(item, "dtype"):
        return ((tuple(item.shape), item.dtype),)
    return tuple((tuple(t.shape), t.dtype) for t in flatten(item) if hasattr(t, "dtype"))


def _described(shapes: tuple[Any, ...]) -> str:
    found = [f"{str(dtype).removeprefix('torch.')} {shape}" for shape, dtype in shapes]
    return ", ".join(found) or "no tensor"
