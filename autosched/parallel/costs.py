"""Costs of memory traffic, of merged tasks, and for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from autosched import Costs, Graph, Machine, Work
from autosched.parallel.packing import Reusing

__all__ = ["LinearCosts", "memory_seconds", "memory_task", "tabulated"]

T = TypeVar("T")


def memory_seconds(
    machine: Machine, device: str, nbytes: float, launches: float = 1
) -> dict[str, float]:
    """Return, by device, the seconds of a task that only reads and writes this many bytes.

    Raises MachineError for a device that the machine does not have.

    >>> machine = Machine.emulated(gpus=1)  # 1e12 bytes per second, 5e-6 seconds for a launch
    >>> memory_seconds(machine, "cuda:0", 1e9, launches=2)
    {'cuda:0': 0.00101}
    """
    found = machine.device(device)
    return {device: launches * found.launch_seconds + nbytes / found.bytes_per_second}


def memory_task(
    graph: Graph, machine: Machine, device: str, fn: Callable[..., Any], *args: Any,
    accessed: float, launches: float = 1, reuse: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Add a task that only reads and writes memory, ``accessed`` bytes, to a graph.

    With ``reuse`` a rank's CPU writes the result where it was in the last run: see ``Reusing``.
    """
    seconds = memory_seconds(machine, device, accessed, launches)
    if reuse and machine.rank is not None and machine.device(device).kind == "cpu":
        fn = Reusing(fn)
    return graph.add(fn, *args, on=device, seconds=seconds, **options)


def tabulated(
    graph: Graph, costs: Costs, machine: Machine
) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Return the seconds of each task on each device, and the bytes of each value."""
    seconds: dict[str, dict[str, float]] = {}
    for task in graph.tasks:
        if task.view:
            continue
        by_rates: dict[tuple[float, ...], float] = {}  # equal devices are computed once
        seconds[task.name] = {}
        for device in machine.devices:
            rates = (device.flops_per_second, device.bytes_per_second, device.launch_seconds)
            if rates not in by_rates:
                by_rates[rates] = costs.task_seconds(task, device)
            seconds[task.name][device.name] = by_rates[rates]
    return seconds, {value.name: int(costs.value_nbytes(value)) for value in graph.values}


@dataclass(frozen=True)
class LinearCosts:
    """Costs of the same tasks for any number of rows, by those for two numbers of ``rows``.

    Work and bytes of almost all operators are a constant, such as reading weights, plus a share for
    each row.
    """

    small: Costs
    large: Costs
    rows: tuple[int, int]

    def at(self, rows: int) -> Costs:
        """Return the costs for a number of rows; those known for one number only are constant."""
        low, high = self.rows
        share = (rows - low) / (high - low) if high > low else 0.0

        def between(a: float, b: float) -> float:
            return max(0.0, a + (b - a) * share)

        work = {
            name: Work(between(a.flops, b.flops), between(a.nbytes, b.nbytes), a.launches)
            for name, a, b in _paired(self.small.work, self.large.work)
        }
        sizes = _paired(self.small.nbytes, self.large.nbytes)
        return Costs(work=work, nbytes={name: between(a, b) for name, a, b in sizes})


def _paired(small: Mapping[str, T], large: Mapping[str, T]) -> Iterator[tuple[str, T, T]]:
    """Yield names with the items of both; one that only one has counts twice."""
    for name, last in {**small, **large}.items():
        yield name, small.get(name, last), last
