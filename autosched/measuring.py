"""Measuring: what tasks cost on the devices that are here, and how fast links between these are. Medians of some runs.

Knows no policy but one device alone, and models nothing: what was not measured is left as it was.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autosched.costs import Costs
from autosched.errors import MachineError, ScheduleError
from autosched.graph import Graph, called_with, no_grad
from autosched.machine import Device, Link, Machine
from autosched.planning import schedule
from autosched.policies import single_on
from autosched.tree import transform

__all__ = ["measured_costs", "measured_links"]

Track = Callable[[Sequence[Any]], Iterable[Any]]
Samples = dict[str, dict[str, list[float]]]  # by task and kind of device

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)  # bytes of the copies that are timed


def measured_costs(
    graph: Graph, machine: Machine, inputs: Mapping[str, Any], *, repeat: int = 5, track: Track = iter
) -> Costs:
    """Return the median seconds of each task but views on each kind of device, and the bytes of values.

    Where there are CPUs alone, tasks are timed one by one, wherever they must run, and what they take counts for every
    device: it is what an emulated machine takes. Raises MachineError for an imagined machine, and what tasks raise.
    """
    if machine.imagined:
        raise MachineError("an emulated machine has nothing to measure; measure on Machine.local()")
    costs = Costs.estimate(graph, inputs)
    if not machine.accelerators:
        samples = _serial(graph, inputs, repeat, track)
        found: dict[str, Any] = {task: statistics.median(times["cpu"]) for task, times in samples.items()}
    else:
        samples = _profiled(graph, machine, inputs, costs, repeat, track)
        found = {task: _spread(times, machine.devices) for task, times in samples.items()}
    measured = costs.override(seconds=found)
    measured.check(graph)
    return measured


def _serial(graph: Graph, inputs: Mapping[str, Any], repeat: int, track: Track) -> Samples:
    """Time tasks as the serial run calls them; the first run warms up."""
    samples: Samples = {task.name: {"cpu": []} for task in graph.tasks if not task.view}
    for run in track(range(repeat + 1)):
        data = graph.bind(copy.deepcopy(dict(inputs)))
        with no_grad():
            for task in graph.tasks:
                if task.fn is None:
                    raise ScheduleError(f"task {task.name!r} has no function: it can be planned, not measured")
                args, kwargs = called_with(task, data)
                start = time.perf_counter()
                returned = task.fn(*args, **kwargs)
                taken = time.perf_counter() - start
                data.update(task.results(returned))
                if run and not task.view:
                    samples[task.name]["cpu"].append(taken)
    return samples


def _profiled(
    graph: Graph, machine: Machine, inputs: Mapping[str, Any], costs: Costs, repeat: int, track: Track
) -> Samples:
    """Time tasks with all on one device, a device of each kind in turn; the first run warms up."""
    first = {device.kind: device.name for device in reversed(machine.devices)}
    samples: Samples = {task.name: {} for task in graph.tasks if not task.view}
    for kind, run, spans in _runs(graph, machine, inputs, costs, first, repeat, track):
        for span in spans if run else ():
            where = span.streams[0].device.partition(":")[0]
            if span.kind == "run" and span.name in samples and (where == kind or graph.task(span.name).device):
                samples[span.name].setdefault(where, []).append(span.seconds)
    return {task: times for task, times in samples.items() if times}


def _runs(
    graph: Graph,
    machine: Machine,
    inputs: Mapping[str, Any],
    costs: Costs,
    first: Mapping[str, str],
    repeat: int,
    track: Track,
) -> Iterator[tuple[str, int, Any]]:
    pairs = [(kind, run) for kind in sorted(first) for run in range(repeat + 1)]
    made = None
    for kind, run in track(pairs):
        if run == 0:
            try:
                made = schedule(graph, machine, policy=single_on(first[kind]), costs=costs)
            except ScheduleError:  # nothing of it can run there
                made = None
        if made is None:
            continue
        homes = dict(made.program.inputs)
        mine = {name: _moved(item, machine.device(homes[name])) for name, item in copy.deepcopy(dict(inputs)).items()}
        yield kind, run, made.profile(**mine).spans
        if run == repeat:
            made.close()


def _moved(item: Any, device: Device) -> Any:
    where = device.physical or device.name
    return transform(lambda leaf: leaf.to(where) if isinstance(leaf, torch.Tensor) else leaf, item)


def _spread(times: Mapping[str, Sequence[float]], devices: Iterable[Device]) -> dict[str, float]:
    """Return the median for every device of a kind."""
    return {device.name: statistics.median(times[device.kind]) for device in devices if device.kind in times}


# ---- links


def measured_links(machine: Machine, *, repeat: int = 9, track: Track = iter) -> Machine:
    """Return the machine with the rate and latency of each link as copies of several sizes show them."""
    where = {device.name: device.physical or device.name for device in machine.devices}
    links = [_link(link, where[link.source], where[link.destination], repeat) for link in track(machine.links)]
    return Machine(machine.devices, links, contention=machine.contention, imagined=machine.imagined)


def _link(link: Link, source: str, destination: str, repeat: int) -> Link:
    """Time copies of each size both ways, and take the slower way; a link that shows no rate stays as it is."""
    ways = (source, destination), (destination, source)
    seconds = {size: max(_copy(*way, size, repeat) for way in ways) for size in SIZES}
    rate = fitted(seconds)
    return link if rate is None else replace(link, bytes_per_second=rate[0], latency=rate[1])


def fitted(seconds: Mapping[int, float]) -> tuple[float, float] | None:
    """Return bytes per second and latency of the line through the two largest sizes and the smallest; None if absurd.

    >>> fitted({64: 2.0625, 1024: 3.0, 3072: 5.0})
    (1024.0, 2.0)
    """
    smallest, *_, large, largest = sorted(seconds)
    taken = seconds[largest] - seconds[large]
    if taken <= 0:
        return None
    rate = (largest - large) / taken
    return rate, max(seconds[smallest] - smallest / rate, 0.0)


def _copy(source: str, destination: str, nbytes: int, repeat: int) -> float:
    """Return the median seconds of a copy, between host memory that is pinned and devices."""
    here = torch.empty(nbytes, dtype=torch.uint8, device=source, pin_memory=source == "cpu")
    there = torch.empty(nbytes, dtype=torch.uint8, device=destination, pin_memory=destination == "cpu")
    times = []
    for _ in range(repeat + 1):
        _settle(source, destination)
        start = time.perf_counter()
        there.copy_(here, non_blocking=True)
        _settle(source, destination)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _settle(*devices: str) -> None:
    for device in devices:
        if device != "cpu":
            torch.accelerator.synchronize(device)
