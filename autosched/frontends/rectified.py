"""Let RAdam be captured: it decides by its step counter which of two updates it makes.

In captures, both are computed, and the counter chooses in each run. All other arithmetic is
torch's, so results are those of eager steps bit for bit. Knows no graph.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import radam

from autosched._lib.replacing import replaced
from autosched.frontends.attention import is_captured

__all__ = ["selecting_updates"]

_LEAST = 5.0  # the length of the average from which RAdam rectifies

Tensors = Sequence[Tensor]


@contextlib.contextmanager
def selecting_updates() -> Iterator[None]:
    """Let RAdam compute both updates in captures. Other threads are not affected."""
    names = {"_single_tensor_radam": _one_by_one, "_multi_tensor_radam": _together}
    with replaced(*((radam, name, _chosen(getattr(radam, name), names[name])) for name in names)):
        yield


def _chosen(original: Callable[..., None], own: Callable[..., None]) -> Callable[..., None]:
    def update(*tensors: Any, **options: Any) -> None:
        by_number = not options["capturable"] and not options["differentiable"]
        (own if by_number and is_captured() else original)(*tensors, **options)

    return update


class _Rectification:
    """What a step counter and betas determine, by functions of numbers that have no branches.

    ``is_due`` is 1.0 or 0.0. The length of the average grows from 1 at the first step to ``most``.
    """

    def __init__(self, counter: Tensor, beta1: Any, beta2: Any):
        step = counter.item()
        most = 2 / (1 - beta2) - 1
        self.correction1 = 1 - beta1**step
        self.correction2 = 1 - beta2**step
        self.is_due: Any = 0.0
        self.factor: Any = 1.0
        if most > _LEAST:
            length = most - 2 * step * (beta2**step) / self.correction2
            more = length - _LEAST
            self.is_due = (more + abs(more)) / (2 * abs(more) + sys.float_info.min)
            quotient = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
            self.factor = abs(quotient) ** 0.5  # negative only if it is not used

    def chosen(self, rectified: Tensor, other: Tensor) -> Tensor:
        """Return the update that the step makes."""
        is_due = torch.scalar_tensor(self.is_due, dtype=torch.float64, device=other.device)
        return torch.where(is_due > 0, rectified, other)


def _one_by_one(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, steps: Tensors, *,
    beta1: Any, beta2: Any, lr: Any, weight_decay: Any, eps: float, decoupled_weight_decay: bool,
    maximize: bool, **_: Any,
) -> None:  # fmt: skip
    """Do what ``_single_tensor_radam`` does."""
    lr = _number(lr)
    for *given, counter in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        param, grad, exp_avg, exp_avg_sq = map(_real, given)
        grad = -grad if maximize else grad
        counter.add_(1)
        if weight_decay != 0:
            if decoupled_weight_decay:
                param.mul_(1 - lr * weight_decay)
            else:
                grad = grad.add(param, alpha=weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        found = _Rectification(counter, beta1, beta2)
        plain = exp_avg / found.correction1 * lr
        adaptive = (found.correction2**0.5) / exp_avg_sq.sqrt().add_(eps)
        param.add_(found.chosen(plain * adaptive * found.factor, plain), alpha=-1.0)


def _together(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, steps: Tensors, *,
    beta1: Any, beta2: Any, lr: Any, weight_decay: Any, eps: float, decoupled_weight_decay: bool,
    maximize: bool, **_: Any,
) -> None:  # fmt: skip
    """Do what ``_multi_tensor_radam`` does."""
    lr = _number(lr)
    group = torch.optim.Optimizer._group_tensors_by_device_and_dtype
    lists: Any = [[*params], [*grads], [*exp_avgs], [*exp_avg_sqs], [*steps]]
    tensors: Any
    for tensors, _indices in group(lists).values():
        *given, counters = tensors
        params, grads, exp_avgs, exp_avg_sqs = ([*map(_real, each)] for each in given)
        if counters[0].is_cpu:
            torch._foreach_add_(counters, torch.tensor(1.0), alpha=1.0)
        else:
            torch._foreach_add_(counters, 1)
        if maximize:
            grads = torch._foreach_neg(grads)
        found = [_Rectification(counter, beta1, beta2) for counter in counters]
        if weight_decay != 0:
            if decoupled_weight_decay:
                torch._foreach_mul_(params, 1 - lr * weight_decay)
            else:
                grads = torch._foreach_add(grads, params, alpha=weight_decay)
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
        plain = [(lr * (1.0 - each.is_due) / each.correction1) * -1 for each in found]
        adaptive = [
            (each.correction2**0.5) * (lr * (each.factor * each.is_due) / each.correction1) * -1
            for each in found
        ]
        buffer = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_add_(buffer, eps)
        torch._foreach_div_(buffer, adaptive)
        torch._foreach_reciprocal_(buffer)
        torch._foreach_add_(buffer, plain)
        torch._foreach_addcmul_(params, exp_avgs, buffer)


def _number(rate: Any) -> Any:
    return rate.item() if isinstance(rate, Tensor) else rate


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
