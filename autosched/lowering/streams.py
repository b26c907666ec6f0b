"""Assign each task a compute stream of its device.

A device with one stream needs no decision. Otherwise dependent tasks share a stream, and tasks that
may run concurrently get different streams, as far as the device has streams, with the fewest waits
(Kwon, Yu, Jeong, Chun, "Nimble", NeurIPS 2020): a maximum matching of the transitive reduction
partitions the tasks into chains.

On large graphs, reachability is limited to a window of ``_WINDOW`` tasks of one device. An edge
within the window is dropped exactly if another path implies it, since such a path lies within the
window, too. The full closure of 100,000 tasks would take a gigabyte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autosched._lib.allowed import is_storage
from autosched.graph.graph import Graph, Task
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.program.program import Run, Stream

_EXACT = 20_000  # up to so many tasks of one device, full reachability (n * n bits)
_WINDOW = 4_096  # beyond, reachability within so many tasks


def assign_streams(
    graph: Graph, machine: Machine, tasks: Sequence[Task], placement: Placement
) -> list[Run]:
    """Return a run for each task on its device; ``tasks`` are in issue order."""
    on: dict[str, list[int]] = {name: [] for name in machine.names}
    for task in tasks:
        on[placement.device[task.name]].append(task.index)
    stream: dict[int, Stream] = {}
    for name, indices in on.items():
        count = machine.device(name).streams
        if placement.streams is not None:
            count = min(count, placement.streams)
        streams = [Stream(name, f"compute{number or ''}") for number in range(count)]
        if is_storage(name):  # copies from it follow the tasks that find what to read
            streams = [Stream(name, "read")]
        if len(streams) == 1:
            stream.update(dict.fromkeys(indices, streams[0]))
        else:
            chosen = _choose(graph, indices, len(streams))
            stream.update((index, streams[n]) for index, n in zip(indices, chosen, strict=True))
    return [Run(stream[task.index], task.name) for task in tasks]


def _choose(graph: Graph, tasks: Sequence[int], count: int) -> list[int]:
    """Return a stream number for each task; ``tasks`` are in issue order.

    1. Reduce the edges between these tasks transitively.
    2. Partition the tasks into chains by a maximum matching of the reduced edges.
    3. Pack the chains onto ``count`` streams.
    """
    position = {task: i for i, task in enumerate(tasks)}
    edges = [
        sorted({position[user] for user in graph.users[task] if user in position}) for task in tasks
    ]
    edges, reach = _reduce(edges, len(tasks) if len(tasks) <= _EXACT else _WINDOW)
    return _pack(_chains(_match(edges), len(tasks)), edges, reach, count)


def _reduce(edges: Sequence[Sequence[int]], window: int) -> tuple[list[list[int]], list[int]]:
    """Return the transitive reduction, and for each task a bit set of the tasks that it reaches.

    Bit i is for the i-th task after it. Reachability beyond the window is unknown, and edges that
    are longer are all kept. A path that implies an edge within the window is within it, too.
    """
    reach = [0] * len(edges)
    reduced: list[list[int]] = [[] for _ in edges]
    mask = (1 << window + 1) - 1
    for u in reversed(range(len(edges))):
        for v in edges[u]:  # nearest first, to drop edges that a nearer one implies
            if v - u > window:
                reduced[u].append(v)
            elif not reach[u] >> v - u & 1:
                reduced[u].append(v)
                reach[u] |= (reach[v] | 1) << v - u & mask
    return reduced, reach


def _match(edges: Sequence[Iterable[int]]) -> dict[int, int]:
    """Return a maximum matching: at most one successor for each task, all different."""
    from networkx import Graph as Undirected
    from networkx.algorithms.bipartite import hopcroft_karp_matching

    n = len(edges)
    sides: Undirected[int] = Undirected()
    sides.add_nodes_from(range(2 * n))  # integers in order, so that the matching is deterministic
    sides.add_edges_from((u, n + v) for u, followers in enumerate(edges) for v in followers)
    matching = hopcroft_karp_matching(sides, top_nodes=range(n))
    return {u: v - n for u, v in sorted(matching.items()) if u < n}


def _chains(follower: dict[int, int], n: int) -> list[list[int]]:
    followers = set(follower.values())
    chains = []
    for first in range(n):
        if first not in followers:
            chain = [first]
            while chain[-1] in follower:
                chain.append(follower[chain[-1]])
            chains.append(chain)
    return chains


def _pack(
    chains: Sequence[Sequence[int]],
    edges: Sequence[Sequence[int]],
    reach: Sequence[int],
    count: int,
) -> list[int]:
    """Put chains on ``count`` streams.

    Each chain is appended to a stream whose last task happens before the chain; else it gets a new
    stream; else it goes to the stream that is free first, if all tasks take equally long.
    """
    starting = {chain[0]: chain for chain in chains}
    number = [0] * len(edges)
    last: list[int] = []  # by stream, its last task so far
    free = [0] * count  # by stream, when it has run its tasks so far
    ready = [0] * len(edges)
    for task, followers in enumerate(edges):
        if chain := starting.get(task):
            before = [s for s, u in enumerate(last) if u < task and reach[u] >> task - u & 1]
            if before:
                chosen = max(before, key=last.__getitem__)
            elif len(last) < count:
                chosen = len(last)
                last.append(0)
            else:
                chosen = min(range(count), key=lambda s: (free[s], last[s]))
            last[chosen] = max(last[chosen], chain[-1])
            for each in chain:
                number[each] = chosen
        end = max(ready[task], free[number[task]]) + 1
        free[number[task]] = end
        for follower in followers:
            ready[follower] = max(ready[follower], end)
    return number
