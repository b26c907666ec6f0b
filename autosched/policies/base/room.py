"""Track the bytes that each device holds while tasks are placed.

A value is held on the device of its producer, and on each device that it was copied to, until its
last reader is placed. Outputs stay. Values that share memory count once. Knows no times.
"""

from __future__ import annotations

from autosched.graph.graph import Task
from autosched.problem import Problem

__all__ = ["Room"]


class Room:
    """The values that each device holds; devices are numbers.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> y = graph.add(abs, graph.input("x"), name="y", nbytes=8)
    >>> graph.output(y)
    >>> room = Room(Problem(graph, Machine.emulated(gpus=1)))
    >>> room.place(0, 1); room.held
    [0.0, 8.0]
    """

    def __init__(self, problem: Problem):
        self.graph = graph = problem.graph
        machine = problem.machine
        self.nbytes = [problem.costs.value_nbytes(value) for value in graph.values]
        self.limit = [device.nbytes for device in machine.devices]
        self.held = [0.0 for _ in machine.devices]
        self.where: dict[int, set[int]] = {}  # by root
        self.readers = [0] * len(graph.values)  # by root, the number of readers not yet placed
        outputs = [graph.values[value].root for value in graph.outputs.values()]
        for root in (*(value.index for value in graph.sources), *outputs):
            self.readers[root] += 1  # a reader that is never placed
        for task in graph.tasks:
            for root in self._read(task):
                self.readers[root] += 1
        for value, home in problem.homes.items():
            self._put(value, machine.names.index(home))

    def excess(self, task: int, device: int) -> float:
        """Return by how many bytes a device would exceed its memory if a task ran there next."""
        new = sum(self.nbytes[root] for root in self._new(self.graph.tasks[task], device))
        return max(0.0, self.held[device] + new - self.limit[device])

    def place(self, task: int, device: int) -> None:
        """Place a task on a device, and free values without further readers."""
        placed = self.graph.tasks[task]
        for root in self._new(placed, device):
            self._put(root, device)
        for root in self._read(placed):
            self.readers[root] -= 1
            if not self.readers[root]:
                for holder in self.where.pop(root):
                    self.held[holder] -= self.nbytes[root]

    def _read(self, task: Task) -> dict[int, None]:
        return dict.fromkeys(self.graph.values[use.value].root for use in task.reads)

    def _new(self, task: Task, device: int) -> list[int]:
        made = [
            self.graph.values[use.value].root
            for use in task.outputs
            if self.graph.is_used(use.value)
        ]
        roots = dict.fromkeys([*self._read(task), *made])
        return [root for root in roots if device not in self.where.get(root, ())]

    def _put(self, root: int, device: int) -> None:
        self.where.setdefault(root, set()).add(device)
        self.held[device] += self.nbytes[root]
