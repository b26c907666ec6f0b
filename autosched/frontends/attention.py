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

from autosched.errors import CaptureError

__all__ = ["fast_paths"]

_OF_CAPTURES = (
    "autosched.",
    "torch.fx.experimental.proxy_tensor",
)  # modules of the modes that captures enter
_PLAIN = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


@contextlib.contextmanager
def fast_paths() -> Iterator[None]:
    """Let modules choose the same path in captures as outside. Other threads are not affected."""
    encode = nn.TransformerEncoder.forward
    asks = torch.overrides.has_torch_function
    traces = activation._is_make_fx_tracing

    def forward(self: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> Tensor:
        return (
            _encoded(encode, self, *args, **kwargs)
            if _is_captured()
            else encode(self, *args, **kwargs)
        )

    def has_torch_function(arguments: Any) -> bool:
        return _is_overridden(arguments) if _is_captured() else asks(arguments)

    def is_make_fx_tracing() -> bool:
        return False if _is_captured() else bool(traces())  # type: ignore[no-untyped-call]

    nn.TransformerEncoder.forward = forward  # type: ignore[method-assign]
    torch.overrides.has_torch_function = has_torch_function  # type: ignore[assignment]
    activation._is_make_fx_tracing = is_make_fx_tracing
    try:
        yield
    finally:
        nn.TransformerEncoder.forward = encode  # type: ignore[method-assign]
        torch.overrides.has_torch_function = asks
        activation._is_make_fx_tracing = traces


def _is_captured() -> bool:
    """Whether this thread captures; the stack of modes is local to a thread."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode).__module__.startswith("autosched.") for mode in modes)


def _is_overridden(arguments: Any) -> bool:
    """Whether torch functions are overridden for these arguments by something other than a capture."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(not type(mode).__module__.startswith(_OF_CAPTURES) for mode in modes):
        return True
    own = [type(item).__torch_function__ for item in arguments if isinstance(item, Tensor)]
    return any(getattr(method, "__func__", method) not in _PLAIN for method in own)


def _encoded(
    encode: Callable[..., Tensor],
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """Run an encoder, as a single node where it may use nested tensors."""
    nested = getattr(encoder, "use_nested_tensor", False)
    asks = torch.backends.mha.get_fastpath_enabled() and nested and not encoder.layers[0].training
    asks = asks and src.dim() == 3 and src_key_padding_mask is not None
    if (
        asks
        and mask is None
        and not torch.is_autocast_enabled()
        and not _is_recorded(encoder.layers[0], src)
    ):
        assert src_key_padding_mask is not None
        return _whole(encoder, src, src_key_padding_mask, is_causal)
    encoder.use_nested_tensor = nested and not asks  # for no mask does it use them
    try:
        return encode(encoder, src, mask, src_key_padding_mask, is_causal)
    finally:
        encoder.use_nested_tensor = nested


def _is_recorded(module: nn.Module, src: Tensor) -> bool:
    """Whether autograd records the operators of a module."""
    tensors = [src, *module.parameters()]
    return _is_overridden(tensors) or (
        torch.is_grad_enabled() and any(item.requires_grad for item in tensors)
    )


def _whole(
    encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor, is_causal: bool | None
) -> Tensor:
    """Add a node that calls an encoder unchanged."""
    if _is_recorded(encoder, src):
        raise CaptureError(
            "TransformerEncoder goes on with nested tensors where the first layer is frozen, and others require "
            "gradients; make it with enable_nested_tensor=False"
        )
    tensors = {**dict(encoder.named_parameters()), **dict(encoder.named_buffers())}
    names = tuple(tensors)
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            blanks: dict[int, Any] = {
                id(item): nn.Parameter(torch.empty(0), False) for item in encoder.parameters()
            }
            blanks |= {id(item): torch.empty(0) for item in encoder.buffers()}
            twin = copy.deepcopy(encoder, blanks)
    except Exception as error:
        raise CaptureError(
            f"TransformerEncoder looks at its padding mask, so that its call stays one task, and cannot be copied for "
            f"that ({type(error).__name__}: {error}); make it with enable_nested_tensor=False"
        ) from error

    def transformer_encoder(src: Tensor, padding: Tensor, *held: Tensor) -> Tensor:
        if isinstance(src, FakeTensor):
            return src.new_empty(src.shape)
        named = dict(zip(names, held, strict=True))
        given = {"src_key_padding_mask": padding, "is_causal": is_causal}
        with torch.no_grad():
            return torch.func.functional_call(twin, named, (src,), given).contiguous()  # type: ignore[no-any-return]

    mode = get_proxy_mode()
    assert mode is not None
    tracer: Any = mode.tracer
    arguments = tuple(tracer.unwrap_proxy(item) for item in (src, padding, *tensors.values()))
    node = tracer.create_proxy("call_function", transformer_encoder, arguments, {})
    with disable_proxy_modes_tracing():
        made = src.new_empty(src.shape)
    return track_tensor_tree(made, node, constant=None, tracer=tracer)
