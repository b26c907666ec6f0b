"""Hold a schedule with its prediction, and predict variants of it.

A what-if question is a case in which one part is replaced, and is predicted by the same
``simulate``. Gains are neither estimated nor combined. Contains no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autosched.graph.graph import HOST, Task, Use
from autosched.lowering import fitted
from autosched.lowering.resident_state import with_resident_state
from autosched.placement import Placement
from autosched.program.program import Copy
from autosched.simulation.plan import Plan
from autosched.simulation.simulate import makespan

SMALL = 2_000  # tasks, up to which there is time to lower many variants
LEAST = 0.02  # of the makespan; changes that gain less are not listed


@dataclass(frozen=True)
class Case(Plan):
    """A plan, and what it would be otherwise.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> seconds = {"cpu": 1.0, "cuda:0": 4.0}
    >>> graph.output(y=graph.add(abs, graph.input("x"), name="y", seconds=seconds))
    >>> made = asc.schedule(graph, asc.Machine.emulated(gpus=1))
    >>> case = Case(made.problem, made.placement, made.program)
    >>> case.placed(Placement({"y": "cuda:0"}, ("y",))).makespan > case.makespan
    True
    """

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """The accelerators, or all devices that run tasks where there are none."""
        return self.machine.accelerators or self.machine.computing

    @cached_property
    def used(self) -> tuple[str, ...]:
        """The workers with tasks of nonzero duration, in the machine's order."""
        busy = {
            device
            for task, device in self.placement.device.items()
            if self.task_seconds(self.graph.task(task), device) > 0
        }
        return tuple(name for name in self.workers if name in busy)

    def readers(self, copy: Copy) -> frozenset[int]:
        """Return the tasks that read a value on the destination of a copy."""
        return self._readers.get((copy.value, copy.destination), frozenset())

    @cached_property
    def _readers(self) -> dict[tuple[str, str], frozenset[int]]:
        found: dict[tuple[str, str], list[int]] = {}
        for task in self.graph.tasks:
            for use in self.graph.needs(task):
                key = self.graph.values[use.value].name, self.placement.device[task.name]
                found.setdefault(key, []).append(task.index)
        return {key: frozenset(tasks) for key, tasks in found.items()}

    # ---- what if

    def timed(self, seconds: Sequence[float], free: Iterable[int] = ()) -> float:
        """Return the makespan with other durations; issuing the instructions ``free`` takes none."""
        threads = self.issuing
        if threads is not None:
            issued = threads.seconds.copy()
            issued[list(free)] = 0.0
            threads = threads._replace(seconds=issued)
        return makespan(self.program, seconds, threads)

    def having(self, **parts: Any) -> Case:
        """Return the case with another machine or costs, and the same placement."""
        return replace(self, problem=replace(self.problem, **parts))

    def with_inputs_on(self, homes: Mapping[str, str]) -> Case:
        """Return the case with inputs on other devices, by name, and the same placement."""
        inputs = {**self.problem.constraints.inputs, **homes}
        return replace(self, problem=self.problem.constrained(inputs=inputs))

    def placed(self, placement: Placement) -> Case:
        """Return the case with another placement. Raises ScheduleError if that is impossible."""
        if placement.streams is None:
            placement = replace(placement, streams=self.placement.streams)
        problem, placement = with_resident_state(self.problem, placement)
        program = fitted(problem.constrained(outputs=self.outputs), placement)
        return Case(problem, placement, program)

    @cached_property
    def outputs(self) -> dict[str, str]:
        """The required devices of outputs: those requested, or those they are copied to."""
        outputs = self.program.outputs
        copied = {label: device for label, device in outputs if device != self._made(label)}
        return {**copied, **self.problem.constraints.outputs}

    def _made(self, label: str) -> str:
        value = self.graph.values[self.graph.outputs[label]]
        maker = self.graph.maker(Use(value.index, self.graph.last_version(value.index)))
        if maker is None:
            return self.problem.homes[value.index]
        return self.placement.device[self.graph.tasks[maker].name]

    def maker(self, copy: Copy) -> str | None:
        """Return the task that produces what is copied; None for inputs and constants."""
        maker = self.graph.maker(Use(self.graph.value(copy.value).index, copy.version))
        return None if maker is None else self.graph.tasks[maker].name

    @cached_property
    def bound(self) -> tuple[Task, ...]:
        """The tasks that the user has bound to a worker."""
        devices = zip(self.graph.tasks, map(self.problem.constraint, self.graph.tasks), strict=True)
        return tuple(task for task, at in devices if at != HOST and at in self.workers)

    @cached_property
    def freed(self) -> Case:
        """The case with bound tasks free to use any worker, placed as before."""
        seconds = {
            task.name: {name: self.task_seconds(task, name) for name in self.workers}
            for task in self.bound
        }
        return self.unbound(self.bound).having(costs=self.costs.override(seconds))

    def unbound(self, tasks: Iterable[Task]) -> Case:
        """Return the case with tasks free to run anywhere, and the same placement."""
        free = dict.fromkeys(task.name for task in tasks)
        place = {**self.problem.constraints.place, **free}
        return replace(self, problem=self.problem.constrained(place=place))

    @cached_property
    def slow_on_host(self) -> tuple[Task, ...]:
        """Tasks bound to a CPU that some accelerator runs twice as fast."""
        found = []
        for task in self.graph.tasks:
            device = self.problem.constraint(task)
            if device and device not in (HOST, *self.workers) and not task.reads_file:
                seconds = self.task_seconds(task, device)
                least = min(self.task_seconds(task, name) for name in self.workers)
                found += [task] if least < seconds and least <= seconds / 2 else []
        return tuple(found)

    def task_seconds(self, task: Task, device: str) -> float:
        """Return the seconds of a task on a device."""
        return self.costs.task_seconds(task, self.machine.device(device))


# ---- advice


@dataclass(frozen=True)
class Advice:
    """A change, in words, with its tasks and values, and the predicted makespan with it.

    ``gain`` is the seconds that it saves, ``share`` their part of the makespan. ``kind`` is ``pin``,
    ``keep`` or, for inputs that may differ from run to run, ``keep inputs``; ``launch``; ``host
    bound`` for tasks that are bound to a CPU and slow there; ``policy`` for a better placement, or
    ``bound`` for one that the user's bindings forbid; and each of these two as ``idle ...`` or
    ``fewer ...`` if it uses more devices, or fewer.
    """

    kind: str
    words: str
    tasks: tuple[str, ...]
    values: tuple[str, ...]
    makespan: float
    gain: float = 0.0
    share: float = 0.0
