"""How good plans are: their gap to what is known to be optimal, a line for each claim, with its target beside it.

Optima are proved (STG and layered graphs), or known by construction (planted graphs). Without ``--data`` the layered
graphs are made here, and proved by ``exact``; STG and networks are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from _graphs import examples, layered_folder, network_file, planted, random_layered, stg_folder
from _instances import Instance
from _ours import Gaps, exact_is_there, gaps, planned, spread, timed
from _report import table

import autosched as asc

HEAD = ("", "graphs", "gap, mean", "worst", "optimal", "seconds, most", "target")
Row = tuple[str, ...]


def report(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the tables."""
    for title, rows in SECTIONS.items():
        found = list(rows(chosen))
        if found:
            yield f"## {title}\n\n{table(HEAD, found)}"
    found = list(_copy_streams(chosen))
    yield f"## Copies that occupy copy streams\n\n{table(STREAMS, found)}\n\n{_STREAMS}"
    found = list(_networks(chosen))
    if found:
        yield f"## Networks of single samples: ms\n\n{table(NETWORKS, found)}"


def _row(name: str, found: Gaps, target: str) -> Row:
    return (
        name,
        str(found.count),
        f"{found.mean:.3%}",
        f"{found.worst:.1%}",
        f"{found.optimal:.0%}",
        f"{found.seconds:.2f}",
        target,
    )  # fmt: skip


def _papers(_: argparse.Namespace) -> Iterator[Row]:
    for policy in ("heft", "auto", "search"):
        yield _row(policy, gaps(examples(), policy), "")


def _stg(chosen: argparse.Namespace) -> Iterator[Row]:
    """STG: no copies, identical devices."""
    if not chosen.data or not (chosen.data / "stg").is_dir():
        return
    known = [one for one in stg_folder(chosen.data / "stg") if one.facts["proved"]]
    some = spread(known, 8 if chosen.quick else 240)
    budget = (None, 0.2, 0.5) if chosen.quick else (None, 1.0, 10.0)
    targets = ("at most 0.6%", "at most 0.15% in 1 s", "at most 0.03% in 10 s, 98% optimal")
    for policy, seconds, target in zip(("heft", "auto", "search"), budget, targets, strict=True):
        yield _row(_within(policy, seconds), gaps(some, policy, seconds), target)


def _layered(chosen: argparse.Namespace) -> Iterator[Row]:
    """Layered graphs whose optimum is proved, at low and at high ratios of copies to work."""
    known = certified(chosen)
    for name, one, targets in (("ratio <= 1", False, ("5%", "0.5%")), ("ratio 5", True, ("15%", "2%"))):
        some = [item for item in known if (item.facts["ratio"] > 1) == one]
        if not some:
            continue
        some = spread(some, 4) if chosen.quick else some
        yield _row(f"{name}: heft", gaps(some, "heft"), "")
        yield _row(f"{name}: auto", gaps(some, "auto"), f"at most {targets[0]}")
        seconds = 0.5 if chosen.quick else 5.0
        yield _row(f"{name}: search, {seconds:g} s", gaps(some, "search", seconds), f"at most {targets[1]} in 5 s")
    yield from _exact([one for one in known if len(one) <= (30 if chosen.quick else 60)], chosen)


def _exact(known: Sequence[Instance], chosen: argparse.Namespace) -> Iterator[Row]:
    if not exact_is_there():
        return
    budget = 5.0 if chosen.quick else 30.0
    some = spread(known, 4) if chosen.quick else known
    found = [planned(one, "exact", budget) for one in some]
    over = [outcome.over(one.best) for outcome, one in zip(found, some, strict=True)]
    share = sum(outcome.proved for outcome in found)
    row = _row(
        f"exact, {budget} s: {share} proved", Gaps.of(over, [one.seconds for one in found]), "all proved in 30 s"
    )
    yield row


def certified(chosen: argparse.Namespace) -> list[Instance]:
    """Return layered graphs with their optima: read, or else made here and proved."""
    if chosen.data and (chosen.data / "layered").is_dir():
        return [one for one in layered_folder(chosen.data / "layered") if one.best <= one.bound]
    if not exact_is_there():
        return []
    sizes = (20,) if chosen.quick else (20, 30, 40)
    made = [random_layered(n, p, ratio, 0) for n in sizes for p in (3, 8) for ratio in (0.2, 1.0, 5.0)]
    found = [(one, planned(one, "exact", 10.0 if chosen.quick else 60.0)) for one in made]
    return [
        dataclasses.replace(one, bound=outcome.bound, best=outcome.makespan) for one, outcome in found if outcome.proved
    ]


def _planted(chosen: argparse.Namespace) -> Iterator[Row]:
    """Planted optima: devices that differ, and those that do not."""
    small = {n: _planted_graphs(chosen, n) for n in ((50,) if chosen.quick else (50, 100, 300))}
    seconds = 0.5 if chosen.quick else 10.0
    for n, some in small.items():
        yield _row(f"{n} tasks: heft", gaps(some, "heft"), "")
        yield _row(f"{n} tasks: auto", gaps(some, "auto"), "")
        yield _row(f"{n} tasks: search, {seconds:g} s", gaps(some, "search", seconds), "at most 5% in 10 s")
    for n in (1_000,) if chosen.quick else (1_000, 10_000):
        some = _planted_graphs(chosen, n)[: 1 if chosen.quick else 4]
        yield _row(f"{n:,} tasks: heft", gaps(some, "heft"), "15-28%")
        yield _row(f"{n:,} tasks: auto", gaps(some, "auto"), "at most 8%")


def _planted_graphs(chosen: argparse.Namespace, tasks: int) -> list[Instance]:
    """Return planted graphs on devices that differ: some made here for 4 and 8 devices, and those that are read."""
    made = [planted(tasks, p, 0.5, seed) for p in (4, 8) for seed in range(1 if chosen.quick else 2)]
    if chosen.data and (chosen.data / "planted").is_dir():
        read = layered_folder(chosen.data / "planted")
        made += [one for one in read if len(one) == tasks and one.facts["unequal"]]
    return made


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "Worked examples of Topcuoglu (2002) and Arabnejad (2014)": _papers,
    "Standard Task Graphs": _stg,
    "Layered graphs with proved optima": _layered,
    "Planted optima, devices that differ": _planted,
}


def _within(policy: str, seconds: float | None) -> str:
    return policy if seconds is None else f"{policy}, {seconds:g} s"


# ---- copy streams

STREAMS = ("", "blind: claims", "blind: takes", "aware", "blind / aware", "auto", "target")
_STREAMS = (
    "Blind: planned by HEFT as if copies occupied nothing, then run on a machine where they do. Aware: the same HEFT, "
    "planned for that machine. All over the best bound. Up to 40 tasks the last column is `auto` over what `exact` "
    "finds, mean and worst."
)


def _copy_streams(chosen: argparse.Namespace) -> Iterator[Row]:
    sizes = (1_000,) if chosen.quick else (1_000, 10_000)
    for n in sizes:
        for ratio in (0.2,) if chosen.quick else (0.2, 1.0):
            one = random_layered(n, 8, ratio, 0, width=32)
            blind, aware, auto, claim = _blind_and_aware(one)
            figures = [f"{x / aware.lower_bound:.2f}" for x in (claim, blind.makespan, aware.makespan)]
            gain = f"{blind.makespan / aware.makespan:.2f}"
            target = "at least 1.9 times better" if (n, ratio) == (10_000, 0.2) else ""
            yield (f"{n:,} tasks, ratio {ratio:g}", *figures, gain, f"{auto.makespan / aware.lower_bound:.2f}", target)
    if exact_is_there():
        yield from _against_exact(chosen)


def _blind_and_aware(one: Instance) -> tuple[asc.Schedule, asc.Schedule, asc.Schedule, float]:
    graph, machine = one.graph(one_value=True), one.machine(contention=True)
    claimed, _ = timed(graph, one.machine(), "heft")
    blind, _ = timed(graph, machine, lambda *_: claimed.placement)
    aware, _ = timed(graph, machine, "heft")
    auto, _ = timed(graph, machine, "auto")
    return blind, aware, auto, claimed.makespan


def _against_exact(chosen: argparse.Namespace) -> Iterator[Row]:
    cells = itertools.product((20,) if chosen.quick else (20, 40), (3,) if chosen.quick else (3, 8), (0.2, 1.0))
    for n, p, ratio in cells:
        over = []
        for seed in range(1 if chosen.quick else 3):
            one = random_layered(n, p, ratio, seed)
            graph, machine = one.graph(one_value=True), one.machine(contention=True)
            best, _ = timed(graph, machine, "exact", 3.0 if chosen.quick else 30.0)
            auto, _ = timed(graph, machine, "auto")
            over.append(auto.makespan / best.makespan)
        cell = f"{statistics.fmean(over):.3f}, {max(over):.3f}"
        yield (f"{n} tasks, {p} devices, ratio {ratio:g}", "", "", "", "", cell, "within 1.10 of exact")


# ---- networks

NETWORKS = ("", "tasks", "bound", "one device", "heft", "auto", "seconds", "target")


def _networks(chosen: argparse.Namespace) -> Iterator[Row]:
    for path in _network_paths(chosen):
        operators = path.parent.name == "OperatorGraphs"
        name = f"{path.stem.removesuffix('_inference')}, {'operators' if operators else 'layers'}"
        target = "at most 313" if name == "resnet50, operators" else "at most one device"
        for k in (2,) if chosen.quick or not operators else (2, 4, 8):
            one = network_file(path, k)
            single, heft, auto = (planned(one, policy) for policy in ("single", "heft", "auto"))
            bound = max(single.bound, heft.bound, auto.bound)
            figures = (f"{x:.2f}" for x in (bound, single.makespan, heft.makespan, auto.makespan, auto.seconds))
            yield (f"{name}, {k} accelerators", str(len(one)), *figures, target)


def _network_paths(chosen: argparse.Namespace) -> list[Path]:
    if not chosen.data:
        return []
    paths = sorted((chosen.data / "dnn_placement").glob("*Graphs/*.json"))
    return [path for path in paths if "resnet50" in path.stem and "Operator" in str(path)] if chosen.quick else paths
