"""Insert the tasks of one graph into another, or into a new one, task by task.

A graph may be inserted several times. Its inputs become values of the other graph, and its names
get a prefix. A copy may have more inputs, or tasks joined. A device is only a name in a constraint
here.

Training systems are built this way, as graph transformations: one micro-batch is captured once, and
stages, accumulation and checkpointing are made from that graph by including and merging.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from autosched._lib.tree import flatten, transform
from autosched.errors import GraphError, listed
from autosched.graph.effects import effects_of
from autosched.graph.recorder import Recorder, check_runs
from autosched.graph.regions import Region
from autosched.graph.task import HOST, Seconds, Task
from autosched.graph.value import Value

if TYPE_CHECKING:
    from autosched.graph.graph import Graph

G = TypeVar("G", bound="Graph")


class Copying:
    """A graph that is copied: ``values`` has the new ones, by their indices in the old graph.

    The new graph is of the same class, with the same other attributes and coordinate frames. It has
    the sources of the old one from the beginning.
    """

    def __init__(self, old: Graph):
        self.old = old
        self.new = copy.copy(old)
        Recorder.__init__(self.new, old.name, generators=old.generators)
        self.new.cached_flow = None
        self.new.storages.frames = old.storages.frames
        self.values = {value.index: self.new.add_source(value) for value in old.sources}

    def repeat(
        self,
        task: Task,
        after: Iterable[str] | None = None,
        *,
        prefix: str = "",
        suffix: str = "",
        instead: Mapping[int, Value] | None = None,
        on: str | None = None,
        seconds: Seconds | None = None,
        nbytes: Mapping[str, int] | None = None,
    ) -> None:
        """Add a task, by default on its device and with its costs.

        With a ``suffix``, its names and those of its results are new ones, and it is after no others
        by default; else after the same tasks as in the old graph. It reads some values ``instead``
        of its own.
        """
        if after is None:
            orders = (d.task for d in task.dependencies if d.kind == "order" and not suffix)
            after = [self.old.tasks[before].name for before in orders]

        def named(name: str) -> str:
            return self.new.fresh(name + suffix) if suffix else prefix + name

        values = {**self.values, **instead} if instead else self.values
        made = [self.old.values[use.value] for use in task.outputs]
        touched = None if task.view else task.region
        label = named(task.name)
        args, kwargs = transform(
            lambda leaf: values[leaf.index] if isinstance(leaf, Value) else leaf,
            (task.args, task.kwargs),
        )
        results = self.new.add_task(
            task.fn,
            args,
            kwargs,
            name=label,
            outputs=transform(
                lambda leaf: label if leaf.name == task.name else named(leaf.name), task.result
            ),
            writes=[values[use.value] for use in task.writes],
            aliases=self._base(task, made, values),
            view=task.view,
            random=task.random,
            touched=touched and (values[touched[0]].index, self._region(touched[1], touched[0])),
            regions=self._regions(task, made),
            on=on or task.device,
            seconds=task.seconds if seconds is None else seconds,
            sizes=[(nbytes or {}).get(value.name, value.nbytes) for value in made],
            after=after,
            origin=task.origin,
            composite=task.composite,
        )
        self.note(made, results)

    def _base(self, task: Task, made: Sequence[Value], values: Mapping[int, Value]) -> Value | None:
        """Return the argument whose memory a result of a task shares, if there is one."""
        if not _aliases(made):
            return None
        if task.view and task.region:
            return values[task.region[0]]
        roots = {value.root for value in made}
        reads = (use.value for use in task.reads)
        return values[next(read for read in reads if self.old.values[read].root in roots)]

    def _regions(self, task: Task, made: Sequence[Value]) -> list[Region]:
        """Return the regions of the results of a task."""
        return [value.region for value in made]

    def _region(self, region: Region, value: int) -> Region:
        """Return a region of the storage of a value (an index) in the new graph."""
        return region

    def note(self, made: Sequence[Value], results: Any) -> None:
        """Note what stands for old values."""
        self.values.update(zip([value.index for value in made], flatten(results), strict=True))

    def finish(self) -> Graph:
        """Return the new graph, with the outputs, and what is kept together.

        There, a view that was left out is replaced by its base.
        """
        for name, index in self.old.outputs.items():
            self.new.output(**{name: self.values[index]})
        for index, region in self.old.storages.reshaped.items():
            if index in self.values:
                self.new.storages.reshaped[self.values[index].index] = region
        for bond in self.old.kept_together:
            seen = [
                index if index in self.values else self.old.values[index].root for index in bond
            ]
            if found := [self.values[index] for index in seen if index in self.values]:
                self.new.together(*found)
        return self.new


def _aliases(made: Iterable[Value]) -> bool:
    return any(value.root != value.index for value in made)


def with_seconds(graph: G, seconds: Mapping[str, Seconds]) -> G:
    """Return a copy of a graph with these seconds of tasks, by name."""
    copying = Copying(graph)
    for task in graph.tasks:
        copying.repeat(task, seconds=seconds.get(task.name))
    return cast(G, copying.finish())


# ---- one graph inserted into another


class _Inserting(Copying):
    """Tasks that are added to another graph, which numbers its coordinate frames itself."""

    def __init__(self, old: Graph, new: Graph, values: dict[int, Value]):
        self.old = old
        self.new = new
        self.values = values
        self.owner = object()
        self.known: dict[int, int] = {-1: -1}  # by frame of the old graph, that of the new one

    def _regions(self, task: Task, made: Sequence[Value]) -> list[Region]:
        if not _aliases(made):
            return []
        bases = {self.old.values[use.value].root: use.value for use in reversed(task.reads)}
        return [
            self.new.storages.frames.root()
            if value.root == value.index
            else self._region(value.region, bases[value.root])
            for value in made
        ]

    def _region(self, region: Region, value: int) -> Region:
        root = self.old.values[self.old.values[value].root]
        frames = self.new.storages.frames
        if root.index not in self.values:  # only a view of this storage was given
            return frames.opaque(self.values[value].region)
        base = self.new.storages.region(self.values[root.index])
        if base.bounds or base.lead or base.tail != (base.frame, 0):  # the root is a view here
            return frames.opaque(base)
        if root.region.frame >= 0 and root.index not in self.old.storages.reshaped:
            self.known[root.region.frame] = base.frame
        return region.renumbered(self._frame)

    def _frame(self, frame: int) -> int:
        if frame not in self.known:
            self.known[frame] = self.new.storages.frames.imported(self.owner, frame)
        return self.known[frame]


def include(
    graph: Graph,
    other: Graph,
    inputs: Mapping[str, Value],
    *,
    prefix: str = "",
    on: str | Mapping[str, str] | None = None,
    seconds: Mapping[str, Seconds] | None = None,
    nbytes: Mapping[str, int] | None = None,
    only: Collection[str] | None = None,
    host: str | None = None,
) -> dict[str, Value]:
    """Add all tasks of another graph, with Values for its inputs; return its outputs by name.

    It may be included several times, each with another ``prefix``. Tasks that write inputs
    write to the values given. ``on`` is the device of tasks, or a dict of devices by task;
    views, reads and tasks on ``"host"``, which ``host`` replaces, ignore it. ``seconds`` by
    task and ``nbytes`` by value replace costs. ``only`` these tasks are added, if given: from
    values of others among ``inputs``, to all values that they make. Raises GraphError.

    >>> import autosched as asc
    >>> layer, net = asc.Graph("layer"), asc.Graph("net")
    >>> layer.output(y=(layer.input("x") @ layer.input("w")).relu())
    >>> x, w = net.inputs("x", "w")
    >>> for i in range(2):
    ...     x = net.include(layer, {"x": x, "w": w}, prefix=f"{i}.")["y"]
    >>> [task.name for task in net.tasks]
    ['0.matmul', '0.relu', '1.matmul', '1.relu']
    """
    graph.check_grows()
    if isinstance(on, Mapping):
        on = {name: check_runs(device) for name, device in on.items()}
    elif on is not None:
        on = check_runs(on)
    on_host = HOST if host is None else check_runs(host)
    tasks = (
        other.tasks
        if only is None
        else [other.tasks[i] for i in sorted({other.task(name).index for name in only})]
    )
    values = _given(graph, other, inputs, tasks, only is None)
    _check_names(graph, tasks, other, prefix)
    inserting = _Inserting(other, graph, values)
    for task in tasks:
        device = on.get(task.name) if isinstance(on, Mapping) else on
        if task.device == HOST or task.reads_file:
            device = on_host if task.device == HOST else None
        inserting.repeat(
            task,
            [name for name in _after(other, task, prefix) if name in graph.names],
            prefix=prefix,
            on=device,
            seconds=(seconds or {}).get(task.name),
            nbytes=nbytes,
        )
        if task.fn is not None and task.writes and task.composite is None:
            name = effects_of(task.fn, task.args, task.kwargs).name
            graph.reshape(name, values[task.writes[0].value])
    for bond in other.kept_together if not isinstance(on, str) else ():
        if found := [values[index] for index in bond if index in values]:
            graph.together(*found)
    if only is None:
        return {name: values[index] for name, index in other.outputs.items()}
    made_here = (other.values[use.value] for task in tasks for use in task.outputs)
    return {value.name: values[value.index] for value in made_here}


def _after(other: Graph, task: Task, prefix: str) -> list[str]:
    """Return the names of tasks that come first by order dependencies alone.

    They may have been included before. Tasks that share state are ordered anew, since a generator of
    the other graph may be several ones of this graph.
    """
    ordered = (other.tasks[d.task] for d in task.dependencies if d.kind == "order")
    state = set(map(id, task.shared))
    return [prefix + before.name for before in ordered if state.isdisjoint(map(id, before.shared))]


def _given(
    graph: Graph, other: Graph, inputs: Mapping[str, Value], tasks: Sequence[Task], whole: bool
) -> dict[int, Value]:
    """Return the replacement of each value that these tasks do not make, by its old index."""
    made = {use.value for task in tasks for use in task.outputs}
    needed = (
        [*other.sources]
        if whole
        else [other.values[use.value] for task in tasks for use in task.reads]
    )
    needed = [value for value in dict.fromkeys(needed) if value.index not in made]
    names = [value.name for value in needed if value.tensor is None]
    for name in names:
        if name not in inputs:
            raise GraphError(
                f"inputs= of include misses input {name!r}; graph {other.name!r} needs "
                f"{listed(names)}"
            )
    for name, value in inputs.items():
        if name not in names and (whole or not isinstance(other.names.get(name), Value)):
            raise GraphError(
                f"inputs= of include gives {name!r}, which is no input; graph {other.name!r} needs "
                f"{listed(names)}"
            )
        if not isinstance(value, Value):
            raise GraphError(
                f"input {name!r} must be given a Value of graph {graph.name!r}, got {value!r}"
            )
        graph.check_own(value)
    return {
        value.index: inputs[value.name] if value.tensor is None else graph.constant(value.tensor)
        for value in needed
    }


def _check_names(graph: Graph, tasks: Sequence[Task], other: Graph, prefix: str) -> None:
    """Raise GraphError for a name that is taken, before anything is added."""
    for task in tasks:
        for name in dict.fromkeys(
            [task.name, *(other.values[use.value].name for use in task.outputs)]
        ):
            if prefix + name in graph.names:
                raise GraphError(
                    f"name {prefix + name!r} is already taken in graph {graph.name!r}; give "
                    "another prefix"
                )
