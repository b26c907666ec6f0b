"""Cut a captured model into stages, balanced by cost or given by the user.

A model is a sequence of blocks, each a call of a module or a line of code, in the order in which
they run, or in another one that dependencies allow; cuts are between blocks. Backward tasks belong
to the blocks of their forward.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

from autosched import Costs, Graph, Machine, ScheduleError, Task
from autosched._lib.text import amount, duration, table
from autosched._lib.topological import best_order


@dataclass(frozen=True)
class Block:
    """Tasks (indices) that stay together: those of forward, and those of backward."""

    name: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Cuts:
    """A model cut into stages. ``print`` it to see the blocks and the device of each.

    ``ends`` are for each stage the block after its last; ``seconds`` those of each stage for a
    micro-batch, forward and backward; ``nbytes`` the bytes sent forward after each stage.
    """

    blocks: tuple[Block, ...]
    ends: tuple[int, ...]
    devices: tuple[str, ...]
    seconds: tuple[float, ...]
    nbytes: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.ends)

    def stages(self, graph: Graph) -> dict[str, int]:
        """Return the stage of each task, by name, of the graph or of one for another size.

        Operators may differ by size; blocks of the same name are in the same stage then.
        """
        blocks = blocks_of(graph)
        starts = (0, *self.ends)
        stages = [n for n, end in enumerate(self.ends) for _ in range(end - starts[n])]
        own = sorted(zip(self.blocks, stages, strict=True), key=lambda pair: pair[0].forward)
        stages = [stage for _, stage in own]
        if len(blocks) != len(stages):
            named: dict[str, int] = {}  # the first block of a name counts
            for block, stage in own:
                named.setdefault(block.name, stage)
            stages = list(accumulate((named.get(block.name, 0) for block in blocks), max))
        found: dict[str, int] = {}
        for block, stage in zip(blocks, stages, strict=True):
            tasks = (*block.forward, *block.backward)
            found.update((graph.tasks[task].name, stage) for task in tasks)
        return found

    def __repr__(self) -> str:
        rows = []
        for number, (start, end) in enumerate(zip((0, *self.ends), self.ends, strict=False)):
            names = list(dict.fromkeys(block.name for block in self.blocks[start:end]))
            what = " ... ".join(dict.fromkeys((names[0], names[-1]))) if names else "nothing"
            sent = amount(self.nbytes[number], "B") if number < len(self) - 1 else "-"
            seconds = duration(self.seconds[number])
            rows.append((str(number), self.devices[number], what, seconds, sent))
        return "\n".join(table(("stage", "device", "blocks", "time", "sent on"), rows, left=3))


def blocks_of(graph: Graph) -> list[Block]:
    """Return the blocks of a captured step: consecutive forward tasks that belong together.

    Tasks of one line in one call of a module stay together, and so does everything that runs
    between them.
    """
    call = [task.origin._replace(phase="") for task in graph.tasks]
    # 1. A block of forward ends where no task of its calls follows.
    forward = [task for task in graph.tasks if task.origin.phase != "backward"]
    last = {call[task.index]: task.index for task in forward}
    found: list[list[Task]] = []
    end = -1
    for task in forward:
        if task.index > end:
            found.append([])
        end = max(end, last[call[task.index]])
        found[-1].append(task)
    # 2. Backward belongs to the block of its call, or to an earlier one that it depends on.
    block = {call[task.index]: number for number, tasks in enumerate(found) for task in tasks}
    backward: list[list[int]] = [[] for _ in found]
    number = len(found) - 1
    block_of_task = dict[int, int]()
    for task in graph.tasks:
        if task.origin.phase == "backward":
            number = block.get(call[task.index], number)
            before = (d.task for d in task.dependencies)
            earliest = min((block_of_task.get(i, number) for i in before), default=number)
            earliest = min(earliest, number)
            block_of_task[task.index] = earliest
            backward[earliest].append(task.index)
    return [
        Block(_name(tasks), tuple(task.index for task in tasks), tuple(own))
        for tasks, own in zip(found, backward, strict=True)
    ]


def _name(tasks: Sequence[Task]) -> str:
    modules = (task.origin.module for task in tasks if task.origin.module)
    return next(modules, tasks[0].name)


# ---- cutting


def balanced(
    graph: Graph,
    costs: Costs,
    machine: Machine,
    devices: Sequence[str],
    state: Mapping[str, float] | None = None,
    least: Costs | None = None,
) -> Cuts:
    """Cut into one stage per device, in this order, so that the slowest is as fast as possible.

    Dynamic programming over cut points minimizes the time of the longest stage, computing or
    sending, and then the bytes sent in total; ``O(stages * blocks ** 2)`` for each of some orders of
    the blocks. A device that is named twice gets two stages. ``state`` has the bytes that each
    parameter needs, by name, in addition to the activations of one micro-batch, by ``least`` if that
    is given; devices hold no more than their memory. Raises ScheduleError if there are fewer blocks
    than stages, or no cut that fits.
    """
    blocks = blocks_of(graph)
    if len(blocks) < len(devices):
        raise ScheduleError(
            f"{len(devices)} stages need as many blocks of the model, and it has {len(blocks)}"
        )

    def divided(order: Sequence[int]) -> tuple[tuple[float, float], Cuts] | None:
        table = _Table(graph, costs, machine, [blocks[i] for i in order], state or {}, least)
        return table.divided(devices)

    table = _Table(graph, costs, machine, blocks, {})
    seconds = [table.seconds(i, i + 1, devices[0]) for i in range(len(blocks))]
    tries = min(_ORDERS, _STEPS // (len(devices) * len(blocks) ** 2))
    found = best_order(
        _before(graph, blocks), seconds, divided, itemgetter(0), lambda number, _: number < tries
    )
    if found is None:
        raise ScheduleError(
            "no cut leaves each device with no more than its memory; name more devices"
        )
    return found[1]


_ORDERS = 60  # that resemble the best one
_STEPS = 2_000_000  # of all of them


def _before(graph: Graph, blocks: Sequence[Block]) -> list[list[int]]:
    """Return for each block those before it with which it exchanges data, forward or backward.

    A backward may also read what any forward made, since that is done then.
    """
    found: list[set[int]] = [set() for _ in blocks]
    for phase in ([block.forward for block in blocks], [block.backward for block in blocks]):
        number = {task: i for i, tasks in enumerate(phase) for task in tasks}
        for task, own in number.items():
            for before, _ in graph.tasks[task].dependencies:
                first, second = sorted((own, number.get(before, own)))
                found[second].add(first)
    return [sorted(others - {i}) for i, others in enumerate(found)]


def by_map(graph: Graph, costs: Costs, machine: Machine, split: Mapping[str, str]) -> Cuts:
    """Cut by the user's map of modules to devices; unmatched blocks join the one before.

    Patterns are those of the shell, ``{"layer1.*": "cuda:0"}``, and also match the modules inside;
    the first match counts. Raises ScheduleError for one that matches nothing.
    """
    blocks = blocks_of(graph)
    for pattern, device in split.items():
        machine.device(device)
        if not any(_matches(block.name, pattern) for block in blocks):
            names = ", ".join(dict.fromkeys(block.name for block in blocks))
            raise ScheduleError(
                f"split= names {pattern!r}, which matches no module that was called; there are "
                f"{names}"
            )
    matches = [[split[p] for p in split if _matches(block.name, p)] for block in blocks]
    device = next((found[0] for found in matches if found), machine.names[0])
    devices: list[str] = []
    ends: list[int] = []
    for number, found in enumerate(matches):
        device = found[0] if found else device
        if not devices or device != devices[-1]:
            devices.append(device)
            ends.append(number)
        ends[-1] = number + 1
    return _Table(graph, costs, machine, blocks, {}).cuts(ends, devices)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")


class _Table:
    """Costs of blocks as cumulative sums, so that the cost of a stage is a difference."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        machine: Machine,
        blocks: Sequence[Block],
        state: Mapping[str, float],
        least: Costs | None = None,
    ):
        self.graph = graph
        self.costs = costs
        self.machine = machine
        self.blocks = blocks
        self.least = costs if least is None else least
        self._seconds: dict[object, list[float]] = {}
        self.readers: dict[int, list[int]] = {}  # by root value, the tasks that read its memory
        for task in graph.tasks:
            for use in task.reads:
                self.readers.setdefault(graph.values[use.value].root, []).append(task.index)
        self.crossing = self._crossing()
        self._memory = [0.0, *accumulate(self._nbytes(block, state) for block in blocks)]

    def divided(self, devices: Sequence[str]) -> tuple[tuple[float, float], Cuts] | None:
        """Return the best cuts, with the longest time and the time of sending; None if none fits."""
        # For each number of blocks that the stages so far have: the two times, and the cuts.
        best: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {0: ((0.0, 0.0), ())}
        count = len(self.blocks)
        for number, device in enumerate(devices):
            longer: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
            left = len(devices) - number - 1
            for end in range(number + 1, count - left + 1) if left else [count]:
                sending = self.sending(end, device, devices[number + 1]) if left else 0.0
                options = []
                for start, ((longest, sent), cuts) in best.items():
                    if start < end and self.fits(start, end, device, devices.count(device)):
                        slowest = max(longest, self.seconds(start, end, device), sending)
                        options.append(((slowest, sent + sending), (*cuts, end)))
                if options:
                    longer[end] = min(options)
            best = longer
        return (best[count][0], self.cuts(best[count][1], devices)) if count in best else None

    def seconds(self, start: int, end: int, device: str) -> float:
        found = self.machine.device(device)
        rates = (found.flops_per_second, found.bytes_per_second, found.launch_seconds)
        if rates not in self._seconds:
            tasks = self.graph.tasks
            each = [
                sum(self.costs.task_seconds(tasks[i], found) for i in (*b.forward, *b.backward))
                for b in self.blocks
            ]
            self._seconds[rates] = [0.0, *accumulate(each)]
        sums = self._seconds[rates]
        return sums[end] - sums[start]

    def sending(self, end: int, device: str, other: str) -> float:
        """Return the seconds to send the values that are read after a block to the next device."""
        if device == other:
            return 0.0
        return self.machine.copy_seconds(device, other, self.crossing[end - 1])

    def fits(self, start: int, end: int, device: str, times: int) -> bool:
        """Whether a device can hold blocks, so many ``times``."""
        nbytes = self._memory[end] - self._memory[start]
        return nbytes * times <= self.machine.device(device).nbytes

    def cuts(self, ends: Sequence[int], devices: Sequence[str]) -> Cuts:
        stages = zip((0, *ends), ends, devices, strict=False)
        seconds = tuple(self.seconds(start, end, device) for start, end, device in stages)
        nbytes = tuple(self.crossing[end - 1] for end in ends)
        return Cuts(tuple(self.blocks), tuple(ends), tuple(devices), seconds, nbytes)

    def _crossing(self) -> list[float]:
        """Return the bytes sent forward after each block: values made before, and read after it."""
        block = {task: number for number, found in enumerate(self.blocks) for task in found.forward}
        change = [0.0] * (len(self.blocks) + 1)
        for value in self.graph.values:
            if value.producer not in block or value.root != value.index:
                continue
            first = block[value.producer]
            readers = self.readers.get(value.index, ())
            final = max((block[user] for user in readers if user in block), default=first)
            change[first] += self.costs.value_nbytes(value)
            change[final] -= self.costs.value_nbytes(value)
        return list(accumulate(change))[:-1]

    def _nbytes(self, block: Block, state: Mapping[str, float]) -> float:
        """Return the bytes of a block's parameters, and of forward results for its backward."""
        tasks = [self.graph.tasks[i] for i in block.forward]
        backward = set(block.backward)
        read = {self.graph.values[use.value].name for task in tasks for use in task.reads}
        total = sum(nbytes for name, nbytes in state.items() if name in read)
        for use in (use for task in tasks for use in task.outputs):
            value = self.graph.values[use.value]
            readers = self.readers.get(use.value, ())
            if value.root == value.index and not backward.isdisjoint(readers):
                total += self.least.value_nbytes(value)
        return total
