"""Errors for code that cannot be captured.

Each says the line of the user's code, the reason, and what to do instead. Knows the errors that
torch raises in tracing, and no graph.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autosched._lib.tree import flatten
from autosched.errors import CaptureError
from autosched.frontends.state import State

__all__ = [
    "check_held",
    "check_modes",
    "check_nodes",
    "check_tensors",
    "defined",
    "drawing_nothing",
    "told",
]

# Compared by full path, because a user's files may be in a folder of the same name.
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LIBRARIES = (_TORCH, f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__)

# Advice by words in torch's message, in the name of its error, or in the names of its files in the
# traceback.
_ADVICE = (
    (("optim/lbfgs.py",), "LBFGS looks at data to find its way; use another optimizer"),
    (("optim/radam.py",), "RAdam looks at its count of steps; pass capturable=True, or use another optimizer"),
    (("grad_scaler.py",), "GradScaler looks whether gradients are finite; use bfloat16, which needs none"),
    (("swa_utils.py",), "AveragedModel counts in a tensor and looks at it; update it outside of the step"),
    (("clip_grad.py",), "leave out error_if_nonfinite"),
    (("data-dependent", "DataDependent", "DynamicOutputShape", "data is not allocated yet", "got SymInt", "SymFloat",
      "FakeTensor.__format__"),
     "Python asks what a tensor holds, and a graph has no data: keep it in tensors (torch.where, index_select), return "
     "it, or do this outside of the step"),
    ((".numpy() is not supported",), "NumPy sees no graph: use torch's functions, or do this outside of the step"),
    (("FakeTensorDeviceMismatch", "FakeTensor Device Propagation"),  # before torch 2.12 it has no name of its own
     "put the model and its inputs on one device, with data; where tasks run is for the schedule to say"),
    (("dynamo-optimized",), "leave out torch.compile: autosched compiles what is in it"),
    (("UnsupportedFakeTensor", "UnsupportedOperator"), "give such tensors to tasks of your own, by Graph.add"),
    (("convert all Tensors to FakeTensors",), "a tensor from outside: pass it as an argument, or hold it in a module"),
)  # fmt: skip


def defined(fn: Any) -> tuple[str, int]:
    """Return the file and line where a function, or a module's class, is defined."""
    code = inspect.unwrap(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    code = getattr(getattr(code, "__func__", code), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else ("<unknown>", 0)


def told(fn: Any, error: Exception) -> str:
    """Return the reason why a function cannot be captured, the line, and what to do instead."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    where = (
        f"{users[-1].filename}:{users[-1].lineno}: {users[-1].line}"
        if users
        else "{}:{}".format(*defined(fn))
    )
    name = getattr(fn, "__qualname__", type(fn).__name__)
    first = str(error).strip().partition("\n")[0]
    said = first if isinstance(error, CaptureError) else f"{type(error).__name__}: {first}"
    files = (
        Path(frame.filename).as_posix() for frame in frames if frame.filename.startswith(_TORCH)
    )
    clues = " ".join((f"{type(error).__name__}: {error}", *files))
    advice = "" if isinstance(error, CaptureError) else _advice(clues)
    return f"{name!r} cannot be captured: {said}\n    at {where}{advice}"


def _advice(clues: str) -> str:
    return next(
        (f"\n    {advice}" for words, advice in _ADVICE if any(word in clues for word in words)), ""
    )


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CaptureError for a tensor that is not a plain strided one."""
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise CaptureError(f"{name!r} has no shape yet; run the lazy module once before")
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
            what = (
                "nested"
                if tensor.is_nested
                else "quantized"
                if tensor.is_quantized
                else tensor.layout
            )
            raise CaptureError(
                f"{name!r} is a tensor that is {what}, and only dense ones are captured; convert it"
            )


def check_modes() -> None:
    """Raise CaptureError if a user's mode is active, which tasks would not see, or would see twice."""
    function_modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    for mode in (*function_modes, *_get_current_dispatch_mode_stack()):
        if type(mode).__module__.partition(".")[0] not in ("torch", "autosched"):
            raise CaptureError(
                f"a {type(mode).__name__} is active around the call, and tasks run later, without it; enter it within "
                f"the function, so that what it does is captured"
            )


def check_held(state: State) -> None:
    """Raise CaptureError for modules and parameters that tracing cannot handle."""
    for module in state.modules.values():
        kinds = {kind for part in module.modules() for kind in type(part).__mro__}
        if DistributedDataParallel in kinds:
            raise CaptureError(
                "DistributedDataParallel talks to other processes in backward; capture its .module"
            )
        if torch.jit.ScriptModule in kinds:
            raise CaptureError(
                "torch.jit differentiates in its own way, with other bits; capture what it was made of"
            )
    for name, parameter in state.parameters.items():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"{name!r} has a hook for when its gradient is there, which captures do not run; do that in the step, "
                f"behind backward()"
            )


def check_nodes(nodes: Iterable[torch.fx.Node]) -> None:
    """Raise CaptureError for operators whose results in a graph would differ from eager ones."""
    for node in nodes:
        if node.op != "call_function":
            continue
        for item in flatten(node.meta.get("val")):
            if isinstance(item, torch.Tensor) and (
                item.is_nested or item.layout is not torch.strided
            ):
                file, line = (node.meta.get("custom") or {}).get("where", ("", 0))
                raise CaptureError(
                    f"{node.target} makes a tensor of layout {item.layout}, and only dense ones are captured; give it "
                    f"to a task of your own, by Graph.add"
                    + (f"\n    at {file}:{line}" if file else "")
                )


@contextlib.contextmanager
def drawing_nothing() -> Iterator[None]:
    """Raise CaptureError if random numbers of Python or NumPy are drawn or seeded meanwhile.

    Restore the generators.
    """
    numbers = sys.modules.get("numpy.random")
    moved = []
    before = random.getstate(), repr(numbers.get_state(legacy=False)) if numbers else ""
    old = numbers.get_state() if numbers else None
    try:
        yield
        moved += ["Python's random"] if random.getstate() != before[0] else []
        moved += (
            ["NumPy's random"]
            if numbers and repr(numbers.get_state(legacy=False)) != before[1]
            else []
        )
        if moved:
            raise CaptureError(
                f"the step draws from, or sets, {moved[0]}, which a graph would do only once; "
                f"do it outside, and pass what it gives as a tensor"
            )
    finally:
        random.setstate(before[0])
        if numbers:
            numbers.set_state(old)
