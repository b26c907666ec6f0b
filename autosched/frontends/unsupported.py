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
from autosched.errors import CaptureError, shown
from autosched.frontends.origins import traced_at
from autosched.frontends.state import State, hooks_of
from autosched.graph.effects import COLLECTIVES
from autosched.graph.graph import Graph
from autosched.scheduling.schedule import Schedule

# Compared by full path, because a user's files may be in a folder of the same name.
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LIBRARIES = (_TORCH, f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__)

_NO_DATA = (
    "Python reads elements of a tensor, and a graph has no data: keep them in tensors "
    "(torch.where, index_select), return them, or do this outside of the step"
)
_NO_SHAPE = (
    "the shape of a result depends on elements of a tensor, and a graph has no data: keep the shape "
    "(torch.where instead of a mask as an index), or do this outside of the step"
)
_OUTSIDE = "use it outside of the step, and pass its results as tensors"
_DEVICES = "put the model and its inputs on one device, with data; the schedule places the tasks"
_SCALER = "GradScaler tests whether gradients are finite; use bfloat16 without it"
_ONE_TASK = "or call it, with its backward(), in one task of your own, by Graph.add"
_OWN_TASKS = "pass such tensors to tasks of your own, by Graph.add"
# Those of tensors and parameters; most objects have none.
_METHODS = (
    *(torch.Tensor.__torch_function__.__func__, torch.nn.Parameter.__torch_function__),  # type: ignore[attr-defined]
    *(torch.Tensor.__torch_dispatch__, None),
)

# The module of the hooks of ``register_multi_grad_hook``.
_MULTI = torch.autograd.graph.__name__

_BY_ITSELF = (
    " reads the elements of tensors; call its step() after the function, or use another optimizer"
)

# Advice by words in torch's message, in the name of its error, or in the names of its files in the
# traceback. The first that is found counts.
_ADVICE = {
    "optim/lbfgs.py": "LBFGS" + _BY_ITSELF,
    "optim/asgd.py": "ASGD" + _BY_ITSELF,
    "optim/_adafactor.py": "Adafactor" + _BY_ITSELF,
    "distributions/von_mises.py": "VonMises draws until all numbers are accepted; " + _OUTSIDE,
    "distributions/wishart.py": "Wishart reads its degrees of freedom; " + _OUTSIDE,
    "distributions/distribution.py": "leave out validate_args=True, which reads elements",
    "grad_scaler.py": _SCALER,
    "swa_utils.py": "AveragedModel reads a tensor, its counter; update it outside of the step",
    "clip_grad.py": "leave out error_if_nonfinite",
    "_nested_tensor_from_mask": "create TransformerEncoder with enable_nested_tensor=False: otherwise it "
    "reads the padding mask",
    "data-dependent": _NO_DATA,
    "DataDependent": _NO_DATA,
    "_ctc_loss": "CTCLoss looks at lengths to choose the shapes of what it keeps for its backward; "
    + _OUTSIDE,
    "DynamicOutputShape": _NO_SHAPE,
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


def refusal(what: str, advice: str) -> CaptureError:
    """Return the error for an object, with other advice if torch's GradScaler has it."""
    return CaptureError(f"{what}; {_SCALER if ' of a GradScaler ' in what else advice}")


def check_function(fn: Any, who: str, error: type[Exception]) -> None:
    """Raise an error for what is no function of tensors. ``who`` takes it."""
    hint = ""
    if isinstance(fn, Graph):
        hint = "; autosched.schedule(graph, machine) takes a graph"
    elif type(fn).__name__ == "ExportedProgram":
        hint = "; pass its module()"
    if not callable(fn) or hint or isinstance(fn, Schedule):
        kinds = "a function of tensors, a module or a training step"
        raise error(f"{who} takes {kinds}, got {shown(fn)}{hint}")


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CaptureError for a tensor that is not dense, or has hooks that captures do not run."""
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
        hooks, after = hooks_of(tensor)
        what = "after its gradient is accumulated" if after else "when several gradients are there"
        if after or _MULTI in [getattr(hook, "__module__", None) for hook in hooks]:
            raise CaptureError(
                f"{name!r} has a hook that runs {what}, and captures do not run it; call its "
                "function in the step, after backward()"
            )
        _check_methods(repr(name), tensor)


def check_others(arguments: Any) -> None:
    """Raise CaptureError for arguments that are no tensors, and change what torch does."""
    for item in flatten(arguments):
        if hasattr(type(item), "__torch_function__") and not isinstance(item, torch.Tensor):
            _check_methods("an argument", item)


def _check_methods(name: str, item: Any) -> None:
    """Raise CaptureError if torch calls methods of an object's class, which tasks would not."""
    kind = type(item)
    for method in ("__torch_function__", "__torch_dispatch__"):
        found = getattr(kind, method, None)
        if getattr(found, "__func__", found) not in _METHODS:
            raise CaptureError(
                f"{name} is a {kind.__name__}, which defines {method}, and tasks do not call it; "
                "pass a plain tensor, as as_subclass(torch.Tensor) returns, or "
                f"{_OWN_TASKS}"
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
    """Raise CaptureError for modules that tracing cannot handle."""
    for module in state.modules.values():
        kinds = {kind for part in module.modules() for kind in type(part).__mro__}
        if DistributedDataParallel in kinds:
            raise CaptureError(
                "DistributedDataParallel communicates with other processes in backward; train its "
                f".module by asc.parallel.data_parallel on Machine.cluster(), {_ONE_TASK}"
            )
        if any(kind.__name__ == "FSDPModule" for kind in kinds):
            raise CaptureError(
                "fully_shard gathers parameters in hooks of modules and of autograd; capture the "
                f"module without it, {_ONE_TASK}"
            )
        if torch.jit.ScriptModule in kinds:
            raise CaptureError(
                "torch.jit differentiates by other formulas, so results differ in the last bits; "
                "capture the module from which the ScriptModule was made"
            )


def check_collective(node: torch.fx.Node) -> None:
    """Raise CaptureError for a collective of torch.distributed."""
    if getattr(node.target, "namespace", "") in ("c10d", *COLLECTIVES):
        raise CaptureError(
            f"{node.target} is a collective of torch.distributed, which each process calls for itself; "
            "call it in a task of your own, by Graph.add, or train by asc.parallel.data_parallel on "
            f"Machine.cluster(){traced_at(node)}"
        )


def check_nodes(nodes: Iterable[torch.fx.Node]) -> None:
    """Raise CaptureError for collectives, and operators whose results are not dense tensors."""
    for node in nodes:
        check_collective(node)
        results = flatten(node.meta.get("val")) if node.op == "call_function" else ()
        for item in results:
            if isinstance(item, torch.Tensor) and (
                item.is_nested or item.layout is not torch.strided
            ):
                raise CaptureError(
                    f"{node.target} returns a tensor of layout {item.layout}, and only dense ones "
                    f"can be captured; pass it to a task of your own, by Graph.add{traced_at(node)}"
                )
