"""Check a graph under many machines, policies and interleavings.

Each run must equal the serial run of the graph. ``verify`` proves that a program keeps the order
of the accesses that tasks declare; undeclared accesses show only when tasks run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import NoneType
from typing import Any, NamedTuple

from autosched.errors import AutoschedError, InterleavingError, ScheduleError, shown
from autosched.graph.graph import HOST, STORAGE, Graph, Task
from autosched.machine.machine import LINKS, Device, Link, Machine
from autosched.placement import Placement
from autosched.policies import Policy
from autosched.policies.base.possible import Possible
from autosched.problem import Problem
from autosched.program.program import Program
from autosched.runtime.threads.interleaver import Choose
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule
from autosched.simulation.simulate import durations
from autosched.testing.comparing import difference
from autosched.testing.interleavings import attempt, contrary, uniform
from autosched.testing.reference import Reference, Setting, traced


@dataclass(frozen=True)
class Checked:
    """The numbers of schedules, distinct programs and interleavings that ``check`` has run."""

    schedules: int
    programs: int
    interleavings: int

    def __str__(self) -> str:
        return (
            f"{self.schedules} schedules, {self.programs} distinct programs, {self.interleavings} "
            f"interleavings: each as the serial run, bit for bit"
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

    ``examples`` is an input of each name; they are copied for each run, and never changed. Before
    each run, a serial one with other numbers in them changes what tasks keep from run to run. Default:
    ``policies`` of all kinds, and two that place tasks at random, on ``machines_for(graph)``. Of
    the ``interleavings`` of each program, the first is in modelled order, half of the others favour
    some streams, and the rest are random. All follow from ``seed``, which is also torch's seed for
    tasks.

    Raises InterleavingError, with a report, if a run differs, if two serial runs differ, or if the
    kernels of a fused region differ from its operators, which run, too, in the first three runs;
    HazardError for a task with an undeclared write of an argument; ScheduleError if no policy finds
    a schedule.

    >>> import torch
    >>> graph = Graph()
    >>> x = graph.input("x")
    >>> graph.output(y=x @ x, z=x + 1)
    >>> how = {"examples": {"x": torch.eye(2)}, "policies": ["round_robin"]}
    >>> print(check(graph, Machine.emulated(gpus=2), **how))
    1 schedules, 1 distinct programs, 20 interleavings: each as the serial run, bit for bit
    """
    _check_arguments(graph, examples, policies, interleavings, seed)
    machines = {"machine": machine}
    if machine is None:
        found = enumerate(machines_for(graph))
        machines = {f"asc.testing.machines_for(graph)[{i}]": machine for i, machine in found}
    reference = Reference(Setting(graph.pinned(), examples, seed))
    _check_regions(graph)
    plans = _plans(graph, machines, policies or _POLICIES)
    distinct: dict[Program, _Plan] = {}
    for plan in plans:
        distinct.setdefault(plan.schedule.program, plan)
    for plan in distinct.values():
        for way in _ways(interleavings, seed):
            _try(reference, plan, way, interleavings)
    _check_regions(graph)
    return Checked(len(plans), len(distinct), len(distinct) * interleavings)


def _check_regions(graph: Graph) -> None:
    """Raise InterleavingError if a fused region has not computed what its operators do."""
    for task in graph.tasks:
        if how := getattr(task.fn, "mismatch", None):
            raise InterleavingError(f"task {task.name!r}: {how}")


def _check_arguments(
    graph: Any, examples: Any, policies: Any, interleavings: Any, seed: Any
) -> None:
    """Raise ScheduleError for invalid arguments, and GraphError for missing or unknown examples."""
    is_list = isinstance(policies, (list, tuple, NoneType))
    is_count = type(interleavings) is int and interleavings > 0
    is_seed = type(seed) is int and 0 <= seed < 2**63
    is_mapping = isinstance(examples, Mapping)
    for name, item, fits, what in (
        ("graph", graph, isinstance(graph, Graph), "a Graph"),
        ("examples", examples, is_mapping, "an input of each name, as a mapping"),
        ("policies", policies, is_list, "a list of names and functions"),
        ("interleavings", interleavings, is_count, "a whole number, 1 or more"),
        ("seed", seed, is_seed, "a whole number, 0 to 2**63 - 1"),
    ):
        if not fits:
            raise ScheduleError(f"{name} must be {what}, got {shown(item)}")
    graph.bind(examples)


@dataclass(frozen=True)
class scattered:  # noqa: N801  # policies are functions, and its repr is how users write it
    """Place tasks on random devices in random order, by a seed.

    >>> graph = Graph()
    >>> tasks = [graph.add(int, name=name) for name in "abc"]
    >>> problem = Problem(graph, Machine.emulated(gpus=0))
    >>> {scattered(seed)(problem).order[0] for seed in range(9)} == set("abc")
    True
    """

    seed: int

    def __call__(self, problem: Problem) -> Placement:
        """Return a placement; raise ScheduleError if tasks cannot all be placed."""
        source = random.Random(self.seed)
        possible = Possible(problem)
        missing = [len(before) for before in problem.before]
        ready = [task for task, count in enumerate(missing) if not count]
        placed = [0] * len(missing)
        order = list[int]()
        while ready:
            task = ready.pop(source.randrange(len(ready)))
            devices = list(possible.devices(task))
            source.shuffle(devices)
            placed[task] = possible.settle(task, devices)
            order.append(task)
            for user in problem.graph.users[task]:
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
        return problem.placement(placed, order)


def machines_for(graph: Graph) -> list[Machine]:
    """Return machines of 0 to 4 GPUs, and of the devices that constraints name.

    Each has one or three compute streams per device, and storage if the graph reads files.

    >>> [len(machine.devices) for machine in machines_for(Graph())][::4]
    [1, 2, 3, 5]
    """
    named = [value.home for value in graph.sources]
    named += [task.device for task in graph.tasks if task.device != HOST and not task.reads_file]
    read = [str(task.device) for task in graph.tasks if task.reads_file]
    disks = dict.fromkeys("disk:0" if name == STORAGE else name for name in read)
    for task in graph.tasks:
        named += task.seconds if isinstance(task.seconds, Mapping) else ()
    found = []
    for gpus, contention, streams in product((0, 1, 2, 4), (True, False), (1, 3)):
        gpu_names = (f"cuda:{i}" for i in range(gpus))
        names = list(dict.fromkeys(["cpu", *gpu_names, *filter(None, named)]))
        links = [Link(a, b, *LINKS["pcie4"]) for i, a in enumerate(names) for b in names[i + 1 :]]
        devices = [Device(name, streams) for name in names]
        machine = Machine(devices, links, contention=contention, imagined=True)
        for disk in disks:
            machine = machine.with_storage(LINKS["pcie4"][0], name=disk)
        found.append(machine)
    return found


_RANDOM = (scattered(0), scattered(1))
_POLICIES: list[str | Policy] = ["auto", "single", "round_robin", "heft", *_RANDOM]


class _Plan(NamedTuple):
    """A schedule, and the code with which the user gets its machine and policy again."""

    machine: str
    policy: str | Policy
    schedule: Schedule


def _plans(
    graph: Graph, machines: Mapping[str, Machine | None], policies: Sequence[str | Policy]
) -> list[_Plan]:
    """Return a schedule for each machine and policy, except where the policy finds none.

    Raises ScheduleError if none finds any.
    """
    plans: list[_Plan] = []
    errors: list[ScheduleError] = []
    for (name, machine), policy in product(machines.items(), policies):
        try:
            plans.append(_Plan(name, policy, schedule(graph, machine, policy=policy)))
        except ScheduleError as error:
            errors.append(error)
    if errors and not plans:
        raise errors[0]
    return plans


# ---- one run


class _Way(NamedTuple):
    """A kind of interleaving: modelled order, contrary or uniform."""

    name: str
    seed: int

    def choose(self) -> Choose | None:
        """Return the choice of streams for a run."""
        kinds = {"contrary": contrary, "uniform": uniform}
        return kinds[self.name](self.seed) if self.name else None

    def __str__(self) -> str:
        return f"Virtual(asc.testing.{self.name}({self.seed}))" if self.name else "Virtual()"


def _ways(interleavings: int, seed: int) -> list[_Way]:
    """Return the modelled order, then contrary ones, then random ones."""
    half = interleavings // 2 + 1
    names = ["", *["contrary"] * (half - 1), *["uniform"] * (interleavings - half)]
    return [_Way(name, seed + i) for i, name in enumerate(names)]


def _try(reference: Reference, plan: _Plan, way: _Way, interleavings: int) -> None:
    """Run a schedule in one interleaving.

    Raises InterleavingError if the result differs from the serial run.
    """
    made = plan.schedule
    traces = dict[str, int]()
    seconds = durations(made.program, made.problem)
    graph = traced(made.graph, traces)
    setting = reference.setting
    left, error = attempt(setting, made.program, graph, made.machine, way.choose(), seconds)
    difference = _difference(reference, left, error)
    if difference is not None:
        culprit = reference.first_difference(traces)
        report = _report(reference, plan, way, interleavings, difference, culprit)
        raise InterleavingError(report) from error


def _difference(
    reference: Reference, left: Mapping[str, Any], error: AutoschedError | None
) -> str | None:
    """Return how a run differs from the serial one, or its error; None if it is equal."""
    if error is not None:
        return f"raises {type(error).__name__}: {error}"
    for what, expected in reference.results.items():
        found = difference(expected, left[what])
        if found is not None:
            return f"{what} {found}"
    return None


# ---- the report

_MOST_LINES = 80
_CAUSES = """\
Likely causes: a task draws random numbers without random=True; it changes what is no argument of
its own, such as a list, a cache or a tensor of a closure; its result shares memory with an argument
that aliases= does not name."""


def _report(
    reference: Reference,
    plan: _Plan,
    way: _Way,
    interleavings: int,
    difference: str,
    culprit: Task | None,
) -> str:
    made = plan.schedule
    policy = _policy_code(plan.policy)
    task = "none"
    if culprit is not None:
        device = made.placement.device[culprit.name]
        task = f"{culprit.name!r} on {device}, added at {culprit.source}"
    lines = [
        f"graph {made.graph.name!r} does not do what its serial run does: {difference}",
        "",
        f"  first task that differs   {task}",
        f"  machine                   {_described(made.machine)}",
        f"  policy                    {policy}",
        f"  interleaving              backend={way}",
        f"  again                     asc.testing.check(graph, {plan.machine}, examples=examples, "
        f"policies=[{policy}], interleavings={interleavings}, seed={reference.setting.seed})",
        "",
        _CAUSES,
        "",
    ]
    program = str(made.program).splitlines()
    if len(program) > _MOST_LINES:
        program[_MOST_LINES:] = [f"... and {len(program) - _MOST_LINES} lines more"]
    return "\n".join([*lines, *program])


def _policy_code(policy: str | Policy) -> str:
    """Return the code with which the user would write a policy."""
    if isinstance(policy, scattered):
        return f"asc.testing.{policy}"
    return repr(policy) if isinstance(policy, str) else getattr(policy, "__name__", "yours")


def _described(machine: Machine) -> str:
    devices = ", ".join(f"{device.name} ({device.streams})" for device in machine.devices)
    copies = "queue" if machine.contention else "do not queue"
    return f"{devices}, with so many compute streams; copies {copies}"
