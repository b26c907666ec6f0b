"""Define graphs: tasks in serial order, and their dependencies.

A graph is append-only. A task sees the versions of values that the tasks added before it left. So
insertion order is a topological order, and there are no cycles. A tensor and its views share
memory. A write to one of them is a write to all values that see the part that changes, and creates
their next versions; other values keep theirs.

Design decisions:

* Each value has its own versions. Where tasks write parts of one storage, the task that made it,
  the views and the writers stay on one device, in any order that keeps overlapping writes ordered.
  Readers on other devices get copies of the whole value.
* A view is a task that costs nothing, on the device of its base. So the program still lists
  everything that happens, and a consumer on another device copies the view, not the base.
* A schedule keeps a snapshot of its graph, so it does not change when the graph grows. What else is
  asked of devices are the constraints of a ``Problem``.
* A result that nothing uses is dropped immediately and has no memory block.

A graph knows devices only as names in constraints. It knows no time, and does not import torch, and
networkx only where a graph becomes one, or is made of one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autosched._lib.display import function_of, public_names
from autosched._lib.gc_pause import without_collecting
from autosched._lib.tree import transform
from autosched.errors import GraphError, listed, shown
from autosched.graph import files, including
from autosched.graph.files import StoredTensor
from autosched.graph.recorder import Recorder, check_costs
from autosched.graph.regions import Region
from autosched.graph.task import HOST, STORAGE, Dependency, Followed, Here, Task, Use
from autosched.graph.value import Value

if TYPE_CHECKING:
    import networkx

    from autosched.graph.flow import Flow

__all__ = [
    "HOST",
    "STORAGE",
    "Dependency",
    "Graph",
    "Here",
    "Task",
    "Use",
    "Value",
    "called_with",
    "no_grad",
    "run_serial",
]


class Graph(Recorder):
    """The tasks of one step and their dependencies.

    ``name`` is its title. ``generators`` are the random number generators of devices that have
    their own, by device: tasks that draw from one keep their order. ``tasks``, ``values`` and
    ``sources``, the values that no task makes, are lists in the order of addition; ``outputs`` has
    positions in ``values`` by name.

    >>> import autosched as asc
    >>> graph = asc.Graph("sum of squares")
    >>> x, y = graph.inputs("x", "y")
    >>> graph.output(total=x * x + y * y)
    >>> graph.run_serial(x=3, y=4)
    {'total': 25}
    """

    cached_flow: tuple[tuple[int, int], Flow] | None = None  # see ``flow``

    read = files.read  # tensors of files, as values
    include = including.include  # the tasks of another graph

    # ---- queries

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs that a run requires."""
        return tuple(v.name for v in self.sources if v.tensor is None and v.copy_of is None)

    @property
    def is_plain(self) -> bool:
        """Whether no task writes in place, no values share memory, and none are kept together."""
        return not (self.changing or self.kept_together)

    @property
    def changing(self) -> set[int]:
        """The values (indices) that tasks write in place, or that share memory."""
        storages = self.storages
        return {use.value for use in storages.writer}.union(*storages.members.values())

    def last_version(self, value: int) -> int:
        """Return the version of a value (an index) after all tasks; 0 if none writes it."""
        return self.storages.current[value].version

    def maker(self, use: Use) -> int | None:
        """Return the task (an index) that leaves this version of a value; None for inputs."""
        return self.storages.writer.get(use, self.values[use.value].producer)

    def in_parts(self, value: int) -> bool:
        """Whether tasks may touch regions of the storage of a value (an index) out of order.

        Then all tasks that write it share a device.
        """
        root = self.values[value].root
        storages = self.storages
        return root in storages.members or storages.partial_writes.get(root, 0) > 1

    def touched(self, task: Task, value: int) -> Region | None:
        """Return the region of an argument (an index) that a task touches; None for all of it."""
        if task.region is None or task.region[0] != value or not self.in_parts(value):
            return None
        return task.region[1]

    def needs(self, task: Task) -> Iterator[Use]:
        """Yield the versions that must be on the device of a task before it runs.

        A task that touches a region needs only the writes on which it depends.
        """
        for use in task.reads:
            yield use if self.touched(task, use.value) is None else Use(use.value, 0)

    def is_used(self, value: int) -> bool:
        """Whether a task reads this value (an index) or it is an output; others are dropped."""
        return value in self.storages.used

    def __len__(self) -> int:
        return len(self.tasks)

    def draw(
        self,
        path: str | os.PathLike[str],
        device: Mapping[str, str] | None = None,
        *,
        depth: int | None = None,
        title: str | None = None,
    ) -> None:
        """Draw the graph into a file: .svg, .png, .pdf or .dot (Graphviz).

        The suffix selects the format; see ``graph_svg`` for the options. With ``depth``, a module
        at that level is one box; without, large graphs are folded to fit. ``.png`` and ``.pdf``
        need the extra ``viz``. Raises ChartError for other suffixes, and OSError.
        """
        function_of(self, "draw")(self, path, device, depth, title)

    def __dir__(self) -> list[str]:
        return public_names(self, ("name", "outputs", "sources", "tasks", "values"))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        shown: dict[str, str] = function_of(self, "show")(self)
        return shown

    def __repr__(self) -> str:
        tasks, inputs, outputs = map(len, (self.tasks, self.input_names, self.outputs))
        return f"<Graph {self.name!r}: {tasks} tasks, {inputs} inputs, {outputs} outputs>"

    def __str__(self) -> str:
        lines = [f"graph {self.name}"]
        for value in self.sources:
            kind = "input" if value.tensor is None else "constant"
            lines.append(f"  {kind} {value.name}" + (f" on {value.home}" if value.home else ""))
        lines += [f"  {_line(self, task)}" for task in self.tasks]
        for values in self.kept_together:
            lines.append(f"  together {', '.join(self.values[i].name for i in values)}")
        for label, index in self.outputs.items():
            lines.append(f"  output {label} = {self.values[index].name}")
        return "\n".join(lines)

    # ---- running: the reference

    def run_serial(self, /, *args: Any, **inputs: Any) -> dict[str, Any]:
        """Run the tasks one by one, in the order they were added: the reference for schedules.

        Tasks run where their arguments are. Inputs are given by name, or in the order of
        ``input_names``. A captured graph is called as its function is. Autograd does not record
        across tasks: if inputs require grad, outputs raise GradientError in ``backward()``. Inputs
        that tasks write are changed, as in plain PyTorch. Raises GraphError for missing or unknown
        inputs. An error of a task is raised with a note that names the task.
        """
        return run_serial(self, self.named(args, inputs))

    def named(self, args: Sequence[Any], inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a run by name; ``args`` are the first of ``input_names``.

        Raises GraphError for too many, and for an input that is given twice.
        """
        if not args:
            return inputs
        names = self.input_names
        if len(args) == 1 and isinstance(args[0], dict) and args[0].keys() & {*names}:
            raise GraphError(f"graph {self.name!r} was given a dict; write schedule(**inputs)")
        if len(args) > len(names):
            raise GraphError(
                f"graph {self.name!r} was given {len(args)} inputs; "
                f"it has {len(names)}: {listed(names)}"
            )
        for name in names[: len(args)]:
            if name in inputs:
                raise GraphError(
                    f"graph {self.name!r} was given input {name!r} twice, by position and by name"
                )
        return {**dict(zip(names, args, strict=False)), **inputs}

    def bind(self, inputs: Mapping[str, Any]) -> dict[int, Any]:
        """Return the data of inputs and constants by value index.

        Raises GraphError for missing and unknown inputs.
        """
        if not isinstance(inputs, Mapping):
            what = f"graph {self.name!r} takes inputs as a mapping by name"
            raise GraphError(f"{what}, got {shown(inputs)}")
        names = self.input_names
        unknown = [name for name in inputs if name not in names]
        wrong = [f"misses input {name!r}" for name in names if name not in inputs][:1]
        wrong += [f"was given {name!r}, which is no input" for name in unknown[:1]]
        if wrong:
            its = f"its inputs are {listed(names)}"
            raise GraphError(f"graph {self.name!r} {' and '.join(wrong)}; {its}")
        return {
            v.index: inputs.get(v.name if v.copy_of is None else v.copy_of, v.tensor)
            for v in self.sources
        }

    # ---- networkx

    def to_networkx(self) -> networkx.DiGraph[Any]:
        """Return the tasks as a networkx DiGraph: nodes are names, edges have a ``kind``."""
        import networkx

        dag: networkx.DiGraph[Any] = networkx.DiGraph(name=self.name)
        for task in self.tasks:
            nbytes = self.values[task.outputs[0].value].nbytes if task.outputs else None
            known = {
                "seconds": task.seconds,
                "nbytes": nbytes,
                "fn": task.fn,
                "device": task.device,
            }
            dag.add_node(
                task.name, **{key: item for key, item in known.items() if item is not None}
            )
            for dependency in task.dependencies:
                dag.add_edge(self.tasks[dependency.task].name, task.name, kind=dependency.kind)
            for value in (self.values[use.value] for use in task.reads):
                if value.producer is None:
                    continue
                producer = self.tasks[value.producer]
                if producer.fn is None and value.index != producer.outputs[0].value:
                    dag.edges[producer.name, task.name]["nbytes"] = value.nbytes
        return dag

    @staticmethod
    @without_collecting()
    def from_networkx(dag: networkx.DiGraph[Any], name: str | None = None) -> Graph:
        """Make a graph of a networkx DAG, each node a task.

        Node attributes, all optional: ``seconds`` (a number, or one per device), ``nbytes`` of its
        result, ``fn`` (called with the results of its predecessors, in the order of its edges),
        ``device``. Edge attributes: ``nbytes``, the bytes that this successor needs, if only a
        part; ``kind="order"`` for an edge without data. Nodes without successors are outputs.
        Raises GraphError for cycles and undirected graphs.

        >>> import networkx as nx, autosched as asc
        >>> print(asc.Graph.from_networkx(nx.DiGraph([("a", "b"), ("a", "c")]), name="fork"))
        graph fork
          a()
          b(a)
          c(a)
          output b = b
          output c = c
        """
        import networkx

        if (
            not isinstance(dag, networkx.DiGraph)
            or dag.is_multigraph()
            or not networkx.is_directed_acyclic_graph(dag)
        ):
            raise GraphError(f"from_networkx needs a DiGraph without cycles, got {dag}")
        _warn_of_ignored(dag)
        graph = Graph(name or str(dag.name or "graph"))
        position = {node: i for i, node in enumerate(dag)}
        sent: dict[tuple[Any, Any], Value] = {}  # the value of an edge
        # Ties are broken by insertion order.
        for node in networkx.lexicographical_topological_sort(dag, key=position.__getitem__):
            _add_node(graph, dag, node, sent)
        return graph


def _line(graph: Graph, task: Task) -> str:
    values = graph.values
    reads = [values[v].name + (f"@{version}" if version else "") for v, version in task.reads]
    facts = [f"reads {task.fn}"] if isinstance(task.fn, StoredTensor) else []
    facts += [f"writes {values[use.value].name}" for use in task.writes]
    facts += [f"after {graph.tasks[d.task].name}" for d in task.dependencies if d.kind == "order"]
    facts += [f"on {task.device}"] if task.device else []
    return f"{task.name}({', '.join(reads)})" + (": " + ", ".join(facts) if facts else "")


def _warn_of_ignored(dag: networkx.DiGraph[Any]) -> None:
    for kind, items, known in (
        ("nodes", dag.nodes, ("seconds", "nbytes", "fn", "device")),
        ("edges", dag.edges, ("nbytes", "kind")),
    ):
        names = dict.fromkeys(str(name) for *_, facts in items.data() for name in facts)
        if others := [name for name in names if name not in known]:
            warnings.warn(
                f"from_networkx ignores {listed(others)} of {kind}; it knows {listed(known)}",
                stacklevel=4,
            )


def _add_node(
    graph: Graph, dag: networkx.DiGraph[Any], node: Any, sent: dict[tuple[Any, Any], Value]
) -> None:
    facts = dag.nodes[node]
    label = graph.fresh("".join(str(node).split()).replace("@", "_") or "task")
    parts = [n for n in dag.successors(node) if dag.edges[node, n].get("nbytes") is not None]
    if parts and facts.get("fn") is not None:
        raise GraphError(
            f"node {node!r} has a fn, so its edges cannot have nbytes of their own: a run copies "
            "all of it"
        )
    names = [
        label,
        *(graph.fresh("".join(f"{label}>{n}".split()).replace("@", "_")) for n in parts),
    ]
    sizes = [facts.get("nbytes"), *(dag.edges[node, n]["nbytes"] for n in parts)]
    for n, nbytes in zip(parts, sizes[1:], strict=True):
        check_costs(f"edge {node!r} -> {n!r}", None, nbytes)
    data = {n: dag.edges[n, node].get("kind", "data") == "data" for n in dag.predecessors(node)}
    result = graph.add_task(
        facts.get("fn"),
        tuple(sent[n, node] for n, is_data in data.items() if is_data),
        {},
        name=label,
        after=[sent[n, node] for n, is_data in data.items() if not is_data],
        on=facts.get("device"),
        outputs=tuple(names) if parts else None,
        seconds=facts.get("seconds"),
        nbytes=facts.get("nbytes"),
        sizes=sizes,
    )
    whole, *pieces = result if parts else (result,)
    sent.update({(node, n): whole for n in dag.successors(node)})
    for n, piece in zip(parts, pieces, strict=True):
        sent[node, n] = piece
    if dag.out_degree(node) == 0:
        graph.output(whole)


# ---- running one task after another: the reference

Around = Callable[[Task], contextlib.AbstractContextManager[Any]]


def run_serial(
    graph: Graph,
    inputs: Mapping[str, Any],
    around: Around | None = None,
    followed: Followed | None = None,
) -> dict[str, Any]:
    """Run a graph on inputs by name, each task within ``around(task)``.

    ``followed`` says what autograd would have followed, if that is known.
    """
    data = graph.bind(inputs)
    with no_grad():
        for task in graph.tasks:
            if task.fn is None:
                raise GraphError(f"task {task.name!r} has no function: it can be planned, not run")
            positional, named = called_with(task, data)
            try:
                with contextlib.nullcontext() if around is None else around(task):
                    data.update(task.results(task.fn(*positional, **named)))
            except Exception as error:
                error.add_note(f"in task {task.name!r}, added at {task.source}")
                raise
    outputs = {label: data[index] for label, index in graph.outputs.items()}
    if "torch" in sys.modules:
        from autosched.graph.gradients import Gradients

        outputs = Gradients(graph, followed).guarded(inputs, outputs)
    return outputs


def called_with(task: Task, data: Mapping[int, Any], device: Any = None) -> tuple[Any, Any]:
    """Return the arguments of a task, with ``data`` for values, by index.

    ``device`` replaces ``Here``, the placeholder for the device on which the task runs.
    """

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return data[leaf.index]
        return leaf if type(leaf) is not Here else leaf.usual if device is None else device

    args, kwargs = transform(change, (task.args, task.kwargs))
    return args, kwargs


def no_grad() -> contextlib.AbstractContextManager[Any]:
    """Disable autograd if torch is imported."""
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch is not None else contextlib.nullcontext()
