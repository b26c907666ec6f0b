"""Define the seconds of tasks and the bytes of values.

Costs are plain data: given as a table, estimated from work and rates (the roofline model),
measured, or learnt from a profile. The route of a copy and the time on a link belong to the
machine. This module does not import torch.

A task that alone exceeds the memory of a device has infinite seconds there. So policies and bounds
avoid that device without modelling memory, and a task without any device is a proof that no
schedule exists.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from autosched._lib import json_reader
from autosched._lib.allowed import by_device, is_number, no_seconds
from autosched._lib.tree import flatten
from autosched.errors import ScheduleError, shown
from autosched.graph.graph import Graph, Task, Value
from autosched.machine.machine import Device

Seconds = float | Mapping[str, float]


@dataclass(frozen=True)
class Work:
    """The work of a task on any device: floating point operations, bytes, operators launched.

    The bytes are those read and written. Raises ScheduleError for numbers that are negative,
    infinite or not numbers.

    >>> device = Device("cuda:0", flops_per_second=1e12, launch_seconds=0)
    >>> Work(flops=2e9, nbytes=1e6).seconds(device)
    0.002
    """

    flops: float
    nbytes: float
    launches: float = 1

    def __post_init__(self) -> None:
        _check_finite(self.flops, "flops of work")
        _check_finite(self.nbytes, "nbytes of work")
        _check_finite(self.launches, "launches of work")

    def seconds(self, device: Device) -> float:
        """Return the seconds on a device by the roofline model.

        Source: Williams, Waterman, Patterson, CACM 2009.
        """
        return self.launches * device.launch_seconds + self.busy_seconds(device)

    def busy_seconds(self, device: Device) -> float:
        """Return for how long this work takes all that a device can do: its seconds unlaunched."""
        return max(self.flops / device.flops_per_second, self.nbytes / device.bytes_per_second)


@dataclass(frozen=True)
class Replay:
    """Seconds for which the host is busy in a run that replays CUDA graphs.

    ``call``: from the call to the first launch; ``graph``: to launch a graph, and ``node``: for
    each kernel in it. Raises ScheduleError for numbers that are negative or infinite.

    >>> Costs(replay=Replay(node=1e-6)).replay
    Replay(call=5e-05, graph=1.5e-05, node=1e-06)
    """

    call: float = 50e-6
    graph: float = 15e-6
    node: float = 0.35e-6

    def __post_init__(self) -> None:
        for name in ("call", "graph", "node"):
            _check_finite(getattr(self, name), f"{name} of replay")


@dataclass(frozen=True)
class Costs:
    """Seconds per task and device, and bytes per value.

    The first source that has a number is used:

    1. ``seconds`` and ``nbytes`` of this table, by name;
    2. what the user gave when adding the task;
    3. 0 for views;
    4. for merged tasks, the costs of their parts, by name;
    5. the roofline of ``work``;
    6. ``default_seconds`` and ``default_nbytes``.

    Numbers are 0 or more. Seconds may be infinite: a task cannot run there. Raises ScheduleError
    for any other. ``pageable`` names inputs and constants in host memory that is not page-locked:
    see ``Link``. ``issue`` has the seconds for which a thread is busy issuing a task to an
    accelerator, where they are not its launches times ``Device.issue_seconds``; ``replay`` those of
    a replayed run. ``shares`` has the part of a device, from 0 to 1, that a task takes while it has
    the device to itself, where that is not to be guessed from its work: see ``busy_seconds``.

    >>> seconds = {"a": 1.0, "b": {"cpu:0": 2.0, "cpu:1": 3.0}}
    >>> costs = Costs.table(seconds, nbytes={"a": 4096})
    >>> costs.override(seconds={"a": 0.5}).seconds["a"]
    0.5
    """

    seconds: Mapping[str, Seconds] = field(default_factory=dict)
    nbytes: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, Work] = field(default_factory=dict)
    default_seconds: float = 1e-5
    default_nbytes: float = 0.0
    pageable: frozenset[str] = frozenset()
    issue: Mapping[str, float] = field(default_factory=dict)
    replay: Replay | None = None
    shares: Mapping[str, Seconds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in ("seconds", "nbytes", "work", "issue", "shares"):
            _check_table(getattr(self, kind), kind)
        if any(by_device(given) is not given for given in self.seconds.values()):
            table = {name: by_device(given) for name, given in self.seconds.items()}
            object.__setattr__(self, "seconds", table)
        for name, given in self.seconds.items():
            for number in no_seconds(given):
                _require(False, f"seconds of {name!r} must be a number, 0 or more", number)
        for kind in ("nbytes", "issue"):
            for name, number in getattr(self, kind).items():
                _check_finite(number, f"{kind} of {name!r}")
        for name, share in self.shares.items():
            for part in share.values() if isinstance(share, Mapping) else (share,):
                fits = is_number(part) and part <= 1
                _require(fits, f"share of {name!r} must be a number from 0 to 1", part)
        for name, work in self.work.items():
            fits = isinstance(work, Work)
            _require(fits, f"work of {name!r} must be Work(flops, nbytes)", work)
        fits = is_number(self.default_seconds, infinite=True)
        _require(fits, "default_seconds must be a number, 0 or more", self.default_seconds)
        _check_finite(self.default_nbytes, "default_nbytes")
        names = self.pageable
        fits = isinstance(names, frozenset) and all(isinstance(name, str) for name in names)
        _require(fits, "pageable must be a frozenset of names of inputs", names)
        fits = self.replay is None or isinstance(self.replay, Replay)
        _require(fits, "replay of costs must be Replay(call, graph, node) or None", self.replay)

    @classmethod
    def table(
        cls, seconds: Mapping[str, Seconds], nbytes: Mapping[str, float] | None = None
    ) -> Costs:
        """Make costs of tables: seconds by task name, bytes by value name.

        The seconds of a task are one number, or one per device.
        """
        return cls().override(seconds, nbytes)

    @classmethod
    def estimate(cls, graph: Graph, examples: Mapping[str, Any]) -> Costs:
        """Return the work of tasks and the bytes of values for such inputs, without computing them.

        What cannot be estimated keeps its default. Raises GraphError for missing and unknown
        examples.

        >>> import torch
        >>> graph = Graph()
        >>> y = graph.input("x") + 1
        >>> Costs.estimate(graph, {"x": torch.zeros(2, 3)}).work["add"].flops
        6
        """
        from autosched.costs.estimate import estimate

        return estimate(graph, examples).costs

    def to_json(self) -> str:
        """Return the costs as JSON; infinite seconds are the string "inf".

        Raises ScheduleError for keys that are not strings.
        """
        return json.dumps(json_reader.json_data(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read the text of ``to_json``, or parts of it.

        Raises ScheduleError naming what is malformed.

        >>> costs = Costs.table(seconds={"a": math.inf}, nbytes={"a": 4096})
        >>> Costs.from_json(costs.to_json()) == costs
        True
        """
        try:
            costs: Costs = json_reader.parse(text, READER)
        except ScheduleError as error:
            raise ScheduleError(f"not the JSON of costs: {error}") from error
        return costs

    def override(
        self,
        seconds: Mapping[str, Seconds] | None = None,
        nbytes: Mapping[str, float] | None = None,
        pageable: Iterable[str] = (),
    ) -> Costs:
        """Return costs in which these entries replace, or are added to, the present ones.

        >>> Costs().override(pageable=["x"]).pageable
        frozenset({'x'})
        """
        _check_table(seconds := seconds or {}, "seconds")
        _check_table(nbytes := nbytes or {}, "nbytes")
        tables = {**self.seconds, **seconds}, {**self.nbytes, **nbytes}
        pageable = self.pageable.union(pageable)
        return replace(self, seconds=tables[0], nbytes=tables[1], pageable=pageable)

    def task_seconds(self, task: Task, device: Device) -> float:
        """Return the seconds of a task on a device; infinity if a table omits the device.

        On a storage device reading takes no time: the copies from there do.
        """
        if device.is_storage:
            return 0.0 if task.reads_file else math.inf
        given = self._given(task)
        if given is not None:
            return float(given.get(device.name, math.inf) if isinstance(given, Mapping) else given)
        if task.view:
            return 0.0
        if task.parts:
            return sum(self.task_seconds(part, device) for part in task.parts)
        work = self.work.get(task.name)
        return self.default_seconds if work is None else work.seconds(device)

    def _given(self, task: Task) -> Seconds | None:
        return self.seconds.get(task.name, task.seconds)

    def busy_seconds(self, task: Task, device: Device) -> float:
        """Return for how many of its seconds a task takes all that a device can do.

        Tasks on other streams can use the device in the rest. By ``shares``; else as a guess from
        the work of the task and the rates of the device. Where its seconds are given, and its work
        is not known, it takes nothing from others; nor does a task on a CPU, whose seconds are then
        those on one of its streams.
        """
        seconds = self.task_seconds(task, device)
        share = self.shares.get(task.name)
        if isinstance(share, Mapping):
            share = share.get(device.name)
        if share is not None:
            return share * seconds
        if task.view or device.is_storage or seconds == math.inf:
            return 0.0
        if self._given(task) is not None and device.kind == "cpu":
            return 0.0
        if task.parts:
            return min(seconds, sum(self.busy_seconds(part, device) for part in task.parts))
        work = self.work.get(task.name)
        return 0.0 if work is None else min(seconds, work.busy_seconds(device))

    def has_sharing(self, devices: Iterable[Device]) -> bool:
        """Return whether tasks on several streams of a device may take it from each other.

        So may tasks on several logical devices on one GPU.
        """
        known = any(self.shares.values()) or self.work.keys() - self.shares.keys()
        streams = Counter({device.hardware: 0 for device in devices})
        for device in devices:
            streams[device.hardware] += device.streams
        return bool(known) and any(count > 1 for count in streams.values())

    def guess(self, graph: Graph) -> str:
        """Return what is guessed about tasks of unknown duration; nothing if all are known."""
        tasks = [task for task in graph.tasks if not task.view and not task.reads_file]
        unknown = sum(map(self._is_unknown, tasks))
        if not unknown or self.default_seconds != Costs.default_seconds:
            return ""
        which = "each task" if unknown == len(tasks) else f"{unknown} of {len(tasks)} tasks"
        return f"{self.default_seconds * 1e6:.0f} us guessed for {which}"

    def basis(self, task: Task) -> str:
        """Return how the seconds of a task are found; nothing if they are given."""
        if self._is_unknown(task):
            return "a guess"
        given = self._given(task) is not None or task.view
        return "" if given or self.is_by_name(task) else "estimated from its work"

    def _is_unknown(self, task: Task) -> bool:
        if self._given(task) is not None or task.view:
            return False
        if task.parts:
            return any(map(self._is_unknown, task.parts))
        return task.name not in self.work

    def everywhere(self, task: Task, devices: Sequence[Device]) -> float | list[float]:
        """Return the seconds of a task on each device, or one number if it is the same on all."""
        if any(device.is_storage for device in devices):
            return [self.task_seconds(task, device) for device in devices]
        given = self._given(task)
        if type(given) is float or type(given) is int:
            return float(given)
        return [self.task_seconds(task, device) for device in devices]

    def is_by_name(self, task: Task) -> bool:
        """Return whether the seconds of a task are given for devices by their names."""
        given = self._given(task)
        return isinstance(given, Mapping) or (
            given is None and any(map(self.is_by_name, task.parts))
        )

    def launches(self, task: Task) -> float:
        """Return the number of operators that a task launches: 1 where its work is unknown.

        A merged task launches its operators one by one, also where its seconds are given; a fused
        one does not.
        """
        if task.view:
            return 0.0
        given = self._given(task)
        if task.parts and (given is None or task.fn is task.composite):
            return sum(map(self.launches, task.parts))
        work = self.work.get(task.name)
        return 1.0 if given is not None or work is None else work.launches

    def issue_seconds(self, task: Task, device: Device) -> float:
        """Return for how long a thread is busy issuing a task; a CPU's own thread never is."""
        if not device.is_accelerator or task.view:
            return 0.0
        if self.replay is not None:
            return self.launches(task) * self.replay.node
        known = self.issue.get(task.name)
        if known is not None:
            return float(known)
        if task.parts and self._given(task) is None:
            return sum(self.issue_seconds(part, device) for part in task.parts)
        return self.launches(task) * device.issue_seconds

    def has_issuing(self, devices: Iterable[Device]) -> bool:
        """Return whether issuing work to one of these devices takes time."""
        return bool(self.issue) or self.replay is not None or any(d.has_issuing for d in devices)

    def value_nbytes(self, value: Value) -> float:
        """Return the bytes of a value."""
        given = self.nbytes.get(value.name, value.nbytes)
        return float(self.default_nbytes if given is None else given)

    def restricted(self, graph: Graph) -> Costs:
        """Return costs without entries for names that a graph does not have."""
        names = _names_of(graph)
        tables: dict[str, Any] = {
            kind: {name: item for name, item in getattr(self, kind).items() if name in known}
            for kind, known in names.items()
        }
        sources = {value.name for value in graph.sources}
        return replace(self, **tables, pageable=self.pageable & sources)

    def check(self, graph: Graph) -> None:
        """Raise ScheduleError if a table has names that the graph does not have.

        A misspelt name would have no effect.
        """
        tables = self.seconds, self.nbytes, self.work, self.issue, self.shares
        if not any((*tables, self.pageable)):
            return
        for kind, known in _names_of(graph).items():
            for name in getattr(self, kind):
                if name not in known:
                    what = f"costs give {kind} for {name!r}"
                    raise ScheduleError(f"{what}, which graph {graph.name!r} does not have")
        for name in sorted(self.pageable.difference(value.name for value in graph.sources)):
            raise ScheduleError(
                f"costs call {name!r} pageable, which is no input of graph {graph.name!r}"
            )


def _names_of(graph: Graph) -> dict[str, set[str]]:
    """Return the names that each table may have: those of tasks and values, and of parts."""
    called = list(chain.from_iterable(task.with_parts() for task in graph.tasks))
    tasks = {task.name for task in called}
    results = chain.from_iterable(flatten(task.result) for task in called)
    values = {value.name for value in chain(graph.values, results)}
    return {"nbytes": values, **dict.fromkeys(("seconds", "work", "issue", "shares"), tasks)}


def _require(fits: bool, what: str, got: Any) -> None:
    if not fits:
        raise ScheduleError(f"{what}, got {shown(got)}")


def _check_table(given: Any, kind: str) -> None:
    _require(isinstance(given, Mapping), f"{kind} must be a table by name", given)


def _check_finite(number: Any, what: str) -> None:
    _require(is_number(number), f"{what} must be a number, 0 or more, and finite", number)


def _seconds(item: Any, place: str) -> Any:
    """Read the seconds of a task: a number, or one per device."""
    number = json_reader.NUMBER
    return (json_reader.table(number) if isinstance(item, dict) else number)(item, place)


READER = json_reader.record(
    Costs,
    seconds=json_reader.table(_seconds),
    nbytes=json_reader.table(json_reader.NUMBER),
    work=json_reader.table(json_reader.record(Work)),
    pageable=lambda item, place: frozenset(json_reader.each(json_reader.TEXT)(item, place)),
    issue=json_reader.table(json_reader.NUMBER),
    replay=json_reader.record(Replay),
    shares=json_reader.table(_seconds),
)
