"""Store a problem as flat arrays for kernels.

Row ``i`` of a table with several numbers per task begins at ``i * width``. A ragged table is a pair
of arrays: the offset of each row, and the numbers. The tables can be built for the reversed graph
as well. They require a machine on which all devices are linked; other machines need ``Possible``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched.policies.base.problem import Problem

__all__ = ["Tables", "grouped"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Tables(NamedTuple):
    """The arrays. A datum is produced by one task and read by others.

    ``maker`` is -1 for sources.
    """

    seconds: Floats  # [task, device], infinite where a task cannot run
    together: Floats  # [task, device], of all tasks of its group
    least: Floats  # [task], the least of ``together``
    streams: Ints  # [device], its compute streams
    group: Ints  # [task]
    before_at: Ints
    before: Ints  # predecessors whose data the task does not read
    reads_at: Ints
    reads: Ints  # data
    maker: Ints  # [datum]
    home: Ints  # [datum]
    row: Ints  # [datum], row of ``latency`` if it is not that of its producer's device
    nbytes: Floats  # [datum]
    latency: Floats  # [source row, device]
    rate: Floats  # [source row, device]
    holds_out: Ints  # [source row, device]
    holds_in: Ints  # [source row, device]
    returns: Ints  # data that are copied back in the end,
    returns_to: Ints  # to these devices

    @classmethod
    def of(cls, problem: Problem) -> Tables:
        """Flatten a problem."""
        devices = {name: p for p, name in enumerate(problem.devices)}
        seconds = problem.table.copy()
        for task, allowed in enumerate(problem.allowed):
            if len(allowed) < len(devices):
                seconds[task, [p for name, p in devices.items() if name not in allowed]] = np.inf
        group = np.array(problem.group, np.int64)
        together = _together(seconds, group)
        data = problem.data
        paths = [path for row in problem.paths for path in row]
        return cls(
            seconds.ravel(),
            together.ravel(),
            together.min(axis=1, initial=np.inf),
            np.array(problem.streams, np.int64),
            group,
            *_ragged(problem.others),
            *_ragged(problem.reads),
            np.array(data.maker, np.int64),
            np.array(data.home, np.int64),
            np.array(data.row, np.int64),
            np.array(data.nbytes, float),
            np.array([path.latency for path in paths], float),
            np.array([path.rate for path in paths], float),
            np.array([path.holds_out for path in paths], np.int64),
            np.array([path.holds_in for path in paths], np.int64),
            np.array([datum for datum, _ in problem.returns], np.int64),
            np.array([device for _, device in problem.returns], np.int64),
        )

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
            returns=np.zeros(0, np.int64),
            returns_to=np.zeros(0, np.int64),
        )

    def _turned(self, paths: NDArray[Any]) -> NDArray[Any]:
        """Return the paths in the other direction."""
        p = len(self.streams)
        return paths[: p * p].reshape(p, p).T.ravel()


def _together(seconds: Floats, group: Ints) -> Floats:
    """Return the durations of whole groups, by task."""
    if (group == np.arange(len(group))).all():
        return seconds
    total = np.zeros_like(seconds)
    np.add.at(total, group, seconds)
    return total[group]


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return the offset of each row, and all numbers in one array."""
    at = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=at[1:])
    return at, np.fromiter(chain.from_iterable(rows), np.int64, at[-1])


def grouped(key: Ints, item: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the items of each key as a ragged table."""
    at = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(key, minlength=count), out=at[1:])
    return at, item[np.argsort(key, kind="stable")]
