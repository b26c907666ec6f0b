"""Use torch's fused attention kernels in captures where eager calls use them.

``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call one fused operator where autograd
does not record. They do not use it while ``make_fx`` traces, or while a TorchFunctionMode is
active, as one is in each capture. Its results differ from those of the other path in the last bits.
``nn.TransformerEncoder`` reads the elements of a padding mask to decide whether it continues with
nested tensors, whose padding is then zero; there its whole call is one node.

Knows no graph.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.nn.modules import activation
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from autosched._lib.replacing import replaced
from autosched.errors import CaptureError

__all__ = ["fast_paths", "is_captured"]

# Modules of the modes that captures enter.
_OF_CAPTURES = ("autosched.", "torch.fx.experimental.proxy_tensor")
_NOT_OVERRIDDEN = (
    Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    torch._C._disabled_torch_function_impl,
)


@contextlib.contextmanager
def fast_paths() -> Iterator[None]:
    """Let modules choose the same path in captures as outside. Other threads are not affected."""
    encode = nn.TransformerEncoder.forward
    has_override = torch.overrides.has_torch_function
    is_traced = activation._is_make_fx_tracing

    def forward(self: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> Tensor:
        if is_captured():
            return _encoded(encode, self, *args, **kwargs)
        return encode(self, *args, **kwargs)

    def has_torch_function(arguments: Any) -> bool:
        return _is_overridden(arguments) if is_captured() else has_override(arguments)

    def is_make_fx_tracing() -> bool:
        return not is_captured() and bool(is_traced())  # type: ignore[no-untyped-call]

    with replaced(
        (nn.TransformerEncoder, "forward", forward),
        (torch.overrides, "has_torch_function", has_torch_function),
        (activation, "_is_make_fx_tracing", is_make_fx_tracing),
    ):
        yield


def is_captured() -> bool:
    """Whether this thread captures: each has its own stack of modes."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode).__module__.startswith("autosched.") for mode in modes)


def _is_overridden(arguments: Any) -> bool:
    """Whether something other than a capture overrides torch functions for these arguments."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(not type(mode).__module__.startswith(_OF_CAPTURES) for mode in modes):
        return True
    own = [type(item).__torch_function__ for item in arguments if isinstance(item, Tensor)]
    return any(getattr(method, "__func__", method) not in _NOT_OVERRIDDEN for method in own)


def _encoded(
    encode: Callable[..., Tensor],
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """Run an encoder, as one node where it uses nested tensors."""
    padding = src_key_padding_mask
    nested = getattr(encoder, "use_nested_tensor", False)
    first = encoder.layers[0]
    if (
        torch.backends.mha.get_fastpath_enabled()
        and nested
        and not first.training
        and src.dim() == 3
        and padding is not None
    ):
        if mask is None and not torch.is_autocast_enabled() and not _is_recorded(first, src):
            return _whole(encoder, src, padding, is_causal)
        encoder.use_nested_tensor = False  # or it would read the padding mask
    try:
        return encode(encoder, src, mask, padding, is_causal)
    finally:
        encoder.use_nested_tensor = nested


def _is_recorded(module: nn.Module, src: Tensor) -> bool:
    """Whether autograd records the operators of a module."""
    tensors = [src, *module.parameters()]
    recorded = torch.is_grad_enabled() and any(item.requires_grad for item in tensors)
    return recorded or _is_overridden(tensors)


def _whole(
    encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor, is_causal: bool | None
) -> Tensor:
    """Add a node that calls an encoder unchanged."""
    if _is_recorded(encoder, src):
        raise CaptureError(
            "TransformerEncoder uses nested tensors if parameters of its first layer require no "
            "gradients, also where others do, which a graph cannot express; create it with "
            "enable_nested_tensor=False"
        )
    tensors = {**dict(encoder.named_parameters()), **dict(encoder.named_buffers())}
    names = tuple(tensors)
    twin = _copy_without_data(encoder)

    def transformer_encoder(src: Tensor, padding: Tensor, *held: Tensor) -> Tensor:
        if isinstance(src, FakeTensor):
            return src.new_empty(src.shape)
        named = dict(zip(names, held, strict=True))
        given = {"src_key_padding_mask": padding, "is_causal": is_causal}
        with torch.no_grad():
            result: Tensor = torch.func.functional_call(twin, named, (src,), given)
            return result.contiguous()

    mode = get_proxy_mode()
    assert mode is not None
    tracer: Any = mode.tracer
    arguments = tuple(tracer.unwrap_proxy(item) for item in (src, padding, *tensors.values()))
    node = tracer.create_proxy("call_function", transformer_encoder, arguments, {})
    with disable_proxy_modes_tracing():
        result = src.new_empty(src.shape)
    return track_tensor_tree(result, node, constant=None, tracer=tracer)


def _copy_without_data(encoder: nn.TransformerEncoder) -> nn.TransformerEncoder:
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            empty: dict[int, Any] = {id(item): torch.empty(0) for item in encoder.buffers()}
            for item in encoder.parameters():
                empty[id(item)] = nn.Parameter(torch.empty(0), False)
            return copy.deepcopy(encoder, empty)
    except Exception as error:
        raise CaptureError(
            "TransformerEncoder reads its padding mask, so its whole call must be one task, but "
            f"the module cannot be copied ({type(error).__name__}: {error}); create it with "
            "enable_nested_tensor=False"
        ) from error
