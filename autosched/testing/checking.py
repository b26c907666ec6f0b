"""Check a graph under many machines, policies and interleavings.

Each run must equal the serial run of the graph. ``verify`` proves that a program keeps the order
of the accesses that tasks declare; undeclared accesses show only when tasks run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import NoneType
from typing import Any, NamedTuple

from autosched.errors import AutoschedError, InterleavingError, ScheduleError, shown
from autosched.graph.graph import HOST, Graph, Task
from autosched.machine.machine import LINKS, Device, Link, Machine
from autosched.policies import Policy
from autosched.program.program import Program
from autosched.runtime.threads.interleaver import Choose
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule
from autosched.simulation.simulate import durations
from autosched.testing.comparing import difference
from autosched.testing.exploring import attempt
from autosched.testing.interleavings import contrary, uniform
from autosched.testing.reference import Reference, Setting, traced
from autosched.testing.scattering import scattered

__all__ = ["Checked", "check", "machines_for"]


@dataclass(frozen=True)
class Checked:
    """The number of schedules and runs that ``check`` has tried."""

    schedules: int
    programs: int
    interleavings: int

    def __str__(self) -> str:
        return (
            f"{self.schedules} schedules, {self.programs} distinct programs, {self.interleavings} interleavings: "
            f"each as the serial run, bit for bit"
        )


def check(
    graph: Graph,
    machine: Machine | None = None,
    *,
    examples: Mapping[str, Any],
    policies: Sequence[str | Policy] | None = None,
    interleavings: int = 20,
    seed: int = 0,
) -> Checked:
    """Run a graph in many ways, and require that each has the outputs and inputs of its serial run.

    ``examples`` is an input of each name; they are copied for each run, and never changed. Default:
    ``policies`` of all kinds, and two that place tasks at random, on ``machines_for(graph)``. Of
    the ``interleavings`` of each program, the first is in modelled order, half of the others favour
    some streams, and the rest are random. All follow from ``seed``, which is also torch's seed for
    tasks.

    Raises InterleavingError, with a report, if a run differs, or if two serial runs differ;
    HazardError for a task with an undeclared write of an argument; ScheduleError if no policy finds
    a schedule.

    >>> import torch
    >>> graph = Graph()
    >>> x = graph.input("x")
    >>> graph.output(y=x @ x, z=x + 1)
    >>> print(check(graph, Machine.emulated(gpus=2), examples={"x": torch.eye(2)}, policies=["round_robin"]))
    1 schedules, 1 distinct programs, 20 interleavings: each as the serial run, bit for bit
    """
    _refuse_misfits(graph, examples, policies, interleavings, seed)
    family = {"machine": machine} if machine is not None else _numbered(machines_for(graph))
    reference = Reference(Setting(graph.pinned(), examples, seed))
    return _check(reference, _plans(graph, family, policies or _POLICIES), interleavings)


def _refuse_misfits(
    graph: Any, examples: Any, policies: Any, interleavings: Any, seed: Any
) -> None:
    """Raise ScheduleError for invalid arguments, and GraphError for missing or unknown examples."""
    for name, item, fits, what in (
        ("graph", graph, isinstance(graph, Graph), "a Graph"),
        (
            "examples",
            examples,
            isinstance(examples, Mapping),
            "an input of each name, as a mapping",
        ),
        (
            "policies",
            policies,
            isinstance(policies, (list, tuple, NoneType)),
            "a list of names and functions",
        ),
        (
            "interleavings",
            interleavings,
            type(interleavings) is int and interleavings > 0,
            "a whole number, 1 or more",
        ),
        ("seed", seed, type(seed) is int and 0 <= seed < 2**63, "a whole number, 0 to 2**63 - 1"),
    ):
        if not fits:
            raise ScheduleError(f"{name} must be {what}, got {shown(item)}")
    graph.bind(examples)


def machines_for(graph: Graph) -> list[Machine]:
    """Return machines of 0 to 4 GPUs and of the devices that constraints name, with one or three compute streams each.

    >>> [len(machine.devices) for machine in machines_for(Graph())][::4]
    [1, 2, 3, 5]
    """
    named = [v.home for v in graph.sources] + [
        task.device for task in graph.tasks if task.device != HOST
    ]
    named += [
        device
        for task in graph.tasks
        if isinstance(task.seconds, Mapping)
        for device in task.seconds
    ]
    found = []
    for gpus, contention, streams in product((0, 1, 2, 4), (True, False), (1, 3)):
        names = list(
            dict.fromkeys(["cpu", *(f"cuda:{i}" for i in range(gpus)), *filter(None, named)])
        )
        links = [Link(a, b, *LINKS["pcie4"]) for i, a in enumerate(names) for b in names[i + 1 :]]
        devices = [Device(name, streams) for name in names]
        found.append(Machine(devices, links, contention=contention, imagined=True))
    return found


_POLICIES: list[str | Policy] = [
    "auto",
    "single",
    "round_robin",
    "heft",
    scattered(0),
    scattered(1),
]


class _Plan(NamedTuple):
    """A schedule, and the code with which the user gets it again."""

    machine: str
    policy: str | Policy
    made: Schedule


def _numbered(machines: Sequence[Machine]) -> dict[str, Machine]:
    return {f"asc.testing.machines_for(graph)[{i}]": machine for i, machine in enumerate(machines)}


def _plans(
    graph: Graph, family: Mapping[str, Machine], policies: Sequence[str | Policy]
) -> list[_Plan]:
    """Return a schedule for each machine and policy.

    A policy that finds none is omitted, unless all are.
    """
    plans: list[_Plan] = []
    refusals: list[ScheduleError] = []
    for (name, machine), policy in product(family.items(), policies):
        try:
            plans.append(_Plan(name, policy, schedule(graph, machine, policy=policy)))
        except ScheduleError as error:
            refusals.append(error)
    if refusals and not plans:
        raise refusals[0]
    return plans


def _check(reference: Reference, plans: Sequence[_Plan], interleavings: int) -> Checked:
    distinct: dict[Program, _Plan] = {}
    for plan in plans:
        distinct.setdefault(plan.made.program, plan)
    for plan in distinct.values():
        for way in _ways(interleavings, reference.setting.seed):
            _try(reference, plan, way, interleavings)
    return Checked(len(plans), len(distinct), len(distinct) * interleavings)


# ---- one run


class _Way(NamedTuple):
    """An interleaving: a description, and a function that returns a chooser for each run."""

    name: str
    seed: int

    def choose(self) -> Choose | None:
        return (
            {"contrary": contrary, "uniform": uniform}[self.name](self.seed) if self.name else None
        )

    def __str__(self) -> str:
        return f"Virtual(asc.testing.{self.name}({self.seed}))" if self.name else "Virtual()"


def _ways(interleavings: int, seed: int) -> list[_Way]:
    """Return the modelled order, then contrary ones, then random ones."""
    kinds = [
        "" if k == 0 else "contrary" if 2 * k <= interleavings else "uniform"
        for k in range(interleavings)
    ]
    return [_Way(kind, seed + k) for k, kind in enumerate(kinds)]


def _try(reference: Reference, plan: _Plan, way: _Way, interleavings: int) -> None:
    """Run a schedule in one interleaving.

    Raises InterleavingError if the result differs from the serial run.
    """
    made = plan.made
    traces = dict[str, int]()
    seconds = durations(made.program, made.graph, made.machine, made.costs)
    graph = traced(made.graph, traces)
    left, error = attempt(
        reference.setting, made.program, graph, made.machine, way.choose(), seconds
    )
    if (complaint := _complaint(reference, left, error)) is not None:
        culprit = reference.first(
            traces
        )  # a task that did not run has no result, and is not the culprit
        raise InterleavingError(
            _report(reference, plan, way, interleavings, complaint, culprit)
        ) from error


def _complaint(
    reference: Reference, left: Mapping[str, Any], error: AutoschedError | None
) -> str | None:
    """Return the error in the result of a run, or in the run; None if there is none."""
    if error is not None:
        return f"raises {type(error).__name__}: {error}"
    said = (
        (what, difference(expected, left[what])) for what, expected in reference.results.items()
    )
    return next((f"{what} {how}" for what, how in said if how is not None), None)


# ---- telling

_MOST_LINES = 80
_CAUSES = """\
Likely causes: a task draws random numbers without random=True; it changes what is no argument of its own, such as a
list, a cache or a tensor of a closure; its result shares memory with an argument that aliases= does not name."""


def _report(
    reference: Reference,
    plan: _Plan,
    way: _Way,
    interleavings: int,
    complaint: str,
    culprit: Task | None,
) -> str:
    made = plan.made
    policy = _told(plan.policy)
    task = (
        f"{culprit.name!r} on {made.placement.device[culprit.name]}, added at {culprit.source}"
        if culprit
        else "none"
    )
    lines = [
        f"graph {made.graph.name!r} does not do what its serial run does: {complaint}",
        "",
        f"  first task that differs   {task}",
        f"  machine                   {_described(made.machine)}",
        f"  policy                    {policy}",
        f"  interleaving              backend={way}",
        f"  again                     asc.testing.check(graph, {plan.machine}, examples=examples, policies=[{policy}], "
        f"interleavings={interleavings}, seed={reference.setting.seed})",
        "",
        _CAUSES,
        "",
    ]
    program = str(made.program).splitlines()
    more = (
        [f"... and {len(program) - _MOST_LINES} lines more"] if len(program) > _MOST_LINES else []
    )
    return "\n".join([*lines, *program[:_MOST_LINES], *more])


def _told(policy: str | Policy) -> str:
    """Return the code with which the user would write a policy."""
    if isinstance(policy, scattered):
        return f"asc.testing.{policy}"
    return repr(policy) if isinstance(policy, str) else getattr(policy, "__name__", "yours")


def _described(machine: Machine) -> str:
    devices = ", ".join(f"{device.name} ({device.streams})" for device in machine.devices)
    return f"{devices}, with so many compute streams; copies {'queue' if machine.contention else 'do not queue'}"
