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

from collections.abc import Mapping, Sequence
from functools import cache, partial
from operator import itemgetter

from autosched.errors import ScheduleError
from autosched.graph.graph import Graph, Task, Use
from autosched.machine.machine import Machine
from autosched.placement import Send, home
from autosched.program.program import Copy, Run, Stream
from autosched.program.residency import Standing

__all__ = ["check_outputs", "copy_streams", "insert_copies"]


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
    travel = _Travel(graph, machine, _slots(graph, tasks, sends))
    for i, (task, run) in enumerate(zip(tasks, runs, strict=True)):
        travel.run(i, task, run.stream.device)
    for value in graph.sources:
        if last := graph.last_version(value.index):
            travel.bring(Use(value.index, last), home(graph, machine, value))
    places: dict[str, str] = {}
    for label, index in graph.outputs.items():
        use = Use(index, graph.last_version(index))
        value = graph.values[index]
        made = home(graph, machine, value) if value.producer is None else travel.holders[use][0]
        places[label] = outputs.get(label, made)
        travel.bring(use, places[label])
    result: list[Run | Copy] = travel.behind(-1)
    for i, run in enumerate(runs):
        result.append(run)
        if i in travel.copies:
            result += travel.behind(i)
    return result, places


def check_outputs(graph: Graph, machine: Machine, outputs: Mapping[str, str]) -> None:
    """Raise ScheduleError for an unknown output, and MachineError for an unknown device."""
    for label, device in outputs.items():
        machine.device(device)
        if label not in graph.outputs:
            raise ScheduleError(
                f"outputs= names {label!r}, which is no output; outputs are {list(graph.outputs)}"
            )


def _slots(
    graph: Graph, tasks: Sequence[Task], sends: Sequence[Send]
) -> dict[tuple[int, int, str], tuple[int, int]]:
    """Return for copies with hints the run after which they go, and their rank there."""
    if not sends:
        return {}
    position = {task.name: i for i, task in enumerate(tasks)}
    return {
        (graph.value(send.value).index, send.version, send.device): (
            position[send.before] - 1,
            rank,
        )
        for rank, send in enumerate(sends)
    }


class _Travel:
    """The devices of each version of each value, while runs are walked in issue order."""

    def __init__(
        self, graph: Graph, machine: Machine, slots: Mapping[tuple[int, int, str], tuple[int, int]]
    ):
        self.graph = graph
        self.slots = slots
        self.at = -1  # the run before the current one
        self.machine = machine
        self.maker: dict[Use, int] = {}  # the run that made a version, -1 for inputs
        self.holders: dict[
            Use, tuple[str, ...]
        ] = {}  # devices that hold it; the first is where it was made
        self.standing: Standing[int, None] = Standing()  # only of values that are written
        self.copies: dict[
            int, list[tuple[int, Copy]]
        ] = {}  # by the run after which they go, with their rank there
        self.count = 0
        self._streams = cache(partial(copy_streams, machine))
        for value in graph.sources:
            self._arrive(Use(value.index, 0), home(graph, machine, value), -1)

    def _arrive(self, use: Use, device: str, maker: int) -> None:
        self.maker[use] = maker
        self.holders[use] = (device,)
        if self.graph.last_version(use.value):
            self.standing.put(*use, device, None)

    def run(self, i: int, task: Task, device: str) -> None:
        """Copy what a run reads to its device, and add the versions that it leaves there."""
        self.at = i - 1
        for use in task.reads:
            if task.region is not None and self.graph.touched(task, use.value) is not None:
                self._bring_part(use, device)
            elif device not in self.holders[use]:
                self.bring(use, device)
        for value, version in task.changes:
            stands = self.standing.change(value, version, device)
            if stands is not None:
                left = Use(value, stands)
                self.maker[left] = i
                self.holders[left] = (device,)
        for use in task.outputs:
            self._arrive(use, device, i)

    def behind(self, run: int) -> list[Run | Copy]:
        """Return the copies after a run."""
        return [copy for _, copy in sorted(self.copies.get(run, ()), key=itemgetter(0))]

    def _bring_part(self, use: Use, device: str) -> None:
        """Copy a value of which a task touches a part, unless some version is there.

        All tasks that write parts share the device, so the other parts are there as well.
        """
        written = self.graph.last_version(use.value) > 0
        if not written or self.standing.latest(use.value, device) is None:
            self.bring(Use(use.value, 0), device)

    def bring(self, use: Use, device: str) -> None:
        """Copy a version to a device, unless it is there."""
        holders = self.holders[use]
        if device in holders:
            return
        value = self.graph.values[use.value]
        source = next((holder for holder in holders if self.machine.link(holder, device)), None)
        if source is None:
            raise ScheduleError(
                f"value {value.name!r} is on {holders[0]!r} and needed on {device!r}, but no link joins them"
            )
        written = self.graph.last_version(use.value) > 0
        back = (
            written and value.producer is None and device == home(self.graph, self.machine, value)
        )
        stream, also = self._streams(source, device, 0 if self.machine.contention else self.count)
        self.count += 1
        copy = Copy(stream, value.name, use.version, source, device, also, back)
        slot, rank = self.slots.get((*use, device), (-1, -1))
        slot = max(self.maker[use], min(slot, self.at))
        self.copies.setdefault(slot, []).append((rank, copy))
        self.holders[use] = (*holders, device)
        if written:
            self.standing.put(*use, device, None)


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
