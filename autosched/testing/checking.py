"""Check a graph under many machines, policies and interleavings.

Each run must equal the serial run of the graph. ``verify`` proves that a program keeps the order
of the accesses that tasks declare; undeclared accesses show only when tasks run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import NoneType
from typing import Any, NamedTuple

import torch

from autosched._lib.allowed import is_whole
from autosched._lib.tree import flatten, match
from autosched.errors import AutoschedError, InterleavingError, ScheduleError, shown
from autosched.graph.effects import is_uninitialized
from autosched.graph.graph import HOST, STORAGE, Graph, Task, Value
from autosched.machine.machine import LINKS, Device, Link, Machine
from autosched.placement import Placement
from autosched.policies import Policy
from autosched.policies.base.possible import Possible
from autosched.problem import Problem
from autosched.program.program import Program
from autosched.runtime.backends.host import copy_in_host_memory
from autosched.runtime.backends.virtual import Virtual
from autosched.runtime.check import Watcher
from autosched.runtime.execute import Executor
from autosched.runtime.threads.interleaver import Choose
from autosched.scheduling.arguments import check_arguments, checked_count
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule
from autosched.simulation.simulate import durations
from autosched.testing.comparing import bits, difference


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
    check_arguments(graph=graph)
    checked_count(interleavings, "interleavings", 1)
    is_mapping = isinstance(examples, Mapping)
    is_list = isinstance(policies, (list, tuple, NoneType))
    is_seed = is_whole(seed) and 0 <= seed < 2**63
    for name, item, fits, what in (
        ("examples", examples, is_mapping, "an input of each name, as a mapping"),
        ("policies", policies, is_list, "a list of names and functions"),
        ("seed", seed, is_seed, "a whole number, 0 to 2**63 - 1"),
    ):
        if not fits:
            raise ScheduleError(f"{name} must be {what}, got {shown(item)}")
    graph.bind(examples)
    machines = {"machine": machine}
    if machine is None:
        found = enumerate(machines_for(graph))
        machines = {f"asc.testing.machines_for(graph)[{i}]": machine for i, machine in found}
    reference = Reference(Setting(graph.snapshot(), examples, seed))
    _check_regions(graph)
    count = 0
    distinct: dict[Program, _Plan] = {}
    errors: list[ScheduleError] = []
    for (name, where), policy in product(machines.items(), policies or _POLICIES):
        try:
            made = schedule(graph, where, policy=policy)
        except ScheduleError as error:
            errors.append(error)
        else:
            count += 1
            distinct.setdefault(made.program, _Plan(name, policy, made))
    if errors and not distinct:
        raise errors[0]
    for plan in distinct.values():
        for way, choose in _ways(interleavings, seed):
            _try(reference, plan, way, choose, interleavings)
    _check_regions(graph)
    return Checked(count, len(distinct), len(distinct) * interleavings)


def _check_regions(graph: Graph) -> None:
    """Raise InterleavingError if a fused region has not computed what its operators do."""
    for task in graph.tasks:
        if how := getattr(task.fn, "mismatch", None):
            raise InterleavingError(f"task {task.name!r}: {how}")


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


def _ways(interleavings: int, seed: int) -> Iterator[tuple[str, Choose | None]]:
    """Yield the modelled order, then contrary choices of streams, then random ones, with their code."""
    yield "Virtual()", None
    for i in range(1, interleavings):
        kind = contrary if i <= interleavings // 2 else uniform
        yield f"Virtual(asc.testing.{kind.__name__}({seed + i}))", kind(seed + i)


def _try(
    reference: Reference, plan: _Plan, way: str, choose: Choose | None, interleavings: int
) -> None:
    """Run a schedule in one interleaving; raise InterleavingError if the result differs."""
    made = plan.schedule
    traces = dict[str, int]()
    seconds = durations(made.program, made.problem)
    graph = traced(made.graph, traces)
    left, error = attempt(reference.setting, made.program, graph, made.machine, choose, seconds)
    differences = (
        f"{what} {found}"
        for what, expected in reference.results.items()
        if error is None and (found := difference(expected, left[what])) is not None
    )
    how = next(differences, None) if error is None else f"raises {type(error).__name__}: {error}"
    if how is not None:
        culprit = reference.first_difference(traces)
        raise InterleavingError(
            _report(reference, plan, way, interleavings, how, culprit)
        ) from error


# ---- interleavings


def contrary(seed: int) -> Choose:
    """Return a choice that favours some streams, so that what nothing orders runs far apart."""
    source = random.Random(seed)
    rank: dict[str, float] = {}
    return lambda ready: max(ready, key=lambda name: rank.setdefault(name, source.random()))


def uniform(seed: int) -> Choose:
    """Return a random choice among streams that can continue, for the backend ``Virtual``."""
    return random.Random(seed).choice


def attempt(
    setting: Setting,
    program: Program,
    graph: Graph,
    machine: Machine,
    choose: Choose | None,
    seconds: Sequence[float] | None = None,
) -> tuple[dict[str, Any], AutoschedError | None]:
    """Run a program once; return its result, or the error that it raises."""
    executor = Executor(program, graph, machine, Virtual(choose), seconds or [0.0] * len(program))
    try:
        return setting.run(executor), None
    except AutoschedError as error:
        return {}, error
    finally:
        executor.close()


# ---- the report

_MOST_LINES = 80
_CAUSES = """\
Likely causes: a task draws random numbers without random=True; it changes what is no argument of
its own, such as a list, a cache or a tensor of a closure; its result shares memory with an argument
that aliases= does not name."""


def _report(
    reference: Reference,
    plan: _Plan,
    way: str,
    interleavings: int,
    difference: str,
    culprit: Task | None,
) -> str:
    made = plan.schedule
    policy = getattr(plan.policy, "__name__", "yours")
    if isinstance(plan.policy, (str, scattered)):
        policy = repr(plan.policy) if isinstance(plan.policy, str) else f"asc.testing.{plan.policy}"
    devices = ", ".join(f"{device.name} ({device.streams})" for device in made.machine.devices)
    copies = "queue" if made.machine.contention else "do not queue"
    task = "none"
    if culprit is not None:
        device = made.placement.device[culprit.name]
        task = f"{culprit.name!r} on {device}, added at {culprit.source}"
    lines = [
        f"graph {made.graph.name!r} does not do what its serial run does: {difference}",
        "",
        f"  first task that differs   {task}",
        f"  machine                   {devices}, with so many compute streams; copies {copies}",
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


# ---- the serial run, as the expected result
#
# State that tasks change although it is not an input (constants, modules, optimizers) is restored
# after each run.


class Setting:
    """Inputs and a seed, with which a graph is run repeatedly."""

    def __init__(self, graph: Graph, examples: Mapping[str, Any], seed: int):
        self.graph = graph
        self.examples = examples
        self.seed = seed
        self.shared = SharedState(graph)

    def run(
        self, call: Callable[[dict[str, Any]], Mapping[str, Any]], first: bool = False
    ) -> dict[str, Any]:
        """Call with fresh inputs; return the resulting state by name, and restore all else.

        Unless it is the ``first``, a serial run with other inputs precedes it: what tasks keep from
        run to run then differs from what the call leaves, and one that reads it too early is found.
        """
        accelerator = torch.accelerator.current_accelerator()
        kind = "cuda" if accelerator is None else accelerator.type
        count = torch.accelerator.device_count()
        with torch.random.fork_rng(devices=range(count), device_type=kind):
            if not first:
                self._run_with_other_inputs()
            if count:
                torch.manual_seed(self.seed)
            else:  # faster: it seeds the CPU alone
                torch.default_generator.manual_seed(self.seed)
            inputs = copy.deepcopy(dict(self.examples))
            try:
                left = {}
                for name, item in call(inputs).items():
                    # A copy, since an output may be a constant, which is restored.
                    left[f"output {name!r}"] = copy_in_host_memory(item, None)
                left.update((f"input {name!r}", item) for name, item in inputs.items())
                return left | self.shared.copies()
            finally:
                self.shared.restore()

    def _run_with_other_inputs(self) -> None:
        """Run the graph once. Its errors are ignored: tasks may refuse the numbers."""
        inputs = copy.deepcopy(dict(self.examples))
        with torch.no_grad():
            for leaf in filter(torch.is_tensor, flatten(inputs)):
                with contextlib.suppress(RuntimeError):  # of tensors that cannot be written
                    leaf.copy_(_other_numbers(leaf))
        with contextlib.suppress(Exception):
            self.graph.run_serial(**inputs)
        self.shared.restore()


def _other_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind with numbers of the same range."""
    moved = tensor.flatten().roll(1).view(tensor.shape)
    return moved * 0.75 if moved.is_floating_point() or moved.is_complex() else moved


class Reference:
    """The serial run of a graph: its result, and hashes of the results of each task.

    Raises InterleavingError if a second run differs, HazardError if a task has effects that it does
    not declare.

    >>> graph = Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> Reference(Setting(graph, {"x": 1}, seed=0)).results
    {"output 'y'": 2, "input 'x'": 1}
    """

    def __init__(self, setting: Setting):
        self.setting = setting
        self.graph = setting.graph
        self.traces: dict[str, int] = {}
        self.results = self._run(self.traces, first=True)
        again: dict[str, int] = {}
        self._run(again)
        task = self.first_difference(again)
        if task is not None:
            raise InterleavingError(
                f"two serial runs of graph {self.graph.name!r} with the same inputs and seed "
                f"differ, first in task {task.name!r}, added at {task.source}: it is not "
                f"deterministic, keeps state from run to run, or uses random numbers that "
                f"torch.manual_seed does not set"
            )

    def _run(self, traces: dict[str, int], first: bool = False) -> dict[str, Any]:
        graph = traced(watched(self.graph), traces)
        return self.setting.run(lambda inputs: graph.run_serial(**inputs), first)

    def first_difference(self, traces: Mapping[str, int]) -> Task | None:
        """Return the first task whose results differ in another run, of those that ran there."""
        for task in self.graph.tasks:
            if task.name in traces and traces[task.name] != self.traces[task.name]:
                return task
        return None


def traced(graph: Graph, traces: dict[str, int]) -> Graph:
    """Return a copy of a graph whose tasks store a hash of their results and arguments."""

    def call(task: Task, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if not is_uninitialized(fn):
            traces[task.name] = hash(bits((args, kwargs, result)))
        return result

    return _called_by(graph, call)


def watched(graph: Graph) -> Graph:
    """Return a copy whose tasks raise HazardError for undeclared writes, aliases, random numbers.

    All kinds of writes are found, because bytes are compared.
    """
    watcher = Watcher(graph, "bytes", lambda value: False)

    def call(task: Task, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        shape = task.args, task.kwargs
        pairs = zip(flatten(shape), match(shape, (args, kwargs)), strict=True)
        given = {leaf.index: item for leaf, item in pairs if isinstance(leaf, Value)}
        returned: list[Any] = []
        watcher.around(
            task,
            lambda: returned.append(fn(*args, **kwargs)),
            lambda: [given[use.value] for use in task.reads],
            lambda: [item for index, item in task.results(returned[0]) if graph.is_used(index)],
        )()
        return returned[0]

    return _called_by(graph, call)


def _called_by(graph: Graph, call: Callable[..., Any]) -> Graph:
    """Return a copy of a graph in which ``call`` gets each task, its function and the arguments."""

    def changed(task: Task) -> Task:
        if task.fn is None or task.reads_file:  # storage gives what reads to the copy that reads
            return task
        fn = functools.partial(call, task, task.fn)
        return replace(task, fn=functools.update_wrapper(fn, task.fn, updated=()))

    return graph.snapshot(map(changed, graph.tasks))


class SharedState:
    """Saved values of the state that tasks use without reading it as a value.

    >>> graph, total = Graph(), torch.zeros(())
    >>> _ = graph.constant(total, "total").add_(1)
    >>> state = SharedState(graph)
    >>> _ = graph.run_serial(), state.restore()
    >>> total
    tensor(0.)
    """

    def __init__(self, graph: Graph):
        shared = list({id(item): item for task in graph.tasks for item in task.shared}.values())
        written = [v for v in graph.sources if v.tensor is not None and graph.last_version(v.index)]
        self.tensors = [(f"constant {value.name!r}", value.tensor) for value in written]
        for module in shared:
            if isinstance(module, torch.nn.Module):  # submodules are shared items themselves
                kind = type(module).__name__
                buffers = module.named_buffers(recurse=False)
                for name, tensor in (*module.named_parameters(recurse=False), *buffers):
                    self.tensors.append((f"{name!r} of a {kind}", tensor))
        known = {id(tensor) for _, tensor in self.tensors}
        for item in shared:
            if hasattr(item, "data_ptr") and id(item) not in known:
                self.tensors.append(("a parameter", item))
        self._saved = [(tensor.detach().clone(), _clone(tensor.grad)) for _, tensor in self.tensors]
        optimizers = [item for item in shared if isinstance(item, torch.optim.Optimizer)]
        self._states = [(item, copy.deepcopy(item.state_dict())) for item in optimizers]

    def restore(self) -> None:
        """Restore everything."""
        with torch.no_grad():
            for (_, tensor), (saved, grad) in zip(self.tensors, self._saved, strict=True):
                tensor.copy_(saved)
                tensor.grad = _clone(grad)
        for optimizer, state in self._states:
            optimizer.load_state_dict(copy.deepcopy(state))

    def copies(self) -> dict[str, Any]:
        """Return copies of the tensors, by name."""
        tensors = enumerate(self.tensors)
        return {f"{what} ({i})": tensor.detach().clone() for i, (what, tensor) in tensors}


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
