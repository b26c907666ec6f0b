"""Merge tasks: a graph in which each group of tasks is one task, with the same results.

Merging is a function from graph to graph, and precedes everything else: a merged task is a task
with parts, and only costs, the estimate and generated code look at the parts.

Groups are given, or are the calls of modules and of marked functions. Where merging a group would
create a cycle, because another task must run between its members, the group is split. Tasks that
are pinned to different devices, or of which only some are pinned, are not merged, nor are tasks that
``Folding`` calls fixed. Merging saves no calls: a thread runs the operators of a merged task one by
one, as it does those of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeVar, cast

from autosched._lib.text import common_prefix
from autosched._lib.topological import topological_order
from autosched.codegen.composite import Composite
from autosched.errors import GraphError, shown
from autosched.graph.constraints import Bond, by_value, released
from autosched.graph.effects import MOVE, RESHAPE, effects_of
from autosched.graph.graph import Graph
from autosched.graph.including import Copying
from autosched.graph.task import Origin, Seconds, Task
from autosched.placement import Placement, joined

G = TypeVar("G", bound=Graph)

# Returns the function of a merged task, and its seconds if they are known.
Make = Callable[[Composite], tuple[Callable[..., Any], Seconds | None]]


def merge(graph: G, groups: Literal["op", "module"] | Mapping[str, str]) -> G:
    """Return the graph with each group of tasks as one task, and the same results.

    ``groups`` has the name of the group for tasks, by name. Or it is ``"module"``: one task for
    each call of a module, forward and backward. A group is split where merging it would create a
    cycle, and where its tasks are pinned to different devices. Raises GraphError for unknown tasks
    and for other words.

    >>> graph = Graph("step")
    >>> x, w = graph.inputs("x", "w")
    >>> graph.output(y=(x @ w).relu())
    >>> [task.name for task in merge(graph, {"matmul": "layer", "relu": "layer"}).tasks]
    ['layer']
    """
    if isinstance(groups, Mapping):
        return merged(graph, groups)
    if not isinstance(groups, str) or groups not in ("op", "module"):
        raise GraphError(f"groups must be 'op', 'module' or a mapping, got {shown(groups)}")
    return graph if groups == "op" else merged(graph, by_module(graph))


def merged(
    graph: G,
    groups: Mapping[str, str],
    make: Make | None = None,
    bound: Mapping[str, str] | None = None,
) -> G:
    """Return the graph with each group as one task; ``groups`` has group names by task name.

    Merged tasks make the views that they need themselves. Other values keep their names, as do
    inputs and outputs. ``make`` gives the function of a merged task, by default its composite, and
    must do what that does. ``bound`` has the devices to which tasks are to be bound, in place of
    their own constraints. Raises GraphError for unknown tasks.

    >>> graph = Graph("step")
    >>> x, w = graph.inputs("x", "w")
    >>> graph.output(y=(x @ w.t() + 1) * 2)
    >>> print(merged(graph, {"matmul": "layer", "add": "layer"}))
    graph step
      input x
      input w
      layer(w, x)
      mul(add)
      output y = mul
    """
    wanted = {graph.task(name).index: group for name, group in groups.items()}
    return cast(G, _Merger(graph, wanted, bound or {}).build(make))


def carried(graph: Graph, placement: Placement) -> Placement:
    """Return a placement of a merged graph that follows a placement of the original graph.

    Merged tasks are on the device of their parts. Of the tasks that could be issued next, the one
    whose first part was issued first is.

    >>> graph = Graph()
    >>> x = graph.input("x")
    >>> graph.output(y=(x + 1) * 2, z=-x)
    >>> plan = Placement(dict.fromkeys(("add", "mul", "neg"), "cpu"), ("neg", "add", "mul"))
    >>> carried(merged(graph, {"add": "a", "mul": "a"}), plan).order
    ('neg', 'a')
    """
    number = {name: i for i, name in enumerate(placement.order)}

    def first(task: Task) -> int:
        names = [task.name, *(part.name for part in task.parts if not part.view)]
        return min(number[name] for name in names if name in number)

    place = [first(task) for task in graph.tasks]
    before = [[dependency.task for dependency in task.dependencies] for task in graph.tasks]
    devices = {
        task.name: placement.device[placement.order[n]]
        for task, n in zip(graph.tasks, place, strict=True)
    }
    return Placement(devices, tuple(graph.tasks[i].name for i in topological_order(before, place)))


def common_origin(tasks: Sequence[Task]) -> Origin:
    """Return the origin of a group: the first line, and the common module, phase and call."""
    origins = [task.origin for task in tasks]
    module = common_prefix(origin.module.split(".") for origin in origins)
    phases = {origin.phase for origin in origins}
    calls = {(origin.call, origin.whole) for origin in origins}
    phase = phases.pop() if len(phases) == 1 else ""
    call, whole = calls.pop() if len(calls) == 1 else (0, "")
    return Origin(origins[0].where, ".".join(module), phase, call, whole)


class _Merger(Copying):
    """Partitions a graph into clusters, each of which becomes a task of the new graph."""

    def __init__(self, graph: Graph, wanted: Mapping[int, str], bound: Mapping[str, str]):
        super().__init__(graph)
        self.wanted = wanted
        self.folding = Folding(graph, bound)
        keys: dict[Hashable, int] = {}
        cluster: dict[int, int] = {}
        for index in sorted(self.folding.remaining):
            together = index in wanted and index in self.folding.merged
            key = (wanted[index], self.folding.devices[index]) if together else index
            cluster[index] = keys.setdefault(key, len(keys))
        self.cluster = _split(cluster, self.folding.before)  # by remaining task
        self.taken = {*graph.names}
        self.taken.update(part.name for task in graph.tasks for part in task.with_parts())
        self.names: dict[int, str] = {}  # of new tasks, by cluster

    def build(self, make: Make | None) -> Graph:
        """Add the clusters to the new graph, in topological order, earliest first task first."""
        tasks = self.old.tasks
        clusters = self._ordered()
        members = [self._members(own) for own in clusters]
        taken = [_taken(self.old, some) for some in members]
        needed = set(chain(self.old.outputs.values(), *taken))
        for own, some, takes in zip(clusters, members, taken, strict=True):
            label = next(
                (self.wanted[i] for i in own if i in self.wanted and i in self.folding.merged),
                None,
            )
            if len(some) == 1 and label in (None, tasks[own[0]].name):
                self.repeat(tasks[own[0]], self._after([tasks[own[0]]]))
            else:
                self._compose(own, some, takes, needed, label, make)
            self.names[self.cluster[own[0]]] = self.new.tasks[-1].name
        return self.finish()

    def _members(self, tasks: Sequence[int]) -> list[int]:
        """Return the tasks of a cluster, with the folded tasks that it runs itself."""
        if tasks[0] not in self.folding.merged:
            return list(tasks)
        folded = (self.folding.folded(self.old.tasks[task]) for task in tasks)
        return sorted({*tasks, *chain(*folded)})

    def _ordered(self) -> list[list[int]]:
        """Return the tasks of each cluster, clusters in topological order."""
        tasks: list[list[int]] = [[] for _ in {*self.cluster.values()}]
        for task, cluster in self.cluster.items():
            tasks[cluster].append(task)
        before = [
            [c for task in some for b in self.folding.before[task] if (c := self.cluster[b]) != own]
            for own, some in enumerate(tasks)
        ]
        return [tasks[c] for c in topological_order(before, [some[0] for some in tasks])]

    def _compose(
        self,
        cluster: Sequence[int],
        members: Sequence[int],
        takes: Sequence[int],
        needed: set[int],
        label: str | None,
        make: Make | None,
    ) -> None:
        """Add a cluster as one merged task, which returns the results that other tasks need.

        Its members are its tasks, and the folded tasks that it runs itself.
        """
        own = [self.old.tasks[i] for i in cluster]
        tasks = [self.old.tasks[i] for i in members]
        made = [self.old.values[u.value] for task in own for u in task.outputs if u.value in needed]
        names = [value.name for value in made]
        composite = Composite(tasks, takes, [value.index for value in made])
        roots = dict.fromkeys(
            self.old.values[use.value].root for task in own for use in task.writes
        )
        fn: Callable[..., Any] | None = None
        known: Seconds | None = None
        if all(task.fn for task in tasks):
            fn, known = (composite, None) if make is None else make(composite)
        results = self.new.add_task(
            fn,
            (*(self.values[index] for index in takes), *composite.heres),
            {},
            name=self._label(own[0], label),
            outputs=names[0] if len(names) == 1 else tuple(names),
            writes=[self.values[root] for root in roots if root in takes],
            sizes=[value.nbytes for value in made],
            regions=[value.region for value in made],
            on=self.folding.devices[own[0].index],
            after=self._after(own),
            seconds=known,
            origin=common_origin(own),
            composite=composite,
        )
        self.note(made, results)

    def _after(self, tasks: Sequence[Task]) -> list[str]:
        """Return the new tasks on which these depend by order alone."""
        here = self.cluster[tasks[0].index]
        pairs = (
            (task.index, d.task) for task in tasks for d in task.dependencies if d.kind == "order"
        )
        others = (self.cluster[before] for pair in pairs for before in self.folding.follows(*pair))
        return list(dict.fromkeys(self.names[cluster] for cluster in others if cluster != here))

    def _label(self, task: Task, label: str | None) -> str:
        """Return the name of a new task, which must not mean something else in the old graph."""
        if label is None or label == task.name:
            return task.name
        name = self.new.fresh(label)
        while name in self.taken:
            name = self.new.fresh(label)
        return name


def _split(cluster: Mapping[int, int], before: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Split the clusters of each cycle into steps without cycles.

    1. A task is one step later than its predecessors in other clusters of the same strongly
       connected component.
    2. Where possible, it is delayed to the step of its successors in its own cluster.
    """
    component = _components(cluster, before)
    step = dict[int, int]()
    users = {task: list[int]() for task in cluster}
    for task, own in cluster.items():
        others = [other for other in before[task] if component[cluster[other]] == component[own]]
        step[task] = max((step[other] + (cluster[other] != own) for other in others), default=0)
        for other in others:
            users[other].append(task)
    for task, own in reversed(list(cluster.items())):
        latest = min(
            (step[user] - (cluster[user] != own) for user in users[task]), default=step[task]
        )
        if any(step[user] == latest and cluster[user] == own for user in users[task]):
            step[task] = latest
    numbers: dict[tuple[int, int], int] = {}
    return {
        task: numbers.setdefault((own, step[task]), len(numbers)) for task, own in cluster.items()
    }


def _components(cluster: Mapping[int, int], before: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return the number of the strongly connected component of each cluster."""
    import networkx

    follows: networkx.DiGraph[int] = networkx.DiGraph()
    follows.add_nodes_from(cluster.values())
    follows.add_edges_from(
        (cluster[other], cluster[task]) for task in cluster for other in before[task]
    )
    components = networkx.strongly_connected_components(follows)
    return {member: number for number, found in enumerate(components) for member in found}


def _taken(graph: Graph, tasks: Sequence[int]) -> list[int]:
    made = {use.value for task in tasks for use in graph.tasks[task].outputs}
    reads = (use.value for task in tasks for use in graph.tasks[task].reads)
    return [value for value in dict.fromkeys(reads) if value not in made]


# ---- groups


def by_module(graph: Graph) -> dict[str, str]:
    """Return a group for each call of a module, each backward, and each module's optimizer step.

    Tasks without a module form one group per phase.
    """
    return _by_call(graph, lambda o: _dotted(o.module, o.phase) if o.phase and not o.whole else "")


def by_mark(graph: Graph) -> dict[str, str]:
    """Return a group for each call of a marked function, and for its backward."""
    return _by_call(graph, lambda o: o.whole and _dotted(o.whole, o.phase.replace("forward", "")))


def _by_call(graph: Graph, label: Callable[[Origin], str]) -> dict[str, str]:
    """Return a group for each call with the same label; tasks of an empty one are in no group."""
    found: dict[tuple[str, int], list[Task]] = {}
    for task in graph.tasks:
        if not task.view and (name := label(task.origin)):
            found.setdefault((name, task.origin.call), []).append(task)
    return named((name, tasks) for (name, _), tasks in found.items())


def _dotted(*words: str) -> str:
    return ".".join(filter(None, words))


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
        return _dotted(origin.module, origin.phase)
    return f"{tasks[0].name}+{len(tasks) - 1}"


# ---- which tasks may be merged, and which are folded into those that need their results
#
# A view costs nothing, and the results of a task can share memory with at most one argument. So a
# merged task takes the base of a view as its argument and makes the view itself; each other task that
# needs the view does so, too. This preserves the results unless a write distinguishes parts of that
# memory, or changes its shape. Tasks and views of such memory are left unmerged.


class Folding:
    """Classify the tasks of a graph: tasks that may be ``merged``, and tasks that remain.

    ``remaining`` are all tasks but the views that are folded away, because each task that needs one
    makes it itself.

    >>> graph = Graph()
    >>> x, w = graph.inputs("x", "w")
    >>> graph.output(y=x @ w.t(), z=x.t())
    >>> folding = Folding(graph, {})
    >>> [graph.tasks[i].name for i in sorted(folding.remaining)], sorted(folding.merged)
    (['matmul', 't_1'], [1])
    """

    def __init__(self, graph: Graph, bound: Mapping[str, str]):
        self.graph = graph
        # Roots of memory whose views and writers are left unmerged.
        self.split_memory = self._split_memory()
        while more := self._needed_and_written() - self.split_memory:
            self.split_memory |= more
        needed = self._needed()
        self.remaining = {
            task.index for task in graph.tasks if not self.foldable(task) or task.index in needed
        }
        self.merged = {
            task.index for task in graph.tasks if not task.view and not self._is_fixed(task)
        }
        self.devices = _devices(graph, bound)  # by task, the device to which it is bound
        self.before: dict[int, list[int]] = {}  # of remaining tasks, their remaining predecessors
        # of tasks that may be folded, their remaining predecessors
        self.predecessors_of_folded: dict[int, list[int]] = {}
        self._follow()

    def foldable(self, task: Task) -> bool:
        """Whether a task is a view that may be made at any time from its argument."""
        return (
            task.view
            and len(task.reads) == 1
            and self._root(task.reads[0].value) not in self.split_memory
            and all(dependency.kind != "order" for dependency in task.dependencies)
        )

    def folded(self, task: Task) -> list[int]:
        """Return the folded tasks (indices) that a merged task runs itself for this part."""
        found: dict[int, None] = {}
        pending = [use.value for use in task.reads]
        while pending:
            producer = self.graph.values[pending.pop()].producer
            if (
                producer is not None
                and producer not in found
                and self.foldable(self.graph.tasks[producer])
            ):
                found[producer] = None
                pending += [use.value for use in self.graph.tasks[producer].reads]
        return list(found)

    def follows(self, task: int, first: int) -> list[int]:
        """Return the remaining predecessors that a dependency on ``first`` stands for.

        A merged task runs folded tasks itself, and so depends on the predecessors of these.
        """
        is_folded = first in self.predecessors_of_folded and (
            task in self.merged or first not in self.remaining
        )
        return self.predecessors_of_folded[first] if is_folded else [first]

    def _follow(self) -> None:
        """Find the remaining predecessors of each task."""
        for task in self.graph.tasks:
            first = [dependency.task for dependency in task.dependencies]
            if self.foldable(task):
                found = (self.predecessors_of_folded.get(other, [other]) for other in first)
                self.predecessors_of_folded[task.index] = list(dict.fromkeys(chain(*found)))
            if task.index in self.remaining:
                self.before[task.index] = list(
                    dict.fromkeys(chain(*(self.follows(task.index, i) for i in first)))
                )

    # ---- what is not merged

    def _root(self, value: int) -> int:
        return self.graph.values[value].root

    def _split_memory(self) -> set[int]:
        """Return the roots of memory that tasks write in part, or give another shape."""
        found = set()
        for task in self.graph.tasks:
            for use in task.writes:
                part = (
                    task.region[1]
                    if task.region and task.region[0] == use.value
                    else self.graph.values[use.value].region
                )
                if part.bounds or _reshapes(task):
                    found.add(self._root(use.value))
        return found

    def _is_fixed(self, task: Task) -> bool:
        """Whether a non-view task is never merged.

        Its result may be its argument, or it touches parts of memory. A task that makes or writes
        memory whose parts are distinguished must share a device with its views, and only with them.
        """
        touched = any(
            self._root(use.value) in self.split_memory for use in (*task.writes, *task.outputs)
        )
        return touched or task.reads_file or task.region is not None or self._may_alias(task)

    def _may_alias(self, task: Task) -> bool:
        return not task.view and any(self._root(use.value) != use.value for use in task.outputs)

    def _needed(self) -> set[int]:
        """Return the views that outputs or fixed tasks need."""
        needed = set(self.graph.outputs.values())
        found = set()
        for task in reversed(self.graph.tasks):
            if task.view:
                if self.foldable(task) and not any(use.value in needed for use in task.outputs):
                    continue
                found.add(task.index)
            elif not self._is_fixed(task):
                continue
            needed.update(use.value for use in task.reads)
        return found

    def _needed_and_written(self) -> set[int]:
        """Return the roots of written memory that two values of a merged graph would share."""
        aliases = {task.index for task in self.graph.tasks if self._may_alias(task)}
        outputs = (
            use for index in self._needed() | aliases for use in self.graph.tasks[index].outputs
        )
        return {
            root for root in (self._root(use.value) for use in outputs) if self._is_written(root)
        }

    def _is_written(self, root: int) -> bool:
        return any(self.graph.last_version(member) for member in self.graph.members(root))


def _devices(graph: Graph, bound: Mapping[str, str]) -> list[str | None]:
    """Return by task the device to which it, or a task that is kept together with it, is bound."""
    own = [bound.get(task.name, task.device) for task in graph.tasks]
    kept = released(graph, bound) if bound else graph.kept_together
    if not kept:
        return own
    bonds = by_value(tuple(graph.values[value].root for value in values) for values in kept)
    first: dict[Bond, int] = {}
    ties: list[tuple[int, int]] = []
    for task in graph.tasks:
        roots = {graph.values[use.value].root for use in (*task.changes, *task.outputs)}
        some = [bond for root in roots if not task.view for bond in bonds.get(root, ())]
        ties += [(first.setdefault(bond, task.index), task.index) for bond in some]
    group = joined(len(own), ties)
    device: dict[int, str] = {}
    for i, at in enumerate(own):
        if at is not None:
            device.setdefault(group[i], at)
    return [at or device.get(group[i]) for i, at in enumerate(own)]


def _reshapes(task: Task) -> bool:
    return (
        task.fn is not None and effects_of(task.fn, task.args, task.kwargs).name in RESHAPE | MOVE
    )
