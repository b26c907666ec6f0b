"""Case: a schedule as its explanation sees it, and what would be if something were otherwise.

A what-if is a case with another part, and is predicted by the same ``simulate``. Knows no words and no advice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autosched.costs import Costs
from autosched.graph import HOST, Graph, Task, Use
from autosched.lowering import lower
from autosched.machine import Machine
from autosched.placement import Placement, home
from autosched.program import Program
from autosched.simulate import durations, simulate
from autosched.timeline import Timeline

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """What a schedule is made of.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.add(abs, graph.input("x"), name="y", seconds={"cpu": 1.0, "cuda:0": 4.0}))
    >>> made = asc.schedule(graph, asc.Machine.emulated(gpus=1))
    >>> case = Case(made.graph, made.machine, made.costs, made.placement, made.program)
    >>> case.placed(Placement({"y": "cuda:0"}, ("y",))).makespan > case.makespan
    True
    """

    graph: Graph
    machine: Machine
    costs: Costs
    placement: Placement
    program: Program

    @cached_property
    def predicted(self) -> Timeline:
        """The predicted timeline."""
        return simulate(self.program, self.graph, self.machine, self.costs)

    @property
    def makespan(self) -> float:
        """Predicted seconds."""
        return self.predicted.makespan

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Predicted seconds of each instruction."""
        return durations(self.program, self.graph, self.machine, self.costs)

    @cached_property
    def used(self) -> tuple[str, ...]:
        """The accelerators with tasks that take time, in the machine's order."""
        busy = {
            device
            for task, device in self.placement.device.items()
            if self.costs.task_seconds(self.graph.task(task), self.machine.device(device)) > 0
        }
        return tuple(name for name in self.machine.accelerators if name in busy)

    # ---- what if

    def simulate(self) -> Timeline:
        """Return the predicted timeline. Raises ScheduleError for what the machine cannot do."""
        return self.predicted

    def timed(self, seconds: Sequence[float]) -> float:
        """Return the makespan if instructions took these seconds."""
        return simulate(self.program, self.graph, self.machine, self.costs, seconds).makespan

    def priced(self, costs: Costs) -> Case:
        """Return the case at other costs, in which nothing moves."""
        return dataclasses.replace(self, costs=costs)

    def placed(self, placement: Placement, graph: Graph | None = None, machine: Machine | None = None) -> Case:
        """Return the case as placed otherwise. Raises ScheduleError for what cannot be."""
        graph, machine = graph or self.graph, machine or self.machine
        program = lower(graph, machine, placement, self._wanted)
        return dataclasses.replace(self, graph=graph, machine=machine, placement=placement, program=program)

    @cached_property
    def _wanted(self) -> dict[str, str]:
        """Where outputs are wanted, as far as they go there from elsewhere."""
        return {label: device for label, device in self.program.outputs if device != self._made(label)}

    def _made(self, label: str) -> str:
        value = self.graph.values[self.graph.outputs[label]]
        maker = self.graph.maker(Use(value.index, self.graph.last_version(value.index)))
        if maker is None:
            return home(self.graph, self.machine, value)
        return self.placement.device[self.graph.tasks[maker].name]

    @cached_property
    def bound(self) -> tuple[Task, ...]:
        """The tasks that the user has bound to an accelerator."""
        accelerators = set(self.machine.accelerators)
        return tuple(task for task in self.graph.tasks if task.device != HOST and task.device in accelerators)

    @cached_property
    def freed(self) -> Graph:
        """The graph without what binds tasks to accelerators; what must be on a CPU still must."""
        twin = self.graph.pinned()
        for task in self.bound:
            free = dataclasses.replace(task, device=None)
            twin.tasks[task.index] = free
            if twin.names[task.name] is task:
                twin.names[task.name] = free
        return twin
