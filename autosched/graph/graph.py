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
* The devices of inputs are a property of the pinned graph that a schedule keeps (``Graph.pinned``).
  So a policy needs no fourth argument, and a schedule does not change when its graph grows.
* A result that nothing uses is dropped immediately and has no memory block.

A graph knows devices only as names in constraints. It knows no time, and does not import torch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fnmatch
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from autosched._lib.allowed import by_device, device_name, is_device, is_name, is_number, no_seconds
from autosched._lib.display import renderer_of
from autosched._lib.tree import flatten, is_deeper, transform
from autosched.errors import GraphError, listed, shown
from autosched.graph import effects
from autosched.graph.including import include
from autosched.graph.parts import Accesses, Index, Looks, Part, is_basic
from autosched.graph.task import HOST, Dependency, Followed, Here, Kind, Origin, Seconds, Task, Use
from autosched.graph.value import Value

if TYPE_CHECKING:
    import networkx

    from autosched.graph.composite import Composite

__all__ = ["HOST", "Dependency", "Graph", "Here", "Task", "Use", "Value", "called_with"]


class Graph:
    """The tasks of one step and their dependencies.

    ``name`` is its title. ``generators`` are the random number generators of devices that have
    their own, by device. ``tasks`` and ``values`` are lists in the order of addition; ``outputs``
    has positions in ``values`` by name.

    >>> import autosched as asc
    >>> graph = asc.Graph("sum of squares")
    >>> x, y = graph.inputs("x", "y")
    >>> graph.output(total=x * x + y * y)
    >>> graph.run_serial(x=3, y=4)
    {'total': 25}
    """

    followed: Followed | None = None  # what autograd would have followed, if known

    def __init__(self, name: str = "graph", *, generators: Mapping[str, str] | None = None):
        """``generators`` are devices with random number generators of their own, by name.

        Tasks that draw random numbers keep their order. Those that must run on such devices keep it
        only among tasks with the same generator.
        """
        self.name = name
        self._generators = dict(generators or {})
        self._drawn = {name: _Generator(name) for name in (None, *self._generators.values())}
        self.tasks: list[Task] = []
        self.values: list[Value] = []
        self.outputs: dict[str, int] = {}  # label -> value
        self.names: dict[str, Value | Task] = {}
        self.users: list[list[int]] = []  # by task, its successors
        self._views: dict[
            int, list[int]
        ] = {}  # root -> the values that share its memory, the root first
        self._seen: dict[int, Index[list[int]]] = {}  # the same by part, for roots that have views
        self._looks = Looks()
        self._now: list[Use] = []  # by value, its present version
        self._places: dict[tuple[str, int], Origin] = {}  # origins of tasks by file and line
        self._accesses: dict[int, Accesses] = {}  # by root
        self._left: dict[Use, int] = {}  # version -> the task whose write created it
        self._portions: dict[
            int, int
        ] = {}  # root -> number of tasks that write a part of it by an index
        self.kept_together: list[
            tuple[int, ...]
        ] = []  # values whose makers and writers share a device
        # value -> the sets that contain it
        self._bonds: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._used: set[int] = set()
        self._constants: dict[int, Value] = {}
        self._counts: dict[str, int] = {}
        self._device: str | None = None
        self._grows = True
        self._last: dict[
            int, int
        ] = {}  # id of an item of shared state -> the last task that used it

    # ---- building

    def input(self, name: str, *, nbytes: int | None = None) -> Value:
        """Declare one input, which a run receives by name; ``nbytes`` is its size, if known.

        Inside ``with graph.on(device)`` it is on that device; else ``schedule(..., inputs={name:
        device})`` sets its device, and the default is the host. Raises GraphError for invalid
        sizes, and for names that are taken.
        """
        if nbytes is not None and not is_number(nbytes):
            raise GraphError(
                f"nbytes of input {name!r} must be a number, 0 or more, and finite, got {shown(nbytes)}"
            )
        return self._new_value(self._claim(name), home=self._device, nbytes=nbytes)

    def inputs(self, *names: str) -> tuple[Value, ...]:
        """Declare several inputs.

        >>> import autosched as asc
        >>> asc.Graph().inputs("x", "w1", "w2")
        (Value('x'), Value('w1'), Value('w2'))
        """
        return tuple(self.input(name) for name in names)

    def constant(self, tensor: Any, name: str | None = None) -> Value:
        """Make a tensor a value of this graph; ``add`` does so for each tensor among its arguments.

        Raises GraphError for a name that is taken, and if the tensor has another name already.
        """
        found = self._constants.get(id(tensor))
        if found is None:
            device = str(
                getattr(tensor, "device", "cpu")
            )  # a CPU tensor is on the host, whatever its name
            found = self._new_value(
                self._claim(name) if name is not None else self.fresh("constant"),
                home=None if device == "cpu" else device,
                tensor=tensor,
            )
            self._constants[id(tensor)] = found
        if name not in (None, found.name):
            raise GraphError(
                f"the tensor is constant {found.name!r} of graph {self.name!r} already, got name {name!r}"
            )
        return found

    @contextlib.contextmanager
    def on(self, device: str) -> Iterator[None]:
        """Constrain the tasks and inputs added inside to ``device``.

        Views ignore it: they are on the device of their base. Tasks on ``"host"`` run on the
        machine's first CPU, whatever its name.
        """
        before = self._device
        self._device = check_device(device)
        try:
            yield
        finally:
            self._device = before

    def add(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        name: str | None = None,
        writes: Value | Iterable[Value] = (),
        aliases: Value | None = None,
        after: Task | Value | str | Iterable[Task | Value | str] = (),
        on: str | None = None,
        outputs: Any = None,
        random: bool = False,
        seconds: Seconds | None = None,
        nbytes: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Add the task ``fn(*args, **kwargs)`` and return the Value of its result.

        Autograd is disabled in tasks: a function that computes gradients does so under
        ``torch.enable_grad()``. Arguments may be Values, tuples, lists and dicts of them, tensors
        (which become constants) and anything else.

        * ``writes``: the arguments that ``fn`` changes in place; later tasks see their new version.
        * ``aliases``: the argument whose memory the result shares (``fn`` returns it, or a view of
          it).
        * ``after``: tasks, or values whose tasks, must have ended before.
        * ``on``: the device on which it must run; default: that of the enclosing ``with
          graph.on(device)``, if any.
        * ``outputs``: the shape of what ``fn`` returns, if not one tensor: a number of results, or
          a tuple, list or dict (nested at will) of names. The same shape of Values is returned.
        * ``random``: whether it draws random numbers; such tasks keep their serial order, and so do
          tasks that share a module or an optimizer. Tasks must not change other shared objects.
        * ``seconds`` (or a number per device) and ``nbytes`` of each result: its costs, if known.

        ``writes``, ``aliases`` and ``random`` are known for torch functions; in-place ones return
        what they write. Raises GraphError for values of another graph, names already taken, writes
        that are not arguments, and costs that are not numbers.
        """
        if not callable(fn):
            hint = "; write graph.add(f, x), not graph.add(f(x))" if isinstance(fn, Value) else ""
            raise GraphError(f"graph.add needs a function first, got {fn!r}{hint}")
        return self.record(
            fn, args, kwargs, name=name, writes=_as_tuple("writes", writes), aliases=aliases,
            after=_as_tuple("after", after), on=on, outputs=outputs, random=random, seconds=seconds, nbytes=nbytes,
        )  # fmt: skip

    def record(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        writes: Sequence[Value] = (),
        aliases: Value | None = None,
        outputs: Any = None,
        random: bool = False,
        **facts: Any,
    ) -> Any:
        """Add a task like ``add``, with the same options; effects of torch functions are derived.

        ``by`` is called in place of ``fn``, and must do the same.
        """
        for what, tree, most in (
            ("arguments", (args, kwargs), _DEEPEST + 2),
            ("outputs=", outputs, _DEEPEST),
        ):
            if is_deeper(most, tree):
                label = facts.get("name") or effects.function_name(fn)
                raise GraphError(f"task {label!r} has {what} nested more than {_DEEPEST} deep")
        known = effects.effects_of(fn, args, kwargs)
        returns_written = known.in_place and outputs is None
        base = self._as_argument(known.base)
        base = base if isinstance(base, Value) else None
        written = [self._as_value(item) for item in known.writes]
        if known.name in effects.MOVE:
            self._check_moves(known.name, written[0])
        part = None
        if known.name in effects.SET_ITEM and len(args) > 1 and is_basic(args[1]):
            part = written[0].index, self._looks.item(written[0].part, args[1])
            if _is_there(
                args[2:], written[0], part[1]
            ):  # Python ends x[key] += y with x[key] = x[key]
                return None
        result = self._add(
            fn,
            tuple(args),
            kwargs,
            writes=writes or written,
            aliases=base if aliases is None else aliases,
            outputs=() if returns_written else outputs,
            random=random or known.random,
            look=known.name if base is not None and aliases is None else None,
            view=known.view and base is not None,
            part=part,
            **facts,
        )
        if known.name in effects.RESHAPE | effects.MOVE:
            for member in self.members(written[0].index):  # one of them may be the same tensor
                self.values[member].part = self._looks.anew(self.values[member].part)
        if not returns_written:
            return result
        return written[0] if len(written) == 1 else tuple(written)

    def include(
        self,
        other: Graph,
        inputs: Mapping[str, Value],
        *,
        prefix: str = "",
        on: str | Mapping[str, str] | None = None,
        seconds: Mapping[str, Seconds] | None = None,
        nbytes: Mapping[str, int] | None = None,
        only: Collection[str] | None = None,
    ) -> dict[str, Value]:
        """Add all tasks of another graph, with Values for its inputs; return its outputs by name.

        A graph may be included several times, each time with another ``prefix`` for names. Tasks
        that write their inputs write to the values given. ``on`` is the device of all tasks, or a
        dict of devices by task; views and tasks on ``"host"`` ignore it. ``seconds`` by task and
        ``nbytes`` by value, by their names in the other graph, replace the costs given there. With
        ``only``, these tasks alone are added, by name; then ``inputs`` also has the values of other
        tasks that they read, and all values that they make are returned, by name. Raises GraphError
        for names that are taken, and for missing or unknown inputs.

        >>> import autosched as asc
        >>> layer, net = asc.Graph("layer"), asc.Graph("net")
        >>> layer.output(y=(layer.input("x") @ layer.input("w")).relu())
        >>> x, w = net.inputs("x", "w")
        >>> for i in range(2):
        ...     x = net.include(layer, {"x": x, "w": w}, prefix=f"{i}.")["y"]
        >>> [task.name for task in net.tasks]
        ['0.matmul', '0.relu', '1.matmul', '1.relu']
        """
        self._check_grows()
        if isinstance(on, Mapping):
            on = {name: check_device(device) for name, device in on.items()}
        else:
            on = None if on is None else check_device(on)
        return include(self, other, inputs, prefix, on, seconds or {}, nbytes or {}, only)

    def output(self, /, *values: Value, **named: Value) -> None:
        """Declare outputs, which a run returns by name: the last versions of these values.

        Raises GraphError for values of another graph, and for names that are taken or invalid.
        """
        self._check_grows()
        declared: dict[str, int] = {}
        for label, item in (*((None, value) for value in values), *named.items()):
            if not isinstance(item, Value):
                raise GraphError(f"an output must be a Value of graph {self.name!r}, got {item!r}")
            name = item.name if label is None else label
            if not is_name(name):
                raise GraphError(
                    f"the name of an output must be a string without spaces and '@', got {name!r}"
                )
            if name in self.outputs or name in declared:
                so_far = listed([*self.outputs, *declared])
                raise GraphError(f"output {name!r} is declared twice; outputs so far: {so_far}")
            declared[name] = self._own(item).index
        self.outputs.update(declared)
        self._used.update(declared.values())

    def together(self, *values: Value) -> None:
        """Keep all tasks that make or write any of these values on one device, under every policy.

        So a parameter and its moments are updated in one place. This includes tasks that are added
        later. Raises GraphError for values of another graph; ``schedule`` raises ScheduleError for
        contradicting constraints.

        >>> import autosched as asc
        >>> graph = asc.Graph()
        >>> w, m = graph.inputs("w", "m")
        >>> graph.together(w, m)
        >>> _ = m.mul_(0.9), w.sub_(m)
        >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=2), place={"mul": "cuda:1"})
        >>> schedule.placement.device["sub"]
        'cuda:1'
        """
        self._check_grows()
        for item in values:
            if not isinstance(item, Value):
                raise GraphError(
                    f"only Values of graph {self.name!r} can be kept together, got {shown(item)}"
                )
        bond = tuple(dict.fromkeys(self._own(value).index for value in values))
        self.kept_together.append(bond)
        self._bonds.update((index, (*self._bonds.get(index, ()), bond)) for index in bond)

    def pinned(
        self, inputs: Mapping[str, str] | None = None, place: Mapping[str, str] | None = None
    ) -> Graph:
        """Return a copy that does not grow, with the devices of inputs and tasks as given.

        ``inputs`` has the devices of inputs, by names or shell patterns; ``place`` those of tasks,
        by patterns for names or modules. The first pattern that matches counts.
        """
        twin = copy.copy(self)
        for field, item in self.__dict__.items():
            if isinstance(item, (list, dict, set)):
                setattr(twin, field, item.copy())
        twin.users = [list(users) for users in self.users]
        twin._views = {root: list(members) for root, members in self._views.items()}
        twin._grows = False
        sources = {value.name: value for value in self.sources}
        for name, device in by_pattern(
            inputs or {}, sources, "inputs", "input", self.input_names
        ).items():
            moved = copy.copy(sources[name])
            moved.home = check_device(device)
            twin.values[moved.index] = twin.names[name] = moved
        where = {pattern: check_device(device) for pattern, device in (place or {}).items()}
        for pattern, device in where.items():
            fits = functools.partial(fnmatch.fnmatchcase, pat=pattern)
            found = [task for task in self.tasks if any(map(fits, _called(task)))]
            if not found:
                raise GraphError(f"pattern {pattern!r} in place= fits no task's name and no module")
            for task in found:
                if twin.tasks[task.index].device is None and not task.view:
                    twin.tasks[task.index] = placed = dataclasses.replace(task, device=device)
                    if twin.names[task.name] is task:
                        twin.names[task.name] = placed
        return twin

    # ---- looking

    @property
    def sources(self) -> tuple[Value, ...]:
        """The inputs and constants: the values that no task makes."""
        return tuple(v for v in self.values if v.producer is None)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs that a run requires."""
        return tuple(v.name for v in self.sources if v.tensor is None)

    @property
    def is_plain(self) -> bool:
        """Whether no task writes in place, no values share memory, and none are kept together."""
        return not (self._left or self._views or self.kept_together)

    def task(self, name: str) -> Task:
        """Return a task by its name. Raises GraphError if there is none."""
        found = self.names.get(name) if isinstance(name, str) else None
        index = (
            found.index
            if isinstance(found, Task)
            else found.producer
            if found is not None
            else None
        )
        if index is None or self.tasks[index].name != name:
            raise GraphError(
                f"graph {self.name!r} has no task {name!r}; tasks are {listed(t.name for t in self.tasks)}"
            )
        return self.tasks[index]

    def value(self, name: str) -> Value:
        """Return a value by its name. Raises GraphError if there is none."""
        found = self.names.get(name) if isinstance(name, str) else None
        if not isinstance(found, Value):
            raise GraphError(
                f"graph {self.name!r} has no value {name!r}; values are {listed(v.name for v in self.values)}"
            )
        return found

    def members(self, value: int) -> Sequence[int]:
        """Return the values (indices) that share memory with this one, the root first."""
        return self._views.get(self.values[value].root) or (value,)

    def bonds(self, task: Task) -> list[tuple[int, ...]]:
        """Return the sets of values kept together of which a task makes or writes a member."""
        left = (
            [self._bonds.get(use.value, ()) for use in (*task.changes, *task.outputs)]
            if self._bonds
            else []
        )
        return list(dict.fromkeys(chain(*left)))

    def last_version(self, value: int) -> int:
        """Return the version of a value (an index) after all tasks; 0 if none writes it."""
        return self._now[value].version

    def maker(self, use: Use) -> int | None:
        """Return the task (an index) that leaves this version of a value; None for inputs."""
        return self._left.get(use, self.values[use.value].producer)

    def in_parts(self, value: int) -> bool:
        """Whether tasks may touch parts of the memory of a value (an index) out of order.

        Then all tasks that write it share a device.
        """
        root = self.values[value].root
        return root in self._views or self._portions.get(root, 0) > 1

    def touched(self, task: Task, value: int) -> Part | None:
        """Return the part of an argument (an index) that a task touches; None for all of it."""
        if task.part is None or task.part[0] != value or not self.in_parts(value):
            return None
        return task.part[1]

    def needs(self, task: Task) -> Iterator[Use]:
        """Yield the versions that must be on the device of a task before it runs.

        A task that touches a part needs no writes but those on which it depends.
        """
        for use in task.reads:
            yield use if self.touched(task, use.value) is None else Use(use.value, 0)

    def is_used(self, value: int) -> bool:
        """Whether a task reads this value (an index) or it is an output; others are dropped."""
        return value in self._used

    def __len__(self) -> int:
        return len(self.tasks)

    def draw(
        self,
        path: str | os.PathLike[str],
        device: Mapping[str, str] | None = None,
        *,
        critical: Iterable[str] = (),
        group: str = "device",
        depth: int | None = None,
    ) -> None:
        """Draw the graph into a file: .svg, .png, .pdf, .dot (Graphviz) or .mmd (Mermaid).

        The suffix selects the format; see ``graph_svg`` for the options. With ``depth``, a module
        at that level is one box; without, large graphs are folded to fit. ``.png`` and ``.pdf``
        need the extra ``viz``. Raises ChartError for other suffixes, and OSError.
        """
        renderer_of(self).draw(self, path, device, critical, group, depth)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return renderer_of(self).show(self)

    def __repr__(self) -> str:
        counts = (
            f"{len(self.tasks)} tasks, {len(self.input_names)} inputs, {len(self.outputs)} outputs"
        )
        return f"<Graph {self.name!r}: {counts}>"

    def __str__(self) -> str:
        lines = [f"graph {self.name}"]
        lines += [
            f"  {'input' if v.tensor is None else 'constant'} {v.name}"
            + (f" on {v.home}" if v.home else "")
            for v in self.sources
        ]
        lines += [f"  {self._line(task)}" for task in self.tasks]
        lines += [
            f"  together {', '.join(self.values[i].name for i in values)}"
            for values in self.kept_together
        ]
        lines += [
            f"  output {label} = {self.values[index].name}" for label, index in self.outputs.items()
        ]
        return "\n".join(lines)

    def _line(self, task: Task) -> str:
        reads = ", ".join(
            self.values[v].name + (f"@{version}" if version else "") for v, version in task.reads
        )
        facts = [f"writes {self.values[use.value].name}" for use in task.writes]
        facts += [
            f"after {self.tasks[d.task].name}" for d in task.dependencies if d.kind == "order"
        ]
        facts += [f"on {task.device}"] if task.device else []
        return f"{task.name}({reads})" + (": " + ", ".join(facts) if facts else "")

    # ---- running: the reference

    def run_serial(self, /, *args: Any, **inputs: Any) -> dict[str, Any]:
        """Run the tasks one by one, in the order they were added: the reference for schedules.

        Tasks run where their arguments are. Inputs are given by name, or in the order of
        ``input_names``. A captured graph is called as its function is. Autograd does not record
        across tasks: if inputs require grad, outputs raise GradientError in ``backward()``. Inputs
        that tasks write are changed, as in plain PyTorch. Raises GraphError for missing or unknown
        inputs. An error of a task is raised with a note that names the task.
        """
        inputs, keep = self.completed(args, inputs)
        data = self.bind(inputs)
        with no_grad():
            for task in self.tasks:
                if task.fn is None:
                    raise GraphError(
                        f"task {task.name!r} has no function: it can be planned, not run"
                    )
                args, kwargs = called_with(task, data)
                try:
                    data.update(task.results(task.fn(*args, **kwargs)))
                except Exception as error:
                    error.add_note(f"in task {task.name!r}, added at {task.source}")
                    raise
        outputs = {label: data[index] for label, index in self.outputs.items()}
        if "torch" in sys.modules:
            from autosched.graph.gradients import guarded

            outputs = guarded(self, inputs, outputs)
        if keep is not None:
            keep(outputs)
        return outputs

    def completed(
        self, args: Sequence[Any], inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], Any] | None]:
        """Return the inputs of a run by name, and a function to call with its outputs, or None.

        ``args`` are the first of ``input_names``. Raises GraphError for too many, and for an input
        that is given twice.
        """
        if not args:
            return inputs, None
        names = self.input_names
        if len(args) > len(names):
            raise GraphError(
                f"graph {self.name!r} was given {len(args)} inputs; it has {len(names)}: {listed(names)}"
            )
        for name in names[: len(args)]:
            if name in inputs:
                raise GraphError(
                    f"graph {self.name!r} was given input {name!r} twice, by position and by name"
                )
        return {**dict(zip(names, args, strict=False)), **inputs}, None

    def bind(self, inputs: Mapping[str, Any]) -> dict[int, Any]:
        """Return the data of inputs and constants by value index.

        Raises GraphError for missing and unknown inputs.
        """
        sources = self.sources
        names = {v.name for v in sources if v.tensor is None}
        for name in names ^ inputs.keys() and sorted(names ^ inputs.keys(), key=str):
            what = (
                f"misses input {name!r}"
                if name in names
                else f"was given {name!r}, which is no input"
            )
            raise GraphError(
                f"graph {self.name!r} {what}; its inputs are {listed(self.input_names)}"
            )
        return {v.index: inputs[v.name] if v.tensor is None else v.tensor for v in sources}

    # ---- networkx

    def to_networkx(self) -> networkx.DiGraph[Any]:
        """Return the tasks as a networkx DiGraph: nodes are names, edges have a ``kind``."""
        from autosched.graph.networkx import to_networkx

        return to_networkx(self)

    @staticmethod
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
        from autosched.graph.networkx import from_networkx

        return from_networkx(dag, name)

    # ---- how a task is added

    def _add(
        self,
        fn: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        name: str | None = None,
        writes: Sequence[Value] = (),
        aliases: Value | None = None,
        after: Iterable[Task | Value | str] = (),
        on: str | None = None,
        outputs: Any = None,
        random: bool = False,
        seconds: Seconds | None = None,
        nbytes: int | None = None,
        look: str | None = None,
        view: bool = False,
        part: tuple[int, Part] | None = None,
        parts: Sequence[Part] = (),
        origin: Origin | None = None,
        by: Callable[..., Any] | None = None,
        composite: Composite | None = None,
    ) -> Any:
        label = self.fresh(effects.function_name(fn)) if name is None else self._claim(name)
        args, kwargs = transform(self._as_argument, (args, kwargs))
        leaves = list(flatten((args, kwargs)))
        found = {leaf.index: leaf for leaf in leaves if isinstance(leaf, Value)}
        reads = list(found.values())
        for value in (*writes, *([aliases] if aliases is not None else [])):
            if not isinstance(value, Value) or found.get(value.index) is not value:
                raise _no_argument(label, value, reads)
        names, aliases, view = self._result_names(label, outputs, aliases, view)
        check_costs(label, seconds, nbytes)
        device = None if view else check_device(on) if on is not None else self._device
        state, random = self._state(fn, leaves, composite, random, device)
        earlier = [self._task_of(item) for item in after] + [
            self._last[id(s)] for s in state if id(s) in self._last
        ]
        # From here on nothing fails: an error leaves the graph as it was.
        index = len(self.tasks)
        seen, written = (
            tuple([self._now[value.index] for value in values]) for values in (reads, writes)
        )
        parts = parts or self._parts(aliases, look, args, kwargs, list(flatten(names)))
        if view and aliases is not None:
            part = aliases.index, parts[0] if names == label else aliases.part
        dependencies = self._depend(index, reads, writes, part, earlier)
        changes = self._change(index, writes, part) if writes else ()
        seen_as = iter(parts)
        result = transform(
            lambda leaf: self._new_value(
                leaf, index, root=aliases, part=next(seen_as), nbytes=nbytes
            ),
            names,
        )
        made = tuple([self._now[leaf.index] for leaf in flatten(result)])
        task = Task(
            index, label, by or fn, args, kwargs, seen, written, changes, made, result, dependencies, device, view,
            random, part, by_device(seconds), origin or self._origin(_caller()), tuple(state), composite,
        )  # fmt: skip
        self.tasks.append(task)
        self.users.append([])
        self._last.update((id(shared), index) for shared in state)
        for dependency in dependencies:
            self.users[dependency.task].append(index)
        self.names.setdefault(label, task)
        return result

    def _origin(self, where: tuple[str, int]) -> Origin:
        found = self._places.get(where)
        if found is None:
            found = self._places[where] = Origin(where)
        return found

    def _state(
        self,
        fn: Any,
        args: Iterable[Any],
        composite: Composite | None,
        random: bool,
        device: str | None,
    ) -> tuple[list[Any], bool]:
        """Return the shared state of a task, and whether it draws random numbers."""
        if composite is not None:
            shared = {
                id(item): item
                for part in composite.tasks
                for item in part.shared
                if not isinstance(item, _Generator)
            }
            state = list(shared.values())
            random = any(part.random for part in composite.tasks)
        else:
            state = effects.shared_state(fn, (item for item in args if not isinstance(item, Value)))
            random = random or any(map(effects.draws, state))
        own = self._generators.get(device) if device is not None else None
        drawn = [self._drawn[own]] if own is not None else list(self._drawn.values())
        return state + (drawn if random else []), random

    def _parts(
        self,
        base: Value | None,
        look: str | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        names: Sequence[str],
    ) -> list[Part]:
        """Return the part of memory of each result; that memory is ``base``'s if it is given."""
        if base is None:
            return [self._looks.root() for _ in names]
        if look is None or not args or args[0] is not base:
            return [self._looks.opaque(base.part) for _ in names]
        whole = self._looks.view(base.part, look, args[1:], kwargs)
        return [whole] if len(names) == 1 else self._looks.pieces(whole, look, len(names))

    def _depend(
        self,
        index: int,
        reads: Sequence[Value],
        writes: Sequence[Value],
        part: tuple[int, Part] | None,
        earlier: Iterable[int],
    ) -> tuple[Dependency, ...]:
        """Register the accesses of task ``index``; return its dependencies, one per task.

        Of several kinds of dependency on the same task, the strongest is kept.
        """
        found: dict[int, Kind] = {}
        disturbed: list[int] = []
        written = {value.index for value in writes}
        for value in reads:
            self._used.add(value.index)
            touched = part[1] if part is not None and part[0] == value.index else value.part
            accesses = self._accesses.get(value.root)
            if accesses is None:
                accesses = self._accesses[value.root] = Accesses()
            if value.index in written:
                writers, readers = accesses.write(touched, index)
                disturbed += readers
            else:
                writers = accesses.read(touched, index)
            if value.producer is not None:
                found[value.producer] = "data"
            for writer in writers:
                found[writer] = "data"
        for reader in disturbed:
            found.setdefault(reader, "anti")
        for task in earlier:
            if (
                found.get(task) != "data"
            ):  # an anti dependency orders accesses to a block, not the tasks
                found[task] = "order"
        found.pop(index, None)
        return tuple([Dependency(task, kind) for task, kind in found.items()])

    def _change(
        self, index: int, writes: Sequence[Value], part: tuple[int, Part] | None
    ) -> tuple[Use, ...]:
        """Advance the versions of all values that see what a task writes; return the old ones."""
        changed: set[int] = set()
        for value in writes:
            touched = value.part
            if part is not None and part[0] == value.index:
                touched = part[1]
                self._portions[value.root] = self._portions.get(value.root, 0) + 1
            members = self._seen.get(value.root)
            changed.update(
                [value.index]
                if members is None
                else chain(*(m for _, m in members.overlapping(touched)))
            )
        uses = tuple([self._now[member] for member in sorted(changed)])
        for member, version in uses:
            left = self._now[member] = Use(member, version + 1)
            self._left[left] = index
        return uses

    def _result_names(
        self, label: str, outputs: Any, aliases: Value | None, view: bool
    ) -> tuple[Any, Value | None, bool]:
        """Return the names of a task's results, in the shape of ``outputs``, and what they alias.

        The last item is whether they are views. A task without results shares no memory.
        """
        names = self._named(label, outputs)
        return (names, aliases, view) if any(True for _ in flatten(names)) else (names, None, False)

    def _named(self, label: str, outputs: Any) -> Any:
        if outputs is None:
            return label
        if isinstance(outputs, int) and not isinstance(outputs, bool) and outputs >= 0:
            outputs = tuple(f"{label}.{i}" for i in range(outputs))
        taken: set[str] = set()
        for leaf in flatten(outputs):
            if not isinstance(leaf, str):
                raise GraphError(
                    f"outputs= of task {label!r} must be a number or a tree of names, got {leaf!r} in it"
                )
            if self._claim(leaf) in taken:
                raise GraphError(
                    f"outputs= of task {label!r} has the name {leaf!r} twice; names are unique"
                )
            taken.add(leaf)
        return outputs

    def _new_value(
        self,
        name: str,
        producer: int | None = None,
        *,
        root: Value | None = None,
        part: Part | None = None,
        home: str | None = None,
        tensor: Any = None,
        nbytes: int | None = None,
    ) -> Value:
        index = len(self.values)
        part = part or self._looks.root()
        value = Value(
            self,
            index,
            name,
            producer,
            index if root is None else root.root,
            part,
            home,
            tensor,
            nbytes,
        )
        self.values.append(value)
        self._now.append(Use(index, 0))
        self.names[name] = value
        if root is not None:
            self._views.setdefault(root.root, [root.root]).append(index)
            members = self._seen.setdefault(root.root, Index())
            members.setdefault(self.values[root.root].part, [root.root])
            members.setdefault(part, []).append(index)
        return value

    def _as_argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return self._own(leaf)
        return self.constant(leaf) if hasattr(leaf, "data_ptr") else leaf

    def _as_value(self, item: Any) -> Value:
        value = self._as_argument(item)
        if not isinstance(value, Value):
            raise GraphError(f"cannot write {item!r} in place: it is no tensor")
        return value

    def _check_moves(self, name: str, value: Value) -> None:
        """Raise GraphError where a method would give a value other memory."""
        if name == "set_" or value.part.bounds or len(self.members(value.index)) > 1:
            raise GraphError(
                f"{name} gives value {value.name!r} other memory, which other values may see; make a new value instead"
            )

    def _own(self, value: Value) -> Value:
        if value.graph is not self:
            raise GraphError(
                f"value {value.name!r} belongs to graph {value.graph.name!r}, not to {self.name!r}; "
                f"make it an input of this graph"
            )
        return value

    def _task_of(self, item: Any) -> int:
        if isinstance(item, str):
            item = self.task(item)
        if (
            isinstance(item, Task)
            and item.index < len(self.tasks)
            and self.tasks[item.index] is item
        ):
            return item.index
        if isinstance(item, Value) and self._own(item).producer is not None:
            return item.producer  # type: ignore[return-value]
        raise GraphError(
            f"after= needs tasks, or values that tasks of this graph made, got {item!r}"
        )

    def _check_grows(self) -> None:
        if not self._grows:
            raise GraphError(
                f"this is a schedule's own copy of graph {self.name!r}; add to the graph that you made"
            )

    def _claim(self, name: str) -> str:
        self._check_grows()
        if not is_name(name):
            raise GraphError(f"a name must be a string without spaces and '@', got {name!r}")
        if name in self.names:
            raise GraphError(
                f"name {name!r} is already taken in graph {self.name!r}; choose another, or leave it out"
            )
        return name

    def fresh(self, base: str) -> str:
        """Return an unused name that begins with ``base``."""
        self._check_grows()
        count = self._counts.get(base, 0)
        name = f"{base}_{count}" if count else base
        while name in self.names:
            count += 1
            name = f"{base}_{count}"
        self._counts[base] = count + 1
        return name


# nesting of arguments: far below Python's recursion limit, since a run recurses from a deeper stack
_DEEPEST = 100


class _Generator(NamedTuple):
    """Stands for a random number generator in shared state: that of a device, or any (None)."""

    name: str | None


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


def check_device(device: Any) -> str:
    """Return a device's name. Raises GraphError if it is not valid."""
    name = device_name(device)
    if not is_device(name):
        raise GraphError(f"a device is a name such as 'cpu' or 'cuda:0', got {device!r}")
    return name


def by_pattern(
    given: Mapping[str, Any],
    names: Collection[str],
    argument: str,
    what: str,
    shown: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return by name what is given by names or by shell patterns.

    A name precedes patterns, and earlier patterns precede later ones. Raises GraphError for a name
    or pattern without a match.

    >>> by_pattern({"w*": 0, "w2": 1}, ["x", "w1", "w2"], "inputs", "input")
    {'w2': 1, 'w1': 0}
    """
    found = {name: item for name, item in given.items() if name in names}
    for pattern, item in given.items():
        fits = (
            []
            if pattern in names
            else fnmatch.filter(names, pattern)
            if isinstance(pattern, str)
            else []
        )
        if not fits and pattern not in names:
            known = listed(names if shown is None else shown)
            raise GraphError(
                f"{argument}= names {pattern!r}, which is no {what}; {what}s are {known}"
            )
        for name in fits:
            found.setdefault(name, item)
    return found


def check_costs(label: str, seconds: Any, nbytes: Any) -> None:
    """Raise GraphError unless the given costs of a task are valid."""
    for number in no_seconds(0 if seconds is None else seconds):
        raise GraphError(
            f"seconds of task {label!r} must be numbers, 0 or more, got {shown(number)}"
        )
    if nbytes is not None and not is_number(nbytes):
        raise GraphError(
            f"nbytes of task {label!r} must be a number, 0 or more, and finite, got {shown(nbytes)}"
        )


def _no_argument(label: str, value: Any, reads: Sequence[Value]) -> GraphError:
    return GraphError(
        f"task {label!r} declares {value!r} as written or aliased, which is not among its arguments "
        f"{listed(read.name for read in reads)}"
    )


def _called(task: Task) -> Iterator[str]:
    """Yield the names that a pattern is matched with: the task's, its module's, and its parts'."""
    yield from filter(None, (task.name, task.origin.module))
    for part in task.parts:
        yield from _called(part)


def _is_there(items: Sequence[Any], base: Value, part: Part) -> bool:
    """Whether an item to be written to a part already is that part."""
    return any(
        isinstance(item, Value) and item.root == base.root and item.part.look == part.look >= 0
        for item in items
    )


def _as_tuple(what: str, item: Any) -> tuple[Any, ...]:
    if isinstance(item, (Task, Value, str)):
        return (item,)
    if not isinstance(item, Iterable):
        raise GraphError(f"{what}= needs one item or a list of them, got {item!r}")
    return tuple(item)


def _caller() -> tuple[str, int]:
    """Find the user's line: the nearest frame outside this package (but for the demo) and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if (
            module.partition(".")[0] not in ("autosched", "torch", "contextlib")
            or module == "autosched.demo"
        ):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def no_grad() -> contextlib.AbstractContextManager[Any]:
    """Disable autograd if torch is imported."""
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch is not None else contextlib.nullcontext()
