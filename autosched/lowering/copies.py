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

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

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
    walk = _Walk(graph, maker, _hints(graph, tasks, sends))
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
    result: list[Run | Copy] = walk.copies_after(-1)
    for i, run in enumerate(runs):
        result.append(run)
        result += walk.copies_after(i)
    return result, places


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


def missing(table: Residency[int, Any], graph: Graph, task: Task, device: str) -> Iterator[Use]:
    """Yield the versions that a task reads and its device lacks.

    A task that touches a region needs any version: all tasks that write regions of a value share a
    device, so the other regions are there as well.
    """
    for use in task.reads:
        if task.region is None or graph.touched(task, use.value) is None:
            if table.get(*use, device) is None:
                yield use
        elif table.held(use.value, device) is None:
            yield Use(use.value, 0)


def _hints(
    graph: Graph, tasks: Sequence[Task], sends: Sequence[Send]
) -> dict[tuple[int, int, str], _Hint]:
    position = {task.name: i for i, task in enumerate(tasks)} if sends else {}
    return {
        (graph.value(name).index, version, device): _Hint(position[before] - 1, rank, source)
        for rank, (name, version, device, before, source) in enumerate(sends)
    }


class _Hint(NamedTuple):
    """The run after which a copy goes, its rank there, and the device that it is made from."""

    after: int = -1
    rank: int = -1
    source: str | None = None


class CopyMaker:
    """Makes copies: from the first device with a link, on copy streams."""

    def __init__(self, problem: Problem):
        self.graph = problem.graph
        self.machine = problem.machine
        self.home = problem.homes
        self.count = 0
        self._streams = cache(partial(copy_streams, self.machine))

    def overwrites(self, use: Use, device: str) -> bool:
        """Whether a copy overwrites the caller's tensor: of a written input, to its own device."""
        return device == self.home.get(use.value) and self.graph.last_version(use.value) > 0

    def origin(self, use: Use, holders: Sequence[str]) -> str:
        """Return the device of an input or constant, or the first that holds this version.

        The host if only storage does.
        """
        known = self.home.get(use.value)
        return known or next((at for at in holders if not is_storage(at)), self.machine.host)

    def stops(self, holders: Sequence[str], device: str) -> Sequence[str]:
        """Return where a version must be copied first, if no holder has a link to the device."""
        machine = self.machine
        if any(machine.link(holder, device) for holder in holders):
            return ()
        ways = (machine.route(holder, device) for holder in holders)
        return min((way[1:-1] for way in ways if way), key=len, default=())

    def copy(self, use: Use, holders: Sequence[str], device: str) -> Copy:
        """Return the copy of a version. Raises ScheduleError if no holder has a link."""
        name = self.graph.values[use.value].name
        source = next((holder for holder in holders if self.machine.link(holder, device)), None)
        if source is None:
            raise ScheduleError(
                f"value {name!r} is on {holders[0]!r} and needed on {device!r}, "
                f"but no link joins them"
            )
        stream, also = self._streams(source, device, 0 if self.machine.contention else self.count)
        self.count += 1
        overwrite = self.overwrites(use, device)
        return Copy(stream, name, use.version, source, device, also, overwrite)


class _Walk:
    """The devices of each version, and the copies so far, while runs are walked in issue order."""

    def __init__(self, graph: Graph, maker: CopyMaker, hints: Mapping[tuple[int, int, str], _Hint]):
        self.graph = graph
        self.maker = maker
        self.hints = dict(hints)
        self.current = 0  # the current run
        self.made: dict[Use, int] = {}  # the run that made a version, -1 for inputs
        self.copied: dict[tuple[Use, str], tuple[int, int]] = {}  # where a copy goes, and its rank
        self.table: Residency[int, Use] = Residency()
        # By the run after which they go, with their rank there.
        self.copies: dict[int, list[tuple[int, Copy]]] = {}
        for index, device in maker.home.items():
            self._arrive(Use(index, 0), device, -1)

    def _arrive(self, use: Use, device: str, run: int) -> None:
        self.made[use] = run
        self.table.put(*use, device, use)

    def run(self, i: int, task: Task, device: str) -> None:
        """Copy what a run reads to its device, and add the versions that it leaves there."""
        self.current = i
        for use in missing(self.table, self.graph, task, device):
            self.bring(use, device)
        for value, version in task.changes:
            new = self.table.change(value, version, device)
            if new is not None:
                self.made[Use(value, new)] = i
        for use in task.outputs:
            self._arrive(use, device, i)

    def copies_after(self, run: int) -> list[Run | Copy]:
        """Return the copies that go after a run, by their ranks."""
        return [copy for _, copy in sorted(self.copies.get(run, ()), key=itemgetter(0))]

    def bring(self, use: Use, device: str) -> None:
        """Copy a version to a device, unless it is there."""
        holders: Sequence[str] = self.table.devices(*use)
        if device in holders:
            return
        hint = self.hints.get((*use, device), _Hint())
        if hint.source is not None:
            holders = self._from(use, hint.source, device, holders)
        for stop in self.maker.stops(holders, device):
            self.bring(use, stop)
            holders = (*holders, stop)
        copy = self.maker.copy(use, holders, device)
        # Others may follow what is read from storage. No copy leaves before its source has arrived.
        after, rank = (-1, -1) if is_storage(copy.source) else (hint.after, hint.rank)
        before = max(self.made[use], min(after, self.current - 1)), rank
        place = max(before, self.copied.get((use, copy.source), (-1, -1)))
        self.copied[use, device] = place
        self.copies.setdefault(place[0], []).append((place[1], copy))
        self.table.put(*use, device, use)

    def _from(self, use: Use, source: str, device: str, holders: Sequence[str]) -> Sequence[str]:
        """Return the devices to copy from, ``source`` first, after copying the version there."""
        if self.maker.overwrites(use, source) or not self.maker.machine.link(source, device):
            return holders
        if source not in holders and source != device:
            # Hints may form a circle: this one does not count meanwhile.
            hint = self.hints.pop((*use, device))
            self.bring(use, source)
            self.hints[*use, device] = hint
        return (source, *holders)


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
