"""Record what a graph consists of: inputs, constants, tasks and outputs, each validated when added.

A tensor and its views share a storage. A write to one of them creates the next versions of all
values that see the region that changes; other values keep theirs.

``Graph.add``, operators on values and ``with graph.on`` end here, and so do modules that make
graphs: including, merging, conversion from networkx, saved schedules. An error leaves the graph as
it was.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple, Self

from autosched._lib.allowed import (
    by_device,
    device_name,
    is_device,
    is_name,
    is_number,
    is_storage,
    no_seconds,
)
from autosched._lib.logs import users_line
from autosched._lib.tree import flatten, is_deeper, transform
from autosched.errors import GraphError, listed, shown
from autosched.graph import effects
from autosched.graph.regions import Accesses, Frames, Region, RegionIndex, is_basic
from autosched.graph.task import STORAGE, Dependency, Kind, Merged, Origin, Seconds, Task, Use
from autosched.graph.value import Value

# Nesting of arguments: far below Python's recursion limit, since a run recurses from a deeper
# stack.
_DEEPEST = 100

Touched = tuple[int, Region] | None  # an argument (value index), of which a task touches only this


class Generator(NamedTuple):
    """Stands for a random number generator in shared state: that of a device, or any (None)."""

    name: str | None


class Storages:
    """The versions of ``values``, and the accesses to each storage.

    A storage is named by its root: the value (index) that all others in it are views of.
    """

    def __init__(self, values: list[Value]):
        self.values = values
        self.frames = Frames()
        self.current: list[Use] = []  # by value, its present version
        self.writer: dict[Use, int] = {}  # version -> the task whose write created it
        self.used: set[int] = set()  # values that are read or are outputs
        self.reshaped: dict[int, Region] = {}  # by value whose shape was changed, its region since
        self.members: dict[int, list[int]] = {}  # root -> the values in it, for roots with views
        # root -> the number of tasks that write a region of it by an index
        self.partial_writes: dict[int, int] = {}
        self._by_region: dict[int, RegionIndex[list[int]]] = {}  # members, for roots with views
        self._accesses: dict[int, Accesses] = {}  # by root

    def snapshot(self, values: list[Value]) -> Storages:
        """Return a copy for queries, which does not change when more tasks are added."""
        twin = copy.copy(self)
        twin.values = values
        twin.current = self.current.copy()
        twin.writer = self.writer.copy()
        twin.used = self.used.copy()
        twin.reshaped = self.reshaped.copy()
        twin.members = {root: members.copy() for root, members in self.members.items()}
        twin.partial_writes = self.partial_writes.copy()
        return twin

    def add(self, value: Value) -> None:
        """Add a new value, which may be a view."""
        self.values.append(value)
        self.current.append(Use(value.index, 0))
        root = value.root
        if root != value.index:
            self.members.setdefault(root, [root]).append(value.index)
            members = self._by_region.setdefault(root, RegionIndex())
            members.setdefault(self.values[root].region, [root])
            members.setdefault(value.region, []).append(value.index)

    def reshape(self, value: int) -> None:
        """Forget the coordinates of all values that share a storage, one of which is reshaped."""
        for member in self.members.get(self.values[value].root, (value,)):
            self.reshaped[member] = self.frames.reshaped(self.region(self.values[member]))

    def region(self, value: Value) -> Region:
        """Return the region of a value, with the coordinates that it has by now."""
        return self.reshaped.get(value.index, value.region)

    def access(
        self, task: int, reads: Iterable[Value], writes: Iterable[Value], touched: Touched
    ) -> tuple[list[int], list[int]]:
        """Add the accesses of a task.

        Return the tasks that made or wrote what it accesses, and those that read what it writes.
        """
        makers: list[int] = []
        readers: list[int] = []
        written = {value.index for value in writes}
        for value in reads:
            self.used.add(value.index)
            region = value.region
            if touched is not None and touched[0] == value.index:
                region = touched[1]
            accesses = self._accesses.get(value.root)
            if accesses is None:
                accesses = self._accesses[value.root] = Accesses()
            if value.producer is not None:
                makers.append(value.producer)
            if value.index in written:
                writers, disturbed = accesses.write(region, task)
                readers += disturbed
            else:
                writers = accesses.read(region, task)
            makers += writers
        return makers, readers

    def change(self, task: int, writes: Sequence[Value], touched: Touched) -> tuple[Use, ...]:
        """Advance the versions of all values that see what a task writes; return the old ones."""
        changed: set[int] = set()
        for value in writes:
            region = value.region
            if touched is not None and touched[0] == value.index:
                region = touched[1]
                self.partial_writes[value.root] = self.partial_writes.get(value.root, 0) + 1
            members = self._by_region.get(value.root)
            if members is None:
                changed.add(value.index)
            else:
                changed.update(chain.from_iterable(m for _, m in members.overlapping(region)))
        uses = tuple([self.current[index] for index in sorted(changed)])
        for index, version in uses:
            new = self.current[index] = Use(index, version + 1)
            self.writer[new] = task
        return uses


class Recorder:
    """What can be added to a graph, and all that was: see ``Graph``."""

    def __init__(self, name: str = "graph", *, generators: Mapping[str, str] | None = None):
        self.name = name
        self.tasks: list[Task] = []
        self.values: list[Value] = []
        self.sources: list[Value] = []  # inputs and constants
        self.outputs: dict[str, int] = {}  # label -> value
        self.names: dict[str, Value | Task] = {}
        self.users: list[list[int]] = []  # by task, its successors
        self.kept_together: list[tuple[int, ...]] = []  # values: their makers and writers
        self.generators = dict(generators or {})
        self.storages = Storages(self.values)
        self.device: str | None = None  # the constraint on tasks and inputs to be added
        self.grows = True
        self._states = {name: Generator(name) for name in (None, *self.generators.values())}
        self._constants: dict[int, Value] = {}  # by id of the tensor
        self._counts: dict[str, int] = {}  # of names that ``fresh`` has returned, by their base
        self._last: dict[int, int] = {}  # id of shared state -> the last task that used it
        self._origins: dict[tuple[str, int], Origin] = {}  # by file and line

    def snapshot(self, tasks: Iterable[Task] | None = None) -> Self:
        """Return a copy that does not grow, and that stays as it is when this graph grows.

        ``tasks`` may have other functions than those of this graph.
        """
        twin = copy.copy(self)
        twin.tasks = self.tasks.copy() if tasks is None else [*tasks]
        twin.values = self.values.copy()
        twin.sources = self.sources.copy()
        twin.outputs = self.outputs.copy()
        twin.names = self.names.copy()
        twin.users = [list(users) for users in self.users]
        twin.kept_together = self.kept_together.copy()
        twin.storages = self.storages.snapshot(twin.values)
        twin.grows = False
        return twin

    # ---- inputs, constants, outputs

    def input(self, name: str, *, nbytes: int | None = None) -> Value:
        """Declare one input, which a run receives by name; ``nbytes`` is its size, if known.

        It is on the device of ``with graph.on(device)``, else on that of ``schedule(...,
        inputs={name: device})``, else on the host. Raises GraphError for invalid sizes, and for
        names that are taken.
        """
        check_costs(f"input {name!r}", None, nbytes)
        return self._add_value(self.check_free(name), home=self.device, nbytes=nbytes)

    def inputs(self, *names: str) -> tuple[Value, ...]:
        """Declare several inputs."""
        return tuple(self.input(name) for name in names)

    def constant(self, tensor: Any, name: str | None = None) -> Value:
        """Make a tensor a value of this graph; ``add`` does so for each tensor among its arguments.

        Raises GraphError for a name that is taken, and if the tensor has another name already.
        """
        found = self._constants.get(id(tensor))
        if found is None:
            # A CPU tensor is on the host, whatever the name of that.
            device = str(getattr(tensor, "device", "cpu"))
            label = self.fresh("constant") if name is None else self.check_free(name)
            found = self._add_value(label, home=None if device == "cpu" else device, tensor=tensor)
            self._constants[id(tensor)] = found
        if name not in (None, found.name):
            raise GraphError(
                f"the tensor is constant {found.name!r} of graph {self.name!r} already, "
                f"got name {name!r}"
            )
        return found

    def output(self, /, *values: Value, **named: Value) -> None:
        """Declare outputs, which a run returns by name: the last versions of these values.

        Raises GraphError for values of another graph, and for names that are taken or invalid.
        """
        self.check_grows()
        found: dict[str, int] = {}
        for label, item in (*((None, value) for value in values), *named.items()):
            if not isinstance(item, Value):
                hint = "; write graph.output(*values)" if isinstance(item, (list, tuple)) else ""
                hint = "; write graph.output(**values)" if isinstance(item, dict) else hint
                what = f"an output must be a Value of graph {self.name!r}, got {item!r}"
                raise GraphError(what + hint)
            name = item.name if label is None else label
            if not is_name(name):
                raise GraphError(
                    f"the name of an output must be a string without spaces and '@', got {name!r}"
                )
            if name in self.outputs or name in found:
                so_far = listed([*self.outputs, *found])
                raise GraphError(f"output {name!r} is declared twice; outputs so far: {so_far}")
            found[name] = self.check_own(item).index
        self.outputs.update(found)
        self.storages.used.update(found.values())

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
        self.check_grows()
        for item in values:
            if not isinstance(item, Value):
                raise GraphError(
                    f"only Values of graph {self.name!r} can be kept together, got {shown(item)}"
                )
        bond = tuple(dict.fromkeys(self.check_own(value).index for value in values))
        self.kept_together.append(bond)

    # ---- tasks

    def on(self, device: str) -> AbstractContextManager[None]:
        """Constrain the tasks and inputs added inside to ``device``: ``with graph.on("cuda:0"):``.

        Views ignore it: they are on the device of their base. Tasks on ``"host"`` run on the
        machine's first CPU, whatever its name.
        """
        return OnDevice(self, check_runs(device))

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
            fn,
            args,
            kwargs,
            name=name,
            writes=_as_tuple("writes", writes),
            aliases=aliases,
            after=_as_tuple("after", after),
            on=on,
            outputs=outputs,
            random=random,
            seconds=seconds,
            nbytes=nbytes,
        )

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
        **options: Any,
    ) -> Any:
        """Add a task like ``add``, with the same options; arguments are given as two collections.

        Further options: ``by`` is called in place of ``fn``, and must do the same; ``origin`` is
        that of the task.
        """
        for what, tree, most in (
            ("arguments", (args, kwargs), _DEEPEST + 2),
            ("outputs=", outputs, _DEEPEST),
        ):
            if is_deeper(most, tree):
                label = options.get("name") or effects.function_name(fn)
                raise GraphError(f"task {label!r} has {what} nested more than {_DEEPEST} deep")
        if isinstance(on := options.get("on"), str):
            check_runs(on)
        known = effects.effects_of(fn, args, kwargs)
        returns_written = known.in_place and outputs is None
        base = self._as_argument(known.base)
        base = base if isinstance(base, Value) else None
        written = [self._as_value(item) for item in known.writes]
        if known.name in effects.MOVE:
            self._check_moves(known.name, written[0])
        touched: Touched = None
        if known.name in effects.SET_ITEM and len(args) > 1 and is_basic(args[1]):
            of = self.storages.region
            region = self.storages.frames.item(of(written[0]), args[1])
            same = (v for v in args[2:] if isinstance(v, Value) and v.root == written[0].root)
            if any(of(value).frame == region.frame >= 0 for value in same):
                return None  # Python ends x[key] += y with x[key] = x[key]
            touched = written[0].index, region
        result = self.add_task(
            fn,
            tuple(args),
            kwargs,
            writes=writes or written,
            aliases=base if aliases is None else aliases,
            outputs=() if returns_written else outputs,
            random=random or known.random,
            view_function=known.name if base is not None and aliases is None else None,
            view=known.view and base is not None,
            touched=touched,
            **options,
        )
        if known.name in effects.RESHAPE | effects.MOVE:
            self.storages.reshape(written[0].index)  # one of its views may be the same tensor
        if not returns_written:
            return result
        returned = [self._as_value(item) for item in known.returned or known.writes]
        return returned[0] if len(returned) == 1 else tuple(returned)

    def reshape(self, name: str, value: Value) -> None:
        """Apply the effect of a function that changes the shape of a value in place."""
        if name in effects.MOVE:
            self._check_moves(name, value)
        if name in effects.RESHAPE | effects.MOVE:
            self.storages.reshape(value.index)

    def _check_moves(self, name: str, value: Value) -> None:
        """Raise GraphError where a method would give a value other memory."""
        if name == "set_" or value.region.bounds or len(self.members(value.index)) > 1:
            raise GraphError(
                f"{name} gives value {value.name!r} other memory, which other values may see; "
                f"make a new value instead"
            )

    def add_task(
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
        sizes: Iterable[int | None] = (),
        view_function: str | None = None,
        view: bool = False,
        touched: Touched = None,
        regions: Sequence[Region] = (),
        origin: Origin | None = None,
        by: Callable[..., Any] | None = None,
        composite: Merged | None = None,
    ) -> Any:
        """Add a task with effects as given, and return the values of its result.

        The options are those of ``add``, and these: ``sizes`` are the bytes of each result in place
        of ``nbytes``; ``regions`` are those of the results, else they are derived from
        ``view_function``, the name of the torch function. ``touched`` is the region of an argument
        that the task touches. ``by`` is called in place of ``fn``.
        """
        # 1. Validate; an error leaves the graph as it was.
        label = self.fresh(effects.function_name(fn)) if name is None else self.check_free(name)
        args, kwargs = transform(self._as_argument, (args, kwargs))
        leaves = list(flatten((args, kwargs)))
        found = {leaf.index: leaf for leaf in leaves if isinstance(leaf, Value)}
        reads = list(found.values())
        for value in (*writes, *([aliases] if aliases is not None else [])):
            if not isinstance(value, Value) or found.get(value.index) is not value:
                raise _not_an_argument(label, value, reads)
        names = self._result_names(label, outputs)
        count = sum(1 for _ in flatten(names))
        if not count:  # a task without results shares no memory
            aliases = None
            view = False
        check_costs(f"task {label!r}", seconds, nbytes)
        device = None if view else self.device if on is None else check_device(on)
        state, random = self._shared_state(fn, leaves, composite, random, device)
        earlier = [self._task_index(item) for item in after]
        earlier += [self._last[id(item)] for item in state if id(item) in self._last]
        # 2. Find the versions that it reads, and its dependencies.
        index = len(self.tasks)
        current = self.storages.current
        read = tuple([current[value.index] for value in reads])
        written = tuple([current[value.index] for value in writes])
        regions = regions or self._result_regions(aliases, view_function, args, kwargs, count)
        if view and aliases is not None:
            touched = aliases.index, regions[0] if names == label else aliases.region
        makers, readers = self.storages.access(index, reads, writes, touched)
        dependencies = _dependencies(index, makers, readers, earlier)
        # 3. Create the new versions and the values of the result.
        changes = self.storages.change(index, writes, touched) if writes else ()
        facts = zip(regions, sizes or [nbytes] * count, strict=True)

        def add_result(leaf: str) -> Value:
            region, size = next(facts)
            return self._add_value(leaf, index, base=aliases, region=region, nbytes=size)

        result = transform(add_result, names)
        made = tuple([current[leaf.index] for leaf in flatten(result)])
        # 4. Add the task.
        task = Task(
            index,
            label,
            by or fn,
            args,
            kwargs,
            read,
            written,
            changes,
            made,
            result,
            dependencies,
            device,
            view,
            random,
            touched,
            by_device(seconds),
            origin or self._caller_origin(),
            tuple(state),
            composite,
        )
        self.tasks.append(task)
        self.users.append([])
        self._last.update((id(item), index) for item in state)
        for dependency in dependencies:
            self.users[dependency.task].append(index)
        self.names.setdefault(label, task)
        return result

    # ---- names and values

    def check_grows(self) -> None:
        """Raise GraphError if this graph is a schedule's own copy."""
        if not self.grows:
            raise GraphError(
                f"this is a schedule's own copy of graph {self.name!r}; "
                f"add to the graph that you made"
            )

    def check_free(self, name: Any) -> str:
        """Return a name. Raises GraphError if it is invalid or taken."""
        self.check_grows()
        if not is_name(name):
            hint = "; write graph.inputs(*names)" if isinstance(name, (list, tuple)) else ""
            raise GraphError(f"a name must be a string without spaces and '@', got {name!r}{hint}")
        if name in self.names:
            raise GraphError(
                f"name {name!r} is already taken in graph {self.name!r}; "
                f"choose another, or leave it out"
            )
        return name

    def fresh(self, base: str) -> str:
        """Return an unused name that begins with ``base``."""
        self.check_grows()
        count = self._counts.get(base, 0)
        name = f"{base}_{count}" if count else base
        while name in self.names:
            count += 1
            name = f"{base}_{count}"
        self._counts[base] = count + 1
        return name

    def task(self, name: str) -> Task:
        """Return a task by its name. Raises GraphError if there is none."""
        found = self.names.get(name) if isinstance(name, str) else None
        index = found.producer if isinstance(found, Value) else getattr(found, "index", None)
        if index is None or self.tasks[index].name != name:
            raise GraphError(
                f"graph {self.name!r} has no task {name!r}; "
                f"tasks are {listed(t.name for t in self.tasks)}"
            )
        return self.tasks[index]

    def value(self, name: str) -> Value:
        """Return a value by its name. Raises GraphError if there is none."""
        found = self.names.get(name) if isinstance(name, str) else None
        if not isinstance(found, Value):
            raise GraphError(
                f"graph {self.name!r} has no value {name!r}; "
                f"values are {listed(v.name for v in self.values)}"
            )
        return found

    def members(self, value: int) -> Sequence[int]:
        """Return the values (indices) that share memory with this one, the root first."""
        return self.storages.members.get(self.values[value].root) or (value,)

    def check_own(self, value: Value) -> Value:
        """Return a value. Raises GraphError if it belongs to another graph."""
        if value.graph is not self:
            raise GraphError(
                f"value {value.name!r} belongs to graph {value.graph.name!r}, "
                f"not to {self.name!r}; make it an input of this graph"
            )
        return value

    def add_copy(self, value: Value, label: str, nbytes: int) -> Value:
        """Add an input that runs fill with the contents of another one, ``value``."""
        name = self.fresh(f"{value.name}.{label}")
        return self._add_value(name, nbytes=nbytes, copy_of=value.name)

    def add_source(self, like: Value) -> Value:
        """Add an input or constant like that of a graph with the same coordinate frames."""
        found = self._add_value(
            like.name,
            region=like.region,
            home=like.home,
            tensor=like.tensor,
            nbytes=like.nbytes,
            copy_of=like.copy_of,
        )
        if like.tensor is not None:
            self._constants[id(like.tensor)] = found
        return found

    def _add_value(
        self,
        name: str,
        producer: int | None = None,
        *,
        base: Value | None = None,
        region: Region | None = None,
        home: str | None = None,
        tensor: Any = None,
        nbytes: int | None = None,
        copy_of: str | None = None,
    ) -> Value:
        index = len(self.values)
        root = index if base is None else base.root
        region = region or self.storages.frames.root()
        value = Value(self, index, name, producer, root, region, home, tensor, nbytes, copy_of)
        self.storages.add(value)
        if producer is None:
            self.sources.append(value)
        self.names[name] = value
        return value

    def _as_argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return self.check_own(leaf)
        return self.constant(leaf) if hasattr(leaf, "data_ptr") else leaf

    def _as_value(self, item: Any) -> Value:
        value = self._as_argument(item)
        if not isinstance(value, Value):
            raise GraphError(f"cannot write {item!r} in place: it is no tensor")
        return value

    def _result_names(self, label: str, outputs: Any) -> Any:
        """Return the names of a task's results, in the shape of ``outputs``."""
        if outputs is None:
            return label
        if isinstance(outputs, int) and not isinstance(outputs, bool) and outputs >= 0:
            outputs = tuple(f"{label}.{i}" for i in range(outputs))
        taken: set[str] = set()
        for leaf in flatten(outputs):
            if not isinstance(leaf, str):
                raise GraphError(
                    f"outputs= of task {label!r} must be a number or a tree of names, "
                    f"got {leaf!r} in it"
                )
            if self.check_free(leaf) in taken:
                raise GraphError(
                    f"outputs= of task {label!r} has the name {leaf!r} twice; names are unique"
                )
            taken.add(leaf)
        return outputs

    def _result_regions(
        self,
        base: Value | None,
        view_function: str | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        count: int,
    ) -> list[Region]:
        """Return the region of each result, in the storage of ``base`` if it is given."""
        frames = self.storages.frames
        if base is None:
            return [frames.root() for _ in range(count)]
        if view_function is None or not args or args[0] is not base:
            return [frames.opaque(base.region)] * count
        whole = frames.view(self.storages.region(base), view_function, args[1:], kwargs)
        return [whole] if count == 1 else frames.pieces(whole, view_function, count)

    def _shared_state(
        self,
        fn: Any,
        args: Iterable[Any],
        composite: Merged | None,
        random: bool,
        device: str | None,
    ) -> tuple[list[Any], bool]:
        """Return the shared state of a task, and whether it draws random numbers."""
        if composite is not None:
            shared = [item for task in composite.tasks for item in task.shared]
            known = {id(item): item for item in shared if not isinstance(item, Generator)}
            state = list(known.values())
            random = any(task.random for task in composite.tasks)
        else:
            state = effects.shared_state(fn, (item for item in args if not isinstance(item, Value)))
            random = random or any(map(effects.draws, state))
        if not random:
            return state, False
        own = self.generators.get(device) if device is not None else None
        return state + ([*self._states.values()] if own is None else [self._states[own]]), True

    def _task_index(self, item: Any) -> int:
        """Return the task (an index) that an item of ``after=`` means."""
        tasks = self.tasks
        if isinstance(item, str):
            item = self.task(item)
        if isinstance(item, Task) and item.index < len(tasks) and tasks[item.index] is item:
            return item.index
        producer = self.check_own(item).producer if isinstance(item, Value) else None
        if producer is None:
            raise GraphError(
                f"after= needs tasks, or values that tasks of this graph made, got {item!r}"
            )
        return producer

    def _caller_origin(self) -> Origin:
        where = users_line()
        return self._origins.get(where) or self._origins.setdefault(where, Origin(where))


def _as_tuple(what: str, item: Any) -> tuple[Any, ...]:
    if isinstance(item, (Task, Value, str)):
        return (item,)
    if not isinstance(item, Iterable):
        raise GraphError(f"{what}= needs one item or a list of them, got {item!r}")
    return tuple(item)


class OnDevice(contextlib.ContextDecorator):
    """Constrains what a ``with`` statement adds; without one it warns."""

    def __init__(self, recorder: Recorder, device: str):
        self._recorder = recorder
        self._device = device
        self._before: list[str | None] = []
        self._is_used = False

    def __enter__(self) -> None:
        self._is_used = True
        self._before.append(self._recorder.device)
        self._recorder.device = self._device

    def __exit__(self, *_: object) -> None:
        self._recorder.device = self._before.pop()

    def __del__(self) -> None:
        if not self._is_used:
            what = f"graph.on({self._device!r}) constrains nothing without with"
            warnings.warn(f"{what}; write: with graph.on({self._device!r}):", stacklevel=2)


def _dependencies(
    task: int, makers: Iterable[int], readers: Iterable[int], earlier: Iterable[int]
) -> tuple[Dependency, ...]:
    """Return one dependency for each other task: of several kinds, the strongest."""
    found: dict[int, Kind] = dict.fromkeys(makers, "data")
    for reader in readers:
        found.setdefault(reader, "anti")
    for before in earlier:
        # An anti dependency orders accesses to a block, not the tasks.
        if found.get(before) != "data":
            found[before] = "order"
    found.pop(task, None)
    return tuple([Dependency(other, kind) for other, kind in found.items()])


def check_device(device: Any) -> str:
    """Return a device's name. Raises GraphError if it is not valid."""
    name = device_name(device)
    if not is_device(name):
        raise GraphError(f"a device is a name such as 'cpu' or 'cuda:0', got {device!r}")
    return name


def check_runs(device: Any) -> str:
    """Return the name of a device that runs tasks. Raises GraphError for any other."""
    name = check_device(device)
    if name == STORAGE or is_storage(name):
        raise GraphError(f"{name!r} is storage, and runs no tasks; graph.read(..., on=) reads it")
    return name


def check_costs(what: str, seconds: Any, nbytes: Any) -> None:
    """Raise GraphError unless the given costs of a task or an input are valid."""
    for number in no_seconds(0 if seconds is None else seconds):
        raise GraphError(f"seconds of {what} must be numbers, 0 or more, got {shown(number)}")
    if nbytes is not None and not is_number(nbytes):
        raise GraphError(
            f"nbytes of {what} must be a number, 0 or more, and finite, got {shown(nbytes)}"
        )


def _not_an_argument(label: str, value: Any, reads: Sequence[Value]) -> GraphError:
    return GraphError(
        f"task {label!r} declares {value!r} as written or aliased, which is not among its "
        f"arguments {listed(read.name for read in reads)}"
    )
