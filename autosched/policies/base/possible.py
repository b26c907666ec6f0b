"""Track the devices that each task may still be placed on.

A task may be placed where its constraints allow it, where its cost is finite, and where it can
exchange data with its neighbours in the graph. Devices without a link cannot exchange data, so each
decision removes devices from the neighbours' sets, these from their neighbours' sets, and so on.
That is arc consistency (Mackworth, Artificial Intelligence 8, 1977). It never reaches a dead end
if the links form an interval graph (Feder, Hell, JCTB 72, 1998): all devices linked, separate
islands, or a hub. On other machines, such as a ring of four devices without a hub, it may fail to
find a placement that exists, and reports that.

Knows no order, and of costs only whether they are finite.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autosched.errors import ScheduleError, listed
from autosched.placement import Placement
from autosched.problem import Problem

_Trail = list[tuple[int, int]]  # (group, its set before)


class Possible:
    """The devices that each task may still be placed on. Policies of users can use it, too.

    Takes into account constraints, groups that share a device, and links. Tasks are numbers, as in
    ``graph.tasks``, and so are devices, as in ``machine.devices``. Placing a task removes devices
    from other tasks, and is refused if it would leave one of them without a device. So if every
    task is settled in turn, each gets a device. Raises ScheduleError if a task has no device from
    the beginning.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.add(abs, graph.input("x"), name="a"))
    >>> possible = Possible(asc.Problem(graph, asc.Machine.emulated(gpus=1)))
    >>> possible.devices(0), possible.settle(0, [1, 0]), possible.placement().device
    ((0, 1), 1, {'a': 'cuda:0'})
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        everywhere = (1 << len(problem.devices)) - 1
        self._linked = list(map(_bits, problem.linked))
        self._members_of: dict[int, tuple[int, ...]] = {}
        self._reach: dict[int, int] = {}
        # By group: (task, other task, its group).
        self._neighbours: list[list[tuple[int, int, int]]] = [[] for _ in problem.tasks]
        # By group, a bit for each device; bits are only ever removed.
        self._sets = [everywhere] * len(problem.tasks)
        self._constrain()
        if self.partial:
            self._link()

    @cached_property
    def partial(self) -> bool:
        """Whether some devices are not linked, so that one choice may rule out others."""
        return not self.problem.linked.all()

    def copy(self) -> Possible:
        """Return an independent copy, to try other choices from here."""
        twin = object.__new__(Possible)
        twin.__dict__.update(self.__dict__)
        twin._sets = self._sets.copy()
        return twin

    def devices(self, task: int) -> tuple[int, ...]:
        """Return the devices that a task may still be placed on, in the machine's order.

        Never none.
        """
        return self._members(self._sets[self.problem.lists.group[task]])

    def mask(self) -> NDArray[np.bool_]:
        """Return the devices that tasks may still be placed on, by [task, device]."""
        devices = range(len(self.problem.devices))
        rows = {bits: [bool(bits >> p & 1) for p in devices] for bits in dict.fromkeys(self._sets)}
        found = [rows[self._sets[group]] for group in self.problem.lists.group]
        return np.array(found, bool).reshape(-1, len(devices))

    def choose(self, task: int, device: int) -> bool:
        """Put a task and its group on one of its devices; return whether that was possible.

        If it would leave another task without a device, it is undone and the device is removed from
        the task. Raises ScheduleError if it was the last.
        """
        group = self.problem.lists.group[task]
        bit = 1 << device
        before = self._sets[group]
        if before == bit:
            return True
        if not before & bit:
            return False
        trail = [(group, before)]
        self._sets[group] = bit
        conflict = self._spread([group], trail)
        if conflict is None:
            return True
        for changed, devices in reversed(trail):
            self._sets[changed] = devices
        self._sets[group] = before & ~bit
        if not self._sets[group] or self._spread([group], []) is not None:
            raise self._apart(*conflict)
        return False

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
            f"{self._names(self._sets[self.problem.lists.group[task]])}"
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

    def _constrain(self) -> None:
        """Apply unary constraints: bindings, infinite durations, unreachable homes of inputs."""
        problem = self.problem
        t = problem.lists
        everywhere = (problem.allowed & problem.finite).all(axis=1)
        for task in np.flatnonzero(~everywhere).tolist():
            self._narrow(task, _bits(problem.allowed[task]), "it must run on {}")
            why = "its seconds, or those of what shares its memory, are finite on {}"
            self._narrow(task, _bits(problem.finite[task]), why)
        if not self.partial:
            return
        for task, reads in enumerate(problem.reads):
            for datum in reads:
                if t.maker[datum] < 0:
                    why = f"it reads {problem.names[datum]!r}, which lives on"
                    self._travel(task, t.home[datum], why)
        for datum, device in problem.returns:
            why = f"it writes {problem.names[datum]!r}, which must go back to"
            self._travel(t.maker[datum], device, why)

    def _travel(self, task: int, device: int, why: str) -> None:
        self._narrow(
            task,
            self._linked[device],
            f"{why} {self.problem.devices[device]!r}, linked only to {{}}",
        )

    def _narrow(self, task: int, devices: int, why: str) -> None:
        group = self.problem.lists.group[task]
        before = self._sets[group]
        self._sets[group] = self._sets[group] & devices
        if not self._sets[group]:
            raise ScheduleError(
                f"task {self.problem.tasks[task]!r} can run nowhere: of {self._names(before)} "
                f"no device is left, for {why.format(self._names(devices))}"
            )

    def _link(self) -> None:
        """Find the groups that exchange data, and propagate the constraints of links."""
        problem = self.problem
        for task, reads in enumerate(problem.reads):
            for maker in dict.fromkeys(problem.lists.maker[datum] for datum in reads):
                here = problem.lists.group[task]
                there = problem.lists.group[maker]
                if maker >= 0 and here != there:
                    self._neighbours[here].append((task, maker, there))
                    self._neighbours[there].append((maker, task, here))
        conflict = self._spread(list(range(len(problem.tasks))), [])
        if conflict is not None:
            raise self._apart(*conflict)

    def _spread(self, pending: list[int], trail: _Trail) -> tuple[str, str] | None:
        """Remove unreachable devices from neighbours; return two tasks that conflict, if any."""
        sets = self._sets
        while pending:
            group = pending.pop()
            for task, other, there in self._neighbours[group]:
                before = sets[there]
                narrowed = before & self._reachable(sets[group])
                if not narrowed:
                    return self._where(task), self._where(other)
                if narrowed != before:
                    trail.append((there, before))
                    sets[there] = narrowed
                    pending.append(there)
        return None

    def _reachable(self, devices: int) -> int:
        """Return the devices linked to any of these, and these themselves."""
        found = self._reach.get(devices)
        if found is None:
            found = 0
            for device in self._members(devices):
                found |= self._linked[device]
            self._reach[devices] = found
        return found

    def _members(self, devices: int) -> tuple[int, ...]:
        found = self._members_of.get(devices)
        if found is None:
            found = tuple(p for p in range(len(self.problem.devices)) if devices >> p & 1)
            self._members_of[devices] = found
        return found

    def _names(self, devices: int) -> str:
        return ", ".join(repr(self.problem.devices[p]) for p in self._members(devices)) or "none"

    def _where(self, task: int) -> str:
        devices = self._sets[self.problem.lists.group[task]]
        return f"{self.problem.tasks[task]!r} (on {self._names(devices)})"

    def _apart(self, task: str, other: str) -> ScheduleError:
        return ScheduleError(
            f"no placement found: tasks {task} and {other} exchange data, "
            "but no link joins these devices"
        )


def _bits(row: NDArray[np.bool_]) -> int:
    """Return a set of devices as an integer with a bit for each."""
    return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")
