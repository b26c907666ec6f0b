"""Errors for code that cannot be captured.

Each names the line of the user's code, the reason, and an alternative. Knows the errors that torch
raises in tracing, and no graph.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autosched._lib.tree import flatten
from autosched.errors import CaptureError
from autosched.frontends.origins import traced_at
from autosched.frontends.state import State

__all__ = [
    "check_modes",
    "check_nodes",
    "check_state",
    "check_tensors",
    "definition_of",
    "failure_message",
    "reason_of",
]

# Compared by full path, because a user's files may be in a folder of the same name.
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LIBRARIES = (_TORCH, f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__)

_NO_DATA = (
    "Python reads elements of a tensor, and a graph has no data: keep them in tensors "
    "(torch.where, index_select), return them, or do this outside of the step"
)
_DEVICES = "put the model and its inputs on one device, with data; the schedule places the tasks"
_ONE_TASK = "or call it, with its backward(), in one task of your own, by Graph.add"
_OWN_TASKS = "pass such tensors to tasks of your own, by Graph.add"

# Advice by words in torch's message, in the name of its error, or in the names of its files in the
# traceback. The first that is found counts.
_ADVICE = {
    "optim/lbfgs.py": "LBFGS reads the elements of tensors; use another optimizer",
    "grad_scaler.py": "GradScaler tests whether gradients are finite; use bfloat16 without it",
    "swa_utils.py": "AveragedModel reads a tensor, its counter; update it outside of the step",
    "clip_grad.py": "leave out error_if_nonfinite",
    "data-dependent": _NO_DATA,
    "DataDependent": _NO_DATA,
    "DynamicOutputShape": _NO_DATA,
    "data is not allocated yet": _NO_DATA,
    "got SymInt": _NO_DATA,
    "SymFloat": _NO_DATA,
    "FakeTensor.__format__": _NO_DATA,
    ".numpy() is not supported": "NumPy cannot be captured; use torch's functions instead",
    "FakeTensorDeviceMismatch": _DEVICES,
    "FakeTensor Device Propagation": _DEVICES,  # before torch 2.12 it has no name of its own
    "dynamo-optimized": "leave out torch.compile; autosched compiles the function itself",
    "UnsupportedFakeTensor": _OWN_TASKS,
    "UnsupportedOperator": _OWN_TASKS,
    "convert all Tensors to FakeTensors": "pass tensors as arguments, or hold them in a module",
}


def definition_of(fn: Any) -> tuple[str, int]:
    """Return the file and line of a function or module's class."""
    code = inspect.unwrap(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    code = getattr(getattr(code, "__func__", code), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else ("<unknown>", 0)


def reason_of(error: Exception) -> str:
    """Return the first line of an error, with its class."""
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, CaptureError) else f"{type(error).__name__}: {first}"


def failure_message(fn: Any, error: Exception) -> str:
    """Return why a function cannot be captured, its line, and an alternative."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    if users:
        where = f"{users[-1].filename}:{users[-1].lineno}: {users[-1].line}"
    else:
        where = "{}:{}".format(*definition_of(fn))
    name = getattr(fn, "__qualname__", type(fn).__name__)
    message = f"{name!r} cannot be captured: {reason_of(error)}\n    at {where}"
    if isinstance(error, CaptureError):
        return message
    names = (frame.filename for frame in frames if frame.filename.startswith(_TORCH))
    clues = " ".join((f"{type(error).__name__}: {error}", *(Path(n).as_posix() for n in names)))
    advice = next((advice for word, advice in _ADVICE.items() if word in clues), None)
    return message if advice is None else f"{message}\n    {advice}"


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CaptureError for a tensor that is not a dense strided one."""
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise CaptureError(f"{name!r} has no shape yet; call the lazy module once before")
        kind: Any = tensor.layout if not tensor.is_quantized else "quantized"
        kind = "nested" if tensor.is_nested else kind
        if type(tensor).__name__ == "DTensor":
            raise CaptureError(
                f"{name!r} is a DTensor, of which a graph has the local part only; pass "
                "to_local(), and call DTensor.from_local in the step"
            )
        if kind is not torch.strided:
            raise CaptureError(
                f"{name!r} is a {kind} tensor, and only dense ones can be captured; convert it"
            )


def check_modes() -> None:
    """Raise CaptureError if a user's mode is active outside of tasks."""
    function_modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    for mode in (*function_modes, *_get_current_dispatch_mode_stack()):
        if type(mode).__module__.partition(".")[0] not in ("torch", "autosched"):
            raise CaptureError(
                f"a {type(mode).__name__} is active around the call, and tasks run later, without "
                "it; enter it within the function, so that its effect is captured"
            )


def check_state(state: State) -> None:
    """Raise CaptureError for modules and parameters that tracing cannot handle."""
    for module in state.modules.values():
        kinds = {kind for part in module.modules() for kind in type(part).__mro__}
        if DistributedDataParallel in kinds:
            raise CaptureError(
                "DistributedDataParallel communicates with other processes in backward; capture "
                "its .module, and reduce its gradients by torch.distributed._functional_collectives"
                f"; {_ONE_TASK}"
            )
        if any(kind.__name__ == "FSDPModule" for kind in kinds):
            raise CaptureError(
                "fully_shard gathers parameters in hooks of modules and of autograd; capture the "
                "module without it, and gather its parameters by "
                f"torch.distributed._functional_collectives; {_ONE_TASK}"
            )
        if torch.jit.ScriptModule in kinds:
            raise CaptureError(
                "torch.jit differentiates by other formulas, so results differ in the last bits; "
                "capture the module from which the ScriptModule was made"
            )
    for name, parameter in state.parameters.items():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"{name!r} has a hook that runs after its gradient is accumulated, and captures do "
                "not run it; call its function in the step, after backward()"
            )


def check_nodes(nodes: Iterable[torch.fx.Node]) -> None:
    """Raise CaptureError for operators whose results are not dense tensors."""
    for node in nodes:
        results = flatten(node.meta.get("val")) if node.op == "call_function" else ()
        for item in results:
            if isinstance(item, torch.Tensor) and (
                item.is_nested or item.layout is not torch.strided
            ):
                raise CaptureError(
                    f"{node.target} returns a tensor of layout {item.layout}, and only dense ones "
                    f"can be captured; pass it to a task of your own, by Graph.add{traced_at(node)}"
                )
