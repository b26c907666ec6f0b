"""Insert copies: a value that is read on another device travels there, right behind what made it.

At most one copy per version and device. An input that tasks wrote elsewhere is copied back over the caller's tensor,
which is so left as the serial run leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial

from autosched.errors import ScheduleError
from autosched.graph import Graph, Use
from autosched.machine import Machine
from autosched.placement import home
from autosched.program import Copy, Run, Stream
from autosched.standing import Standing

__all__ = ["copy_streams", "insert_copies"]


def insert_copies(
    graph: Graph, machine: Machine, runs: Sequence[Run], outputs: Mapping[str, str]
) -> tuple[list[Run | Copy], dict[str, str]]:
    """Return the runs with copies between them, and where each output is at the end, by its label."""
    for label, device in outputs.items():
        machine.device(device)
        if label not in graph.outputs:
            raise ScheduleError(f"outputs= names {label!r}, which is no output; outputs are {list(graph.outputs)}")
    travel = _Travel(graph, machine)
    for i, run in enumerate(runs):
        task = graph.task(run.task)
        for use in task.reads:
            travel.bring(use, run.stream.device, graph.touched(task, use.value) is not None)
        travel.made(i, run.stream.device, task.changes, task.outputs)
    for value in graph.sources:
        if last := graph.last_version(value.index):
            travel.bring(Use(value.index, last), home(graph, machine, value))
    places: dict[str, str] = {}
    for label, index in graph.outputs.items():
        value, use = graph.values[index], Use(index, graph.last_version(index))
        made = home(graph, machine, value) if value.producer is None else travel.origin[use]
        places[label] = outputs.get(label, made)
        travel.bring(use, places[label])
    result: list[Run | Copy] = list(travel.copies.get(-1, ()))
    for i, run in enumerate(runs):
        result += [run, *travel.copies.get(i, ())]
    return result, places


class _Travel:
    """Where each version of each value is, while runs are walked in issue order."""

    def __init__(self, graph: Graph, machine: Machine):
        self.graph = graph
        self.machine = machine
        self.origin: dict[Use, str] = {}  # the device where a version was made
        self.maker: dict[Use, int] = {}  # the run that made it, -1 for what was there
        self.holders: dict[Use, tuple[str, ...]] = {}
        self.standing: Standing[int, None] = Standing()
        self.copies: dict[int, list[Copy]] = {}  # by the run that they stand behind
        self.count = 0
        self._streams = cache(partial(copy_streams, machine))
        for value in graph.sources:
            self._arrive(Use(value.index, 0), home(graph, machine, value), -1)

    def _arrive(self, use: Use, device: str, maker: int) -> None:
        self._note(use, device, maker)
        self.standing.put(*use, device, None)

    def _note(self, use: Use, device: str, maker: int) -> None:
        self.origin[use], self.maker[use], self.holders[use] = device, maker, (device,)

    def made(self, run: int, device: str, changes: Sequence[Use], outputs: Sequence[Use]) -> None:
        """Take note of what a run leaves on its device."""
        for value, version in changes:
            stands = self.standing.change(value, version, device)
            if stands is not None:
                self._note(Use(value, stands), device, run)
        for use in outputs:
            self._arrive(use, device, run)

    def bring(self, use: Use, device: str, part: bool = False) -> None:
        """Copy a version to a device, if it is not there; of a part any version will do, since others are not there."""
        if part:
            if self.standing.latest(use.value, device) is not None:
                return
            use = Use(use.value, 0)
        if device in self.holders[use]:
            return
        value = self.graph.values[use.value]
        for source in (self.origin[use], *self.holders[use]):
            if self.machine.link(source, device):
                break
        else:
            raise ScheduleError(
                f"value {value.name!r} is on {self.origin[use]!r} and needed on {device!r}, but no link joins them"
            )
        written = value.producer is None and self.graph.last_version(use.value) > 0
        back = written and device == home(self.graph, self.machine, value)
        stream, also = self._streams(source, device, 0 if self.machine.contention else self.count)
        self.count += 1
        copy = Copy(stream, value.name, use.version, source, device, also, overwrite=back)
        self.copies.setdefault(self.maker[use], []).append(copy)
        self.holders[use] += (device,)
        self.standing.put(*use, device, None)


def copy_streams(machine: Machine, source: str, destination: str, number: int = 0) -> tuple[Stream, Stream | None]:
    """Return the streams that a copy occupies: that of the accelerator, or of both ends where both are of one sort.

    Without contention each copy (by its ``number``) has a stream of its own.
    """
    if not machine.contention:
        return Stream(source, f"copy-{number}"), None
    out, into = Stream(source, "copy-out"), Stream(destination, "copy-in")
    from_host, to_host = (machine.device(end).kind == "cpu" for end in (source, destination))
    if from_host and not to_host:
        return into, None
    if to_host and not from_host:
        return out, None
    return out, into
