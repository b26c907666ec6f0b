"""Windows: a plan improved part by part, each part placed anew as well as it can be by CP-SAT.

A window is some tasks that start one after another. What starts before them stays as it is; what starts behind them
keeps its device and its place in line there, so that all of it is one number for each task of the window and device:
how long the plan goes on behind it. Only where copies occupy nothing, or those numbers would depend on each other.
Such windows are large neighbourhoods (Shaw, "Using constraint programming and local search methods to solve vehicle
routing problems", CP 1998).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from autosched.policies.cpsat import Answer, Limits, Model, Part, solve
from autosched.policies.problem import Problem
from autosched.policies.whole import Times, Whole

__all__ = ["improved", "window"]

_TASKS = 30  # of a window; more are rarely solved in time
_WEIGHT = 10  # of the makespan, against the mean end in the window, which makes room for windows behind
_SECONDS = 1.0  # for one window, at most

_Plan = tuple[list[int], list[int]]  # devices by task, and an order


def improved(
    problem: Problem,
    device: Sequence[int],
    order: Sequence[int],
    seconds: float,
    seed: int = 0,
    told: Callable[[float], None] = lambda makespan: None,
) -> _Plan:
    """Return a plan, devices by task and an order, that is no worse than this one, after so many seconds of windows.

    For machines on which copies occupy nothing. Windows lie side by side and at random in turn. ``told`` gets each
    smaller makespan. Ctrl-C ends it with the best so far, and is raised no more.
    """
    until = perf_counter() + seconds
    whole = Whole.fitting(problem, device, order)
    device, order, times = list(device), list(order), whole.times(device, order)
    for first in _places(len(order), seed):
        left = until - perf_counter()
        if left <= 0:
            break
        order.sort(key=lambda task: (times.tasks[task], task))
        found, interrupted = window(whole, device, order, times, first, min(left, _SECONDS), seed)
        if found is not None:
            (device, order), before, times = found, times, whole.times(*found)
            if times.makespan < before.makespan:
                told(times.makespan * whole.unit)
        if interrupted or len(order) <= _TASKS:
            break
    return device, order


def _places(count: int, seed: int) -> Iterator[int]:
    """Yield where windows begin: side by side, overlapping by half, and at random in turn."""
    draw, last, first = random.Random(seed), max(count - _TASKS, 0), 0
    while True:
        yield min(first, last)
        yield draw.randint(0, last)
        first = first + _TASKS // 2 if first < last else 0


def window(
    whole: Whole, device: list[int], order: list[int], times: Times, first: int, seconds: float, seed: int = 0
) -> tuple[_Plan | None, bool]:
    """Place anew the tasks from ``first`` on in the order of their starts; return a better plan, if that found one.

    Better is a smaller makespan, or else earlier ends in the window. Also return whether ctrl-C ended it.
    """
    before, inside, behind = order[:first], order[first : first + _TASKS], order[first + _TASKS :]
    part = Part(
        _movable(whole, device, inside),
        _heads(whole, device, times, before, inside),
        _tails(whole, device, inside, behind),
    )
    model = Model(whole, 0, times.makespan, part)
    model.cp.minimize(_WEIGHT * len(inside) * model.makespan + sum(model.end.values()))
    model.hint(device, times)
    answer = solve(model, Limits(seconds, 0.0, seed))
    plan = _changed(device, before, answer, behind)
    if plan is None or _worth(whole.times(*plan), inside) >= _worth(times, inside):
        return None, answer.interrupted
    return plan, answer.interrupted


def _worth(times: Times, inside: Sequence[int]) -> tuple[int, int]:
    return times.makespan, sum(times.tasks[task][1] for task in inside)


def _changed(device: Sequence[int], before: list[int], answer: Answer, behind: list[int]) -> _Plan | None:
    if answer.device is None:
        return None
    changed = [answer.device.get(task, p) for task, p in enumerate(device)]
    inside = sorted(answer.tasks, key=lambda task: (answer.tasks[task], task))
    return changed, [*before, *inside, *behind]


def _movable(whole: Whole, device: Sequence[int], inside: Sequence[int]) -> dict[int, Sequence[int]]:
    """Return where tasks may go: those whose group is not all in the window stay."""
    here = set(inside)
    held = {group for task, group in enumerate(whole.problem.group) if task not in here}
    return {task: (device[task],) if whole.problem.group[task] in held else whole.devices[task] for task in inside}


def _heads(
    whole: Whole, device: Sequence[int], times: Times, before: Sequence[int], inside: Sequence[int]
) -> dict[int, list[int]]:
    """Return when tasks of the window can start on each device: behind all that stays there, and what they read."""
    free = [0] * len(whole.problem.devices)
    for task in before:
        p = device[task]
        free[p] = max(free[p], times.tasks[task][1] if whole.problem.streams[p] == 1 else 0)
    here, heads = set(inside), {}
    for task in inside:
        head = heads[task] = list(map(max, whole.heads[task], free))
        for maker in whole.problem.before[task]:
            if maker not in here:
                between = whole.apart.get((maker, task), {})
                for p in whole.devices[task]:
                    head[p] = max(head[p], times.tasks[maker][1] + (between.get((device[maker], p), 0) or 0))
    return heads


def _tails(whole: Whole, device: Sequence[int], inside: Sequence[int], behind: Sequence[int]) -> dict[int, list[int]]:
    """Return how long the plan goes on behind the end of each task of the window, by its device."""
    problem = whole.problem
    line = [0] * len(problem.devices)  # from the start of what is first behind the window on each device
    tails = {task: list(whole.returned[task]) for task in (*inside, *behind)}
    for task in reversed(behind):
        p = device[task]
        rest = whole.seconds[task][p] + max(tails[task][p], line[p] if problem.streams[p] == 1 else 0)
        line[p] = rest
        for maker in problem.before[task]:
            if maker in tails:
                between = whole.apart.get((maker, task), {})
                tail = tails[maker]
                for q in whole.devices[maker]:
                    tail[q] = max(tail[q], rest + (between.get((q, p), 0) or 0))
    for task in inside:
        tails[task] = [max(tail, line[p] if problem.streams[p] == 1 else 0) for p, tail in enumerate(tails[task])]
    return {task: tails[task] for task in inside}
