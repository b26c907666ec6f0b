"""The simplest policies: all tasks on one device, and on the devices in turn.

One device is often the best placement, and the baseline for every other policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.placement import Placement
from autosched.policies.base.possible import Possible
from autosched.problem import Policy, Problem


def single(problem: Problem) -> Placement:
    """Put all tasks on the one device of least total duration of tasks and copies.

    Tasks that must run elsewhere do. The order is that of insertion; ties go to the earlier device.
    Raises ScheduleError where tasks cannot all be placed.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> y = graph.add(abs, graph.input("x"), name="y", seconds={"cpu": 3.0, "cuda:0": 2.0})
    >>> single(Problem(graph, Machine.emulated(gpus=1))).device
    {'y': 'cuda:0'}
    """
    possible = Possible(problem)
    candidates = [_gather(possible, device) for device in range(len(problem.devices))]
    best = min(candidates, key=lambda placed: _total(problem, placed))
    return problem.placement(best, range(len(best)))


def single_on(device: str) -> Policy:
    """Return the policy that puts all tasks on ``device`` that may run there.

    The policy raises MachineError if the machine lacks the device.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> y = graph.add(abs, graph.input("x"), name="y")
    >>> single_on("cuda:1")(Problem(graph, Machine.emulated(gpus=2))).device
    {'y': 'cuda:1'}
    """

    def policy(problem: Problem) -> Placement:
        wanted = problem.devices.index(problem.machine.device(device).name)
        placed = _gather(Possible(problem), wanted)
        return problem.placement(placed, range(len(placed)))

    policy.__name__ = f"single_on {device}"
    return policy


def _gather(possible: Possible, wanted: int) -> list[int]:
    """Return the device of each task: the wanted one if possible, else the fastest of its first."""
    found: dict[int, int] = {}  # by group
    groups = possible.problem.lists.group
    for task, (group, seconds) in enumerate(zip(groups, possible.problem.seconds, strict=True)):
        devices = possible.devices(task)
        fastest = min(devices, key=seconds.__getitem__)
        found.setdefault(group, wanted if wanted in devices else fastest)
    return [found[group] for group in groups]


def _total(problem: Problem, placed: Sequence[int]) -> float:
    """Return the total duration of tasks and copies, with one copy per datum and destination."""
    t = problem.lists
    pairs = zip(problem.reads, placed, strict=True)
    copies = [(datum, device) for reads, device in pairs for datum in reads]
    total = 0.0
    for seconds, device in zip(problem.seconds, placed, strict=True):
        total += seconds[device]
    for datum, device in dict.fromkeys([*copies, *problem.returns]):
        source = t.row[datum] if t.maker[datum] < 0 else placed[t.maker[datum]]
        total += problem.copy_seconds(datum, source, device)
    return total


def round_robin(problem: Problem) -> Placement:
    """Assign tasks to the devices in turn, in insertion order; groups stay together.

    Tasks that may run on one device only are skipped in the rotation. Raises ScheduleError where
    tasks cannot all be placed.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> tasks = [graph.add(int, name=name) for name in "abc"]
    >>> round_robin(Problem(graph, Machine.emulated(gpus=1))).device
    {'a': 'cpu', 'b': 'cuda:0', 'c': 'cpu'}
    """
    possible = Possible(problem)
    placed = []
    turn = 0
    for task in range(len(problem.tasks)):
        devices = possible.devices(task)
        if len(devices) > 1:
            in_turn = [*(p for p in devices if p >= turn), *devices]
            turn = possible.settle(task, in_turn) + 1
        placed.append(possible.devices(task)[0])
    return problem.placement(placed, range(len(placed)))
