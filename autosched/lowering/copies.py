"""Insert copies between devices.

A value that is read on another device is copied there, immediately after it is made unless the
placement asks for a later point. There is at most one copy per version and device.

* An input that tasks wrote is left as the serial run leaves it, wherever the writes ran: its last
  version is copied back over the caller's tensor (``copy w@1 -> cpu overwriting``).
* Copy streams are by direction, not by peer, because everything that leaves a device shares its
  port; policies, bounds, the simulator and the emulator model it the same way. A stream for each
  peer would use too many of torch's 32 streams where one GPU stands for several devices, and a
  separate memory pool for each. The cost: a copy from the host delays a copy from a peer.
* Where no link joins two devices, a value goes by way of others (``Machine.route``), in one copy for
  each link. What has arrived there is copied from there again.
* A copy between ranks names a copy stream of each, since each rank issues its own half.
* A copy may name the device that it is made from: a copy between two accelerators occupies streams
  of both, so in a loop it would hold up both until the later one is free. Through the host, or
  through devices between, it does not.
* A copy transfers a whole value. A task needs all of what it reads, so parts that arrive earlier
  would let nothing begin.
* What a task reads from a file is on the storage device after that task, which takes no time: the
  copy from there to the host, on the same stream, reads the file. So reading again is one more
  copy, a value that is on storage need not be spilled, and memory, hazards and verification know
  no files. All other devices receive it from the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any

from autosched._lib.allowed import is_storage
from autosched.errors import ScheduleError
from autosched.graph.graph import Graph, Task, Use
from autosched.machine.machine import Machine
from autosched.placement import Send
from autosched.problem import Problem
from autosched.program.program import Copy, Run, Stream
from autosched.program.residency import Residency


def insert_copies(
    problem: Problem, tasks: Sequence[Task], runs: Sequence[Run], sends: Sequence[Send] = ()
) -> tuple[list[Run | Copy], dict[str, str]]:
    """Return the runs with copies inserted, and the final device of each output, by label.

    ``tasks`` are those of the runs, in the same order; ``sends`` are hints for the positions of
    copies.
    """
    graph = problem.graph
    outputs = problem.constraints.outputs
    check_outputs(problem)
    maker = CopyMaker(problem)
    walk = _Walk(maker, tasks, sends)
    # 1. Copy to each run what its device lacks.
    for i, (task, run) in enumerate(zip(tasks, runs, strict=True)):
        walk.run(i, task, run.stream.device)
    # 2. Copy inputs that tasks wrote back over the caller's tensors, and outputs where wanted.
    for value in graph.sources:
        if last := graph.last_version(value.index):
            walk.bring(Use(value.index, last), maker.home[value.index])
    places: dict[str, str] = {}
    for label, index in graph.outputs.items():
        use = Use(index, graph.last_version(index))
        places[label] = outputs.get(label) or maker.origin(use, walk.table.devices(*use))
        walk.bring(use, places[label])
    # 3. Put each copy after the run that it follows.
    result: list[Run | Copy] = []
    done = 0
    for (after, _), copy in sorted(walk.copies, key=itemgetter(0)):
        result += runs[done : after + 1]
        result.append(copy)
        done = after + 1
    return [*result, *runs[done:]], places


def check_outputs(problem: Problem) -> None:
    """Raise ScheduleError for an unknown output, and MachineError for an unknown device."""
    graph = problem.graph
    for label, device in problem.constraints.outputs.items():
        if problem.machine.device(device).is_storage:
            raise ScheduleError(f"output {label!r} cannot be on {device!r}, which is storage")
        if label not in graph.outputs:
            raise ScheduleError(
                f"outputs= names {label!r}, which is no output; outputs are {list(graph.outputs)}"
            )


def missing(table: Residency[int, Any], graph: Graph, task: Task, device: str) -> list[Use]:
    """Return the versions that a task reads and its device lacks.

    A task that touches a region needs any version: all tasks that write regions of a value share a
    device, so the other regions are there as well.
    """
    if task.region is None:
        return [use for use in task.reads if device not in table.items[use]]
    found = []
    for use in task.reads:
        if graph.touched(task, use.value) is None:
            found += [use] if table.get(*use, device) is None else []
        elif table.held(use.value, device) is None:
            found.append(Use(use.value, 0))
    return found


class CopyMaker:
    """Makes copies: from the first device with a link, on copy streams."""

    def __init__(self, problem: Problem):
        self.graph = problem.graph
        self.machine = problem.machine
        self.home = problem.homes
        self.count = 0
        self._link = cache(self.machine.link)
        self._streams = cache(partial(copy_streams, self.machine))

    def linked(self, holders: Iterable[str], device: str) -> str | None:
        """Return the first holder with a link to a device, if there is one."""
        for holder in holders:
            if self._link(holder, device) is not None:
                return holder
        return None

    def overwrites(self, use: Use, device: str) -> bool:
        """Whether a copy overwrites the caller's tensor: of a written input, to its own device."""
        return device == self.home.get(use.value) and self.graph.last_version(use.value) > 0

    def origin(self, use: Use, holders: Sequence[str]) -> str:
        """Return the device of an input or constant, or the first that holds this version.

        The host if only storage does.
        """
        known = self.home.get(use.value)
        return known or next((at for at in holders if not is_storage(at)), self.machine.host)

    def stops(self, holders: Iterable[str], device: str) -> Sequence[str]:
        """Return where a version must be copied first, if no holder has a link to the device."""
        if self.linked(holders, device):
            return ()
        ways = (self.machine.route(holder, device) for holder in holders)
        return min((way[1:-1] for way in ways if way), key=len, default=())

    def copy(
        self, use: Use, holders: Iterable[str], device: str, source: str | None = None
    ) -> Copy:
        """Return the copy of a version, from ``source`` or the first holder with a link.

        Raises ScheduleError if there is none.
        """
        name = self.graph.values[use.value].name
        source = source or self.linked(holders, device)
        if source is None:
            raise ScheduleError(
                f"value {name!r} is on {next(iter(holders))!r} and needed on {device!r}, "
                f"but no link joins them"
            )
        stream, also = self._streams(source, device, 0 if self.machine.contention else self.count)
        self.count += 1
        overwrite = self.overwrites(use, device)
        return Copy(stream, name, use.version, source, device, also, overwrite)


class _Walk:
    """The devices of each version, and the copies so far, while runs are walked in issue order."""

    def __init__(self, maker: CopyMaker, tasks: Sequence[Task], sends: Sequence[Send]):
        self.graph = maker.graph
        self.maker = maker
        self.position = {task.name: i for i, task in enumerate(tasks)}
        self.names = [value.name for value in self.graph.values]
        # By value, version and device, with its rank.
        self.sends = {send[:3]: (rank, send) for rank, send in enumerate(sends)}
        self.current = 0  # the current run
        # When a version arrives: after this run, and the rank there of the copy that brings it.
        self.table: Residency[int, tuple[int, int]] = Residency()
        self.copies: list[tuple[tuple[int, int], Copy]] = []
        for index, device in maker.home.items():
            self.table.put(index, 0, device, (-1, -1))

    def run(self, i: int, task: Task, device: str) -> None:
        """Copy what a run reads to its device, and add the versions that it leaves there."""
        self.current = i
        for use in missing(self.table, self.graph, task, device):
            self.bring(use, device)
        for value, version in task.changes:
            new = self.table.change(value, version, device)
            if new is not None:
                self.table.items[value, new][device] = i, -1
        for value, version in task.outputs:
            self.table.put(value, version, device, (i, -1))

    def bring(self, use: Use, device: str) -> None:
        """Copy a version to a device, unless it is there."""
        there = self.table.items[use]
        if device in there:
            return
        key = self.names[use.value], use.version, device
        rank, send = self.sends.get(key, (-1, None))
        after = -1
        source = None
        if send is not None:
            after = self.position[send.before] - 1
            if send.source is not None:
                source = self._source(use, send)
        if source is None:
            for stop in self.maker.stops(there, device):
                self.bring(use, stop)
        copy = self.maker.copy(use, there, device, source)
        if is_storage(copy.source):  # others may follow what is read from there
            after, rank = -1, -1
        # No copy leaves before its source has arrived.
        arrived = there[copy.source]
        place = max((max(arrived[0], min(after, self.current - 1)), rank), arrived)
        self.copies.append((place, copy))
        self.table.put(*use, device, place)

    def _source(self, use: Use, send: Send) -> str | None:
        """Return the source that a hint names, after copying the version there, if that is possible."""
        source = send.source
        assert source is not None
        if self.maker.overwrites(use, source) or not self.maker.machine.link(source, send.device):
            return None
        if source != send.device:
            # Hints may form a circle: this one does not count meanwhile.
            hint = self.sends.pop(send[:3])
            self.bring(use, source)
            self.sends[send[:3]] = hint
        return source


def copy_streams(
    machine: Machine, source: str, destination: str, number: int = 0
) -> tuple[Stream, Stream | None]:
    """Return the streams that a copy occupies.

    These are the copy stream of the accelerator, or those of both ends if both are accelerators or
    both are CPUs; and of both ends between ranks. Without contention each copy (by its ``number``)
    has a stream of its own. A storage device has one stream.
    """
    if is_storage(source):
        return Stream(source, "read"), None
    apart = bool(machine.ranks) and machine.ranks[source] != machine.ranks[destination]
    if not machine.contention:
        name = f"copy-{number}"
        return Stream(source, name), Stream(destination, name) if apart else None
    out = Stream(source, "copy-out")
    into = Stream(destination, "copy-in")
    from_host, to_host = (machine.device(end).kind == "cpu" for end in (source, destination))
    if from_host == to_host or apart:
        return out, into
    return (into if from_host else out), None
