"""Insert copies between devices.

A value that is read on another device is copied there, immediately after it is made unless the
placement asks for a later point. There is at most one copy per version and device.

* An input that tasks wrote is left as the serial run leaves it, wherever the writes ran: its last
  version is copied back over the caller's tensor (``copy w@1 -> cpu overwriting``).
* Copy streams are by direction, not by peer, because everything that leaves a device shares its
  port; policies, bounds, the simulator and the emulator model it the same way. A stream for each
  peer would use too many of torch's 32 streams where one GPU stands for several devices, and a
  separate memory pool for each. The cost: a copy from the host delays a copy from a peer.
* A copy transfers a whole value. A task needs all of what it reads, so parts that arrive earlier
  would let nothing begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any

from autosched.errors import ScheduleError
from autosched.graph.graph import Graph, Task, Use, Value
from autosched.machine.machine import Machine
from autosched.placement import Send, home
from autosched.program.program import Copy, Run, Stream
from autosched.program.residency import Residency

__all__ = ["check_outputs", "copy_streams", "insert_copies", "linked_source", "missing"]


def insert_copies(
    graph: Graph,
    machine: Machine,
    tasks: Sequence[Task],
    runs: Sequence[Run],
    outputs: Mapping[str, str],
    sends: Sequence[Send] = (),
) -> tuple[list[Run | Copy], dict[str, str]]:
    """Return the runs with copies inserted, and the final device of each output, by label.

    ``tasks`` are those of the runs, in the same order; ``sends`` are hints for the positions of
    copies.
    """
    check_outputs(graph, machine, outputs)
    walk = _Walk(graph, machine, _hints(graph, tasks, sends))
    # 1. Copy to each run what its device lacks.
    for i, (task, run) in enumerate(zip(tasks, runs, strict=True)):
        walk.run(i, task, run.stream.device)
    # 2. Copy inputs that tasks wrote back over the caller's tensors, and outputs where wanted.
    for value in graph.sources:
        if last := graph.last_version(value.index):
            walk.bring(Use(value.index, last), home(graph, machine, value))
    places: dict[str, str] = {}
    for label, index in graph.outputs.items():
        use = Use(index, graph.last_version(index))
        places[label] = outputs.get(label) or walk.origin(use)
        walk.bring(use, places[label])
    # 3. Put each copy after the run that it follows.
    result: list[Run | Copy] = walk.copies_after(-1)
    for i, run in enumerate(runs):
        result.append(run)
        result += walk.copies_after(i)
    return result, places


def check_outputs(graph: Graph, machine: Machine, outputs: Mapping[str, str]) -> None:
    """Raise ScheduleError for an unknown output, and MachineError for an unknown device."""
    for label, device in outputs.items():
        machine.device(device)
        if label not in graph.outputs:
            raise ScheduleError(
                f"outputs= names {label!r}, which is no output; outputs are {list(graph.outputs)}"
            )


def missing(table: Residency[int, Any], graph: Graph, task: Task, device: str) -> Iterator[Use]:
    """Yield the versions that a task reads and its device lacks.

    A task that touches a region needs any version: all tasks that write regions of a value share a
    device, so the other regions are there as well.
    """
    for use in task.reads:
        if graph.touched(task, use.value) is None:
            if table.get(*use, device) is None:
                yield use
        elif table.held(use.value, device) is None:
            yield Use(use.value, 0)


def _hints(
    graph: Graph, tasks: Sequence[Task], sends: Sequence[Send]
) -> dict[tuple[int, int, str], tuple[int, int]]:
    """Return for copies with hints the run after which they go, and their rank there."""
    position = {task.name: i for i, task in enumerate(tasks)} if sends else {}
    return {
        (graph.value(name).index, version, device): (position[before] - 1, rank)
        for rank, (name, version, device, before) in enumerate(sends)
    }


class _Walk:
    """The devices of each version, and the copies so far, while runs are walked in issue order."""

    def __init__(
        self, graph: Graph, machine: Machine, hints: Mapping[tuple[int, int, str], tuple[int, int]]
    ):
        self.graph = graph
        self.machine = machine
        self.hints = hints
        self.current = 0  # the current run
        self.maker: dict[Use, int] = {}  # the run that made a version, -1 for inputs
        self.table: Residency[int, Use] = Residency()
        # By the run after which they go, with their rank there.
        self.copies: dict[int, list[tuple[int, Copy]]] = {}
        self.count = 0
        self._streams = cache(partial(copy_streams, machine))
        self._home = {value.index: home(graph, machine, value) for value in graph.sources}
        for index, device in self._home.items():
            self._arrive(Use(index, 0), device, -1)

    def _arrive(self, use: Use, device: str, maker: int) -> None:
        self.maker[use] = maker
        self.table.put(*use, device, use)

    def run(self, i: int, task: Task, device: str) -> None:
        """Copy what a run reads to its device, and add the versions that it leaves there."""
        self.current = i
        for use in missing(self.table, self.graph, task, device):
            self.bring(use, device)
        for value, version in task.changes:
            new = self.table.change(value, version, device)
            if new is not None:
                self.maker[Use(value, new)] = i
        for use in task.outputs:
            self._arrive(use, device, i)

    def origin(self, use: Use) -> str:
        """Return the device of an input or constant, or where else this version was made."""
        return self._home.get(use.value) or self.table.devices(*use)[0]

    def copies_after(self, run: int) -> list[Run | Copy]:
        """Return the copies that go after a run, by their ranks."""
        return [copy for _, copy in sorted(self.copies.get(run, ()), key=itemgetter(0))]

    def bring(self, use: Use, device: str) -> None:
        """Copy a version to a device, unless it is there."""
        holders = self.table.devices(*use)
        if device in holders:
            return
        value = self.graph.values[use.value]
        source = linked_source(self.machine, holders, device, value)
        back = self.graph.last_version(use.value) > 0 and device == self._home.get(use.value)
        stream, also = self._streams(source, device, 0 if self.machine.contention else self.count)
        self.count += 1
        copy = Copy(stream, value.name, use.version, source, device, also, back)
        after, rank = self.hints.get((*use, device), (-1, -1))
        after = max(self.maker[use], min(after, self.current - 1))
        self.copies.setdefault(after, []).append((rank, copy))
        self.table.put(*use, device, use)


def linked_source(machine: Machine, holders: Sequence[str], device: str, value: Value) -> str:
    """Return the first holder with a link to a device. Raises ScheduleError if there is none."""
    for holder in holders:
        if machine.link(holder, device):
            return holder
    raise ScheduleError(
        f"value {value.name!r} is on {holders[0]!r} and needed on {device!r}, "
        f"but no link joins them"
    )


def copy_streams(
    machine: Machine, source: str, destination: str, number: int = 0
) -> tuple[Stream, Stream | None]:
    """Return the streams that a copy occupies.

    These are the copy stream of the accelerator, or those of both ends if both are accelerators or
    both are CPUs. Without contention each copy (by its ``number``) has a stream of its own.
    """
    if not machine.contention:
        return Stream(source, f"copy-{number}"), None
    out = Stream(source, "copy-out")
    into = Stream(destination, "copy-in")
    from_host, to_host = (machine.device(end).kind == "cpu" for end in (source, destination))
    if from_host and not to_host:
        return into, None
    if to_host and not from_host:
        return out, None
    return out, into
