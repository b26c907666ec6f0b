"""Fuse the tasks of a graph into regions that Inductor compiles.

1. Determine the tasks that can be fused, from a plan of the graph without fusion.
2. Form candidates: the regions of this plan's streams, and one region per device. On a CPU of
   several streams, 2, 4, ... of them, each with its part of the threads. Estimate each.
3. On a real machine, with examples: compile the regions of those that may be the fastest, and measure
   all tasks.
4. There, run the schedules of the candidates and of the graph without fusion in turns, and take the
   fastest. Otherwise take the shortest prediction.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch

from autosched._lib.gc_pause import without_collecting
from autosched._lib.tree import flatten, transform
from autosched.coarsening import carried, merged
from autosched.codegen.composite import Composite
from autosched.costs.costs import Costs
from autosched.costs.estimate import Estimate, estimate
from autosched.errors import ScheduleError
from autosched.fusion.candidates import (
    by_device,
    by_stream,
    reads_numbers,
    unfusable,
    wait_seconds,
)
from autosched.fusion.inductor import unavailable
from autosched.fusion.region import Compiler, Region
from autosched.graph.graph import Graph
from autosched.graph.including import with_seconds
from autosched.graph.task import Seconds, Task
from autosched.graph.value import Value
from autosched.lowering.resident_state import keepable, keeping
from autosched.machine.machine import Device, Machine, given_or_local
from autosched.measurement import measure_costs
from autosched.measurement.hardware import intra_op_threads, torch_device
from autosched.measurement.stopwatch import synchronize
from autosched.measurement.tasks import preserved_random_state, work_of
from autosched.placement import Placement
from autosched.policies import Policy
from autosched.problem import Problem
from autosched.program.program import Program, Wait
from autosched.scheduling.arguments import check_arguments
from autosched.scheduling.planning import planned, schedule
from autosched.scheduling.progress_bar import counting
from autosched.scheduling.schedule import Schedule

F = TypeVar("F", bound=Graph | Schedule)

_LEAST_GAIN = 0.02  # of the predicted makespan, for which more than one candidate is compiled


def fuse(
    graph: F,
    machine: Machine | None = None,
    costs: Costs | None = None,
    *,
    policy: str | Policy = "auto",
    examples: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    compiler: Compiler | None = None,
    **options: Any,
) -> F:
    """Return the graph with regions of tasks fused, each compiled by Inductor into one task.

    A region has no waits inside and runs on one device. In-place writes remain in place. Results
    equal those of the fused graph's ``run_serial`` bit for bit; compared with the graph itself,
    they differ by rounding. In runs 1, 2, 3, 10, 100 and 1,000 for each kind of arguments, and when a
    number gets another sign, the operators run, too, on copies of what they write: a region whose
    results differ from theirs is not fused any more, a RuntimeWarning says so, and the operators'
    results count. ``not_fused`` of the graph, and of its schedules, has by task why it is not fused:
    random operators, for example, and results whose sizes depend on data. Python functions are
    traced: what they do apart from operators on tensors happens once. As under ``torch.compile``, an
    error in a kernel, such as an index out of range, is a RuntimeError, and ends the process if the
    kernel has several threads.

    ``machine``, ``costs``, ``policy`` and ``options`` are those of ``schedule``. ``examples`` are
    inputs by name, by default those of the capture. With examples and a real machine, regions are
    compiled now, all tasks are measured, and the fastest of several fused graphs is returned, or
    the graph itself if none is faster; its tasks have the measured seconds. On a CPU of several
    streams, also fewer of them are tried; a schedule that is fused keeps the best number. Otherwise
    regions are compiled when they are first called. Unless ``progress`` is False, a line on stderr
    says how far compiling is, if it takes seconds. ``compiler`` takes the place of Inductor: a
    function of a graph module and example tensors that returns a function of such tensors, as
    backends of ``torch.compile`` do; that returns all results, and writes what the graph writes.

    A schedule instead of a graph is returned with regions fused: tasks stay on their devices, in
    their order.

    Without Inductor, a C++ compiler or Triton, nothing is fused, with a warning. Raises ScheduleError
    for a machine of several ranks.

    >>> import autosched as asc, torch
    >>> graph = asc.Graph()
    >>> graph.output(y=(graph.input("x") + 1) * 2)
    >>> [task.name for task in fuse(graph, asc.Machine.emulated(gpus=1)).tasks]
    ['add+1']
    """
    check_arguments(examples=examples, progress=progress)
    if isinstance(graph, Schedule):
        given = options | {"machine": machine, "costs": costs}
        if policy != "auto" or any(item is not None for item in given.values()):
            raise ScheduleError(
                "fuse keeps the machine, costs and plan of a schedule, and takes no options of "
                "schedule() then: give them to schedule()"
            )
        own = graph.problem.original or graph.problem
        return cast(
            F, _Fusion(own.graph, graph, None, examples, progress, compiler).best().schedule
        )
    options |= {"policy": policy, "progress": progress, "compiler": compiler}
    return cast(F, fused(graph, machine, costs, examples=examples, **options).graph)


def fused(
    graph: Graph,
    machine: Machine | None,
    costs: Costs | None,
    *,
    policy: str | Policy = "auto",
    examples: Mapping[str, Any] | None,
    progress: bool | None = None,
    compiler: Compiler | None = None,
    **options: Any,
) -> Fused:
    """Return the fused graph with its schedule: ``fuse`` has the options."""
    machine = given_or_local(machine)
    check_one_process(machine)
    given = getattr(graph, "examples", None) if examples is None else examples
    known = estimate(graph, given) if given else Estimate(Costs(), {})
    if costs is None:
        known.warn(graph)
        costs = known.costs
    plain = schedule(graph, machine, policy=policy, costs=costs, **options)
    search = policy, options.get("seconds"), options.get("seed", 0)
    return _Fusion(graph, plain, search, given, progress, compiler, known.unknown).best()


def check_one_process(machine: Machine | None) -> None:
    """Raise ScheduleError for a machine of several ranks."""
    if machine is not None and machine.ranks:
        raise ScheduleError(
            "regions are compiled for one process, and this machine has several ranks; leave out "
            "fuse="
        )


class Fused(NamedTuple):
    """A fused graph and its schedule, with the groups of tasks that were asked for, by name.

    Its regions use so many ``threads``.
    """

    graph: Any
    schedule: Schedule
    groups: Mapping[str, str] = {}
    threads: int = 1


class _Fusion:
    """The fusion of a graph that has a plan: ``plain``.

    ``search`` is a policy, with the seconds and the seed of its search; without one, or if it is a
    function that may know the tasks of this graph alone, tasks stay on their devices, in their order.
    """

    def __init__(
        self,
        graph: Any,
        plain: Schedule,
        search: tuple[str | Policy, float | None, int] | None,
        examples: Mapping[str, Any] | None,
        progress: bool | None,
        compiler: Compiler | None,
        unknown: Mapping[str, str] | None = None,
    ):
        check_one_process(plain.machine)
        self.graph = graph
        self.plain = plain
        self.machine = plain.machine
        problem = plain.problem.original or plain.problem  # without tasks that are repeated
        self.costs = problem.costs
        self.examples = examples or {}
        self.progress = progress
        self.compiler = compiler
        self.is_measured = self._can_run()
        self.search: tuple[str | Policy, float | None, int] = _following(plain.placement), None, 0
        if search is not None and isinstance(search[0], str):
            self.search = search
        asked = problem.constraints
        inputs = {name: at for name, at in asked.inputs.items() if name not in asked.resident}
        self.problem = problem.constrained(inputs=inputs, resident=())
        self.place = {name: device for name, device in asked.place.items() if device}
        # 1. The tasks that can be fused
        floats = [v.index for v in graph.sources if type(self.examples.get(v.name)) is float]
        self.reasons = unfusable(graph, (unknown or {}) if examples else None, floats, self.place)

    def unfused(self, machine: Machine, why: str | None = None) -> Fused:
        """Return a copy of the graph without regions, for one reason or several."""
        copy = merged(self.graph, {})
        tasks = (task.name for task in self.graph.tasks if not task.view)
        copy.not_fused = self.reasons if why is None else dict.fromkeys(tasks, why)
        return Fused(copy, self._scheduled(copy, machine))

    def best(self) -> Fused:
        """Return the best fused graph, or one without regions."""
        devices = map(self.machine.device, self.machine.here)
        kinds = ["cpu"] if self.machine.imagined else [device.kind for device in devices]
        missing = map(unavailable, dict.fromkeys(kinds)) if self.compiler is None else ()
        if why := next(filter(None, missing), None):
            what = f"graph {self.graph.name!r} is not fused: {why}"
            warnings.warn(what, RuntimeWarning, stacklevel=4)
            return self.unfused(self.machine, why)
        # 2. Candidates
        plain = [Fused(self.graph, self.plain)]
        if self.is_measured:
            plain = list(map(self.unfused, _with_streams(self.machine)))
        planned = list(self._planned([made.schedule for made in plain]))
        seconds = [_with_waits(made.schedule) for made in planned]
        if not planned or not self.is_measured:
            least = min(seconds, default=math.inf)
            if _with_waits(self.plain) < least:
                return self.unfused(self.machine)
            return planned[seconds.index(least)]
        # 3. Compile, compare and measure
        most = (1 - _LEAST_GAIN) * seconds[0]
        pairs = zip(planned[1:], seconds[1:], strict=True)
        chosen = [planned[0], *(made for made, taken in pairs if taken < most)]
        with self._shown(chosen) as done:
            found = [self._measured(made, done) for made in chosen]
        measured = [*filter(None, found), *plain]
        # 4. Run in turns
        taken = run_times([made.schedule for made in measured], self.examples)
        for made in measured:
            made.schedule.close()
            for region in _regions(made.graph):
                region.begin_to_compare()
        fastest = measured[taken.index(min(taken))]
        return fastest._replace(schedule=replace(fastest.schedule))  # one that is not closed

    @without_collecting()
    def _scheduled(self, graph: Graph, machine: Machine) -> Schedule:
        """Return a plan by the same constraints; one that is timed uses all streams of a CPU."""
        costs = self.costs.restricted(graph)
        if self.is_measured:
            cpus = (device.name for device in machine.devices if not device.is_accelerator)
            nothing = dict.fromkeys(cpus, 0.0)
            costs = replace(costs, shares=dict.fromkeys((t.name for t in graph.tasks), nothing))
        own = replace(self.problem, graph=graph.snapshot(), machine=machine, costs=costs)
        running = self.plain.backend, self.plain.check
        return planned(keeping(own, keepable(own)), *self.search, None, running)

    def _planned(self, plain: Sequence[Schedule]) -> Iterator[Fused]:
        """Yield one region per device; and regions of streams, if there are several."""
        groups = by_device(self.graph, self.plain.placement, self._can_fuse)
        made = self._fused(groups, plain[0].machine, torch.get_num_threads())
        if made is not None:
            yield made
        for own in plain:
            if len(own.program.streams) < 2:
                continue
            threads = _threads(own.program)
            groups = by_stream(self.graph, own.program, self._members, self._seconds)
            made = self._fused(groups, own.machine, threads)
            if made is not None:
                # Groups were split where they need each other.
                groups = by_stream(made.graph, made.schedule.program, self._members, self._seconds)
                yield self._fused(groups, own.machine, threads) or made

    def _can_fuse(self, task: Task) -> bool:
        return task.name not in self.reasons

    def _members(self, task: Task) -> list[Task]:
        """Return the tasks of the graph that a task is, or was merged from, if they can be fused."""
        found = [task] if task.name in self.graph.names else task.parts
        return [part for part in found if not part.view and self._can_fuse(part)]

    def _seconds(self, task: Task, device: str) -> float:
        return self.costs.task_seconds(task, self.machine.device(device))

    def _fused(self, groups: Mapping[str, str], machine: Machine, threads: int) -> Fused | None:
        """Return a graph with regions of what can be fused of these, and its plan; None without any."""
        groups = {name: group for name, group in groups.items() if name not in self.reasons}
        if not groups:
            return None

        def make(composite: Composite) -> tuple[Callable[..., Any], Seconds | None]:
            if any(task.name in self.reasons for task in composite.tasks):
                return composite, None  # a task with the views that it reads
            seconds = {
                device.name: region_seconds(composite, self.graph.values, self.costs, device)
                for device in self.machine.devices
            }
            return Region(composite, threads, self.compiler), seconds

        made = merged(self.graph, groups, make, self._bound(groups))
        made.not_fused = self.reasons
        try:
            fused = Fused(made, self._scheduled(made, machine), groups, threads)
        except ScheduleError:  # regions may be too large for memory, or for a policy's order
            return None
        tight = self._without_room(fused)
        self.reasons.update(tight)
        return self._fused(groups, machine, threads) if tight else fused

    def _without_room(self, made: Fused) -> dict[str, str]:
        """Return the tasks of regions that memory has no room to compare, with the reason."""
        peak = made.schedule.peak_bytes
        found: dict[str, str] = {}
        for task in made.graph.tasks:
            if not isinstance(task.fn, Region):
                continue
            device = self.machine.device(made.schedule.placement.device[task.name])
            # Two copies of what it writes, and its results once more
            uses = [*task.writes, *task.writes, *task.outputs]
            values = [made.graph.values[use.value] for use in uses]
            more = sum(self.costs.nbytes.get(value.name, 0.0) for value in values)
            if more and peak.get(device.name, 0.0) + more > device.nbytes:
                why = f"memory of {device.name} has no room for copies, to compare results"
                found.update((part.name, why) for part in task.parts if not part.view)
        return found

    def _bound(self, groups: Mapping[str, str]) -> dict[str, str]:
        """Return the devices of bound tasks; a group is where one of its tasks is bound."""
        bound: dict[str, str] = {}
        for name, group in groups.items():
            if device := self.place.get(name, self.graph.task(name).device):
                bound.setdefault(group, device)
        return self.place | {name: bound[g] for name, g in groups.items() if g in bound}

    def _can_run(self) -> bool:
        """Whether tasks can be run now without consequences: on examples, and on a real machine."""
        if self.machine.imagined or not self.examples or not isinstance(self.plain.backend, str):
            return False
        held = [value.tensor for value in self.graph.sources]
        changed = [value.tensor for value in _written(self.graph) if value.tensor is not None]
        stateful = torch.Tensor, torch.nn.Module, torch.optim.Optimizer
        return not (
            changed
            or any(isinstance(item, torch.Generator) for item in held)
            or any(isinstance(item, stateful) for task in self.graph.tasks for item in task.shared)
        )

    def _measured(self, made: Fused | None, done: Callable[[], None]) -> Fused | None:
        """Return a fused graph with measured seconds for all tasks.

        Tasks whose regions cannot be compiled, or compute something else, are not fused.
        """
        while made is not None:
            _, own, groups, threads = made
            regions = _regions(made.graph)
            for region in regions:
                region.when_tried = done
            with intra_op_threads(threads), preserved_random_state(self.machine):
                own(**copied(own, self.examples))
            failed = [region for region in regions if region.failure is not None]
            if not failed:
                break
            own.close()
            for region in failed:  # what uses numbers is to blame, or else all
                tasks = reads_numbers(region.composite.tasks) or region.composite.tasks
                self.reasons.update((task.name, region.failure or "") for task in tasks)
            made = self._fused(groups, own.machine, threads)
        if made is None:
            return None
        for region in regions:
            region.compares = False
        with intra_op_threads(threads), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of disturbed timings, for estimates
            one = self.machine.with_one_stream  # with the threads of a stream, as they are
            found = measure_costs(made.graph, one, self.examples, repeat=3)
        own.close()
        graph = with_seconds(made.graph, found.seconds)
        return Fused(graph, self._scheduled(graph, own.machine))

    def _shown(self, chosen: Sequence[Fused]) -> AbstractContextManager[Callable[[], None]]:
        """Enter with a function that says on stderr that one more region is compiled."""
        if self.progress not in (None, True):
            return nullcontext(lambda: None)
        sizes = [len(r.composite.tasks) for made in chosen for r in _regions(made.graph)]
        sooner = "with one stream" if len(chosen) > 1 else "if Inductor's cache is kept"
        return counting(f"fusing {self.graph.name!r}", "regions", sizes, sooner)


def _regions(graph: Graph) -> list[Region]:
    return [task.fn for task in graph.tasks if isinstance(task.fn, Region)]


def _with_waits(made: Schedule) -> float:
    """Return the predicted seconds, with the waits of the stream that has most: plans have none."""
    waits = Counter(i.stream for i in made.program if isinstance(i, Wait))
    seconds = (count * wait_seconds(stream.device) for stream, count in waits.items())
    return made.makespan + max(seconds, default=0.0)


def _following(placement: Placement) -> Policy:
    """Return the policy that puts merged tasks where their parts are, in the order of these."""

    def following(problem: Problem) -> Placement:
        return carried(problem.graph, placement)

    return following


def _written(graph: Graph) -> list[Value]:
    """Return the sources of a graph that tasks write."""
    return [
        value for value in graph.sources if any(map(graph.last_version, graph.members(value.index)))
    ]


def _threads(program: Program) -> int:
    """Return the share of torch's threads that each CPU stream has that computes."""
    streams = [s for s in program.streams if s.name.startswith("compute")]
    count = sum(stream.device.startswith("cpu") for stream in streams)
    return max(1, torch.get_num_threads() // max(1, count))


def _with_streams(machine: Machine) -> Iterator[Machine]:
    """Yield a machine of one CPU with 1, 2, 4, ... streams, and all; others as they are."""
    cpu, *others = machine.devices
    if others or cpu.streams == 1:
        yield machine
        return
    count = 1
    while count < cpu.streams:
        yield replace(machine, devices=(replace(cpu, streams=count),))
        count *= 2
    yield machine


# ---- seconds of a region before it is compiled
#
# Inductor calls the library's kernel for a matrix product, a convolution or attention, as eager mode
# does, and fuses the other operators around it. So the estimate keeps the time of operators that
# compute more than they move. The others save the bytes that stay inside the region, and all launches
# but one for each kernel of a library.


def region_seconds(
    composite: Composite, values: Sequence[Value], costs: Costs, device: Device
) -> float:
    """Return the seconds of a region on a device; ``values`` are those of its tasks' graph."""
    tasks = [task for task in composite.tasks if not task.view]
    work = {task.index: work_of(task, costs) for task in tasks}
    # Elementwise operators compute at most one operation per byte.
    heavy = [t for t in tasks if (found := work[t.index]) and found.flops > found.nbytes]
    light = [task for task in tasks if task not in heavy]
    launched = sum(max(1, len(task.operators)) for task in light)
    before = sum(costs.task_seconds(task, device) for task in light)
    busy = max(0.0, before - device.launch_seconds * launched)
    launches = device.launch_seconds * min(launched, len(heavy) + 1)
    moved = [0.0 if (found := work[task.index]) is None else found.nbytes for task in light]
    part = 1.0
    if all(moved) and moved:
        part = min(1.0, _outside(composite, light, values, costs) / sum(moved))
    rest = sum(costs.task_seconds(task, device) for task in heavy)
    return rest + min(before, launches + busy * part)


def _outside(
    composite: Composite, light: Sequence[Task], values: Sequence[Value], costs: Costs
) -> float:
    """Return the bytes that these tasks of a region read from others, or make for others."""
    own = {task.index for task in light}
    made = {use.value for task in light for use in task.outputs}
    read = {use.value for task in light for use in task.reads} - made
    others = (task for task in composite.tasks if task.index not in own)
    needed = {use.value for task in others for use in task.reads} | set(composite.gives)
    written = {use.value for task in light for use in task.writes}
    moved = [*read, *(made & needed), *written]
    return sum(costs.nbytes.get(values[value].name, 0.0) for value in moved)


# ---- schedules compared by running them

_TURNS = 3
_RUNS = 9  # in a turn
_LONGEST = 0.3  # seconds of timed runs in a turn; at least one is timed
# Seconds of runs before those of a turn are timed. Threads of OpenMP that the schedule before used
# wait actively for milliseconds; 17 after a turn of theirs, each of two streams has a core again.
_SETTLING = 0.03


def run_times(schedules: Sequence[Schedule], inputs: Mapping[str, Any]) -> list[float]:
    """Return the least seconds of a run of each schedule; ``inputs`` stay as they are.

    The schedules are of graphs with the same inputs, for one real machine. They take turns, so that
    a change of the machine's speed affects all of them; runs of a turn are timed when caches and
    threads are as they are in a loop. Each run begins with the same inputs: a counter of positions,
    for example, would leave its cache.
    """
    machine = schedules[0].machine
    devices = list(dict.fromkeys(map(torch_device, machine.devices)))
    copies = [copied(made, inputs) for made in schedules]
    times: list[list[float]] = [[] for _ in schedules]

    def run(made: Schedule, given: Mapping[str, Any]) -> float:
        with torch.no_grad():
            for name, item in given.items():
                for leaf, before in zip(flatten(item), flatten(inputs[name]), strict=True):
                    if leaf is not before:
                        leaf.copy_(before)
        synchronize(*devices)
        start = time.perf_counter()
        made(**given)
        synchronize(*devices)
        return time.perf_counter() - start

    with preserved_random_state(machine):
        for _ in range(_TURNS):
            for made, given, found in zip(schedules, copies, times, strict=True):
                begun = time.perf_counter()
                run(made, given)
                while time.perf_counter() - begun < _SETTLING:
                    run(made, given)
                begun = time.perf_counter()
                for _ in range(_RUNS):
                    found.append(run(made, given))
                    if time.perf_counter() - begun > _LONGEST:
                        break
    return [min(found) for found in times]  # what disturbs a run makes it longer


def copied(made: Schedule, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a run, with copies of what tasks write."""
    written = {value.name for value in _written(made.graph)}
    return {
        name: transform(_copy, item) if name in written else item for name, item in inputs.items()
    }


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # Regions are compiled for arguments that require gradients, or do not.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad and leaf.is_leaf)
