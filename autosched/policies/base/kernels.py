"""Compute list schedules over flat arrays.

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

# Gaps examined for a task; without a limit, many small gaps make planning quadratic.
MOST_TRIED = 64


class Planning(NamedTuple):
    """Working memory: data that a task reads, copy streams, arrivals, gaps of compute streams."""

    since: Any  # of each datum that the task reads: when it is produced,
    datum: Any  # its number,
    where: Any  # its device,
    row: Any  # and the path from there to the first device
    out_next: Any  # when copy-out streams are free after the copies of the task in question
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
        queued = bool(t.holds_out.any() or t.holds_in.any() or t.issue_copy.any())
        copies = len(t.reads) + len(t.returns) if queued else 0
        state = cls(
            since=mode.numbers(reads),
            datum=mode.counts(reads),
            where=mode.counts(reads),
            row=mode.counts(reads),
            out_next=mode.numbers(devices),
            out_free=mode.numbers(devices),
            in_free=mode.numbers(devices),
            arrival=mode.numbers(len(t.maker) * devices if queued else 0, math.nan),
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
    holds_out = t.holds_out[path]
    holds_in = t.holds_in[path]
    start = since
    if holds_out and out_free[q] > start:
        start = out_free[q]
    if holds_in and in_free[p] > start:
        start = in_free[p]
    if holds_out:
        out_free[q] = start + seconds
    if holds_in:
        in_free[p] = start + seconds
    return start


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
            begin, stream, g = earliest_gap(s, p, ready, t.seconds[base + p], limit)
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
    queued = len(s.arrival) > 0
    clear(s)
    for i in range(len(order)):
        task = order[i]
        p = device[task]
        ready = 0.0
        seconds = t.seconds[task * devices + p]
        limit = cap - seconds - tail[task * devices + p]
        for j in range(t.before_at[task], t.before_at[task + 1]):
            ready = max(ready, finish[t.before[j]])
        if queued:
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
        begin, stream, gap = earliest_gap(s, p, ready, seconds, limit)
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
        s.row[0] = device[maker] * len(t.streams)
        end = max(end, arrive(t, p, 1, 0.0, math.inf, s, True))
    return end


@kernel
def sources(t: Tables, task: int, device: Any, finish: Any, s: Planning) -> int:
    """Store what a task reads, sorted by time of production: time, datum, device.

    Data of tasks that are not placed yet are left out. Return the number.
    """
    count = 0
    devices = len(t.streams)
    for j in range(t.reads_at[task], t.reads_at[task + 1]):
        datum = t.reads[j]
        maker = t.maker[datum]
        since = 0.0
        where = t.home[datum]
        row = t.row[datum]
        if maker >= 0:
            since = finish[maker]
            where = device[maker]
            row = where
        if where < 0:
            continue
        k = count
        while k > 0 and (
            s.since[k - 1] > since or (s.since[k - 1] == since and s.datum[k - 1] > datum)
        ):
            s.since[k] = s.since[k - 1]
            s.datum[k] = s.datum[k - 1]
            s.where[k] = s.where[k - 1]
            s.row[k] = s.row[k - 1]
            k -= 1
        s.since[k] = since
        s.datum[k] = datum
        s.where[k] = where
        s.row[k] = row * devices
        count += 1
    return count


@kernel
def arrive(
    t: Tables, p: int, count: int, ready: float, limit: float, s: Planning, commit: bool
) -> float:
    """Return when all stored sources are on device ``p``; infinity if that is not below ``limit``.

    With ``commit``, the copies for that are added to the plan.
    """
    source = s.where
    out_next = s.out_next
    out_free = s.out_free
    arrival = s.arrival
    queued = len(arrival) > 0
    devices = len(t.streams)
    in_next = s.in_free[p]
    issued = s.issued[0]
    for k in range(count):
        out_next[source[k]] = out_free[source[k]]
    for k in range(count):
        q = source[k]
        end = s.since[k]
        if q != p:
            datum = s.datum[k]
            copy = datum * devices + p
            if queued and arrival[copy] >= 0.0:
                end = arrival[copy]
            else:
                # This is `send`, without the call, which takes uncompiled as long as the rest.
                path = s.row[k] + p
                seconds = t.latency[path] + t.nbytes[datum] / t.rate[path]
                holds_out = t.holds_out[path]
                holds_in = t.holds_in[path]
                if s.issues and t.issue_copy[path] > 0:
                    issued += t.issue_copy[path]
                    end = max(end, issued)
                begin = end
                if holds_out and out_next[q] > begin:
                    begin = out_next[q]
                if holds_in and in_next > begin:
                    begin = in_next
                end = begin + seconds
                if holds_out:
                    out_next[q] = end
                if holds_in:
                    in_next = end
                if commit and queued:
                    s.copy[s.sent[0]] = copy
                    s.begin[s.sent[0]] = begin
                    s.sent[0] += 1
                    arrival[copy] = end
        if end > ready:
            ready = end
            if ready >= limit:
                return math.inf
    s.issued[1] = issued
    if commit:
        s.issued[0] = issued
        s.in_free[p] = in_next
        for k in range(count):
            out_free[source[k]] = out_next[source[k]]
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
) -> tuple[float, int, int]:
    """Return the first start before ``limit``, its stream and gap; or infinity."""
    found = (math.inf, -1, -1)
    begins = s.begins
    ends = s.ends
    for stream in range(s.first[p], s.first[p + 1]):
        base = stream * s.most_gaps
        last = base + s.gaps[stream] - 1
        gap = last
        if begins[last] > ready:
            gap = _after(ends, base, last, ready)
        more = gap + MOST_TRIED
        begin = max(ready, begins[gap])
        while begin < limit and begin + seconds > ends[gap]:
            gap = gap + 1 if gap < more else last
            begin = begins[gap]
        if begin < limit:
            found = (begin, stream, gap - base)
            limit = begin
    return found


@kernel
def _after(ends: Any, low: int, high: int, time: float) -> int:
    """Return the first gap from ``low`` to ``high`` that ends after a time."""
    while low < high:
        middle = (low + high) // 2
        if ends[middle] > time:
            high = middle
        else:
            low = middle + 1
    return low


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
