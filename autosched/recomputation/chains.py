"""Decide what a chain keeps at its cuts, and repeats from there: an exact dynamic programme.

Up to the peak, steps are forward; later ones are backward, and read what forward ones make. The
programme over pairs of cuts finds the optimum of chains (Griewank and Walther, "Algorithm 799:
revolve", TOMS 26(1), 2000; with unequal steps Beaumont et al., "Optimal checkpointing for
heterogeneous chains", 2019). Of other graphs it keeps all that crosses a cut, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from autosched.recomputation.sequence import Step

_CUTS = 100
_LEVELS = 128  # of memory, if it is not in small whole numbers


class Chain:
    """Bytes and seconds of each pair of cuts.

    ``profile`` is what each step holds if none is repeated, ``last`` the last reader of each.
    """

    def __init__(
        self, steps: Sequence[Step], profile: Sequence[float], last: Sequence[int], room: float
    ):
        self.steps = steps
        held = np.array(profile)
        peak = int(held.argmax()) + 1
        can = [i for i in range(peak) if steps[i].last_repeat >= peak and not steps[i].is_kept]
        self.is_forward = np.isin(np.arange(peak), can)
        sizes = np.where(self.is_forward, [step.nbytes for step in steps[:peak]], 0.0)
        times = np.where(self.is_forward, [step.seconds for step in steps[:peak]], 0.0)
        for i in can:
            held[i : last[i] + 1] -= steps[i].nbytes
        ahead = np.arange(peak)  # the last forward reader of each
        for i in range(peak):
            ahead[[*steps[i].reads]] = i
        self.cuts = self._cuts(sizes, ahead)
        self.parts = len(self.cuts) - 1
        self._backward(held)
        # What serves the part before a cut may be what crosses it; then the cut before is next.
        saved = np.array(last[:peak]) >= peak
        lost = np.flatnonzero(self.is_forward & saved & (sizes > 0))
        parts = np.searchsorted(self.cuts, lost, "right")
        self.before = np.arange(self.parts + 1) - 1
        self.before[parts[ahead[lost] < self.cuts[parts]]] += 1
        shape = self.parts + 1, self.parts + 1
        self.seconds, self.size, self.run, self.leaf = (np.zeros(shape) for _ in range(4))
        self.first, self.first_leaf = np.zeros(shape), np.zeros(self.parts + 1)
        stays = np.where(saved, peak, ahead)
        for a in range(self.parts):
            self._from(a, sizes, times, ahead, stays, held)
        whole = all(float(step.nbytes).is_integer() for step in steps) and float(room).is_integer()
        unit = math.gcd(*(int(size) for size in sizes)) if whole else 0
        self.unit = unit if unit and room / unit <= _LEVELS else room / _LEVELS
        self.top = math.floor(room / self.unit)

    def _cuts(self, sizes: Any, ahead: Any) -> Any:
        """Return positions before which the chain is cut: where least is alive."""
        peak = len(sizes)
        alive = [sizes[:cut][ahead[:cut] >= cut].sum() for cut in range(peak)]
        parts = np.linspace(0, peak, min(peak, _CUTS) + 1).astype(int).tolist()
        least = {min(range(a, b), key=alive.__getitem__) for a, b in pairwise(parts)}
        return np.array(sorted(least | {0, peak}))

    def _backward(self, held: Any) -> None:
        """Find for each part the first step that reads it, and the most that such steps hold."""
        self.slot = np.full(self.parts, len(self.steps))
        self.need = np.zeros(self.parts)
        for i in range(len(self.is_forward), len(self.steps)):
            read = [j for j in self.steps[i].reads if j < self.cuts[-1] and self.is_forward[j]]
            if read:
                part = int(np.searchsorted(self.cuts, max(read), "right")) - 1
                self.slot[part] = min(self.slot[part], i)
                self.need[part] = max(self.need[part], held[i])

    def _from(self, a: int, sizes: Any, times: Any, ahead: Any, stays: Any, held: Any) -> None:
        """Find seconds and bytes of runs from one cut to each later one."""
        begin = self.cuts[a]
        peak = len(sizes)
        live = []
        for until in (ahead, stays):
            change = np.append(sizes, [0.0, 0.0])
            change[:begin] = 0.0
            np.subtract.at(change, until[begin:] + 1, sizes[begin:])
            live.append(np.cumsum(change)[:-1])
        later = self.cuts[a + 1 :]
        at = later - 1 - begin
        self.seconds[a, a + 1 :] = np.cumsum(times[begin:])[at]
        self.size[a, a + 1 :] = (live[0] - np.append(sizes, 0.0))[later]
        run, leaf = (each[begin:peak] for each in live)
        self.run[a, a + 1 :] = np.maximum.accumulate(run)[at]
        self.leaf[a, a + 1 :] = np.maximum.accumulate(leaf)[at]
        self.first[a, a + 1 :] = np.maximum.accumulate(run + held[begin:peak])[at]
        self.first_leaf[a] = (leaf + held[begin:peak]).max()

    def repetitions(self) -> list[tuple[int, int]]:
        """Return slots and steps."""
        parts = self.parts
        cost = np.full((parts + 1, parts + 1, self.top + 1), math.inf)
        self.choice = np.zeros(cost.shape, np.int16)
        cost[np.arange(parts + 1), np.arange(parts + 1)] = 0.0
        for width in range(1, parts + 1):
            for a in range(parts - width + 1):
                b = a + width
                need = self.need[a:b].max()
                if self.slot[a:b].min() == len(self.steps):
                    cost[a, b] = 0.0
                    continue
                cost[a, b, self._level(self.leaf[a, b] + need) :] = self.seconds[a, b]
                self._split(cost, a, b, self.seconds[a], self.run[a] + need)
        # The first time forward is no repetition.
        for a in range(parts - 1, -1, -1):
            cost[a, parts] = math.inf
            enough = max(self.first_leaf[a], self.leaf[a, parts] + self.need[a:].max())
            cost[a, parts, self._level(enough) :] = 0.0
            self.choice[a, parts] = 0
            self._split(cost, a, parts, np.zeros(parts + 1), self.first[a])
        self.found: list[tuple[int, int]] = []
        if math.isfinite(cost[0, parts, self.top]):
            self._walk(0, parts, self.top, is_first=True)
        return self.found

    def _level(self, nbytes: Any) -> Any:
        return np.ceil(np.asarray(nbytes) / self.unit - 1e-9).astype(int)

    def _split(self, cost: Any, a: int, b: int, seconds: Any, run: Any) -> None:
        """Improve what lies between two cuts by keeping what crosses a third one."""
        if b - a < 2:
            return
        middle = np.arange(a + 1, b)
        levels = np.arange(self.top + 1)
        rest = levels - self._level(self.size[a, middle])[:, None]
        each = cost[middle[:, None], b, np.maximum(rest, 0)] + cost[a, self.before[middle]]
        each += seconds[middle][:, None]
        run = np.maximum(run[middle], self.size[a, middle] + self.need[middle - 1])
        each[(rest < 0) | (levels < self._level(run)[:, None])] = math.inf
        best = each.argmin(axis=0)
        least = each[best, levels]
        better = least < cost[a, b]
        cost[a, b][better] = least[better]
        self.choice[a, b][better] = middle[best[better]]

    def _walk(self, a: int, b: int, level: int, is_first: bool = False) -> None:
        if a == b or (slot := self.slot[a:b].min()) == len(self.steps):
            return
        middle = int(self.choice[a, b, level])
        if not is_first:
            for i in range(self.cuts[a], self.cuts[middle or b]):
                if self.is_forward[i] and slot <= self.steps[i].last_repeat:
                    self.found.append((int(slot), i))
        if middle:
            rest = level - int(self._level(self.size[a, middle]))
            self._walk(middle, b, rest, is_first)
            self._walk(a, int(self.before[middle]), level)
