"""Measure the costs of a graph's tasks.

The graph runs serially on one device of each model that the machine has. Tasks that were measured
on CPUs only get the same costs for all devices: this is what they take on an emulated machine at
least.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autosched.costs.costs import Costs
from autosched.errors import MachineError
from autosched.graph.graph import Graph
from autosched.machine.machine import Device, Machine
from autosched.measurement.bench import Bench
from autosched.measurement.cache import MeasurementCache
from autosched.measurement.hardware import model_name, torch_device
from autosched.measurement.links import Track
from autosched.measurement.serial_run import Call
from autosched.measurement.stopwatch import Reading
from autosched.scheduling.arguments import checked_count
from autosched.scheduling.planning import mark_pageable

__all__ = ["measure_costs", "run_on_models"]

Readings = Mapping[tuple[Device, ...], Mapping[str, Reading]]
"""By equal devices, the reading of each task that was measured there."""


def measure_costs(
    graph: Graph,
    machine: Machine,
    inputs: Mapping[str, Any] | None = None,
    *,
    repeat: int = 5,
    replay: bool = False,
    cache: bool | str | os.PathLike[str] | None = None,
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
    * ``cache``: a folder in which readings of torch's own functions are cached for this machine,
      driver and torch, or True for ``$XDG_CACHE_HOME/autosched``.
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
    cached = MeasurementCache(cache)
    parts = graph, machine, inputs, known
    benches = [Bench(*parts, devices, repeat, cached) for devices in _device_groups(machine)]
    with preserved_random_state(machine):
        for bench, run in track([(bench, run) for bench in benches for run in range(repeat + 1)]):
            if not bench.is_done(run):
                bench.run(warm=run == 0)
        readings = {bench.devices: bench.accepted_readings() for bench in benches}
    for complaint in (complaint for bench in benches for complaint in bench.complaints):
        warnings.warn(complaint, stacklevel=3)
    cached.save()
    tables = _tables(graph, machine, known, _seconds(readings, replay))
    measured = known.override(tables, benches[0].nbytes)
    measured = replace(measured, issue={} if replay else _issue(readings))
    measured.check(graph)
    return measured


def run_on_models(
    graph: Graph, machine: Machine, known: Costs, inputs: Mapping[str, Any], call: Call
) -> None:
    """Run the tasks where ``measure_costs`` would, with the same arguments, by ``call``.

    ``known`` are the costs of this graph; ``inputs`` stay as they are.
    """
    parts = graph, machine, inputs, known
    with preserved_random_state(machine):
        for devices in _device_groups(machine):
            Bench(*parts, devices, 1, MeasurementCache(None)).run_by(call)


def _seconds(readings: Readings, replay: bool) -> dict[tuple[Device, ...], dict[str, float]]:
    """Return the seconds of each measured task.

    If the machine knows no time of issuing, a task takes as long as it takes to launch, at least.
    """
    return {
        devices: {
            name: reading.seconds
            if replay or devices[0].has_issuing
            else max(reading.seconds, reading.issued)
            for name, reading in found.items()
        }
        for devices, found in readings.items()
    }


def _issue(readings: Readings) -> dict[str, float]:
    """Return the seconds to issue each task, where the machine knows times of issuing."""
    return {
        name: reading.issued
        for devices, found in readings.items()
        if devices[0].has_issuing
        for name, reading in found.items()
    }


def preserved_random_state(machine: Machine) -> contextlib.AbstractContextManager[None]:
    """Restore the state of the random number generators afterwards."""
    if not machine.accelerators:
        return torch.random.fork_rng([])
    found = dict.fromkeys(
        device for device in map(torch_device, machine.devices) if device.type != "cpu"
    )
    kind = next(iter(found)).type if found else "cuda"
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


def _tables(
    graph: Graph,
    machine: Machine,
    known: Costs,
    seconds: Mapping[tuple[Device, ...], Mapping[str, float]],
) -> dict[str, Any]:
    """Return the seconds of each measured task, by device if there are accelerators.

    Devices without a measurement keep the known seconds, and a task that cannot run on a device
    still cannot.
    """
    found: dict[str, Any] = {}
    for task in graph.tasks:
        table = {
            device.name: times[task.name]
            for group, times in seconds.items()
            if task.name in times
            for device in group
        }
        if table and not machine.accelerators:
            found[task.name] = table[machine.computing[0]]
        elif table:
            every = {device.name: known.task_seconds(task, device) for device in machine.devices}
            found[task.name] = every | {
                name: taken for name, taken in table.items() if every[name] < math.inf
            }
    return found
