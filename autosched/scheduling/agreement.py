"""Schedules that several ranks make together: one plans, and all check it.

Rank 0 plans, and the others get the text of its saved schedule. Each compares it with its own graph,
verifies it, and executes its part. Where one of them raises, all do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from autosched import errors
from autosched.errors import AutoschedError, GraphError, ScheduleError, listed
from autosched.graph.graph import Graph
from autosched.lowering.resident_state import with_resident_state_as
from autosched.machine.cluster import joined
from autosched.program.program import Program
from autosched.scheduling.saved import Saved, describe, from_text

if TYPE_CHECKING:
    from autosched.scheduling.running import Running

__all__ = ["agreed", "inputs_on", "own_inputs"]


def agreed(
    graph: Graph, check: Callable[[], Any], plan: Callable[[], str], join: Callable[[Saved], Any]
) -> Any:
    """Return what ``join`` makes of the schedule that rank 0 plans. Collective.

    ``check`` raises for wrong arguments, on any rank; ``plan`` returns the text of a schedule, on
    rank 0. Raises the first error of all ranks, in their order.
    """
    from autosched.runtime.ranks.session import pause, session

    pause()
    meeting = joined().meeting
    rank = joined().rank
    made: list[Any] = []

    def planned(verdicts: Sequence[str]) -> str:
        _all_agree(verdicts)
        return plan()

    def join_own(text: str) -> None:
        saved = from_text(text)
        inputs = dict(saved.program.inputs)
        own = with_resident_state_as(graph, saved.machine, saved.placement, inputs)
        _check_same(saved, own, rank)
        made.append(join(saved))

    text = meeting.agree("schedule()", _verdict(check), planned)
    session()  # all ranks are here, so they can connect: from now on each learns if another goes
    meeting.agree("schedule(), to verify", _verdict(lambda: join_own(text)), _all_agree)
    return made[0]


def inputs_on(devices: Collection[str], program: Program, graph: Graph) -> tuple[str, ...]:
    """Return the inputs that live on some devices, or of which there is one for them."""
    here = {graph.kept.get(name, name) for name, device in program.inputs if device in devices}
    return tuple(name for name in graph.input_names if name in here)


def own_inputs(schedule: Running, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that live on this rank; all of them, if there are no ranks.

    Raises GraphError for missing and unknown ones.
    """
    rank = schedule.machine.rank if schedule.machine.ranks else None
    if rank is None:
        return inputs
    graph = schedule.graph
    own = schedule.inputs_here
    if missing := [name for name in own if name not in inputs]:
        given = f"rank {rank} misses input {missing[0]!r} of graph {graph.name!r}"
        raise GraphError(f"{given}; the inputs that live there are {listed(own)}")
    if len(inputs) > len(own) and (unknown := inputs.keys() - {*graph.input_names}):
        given = f"graph {graph.name!r} was given {min(unknown)!r}, which is no input"
        raise GraphError(f"{given}; its inputs are {listed(graph.input_names)}")
    return {name: inputs[name] for name in own}


def _verdict(do: Callable[[], Any]) -> str:
    """Return name and message of the error that a function raises, as JSON; empty if none."""
    try:
        do()
    except AutoschedError as error:
        return json.dumps([type(error).__name__, str(error)])
    return ""


def _all_agree(verdicts: Sequence[str]) -> str:
    """Raise the first error of all ranks."""
    for rank, verdict in enumerate(verdicts):
        if verdict:
            kind, text = json.loads(verdict)
            found: type[AutoschedError] = getattr(errors, kind)
            raise found(text if text.startswith("rank ") else f"rank {rank}: {text}")
    return ""


def _check_same(saved: Saved, graph: Graph, rank: int) -> None:
    """Raise ScheduleError with the first line in which a graph differs from that of rank 0."""
    for here, there in zip_longest(describe(graph), saved.graph, fillvalue="nothing more"):
        if here != there:
            lines = f"\n    rank 0:  {there}\n    rank {rank}:  {here}"
            raise ScheduleError(
                f"rank {rank}: its graph {graph.name!r} differs from rank 0's{lines}"
            )
