"""Compiled modules.

A call that autograd does not record runs by the schedule of a capture. Where autograd records,
``torch.compile`` divides the call into forward and backward, which have schedules of their own. A
module whose code calls ``backward()`` is a training step, and always captured.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from autosched._lib.containers import leaves
from autosched.frontends.capture_lock import is_capturing
from autosched.frontends.reachability import Reach
from autosched.runtime.in_flight.future import RunFuture
from autosched.scheduling.schedule import Schedule

if TYPE_CHECKING:
    from autosched.frontends.compiled import CacheInfo, Compiled
    from autosched.frontends.dynamo import TorchBackend

__all__ = ["CompiledModule"]


class CompiledModule(torch.nn.Module):
    """A module that runs by schedules. Made by ``compile``.

    All else is that of the module ``fn``: parameters, buffers, hooks, attributes and methods. So
    ``state_dict()`` has the same keys, and ``to()`` and ``train()`` change ``fn``. Only calls run by
    schedules: another method, such as ``generate``, runs eagerly with all that it calls. To compile
    it, ``compile`` a function that calls it once, such as one step of a generation. Where autograd
    records, the module has a schedule for forward and one for backward; a second derivative raises
    RuntimeError. A copy, and a module that is unpickled, has no schedules yet.

    >>> import autosched as asc
    >>> model = torch.nn.Linear(3, 2)
    >>> run = asc.compile(model, asc.Machine.emulated(gpus=1), backend="host")
    >>> list(run.state_dict()), run.weight is model.weight
    (['weight', 'bias'], True)
    >>> run(torch.ones(4, 3)).sum().backward()
    >>> model.weight.grad.shape
    torch.Size([2, 3])
    """

    fn: torch.nn.Module

    def __init__(self, compiled: Compiled):
        # Not that of torch.nn.Module: all state is that of ``fn``.
        own = copy.copy(compiled)  # with a cache of its own, in copies of this module, too
        own.stacklevel += 1
        vars(self).update(fn=own.fn, _compiled=own, _autograd=_Autograd(own))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module by a schedule, and let autograd record it where it is enabled."""
        if is_capturing() or torch.compiler.is_compiling():
            return self.fn(*args, **kwargs)
        if torch.is_grad_enabled() and self._requires_grad(args, kwargs):
            run = self._autograd.run
            if run is not None:
                return run(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    def _requires_grad(self, *arguments: Any) -> bool:
        """Whether an argument, a parameter or a buffer requires grad."""
        given = (item for _, item in leaves(arguments))
        tensors = chain(self.fn.parameters(), given, self.fn.buffers())
        return any(isinstance(item, torch.Tensor) and item.requires_grad for item in tensors)

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The forward of the module, which is not compiled."""
        return self.fn.forward

    def schedule(self, /, *args: Any, **kwargs: Any) -> Schedule:
        """Return the schedule of calls like this one that autograd does not record."""
        return self._compiled.schedule(*args, **kwargs)

    def submit(self, /, *args: Any, **kwargs: Any) -> RunFuture:
        """Start a call that autograd does not record; return the future of its result."""
        return self._compiled.submit(*args, **kwargs)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all submitted calls have ended."""
        self._compiled.wait(timeout)

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of a call on each item of an iterable: see ``Schedule.map``."""
        return self._compiled.map(batches)

    def schedules(self) -> tuple[Schedule, ...]:
        """Return the schedules of forward and backward that are in use."""
        return self._autograd.schedules()

    @property
    def maxsize(self) -> int:
        """The number of captures that are cached."""
        return self._compiled.maxsize

    def cache_info(self) -> CacheInfo:
        """Return the numbers of cache hits and misses of calls that autograd does not record."""
        return self._compiled.cache_info()

    def close(self) -> None:
        """Close all schedules, and drop them."""
        self._compiled.close()
        self._autograd.close()

    def __enter__(self) -> CompiledModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- all else is that of ``fn``

    _compiled: Compiled
    _autograd: _Autograd

    def __getattr__(self, name: str) -> Any:
        if "fn" not in vars(self):  # while it is made
            raise AttributeError(name)
        return getattr(self.fn, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.fn, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.fn, name)

    def __dir__(self) -> Iterator[str]:
        return iter({*dir(type(self)), *dir(self.fn)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fn!r})"

    def __reduce__(self) -> Any:
        return type(self), (self._compiled,)


def _delegated(name: str) -> Callable[..., Any]:
    """Return a method that calls that of ``fn``, and returns this module instead of ``fn``."""

    @functools.wraps(getattr(torch.nn.Module, name))
    def method(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.fn, name)(*args, **kwargs)
        return self if result is self.fn else result

    return method


for _name, _item in vars(torch.nn.Module).items():
    if callable(_item) and not _name.startswith("__") and _name != "forward":
        setattr(CompiledModule, _name, _delegated(_name))


class _Autograd:
    """A module compiled by ``torch.compile``, when it is needed."""

    def __init__(self, compiled: Compiled):
        self.compiled = compiled
        self.backend: TorchBackend | None = None

    @functools.cached_property
    def run(self) -> Callable[..., Any] | None:
        """The compiled module; None if options, or its code, are none for ``torch.compile``.

        Nor is a machine of several ranks: what forward saves for backward is on one of them.
        """
        options = self.compiled.options
        backend = options.get("backend")
        others = options.keys() - {"machine", "policy", "backend", "check"}
        is_made = backend is not None and not isinstance(backend, str)
        is_cluster = options["machine"] is not None and options["machine"].ranks
        if others or is_made or is_cluster or "backward" in Reach([self.compiled.fn]).mentioned:
            return None
        from autosched.frontends.dynamo import TorchBackend

        self.backend = TorchBackend(costs=self.compiled.costs, fuse=self.compiled.fuse, **options)
        # Its ``forward``: calling torch's wrapper would run hooks of all modules once more.
        wrapper: Any = torch.compile(self.compiled.fn, backend=self.backend)
        run: Callable[..., Any] = wrapper.forward
        return run

    def schedules(self) -> tuple[Schedule, ...]:
        return () if self.backend is None else self.backend.schedules()

    def close(self) -> None:
        """Close all schedules; later calls make new ones."""
        if self.backend is not None:
            self.backend.reset()
