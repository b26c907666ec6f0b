"""Kernels that torch does not know: those of Triton, and functions of CUDA extensions.

They are not run on simulated GPUs. A declaration says what a kernel writes; it reads what else it is
given. Custom operators need none: their schemas say it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from autosched.errors import UsageError, listed
from autosched.simulated_gpus.hardware import hardware
from autosched.simulated_gpus.tensors import asks_for_shapes, block_of


class _Declared(NamedTuple):
    kernel: Any
    writes: tuple[str | int, ...] | None
    instead: Callable[..., Any] | None


_declared: dict[int, _Declared] = {}


def declare(
    kernel: Any,
    *,
    writes: str | int | Iterable[str | int] = (),
    instead: Callable[..., Any] | None = None,
) -> None:
    """Say what a kernel of Triton, or a function of a CUDA extension, does on simulated GPUs.

    It is not run there. It writes the tensors that ``writes`` names, by parameters or positions, and
    reads the others among its arguments. Or ``instead`` is called with the same arguments: a
    function that uses torch, for kernels that return tensors, and for numbers. A function of an
    extension is found where modules have it as an attribute.

    Raises UsageError for names that are no parameters of the kernel.

    >>> def add_kernel(x_ptr, y_ptr, out_ptr, n):
    ...     '''Launch something.'''
    >>> declare(add_kernel, writes="out_ptr")
    >>> declare(add_kernel, writes="output")
    Traceback (most recent call last):
    autosched.errors.UsageError: add_kernel has no parameter 'output'; it has 'x_ptr', 'y_ptr', 'out_ptr', 'n'
    """
    written = (writes,) if isinstance(writes, (str, int)) else tuple(writes)
    if written and instead is not None:
        raise UsageError(f"{_name(kernel)}: declare what it writes, or what is called instead")
    known = _parameters(kernel)
    for each in written:
        if isinstance(each, str) and each not in known:
            has = f"it has {listed(known)}" if known else "it tells none: give positions, from 0"
            raise UsageError(f"{_name(kernel)} has no parameter {each!r}; {has}")
    _declared[id(kernel)] = _Declared(kernel, written, instead)


def attributes() -> Iterator[tuple[Any, str, Any]]:
    """Yield what is set while GPUs are simulated, as an object, a name and a value."""
    owners = [type(each.kernel) for each in _declared.values() if _is_launched(each.kernel)]
    if importlib.util.find_spec("triton") is not None:
        owners.append(importlib.import_module("triton.runtime.jit").KernelInterface)
    for kind in owners:
        owner = next(base for base in kind.__mro__ if "__getitem__" in vars(base))
        yield owner, "__getitem__", _launching(vars(owner)["__getitem__"])
    for known in [each for each in _declared.values() if not _is_launched(each.kernel)]:
        for module in _modules_with(known.kernel):
            for name, item in list(vars(module).items()):
                if item is known.kernel:
                    yield module, name, partial(_call, known, item)


def _modules_with(item: Any) -> list[ModuleType]:
    """Return the modules that have an attribute, also those that nobody imports by name."""
    holders = [found for found in gc.get_referrers(item) if isinstance(found, dict)]
    found = [module for holder in holders for module in gc.get_referrers(holder)]
    return [each for each in found if isinstance(each, ModuleType)]


def _is_launched(kernel: Any) -> bool:
    """Whether it is launched as Triton's are: ``kernel[grid](...)``."""
    return hasattr(type(kernel), "__getitem__")


def _launching(select: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``kernel[grid]``."""

    def selected(kernel: Any, grid: Any) -> Any:
        known = next(filter(None, (_declared.get(id(each)) for each in _within(kernel))), None)
        return partial(_call, known or _Declared(kernel, None, None), select(kernel, grid))

    return selected


def _call(known: _Declared, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do what a declaration says; call a kernel itself where nothing is on simulated GPUs."""
    if known.instead is not None:
        return known.instead(*args, **kwargs)
    if asks_for_shapes():  # within an operator, whose schema says what it does
        return None
    gpus, name, names = hardware(), _name(known.kernel), _parameters(known.kernel)
    places = [*range(len(args)), *(names.index(n) if n in names else -1 for n in kwargs)]
    given = [
        (place, leaf)
        for place, item in zip(places, (*args, *kwargs.values()), strict=True)
        for leaf in tree_leaves(item)
        if isinstance(leaf, torch.Tensor)
    ]
    blocks = [block for _, leaf in given if (block := block_of(leaf)) is not None]
    if not blocks:
        return own(*args, **kwargs)
    if known.writes is None:
        raise NotImplementedError(
            f"the Triton kernel {name} is not run on simulated GPUs; say what it writes: "
            f"asc.testing.declare({name}, writes=...), of {listed(names)}"
        )
    written = {names.index(each) if isinstance(each, str) else each for each in known.writes}
    for _, leaf in given:
        if block_of(leaf) is None and not gpus.is_pinned(leaf):
            raise RuntimeError(f"{name} cannot access a tensor of {leaf.device}")
    device = gpus.device if _is_launched(known.kernel) else blocks[0].queue.device
    reads = [leaf for place, leaf in given if place not in written]
    writes = [leaf for place, leaf in given if place in written]
    gpus.launch(gpus.current[device], name, lambda: None, blocks, reads, writes)
    if gpus.numbers:
        gpus.observer.noted(f"{name} computed no numbers: declare what is called instead")
    return None


def _within(kernel: Any) -> Iterator[Any]:
    """Yield a kernel, and those that its autotuner, heuristics and the like wrap."""
    while kernel is not None:
        yield kernel
        kernel = getattr(kernel, "fn", None)


def _name(kernel: Any) -> str:
    *_, inner = _within(kernel)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def _parameters(kernel: Any) -> list[str]:
    """Return the names of the parameters of a kernel, if it tells them."""
    *_, inner = _within(kernel)
    try:
        return [*inspect.signature(inner).parameters]
    except (TypeError, ValueError):
        return []
