"""Synchronised batch norm: statistics of all replicas.

The statistics of a replica's share of the batch go through an operator that stands for a
collective: ``moments`` returns the moments of all shares, ``total`` the sum over them. In a
capture, each returns its argument, so a pass is captured once; ``COLLECTIVES`` says what they
return for several replicas. There is one collective in the forward pass, of count, mean and squared
differences, which loses no precision where the mean is large, and one in the backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from autosched import CaptureError

__all__ = ["COLLECTIVES", "Synchronised", "check_norms"]


def _operator(name: str) -> Callable[[Tensor], Tensor]:
    """Define an operator that returns a copy of its argument."""
    made = torch.library.custom_op(
        f"autosched::{name}", torch.clone, mutates_args=(), schema="(Tensor own) -> Tensor"
    )
    made.register_fake(torch.empty_like)
    found: Callable[[Tensor], Tensor] = getattr(torch.ops.autosched, name).default
    return found


moments = _operator("moments")
total = _operator("total")


def combined_moments(shares: Sequence[Tensor]) -> Tensor:
    """Combine count, mean and sum of squared differences of several shares, as rows of a tensor.

    The differences are those from the mean of all shares, so they are exact also where the mean is
    large (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979).
    """
    counts, means, squares = torch.stack(list(shares), 1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    squares = torch.addcmul(squares, counts, (means - mean).square()).sum(0)
    return torch.stack([count, mean, squares])


def combined_total(shares: Sequence[Tensor]) -> Tensor:
    """Return the sum of shares."""
    return torch.stack(list(shares)).sum(0)


class Collective(NamedTuple):
    """The function that combines the shares of replicas, and its number of kernel launches."""

    combine: Callable[[Sequence[Tensor]], Tensor]
    launches: int


COLLECTIVES: Mapping[Callable[..., Any] | None, Collective] = {
    moments: Collective(combined_moments, 10),
    total: Collective(combined_total, 2),
}


def check_norms(model: nn.Module) -> None:
    """Raise CaptureError for a batch norm whose result depends on its count of batches."""
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or not module.training:
            continue
        if module.track_running_stats and module.momentum is None:
            raise CaptureError(
                f"batch norm {name!r} has momentum=None, so it reads its count of batches, whose "
                f"value a graph does not know; give it a number"
            )


class Synchronised(TorchFunctionMode):
    """Makes batch norms in training use the statistics of all replicas."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; replace a batch norm in training."""
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            given = _SIGNATURE.bind(*args, **kwargs)
            given.apply_defaults()
            x, running_mean, running_var, weight, bias, training, momentum, eps = given.args
            if training:
                apply: Callable[..., Tensor] = _Normalised.apply
                return apply(x, weight, bias, running_mean, running_var, momentum, eps)
        return func(*args, **kwargs)


_SIGNATURE = inspect.signature(functional.batch_norm)


class _Normalised(torch.autograd.Function):
    """Batch norm in training, with one collective forward, and one for the input's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
        running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        """Return the result, and write the running statistics."""
        wide = x.to(_wide(x))
        size = x.numel() / x.shape[1]
        mean, var = torch.batch_norm_update_stats(wide, None, None, 0.0)
        count, mean, squares = moments(torch.stack([torch.full_like(mean, size), mean, var * size]))
        var = squares / count
        for running, now in (running_mean, mean), (running_var, squares / (count - 1)):
            if running is not None:
                running.lerp_(now.to(running.dtype), momentum)
        ctx.save_for_backward(x, weight, count, mean, var)
        ctx.eps = eps
        weight, bias = (None if item is None else item.to(_wide(x)) for item in (weight, bias))
        return torch.batch_norm(wide, weight, bias, mean, var, False, 0.0, eps, False).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of input, weight and bias, the last two of this replica's share."""
        x, weight, count, mean, var = ctx.saved_tensors
        wide = x.to(_wide(x))
        given = gradient.to(_wide(x))
        inverse = (var + ctx.eps).rsqrt()
        # The operator for evaluation returns sums over the share for any mean and variance.
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            given, wide, None, mean, var, mean, inverse, False, ctx.eps, [False, True, True]
        )
        of_input = None
        if ctx.needs_input_grad[0]:  # a norm of the first layer needs no collective
            slope, shift = total(torch.stack([of_weight, of_bias])) / count
            scale = inverse if weight is None else inverse * weight
            centred = torch.addcmul(given, wide - _along(x, mean), _along(x, -slope * inverse))
            of_input = torch.addcmul(_along(x, -shift * scale), centred, _along(x, scale))
            of_input = of_input.to(x.dtype)
        shares = zip((of_weight, of_bias), ctx.needs_input_grad[1:3], strict=True)
        return of_input, *(share if needed else None for share, needed in shares), *[None] * 4


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of a tensor's statistics."""
    return torch.promote_types(x.dtype, torch.float32)


def _along(x: Tensor, vector: Tensor) -> Tensor:
    """Return a vector of one number per channel, in a shape that broadcasts to x."""
    return vector.view(1, -1, *[1] * (x.dim() - 2))
