"""Define tasks: a call, its arguments and its dependencies.

A task knows nothing of the graph that contains it.

Random number generators are shared state of the tasks that draw from them, like a module. So tasks
that draw random numbers keep their serial order, and draw the same numbers on every device and
under every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autosched._lib.tree import match
from autosched.graph.parts import Part

if TYPE_CHECKING:
    from autosched.graph.composite import Composite

__all__ = ["HOST", "Dependency", "Followed", "Here", "Kind", "Origin", "Seconds", "Task", "Use"]

HOST = "host"  # in a constraint: the machine's host, whatever its name
Kind = Literal["data", "anti", "order"]
Seconds = float | Mapping[str, float]


class Dependency(NamedTuple):
    """``task`` (its index) must come first: data (it left what is read), anti (it reads what is written), or order.

    An in-place write reads what it changes, so a write after a write is a data dependency too.
    """

    task: int
    kind: Kind


class Use(NamedTuple):
    """A value (its index) in one of its versions."""

    value: int
    version: int


class Followed(NamedTuple):
    """What autograd followed in a step that was captured, where the inputs ``given`` required grad.

    ``outputs`` required grad then; ``written`` are the inputs whose history a write in place changed.
    """

    given: frozenset[str]
    outputs: frozenset[str]
    written: tuple[str, ...]


class Origin(NamedTuple):
    """Where a task comes from: the user's file and line, the module's path, and forward, backward or optimizer.

    ``call`` tells calls of one module apart, or those of the function ``whole``, if that was marked to stay whole.
    """

    where: tuple[str, int]
    module: str = ""
    phase: str = ""
    call: int = 0
    whole: str = ""


@dataclass(frozen=True, slots=True)
class Here:
    """Stands among the arguments of a task for the device on which it runs.

    So what makes tensors, such as ``torch.zeros``, makes them where its task is placed: a task on a
    GPU that makes some without ``device=`` has them on the CPU, where they do not mix with its
    arguments. A function of yours gets a
    ``torch.device``; with a tensor among its arguments, ``device=x.device`` does as well. ``usual``, such as ``"cpu"``,
    is what it gets in a serial run.

    >>> import autosched as asc, torch
    >>> graph = asc.Graph()
    >>> graph.output(zeros=graph.add(torch.zeros, 2, device=asc.Here("cpu")))
    >>> graph.run_serial()
    {'zeros': tensor([0., 0.])}
    """

    usual: Any


@dataclass(frozen=True, slots=True)
class Task:
    """A call and what it depends on.

    ``reads`` are the values it sees, in the version it sees; ``writes`` those of them that it changes in place;
    ``changes`` those, and what else sees the memory that it writes: it leaves ``version + 1`` of each. ``outputs`` is
    what its result becomes.

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
    device: str | None  # the constraint: where it must run
    view: bool  # costs nothing and lives where its argument lives
    random: bool  # draws random numbers
    part: (
        tuple[int, Part] | None
    )  # an argument (a value) of which it touches only a part, where that is known
    seconds: Seconds | None  # what it costs, where the user knows
    origin: Origin
    shared: tuple[
        Any, ...
    ] = ()  # beside values: modules, optimizers, the generators of random numbers
    composite: Composite | None = None  # what it was merged of

    @property
    def source(self) -> str:
        """Where the user added it, as ``file:line``."""
        return "{}:{}".format(*self.origin.where)

    @property
    def parts(self) -> tuple[Task, ...]:
        """The tasks that it was merged of, which know values of the graph that they came from; none of any other."""
        return self.composite.tasks if self.composite is not None else ()

    def results(self, returned: Any) -> Iterator[tuple[int, Any]]:
        """Yield (value index, what it holds) for what ``fn`` returned. Raises ValueError if its shape differs."""
        if not self.outputs:
            return iter(())
        return zip((use.value for use in self.outputs), match(self.result, returned), strict=True)
