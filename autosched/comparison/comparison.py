"""Show predictions for machines and policies as table, JSON and picture."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, product
from typing import Literal

from autosched._lib.text import amount, duration, table
from autosched.viz import charts

Objective = Literal["makespan", "period"]


@dataclass(frozen=True)
class Row:
    """The prediction for a machine and a policy; times in seconds.

    ``speedup`` is relative to the policy ``"single"``, all tasks on one device, if that is
    possible. ``busiest`` is the share of the makespan in which the busiest device computes.
    ``peak_bytes`` is the largest peak memory of a device. ``copies_hidden`` is None where nothing
    is copied. ``period`` is the seconds per run with ``in_flight`` runs under way.
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

    @property
    def _in_flight(self) -> bool:
        return self.objective == "period" or any(row.in_flight > 1 for row in self.rows)

    def __repr__(self) -> str:
        lines = table(self._heads, self._cells(), left=3) if self.rows else []
        return "\n".join([self._title, *lines, *self._refused()])

    @property
    def _title(self) -> str:
        return f"{self.name}: predicted{f', with {self.guess}' if self.guess else ''}"

    def to_json(self) -> str:
        """Return rows and refusals as JSON."""
        return json.dumps(asdict(self), indent=2)

    def _repr_html_(self) -> str:
        cells = [self._heads, *self._cells()]
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in cells)
        refused = "".join(f"<p>{html.escape(line)}</p>" for line in self._refused())
        about = f"<p>{html.escape(self._title)}</p>" if self.guess else ""
        return f"{about}<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>{refused}"

    def svg(self) -> str:
        """Draw makespans as lines over numbers of GPUs, by policy and link, or else as bars."""
        title = self._title
        points = {(row.gpus, row.link, row.policy) for row in self.rows}
        if len({row.gpus for row in self.rows}) > 1 and len(points) == len(self.rows):
            lines = dict(self._lines())
            return charts.lines(lines, title=title, x=self.devices, y=self.objective, unit="s")
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

    @property
    def _heads(self) -> tuple[str, ...]:
        return (*_HEADS, "in flight", "period") if self._in_flight else _HEADS

    def _cells(self) -> list[tuple[str, ...]]:
        found = [_cells(row, row in self.best) for row in self.rows]
        if not self._in_flight:
            return found
        periods = ((str(row.in_flight), duration(row.period)) for row in self.rows)
        return [(*cells, *more) for cells, more in zip(found, periods, strict=True)]

    def _refused(self) -> Iterator[str]:
        groups = groupby(self.refusals, key=lambda found: (found.machine, found.reason))
        for (machine, reason), same in groups:
            yield f"{machine}: refused ({', '.join(refusal.policy for refusal in same)}): {reason}"


_HEADS = (
    *("", "machine", "policy", "makespan", "speed-up"),
    *("bound", "gap", "copies hidden", "busiest", "peak"),
)


def _cells(row: Row, best: bool) -> tuple[str, ...]:
    return (
        "*" if best else "",
        row.machine,
        row.policy,
        duration(row.makespan),
        "-" if row.speedup is None else f"{row.speedup:.2f}",
        duration(row.lower_bound),
        f"{row.gap:.0%}",
        "-" if row.copies_hidden is None else f"{row.copies_hidden:.0%}",
        f"{row.busiest:.0%}",
        amount(row.peak_bytes, "B"),
    )
