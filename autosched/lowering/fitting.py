"""Make a program fit the memory of each device.

This module finds what can never fit, and returns a program that fits unchanged, or one that is
lowered again with a limit. It counts bytes as ``footprint`` does. It knows no times: its callers
choose among several placements that fit.

Sufficient memory changes nothing: a program is first lowered without a limit, and again with one
only if ``footprint`` exceeds a device's memory. Then copies are as late as possible, and
allocations are ordered by events after the frees that make room. So the limit holds for every
interleaving of streams, not only in issue order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from autosched.costs.costs import Costs
from autosched.errors import MemoryLimitError, listed
from autosched.graph.graph import Graph, Task
from autosched.lowering import lower
from autosched.machine.machine import Machine
from autosched.placement import Placement, choices, home
from autosched.program.program import Program
from autosched.simulation.footprint import footprint

__all__ = ["confined", "fits", "fitted", "is_limited"]


def is_limited(graph: Graph, machine: Machine, costs: Costs) -> bool:
    """Return whether some device could not hold all versions of all values."""
    least = min(device.nbytes for device in machine.devices)
    if math.isinf(least):
        return False
    return (
        sum(
            costs.value_nbytes(value) * (1 + graph.last_version(value.index))
            for value in graph.values
        )
        > least
    )


def fits(program: Program, graph: Graph, machine: Machine, costs: Costs) -> bool:
    """Return whether every device has enough memory at all times, in issue order."""
    courses = footprint(program, graph, machine, costs)
    return all(max(course) <= machine.device(name).nbytes for name, course in courses.items())


def fitted(
    graph: Graph,
    machine: Machine,
    costs: Costs,
    placement: Placement,
    outputs: Mapping[str, str] | None = None,
) -> Program:
    """Lower a placement to a program that fits the memory of each device.

    The program is that of ``lower`` if it fits. Otherwise copies are late, allocations wait for
    frees, and values that do not fit are spilled to another device and reloaded. Raises
    MemoryLimitError if that does not suffice, and ScheduleError as ``lower`` does.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.add(abs, graph.input("x"), name="y", nbytes=8, on="cuda:0"))
    >>> placement = Placement({"y": "cuda:0"}, ("y",))
    >>> fitted(graph, asc.Machine.emulated(gpus=1), asc.Costs(), placement).outputs
    (('y', 'cuda:0'),)
    """
    program = lower(graph, machine, placement, outputs)
    if not is_limited(graph, machine, costs) or fits(program, graph, machine, costs):
        return program
    return lower(
        graph, machine, placement, outputs, [costs.value_nbytes(value) for value in graph.values]
    )


def confined(
    graph: Graph, machine: Machine, costs: Costs, outputs: Mapping[str, str] | None = None
) -> Costs:
    """Return costs with infinite seconds where a task alone exceeds the memory of a device.

    A task needs its arguments, its results, and the inputs that are on the device. So policies and
    bounds avoid the device without modelling memory. Raises MemoryLimitError if this, or the
    outputs that are wanted on a device, prove that no schedule exists.
    """
    if not is_limited(graph, machine, costs):
        return costs
    count = _Count(graph, machine, costs)
    wanted = {label: at for label, at in (outputs or {}).items() if label in graph.outputs}
    for device in dict.fromkeys(wanted.values()):
        count.check(device, [graph.outputs[label] for label, at in wanted.items() if at == device])
    needs = {
        task.name: {device: count.needed(task, device) for device in machine.names}
        for task in graph.tasks
    }
    tight = {
        name: {p for p, needed in devices.items() if needed > machine.device(p).nbytes}
        for name, devices in needs.items()
    }
    _check_groups(graph, machine, costs, needs, tight)
    seconds = {
        name: {
            device.name: math.inf
            if device.name in tight[name]
            else costs.task_seconds(graph.task(name), device)
            for device in machine.devices
        }
        for name in tight
        if tight[name]
    }
    return costs.override(seconds)


class _Count:
    """The bytes that a device needs at least."""

    def __init__(self, graph: Graph, machine: Machine, costs: Costs):
        self.graph = graph
        self.machine = machine
        self.nbytes = [costs.value_nbytes(value) for value in graph.values]
        self.home = {value.index: home(graph, machine, value) for value in graph.sources}
        self.lives = dict.fromkeys(machine.names, 0.0)
        for index, device in self.home.items():
            self.lives[device] += self.nbytes[index]
        for device in machine.names:
            self.check(device, ())

    def at_once(self, device: str, values: Iterable[int]) -> float:
        """Return the bytes of values (indices) on a device, and of all inputs on that device.

        Copies of views may be smaller than their base: of values that share memory, the smallest
        counts.
        """
        roots = dict.fromkeys(self.graph.values[value].root for value in values)
        away = [root for root in roots if self.home.get(root) != device]
        return self.lives[device] + sum(
            min(self.nbytes[v] for v in self.graph.members(root)) for root in away
        )

    def needed(self, task: Task, device: str) -> float:
        """Return the bytes that a device holds at least while a task runs there."""
        made = [use.value for use in task.outputs if self.graph.is_used(use.value)]
        return self.at_once(device, [*(use.value for use in task.reads), *made])

    def check(self, device: str, outputs: Iterable[int]) -> None:
        """Raise MemoryLimitError if the inputs and the wanted outputs of a device exceed it."""
        outputs = list(outputs)
        needed = self.at_once(device, outputs)
        limit = self.machine.device(device).nbytes
        if needed > limit:
            homes = [
                self.graph.values[index].name
                for index, where in self.home.items()
                if where == device
            ]
            names = [*homes, *(self.graph.values[index].name for index in outputs)]
            raise MemoryLimitError(
                f"device {device!r} has {limit:,.0f} B of memory, and what must be there at once "
                f"takes {needed:,.0f} B: {listed(names)}. This proves that no schedule exists"
            )


def _check_groups(
    graph: Graph,
    machine: Machine,
    costs: Costs,
    needs: Mapping[str, Mapping[str, float]],
    tight: Mapping[str, set[str]],
) -> None:
    """Raise MemoryLimitError if a task, or tasks that share a device, fit on no allowed device."""
    allowed = choices(graph, machine)
    left: dict[int, list[str]] = {}
    for task in graph.tasks:
        group = allowed.group[task.index]
        able = [
            p
            for p in allowed.devices[task.index]
            if costs.task_seconds(task, machine.device(p)) < math.inf
        ]
        before = [p for p in left.get(group, able) if p in able]
        left[group] = [p for p in before if p not in tight[task.name]]
        if before and not left[group]:
            sizes = ", ".join(
                f"{needs[task.name][p]:,.0f} B of {machine.device(p).nbytes:,.0f} B on {p}"
                for p in before
            )
            others = [
                other.name
                for other in graph.tasks
                if allowed.group[other.index] == group and other is not task
            ]
            raise MemoryLimitError(
                f"task {task.name!r} fits on no device where it may run: with its arguments, its "
                f"results and the inputs that live there it takes {sizes}"
                + (f"; it must be with {listed(others)}" if others else "")
                + ". This proves that no schedule exists"
            )
