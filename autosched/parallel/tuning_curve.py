"""The predicted time of a step, by pipeline schedule and number of micro-batches.

Many micro-batches have small bubbles, but they cost more launches, and their work is too small to
use a device well. The best number is that of the shortest predicted step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autosched.viz import charts

__all__ = ["Curve", "Tried", "candidates"]


@dataclass(frozen=True)
class Tried:
    """A simulated way to run a step: an order and a number of micro-batches (``chunks``).

    ``seconds``: the makespan; ``idle``: the share of it in which devices are idle; ``nbytes``: the
    peak memory of a device; ``fits``: whether each device has that much.
    """

    order: str
    chunks: int
    seconds: float
    idle: float
    nbytes: float
    fits: bool

    @property
    def busy(self) -> float:
        """Seconds that a device works, on average."""
        return self.seconds * (1 - self.idle)


@dataclass(frozen=True)
class Curve:
    r"""The simulated ways to run a step with ``rows`` rows. ``print`` it, or draw it.

    >>> tried = [Tried("gpipe", n, seconds, idle, 1e6, True) for n, seconds, idle in
    ...          ((1, 4e-3, 0.5), (2, 3e-3, 0.3), (4, 5e-3, 0.2))]
    >>> print(Curve(8, tuple(tried)).why.replace("; ", ";\n"))
    gpipe with 2 micro-batches of 4 rows: 3 ms;
    with 1 devices idle 50% instead of 30%, with 4 they work 1.9 times as long
    """

    rows: int
    tried: tuple[Tried, ...]

    @property
    def best(self) -> Tried:
        """The fastest that fits in memory; of equal ones the first."""
        return min((one for one in self.tried if one.fits), key=lambda one: one.seconds)

    def seconds(self, order: str) -> dict[int, float]:
        """Return the seconds of an order by the number of micro-batches."""
        return {one.chunks: one.seconds for one in self.tried if one.order == order}

    @property
    def why(self) -> str:
        """A sentence: the best, and the disadvantages of fewer and of more micro-batches."""
        best = self.best
        same = [one for one in self.tried if one.order == best.order]
        same.sort(key=lambda one: one.chunks)
        at = same.index(best)
        reasons = []
        if at > 0:
            fewer = same[at - 1]
            idle = f"idle {fewer.idle:.0%} instead of {best.idle:.0%}"
            reasons.append(f"with {fewer.chunks} devices {idle}")
        if same[-1] is not best:
            ratio = same[-1].busy / best.busy
            reasons.append(f"with {same[-1].chunks} they work {ratio:.2g} times as long")
        plural = "es" if best.chunks > 1 else ""
        what = f"{best.chunks} micro-batch{plural} of {self._size(best.chunks)} rows"
        text = f"{best.order} with {what}: {best.seconds * 1e3:.4g} ms"
        return "; ".join([text, *[", ".join(reasons)] * bool(reasons)])

    def _size(self, chunks: int) -> int:
        return -(-self.rows // chunks)

    def __repr__(self) -> str:
        lines = [f"{'order':>12}{'chunks':>8}{'rows':>6}{'ms':>10}{'idle':>8}{'MB':>10}"]
        for one in self.tried:
            mark = "  does not fit" if not one.fits else "  <- best" if one is self.best else ""
            what = f"{one.order:>12}{one.chunks:8}{self._size(one.chunks):6}"
            numbers = f"{one.seconds * 1e3:10.4g}{one.idle:8.1%}{one.nbytes / 1e6:10.4g}"
            lines.append(f"{what}{numbers}{mark}")
        return "\n".join([*lines, self.why])

    def svg(self) -> str:
        """Draw the seconds by the size of a micro-batch, a line for each order."""
        lines = {}
        for order in dict.fromkeys(one.order for one in self.tried):
            seconds = sorted(self.seconds(order).items())
            lines[order] = [(self._size(chunks), each) for chunks, each in seconds]
        title = f"One step with {self.rows} rows, by size of micro-batches"
        x = "rows of a micro-batch"
        return charts.lines(lines, title=title, x=x, y="predicted time", unit="s", log_x=True)


def candidates(rows: int) -> Sequence[int]:
    """Return numbers of micro-batches to try: 1, 2, 3, 4, 6, 8, 12, ..., and one per row.

    >>> candidates(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    powers = [2**i for i in range(rows.bit_length())]
    return sorted({n for power in powers for n in (power, power * 3 // 2) if n <= rows} | {rows})
