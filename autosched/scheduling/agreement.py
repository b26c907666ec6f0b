"""Schedules that several ranks make together: one plans, and all check it.

Rank 0 plans, and the others get the text of its saved schedule. Each compares it with its own graph,
verifies it, and executes its part. Where one of them raises, all do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from autosched._lib.text import difference
from autosched._lib.tree import flatten
from autosched.errors import GraphError, ScheduleError, listed
from autosched.graph.graph import Graph
from autosched.lowering.resident_state import with_resident_state_as
from autosched.machine.cluster import joined
from autosched.problem import Constraints, Problem
from autosched.program.program import Program
from autosched.scheduling.arguments import check_arguments
from autosched.scheduling.binding import binding_of
from autosched.scheduling.saved import Saved, describe, from_text

if TYPE_CHECKING:
    from autosched.scheduling.schedule import Schedule

T = TypeVar("T")


def agreed(graph: Graph, plan: Callable[[], str], join: Callable[[Saved], T]) -> T:
    """Return what ``join`` makes of the schedule that rank 0 plans. Collective.

    ``plan`` returns the text of a schedule, on rank 0. What is raised on one is raised on all ranks.
    """
    group = joined()
    group.together("schedule()", partial(check_arguments, graph=graph))
    texts = group.gather("the plan of schedule()", lambda: "" if group.rank else plan())
    saved = from_text(texts[0])

    def join_own() -> T:
        inputs = dict(saved.program.inputs)
        state = Constraints(state=binding_of(graph).state_on(graph, saved.machine))
        asked = Problem(graph, saved.machine, constraints=state)
        own = with_resident_state_as(asked, saved.placement, inputs)
        who = f"rank {group.rank}"
        if lines := difference("rank 0", saved.graph, who, describe(own.graph)):
            raise ScheduleError(f"{who}: its graph {graph.name!r} differs from rank 0's{lines}")
        return join(saved)

    return group.together("schedule(), to verify", join_own)


def inputs_on(devices: Collection[str], program: Program, graph: Graph) -> tuple[str, ...]:
    """Return the inputs that live on some devices, or of which there is one for them."""
    here = [graph.value(name) for name, device in program.inputs if device in devices]
    names = {value.copy_of or value.name for value in here}
    return tuple(name for name in graph.input_names if name in names)


def own_inputs(schedule: Schedule, inputs: dict[str, Any], is_agreed: bool) -> dict[str, Any]:
    """Return the inputs that live on this rank; all of them, if there are no ranks.

    Unless ``is_agreed`` that all ranks make such a call, it is collective. Raises GraphError for
    missing and unknown ones, and ScheduleError for other shapes than in the first call, on all
    ranks.
    """
    if schedule.machine.rank is None:
        return inputs
    if is_agreed:
        return {name: inputs[name] for name in schedule.inputs_here}
    return joined().together(schedule.call_name, partial(_own_inputs, schedule, inputs))


def _own_inputs(schedule: Schedule, inputs: dict[str, Any]) -> dict[str, Any]:
    rank = schedule.machine.rank
    graph = schedule.graph
    own = schedule.inputs_here
    if missing := [name for name in own if name not in inputs]:
        given = f"rank {rank} misses input {missing[0]!r} of graph {graph.name!r}"
        raise GraphError(f"{given}; the inputs that live there are {listed(own)}")
    if len(inputs) > len(own) and (unknown := inputs.keys() - {*graph.input_names}):
        given = f"graph {graph.name!r} was given {min(unknown)!r}, which is no input"
        raise GraphError(f"{given}; its inputs are {listed(graph.input_names)}")
    found = {name: inputs[name] for name in own}
    first = schedule.first_shapes
    for name, item in found.items():
        shapes = _shapes(item)
        if first.setdefault(name, shapes) != shapes:
            raise ScheduleError(
                f"rank {rank}: input {name!r} has {_described(shapes)}, and had "
                f"{_described(first[name])} in the first call; shapes and dtypes over ranks are "
                "those of the first call: make a schedule for each"
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
