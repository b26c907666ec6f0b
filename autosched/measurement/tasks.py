"""Measure the costs of a graph's tasks.

The graph runs serially on one device of each model that the machine has, which stands for all equal
ones. Tasks that were measured on CPUs only get the same costs for all devices: this is what they
take on an emulated machine at least.

A device is measured while it is kept busy: a kernel that sleeps holds it until all of a task is
launched, so that two events measure the kernels, and the host's clock measures the launches.

Runs are whole, and the first one is a warm-up. So each task finds the caches as the previous task
left them, as it will in real runs: that task's results are cached, weights used long before may not
be. A task that is too short for the device's clock is timed many times in a row, with its arguments
in the cache.

A reading beyond the peak performance of any device is taken again, and then rejected.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from autosched._lib.tree import flatten, transform
from autosched.costs.costs import Costs, Work
from autosched.errors import MachineError, ScheduleError
from autosched.graph.graph import Graph, Task, Value, called_with, no_grad
from autosched.machine.machine import Device, Machine
from autosched.measurement.hardware import intra_op_threads, model_name, torch_device
from autosched.measurement.machines import Track
from autosched.measurement.stopwatch import Reading, median, stopwatch
from autosched.problem import Problem
from autosched.runtime.backends.host import as_parameter, copy_in_host_memory
from autosched.scheduling.arguments import checked_count
from autosched.scheduling.planning import mark_pageable

Signature = tuple[Hashable, ...]
Place = Callable[[Task], torch.device]
Call = Callable[[Task, Any, Any, torch.device], Any]  # task, args, kwargs, device -> result
_Measured = Mapping[tuple[Device, ...], Mapping[str, Reading]]
"""By equal devices, the reading of each task that was measured there."""


def measure_costs(
    graph: Graph,
    machine: Machine,
    inputs: Mapping[str, Any] | None = None,
    *,
    repeat: int = 5,
    replay: bool = False,
    track: Track = iter,
) -> Costs:
    """Measure the seconds of tasks on the devices of this machine, and the bytes of values.

    Seconds are medians of ``repeat`` runs; equal calls are measured once, and ``inputs`` stay as
    they are. Tasks whose device is a CPU only because no accelerator is present are measured there,
    and count for every device; on a machine with accelerators, long tasks that an accelerator is
    estimated to do in a tenth of the time keep their estimate for the CPU. Readings that are
    impossible are taken again, then replaced by ``Costs.estimate`` with a warning.

    * ``replay``: seconds of the kernels alone, as where CUDA graphs replay them. Otherwise
      ``Costs.issue`` has the seconds that Python needs to launch a task; if the devices of the
      machine have no ``issue_seconds``, a task takes at least so long instead.
    * Of a CPU with several streams, tasks are measured with all threads, and with those of one
      stream: ``Costs.shares`` tells how much slower a stream is.
    * ``track``: iterates over a sequence and displays the progress, such as ``tqdm.tqdm``.

    Raises MachineError for an emulated machine, and what tasks raise.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> y = graph.input("x") + 1
    >>> 0 < measure_costs(graph, Machine.local(gpus=0), {"x": torch.zeros(9)}).seconds["add"] < 1
    True
    """
    if machine.imagined:
        raise MachineError("an emulated machine has nothing to measure; measure on Machine.local()")
    checked_count(repeat, "repeat", 1)
    inputs = inputs or {}
    known = mark_pageable(Costs.estimate(graph, inputs), graph, machine, inputs)
    make = partial(Bench, graph, machine, inputs, known, repeat=repeat)
    benches = [make(devices) for devices in _device_groups(machine)]
    streams = [(bench.devices, _threads_of_stream(bench.devices)) for bench in benches]
    divided = [make(devices, threads=threads) for devices, threads in streams if threads]
    every = [*benches, *divided]
    with preserved_random_state(machine):
        for bench, run in track([(bench, run) for bench in every for run in range(repeat + 1)]):
            if not bench.is_done(run):
                bench.run(warm=run == 0)
        readings = {bench.devices: bench.accepted_readings() for bench in benches}
        slower = {bench.devices: bench.accepted_readings() for bench in divided}
    for complaint in (complaint for bench in every for complaint in bench.complaints):
        warnings.warn(complaint, stacklevel=3)
    seconds, issue = _tables(graph, machine, known, readings, replay)
    measured = known.override(seconds, benches[0].nbytes)
    measured = replace(measured, issue=issue, shares=_shares(readings, slower))
    measured.check(graph)
    return measured


def _tables(
    graph: Graph, machine: Machine, known: Costs, readings: _Measured, replay: bool
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the seconds of each measured task, by device if there are accelerators; and to issue it.

    Devices without a measurement keep the known seconds, and a task that cannot run on a device
    still cannot. If the machine knows no time of issuing, a task takes as long as it takes to
    launch, at least.
    """
    seconds: dict[str, Any] = {}
    issue: dict[str, float] = {}
    for task in graph.tasks:
        table: dict[str, float] = {}
        for devices, found in readings.items():
            if (reading := found.get(task.name)) is None:
                continue
            taken = reading.seconds
            if not replay and devices[0].has_issuing:
                issue[task.name] = reading.issued
            elif not replay:
                taken = max(taken, reading.issued)
            table |= dict.fromkeys((device.name for device in devices), taken)
        if table and machine.accelerators:
            every = {device.name: known.task_seconds(task, device) for device in machine.devices}
            seconds[task.name] = every | {d: t for d, t in table.items() if every[d] < math.inf}
        elif table:
            seconds[task.name] = table[machine.computing[0]]
    return seconds, issue


def _threads_of_stream(devices: Sequence[Device]) -> int:
    """Return the threads that each of several CPU streams has; 0 if a stream has all threads."""
    streams = max((device.streams for device in devices if device.kind == "cpu"), default=1)
    threads = torch.get_num_threads()
    each = max(1, threads // streams)
    return each if each < threads else 0


def _shares(readings: _Measured, slower: _Measured) -> dict[str, dict[str, float]]:
    """Return by task and CPU the part of the CPU that it takes, from its time with fewer threads.

    With a part of the threads, that part of its seconds takes as many times longer.
    """
    found: dict[str, dict[str, float]] = {}
    for devices, fewer in slower.items():
        times = torch.get_num_threads() / _threads_of_stream(devices)
        for name in fewer.keys() & readings[devices].keys():
            longer = fewer[name].seconds / readings[devices][name].seconds
            share = min(1.0, max(0.0, (longer - 1) / (times - 1)))
            found[name] = dict.fromkeys((device.name for device in devices), share)
    return dict(sorted(found.items()))


def preserved_random_state(machine: Machine) -> contextlib.AbstractContextManager[None]:
    """Restore the state of the random number generators afterwards."""
    if not machine.accelerators:
        return torch.random.fork_rng([])
    found = {device for device in map(torch_device, machine.devices) if device.type != "cpu"}
    kind = next((device.type for device in found), "cuda")
    return torch.random.fork_rng([device.index for device in found], device_type=kind)


def _device_groups(machine: Machine) -> list[tuple[Device, ...]]:
    """Return groups of devices measured as one: all CPUs, or one model."""
    computing = tuple(map(machine.device, machine.computing))
    if not machine.accelerators:
        return [computing]
    groups: dict[str, list[Device]] = {}
    for device in computing:
        groups.setdefault(f"{device.kind} {model_name(torch_device(device))}", []).append(device)
    return [tuple(devices) for devices in groups.values()]


# Seconds that a reading of an accelerator's clock should span, which ticks every half microsecond.
_SHORT = 2e-5
_MOST = 64  # calls in a row
_LONG = 0.02  # longest CPU estimate for a task that is ten times faster on an accelerator
# Readings in which the device waited for the host, after which it is not kept busy any more.
_MISSES = 2


# ---- timed calls


@dataclass
class Readings:
    """The measurements of calls of one signature."""

    task: Task  # the first of them
    issue: float = math.inf  # the least seconds that one took to launch
    calls: int = 1  # in a row, for one reading
    missed: int = 0
    readings: list[Reading] = field(default_factory=list)

    def is_done(self, repeat: int) -> bool:
        """Whether there are enough."""
        clean = sum(reading.clean for reading in self.readings)
        return clean >= repeat or len(self.readings) >= 2 * repeat

    def busy_seconds(self) -> float:
        """Return how long the device is to be kept busy while calls are launched."""
        return 2 * self.issue * self.calls if self.missed < _MISSES else 0.0

    def add(self, reading: Reading, short: bool) -> None:
        """Add a reading, or increase the number of calls that are timed in a row."""
        self.issue = min(self.issue, reading.issued)
        self.missed += not reading.clean
        if short and self.calls == 1 and reading.clean and reading.seconds < _SHORT:
            calls = math.ceil(_SHORT / max(reading.seconds, _SHORT / _MOST))
            self.calls = max(2, min(_MOST, calls))
            reading = reading._replace(clean=False)  # counts if there is no better one
        self.readings.append(reading)


@dataclass
class Bench:
    """The first of some equal devices, and the measurements on it."""

    graph: Graph
    machine: Machine
    inputs: Mapping[str, Any]
    known: Costs
    devices: tuple[Device, ...]
    repeat: int
    threads: int = 0  # of an operator on the CPU; 0: all
    readings: dict[Signature, Readings] = field(default_factory=dict)
    signature: dict[str, Signature] = field(default_factory=dict)  # by task
    nbytes: dict[str, float] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = torch_device(self.devices[0])
        self._bound = Problem(self.graph, self.machine).bound
        self.watch = stopwatch(self.device)

    def is_done(self, run: int) -> bool:
        """Whether nothing remains to be measured in a run after the first one."""
        return run > 0 and all(each.is_done(self.repeat) for each in self.readings.values())

    def run(self, warm: bool = False) -> None:
        """Run the graph serially once, and time what is not yet measured.

        To warm up, measure only the launches.
        """
        call = partial(self._call, warm)
        with intra_op_threads(self.threads or torch.get_num_threads()):
            self.nbytes = run_serially(self.graph, self.inputs, self.device, self._place, call)

    def _elsewhere(self, task: Task) -> str | None:
        """Return where a task runs unmeasured, if it must or takes too long on the device."""
        if not self.machine.accelerators:
            return None
        where = self._bound[task.index]
        if where is None and self.devices[0].kind == "cpu":
            devices = self.machine.devices
            seconds = {device.name: self.known.task_seconds(task, device) for device in devices}
            best = min(self.machine.accelerators, key=seconds.__getitem__)
            if seconds[self.devices[0].name] > max(_LONG, 10 * seconds[best]):
                return best
        return None if where in {device.name for device in self.devices} else where

    def _place(self, task: Task) -> torch.device:
        where = self._elsewhere(task)
        return self.device if where is None else torch_device(self.machine.device(where))

    def _call(self, warm: bool, task: Task, args: Any, kwargs: Any, where: torch.device) -> Any:
        """Call a task's function, and time it if a measurement is missing."""
        assert task.fn is not None
        call = partial(task.fn, *args, **kwargs)
        is_possible = self.known.task_seconds(task, self.devices[0]) < math.inf
        if task.view or self._elsewhere(task) or not is_possible:
            return call()
        signature = signature_of(task.fn, args, kwargs)
        self.signature[task.name] = signature
        measured = self.readings.setdefault(signature, Readings(task))
        # A task that writes, or keeps a state, may do other work when it is called again.
        repeatable = not (task.writes or task.shared)
        if measured.is_done(self.repeat) or (measured.calls > 1 and not repeatable):
            return call()
        busy = 0.0 if warm else measured.busy_seconds()
        reading, returned = self.watch.time([call] * measured.calls, busy)
        if warm:
            measured.issue = min(measured.issue, reading.issued)
        else:
            measured.add(reading, short=repeatable and self.device.type != "cpu")
        return returned

    # ---- accepted readings

    def accepted_readings(self) -> dict[str, Reading]:
        """Return the reading of each measured task.

        An impossible reading is taken again; if it still is impossible, it is reported and left out.
        """
        odd = [key for key, each in self.readings.items() if self._objection(each)]
        for signature in odd:
            before = self.readings[signature]
            self.readings[signature] = Readings(before.task, before.issue)
        for number in range(self.repeat if odd else 0):
            if not self.is_done(number + 1):
                self.run()
        why = {signature: self._objection(each) for signature, each in self.readings.items()}
        self.complaints += [f"{what}; it is left as estimated" for what in why.values() if what]
        medians = {
            name: median(self.readings[key].readings) for name, key in self.signature.items()
        }
        return {
            name: reading
            for name, reading in medians.items()
            if reading is not None and not why[self.signature[name]]
        }

    def _objection(self, measured: Readings) -> str | None:
        """Return why a reading is impossible, if it is."""
        if (reading := median(measured.readings)) is None:
            return None
        device = self.devices[0]
        why = objection(reading.seconds, least_work(measured.task, self.known), device)
        took = f"task {measured.task.name!r} took {reading.seconds:.3g} s on {device.name}"
        return why and f"{took}, which {why}"


# ---- impossible readings

FAST = 10  # times a device's peak: beyond is no measurement of work that was done

# Rates of the fastest existing devices, in FLOP and bytes per second. Rates of a machine may be
# rough defaults.
_PEAKS = {"cpu": (1e13, 1e12)}
_ACCELERATOR = 1e15, 1e13


def objection(seconds: float, work: Work | None, device: Device) -> str | None:
    """Return why it is impossible that a task with this work took these seconds, or None.

    >>> objection(1e-9, Work(flops=2e12, nbytes=0), Device("cuda:0"))
    'would be 2,000,000 times the peak of such a device'
    """
    if not 0 <= seconds < math.inf:
        return "is no time"
    if work is None:
        return None
    flops, nbytes = _PEAKS.get(device.kind, _ACCELERATOR)
    flops, nbytes = max(flops, device.flops_per_second), max(nbytes, device.bytes_per_second)
    least = max(work.flops / flops, work.nbytes / nbytes)  # at the peak
    if seconds == 0:
        return "is no time for work" if least else None
    if least > FAST * seconds:
        return f"would be {least / seconds:,.0f} times the peak of such a device"
    return None


def least_work(task: Task, costs: Costs) -> Work | None:
    """Return the work that a task does at least: kernels of a region keep what stays inside it."""
    work = work_of(task, costs)
    is_region = task.composite is not None and task.fn is not task.composite
    return Work(work.flops, 0) if is_region and work else work


def work_of(task: Task, costs: Costs) -> Work | None:
    """Return the work of a task and its parts; None if unknown."""
    if not task.parts:
        return Work(0, 0, 0) if task.view else costs.work.get(task.name)
    parts = [work_of(part, costs) for part in task.parts]
    known = [part for part in parts if part is not None]
    flops, nbytes = sum(part.flops for part in known), sum(part.nbytes for part in known)
    total = Work(flops, nbytes, sum(part.launches for part in known))
    return total if len(known) == len(parts) else None


# ---- a serial run on one device


def run_serially(
    graph: Graph, inputs: Mapping[str, Any], device: torch.device, place: Place, call: Call
) -> dict[str, float]:
    """Run the tasks one by one, and return the bytes of values.

    Values are on ``device``, and tasks run where ``place`` says: elsewhere on copies, and what they
    write is copied back. Inputs and constants are copied when they are first needed, so the caller's
    remain unchanged. Values are dropped after their last use. Raises GraphError for missing or
    unknown inputs, ScheduleError for a task without a function, and what a task raises, with a note
    that names it.
    """
    data = graph.bind(inputs)
    given = set(data)
    used = []  # by each task: what it is called with, and what it makes
    for task in graph.tasks:
        leaves = flatten((task.args, task.kwargs))
        own = [leaf.index for leaf in leaves if isinstance(leaf, Value)]
        used.append([*own, *(use.value for use in task.outputs)])
    last = {value: index for index, values in enumerate(used) for value in values}
    nbytes: dict[str, float] = {}
    with no_grad():
        for task in graph.tasks:
            for value in used[task.index]:
                if value in given:
                    given.remove(value)
                    data[value] = transform(lambda leaf: _copied(leaf, device), data[value])
                    _add_nbytes(graph.values[value], data[value], nbytes)
            results = _run(task, data, device if task.view else place(task), call)
            data.update(results)
            for value, made in results.items():
                _add_nbytes(graph.values[value], made, nbytes)
            for value in used[task.index]:
                if last[value] == task.index:
                    data.pop(value, None)
    return nbytes


def _run(task: Task, data: Mapping[int, Any], where: torch.device, call: Call) -> dict[int, Any]:
    """Run a task; return its results by the index of their value."""
    if task.fn is None:
        raise ScheduleError(f"task {task.name!r} has no function: it can be planned, not measured")
    moved: list[tuple[Any, Any]] = []

    def bring(leaf: Any) -> Any:
        if task.view or not isinstance(leaf, torch.Tensor) or leaf.device == where:
            return leaf
        moved.append((leaf, as_parameter(leaf.detach().to(where), leaf)))
        return moved[-1][1]

    try:
        args, kwargs = transform(bring, called_with(task, data, where))
        returned = call(task, args, kwargs, where)
        results = dict(task.results(returned))
    except Exception as error:
        error.add_note(f"in task {task.name!r}, added at {task.source}")
        raise
    for here, there in moved if task.writes else ():
        here.copy_(there)
    # A task that returns its argument returns the original.
    own = {id(there): here for here, there in moved}
    return {
        index: transform(lambda leaf: own.get(id(leaf), leaf), result)
        for index, result in results.items()
    }


def _copied(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.device == device == torch.device("cpu"):
        return copy_in_host_memory(leaf, None)
    return as_parameter(leaf.detach().to(device, copy=True), leaf)


def _add_nbytes(value: Value, made: Any, nbytes: dict[str, float]) -> None:
    tensors = (leaf for leaf in flatten(made) if isinstance(leaf, torch.Tensor))
    if sizes := [tensor.nbytes for tensor in tensors if tensor.layout is torch.strided]:
        nbytes[value.name] = float(sum(sizes))


# ---- calls that do the same work, of which one is measured


def signature_of(fn: Callable[..., Any], args: Any, kwargs: Any) -> Signature:
    """Return everything that a call's work depends on.

    These are the function, shapes, dtypes and strides of tensors, and the other arguments. For a
    compiled region it is its ``kernels``, which equal regions share.

    >>> signature_of(torch.add, (torch.ones(2, 3), 1), {"alpha": 2})[1:]
    (('alpha',), (torch.float32, (2, 3), (3, 1)), (<class 'int'>, 1), (<class 'int'>, 2))
    """
    return (
        getattr(fn, "kernels", None) or _hashed(fn),
        tuple(kwargs),
        *map(_leaf, flatten((args, kwargs))),
    )


def _leaf(leaf: Any) -> Hashable:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), _hashed(leaf)
    strides = leaf.stride() if leaf.layout is torch.strided else (str(leaf.layout),)
    return leaf.dtype, tuple(leaf.shape), strides


def _hashed(item: Any) -> Hashable:
    try:
        hash(item)
    except TypeError:
        return id(item)
    return item  # type: ignore[no-any-return]
