"""List the policies, and the limits on streams, that ``policy="auto"`` tries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter

from autosched.errors import ScheduleError
from autosched.machine.machine import Device
from autosched.placement import Placement
from autosched.policies.heft import heft
from autosched.policies.local_search.annealer import Progress
from autosched.policies.local_search.portfolio import LARGE, listed
from autosched.policies.local_search.search import quick, search
from autosched.policies.local_search.splitting import split
from autosched.policies.simple import round_robin, single, single_on
from autosched.problem import Policy, Problem

_EACH = 4  # devices: plans are made for each number up to this, then for powers of two


def candidates(
    problem: Problem,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Policy, ...]:
    """Return the policies to try: one device alone, simple policies, and a search over many lists.

    Of identical devices to which nothing is bound, only one is tried alone. For large graphs there
    is not the time to lower plans that rarely win: lists for one device are compared with others.

    >>> from autosched import Graph, Machine
    >>> len(candidates(Problem(Graph(), Machine.emulated(gpus=8))))
    6
    """
    improved = quick if seconds is None else search(seconds, seed, progress=progress)
    if is_large(problem):
        return (improved,)
    simple = (single, round_robin, heft) if len(problem.graph) <= LARGE else ()
    alone = one_of_each(problem, problem.machine.computing)
    return (*map(single_on, alone), *simple, improved)


def one_of_each(problem: Problem, names: Iterable[str]) -> list[str]:
    """Return one device of each kind, and all to which tasks are bound."""
    pinned = _bound(problem)
    like: dict[Device, str] = {}
    for device in map(problem.machine.device, names):
        anonymous = replace(device, name=device.kind, physical=None)
        like.setdefault(device if device.name in pinned else anonymous, device.name)
    return list(like.values())


def fewer_devices(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with fewer of the devices to which nothing is bound, the largest first.

    With more devices, lists and searches may return worse plans. The first ones remain: each number
    up to 4, then powers of two, if they are still joined. Over ranks there are no such machines.

    >>> from autosched import Graph, Machine
    >>> problem = Problem(Graph(), Machine.emulated(gpus=9))
    >>> [len(fewer.machine.accelerators) for fewer in fewer_devices(problem)]
    [8, 4, 3, 2, 1, 0]
    """
    machine = problem.machine
    kept = {machine.host, *machine.storage, *_bound(problem)}
    free = [name for name in machine.names if name not in kept] if not machine.ranks else []
    for count in reversed(range(len(free))):
        if count <= _EACH or not count & (count - 1):
            smaller = machine.part(kept.union(free[:count]))
            if all(n == smaller.host or smaller.route(smaller.host, n) for n in smaller.names):
                yield replace(problem, machine=smaller)


def is_large(problem: Problem) -> bool:
    """Return whether lists are compared as they are planned, since there is no time to lower each."""
    return len(problem.graph) > LARGE and not problem.is_limited


def promising(problem: Problem) -> list[tuple[float, Policy]]:
    """Return the best list for each smaller number of devices, by the makespan that is planned."""

    def policy(made: Placement) -> Policy:
        return lambda _: made

    found = []
    for fewer in fewer_devices(problem):
        with suppress(ScheduleError):  # a task can run on none of these devices
            makespan, made = listed(fewer)
            found.append((makespan, policy(made)))
    return sorted(found, key=itemgetter(0))


def of_problem(problem: Problem, policies: Iterable[Policy]) -> Iterator[Policy]:
    """Yield policies that place tasks as these do for another problem, and prove no bound."""

    def on(policy: Policy) -> Policy:
        return lambda _: replace(policy(problem), bound=0.0)

    return map(on, policies)


def _bound(problem: Problem) -> set[str]:
    """Return the devices to which something is bound."""
    return {*filter(None, (*problem.bound, *map(problem.home, problem.graph.sources)))}


def splits(
    problem: Problem,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Policy, ...]:
    """Return the policies that split a graph into stages: on all devices, and on fewer.

    A run passes through all stages, so few runs in flight may gain more from few stages.

    >>> from autosched import Graph, Machine
    >>> from autosched.problem import Goal
    >>> len(splits(Problem(Graph(), Machine.emulated(gpus=3), goal=Goal("period", 3))))
    3
    """
    most = len(problem.devices)
    in_flight = problem.goal.in_flight
    counts = [most, *(n for n in (in_flight, 2) if n is not None and 1 < n < most)]
    each = None if seconds is None else seconds / len(dict.fromkeys(counts))
    return tuple(
        split(stages, seed, seconds=each, progress=progress) for stages in dict.fromkeys(counts)
    )


def stream_limits(problem: Problem) -> tuple[int | None, ...]:
    """Return the limits on streams to try, the fewest first: halves of what there is.

    Fewer may be better if issuing takes time, or if tasks share what a device can do. So of equal
    plans the one with the fewest streams comes first.
    """
    machine = problem.machine
    devices = machine.devices if problem.costs.has_sharing(machine.devices) else ()
    if problem.costs.has_issuing(machine.devices):
        devices = devices or tuple(map(machine.device, machine.accelerators))
    limits: list[int | None] = [None]
    most = max((device.streams for device in devices), default=1)
    while most > 1:
        most //= 2
        limits.append(most)
    return tuple(reversed(limits))
