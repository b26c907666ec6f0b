"""Lower bounds from paths through the graph.

Computes for each task and device the earliest end of the task, and the time that remains from its
start to the end of the graph, from edges and durations. Of the load of a device, only the
predecessors or the successors of a single task are taken into account.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from autosched._lib.jit import kernel, mode
from autosched.bounds.relaxation import Array, Edges, Relaxation
from autosched.graph.flow import grouped

_MOST = 32  # predecessors considered individually: those whose copies arrive last


class _Walk(NamedTuple):
    """The arrays that the loop reads."""

    order: Any  # tasks
    first: Any  # by task, the offset of its edges
    other: Any  # by edge, the predecessor
    nbytes: Any  # by edge; below 0 if no data are copied
    group: Any
    seconds: Any  # [task, device]
    ready: Any  # [task, device]
    streams: Any
    kind: Any  # by device; devices of one kind have equal links
    latency: Any  # [kind of the source, kind of the destination]
    per_byte: Any


def heads(relaxed: Relaxation) -> Array:
    """Return by [task, device] a lower bound on the end of the task there."""
    order = np.arange(len(relaxed.group))
    return _longest(relaxed, order, relaxed.edges, relaxed.ready, relaxed.latency, relaxed.per_byte)


def tails(relaxed: Relaxation) -> Array:
    """Return by [task, device] a lower bound on the time from its start there to the end."""
    order = np.arange(len(relaxed.group))[::-1]
    turned = Edges(relaxed.edges.other, relaxed.edges.task, relaxed.edges.nbytes)
    return _longest(relaxed, order, turned, relaxed.after, relaxed.latency.T, relaxed.per_byte.T)


def through(head: Array, tail: Array, seconds: Array) -> Array:
    """Return by [task, device] a lower bound on the makespan with the task there, or infinity."""
    return head + tail - np.where(np.isinf(seconds), 0.0, seconds)


def _longest(
    relaxed: Relaxation, order: Any, edges: Edges, ready: Array, latency: Array, per_byte: Array
) -> Array:
    tasks, devices = relaxed.seconds.shape
    first, by_task = grouped(edges.task, np.arange(len(edges.task)), tasks)
    kind, rates = _kinds(latency, per_byte)
    walk = _Walk(
        order=order,
        first=first,
        other=edges.other[by_task],
        nbytes=edges.nbytes[by_task],
        group=relaxed.group,
        seconds=relaxed.seconds.ravel(),
        ready=ready.ravel(),
        streams=relaxed.streams,
        kind=kind,
        latency=rates[0].ravel(),
        per_byte=rates[1].ravel(),
    )
    run = mode(2.0 * len(edges.task) * devices, _fill)
    passed = run.numbers(tasks * devices)
    kinds = tasks * len(rates[0])
    earliest = run.numbers(kinds), run.numbers(kinds), run.counts(kinds)
    run(_fill)(run.of(walk), passed, *earliest, *(run.numbers(_MOST) for _ in range(5)))
    return np.asarray(passed, float).reshape(tasks, devices)


def _kinds(latency: Array, per_byte: Array) -> tuple[Any, Array]:
    """Return the kind of each device, and latency and seconds per byte between kinds.

    Two devices are of the same kind if exchanging them changes nothing. Links between devices of
    the same kind are included.
    """
    both = np.stack([latency, per_byte])
    models: list[int] = []
    kind: list[int] = []
    within: dict[int, Array] = {}
    for p in range(len(latency)):
        for k, model in enumerate(models):
            turn = np.arange(len(latency))
            turn[[p, model]] = model, p
            if np.array_equal(both[:, turn][:, :, turn], both):
                kind.append(k)
                within.setdefault(k, both[:, model, p])
                break
        else:
            kind.append(len(models))
            models.append(p)
    rates = both[:, models][:, :, models]
    for k, rate in within.items():
        rates[:, k, k] = rate
    return np.array(kind), rates


@kernel
def _fill(
    w: Any,
    passed: Any,
    first: Any,
    second: Any,
    where: Any,
    far: Any,
    end: Any,
    work: Any,
    starts: Any,
    works: Any,
) -> None:
    """Fill ``passed`` by task and device; the other arrays are working memory.

    ``first`` and ``second`` are the earliest ends on devices of a kind, ``where`` is the device of
    the first, by [task, kind]. Others have ``_MOST`` elements.
    """
    devices = len(w.streams)
    kinds = len(first) // max(1, len(w.group))
    for task in w.order:
        for p in range(devices):
            begin = w.ready[task * devices + p]
            count = 0
            for e in range(w.first[task], w.first[task + 1]):
                u = w.other[e]
                here = passed[u * devices + p]
                away = (
                    math.inf
                    if w.group[u] == w.group[task]
                    else _arrival(w, first, second, where, e, p, kinds)
                )
                begin = max(begin, min(here, away))
                # Keep those that would arrive latest by copies, in order; if there are too many,
                # drop the earliest.
                if away <= here or (count == _MOST and far[count - 1] >= away):
                    continue
                i = min(count, _MOST - 1)
                while i > 0 and far[i - 1] < away:
                    far[i] = far[i - 1]
                    end[i] = end[i - 1]
                    work[i] = work[i - 1]
                    i -= 1
                far[i] = away
                end[i] = here
                work[i] = w.seconds[u * devices + p]
                count = min(count + 1, _MOST)
            begin = max(begin, _settled(count, far, end, work, starts, works, w.streams[p]))
            passed[task * devices + p] = begin + w.seconds[task * devices + p]
        for i in range(task * kinds, task * kinds + kinds):
            first[i] = math.inf
            second[i] = math.inf
            where[i] = -1
        for p in range(devices):
            i = task * kinds + w.kind[p]
            since = passed[task * devices + p]
            if since < first[i]:
                first[i], second[i], where[i] = since, first[i], p
            elif since < second[i]:
                second[i] = since


@kernel
def _arrival(w: Any, first: Any, second: Any, where: Any, e: int, p: int, kinds: int) -> float:
    """Return when the data of an edge can have arrived on a device from any other."""
    earliest = math.inf
    for k in range(kinds):
        i = w.other[e] * kinds + k
        link = k * kinds + w.kind[p]
        since = first[i] if where[i] != p else second[i]
        if w.nbytes[e] >= 0:
            since += w.latency[link] + w.nbytes[e] * w.per_byte[link]
        earliest = min(earliest, since)
    return earliest


@kernel
def _settled(
    count: int, far: Any, end: Any, work: Any, starts: Any, works: Any, streams: float
) -> float:
    """Return when tasks can all have ended on a device, or their data have arrived there.

    Tasks whose data would arrive later than t must run here, on the streams of the device, and end
    by t. The result is the least t at which that is possible. ``far`` is descending; the tasks can
    have ended here at ``end``, after ``work`` seconds. Source: Al-Mouhamed, IEEE TSE 16(12), 1990,
    there for one stream and identical devices.
    """
    best: float = math.inf
    done = 0.0  # when the streams can be done, with the first few tasks here
    for i in range(count):
        best = min(best, max(done, far[i]))
        if done >= best or end[i] == math.inf:
            done = best
            break
        k = i
        while k > 0 and starts[k - 1] < end[i] - work[i]:
            starts[k] = starts[k - 1]
            works[k] = works[k - 1]
            k -= 1
        starts[k] = end[i] - work[i]
        works[k] = work[i]
        done = max(done, end[i])
        load = 0.0
        for j in range(i + 1):
            load += works[j]
            done = max(done, starts[j] + load / streams)
    return min(best, done)
