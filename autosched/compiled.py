"""Compiled: a function that is captured and scheduled when it is called, once for each kind of call.

Two calls are of one kind if capture would write down the same: it does not see what tensors hold, but bakes in all
else, such as shapes, plain arguments, training flags and learning rates. So the guard looks at all of that each time.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch

from autosched.costs import Costs
from autosched.errors import ScheduleError
from autosched.frontends.capture import Captured, arguments_of, capture, leaves
from autosched.frontends.state import State
from autosched.machine import Machine
from autosched.policies import Policy
from autosched.schedule import Schedule, schedule

__all__ = ["CacheInfo", "Compiled", "compile"]


class CacheInfo(NamedTuple):
    """How often a call was of a kind that was known, or not; and how many kinds are kept."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


def compile(
    fn: Callable[..., Any],
    machine: Machine | None = None,
    *,
    policy: str | Policy = "auto",
    costs: Costs | None = None,
    maxsize: int = 8,
    **options: Any,
) -> Compiled:
    """Return a function that does what ``fn`` does, on a machine, by a schedule.

    ``fn`` is what ``capture`` takes: a function of tensors, a module, or a training step. The first call of each kind
    captures and schedules; ``maxsize`` kinds are kept, those used last. ``costs`` default to an estimate; ``options``
    are those of ``schedule``. What it returns is cut off from autograd: gradients are taken inside.

    >>> model = torch.nn.Linear(3, 2)
    >>> run = compile(model, Machine.emulated(gpus=1), backend="host")
    >>> with torch.no_grad():
    ...     torch.equal(run(torch.ones(4, 3)), model(torch.ones(4, 3))), run.cache_info()
    (True, CacheInfo(hits=0, misses=1, maxsize=8, currsize=1))
    """
    if maxsize < 1:
        raise ScheduleError(f"maxsize must be 1 or more, got {maxsize!r}")
    return Compiled(fn, functools.partial(schedule, machine=machine, policy=policy, **options), costs, maxsize)


class Compiled:
    """A function with a schedule for each kind of call. Made by ``compile``; ``close()`` it, or let go of it."""

    def __init__(self, fn: Callable[..., Any], make: Callable[..., Schedule], costs: Costs | None, maxsize: int):
        self.fn, self.make, self.costs, self.maxsize = fn, make, costs, maxsize
        self._kept: OrderedDict[Hashable, tuple[Captured, Schedule]] = OrderedDict()
        self._hits = self._misses = 0
        self._guard = threading.RLock()
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Do what the function does. Raises CaptureError for what no graph can say, and what a schedule's call does."""
        with self._guard:
            inputs, (graph, made) = self._of(args, kwargs)
            return graph.finish(made(**inputs))

    def schedule(self, /, *args: Any, **kwargs: Any) -> Schedule:
        """Return the schedule of calls like this one."""
        with self._guard:
            return self._of(args, kwargs)[1][1]

    def _of(self, args: Any, kwargs: Any) -> tuple[dict[str, torch.Tensor], tuple[Captured, Schedule]]:
        """Return the tensors of a call by name, and what calls of its kind are made of."""
        tensors, key = kind_of(self.fn, args, kwargs)
        found = self._kept.get(key)
        if found is not None:
            self._hits += 1
            self._kept.move_to_end(key)
            return tensors, found
        self._misses += 1
        graph = capture(self.fn, *args, **kwargs)
        known = {"costs": self.costs} if self.costs is not None else {"examples": graph.examples}
        found = self._kept[key] = graph, self.make(graph, **known)
        while len(self._kept) > self.maxsize:
            self._kept.popitem(last=False)[1][1].close()
        return tensors, found

    def cache_info(self) -> CacheInfo:
        """Return how often what was kept was of use."""
        return CacheInfo(self._hits, self._misses, self.maxsize, len(self._kept))

    def close(self) -> None:
        """Close all schedules, and forget them."""
        with self._guard:
            while self._kept:
                self._kept.popitem()[1][1].close()

    def __enter__(self) -> Compiled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


# ---- the guard


def kind_of(fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], Hashable]:
    """Return the tensors of a call by name, and what else a capture of it depends on: not on what they hold."""
    state = State.of(fn, [*args, *kwargs.values()])
    tensors = {**state.tensors(), **arguments_of(fn, args, kwargs)}
    first: dict[int, str] = {}
    return tensors, (
        tuple([(name, first.setdefault(id(tensor), name), *_looks(tensor)) for name, tensor in tensors.items()]),
        tuple([(path, _plain(leaf)) for path, leaf in leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor)]),
        tuple(_modules(state)),
        tuple(_groups(state)),
        repr(state.numbers()),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]),
    )


def _looks(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _plain(leaf: Any) -> Hashable:
    """Return a thing that is no tensor as part of a key: numbers by type, too, and what has no value by itself."""
    if isinstance(leaf, (torch.nn.Module, torch.optim.Optimizer)):
        return id(leaf)
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), repr(leaf)
    return type(leaf), leaf


def _modules(state: State) -> Iterator[Hashable]:
    """Yield what the forward of modules may ask for."""
    for key, root in state.modules.items():
        for path, module in root.named_modules():
            own = [
                (name, item)
                for name, item in module.__dict__.items()
                if isinstance(item, (bool, int, float, str, tuple, torch.dtype)) or item is None
            ]
            yield key, path, id(module), tuple(own)


def _groups(state: State) -> Iterator[Hashable]:
    """Yield what the steps of optimizers ask for."""
    for key, optimizer in state.optimizers.items():
        for group in optimizer.param_groups:
            names = tuple([state.names[id(parameter)] for parameter in group["params"]])
            facts = tuple([(name, repr(item)) for name, item in group.items() if name != "params"])
            yield key, id(optimizer), names, facts
