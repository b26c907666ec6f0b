"""Detect tasks that mix tensors of several emulated devices.

All tensors of an emulated machine are in host memory, so torch itself lets them be combined. While
a task is checked, a torch function mode sees the torch functions that the task calls, and raises
the errors that a GPU would raise. It changes no result.

* The arguments of a task are on the task's device, and results of torch functions are on the device
  of the tensors that they were computed from.
* A tensor created without ``device=`` is on the CPU, and so is the result of ``.cpu()``.
* ``device=x.device`` and ``device=`` with the placeholder ``asc.Here`` name the device that they
  name elsewhere. Any other ``device=`` means this computer's CPU, and might mean a GPU on another
  computer: the device of what is created there, and of parameters and buffers of modules, is
  unknown, and these are never rejected.
* A tensor that a function finds in a closure or a global variable is on the CPU.

The exceptions that torch makes are kept: CPU tensors without dimensions can be combined with
tensors of any device; so can indices and lengths, and ``copy_`` takes tensors of two devices.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.overrides
from torch.overrides import TorchFunctionMode

from autosched._lib.code_names import names_in
from autosched._lib.tree import flatten
from autosched.runtime.backends import Step

__all__ = ["Mixing"]

CPU = "cpu"

# Functions that take tensors of several devices, or that only read shapes and types.
_FREE = frozenset(
    "__deepcopy__ __getitem__ __reduce_ex__ __setitem__ _ctc_loss _index_put_impl_ "
    "_pack_padded_sequence _pad_packed_sequence _to_copy as_tensor asarray backward "
    "broadcast_tensors can_cast copy_ cpu ctc_loss cuda expand_as grad gru index index_put "
    "index_put_ is_same_size lstm new_tensor reshape_as result_type rnn_relu rnn_tanh set_ tensor "
    "tensor_split to type type_as view_as".split()
)
_FROM_DATA = frozenset(("tensor", "as_tensor", "asarray"))
_MOVING = frozenset(("to", "cpu", "type_as"))


class Mixing:
    """The known devices of the tensors of a run, one run at a time."""

    def __init__(self) -> None:
        # Of tensors by identity: the device, and the line that created it.
        self._known: dict[int, tuple[weakref.ref[Any], str, str]] = {}
        # The emulated devices of objects that are passed to tasks, by identity.
        self._devices: dict[int, tuple[torch.device, str | None]] = {}
        self._named: dict[tuple[str, str], torch.device] = {}

    def forget(self) -> None:
        """Begin a run."""
        self._known.clear()

    def named(self, device: str, real: torch.device) -> torch.device:
        """Return an object equal to ``real`` that ``meant`` recognizes as an emulated device."""
        made = self._named.get((device, str(real)))
        if made is None:
            made = self._named.setdefault((device, str(real)), torch.device(str(real)))
            self._devices[id(made)] = (made, device)
        return made

    def watched(
        self, device: str, fn: Any, call: Step, arguments: Callable[[], Sequence[Any]]
    ) -> Step:
        """Return the call of a task on a device, which raises RuntimeError if it mixes devices."""
        device = CPU if device.partition(":")[0] == CPU else device

        def prepare() -> _Mode:
            for leaf in flatten(list(arguments())):
                if isinstance(leaf, torch.Tensor) and self.of(leaf) is None:
                    self.put(leaf, device)
            return _Mode(self, {id(item): item for item in _captured(fn)})

        return partial(_run, prepare, call)

    def of(self, tensor: torch.Tensor) -> str | None:
        """Return the device of a tensor, None if it is unknown."""
        found = self._known.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def put(self, tensor: torch.Tensor, device: str, made: str = "") -> None:
        """Set the device of a tensor."""
        number = id(tensor)
        known = self._known

        def gone(ref: Any) -> None:
            if (found := known.get(number)) is not None and found[0] is ref:
                del known[number]

        known[number] = (weakref.ref(tensor, gone), device, made)

    def source(self, tensor: torch.Tensor) -> str:
        """Return the line that created a tensor, if it is known."""
        found = self._known.get(id(tensor))
        return found[2] if found is not None else ""

    def meant(self, device: Any) -> str | None:
        """Return the emulated device that ``device=`` means, if ``named`` returned it."""
        found = self._devices.get(id(device))
        return None if found is None else found[1]


def _run(prepare: Callable[[], _Mode], call: Step) -> None:
    with _unseen(), prepare():
        call()


_STEP = _run.__code__


class _Mode(TorchFunctionMode):
    """Intercepts the torch functions that one task calls."""

    def __init__(self, mixing: Mixing, outside: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.mixing = mixing
        self.outside = outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            is_emulated = args and self.mixing.meant(args[0]) is not None
            return args[0] if is_emulated else func(*args, **kwargs)
        name = getattr(func, "__name__", "").partition(".")[0]
        tensors = [leaf for leaf in flatten((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        common = self._common(name, tensors)
        result = func(*args, **kwargs)
        if type(result) is torch.device:
            device = self._of(args[0]) if args else None
            return result if device is None else self.mixing.named(device, result)
        if isinstance(result, (torch.Tensor, tuple, list)):
            target = self._target(name, args, kwargs, tensors, common)
            return self._placed(result, name, args, kwargs, target)
        return result

    def _of(self, tensor: Any) -> str | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        found = self.mixing.of(tensor)
        return CPU if found is None and self.outside.get(id(tensor)) is tensor else found

    def _common(self, name: str, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the tensors' device, None if unknown. Raises RuntimeError if there are several."""
        on: dict[str, torch.Tensor] = {}
        unknown = False
        for number, tensor in enumerate(tensors):
            device = self._of(tensor)
            written = number == 0 and name.endswith("_") and not name.endswith("__")
            if device is None:
                unknown = True
            elif device != CPU or written or tensor.dim():
                on.setdefault(device, tensor)
        if len(on) > 1 and name not in _FREE and not name.startswith("_foreach"):
            raise RuntimeError(self._complaint(name, on))
        if on:
            return next(iter(on)) if len(on) == 1 else self._of(tensors[0])
        return None if unknown else CPU

    def _target(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Any],
        common: str | None,
    ) -> str | None:
        """Return the device of a result, None if it is unknown."""
        named = kwargs.get("device")
        if name in ("to", "type_as") and named is None:
            other = args[1] if len(args) > 1 else kwargs.get("other")
            if isinstance(other, torch.Tensor):
                return self._of(other)
            named = other if isinstance(other, (str, torch.device)) else None
        if named is not None:
            return self.mixing.meant(named)
        if name == "cpu" or (name in _FROM_DATA and args and not isinstance(args[0], torch.Tensor)):
            return CPU
        if name in _FREE and tensors:
            return self._of(tensors[0])
        return common

    def _placed(
        self, result: Any, name: str, args: Sequence[Any], kwargs: Any, device: str | None
    ) -> Any:
        """Set the device of a result. What a GPU would have copied becomes a separate tensor."""
        given = {id(leaf) for leaf in flatten((args, kwargs))}
        if name in _MOVING and id(result) in given:
            if device == self._of(result):
                return result
            result = torch.ops.aten.alias.default(result)
        made = _line() if device == CPU else ""
        for leaf in flatten(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given and device is not None:
                self.mixing.put(leaf, device, made)
        return result

    def _complaint(self, name: str, on: Mapping[str, torch.Tensor]) -> str:
        first, second = sorted(on, key=CPU.__eq__)[:2]
        text = (
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{first} and {second}! ({name}{_line()}, emulated as on a GPU)"
        )
        tensor = on[second]
        if id(tensor) in self.outside:
            return f"{text}; the tensor on {second} is none of the task's arguments: make it one"
        if source := self.mixing.source(tensor):
            text += f"; the tensor on {second} was made{source}"
        return f"{text}; make it with device= of another argument's .device, or of asc.Here"


def _captured(fn: Any) -> Iterator[torch.Tensor]:
    """Yield tensors in a function's closures, defaults and globals, except those of modules."""
    while isinstance(fn, partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    found = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            found.append(cell.cell_contents)
    found += [fn.__globals__.get(name) for name in names_in(code).globals]
    yield from (item for item in found if type(item) is torch.Tensor)


def _line() -> str:
    """Return the current line of the task's own code; nothing if the task is an operator."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not _STEP:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("autosched", "torch", "contextlib"):
            return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# Attention modules take their fast path only if ``torch.overrides.has_torch_function`` sees no
# mode, and its results differ in the last bits. So that function must not see this module's mode.
_hiding = threading.Lock()
_hidden: list[Any] = []
_original = torch.overrides.has_torch_function


def _has_torch_function(args: Iterable[Any]) -> bool:
    current: Any = torch.overrides._get_current_function_mode
    if isinstance(current(), _Mode):
        with torch.overrides._pop_mode_temporarily():
            return bool(_original(args))
    return bool(_original(args))


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    token = object()
    try:
        with _hiding:
            _hidden.append(token)
            torch.overrides.has_torch_function = _has_torch_function
        yield
    finally:
        with _hiding:
            _hidden.remove(token)
            if not _hidden:
                torch.overrides.has_torch_function = _original
