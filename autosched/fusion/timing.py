"""Compare schedules by running them in turns on copies of the inputs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosched._lib.tree import flatten, transform
from autosched.measurement.hardware import torch_device
from autosched.measurement.stopwatch import synchronize
from autosched.measurement.tasks import preserved_random_state
from autosched.scheduling.schedule import Schedule

__all__ = ["run_times"]

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
        _restore(given, inputs)
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
    graph = made.graph
    written = {
        value.name
        for value in graph.sources
        if any(graph.last_version(member) for member in graph.members(value.index))
    }
    return {
        name: transform(_copy, item) if name in written else item for name, item in inputs.items()
    }


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # Regions are compiled for arguments that require gradients, or do not.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad and leaf.is_leaf)


def _restore(copies: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Give copies the values of the inputs again."""
    with torch.no_grad():
        for name, item in copies.items():
            for leaf, before in zip(flatten(item), flatten(inputs[name]), strict=True):
                if leaf is not before:
                    leaf.copy_(before)
