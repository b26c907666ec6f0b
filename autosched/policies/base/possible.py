"""Track the devices that each task may still be placed on.

A task may be placed where its constraints allow it, and where its cost is finite. Knows no order, and
of costs only whether they are finite.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from autosched.errors import ScheduleError, listed
from autosched.placement import Placement
from autosched.problem import Problem


class Possible:
    """The devices that each task may still be placed on. Policies of users can use it, too.

    Takes into account constraints, and groups that share a device. Tasks are numbers, as in
    ``graph.tasks``, and so are devices, as in ``machine.devices``. Placing a task places its group.
    Raises ScheduleError if a task has no device from the beginning.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.add(abs, graph.input("x"), name="a"))
    >>> possible = Possible(asc.Problem(graph, asc.Machine.emulated(gpus=1)))
    >>> possible.devices(0), possible.settle(0, [1, 0]), possible.placement().device
    ((0, 1), 1, {'a': 'cuda:0'})
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self._group: list[int] = problem.lists.group
        everywhere = tuple(range(len(problem.devices)))
        self._devices: list[tuple[int, ...]] = [everywhere] * len(problem.tasks)  # by group
        finite = "its seconds, or those of what shares its memory, are finite on"
        is_finite = np.isfinite(problem.by_costs)
        limited = ~(problem.allowed & is_finite).all(axis=1)
        for task in np.flatnonzero(limited).tolist():
            self._narrow(task, problem.allowed[task], "it must run on")
            self._narrow(task, is_finite[task], finite)

    def devices(self, task: int) -> tuple[int, ...]:
        """Return the devices that a task may still be placed on, in the machine's order.

        Never none.
        """
        return self._devices[self._group[task]]

    def choose(self, task: int, device: int) -> bool:
        """Put a task and its group on one of its devices; return whether that was possible."""
        fits = device in self.devices(task)
        if fits:
            self._devices[self._group[task]] = (device,)
        return fits

    def settle(self, task: int, preferred: Iterable[int]) -> int:
        """Put a task and its group on the first possible device of ``preferred``, and return it.

        Raises ScheduleError if none is possible.
        """
        tried = []
        for device in preferred:
            if self.choose(task, device):
                return device
            tried.append(self.problem.devices[device])
        raise ScheduleError(
            f"task {self.problem.tasks[task]!r} can go to none of {listed(tried)}; it can go to "
            f"{self._names(self.devices(task))}"
        )

    def placement(self, order: Iterable[int] | None = None) -> Placement:
        """Return the placement after all tasks are settled; ``order`` is the order of issue.

        The default order is that of the graph. Raises ScheduleError for a task that still has
        several devices.
        """
        tasks = range(len(self.problem.tasks))
        for task in tasks:
            if len(self.devices(task)) > 1:
                name = self.problem.tasks[task]
                raise ScheduleError(f"no device is chosen yet for task {name!r}; settle each task")
        return self.problem.placement(
            [self.devices(task)[0] for task in tasks], tasks if order is None else [*order]
        )

    def _narrow(self, task: int, able: NDArray[np.bool_], why: str) -> None:
        before = self.devices(task)
        left = self._devices[self._group[task]] = tuple(p for p in before if able[p])
        if not left:
            raise ScheduleError(
                f"task {self.problem.tasks[task]!r} can run nowhere: of {self._names(before)} "
                f"no device is left, for {why} {self._names(np.flatnonzero(able).tolist())}"
            )

    def _names(self, devices: Iterable[int]) -> str:
        return ", ".join(repr(self.problem.devices[p]) for p in devices) or "none"
