"""The scheduling problem: a graph, a machine, costs, constraints and the goal.

It is made once for a plan, and never changes. Policies, bounds, lowering and explanations take it.
Its ``tables`` have it as numbers: tasks, devices and data are numbered there. A *datum* is a
version of a value that tasks read. The tables hold durations of single tasks and copies, and no
start times. Policies, their kernels, constraint programming and lower bounds all read them, or a
view of them in other units. They are made when they are first read, once for all policies, so
nothing may write to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.gc_pause import without_collecting
from autosched.costs.costs import Costs
from autosched.errors import MemoryLimitError, ScheduleError, listed, shown
from autosched.graph.constraints import Bond, by_value, released
from autosched.graph.flow import flow, grouped, ragged
from autosched.graph.graph import HOST, STORAGE, Graph, Task, Use, Value
from autosched.machine.machine import Device, Machine
from autosched.placement import Choices, Placement, Send, choices

Objective = Literal["makespan", "period"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = Sequence[Sequence[int]]


class Tables(NamedTuple):
    """The arrays, flat for kernels: row ``i`` of a table of width ``w`` begins at ``i * w``.

    A ragged table is a pair of arrays: the offset of each row, and the numbers (CSR). A datum is
    produced by task ``maker``, or is on device ``home`` from the beginning if that is -1. Its
    copies take ``latency + nbytes / rate``, read in the row of the device that it is copied from,
    or in row ``row`` if it has no producer: after the rows of devices come those of their pageable
    memory.
    """

    seconds: Floats  # [task, device], infinite where a task cannot run
    together: Floats  # [task, device], of all tasks of its group
    least: Floats  # [task], the least of ``together``
    streams: Ints  # [device], its compute streams
    group: Ints  # [task]; tasks of one group share a device
    before_at: Ints
    before: Ints  # predecessors whose data the task does not read
    reads_at: Ints
    reads: Ints  # data that must be on the task's device
    maker: Ints  # [datum]
    home: Ints  # [datum], -1 for data with a producer
    row: Ints  # [datum], -1 for data with a producer
    nbytes: Floats  # [datum]
    latency: Floats  # [source row, device]
    rate: Floats  # [source row, device]
    holds_out: Ints  # [source row, device]: a copy occupies the source's copy-out stream
    holds_in: Ints  # [source row, device]: a copy occupies the destination's copy-in stream
    issue: Floats  # [task, device], of a thread, before the task can start
    issue_copy: Floats  # [source row, device]
    begin: Floats  # one number: when threads begin to issue
    returns: Ints  # data that are copied back in the end, since tasks write inputs,
    returns_to: Ints  # to these devices

    def reversed(self) -> Tables:
        """Return the tables of the reversed graph: its task ``i`` is task ``n - 1 - i``.

        Each read of a task's result becomes a datum of its own, which is copied in the other
        direction.
        """
        n = len(self.group)
        devices = len(self.streams)
        reader = np.repeat(np.arange(n), np.diff(self.reads_at))
        made = self.maker[self.reads] >= 0
        reader = reader[made]
        datum = self.reads[made]
        later = np.repeat(np.arange(n), np.diff(self.before_at))
        flip = [table.reshape(n, devices)[::-1].ravel() for table in (self.seconds, self.together)]
        before_at, before = grouped(n - 1 - self.before, n - 1 - later, n)
        reads_at, reads = grouped(n - 1 - self.maker[datum], np.arange(len(datum)), n)
        return Tables(
            seconds=flip[0],
            together=flip[1],
            least=self.least[::-1].copy(),
            streams=self.streams,
            group=n - 1 - self.group[::-1],
            before_at=before_at,
            before=before,
            reads_at=reads_at,
            reads=reads,
            maker=n - 1 - reader,
            home=np.full(len(datum), -1),
            row=np.full(len(datum), -1),
            nbytes=self.nbytes[datum],
            latency=self._turned(self.latency),
            rate=self._turned(self.rate),
            holds_out=self._turned(self.holds_in),
            holds_in=self._turned(self.holds_out),
            issue=np.zeros(n * devices),  # there is no first to issue: see Listing.mirrored
            issue_copy=np.zeros(devices * devices),
            begin=np.zeros(1),
            returns=np.zeros(0, np.int64),
            returns_to=np.zeros(0, np.int64),
        )

    def _turned(self, paths: NDArray[Any]) -> NDArray[Any]:
        """Return a table of paths for copies in the other direction."""
        p = len(self.streams)
        return paths[: p * p].reshape(p, p).T.ravel()


class _Lists:
    """``Tables`` whose arrays become lists when they are first read: some are large."""

    def __init__(self, tables: Tables):
        self._tables = tables

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._tables, name).tolist()
        setattr(self, name, found)
        return found


class Goal(NamedTuple):
    """What a plan minimizes, and the runs in flight; None: as many as the period gains from."""

    objective: Objective = "makespan"
    in_flight: int | None = 1


@dataclass(frozen=True)
class Constraints:
    """What a plan has to keep to, apart from what the graph says.

    ``outputs`` are the requested devices of outputs, by label; ``inputs`` the devices of inputs
    and constants, and ``place`` those of tasks, or None for any, by name, if not those of the
    graph. The inputs ``state`` are the same in each run. Those of them that are ``resident`` stay on
    devices between runs; until these are chosen, they are wherever they are read.
    """

    outputs: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    place: Mapping[str, str | None] = field(default_factory=dict)
    state: frozenset[str] = frozenset()
    resident: tuple[str, ...] = ()


class _Data(NamedTuple):
    """The data in the order of their numbers, those that each task reads, and those copied back."""

    uses: Sequence[Use]
    reads: list[list[int]]
    returned: Sequence[int]


@dataclass(frozen=True, eq=False)
class Problem:
    """What a policy gets: a graph, a machine, costs, constraints and the goal.

    Tasks, devices and data have numbers: those of tasks and devices are their positions in
    ``graph.tasks`` and ``machine.devices``. ``seconds`` has the durations by task and device,
    infinite where a task cannot run, and ``reads`` the data of each task, whose ``names`` and
    ``versions`` are in the order of data. ``before`` and ``after`` are predecessors and successors
    of tasks; ``tables`` has all that as arrays. The first use of these or of ``seconds`` raises
    ScheduleError for contradictory constraints. ``original`` is the problem before tasks were
    repeated, if any were.

    >>> graph = Graph()
    >>> y = graph.add(abs, graph.input("x"), name="y", seconds={"cuda:0": 2.0})
    >>> problem = Problem(graph, Machine.emulated(gpus=1))
    >>> problem.seconds, problem.reads, problem.names
    ([[inf, 2.0]], [[0]], ['x'])
    """

    graph: Graph
    machine: Machine
    costs: Costs = field(default_factory=Costs)
    constraints: Constraints = field(default_factory=Constraints)
    goal: Goal = field(default_factory=Goal)
    original: Problem | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, kind in (("graph", Graph), ("machine", Machine), ("costs", Costs)):
            if not isinstance(item := getattr(self, name), kind):
                raise ScheduleError(f"{name} must be a {kind.__name__}, got {shown(item)}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without tables."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def constrained(self, **parts: Any) -> Problem:
        """Return the problem with other parts of its constraints."""
        return replace(self, constraints=replace(self.constraints, **parts))

    @cached_property
    def homes(self) -> Mapping[int, str]:
        """The devices of inputs and constants before a run, by value; by default the host."""
        host = self.machine.host
        return {value.index: self.home(value) or host for value in self.graph.sources}

    def home(self, value: Value) -> str | None:
        """Return the device that an input or a constant must be on, if any."""
        return self.constraints.inputs.get(value.name) or value.home

    def constraint(self, task: Task) -> str | None:
        """Return the device to which a task is bound, if any, or ``"host"`` or ``"storage"``."""
        return self.constraints.place.get(task.name, task.device)

    @cached_property
    def bound(self) -> list[str | None]:
        """The device of the machine to which each task is bound, if any."""
        machine = self.machine
        named = {HOST: machine.host, STORAGE: (*machine.storage, machine.host)[0]}
        devices = map(self.constraint, self.graph.tasks)
        return [device and named.get(device, device) for device in devices]

    @cached_property
    def kept(self) -> Mapping[int, Sequence[Bond]]:
        """The sets of values that are kept together, by value."""
        place = self.constraints.place
        return by_value(released(self.graph, place) if place else self.graph.kept_together)

    @cached_property
    def choices(self) -> Choices:
        """Where tasks may run, and which must share a device.

        Raises ScheduleError for contradictory constraints.
        """
        resident = set(self.constraints.resident)
        values = self.graph.values
        known = {
            index: home
            for index, home in self.homes.items()
            if values[index].name not in resident or self.home(values[index])
        }
        return choices(self, known)

    @property
    def is_limited(self) -> bool:
        """Whether some device could not hold all versions of all values."""
        least = min(device.nbytes for device in self.machine.devices)
        if math.isinf(least):
            return False
        graph = self.graph
        nbytes = self.costs.value_nbytes
        return sum(nbytes(v) * (1 + graph.last_version(v.index)) for v in graph.values) > least

    @property
    def has_sharing(self) -> bool:
        """Whether tasks on several streams of a device, or of one GPU, take it from each other."""
        machine = self.machine
        return machine.contention and self.costs.has_sharing(machine.devices)

    @cached_property
    def confined(self) -> Problem:
        """The problem with infinite seconds where a task alone exceeds the memory of a device.

        A task needs its arguments, its results, and the inputs that are on the device. So policies
        and bounds avoid the device without modelling memory. Raises MemoryLimitError if this, or
        the outputs that are wanted on a device, prove that no schedule exists.
        """
        if not self.is_limited:
            return self
        confined = _confined(self)
        confined.__dict__["confined"] = confined  # what it knows it need not find again
        return confined

    @cached_property
    def tables(self) -> Tables:
        """The problem as arrays."""
        return _tables(self)

    @cached_property
    def _data(self) -> _Data:
        return _data(self)

    @cached_property
    def names(self) -> Sequence[str]:
        """The values of which data are versions."""
        return [self.graph.values[use.value].name for use in self._data.uses]

    @cached_property
    def versions(self) -> Sequence[int]:
        """The versions of values that data are."""
        return [use.version for use in self._data.uses]

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Where tasks may run by constraints, by [task, device]."""
        return _allowed(self.choices.devices, self.machine)

    @cached_property
    def by_costs(self) -> Floats:
        """The durations by [task, device] without constraints, infinite where costs are."""
        return _seconds(self.graph, self.machine, self.costs)

    @cached_property
    def tasks(self) -> Sequence[str]:
        """The names of tasks."""
        return [task.name for task in self.graph.tasks]

    @property
    def devices(self) -> Sequence[str]:
        """The names of devices."""
        return self.machine.names

    @cached_property
    def lists(self) -> Any:
        """The tables as lists, which Python reads faster than arrays."""
        return _Lists(self.tables)

    @cached_property
    def seconds(self) -> Any:
        """The durations ``[task][device]``."""
        return self.by_task(self.tables.seconds).tolist()

    @cached_property
    def together(self) -> Any:
        """The durations of whole groups, ``[task][device]``."""
        return self.by_task(self.tables.together).tolist()

    def by_task(self, table: NDArray[Any]) -> Any:
        """Return a flat table as a matrix by [task, device]."""
        return table.reshape(self.allowed.shape)

    @property
    def reads(self) -> list[list[int]]:
        """The data that each task reads."""
        return self._data.reads

    @cached_property
    def before(self) -> list[list[int]]:
        """The predecessors of each task."""
        return [[other for other, _ in task.dependencies] for task in self.graph.tasks]

    @cached_property
    def after(self) -> list[list[int]]:
        """The successors of each task, in insertion order."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for task, before in enumerate(self.before):
            for other in before:
                found[other].append(task)
        return found

    @cached_property
    def returns(self) -> list[tuple[int, int]]:
        """The data that are copied back in the end, and where to."""
        return list(zip(self.lists.returns, self.lists.returns_to, strict=True))

    def copy_seconds(self, datum: int, row: int, device: int) -> float:
        """Return the duration of a copy of a datum."""
        t = self.lists
        path = row * len(self.devices) + device
        return float(t.latency[path] + t.nbytes[datum] / t.rate[path])

    def placement(self, device: Any, order: Any, copies: tuple[Send, ...] = ()) -> Placement:
        """Return a placement by names, given ``device`` and ``order`` as numbers."""
        where = map(self.devices.__getitem__, np.asarray(device, np.int64).tolist())
        names = map(self.tasks.__getitem__, np.asarray(order, np.int64).tolist())
        return Placement(dict(zip(self.tasks, where, strict=True)), tuple(names), copies)


Policy = Callable[[Problem], Placement]


@without_collecting()
def _tables(problem: Problem) -> Tables:
    """Return the tables of a problem. Raises ScheduleError for contradictory constraints."""
    graph = problem.graph
    machine = problem.machine
    costs = problem.costs
    count = len(machine.names)
    seconds = np.where(problem.allowed, problem.by_costs, np.inf)
    group = np.array(problem.choices.group, np.int64)
    together = _together(seconds, group)
    data, reads, returned = problem._data
    values = [graph.values[use.value] for use in data]
    makers = [
        graph.maker(use) if use.version else value.producer
        for use, value in zip(data, values, strict=True)
    ]
    number = {name: p for p, name in enumerate(machine.names)}
    pairs = list(zip(makers, values, strict=True))
    homes = [-1 if made is not None else number[problem.homes[v.index]] for made, v in pairs]
    pageable = [made is None and value.name in costs.pageable for made, value in pairs]
    maker = np.array([-1 if made is None else made for made in makers], np.int64)
    replay = costs.replay
    back = [number[problem.homes[values[datum].index]] for datum in returned]
    paths = _paths(machine, bool(costs.pageable))
    apart = np.flatnonzero(np.isinf(paths["latency"][: count * count]))
    if len(apart):
        one, other = (machine.names[end] for end in divmod(apart[0], count))
        raise ScheduleError(f"no link joins {one!r} and {other!r}, also not by way of others")
    before_at, before = ragged(_others(graph, reads, maker.tolist()))
    reads_at, flat_reads = ragged(reads)
    return Tables(
        seconds=seconds.ravel(),
        together=together.ravel(),
        least=together.min(axis=1, initial=np.inf),
        streams=np.array([device.streams for device in machine.devices], np.int64),
        group=group,
        before_at=before_at,
        before=before,
        reads_at=reads_at,
        reads=flat_reads,
        maker=maker,
        home=np.array(homes, np.int64),
        row=np.array(homes, np.int64) + count * np.array(pageable, np.int64),
        nbytes=np.array([costs.value_nbytes(value) for value in values], float),
        issue=_issue(graph, machine, costs).ravel(),
        begin=np.array([0.0 if replay is None else replay.call + replay.graph]),
        returns=np.array(returned, np.int64),
        returns_to=np.array(back, np.int64),
        **paths,
    )


def _allowed(devices: Sequence[Sequence[str]], machine: Machine) -> NDArray[np.bool_]:
    """Return where tasks may run, by [task, device], from the names of the devices of each."""
    table = np.ones((len(devices), len(machine.names)), bool)
    rows: dict[tuple[str, ...], Any] = {}
    for task, names in enumerate(map(tuple, devices)):
        if len(names) < len(machine.names):
            if names not in rows:
                rows[names] = np.array([name in names for name in machine.names])
            table[task] = rows[names]
    return table


def _seconds(graph: Graph, machine: Machine, costs: Costs) -> Floats:
    """Return the duration of each task on each device.

    A task that reads a file takes as long as the copy from storage to the host; from there on
    ``_paths`` treats its result as if it were on the host. So policies see how long a storage
    device is busy, and choose no copies that a program could not have.
    """
    kinds: dict[Any, int] = {}
    which = np.array([kinds.setdefault(_rates(d), len(kinds)) for d in machine.devices])
    distinct = [machine.devices[first] for first in np.unique(which, return_index=True)[1]]
    rows = [
        costs.everywhere(task, machine.devices if costs.is_by_name(task) else distinct)
        for task in graph.tasks
    ]
    table = np.empty((len(rows), len(machine.devices)))
    table[:] = np.array([row if isinstance(row, float) else 0.0 for row in rows])[:, np.newaxis]
    for task, row in enumerate(rows):
        if not isinstance(row, float):
            table[task] = row if len(row) == len(which) else np.array(row)[which]
    for name in machine.storage:
        p = machine.names.index(name)
        for each in (task for task in graph.tasks if task.reads_file):
            made = [graph.values[use.value] for use in each.outputs if graph.is_used(use.value)]
            if made:
                nbytes = sum(map(costs.value_nbytes, made))
                table[each.index, p] = machine.copy_seconds(name, machine.host, nbytes)
    return table


def _rates(device: Device) -> tuple[Any, ...]:
    """Return what seconds of tasks depend on, unless they are given for devices by name."""
    rates = device.flops_per_second, device.bytes_per_second, device.launch_seconds
    return device.is_storage, *rates


def _issue(graph: Graph, machine: Machine, costs: Costs) -> Floats:
    """Return for how long a thread is busy issuing each task on each device."""
    table = np.zeros((len(graph), len(machine.devices)))
    if costs.has_issuing(machine.devices):
        for task in graph.tasks:
            table[task.index] = [costs.issue_seconds(task, device) for device in machine.devices]
    return table


def _together(seconds: Floats, group: Ints) -> Floats:
    """Return the durations of whole groups, by task."""
    if (group == np.arange(len(group))).all():
        return seconds
    total = np.zeros_like(seconds)
    np.add.at(total, group, seconds)
    return total[group]


def _data(problem: Problem) -> _Data:
    """Number the data that tasks read, and those that are copied back.

    State that is kept on devices is no datum until it is written: it is wherever it is read. Nor
    are views of such state that no task writes.
    """
    graph = problem.graph
    number: dict[Use, int] = {}
    values = graph.values
    kept = {graph.value(name).index for name in problem.constraints.resident}
    unwritten = {index for index in kept if not graph.last_version(index)}

    def is_there(use: Use) -> bool:
        return (use.value in kept and not use.version) or values[use.value].root in unwritten

    reads = [
        [
            number.setdefault(use, len(number))
            for use in (task.reads if task.region is None else graph.needs(task))
            if not kept or not is_there(use)
        ]
        for task in graph.tasks
    ]
    returned = [
        number.setdefault(Use(value.index, last), len(number))
        for value in graph.sources
        if (last := graph.last_version(value.index)) and value.index not in kept
    ]
    return _Data(list(number), reads, returned)


def _others(graph: Graph, reads: Rows, maker: Sequence[int]) -> Rows:
    """Return the predecessors of each task that produce none of the data that it reads."""
    if graph.is_plain and not len(flow(graph).after):  # then all dependencies are for data
        return [[]] * len(reads)
    found = []
    for task, row in zip(graph.tasks, reads, strict=True):
        makers = [maker[datum] for datum in row]
        found.append([other for other, _ in task.dependencies if other not in makers])
    return found


def _paths(machine: Machine, pageable: bool) -> dict[str, NDArray[Any]]:
    """Return latency, rate, issue_copy, holds_out and holds_in of ``Tables``.

    Between ranks, paths depend on the kinds of both ends alone: one of each kind is examined.
    """
    host = machine.device(machine.host)
    ends = [host if device.is_storage else device for device in machine.devices]
    ways = (False, True) if pageable else (False,)
    table = np.empty((5, len(ways), len(ends), len(ends)))
    kinds = _kinds(machine)
    for way, slow in enumerate(ways):
        known: dict[tuple[int, ...], tuple[float, ...]] = {}
        for row, source in enumerate(ends):
            found = []
            for column, destination in enumerate(ends):
                key: tuple[int, ...] = row, column
                if kinds and source.rank != destination.rank:
                    is_near = source.host is not None and source.host == destination.host
                    key = kinds[row], kinds[column], is_near
                if key not in known:
                    known[key] = _path(machine, source, destination, slow)
                found.append(known[key])
            table[:, way, row] = np.transpose(found)
    latency, rate, issue, out, into = table.reshape(5, -1)
    return {
        "latency": latency,
        "rate": rate,
        "issue_copy": issue,
        "holds_out": out.astype(np.int64) * machine.contention,
        "holds_in": into.astype(np.int64) * machine.contention,
    }


def _path(
    machine: Machine, source: Device, destination: Device, slow: bool
) -> tuple[float, float, float, bool, bool]:
    """Return what ``_paths`` tells of one source and one destination."""
    if source.name == destination.name:
        return 0.0, math.inf, 0.0, False, False
    # A copy between a CPU and an accelerator occupies a stream of the latter alone; one between
    # ranks occupies a stream of each.
    out = source.kind != "cpu"
    into = destination.kind != "cpu"
    apart = source.rank != destination.rank
    latency, rate, direct = _way(machine, source, destination, slow)
    issuer = source if out else destination
    issue = issuer.issue_seconds if issuer.is_accelerator else 0.0
    holds = direct and (out or not into or apart), direct and (into or not out or apart)
    return latency, rate, issue, *holds


def _kinds(machine: Machine) -> list[int]:
    """Return the kind of each device, as seen from other ranks.

    None is known where links of the machine itself join ranks, or there are no ranks.
    """
    ranks = machine.ranks
    if not ranks or machine.storage:
        return []
    if any(ranks[link.source] != ranks[link.destination] for link in machine.links):
        return []
    number: dict[Any, int] = {}
    kinds = []
    for device in machine.devices:
        front = machine.front(device.name)
        link = None if front in (None, device.name) else machine.link(device.name, front)
        rates = link and (link.bytes_per_second, link.latency, link.pageable_bytes_per_second)
        is_front = front == device.name
        facts = device.kind, front is None, is_front, rates, device.issue_seconds
        kinds.append(number.setdefault(facts, len(number)))
    return kinds


def _way(
    machine: Machine, source: Device, destination: Device, slow: bool
) -> tuple[float, float, bool]:
    """Return latency and rate of a way between two devices, and whether it is at most one link.

    A way by several links takes the sum of their times. It counts as occupying no copy stream,
    since it occupies none of them for all of that time.
    """
    way = machine.route(source.name, destination.name)
    found = [machine.link(*ends) for ends in pairwise(way)]
    links = [link for link in found if link is not None]
    if not links:
        return math.inf, math.inf, True
    rates = [link.bytes_per_second for link in links]
    if slow and source.kind == "cpu" and machine.device(way[1]).kind != "cpu":
        rates[0] = links[0].pageable_bytes_per_second or rates[0]
    slowness = sum(1 / rate for rate in rates)
    rate = rates[0] if len(rates) == 1 else 1 / slowness if slowness else math.inf
    return sum(link.latency for link in links), rate, len(links) == 1


# ---- memory: tasks that exceed that of a device by themselves


def _confined(problem: Problem) -> Problem:
    """Implement ``Problem.confined``."""
    graph = problem.graph
    machine = problem.machine
    costs = problem.costs
    count = _Count(problem)
    wanted = {
        label: at for label, at in problem.constraints.outputs.items() if label in graph.outputs
    }
    for device in dict.fromkeys(wanted.values()):
        count.check(device, [graph.outputs[label] for label, at in wanted.items() if at == device])
    tight = {
        task.name: {d.name for d in machine.devices if count.needed(task, d.name) > d.nbytes}
        for task in graph.tasks
    }
    _check_groups(problem, count, tight)
    seconds = {
        name: {
            d.name: math.inf if d.name in devices else costs.task_seconds(graph.task(name), d)
            for d in machine.devices
        }
        for name, devices in tight.items()
        if devices
    }
    return replace(problem, costs=costs.override(seconds))


def _able(problem: Problem, task: Task) -> list[str]:
    """Return the devices on which a task may run, by constraints and by costs."""
    return [
        name
        for name in problem.choices.devices[task.index]
        if problem.costs.task_seconds(task, problem.machine.device(name)) < math.inf
    ]


def least_bytes(problem: Problem, devices: Collection[str]) -> float:
    """Return bytes that one of these devices holds at least, under any plan.

    It has the inputs that are there, and what a task needs that must be on one of them. The memory
    of the problem's devices must suffice for these.
    """
    count = _Count(problem)
    found = [count.lives[name] for name in devices]
    for task in problem.graph.tasks:
        able = _able(problem, task)
        if able and set(able) <= set(devices):
            found.append(min(count.needed(task, name) for name in able))
    return max(found, default=0.0)


class _Count:
    """The bytes that a device needs at least."""

    def __init__(self, problem: Problem):
        self.graph = graph = problem.graph
        self.machine = machine = problem.machine
        self.nbytes = [problem.costs.value_nbytes(value) for value in graph.values]
        self.home = problem.homes
        self.lives = dict.fromkeys(machine.names, 0.0)
        for index, device in self.home.items():
            self.lives[device] += self.nbytes[index]
        for device in machine.names:
            self.check(device, ())

    def at_once(self, device: str, values: Iterable[int]) -> float:
        """Return the bytes of values (indices) on a device, and of all inputs on that device.

        Copies of views may be smaller than their base: of values that share memory, the smallest
        counts.
        """
        roots = dict.fromkeys(self.graph.values[value].root for value in values)
        away = [root for root in roots if self.home.get(root) != device]
        return self.lives[device] + sum(
            min(self.nbytes[v] for v in self.graph.members(root)) for root in away
        )

    def needed(self, task: Task, device: str) -> float:
        """Return the bytes that a device holds at least while a task runs there."""
        made = [use.value for use in task.outputs if self.graph.is_used(use.value)]
        return self.at_once(device, [*(use.value for use in task.reads), *made])

    def check(self, device: str, outputs: Collection[int]) -> None:
        """Raise MemoryLimitError if the inputs and the wanted outputs of a device exceed it."""
        needed = self.at_once(device, outputs)
        limit = self.machine.device(device).nbytes
        if needed > limit:
            homes = [index for index, where in self.home.items() if where == device]
            names = [self.graph.values[index].name for index in (*homes, *outputs)]
            raise MemoryLimitError(
                f"device {device!r} has {limit:,.0f} B of memory, and what must be there at once "
                f"takes {needed:,.0f} B: {listed(names)}. This proves that no schedule exists"
            )


def _check_groups(problem: Problem, count: _Count, tight: Mapping[str, set[str]]) -> None:
    """Raise MemoryLimitError if a task, or tasks that share a device, fit on no allowed device."""
    tasks = problem.graph.tasks
    groups = problem.choices.group
    left: dict[int, list[str]] = {}
    for task in tasks:
        group = groups[task.index]
        able = _able(problem, task)
        before = [p for p in left.get(group, able) if p in able]
        left[group] = [p for p in before if p not in tight[task.name]]
        if before and not left[group]:
            sizes = ", ".join(
                f"{count.needed(task, p):,.0f} B of {problem.machine.device(p).nbytes:,.0f} B on {p}"
                for p in before
            )
            others = [t.name for t in tasks if groups[t.index] == group and t is not task]
            raise MemoryLimitError(
                f"task {task.name!r} fits on no device where it may run: with its arguments, its "
                f"results and the inputs that live there it takes {sizes}"
                + (f"; it must be with {listed(others)}" if others else "")
                + ". This proves that no schedule exists"
            )
