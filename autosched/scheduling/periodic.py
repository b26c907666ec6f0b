"""Predict the seconds per run of a schedule in steady state."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from autosched.bounds.periods import period_bounds
from autosched.lowering.fitting import confined
from autosched.simulation.issuing import issuing
from autosched.simulation.periods import Period, period
from autosched.simulation.simulate import durations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autosched.costs.costs import Costs
    from autosched.graph.graph import Graph
    from autosched.machine.machine import Machine
    from autosched.placement import Placement
    from autosched.program.program import Program

__all__ = ["Periodic"]


class Periodic:
    """The part of a schedule that predicts many runs; fields are those of ``Schedule``."""

    graph: Graph
    machine: Machine
    costs: Costs
    placement: Placement
    program: Program
    wanted: Mapping[str, str]

    @cached_property
    def period(self) -> float:
        """Predicted seconds per run in steady state, if runs are submitted without delay.

        With one run in flight it is the makespan. Otherwise it is computed exactly:
        ``autosched.simulation.periods`` documents how.

        >>> import autosched as asc
        >>> graph = asc.Graph()
        >>> graph.output(y=graph.add(abs, graph.input("x"), seconds=1.0))
        >>> asc.schedule(graph, asc.Machine.emulated(gpus=0)).period
        1.0
        """
        return self._period.seconds

    @cached_property
    def _period(self) -> Period:
        parts = self.program, self.graph, self.machine, self.costs
        return period(self.program, durations(*parts), issuing(*parts))

    @cached_property
    def period_bound(self) -> float:
        """Lower bound on the period of all schedules with as many runs in flight."""
        # Tasks that fit into no device's memory cannot run.
        costs = confined(self.graph, self.machine, self.costs, self.wanted)
        in_flight = self.program.in_flight
        known = period_bounds(self.graph, self.machine, costs, in_flight)
        return max([*known.values(), self.placement.bound / in_flight])
