"""Plan one graph for several machines by several policies; show predictions as table and picture.

Nothing runs, so no machine need exist. Plans are made as ``schedule`` makes them. A machine that
the graph cannot run on is part of the result.

A speed-up is relative to one device of the same machine, planned by ``single``. So it shows what
the other devices add, and not how fast the devices are.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import groupby, product
from typing import Any

from autosched._lib.allowed import device_name
from autosched._lib.text import amount, count, duration, table
from autosched.costs.costs import Costs
from autosched.errors import AutoschedError, MachineError, ScheduleError, shown
from autosched.graph.graph import Graph
from autosched.machine.device import NETWORKS, Network
from autosched.machine.machine import LINKS, Link, Machine
from autosched.policies import TIMED, Policy
from autosched.problem import Objective, Problem
from autosched.scheduling.arguments import check_arguments
from autosched.scheduling.planning import (
    estimate_costs,
    find_policy,
    mark_pageable,
    planned,
    problem_of,
)
from autosched.scheduling.schedule import Schedule
from autosched.viz import charts

_GPUS = frozenset("cuda hip xpu mps mtia hpu npu".split())  # other devices are abstract
POLICIES = ("single", "round_robin", "heft", "auto")
_OPTIONS = ("inputs", "outputs", "place", "in_flight")


def compare(
    graph: Graph,
    machines: Machine | Iterable[Machine] | Mapping[str, Machine],
    policies: str | Policy | Iterable[str | Policy] | Mapping[str, str | Policy] = POLICIES,
    *,
    seconds: float | None = None,
    seed: int = 0,
    costs: Costs | None = None,
    examples: Mapping[str, Any] | None = None,
    objective: Objective = "makespan",
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    **options: Any,
) -> Comparison:
    """Plan a graph for each machine by each policy; nothing runs.

    Machines and policies are named by mappings, or by what distinguishes them. ``seconds`` are for
    each plan of a policy that takes a time limit; other parameters are those of ``schedule``, and
    ``options`` are ``inputs``, ``outputs``, ``place`` and ``in_flight``. Examples are estimated
    once. ``track`` is called with all pairs to iterate over, as ``tqdm.tqdm`` is, and may show
    progress. With the period as objective, speed-ups and best rows refer to it. An error of a
    machine or a policy becomes a ``Refusal``. Machines that differ in memory alone, as by
    ``Machine.limited``, are planned together: with more of it none is slower. Raises ScheduleError
    and MachineError for invalid arguments.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> a, b = (graph.add(abs, graph.input(name), seconds=1.0) for name in "ab")
    >>> graph.output(a=a, b=b)
    >>> machines = [asc.Machine.emulated(gpus=n) for n in (0, 1)]
    >>> found = asc.compare(graph, machines, ["single", "heft"])
    >>> [round(row.speedup, 2) for row in found.rows]
    [1.0, 1.0, 1.0, 2.0]
    """
    if unknown := options.keys() - _OPTIONS:
        what = f"compare has no option {min(unknown)}=; beside its parameters it has"
        raise ScheduleError(f"{what} {', '.join(f'{name}=' for name in _OPTIONS)}")
    ends = {name: device_name(options.get(name)) for name in ("inputs", "outputs")}
    check_arguments(graph=graph, costs=costs, examples=examples, **ends, place=options.get("place"))
    in_flight = options.get("in_flight")
    check_arguments(seconds=seconds, seed=seed, objective=objective, in_flight=in_flight)
    known = estimate_costs(graph, examples) if costs is None and examples is not None else Costs()
    named = _machines(machines)
    by_label = _policies(policies)
    if costs is None:
        priced = {
            name: mark_pageable(known, graph, machine, examples) for name, machine in named.items()
        }
    else:
        priced = dict.fromkeys(named, costs)

    @cache
    def problem(name: str, hosts: bool) -> Problem:
        stated: dict[str, Any] = {
            "costs": priced[name],
            "examples": examples,
            "objective": objective,
        }
        return problem_of(graph, named[name], **stated, hosts=hosts, **options)

    def plan(name: str, policy: str | Policy, seconds: float | None = None) -> Schedule:
        return planned(problem(name, isinstance(policy, str)), policy, seconds, seed)

    singles: dict[str, float | None] = {}
    plans: dict[tuple[str, str], Schedule] = {}
    errors: dict[tuple[str, str], str] = {}
    for name, label in track([*product(named, by_label)]):
        if name not in singles:
            singles[name] = _seconds(partial(plan, name, "single"), objective)
        policy = by_label[label]
        try:
            made = plan(name, policy, seconds if policy in ("auto", *TIMED) else None)
            plans[name, label] = made
        except AutoschedError as error:
            errors[name, label] = str(error).partition("\n")[0]
    rows: list[Row] = []
    refusals: list[Refusal] = []
    for name, label in product(named, by_label):
        best = _best_within(named[name], label, plans, objective)
        if best is not None:
            rows.append(_row(name, label, best, singles[name], objective))
        else:
            refusals.append(Refusal(name, label, errors[name, label]))
    guess = next(iter(priced.values())).guess(graph)
    devices = "GPUs" if all(map(_has_gpus, named.values())) else "processors"
    return Comparison(graph.name, tuple(rows), tuple(refusals), objective, guess, devices)


def _best_within(
    machine: Machine,
    label: str,
    plans: Mapping[tuple[str, str], Schedule],
    objective: Objective,
) -> Schedule | None:
    """Return the best plan by a policy on the same machine with at most as much memory."""
    found = [
        replace(made, problem=replace(made.problem, machine=machine))
        for (_, policy), made in plans.items()
        if policy == label
        and made.machine.unlimited == machine.unlimited
        and all(
            a.nbytes <= b.nbytes for a, b in zip(made.machine.devices, machine.devices, strict=True)
        )
    ]
    return min(found, key=lambda made: getattr(made, objective), default=None)


def _row(
    name: str,
    policy: str,
    made: Schedule,
    single: float | None,
    objective: Objective,
) -> Row:
    achieved = getattr(made, objective)
    timeline = made.simulate()
    machine = made.machine
    overlap = timeline.overlap()
    busiest = max(map(timeline.computing, machine.names))
    return Row(
        machine=name,
        gpus=len(machine.accelerators),
        link=_link(machine),
        policy=policy,
        makespan=made.makespan,
        speedup=single / achieved if single is not None and achieved else None,
        lower_bound=made.lower_bound,
        gap=made.gap,
        copies_hidden=overlap.copies_hidden if overlap.copy_seconds else None,
        busiest=busiest / made.makespan if made.makespan else 0.0,
        peak_bytes=max(made.peak_bytes.values()),
        period=made.period,
        in_flight=made.program.in_flight,
        memory=_memory(machine),
    )


def _memory(machine: Machine) -> float | None:
    """Return the least memory of an accelerator, if it is limited."""
    least = min((machine.device(name).nbytes for name in machine.accelerators), default=math.inf)
    return None if math.isinf(least) else least


def _seconds(plan: Callable[[], Schedule], objective: Objective) -> float | None:
    try:
        seconds: float = getattr(plan(), objective)
        return seconds
    except AutoschedError:
        return None


def _policies(
    given: str | Policy | Iterable[str | Policy] | Mapping[str, str | Policy],
) -> dict[str, str | Policy]:
    """Return policies by name; functions get their own name unless a mapping names them."""
    items = [given] if isinstance(given, str) or callable(given) else given
    if not isinstance(items, Iterable):
        raise ScheduleError(f"policies must be names or functions, got {shown(given)}")
    if isinstance(given, Mapping):
        named = dict(given)
    else:
        given = list(items)
        # Policies may not be hashable.
        once = [item for i, item in enumerate(given) if item not in given[:i]]
        named = dict(zip(_numbered([_name(item) for item in once]), once, strict=True))
    for item in named.values():
        if item != "auto":
            find_policy(item)
    return named


def _name(policy: Any) -> str:
    return policy if isinstance(policy, str) else getattr(policy, "__name__", shown(policy))


# ---- names of machines


def _machines(given: Any) -> dict[str, Machine]:
    """Return machines by name, equal ones once."""
    if isinstance(given, Mapping):
        names = [str(name) for name in given]
        items = list(given.values())
    else:
        items = list(given) if isinstance(given, Iterable) else [given]
        names = []
    if odd := [item for item in items if not isinstance(item, Machine)]:
        what = "machines must be Machine, a list of them or a mapping by name"
        raise MachineError(f"{what}, got {shown(odd[0])}")
    if not items:
        raise MachineError("machines must be one at least, got none")
    items = items if names else list(dict.fromkeys(items))
    return dict(zip(names or _names(items), items, strict=True))


def _names(machines: Sequence[Machine]) -> list[str]:
    """Name machines by their GPUs, their link, and other distinguishing properties."""
    facts = [_facts(machine) for machine in machines]
    differ = [len(set(filter(None, column))) > 1 for column in zip(*facts, strict=True)]
    columns = [i for i, differs in enumerate(differ) if differs or i < 2]
    return _numbered([", ".join(filter(None, (row[i] for i in columns))) for row in facts])


def _numbered(names: Sequence[str]) -> list[str]:
    """Return names, with numbers added to those that occur twice."""
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _facts(machine: Machine) -> tuple[str, ...]:
    gpus = len(machine.accelerators)
    cpus = len(machine.devices) - gpus
    other = "GPU" if _has_gpus(machine) else "processor"
    devices = [count(number, kind) for number, kind in ((cpus, "CPU"), (gpus, other)) if number]
    speed = streams = memory = ""
    if gpus:
        first = machine.device(machine.accelerators[0])
        speed = amount(first.flops_per_second, "FLOP/s")
        streams = count(first.streams, f"{other} stream")
        memory = amount(_memory(machine) or math.inf, "B") if _memory(machine) else "no limit"
    held = " and ".join(devices if cpus > 1 else devices[-1:])
    hosts = len(set(machine.hosts.values()))
    return (
        f"{count(hosts, 'host')} with {held}" if hosts else held,
        _link(machine),
        speed,
        count(machine.device(machine.host).streams, "CPU stream") if cpus else "",
        streams,
        memory,
        "with contention" if machine.contention else "no contention",
    )


def _has_gpus(machine: Machine) -> bool:
    """Whether all devices but CPUs are GPUs, and no abstract processors."""
    return {name.partition(":")[0] for name in machine.accelerators} <= _GPUS


def _link(machine: Machine) -> str:
    """Return the name of the link between two accelerators, or to the host."""
    ends = (*machine.accelerators, machine.host)[:2]
    link = machine.link(*ends) if len(ends) == 2 else None
    found = [] if link is None else [_named(link, LINKS)]
    if machine.network is not None:
        found.append(_named(machine.network, NETWORKS))
    return " and ".join(found)


def _named(link: Link | Network, known: Mapping[str, tuple[float, float]]) -> str:
    """Return the name of a link or a network of these rates, or else its rate."""
    rates = link.bytes_per_second, link.latency
    names = (name for name, found in known.items() if found == rates)
    return next(names, amount(link.bytes_per_second, "B/s"))


# ---- the result


@dataclass(frozen=True)
class Row:
    """The prediction for a machine and a policy; times in seconds.

    ``speedup`` is relative to the policy ``"single"``, all tasks on one device, if that is
    possible. ``busiest`` is the share of the makespan in which the busiest device computes.
    ``peak_bytes`` is the largest peak memory of a device. ``copies_hidden`` is None where nothing
    is copied. ``period`` is the seconds per run with ``in_flight`` runs under way. ``memory`` is
    the least limit of an accelerator, if there is one.
    """

    machine: str
    gpus: int
    link: str
    policy: str
    makespan: float
    speedup: float | None
    lower_bound: float
    gap: float
    copies_hidden: float | None
    busiest: float
    peak_bytes: float
    period: float = 0.0
    in_flight: int = 1
    memory: float | None = None


@dataclass(frozen=True)
class Refusal:
    """Why there is no schedule for a machine by a policy."""

    machine: str
    policy: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Rows by machine and policy, and refusals. ``print`` it, or see ``svg()``.

    Each machine's best row has a star. With ``objective="period"`` it is that of least period.
    ``guess`` says what is assumed for lack of costs, ``devices`` how devices but CPUs are called.

    >>> row = Row("2 GPUs", 2, "pcie4", "heft", 0.002, 1.9, 0.0019, 0.05, None, 0.99, 4e6)
    >>> print(Comparison("two layers", (row,)))
    two layers: predicted
       machine  policy  makespan  speed-up   bound  gap  copies hidden  busiest  peak
    *  2 GPUs   heft        2 ms      1.90  1.9 ms   5%              -      99%  4 MB
    """

    name: str
    rows: tuple[Row, ...]
    refusals: tuple[Refusal, ...] = ()
    objective: Objective = "makespan"
    guess: str = ""
    devices: str = "GPUs"

    @property
    def best(self) -> tuple[Row, ...]:
        """The first of the best rows of each machine, by the objective."""
        names = dict.fromkeys(row.machine for row in self.rows)
        mine = ([row for row in self.rows if row.machine == name] for name in names)
        return tuple(min(rows, key=self._seconds) for rows in mine)

    def __repr__(self) -> str:
        heads, *cells = self._cells()
        lines = table(heads, cells, left=3) if self.rows else []
        return "\n".join([self._title, *lines, *self._refused()])

    @property
    def _title(self) -> str:
        return f"{self.name}: predicted{f', with {self.guess}' if self.guess else ''}"

    def to_json(self) -> str:
        """Return rows and refusals as JSON."""
        return json.dumps(asdict(self), indent=2)

    def _repr_html_(self) -> str:
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._cells())
        refused = "".join(f"<p>{html.escape(line)}</p>" for line in self._refused())
        about = f"<p>{html.escape(self._title)}</p>" if self.guess else ""
        return f"{about}<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>{refused}"

    def svg(self) -> str:
        """Draw makespans as lines over numbers of GPUs or their memory, or else as bars."""
        title = self._title
        limits = {row.memory for row in self.rows}
        if len(limits) > 1 and None not in limits:
            x = f"memory of each of the {self.devices}, in GB"
            several = len({(row.gpus, row.link) for row in self.rows}) > 1
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in sorted(self.rows, key=lambda row: row.memory or 0.0):
                where = f", {row.gpus} {self.devices}, {row.link}" if several else ""
                point = (row.memory or 0.0) / 1e9, self._seconds(row)
                lines.setdefault(row.policy + where, []).append(point)
            return charts.lines(lines, x=x, title=title, y=self.objective, unit="s")
        points = {(row.gpus, row.link, row.policy) for row in self.rows}
        if len({row.gpus for row in self.rows}) > 1 and len(points) == len(self.rows):
            return charts.lines(
                dict(self._lines()), x=self.devices, title=title, y=self.objective, unit="s"
            )
        bars = [(row.machine, row.policy, self._seconds(row)) for row in self.rows]
        return charts.bars(bars, title=title, x=self.objective, unit="s")

    def _seconds(self, row: Row) -> float:
        return row.period if self.objective == "period" else row.makespan

    def _lines(self) -> Iterator[tuple[str, list[tuple[float, float]]]]:
        linked = [row for row in self.rows if row.gpus > 1] or self.rows
        links = dict.fromkeys(row.link for row in linked)
        known = {(row.gpus, row.link) for row in self.rows}
        for policy, link in product(dict.fromkeys(row.policy for row in self.rows), links):
            # With one GPU, or none, no links join GPUs: the point is on every line without
            # another point there.
            rows = [
                row
                for row in self.rows
                if row.policy == policy
                and (row.link == link or (row.gpus < 2 and (row.gpus, link) not in known))
            ]
            rows.sort(key=lambda row: row.gpus)
            name = f"{policy}, {link}" if len(links) > 1 else policy
            yield name, [(row.gpus, self._seconds(row)) for row in rows]

    def _cells(self) -> list[tuple[str, ...]]:
        """Return the heads of the table, and its rows."""
        columns = dict(_COLUMNS)
        if self.objective == "period" or any(row.in_flight > 1 for row in self.rows):
            columns |= _IN_FLIGHT
        best = self.best
        rows = (
            ("*" if row in best else "", *(cell(row) for cell in columns.values()))
            for row in self.rows
        )
        return [("", *columns), *rows]

    def _refused(self) -> Iterator[str]:
        groups = groupby(self.refusals, key=lambda found: (found.machine, found.reason))
        for (machine, reason), same in groups:
            yield f"{machine}: refused ({', '.join(refusal.policy for refusal in same)}): {reason}"


_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "machine": lambda row: row.machine,
    "policy": lambda row: row.policy,
    "makespan": lambda row: duration(row.makespan),
    "speed-up": lambda row: "-" if row.speedup is None else f"{row.speedup:.2f}",
    "bound": lambda row: duration(row.lower_bound),
    "gap": lambda row: f"{row.gap:.0%}",
    "copies hidden": lambda row: "-" if row.copies_hidden is None else f"{row.copies_hidden:.0%}",
    "busiest": lambda row: f"{row.busiest:.0%}",
    "peak": lambda row: amount(row.peak_bytes, "B"),
}
_IN_FLIGHT: Mapping[str, Callable[[Row], str]] = {
    "in flight": lambda row: str(row.in_flight),
    "period": lambda row: duration(row.period),
}
