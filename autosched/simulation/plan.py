"""Define plans: a placement of a problem, its program, and what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autosched.costs.costs import Costs
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.problem import Problem
from autosched.program.program import Program
from autosched.simulation.issuing import Issuing, issuing
from autosched.simulation.periods import period
from autosched.simulation.simulate import durations, makespan, simulate
from autosched.timeline.timeline import Timeline


@dataclass(frozen=True)
class Plan:
    """A placement of a problem and its program; in the problem, state is on the devices that read it.

    Predictions raise ScheduleError if the machine cannot run the program.
    """

    problem: Problem
    placement: Placement
    program: Program

    @property
    def graph(self) -> Graph:
        """The graph that is run, which does not change when the user's grows."""
        return self.problem.graph

    @property
    def machine(self) -> Machine:
        """The machine that it is planned for."""
        return self.problem.machine

    @property
    def costs(self) -> Costs:
        """The costs that predictions use."""
        return self.problem.costs

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """The predicted duration of each instruction."""
        return durations(self.program, self.problem)

    @cached_property
    def issuing(self) -> Issuing | None:
        """The threads that issue the program; None if that takes no time."""
        return issuing(self.program, self.problem)

    @cached_property
    def predicted(self) -> Timeline:
        """The predicted timeline of one run."""
        found = simulate(self.program, self.problem)
        return replace(found, guess=self.costs.guess(self.graph))

    @cached_property
    def makespan(self) -> float:
        """Predicted seconds from the first instruction to the last."""
        return makespan(self.program, self.seconds, self.issuing)

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
        return period(self.program, self.seconds, self.issuing)
