"""Find the module, phase and source line of traced operators.

torch stores them in nodes while it traces, as far as hooks allow. Knows no graph of autosched.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from autosched._lib.logs import users_line
from autosched._lib.replacing import replaced
from autosched._lib.tree import flatten
from autosched.frontends.capture_lock import is_capturing
from autosched.graph.effects import function_name
from autosched.graph.marked import CAPTURE
from autosched.graph.task import Origin


@contextlib.contextmanager
def annotating_origins(
    modules: Mapping[str, torch.nn.Module],
    on_tensor: Callable[[torch.Tensor], None],
    on_result: Callable[[Any], None],
) -> Iterator[None]:
    """Let ``make_fx`` store the origins of what it traces.

    ``modules`` are roots by name; one name may be empty. ``on_tensor`` is called for each tensor
    with data that torch is given, and may raise; ``on_result``, with the results of torch.
    """
    paths = {
        id(part): ".".join(filter(None, (key, path)))
        for key, module in modules.items()
        for path, part in module.named_modules()
    }
    inside: list[contextlib.ExitStack] = []
    count = itertools.count(1)

    def enter(facts: dict[str, Any]) -> None:
        if is_capturing():  # not a module or an optimizer that another thread calls
            inside.append(contextlib.ExitStack())
            inside[-1].enter_context(annotate(facts))

    def leave(*_: Any) -> None:
        if is_capturing():
            inside.pop().close()

    def enter_module(module: torch.nn.Module, _: Any) -> None:
        # Forward also in the closure of an optimizer.
        enter({"module": paths.get(id(module), ""), "call": next(count), "phase": "forward"})

    @contextlib.contextmanager
    def around(fn: Callable[..., Any]) -> Iterator[None]:
        code = getattr(inspect.unwrap(fn), "__code__", None)  # of a builtin there is none
        line = (code.co_filename, code.co_firstlineno) if code is not None else None
        with (
            replaced((CAPTURE, "around", None)),
            annotate({"whole": (function_name(fn), next(count), line)}),
        ):
            yield

    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_node_meta())
        if hasattr(torch.compiler, "_patch_engine_backward"):
            stack.enter_context(torch.compiler._non_strict_tracing_context())
            stack.enter_context(torch.compiler._patch_engine_backward())
        for handle in (
            register_module_forward_pre_hook(enter_module),
            register_module_forward_hook(leave, always_call=True),
            register_optimizer_step_pre_hook(lambda *_: enter({"phase": "optimizer"})),
            register_optimizer_step_post_hook(leave),
        ):
            stack.callback(handle.remove)
        stack.enter_context(replaced((CAPTURE, "around", around)))  # for marked functions
        try:
            with _Lines(on_tensor, on_result):
                yield
        finally:
            while inside:  # an error left some open
                leave()


def origins_of(
    nodes: Iterable[torch.fx.Node], default: tuple[str, int], owner: Mapping[torch.fx.Node, str]
) -> dict[torch.fx.Node, Origin]:
    """Return the origin of each node; for backward, of its forward node.

    An operator that updates one parameter alone belongs to the module of that parameter.
    ``default`` is the line for nodes without annotation, ``owner`` is the parameter that a node
    updates.
    """
    found: dict[torch.fx.Node, Origin] = {}
    forward: dict[int, Origin] = {}
    last = Origin(default)
    for node in nodes:
        custom = node.meta.get("custom") or {}
        number = node.meta.get("seq_nr", -1)
        if node.meta.get("autograd_backward"):
            # The accumulation of a gradient has no number: it follows the node of the gradient.
            last = forward.get(number, last)
            found[node] = last._replace(phase="backward")
        else:
            module = owner[node].rpartition(".")[0] if node in owner else custom.get("module", "")
            name, call, where = custom.get("whole", ("", custom.get("call", 0), None))
            where = where or custom.get("where", default)
            origin = Origin(where, module, custom.get("phase", "forward"), call, name)
            found[node] = origin
            # Later nodes that autograd does not record have its number, too.
            forward.setdefault(number, origin)
    return found


# Most calls that a mode sees ask for metadata: they add no operator, so their line is not needed.
_METADATA = {
    getattr(torch.Tensor, name).__get__
    for name in (
        *("device", "dtype", "grad_fn", "is_leaf", "is_mkldnn", "is_nested", "is_quantized"),
        *("is_sparse", "layout", "ndim", "requires_grad", "shape"),
        *("_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
    )
} | {
    getattr(torch.Tensor, name)
    for name in (
        *("dim", "is_complex", "is_conj", "is_floating_point", "is_inference", "is_neg", "numel"),
        *("size", "storage_offset", "stride", "untyped_storage", "_is_view"),
    )
}


def traced_at(node: torch.fx.Node) -> str:
    """Return the line where a node was traced, for an error message."""
    file, line = (node.meta.get("custom") or {}).get("where", ("", 0))
    return f"\n    at {file}:{line}" if file else ""


class _Lines(TorchFunctionMode):
    """Annotates nodes with the user's line of each call of torch, and its grad mode."""

    def __init__(self, on_tensor: Callable[[torch.Tensor], None], on_result: Callable[[Any], None]):
        super().__init__()
        self.on_tensor = on_tensor
        self.on_result = on_result

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_metadata = fn in _METADATA
        for item in args[:1] if is_metadata else flatten((args, kwargs)):
            has_data = isinstance(item, torch.Tensor) and not isinstance(item, FakeTensor)
            if has_data and not is_functorch_wrapped_tensor(item):
                self.on_tensor(item)
        if is_metadata:
            return fn(*args, **(kwargs or {}))
        with annotate({"where": users_line(), "grad_mode": torch.is_grad_enabled()}):
            result = fn(*args, **(kwargs or {}))
        self.on_result(result)
        return result
