"""Order the tasks of one device so that it never holds much memory.

To find the order of least peak is NP-hard (Sethi, "Complete register allocation problems", SIAM J.
Comput. 4(3), 1975). Two rules find good ones:

1. A task whose results take no more than it lets go, and that does not exceed the peak, comes next:
   no order is better.
2. Otherwise a beam search keeps the partial orders of least peak, of equal ones those that hold
   least, and of those with the same tasks only the best one. It is repeated with more of them,
   until all were kept, which proves that the peak is the least, or the work reaches a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autosched.graph.graph import Graph, Task
from autosched.placement import Placement
from autosched.policies.simple import single
from autosched.problem import Problem

_WIDTHS = (1, 8, 64, 512)
_WORK = 100_000  # tasks tried, in about 0.5 s: no search begins that would take more
_CHOICES = 8  # of the tasks that may be next, so many are tried: the first, and the last


def least_memory(problem: Problem) -> Placement:
    """Put tasks on one device, as ``single`` does, in an order in which it holds little.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> large = [graph.add(abs, 1, name=name, nbytes=8, on="cuda:0") for name in "ab"]
    >>> graph.output(*(graph.add(abs, value, nbytes=1, on="cuda:0") for value in large))
    >>> least_memory(Problem(graph, Machine.emulated(gpus=1))).order
    ('a', 'abs', 'b', 'abs_1')
    """
    placement = single(problem)
    devices = [*placement.device.values()]
    if not devices:
        return placement
    device = max(dict.fromkeys(devices), key=devices.count)
    order = _Search(problem, placement, device).best()
    return Placement(placement.device, tuple(problem.tasks[task] for task in order))


class _State(NamedTuple):
    """What some tasks leave: the peak, the bytes held, and their order, the last one first.

    ``done`` and ``ready``, tasks that may be next, are sets of bits.
    """

    peak: float
    held: float
    done: int
    ready: int
    order: tuple[int, object] | None


class _Search:
    """Values of one device as sets of tasks: those that need memory for it, and those that use it."""

    def __init__(self, problem: Problem, placement: Placement, device: str):
        graph = problem.graph
        self.work = 0
        self.needs = [0] * len(graph.tasks)  # by task, the bits of those before it
        self.next: list[list[int]] = [[] for _ in graph.tasks]
        for task in graph.tasks:
            for before in dict.fromkeys(one.task for one in task.dependencies):
                self.needs[task.index] |= 1 << before
                self.next[before].append(task.index)
        here = [placement.device[task.name] == device for task in graph.tasks]
        there = {value for value, home in problem.homes.items() if home == device}
        self.touched: list[list[int]] = []  # by task, the roots that it reads or makes
        self.users: dict[int, int] = {}  # by root, the bits of the tasks that do
        self.makers: dict[int, int] = {}  # by root, those that need it on the device
        for task in graph.tasks:
            roots = [root for root in _roots(graph, task) if root not in there]
            self.touched.append(roots)
            for root in roots:
                self.users[root] = self.users.get(root, 0) | 1 << task.index
                if here[task.index]:
                    self.makers[root] = self.makers.get(root, 0) | 1 << task.index
        self.nbytes = {root: problem.costs.value_nbytes(graph.values[root]) for root in self.users}
        self.kept = {graph.values[value].root for value in graph.outputs.values()}

    def best(self) -> Sequence[int]:
        """Return the best order that is found."""
        ready = sum(1 << i for i, needs in enumerate(self.needs) if not needs)
        best: _State | None = None
        for width in _WIDTHS:
            self.work = 0
            found, is_complete = self._beam(_State(0.0, 0.0, 0, ready, None), width)
            best = found if best is None else min(best, found, key=lambda state: state.peak)
            if is_complete or self.work * _WIDTHS[1] > _WORK:
                break
        order = list[int]()
        link = best.order if best is not None else None
        while link is not None:
            task, link = link  # type: ignore[assignment]
            order.append(task)
        return order[::-1]

    def _beam(self, start: _State, width: int) -> tuple[_State, bool]:
        """Return the best state after all tasks, and whether no other one was left out."""
        complete = True
        beam = [start]
        last = list[_State]()
        while beam:
            found: dict[int, _State] = {}
            for state in map(self._settled, beam):
                if not state.ready:
                    last.append(state)
                    continue
                choices = _some(state.ready)
                complete = complete and len(choices) == state.ready.bit_count()
                for task in choices:
                    new = self._after(state, task)
                    if new.done not in found or new[:2] < found[new.done][:2]:
                        found[new.done] = new
            complete = complete and len(found) <= width
            beam = sorted(found.values(), key=lambda state: state[:2])[:width]
        return min(last, key=lambda state: state.peak), complete

    def _settled(self, state: _State) -> _State:
        """Return the state after all tasks that no order delays with profit."""
        found = True
        while found:
            found = False
            for task in _some(state.ready):
                new = self._after(state, task)
                if new.peak <= state.peak and new.held <= state.held:
                    state, found = new, True
        return state

    def _after(self, state: _State, task: int) -> _State:
        """Return the state after one more task."""
        self.work += 1
        bit = 1 << task
        done = state.done | bit
        held = state.held
        freed = 0.0
        for root in self.touched[task]:
            makers = self.makers.get(root, 0)
            if makers & bit and not makers & state.done:
                held += self.nbytes[root]
            if not self.users[root] & ~done and root not in self.kept and makers:
                freed += self.nbytes[root]
        ready = state.ready & ~bit
        for other in self.next[task]:
            if not self.needs[other] & ~done:
                ready |= 1 << other
        return _State(max(state.peak, held), held - freed, done, ready, (task, state.order))


def _roots(graph: Graph, task: Task) -> dict[int, None]:
    """Return the values, roots of those that share memory, which a task reads or makes."""
    made = (use for use in task.outputs if graph.is_used(use.value))
    return dict.fromkeys(graph.values[use.value].root for use in (*task.reads, *made))


def _some(ready: int) -> list[int]:
    """Return the first and last tasks of a set of bits."""
    found = list[int]()
    for _ in range(_CHOICES):
        if ready:
            found.append((ready & -ready).bit_length() - 1)
            ready &= ready - 1
        if ready:
            found.append(ready.bit_length() - 1)
            ready ^= 1 << found[-1]
    return found
