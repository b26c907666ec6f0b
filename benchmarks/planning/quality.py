"""How far plans are from the optimum, in the classic model, where that is known: proved, or true by construction.

Without ``--data`` the layered graphs are made here, and proved by ``exact``; Standard Task Graphs are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from _graphs import examples, layered_folder, planted, random_layered, stg_folder
from _instances import Instance
from _ours import Gaps, exact_is_there, gaps, planned, spread
from _report import picture, table

from autosched.viz import charts

HEAD = ("", "graphs", "gap, mean", "worst", "optimal", "seconds, most", "target")


class Line(NamedTuple):
    """What a policy did with some graphs, and what it should."""

    graphs: str
    policy: str
    found: Gaps
    target: str = ""
    seconds: float | None = None  # given to it

    def cells(self) -> tuple[str, ...]:
        """Return its line of the table."""
        name = self.policy if self.seconds is None else f"{self.policy}, {self.seconds:g} s"
        count, mean, worst, optimal, seconds = self.found
        figures = (str(count), f"{mean:.3%}", f"{worst:.1%}", f"{optimal:.0%}", f"{seconds:.2f}")
        return (f"{self.graphs}: {name}" if self.graphs else name, *figures, self.target)


def report(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the tables, and a picture of all."""
    bars = []
    for title, lines in SECTIONS.items():
        found = list(lines(chosen))
        if found:
            yield f"## {title}\n\n{table(HEAD, [line.cells() for line in found])}"
            family = title.partition(",")[0]
            bars += [
                (f"{family} {line.graphs}".strip(), line.policy, 100 * line.found.mean)
                for line in found
            ]
    drawn = charts.bars(bars, title="Gap to the optimum, mean", x="gap", unit="%")
    yield from picture("planning_quality", "mean gaps by family and policy", drawn, chosen)


def _lines(
    name: str, some: Sequence[Instance], *asked: tuple[str, float | None, str]
) -> Iterator[Line]:
    """Plan graphs by policies, each with its seconds and its target."""
    for policy, seconds, target in asked:
        yield Line(name, policy, gaps(some, policy, seconds), target, seconds)


def _papers(_: argparse.Namespace) -> Iterator[Line]:
    yield from _lines(
        "",
        examples(),
        ("heft", None, "9.6% and 17.7%, as published"),
        ("auto", None, ""),
        ("search", None, ""),
    )


def _stg(chosen: argparse.Namespace) -> Iterator[Line]:
    if not chosen.data or not (chosen.data / "stg").is_dir():
        return
    known = [one for one in stg_folder(chosen.data / "stg") if one.facts["proved"]]
    some = spread(known, 8 if chosen.quick else 240)
    short, long = (0.2, 0.5) if chosen.quick else (1.0, 10.0)
    yield from _lines(
        "",
        some,
        ("heft", None, "at most 0.6%"),
        ("auto", short, "at most 0.15% in 1 s"),
        ("search", long, "at most 0.03% in 10 s, 98% optimal"),
    )


def _layered(chosen: argparse.Namespace) -> Iterator[Line]:
    known = certified(chosen)
    seconds = 0.5 if chosen.quick else 5.0
    for name, high, auto, search in (
        ("ratio <= 1", False, "5%", "0.5%"),
        ("ratio 5", True, "15%", "2%"),
    ):
        some = [one for one in known if (one.facts["ratio"] > 1) == high]
        if some:
            yield from _lines(
                name,
                spread(some, 4) if chosen.quick else some,
                ("heft", None, ""),
                ("auto", None, f"at most {auto}"),
                ("search", seconds, f"at most {search} in 5 s"),
            )
    small = [one for one in known if len(one) <= (30 if chosen.quick else 60)]
    if small and exact_is_there():
        yield _exact(spread(small, 4) if chosen.quick else small, 5.0 if chosen.quick else 30.0)


def _exact(some: Sequence[Instance], seconds: float) -> Line:
    found = [planned(one, "exact", seconds) for one in some]
    over = [outcome.over(one.best) for outcome, one in zip(found, some, strict=True)]
    proved = sum(outcome.proved for outcome in found)
    of_all = Gaps.of(over, [outcome.seconds for outcome in found])
    target = f"all proved in 30 s; {proved} of {len(some)} are"
    return Line(f"up to {max(map(len, some))} tasks", "exact", of_all, target, seconds)


def certified(chosen: argparse.Namespace) -> list[Instance]:
    """Return layered graphs with their optima: read, or else made here and proved."""
    if chosen.data and (chosen.data / "layered").is_dir():
        return [one for one in layered_folder(chosen.data / "layered") if one.best <= one.bound]
    if not exact_is_there():
        return []
    sizes = (20,) if chosen.quick else (20, 30, 40, 60)
    made = [
        random_layered(n, p, ratio, 0) for n in sizes for p in (3, 8) for ratio in (0.2, 1.0, 5.0)
    ]
    found = [(one, planned(one, "exact", 10.0 if chosen.quick else 60.0)) for one in made]
    return [
        dataclasses.replace(one, bound=outcome.bound, best=outcome.makespan)
        for one, outcome in found
        if outcome.proved
    ]


def _planted(chosen: argparse.Namespace) -> Iterator[Line]:
    for n in (50,) if chosen.quick else (50, 100, 300):
        searching = ("search", 0.5 if chosen.quick else 10.0, "at most 5% in 10 s")
        yield from _lines(
            f"{n} tasks",
            _planted_graphs(chosen, n),
            ("heft", None, ""),
            ("auto", None, ""),
            searching,
        )
    for n in (1_000,) if chosen.quick else (1_000, 10_000):
        asked = ("heft", None, "15-28% are usual"), ("auto", None, "at most 8%")
        yield from _lines(
            f"{n:,} tasks", _planted_graphs(chosen, n)[: 1 if chosen.quick else None], *asked
        )


def _planted_graphs(chosen: argparse.Namespace, tasks: int) -> list[Instance]:
    """Return some made here for 4 and 8 devices, and those that are read."""
    made = [
        planted(tasks, p, 0.5, seed) for p in (4, 8) for seed in range(1 if chosen.quick else 2)
    ]
    if chosen.data and not chosen.quick and (chosen.data / "planted").is_dir():
        read = layered_folder(chosen.data / "planted")
        made += [one for one in read if len(one) == tasks and one.facts["unequal"]]
    return made


SECTIONS: Mapping[str, Callable[[argparse.Namespace], Iterator[Line]]] = {
    "Examples, of Topcuoglu (2002) and Arabnejad (2014)": _papers,
    "STG, Standard Task Graphs whose optimum is proved: no copies, 2 to 16 identical devices": _stg,
    "Layered, on 3 or 8 devices that differ from task to task, proved": _layered,
    "Planted, on 4 or 8 devices of which each task has a best": _planted,
}
