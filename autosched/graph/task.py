"""Define tasks: a call, its arguments and its dependencies.

A task knows nothing of the graph that contains it.

Random number generators are shared state of the tasks that draw from them, like a module. So tasks
that draw random numbers keep their serial order, and draw the same numbers on every device and
under every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

from autosched._lib.allowed import is_storage
from autosched._lib.tree import match
from autosched.graph.regions import Region

HOST = "host"  # in constraints: the machine's host, whatever its name
STORAGE = "storage"  # its first storage device; without one, its host
Kind = Literal["data", "anti", "order"]
Seconds = float | Mapping[str, float]


class Merged(Protocol):
    """What a merged task calls: see ``Composite``."""

    tasks: tuple[Task, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    dead: tuple[tuple[int, ...], ...]
    heres: tuple[Here, ...]

    def __call__(self, *args: Any) -> Any:
        """Call the tasks."""


class Dependency(NamedTuple):
    """A dependency on ``task`` (an index): data, anti or order.

    Data: this task reads what the other wrote or made. Anti: it writes what the other reads. Order:
    it was added with ``after=``, or both share state. An in-place write reads what it changes, so a
    write after a write is a data dependency, too.
    """

    task: int
    kind: Kind


class Use(NamedTuple):
    """A version of a value (its index)."""

    value: int
    version: int


class Followed(NamedTuple):
    """What autograd followed in a captured step in which the inputs ``given`` required grad.

    ``outputs`` required grad then; ``written`` are the inputs whose history an in-place write
    changed.
    """

    given: frozenset[str]
    outputs: frozenset[str]
    written: tuple[str, ...]


class Origin(NamedTuple):
    """The origin of a task: file and line, module path, and forward, backward or optimizer phase.

    ``call`` distinguishes calls of one module, or calls of the function ``whole`` if that was
    marked to become one task.
    """

    where: tuple[str, int]
    module: str = ""
    phase: str = ""
    call: int = 0
    whole: str = ""


@dataclass(frozen=True, slots=True)
class Here:
    """A placeholder among the arguments of a task for the device on which it runs.

    A function that creates tensors, such as ``torch.zeros``, creates them on the device of its task
    if it gets this. A task on a GPU that creates tensors without ``device=`` creates them on the
    CPU, where they cannot be combined with its arguments. The function receives a ``torch.device``.
    A function with a tensor argument can use ``device=x.device`` instead. ``usual``, such as
    ``"cpu"``, is the device in a serial run.

    >>> import autosched as asc, torch
    >>> graph = asc.Graph()
    >>> graph.output(zeros=graph.add(torch.zeros, 2, device=asc.Here("cpu")))
    >>> graph.run_serial()
    {'zeros': tensor([0., 0.])}
    """

    usual: Any


@dataclass(frozen=True, slots=True)
class Task:
    """A call and its dependencies.

    ``name`` is unique in the graph, and ``index`` is the position in ``graph.tasks``. The call is
    ``fn(*args, **kwargs)``. ``device`` is the device to which it is bound, or None; ``seconds`` are
    those that the user gave, or None; ``origin`` says where it was added.

    ``reads`` are the values that it reads, in the version that it sees. ``writes`` are those of
    them that it changes in place. ``changes`` are these and all other values that see the memory
    that it writes; the task leaves ``version + 1`` of each. ``outputs`` are the values of its
    result.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> x = graph.input("x")
    >>> x += 1
    >>> y = x * 2
    >>> graph.task("mul").reads, graph.task("mul").dependencies
    ((Use(value=0, version=1),), (Dependency(task=0, kind='data'),))
    """

    index: int
    name: str
    fn: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    changes: tuple[Use, ...]
    outputs: tuple[Use, ...]
    result: Any  # the shape of what fn returns, with a Value for each leaf
    dependencies: tuple[Dependency, ...]
    device: str | None  # the constraint on its device
    view: bool  # costs nothing, on the device of its argument
    random: bool  # draws random numbers
    region: tuple[int, Region] | None  # an argument (value index), of which it touches only this
    seconds: Seconds | None  # as given by the user
    origin: Origin
    shared: tuple[Any, ...] = ()  # shared state: modules, optimizers, random number generators
    composite: Merged | None = None  # the parts of a merged task

    @property
    def source(self) -> str:
        """The line where the user added it, as ``file:line``."""
        return "{}:{}".format(*self.origin.where)

    @property
    def reads_file(self) -> bool:
        """Whether it reads a tensor from a file: see ``Graph.read``. No other is on storage."""
        return self.device is not None and (self.device == STORAGE or is_storage(self.device))

    @property
    def parts(self) -> tuple[Task, ...]:
        """The tasks from which it was merged, with values of their original graph; else empty."""
        return self.composite.tasks if self.composite is not None else ()

    def with_parts(self) -> Iterator[Task]:
        """Yield this task, its parts, their parts, and so on."""
        yield self
        for part in self.parts:
            yield from part.with_parts()

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of the calls that a merged task consists of, without views; else empty."""
        found = (part.operators or (part.name,) for part in self.parts if not part.view)
        return tuple(chain.from_iterable(found))

    def results(self, returned: Any) -> Iterator[tuple[int, Any]]:
        """Yield (value index, data) for what ``fn`` returned.

        Raises ValueError if its shape differs from ``result``.
        """
        if not self.outputs:
            return iter(())
        return zip((use.value for use in self.outputs), match(self.result, returned), strict=True)
