"""Choose which tasks of a placement are repeated, device by device, and apply it to the problem.

The steps of a device are its tasks in issue order, with all memory that they make, and copies from
other devices, which are not repeated: lowering may spill and reload them. Views cost nothing and
follow their memory. What other devices read is not repeated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from autosched._lib.tree import flatten
from autosched.costs.costs import Costs
from autosched.graph.graph import Graph, Task, Use
from autosched.placement import Placement
from autosched.problem import Problem
from autosched.recomputation.rewrite import (
    first_name,
    is_view,
    last_repeats,
    rewritten,
    without_unread,
)
from autosched.recomputation.sequence import Step, peak_of, planned

_TOGETHER = 0.75  # of the bytes times lives that one block would have


class Course(NamedTuple):
    """The steps of a device, the position in issue order of each, and the bytes of its inputs."""

    steps: list[Step]
    at: list[int]
    base: float


def courses(problem: Problem, placement: Placement) -> dict[str, Course]:
    """Return the course of each device; in the problem, state is on the devices that read it."""
    return _Walk(problem, placement).courses()


class _Walk:
    """The steps of all devices so far, while the tasks of a placement are walked in issue order."""

    def __init__(self, problem: Problem, placement: Placement):
        self.problem = problem
        self.graph = graph = problem.graph
        self.values = values = graph.values
        self.tasks = [graph.task(name) for name in placement.order]
        self.device = placement.device
        self.last = last_repeats(graph, self.tasks)
        self.steps: dict[str, list[Step]] = {name: [] for name in problem.devices}
        self.at: dict[str, list[int]] = {name: [] for name in problem.devices}
        self.maker: dict[int, tuple[str, int]] = {}  # by root: the device, and the step there
        self.copied: dict[tuple[Use, str], int] = {}  # the step that copies to a device
        self.shared: set[tuple[str, int]] = set()  # steps whose memory other devices read
        self.ends: dict[int, int] = {}  # by root, the position of its last reader
        for at, task in enumerate(self.tasks):
            self.ends.update((values[use.value].root, at) for use in (*task.reads, *task.outputs))
        self.kept = {values[index].root for index in graph.outputs.values()}
        self.ends.update(dict.fromkeys(self.kept, len(self.tasks)))

    def courses(self) -> dict[str, Course]:
        for at, task in enumerate(self.tasks):
            self._step(at, task)
        kept = {self.maker[root] for root in self.kept if root in self.maker}
        held = dict.fromkeys(self.problem.devices, 0.0)
        for value, name in self.problem.homes.items():
            held[name] += self._nbytes(value)
        count = len(self.tasks)
        found: dict[str, Course] = {}
        for name, steps in self.steps.items():
            positions = self.at[name]
            found[name] = Course([], positions, held[name])
            for i, step in enumerate(steps):
                last = -1 if (name, i) in self.shared else step.last_repeat
                until = len(steps) if last == count else bisect_right(positions, last) - 1
                made = step._replace(last_repeat=until, is_kept=(name, i) in kept)
                found[name].steps.append(made)
        return found

    def _nbytes(self, value: int) -> float:
        return self.problem.costs.value_nbytes(self.values[value])

    def _add(self, device: str, at: int, step: Step) -> int:
        self.steps[device].append(step)
        self.at[device].append(at)
        return len(self.at[device]) - 1

    def _step(self, at: int, task: Task) -> None:
        device = self.device[task.name]
        needed = [self._read(use, device, at) for use in self.graph.needs(task)]
        for value, version in task.changes:
            if (Use(value, version), device) in self.copied:
                self.copied[Use(value, version + 1), device] = self.copied[
                    Use(value, version), device
                ]
        if is_view(self.graph, task):
            return
        made = [use.value for use in task.outputs]
        own = [i for i in made if self.values[i].root == i and self.graph.is_used(i)]
        sizes = [self._nbytes(i) for i in own]
        seconds = self.problem.costs.task_seconds(task, self.problem.machine.device(device))
        reads = tuple(sorted({step for step in needed if step is not None}))
        if self.last[at] >= 0 and _end_together([self.ends[i] - at for i in own], sizes):
            step = self._add(device, at, Step(seconds, sum(sizes), reads, self.last[at]))
            self.maker.update((i, (device, step)) for i in own)
            return
        step = self._add(device, at, Step(seconds, 0.0, reads))
        for i, size in zip(own, sizes, strict=True):
            self.maker[i] = device, self._add(device, at, Step(0.0, size, (step,)))

    def _read(self, use: Use, device: str, at: int) -> int | None:
        """Return the step that makes what a device reads, maybe a copy; None for its inputs."""
        root = self.values[use.value].root
        there, step = self.maker.get(root, (self.problem.homes.get(root, device), -1))
        if there == device:
            return step if step >= 0 else None
        if (use, device) not in self.copied:
            if step >= 0:
                self.shared.add((there, step))
                self._add(there, at, Step(0.0, 0.0, (step,)))
            copy = Step(0.0, self._nbytes(use.value), ())
            self.copied[use, device] = self._add(device, at, copy)
        return self.copied[use, device]


def _end_together(lives: Sequence[int], sizes: Sequence[float]) -> bool:
    """Whether results of a task are needed for about as long, so that they count as one block."""
    longest = max(lives, default=0)
    used = sum(life * size for life, size in zip(lives, sizes, strict=True))
    return used >= _TOGETHER * longest * sum(sizes)


def repeated(problem: Problem, placement: Placement, part: float = 1.0) -> tuple[str, ...] | None:
    """Return the order of tasks, and of repetitions with which devices hold no more than they have.

    These make room for a ``part`` of what exceeds their memory. None if nothing is repeated, or that
    does not suffice.
    """
    before: dict[int, list[str]] = {}
    for name, (steps, at, base) in courses(problem, placement).items():
        limit = problem.machine.device(name).nbytes
        peak = base + peak_of(steps, range(len(steps)))
        if peak <= limit:
            continue
        plan = planned(steps, limit + (1 - part) * (peak - limit), base=base)
        if plan is None:
            return None
        done = 0
        for i in plan.order:
            if i == done:
                done += 1
                continue
            position = at[done] if done < len(steps) else len(placement.order)
            before.setdefault(position, []).append(placement.order[at[i]])
    if not before:
        return None
    order: list[str] = []
    for position, task in enumerate(placement.order):
        order += [*before.get(position, ()), task]
    return without_unread(problem.graph, [*order, *before.get(len(placement.order), ())])


def with_repeats(
    problem: Problem, placement: Placement, order: Sequence[str]
) -> tuple[Problem, Placement]:
    """Return the problem and the placement in which tasks are repeated, with the same costs."""
    if len(set(order)) == len(order):
        return problem, replace(placement, order=tuple(order), copies=())
    graph = rewritten(problem.graph, order)
    first = {task.name: first_name(problem.graph, task.name) for task in graph.tasks}
    device = {name: placement.device[old] for name, old in first.items()}
    place = problem.constraints.place
    place = {name: place[old] for name, old in first.items() if old in place}
    costs = _with_costs(problem.costs, problem.graph, graph, first)
    problem = replace(
        problem, graph=graph, costs=costs, original=problem.original or problem
    ).constrained(place=place)
    return problem, replace(placement, device=device, order=tuple(first), copies=())


def _with_costs(costs: Costs, old: Graph, new: Graph, first: Mapping[str, str]) -> Costs:
    """Return costs in which what is repeated costs what it did."""
    values = {
        made.name: was.name
        for task in new.tasks
        for made, was in zip(
            flatten(task.result), flatten(old.task(first[task.name]).result), strict=True
        )
    }
    tables: dict[str, Any] = {}
    for kind in ("seconds", "work", "issue", "shares", "nbytes"):
        table = getattr(costs, kind)
        names = values if kind == "nbytes" else first
        tables[kind] = {
            **table,
            **{name: table[old] for name, old in names.items() if old in table},
        }
    return replace(costs, **tables)
