"""Compute ranks and list schedules over flat arrays.

All kernels read ``Tables``; tasks, devices and data are numbers. Orders, devices and weights are
arguments.

The same source runs compiled by numba or uncompiled over lists, since small problems are
solved faster in Python than numba is loaded. Which of the two runs depends on the process, so both
must return the same bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from autosched._lib.jit import Mode, kernel
from autosched.problem import Tables

__all__ = ["Planning", "copy_seconds", "decode", "list_schedule", "longest", "optimistic", "send"]

# Gaps examined for a task; without a limit, many small gaps make planning quadratic.
MOST_TRIED = 64


class Planning(NamedTuple):
    """Working memory: data that a task reads, copy streams, arrivals, gaps of compute streams."""

    since: Any  # of each datum that the task reads: when it is produced,
    datum: Any  # its number,
    where: Any  # and its device
    out_next: Any  # when copy streams are free after the copies of the task in question
    in_next: Any
    out_free: Any  # when copy streams are free
    in_free: Any
    arrival: Any  # [datum, device], nan where it was not copied
    first: Any  # [device], its first stream
    begins: Any  # [stream, gap]
    ends: Any  # [stream, gap]
    gaps: Any  # [stream], how many it has
    issues: bool  # whether issuing takes time
    begin_issuing: float  # when the thread begins to issue
    issued: Any  # until when it is busy; and the same after the copies of the task in question
    most_gaps: int  # the most gaps of a stream that are stored
    copy: Any  # copies planned so far, as datum * devices + destination,
    begin: Any  # their start times,
    sent: Any  # and their number

    @classmethod
    def of(cls, t: Tables, mode: Mode, most_gaps: int) -> Planning:
        """Return working memory for a problem; ``t`` are its tables as arrays."""
        devices = len(t.streams)
        first = np.zeros(devices + 1, np.int64)
        np.cumsum(t.streams, out=first[1:])
        streams = int(first[-1])
        reads = int(np.diff(t.reads_at).max(initial=1))
        contended = bool(t.holds_out.any() or t.holds_in.any())
        copies = len(t.reads) + len(t.returns) if contended else 0
        state = cls(
            since=mode.numbers(reads),
            datum=mode.counts(reads),
            where=mode.counts(reads),
            out_next=mode.numbers(devices),
            in_next=mode.numbers(devices),
            out_free=mode.numbers(devices),
            in_free=mode.numbers(devices),
            arrival=mode.numbers(len(t.maker) * devices if contended else 0, math.nan),
            first=mode.whole(first),
            begins=mode.numbers(streams * most_gaps),
            ends=mode.numbers(streams * most_gaps),
            gaps=mode.counts(streams, 1),
            issues=bool(t.issue.any() or t.issue_copy.any()),
            begin_issuing=float(t.begin[0]),
            issued=mode.numbers(2),
            most_gaps=most_gaps,
            copy=mode.counts(copies),
            begin=mode.numbers(copies),
            sent=mode.counts(1),
        )
        clear(state)
        return state


@kernel
def copy_seconds(t: Tables, datum: int, path: int) -> Any:
    """Return the duration of a copy; ``path`` is source row * devices + destination."""
    return t.latency[path] + t.nbytes[datum] / t.rate[path]


@kernel
def send(
    t: Tables, path: int, since: Any, seconds: Any, out_free: Any, q: int, in_free: Any, p: int
) -> Any:
    """Return when a copy from device ``q`` to ``p`` starts that is issued now.

    It starts when its datum exists, ``since``, and the copy streams that it occupies are free. It
    occupies them until its end. Times may be in any unit.
    """
    start = since
    if t.holds_out[path]:
        start = max(start, out_free[q])
    if t.holds_in[path]:
        start = max(start, in_free[p])
    if t.holds_out[path]:
        out_free[q] = start + seconds
    if t.holds_in[path]:
        in_free[p] = start + seconds
    return start


@kernel
def longest(
    t: Tables, weight: Any, kind: Any, kinds: int, latency: Any, per_byte: Any, rest: Any
) -> None:
    """Fill ``rest`` with the longest path from each task's end to the end of the graph.

    ``weight`` is the duration of each task. A datum that moves from a task of ``kind`` a to one of
    ``kind`` b takes ``latency[a, b] + nbytes * per_byte[a, b]``. ``rest`` must be zero everywhere.
    """
    for task in range(len(weight) - 1, -1, -1):
        here = rest[task] + weight[task]
        for i in range(t.before_at[task], t.before_at[task + 1]):
            rest[t.before[i]] = max(rest[t.before[i]], here)
        for i in range(t.reads_at[task], t.reads_at[task + 1]):
            maker = t.maker[t.reads[i]]
            if maker >= 0:
                away = here
                if t.group[maker] != t.group[task]:
                    ends = kind[maker] * kinds + kind[task]
                    away += latency[ends] + t.nbytes[t.reads[i]] * per_byte[ends]
                rest[maker] = max(rest[maker], away)


@kernel
def optimistic(t: Tables, latency: float, per_byte: float, table: Any, column: Any) -> None:
    """Fill ``table[task, device]`` with the optimistic cost, the least time after a task's end.

    A datum that changes device takes ``latency + nbytes * per_byte``. ``table`` must be zero
    everywhere; ``column`` has one element per device. Source: Arabnejad, Barbosa, IEEE TPDS 25(3),
    2014.
    """
    devices = len(t.streams)
    for task in range(len(t.group) - 1, -1, -1):
        least = math.inf
        for p in range(devices):
            column[p] = table[task * devices + p] + t.seconds[task * devices + p]
            least = min(least, column[p])
        for i in range(t.before_at[task], t.before_at[task + 1]):
            base = t.before[i] * devices
            for p in range(devices):
                table[base + p] = max(table[base + p], least)
        for i in range(t.reads_at[task], t.reads_at[task + 1]):
            maker = t.maker[t.reads[i]]
            if maker < 0:
                continue
            far = least + (latency + t.nbytes[t.reads[i]] * per_byte)
            if t.group[maker] == t.group[task]:
                far = math.inf
            base = maker * devices
            for p in range(devices):
                table[base + p] = max(table[base + p], min(far, column[p]))


@kernel
def list_schedule(
    t: Tables,
    order: Any,
    excess: float,
    ahead: float,
    optimism: Any,
    fixed: Any,
    device: Any,
    start: Any,
    finish: Any,
    s: Planning,
) -> float:
    """Place tasks in this order, each on the device of least key, and return the makespan.

    The key is the earliest finish time + ``excess`` * (duration here - least duration) + ``ahead``
    * optimistic cost. ``fixed[group]`` is the device of a group, or -1. Fills ``device``, ``start``
    and ``finish``. The makespan is infinite if it overflows.
    """
    devices = len(t.streams)
    end = 0.0
    clear(s)
    for i in range(len(order)):
        task = order[i]
        after = 0.0
        for j in range(t.before_at[task], t.before_at[task + 1]):
            after = max(after, finish[t.before[j]])
        count = sources(t, task, device, finish, s)
        base = task * devices
        bound = fixed[t.group[task]]
        best = -1
        least = math.inf
        where = -1
        gap = -1
        at = 0.0
        first, last = (0, devices) if bound < 0 else (bound, bound + 1)
        for p in range(first, last):
            total = t.together[base + p]
            if total == math.inf or t.seconds[base + p] == math.inf:
                continue
            bias = total + excess * (total - t.least[task]) + ahead * optimism[base + p]
            limit = least - bias
            ready = arrive(t, p, count, after, limit, s, False)
            if ready >= limit:
                continue
            if s.issues:
                ready = issue(t, base + p, ready, s, False)
            stream, g, begin = earliest_gap(s, p, ready, t.seconds[base + p], limit)
            if stream >= 0:
                best = p
                where = stream
                gap = g
                at = begin
                least = at + bias
        if best < 0 or at + t.seconds[base + best] == math.inf:
            return math.inf
        fixed[t.group[task]] = best
        arrive(t, best, count, after, math.inf, s, True)
        issue(t, base + best, 0.0, s, True)
        take(s, where, gap, at, at + t.seconds[base + best])
        device[task] = best
        start[task] = at
        finish[task] = at + t.seconds[base + best]
        end = max(end, finish[task])
    return max(end, go_home(t, device, finish, s))


@kernel
def decode(
    t: Tables,
    order: Any,
    device: Any,
    tail: Any,
    start: Any,
    finish: Any,
    cap: float,
    s: Planning,
) -> float:
    """Serial schedule generation: place tasks in this order in sufficient gaps.

    Return the makespan, infinity if it is not below ``cap``; fill ``start`` and ``finish``.
    ``tail[task, device]`` is a lower bound on the time after a task's end.
    """
    devices = len(t.streams)
    end = 0.0
    contended = len(s.arrival) > 0
    clear(s)
    for i in range(len(order)):
        task = order[i]
        p = device[task]
        ready = 0.0
        seconds = t.seconds[task * devices + p]
        limit = cap - seconds - tail[task * devices + p]
        for j in range(t.before_at[task], t.before_at[task + 1]):
            ready = max(ready, finish[t.before[j]])
        if contended:
            ready = arrive(t, p, sources(t, task, device, finish, s), ready, limit, s, True)
        else:
            s.issued[1] = s.issued[0]
            for j in range(t.reads_at[task], t.reads_at[task + 1]):
                datum = t.reads[j]
                maker = t.maker[datum]
                since, where = (
                    (finish[maker], device[maker]) if maker >= 0 else (0.0, t.home[datum])
                )
                if where != p:
                    row = where if maker >= 0 else t.row[datum]
                    since += copy_seconds(t, datum, row * devices + p)
                ready = max(ready, since)
        if ready >= limit:
            return math.inf
        if s.issues:
            ready = issue(t, task * devices + p, ready, s, True)
        stream, gap, begin = earliest_gap(s, p, ready, seconds, limit)
        if stream < 0:
            return math.inf
        start[task] = begin
        finish[task] = begin + seconds
        take(s, stream, gap, begin, begin + seconds)
        end = max(end, finish[task])
    end = max(end, go_home(t, device, finish, s))
    return end if end < cap else math.inf


@kernel
def clear(s: Planning) -> None:
    """Reset the working memory."""
    for stream in range(len(s.gaps)):
        s.gaps[stream] = 1
        s.begins[stream * s.most_gaps] = 0.0
        s.ends[stream * s.most_gaps] = math.inf
    for p in range(len(s.out_free)):
        s.out_free[p] = 0.0
        s.in_free[p] = 0.0
    for k in range(s.sent[0]):
        s.arrival[s.copy[k]] = math.nan
    s.sent[0] = 0
    s.issued[0] = s.begin_issuing


@kernel
def go_home(t: Tables, device: Any, finish: Any, s: Planning) -> float:
    """Copy inputs that tasks wrote back to their home; return when that has ended."""
    end = 0.0
    for j in range(len(t.returns)):
        datum = t.returns[j]
        p = t.returns_to[j]
        maker = t.maker[datum]
        s.since[0] = finish[maker]
        s.datum[0] = datum
        s.where[0] = device[maker]
        end = max(end, arrive(t, p, 1, 0.0, math.inf, s, True))
    return end


@kernel
def sources(t: Tables, task: int, device: Any, finish: Any, s: Planning) -> int:
    """Store what a task reads, sorted by time of production: time, datum, device.

    Data of tasks that are not placed yet are left out. Return the number.
    """
    count = 0
    for j in range(t.reads_at[task], t.reads_at[task + 1]):
        datum = t.reads[j]
        maker = t.maker[datum]
        if maker >= 0 and device[maker] < 0:
            continue
        since, where = (finish[maker], device[maker]) if maker >= 0 else (0.0, t.home[datum])
        k = count
        while k > 0 and (
            s.since[k - 1] > since or (s.since[k - 1] == since and s.datum[k - 1] > datum)
        ):
            s.since[k], s.datum[k], s.where[k] = s.since[k - 1], s.datum[k - 1], s.where[k - 1]
            k -= 1
        s.since[k] = since
        s.datum[k] = datum
        s.where[k] = where
        count += 1
    return count


@kernel
def arrive(
    t: Tables, p: int, count: int, ready: float, limit: float, s: Planning, commit: bool
) -> float:
    """Return when all stored sources are on device ``p``; infinity if that is not below ``limit``.

    With ``commit``, the copies for that are added to the plan.
    """
    devices = len(t.streams)
    s.in_next[p] = s.in_free[p]
    issued = s.issued[0]
    for k in range(count):
        s.out_next[s.where[k]] = s.out_free[s.where[k]]
    for k in range(count):
        where = s.where[k]
        datum = s.datum[k]
        end = s.since[k]
        if where != p:
            row = where if t.maker[datum] >= 0 else t.row[datum]
            path = row * devices + p
            busy = t.holds_out[path] + t.holds_in[path]
            there = s.arrival[datum * devices + p] if busy else math.nan
            if not math.isnan(there):
                end = there
            else:
                seconds = copy_seconds(t, datum, path)
                if s.issues and t.issue_copy[path] > 0:
                    issued += t.issue_copy[path]
                    end = max(end, issued)
                begin = send(t, path, end, seconds, s.out_next, where, s.in_next, p)
                end = begin + seconds
                if commit and busy:
                    s.copy[s.sent[0]] = datum * devices + p
                    s.begin[s.sent[0]] = begin
                    s.sent[0] += 1
                    s.arrival[datum * devices + p] = end
        if end > ready:
            ready = end
            if ready >= limit:
                return math.inf
    if s.issues:
        s.issued[1] = issued
    if commit:
        s.issued[0] = issued
        s.in_free[p] = s.in_next[p]
        for k in range(count):
            s.out_free[s.where[k]] = s.out_next[s.where[k]]
    return ready


@kernel
def issue(t: Tables, where: int, ready: float, s: Planning, commit: bool) -> float:
    """Return when a task can start that is issued after its copies, which ``arrive`` issued.

    ``where`` is task * devices + device. One thread issues everything. That is pessimistic for
    streams that wait for a CPU. Tasks may be issued in another order than they are placed in: in
    that of their starts, each is still issued before it starts.
    """
    if t.issue[where] == 0:
        return ready
    issued: float = s.issued[1] + t.issue[where]
    if commit:
        s.issued[0] = issued
    return max(ready, issued)


@kernel
def earliest_gap(
    s: Planning, p: int, ready: float, seconds: float, limit: float
) -> tuple[int, int, float]:
    """Return stream, gap and start of a task that starts before ``limit``; stream -1 if none."""
    found = (-1, -1, math.inf)
    for stream in range(s.first[p], s.first[p + 1]):
        gap = fit(s, stream, ready, seconds, limit)
        if gap >= 0:
            limit = max(ready, s.begins[stream * s.most_gaps + gap])
            found = (stream, gap, limit)
    return found


@kernel
def fit(s: Planning, stream: int, ready: float, seconds: float, limit: float) -> int:
    """Return the first gap of a stream in which a task can start before ``limit``, or -1."""
    base = stream * s.most_gaps
    low = 0
    high = s.gaps[stream]
    while low < high:
        middle = (low + high) // 2
        if s.ends[base + middle] > ready:
            high = middle
        else:
            low = middle + 1
    last = s.gaps[stream] - 1
    gap = low
    begin = max(ready, s.begins[base + low])
    while begin < limit and begin + seconds > s.ends[base + gap]:
        gap = gap + 1 if gap < low + MOST_TRIED else last
        begin = s.begins[base + gap]
    return gap if begin < limit else -1


@kernel
def take(s: Planning, stream: int, gap: int, start: float, finish: float) -> None:
    """Cut [start, finish] out of a gap. If more than ``most_gaps`` remain, drop the earliest."""
    base = stream * s.most_gaps
    count = s.gaps[stream]
    begin = s.begins[base + gap]
    end = s.ends[base + gap]
    if begin < start and finish < end:
        if count == s.most_gaps and gap == 0:
            s.begins[base] = finish
            return
        if count == s.most_gaps:
            count = count - 1
            gap = gap - 1
            for i in range(base, base + count):
                s.begins[i], s.ends[i] = s.begins[i + 1], s.ends[i + 1]
        for i in range(base + count, base + gap, -1):
            s.begins[i], s.ends[i] = s.begins[i - 1], s.ends[i - 1]
        s.ends[base + gap] = start
        s.begins[base + gap + 1] = finish
        count += 1
    elif begin < start:
        s.ends[base + gap] = start
    elif finish < end:
        s.begins[base + gap] = finish
    else:
        count -= 1
        for i in range(base + gap, base + count):
            s.begins[i], s.ends[i] = s.begins[i + 1], s.ends[i + 1]
    s.gaps[stream] = count
