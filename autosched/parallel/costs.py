"""Costs of memory traffic, of merged tasks, and for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from autosched import Costs, Graph, Machine, Value, Work
from autosched._lib.holders import holders

T = TypeVar("T")


def memory_task(
    graph: Graph, machine: Machine, device: str, fn: Callable[..., Any], *args: Any,
    accessed: float, launches: float = 1, reuse: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Add a task that only reads and writes memory, ``accessed`` bytes, to a graph.

    With ``reuse`` a rank's CPU writes the result where it was in the last run: see ``Reusing``.
    """
    found = machine.device(device)
    seconds = {device: launches * found.launch_seconds + accessed / found.bytes_per_second}
    if reuse and machine.rank is not None and machine.device(device).kind == "cpu":
        fn = Reusing(fn)
    return graph.add(fn, *args, on=device, seconds=seconds, **options)


def relayed(graph: Graph, value: Value, device: str, nbytes: int, name: str) -> Value:
    """Return a value as one computed on a device, where it is copied, and from which others copy it."""
    made: Value = graph.add(
        same, value, name=graph.fresh(name), on=device, aliases=value, seconds={device: 0.0},
        nbytes=nbytes,
    )  # fmt: skip
    return made


def same(tensor: T) -> T:
    """Return the argument."""
    return tensor


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


def interpolated(known: Mapping[int, Costs], rows: int) -> Costs:
    """Return the costs of tasks for any number of rows, by those ``known`` for one or two numbers.

    Work and bytes of almost all operators are a constant, such as reading weights, plus a share for
    each row. Costs that are known for one number only are constant.
    """
    low, high = min(known), max(known)
    small, large = known[low], known[high]
    share = (rows - low) / (high - low) if high > low else 0.0

    def between(a: float, b: float) -> float:
        return max(0.0, a + (b - a) * share)

    work = {}
    for name, b in {**small.work, **large.work}.items():
        a = small.work.get(name, b)
        work[name] = Work(between(a.flops, b.flops), between(a.nbytes, b.nbytes), a.launches)
    sizes = {**small.nbytes, **large.nbytes}.items()
    nbytes = {name: between(small.nbytes.get(name, n), n) for name, n in sizes}
    return Costs(work=work, nbytes=nbytes)


class Reusing:
    """A function whose result is where its last one was, once nothing else refers to that.

    The memory of large tensors goes back to the system when they are freed, and is mapped again
    page by page, which takes longer than to write it. ``fn`` takes ``out``, and its results are
    always alike. It may be called by several threads.

    >>> total = Reusing(torch.add)
    >>> address = total(torch.ones(2), torch.ones(2)).data_ptr()
    >>> again = total(torch.ones(2), torch.ones(2))
    >>> again.data_ptr() == address, total(again, again).data_ptr() == address
    (True, False)
    """

    def __init__(self, fn: Callable[..., torch.Tensor]):
        self.__name__ = fn.__name__
        self._fn = fn
        self._last: list[torch.Tensor] = []  # at most one

    def __call__(self, *args: Any) -> torch.Tensor:
        """Return the function's result."""
        last = self._take()
        result = self._fn(*args, out=last)
        self._last[:] = [result]
        return result

    def _take(self) -> torch.Tensor | None:
        """Return the last result if it is free; another thread finds none then."""
        try:
            last = self._last.pop()
        except IndexError:
            return None
        # While torch.compile evaluates frames, each argument has one reference more.
        alone = torch.empty(0)
        return last if holders(last) == holders(alone) else None

    def release(self) -> None:
        """Forget the last result."""
        self._last.clear()


def flat(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return all elements of tensors in one."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors], out=out)


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a copy of a tensor with other strides."""
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def pack(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all elements of tensors, in one tensor for each dtype."""
    return [flat(group) for group in _by_dtype(tensors)]


def unpack_(tensors: Sequence[torch.Tensor], packed: Sequence[torch.Tensor]) -> None:
    """Copy what was packed into tensors like those."""
    for group, whole in zip(_by_dtype(tensors), packed, strict=True):
        parts = torch.split(whole, [tensor.numel() for tensor in group])
        views = [part.view(like.shape) for part, like in zip(parts, group, strict=True)]
        torch._foreach_copy_(group, views)


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
