"""A policy for tests: tasks on random devices and in a random legal order."""

from __future__ import annotations

import random
from dataclasses import dataclass

from autosched.costs.costs import Costs
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.policies.base.possible import Possible
from autosched.problem import Problem

__all__ = ["scattered"]


@dataclass(frozen=True)
class scattered:  # noqa: N801  # policies are functions, and its repr is how users write it
    """Place tasks on random devices in random order, by a seed.

    >>> graph = Graph()
    >>> tasks = [graph.add(int, name=name) for name in "abc"]
    >>> machine, costs = Machine.emulated(gpus=0), Costs()
    >>> {scattered(seed)(graph, machine, costs).order[0] for seed in range(9)} == set("abc")
    True
    """

    seed: int

    def __call__(self, graph: Graph, machine: Machine, costs: Costs) -> Placement:
        """Return a placement; raise ScheduleError if tasks cannot all be placed."""
        source = random.Random(self.seed)
        problem = Problem.of(graph, machine, costs)
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
            for user in graph.users[task]:
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
        return problem.placement(placed, order)
