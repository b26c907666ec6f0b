"""Choose groups of tasks to merge, by cost or by module.

Each task has a fixed overhead: a step of the executor, and perhaps an event and a wait. Its
operators are launched one by one whether it is merged or not, so merging saves no kernel launches.
Merging can delay tasks: a successor of one part of a merged task now waits for all of it. So
``by_cost`` merges on the transitive reduction of the graph, in these cases:

* A task is merged with its only successor, if it is that task's only predecessor. Then no other
  task is delayed.
* Tasks are merged where the total delay is at most the overhead that is saved.
* Tasks without successors that have the same predecessors are merged.

None of this creates a cycle, and no path gets longer by more than is saved. Inputs that must be
copied count as tasks, because otherwise copies would not overlap with computation.

The functions return names of groups; ``merge`` also applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from autosched.coarsening.folding import Folding
from autosched.coarsening.merging import common_origin, merged
from autosched.costs.costs import Costs
from autosched.errors import GraphError
from autosched.graph.graph import Graph
from autosched.graph.task import Task
from autosched.machine.machine import Device

__all__ = [
    "Granularity",
    "by_cost",
    "by_mark",
    "by_module",
    "check_granularity",
    "label_of",
    "merge",
    "named",
]

Granularity = Literal["op", "module", "auto"]
G = TypeVar("G", bound=Graph)

STEP = 1e-6  # overhead of a task in seconds: measured as 0.4 us on one CPU; events take longer
# Up to so many tasks the transitive reduction is computed (n * n bits); beyond, less is merged.
_REDUCED = 20_000


def merge(
    graph: G,
    groups: Granularity | Mapping[str, str] = "auto",
    *,
    costs: Costs | None = None,
    device: Device | None = None,
) -> G:
    """Return the graph with each group of tasks as one task, and the same results.

    ``groups`` has the name of the group for tasks, by name. Or it is ``"module"``: one task for
    each call of a module, forward and backward; or ``"auto"``: chains, and tasks that are tiny by
    their ``costs`` on ``device``, unless that loses parallelism that pays off. A group is split
    where merging it would create a cycle, and where its tasks are pinned to different devices.
    Raises GraphError for unknown tasks and for other words.

    >>> graph = Graph("step")
    >>> x, w = graph.inputs("x", "w")
    >>> graph.output(y=(x @ w).relu())
    >>> [task.name for task in merge(graph).tasks]
    ['matmul+1']
    >>> [task.name for task in merge(graph, {"relu": "act"}).tasks]
    ['matmul', 'act']
    """
    if isinstance(groups, str):
        check_granularity(groups)
        if groups == "op":
            return graph
        by = (
            by_module(graph)
            if groups == "module"
            else by_cost(graph, costs or Costs(), device or _DEVICE)
        )
        return merged(graph, by)
    return merged(graph, groups)


_DEVICE = Device("cuda:0")  # with default rates


def check_granularity(word: object) -> None:
    """Raise GraphError unless ``word`` is a granularity."""
    if word not in ("op", "module", "auto"):
        raise GraphError(f"granularity must be 'op', 'module' or 'auto', got {word!r}")


def by_cost(graph: Graph, costs: Costs, device: Device) -> dict[str, str]:
    """Return groups of tasks on a device whose merging costs at most as much delay as it saves.

    >>> graph = Graph()
    >>> x, y = graph.inputs("x", "y")
    >>> graph.output(z=(x + 1).relu() * (y @ y))
    >>> costs = Costs.table({"add": 2e-7, "relu": 2e-7, "matmul": 1, "mul": 1})
    >>> by_cost(graph, costs, Device("cuda:0"))
    {'add': 'add+2', 'relu': 'add+2', 'mul': 'add+2'}
    """
    clusters = _clusters(graph, costs, device)
    joined = 1
    while joined:
        joined = _join_neighbours(clusters, STEP, ahead=True)
        joined += _join_neighbours(clusters, STEP, ahead=False)
        joined += _join_ends(clusters, STEP)
    found = [[graph.tasks[i] for i in sorted(c.tasks)] for c in clusters if len(c.tasks) > 1]
    return named((label_of(tasks), tasks) for tasks in found)


def by_module(graph: Graph) -> dict[str, str]:
    """Return a group for each call of a module, each backward, and each module's optimizer step.

    Tasks without a module form one group per phase.
    """
    found: dict[tuple[str, int], list[Task]] = {}
    for task in graph.tasks:
        origin = task.origin
        if origin.phase and not origin.whole and not task.view:
            label = ".".join(filter(None, (origin.module, origin.phase)))
            found.setdefault((label, origin.call), []).append(task)
    return named((label, tasks) for (label, _), tasks in found.items())


def by_mark(graph: Graph) -> dict[str, str]:
    """Return a group for each call of a marked function, and for its backward."""
    found: dict[tuple[str, int], list[Task]] = {}
    for task in graph.tasks:
        origin = task.origin
        if origin.whole and not task.view:
            phase = origin.phase if origin.phase != "forward" else ""
            found.setdefault(
                (".".join(filter(None, (origin.whole, phase))), origin.call), []
            ).append(task)
    return named((label, tasks) for (label, _), tasks in found.items())


# ---- clusters of tasks, in topological order


@dataclass(eq=False)
class _Cluster:
    """Tasks to be merged; a source that must be copied is a cluster without tasks.

    ``work`` is the sum of their seconds; ``waiting`` is the delay that merging adds for their
    successors.
    """

    kind: object  # only clusters of one kind are merged; None: never merged
    work: float = 0.0
    waiting: float = 0.0
    tasks: list[int] = field(default_factory=list)
    before: dict[_Cluster, None] = field(default_factory=dict)
    merged_into: _Cluster | None = None

    def found(self) -> _Cluster:
        """Return the cluster into which this one was merged, or itself (with path compression)."""
        last = self
        while last.merged_into is not None:
            last = last.merged_into
        while self.merged_into is not None:
            self.merged_into, self = last, self.merged_into  # noqa: PLW0642
        return last

    def join(self, other: _Cluster, waiting: float) -> None:
        """Merge this cluster into another."""
        other.work += self.work
        other.waiting += self.waiting + waiting
        self.merged_into = other


def _clusters(graph: Graph, costs: Costs, device: Device) -> list[_Cluster]:
    """Return a cluster for each task that remains, and for each source on another device."""
    folding = Folding(graph)
    sources = {
        v.index: _Cluster(None)
        for v in graph.sources
        if (v.home or "cpu").partition(":")[0] != device.kind
    }
    found: dict[int, _Cluster] = {}
    for index, before in folding.before.items():
        task = graph.tasks[index]
        free = index in folding.merged and not task.origin.whole
        made = found[index] = _Cluster(
            ("on", folding.devices[index]) if free else None, tasks=[index]
        )
        made.work = costs.task_seconds(task, device)
        roots = (graph.values[use.value].root for use in task.reads)
        made.before = dict.fromkeys(sources[root] for root in roots if root in sources)
        made.before.update(dict.fromkeys(found[other] for other in before))
    return [*sources.values(), *found.values()]


def _join_neighbours(clusters: list[_Cluster], most: float, ahead: bool) -> int:
    """Merge clusters with their only successor or predecessor; return how many."""
    before, after = _reduced(clusters)
    there, back = (after, before) if ahead else (before, after)
    joined = 0
    for cluster in clusters if ahead else reversed(clusters):
        if len(there[cluster]) == 1 and there[cluster][0].kind == cluster.kind is not None:
            other = there[cluster][0]
            joined += _join(cluster, other, len(back[other]) == 1, most)
    _remove_merged(clusters)
    return joined


def _join_ends(clusters: list[_Cluster], most: float) -> int:
    """Merge clusters without successors that have the same predecessors; return how many."""
    before, after = _reduced(clusters)
    joined = 0
    first = dict[tuple[object, ...], _Cluster]()
    for cluster in clusters:
        if not after[cluster] and cluster.kind is not None:
            key = (cluster.kind, *(other for other in before[cluster] if other.tasks))
            other = first.setdefault(key, cluster)
            if other is not cluster and _join(cluster, other, False, most):
                joined += 1
            else:
                first[key] = cluster
    _remove_merged(clusters)
    return joined


def _join(cluster: _Cluster, other: _Cluster, alone: bool, most: float) -> bool:
    """Merge one cluster into another if the delay of other clusters is at most ``most``."""
    if not alone and cluster.waiting + other.waiting + cluster.work > most:
        return False
    cluster.join(other, 0.0 if alone else cluster.work)
    return True


def _remove_merged(clusters: list[_Cluster]) -> None:
    for cluster in clusters:
        if (found := cluster.found()) is not cluster:
            found.tasks += cluster.tasks
            found.before |= cluster.before
    clusters[:] = [cluster for cluster in clusters if cluster.merged_into is None]
    for cluster in clusters:
        cluster.before = dict.fromkeys(
            found for b in cluster.before if (found := b.found()) is not cluster
        )


def _reduced(
    clusters: Sequence[_Cluster],
) -> tuple[dict[_Cluster, list[_Cluster]], dict[_Cluster, list[_Cluster]]]:
    """Return predecessors and successors of each cluster in the transitive reduction."""
    position = {cluster: i for i, cluster in enumerate(clusters)}
    reached: list[int] = []  # by cluster, a bit set of its ancestors
    before: dict[_Cluster, list[_Cluster]] = {}
    after: dict[_Cluster, list[_Cluster]] = {cluster: [] for cluster in clusters}
    exact = len(clusters) <= _REDUCED
    for cluster in clusters:
        seen = 0
        nearest = []
        for i in sorted((position[other] for other in cluster.before), reverse=True):
            if not seen >> i & 1:
                nearest.append(clusters[i])
                after[clusters[i]].append(cluster)
                seen |= reached[i] | 1 << i if exact else 0
        reached.append(seen)
        before[cluster] = nearest
    return before, after


# ---- names


def named(groups: Iterable[tuple[str, Sequence[Task]]]) -> dict[str, str]:
    """Return the group of each task by name; groups with the same label are numbered."""
    counts: dict[str, int] = {}
    found: dict[str, str] = {}
    for label, tasks in groups:
        count = counts[label] = counts.get(label, -1) + 1
        found.update((task.name, f"{label}_{count}" if count else label) for task in tasks)
    return found


def label_of(tasks: Sequence[Task]) -> str:
    """Return a name for a group: its common module and phase, or its first task and a count."""
    origin = common_origin(tasks)
    if origin.module:
        return ".".join(filter(None, (origin.module, origin.phase)))
    return f"{tasks[0].name}+{len(tasks) - 1}"
