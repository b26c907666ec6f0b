"""Torch's operator samples as regions, and how results are compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.frontends.op_samples import Sample, outcome, samples
from tests.fusion.regions import region

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.complex64,
)
FIRST = 3  # samples of an operator, of which the largest is taken
ULPS = 16  # of the largest element, by which results may differ


def sample_of(op: Any, dtype: torch.dtype, form: str) -> Sample | None:
    """Return a sample of an operator; None if it has none of this form and dtype, with tensors."""
    found = itertools.islice(samples(op, dtype, form), FIRST)
    return max(found, key=lambda sample: sum(t.numel() for t in sample.tensors), default=None)


def runs(sample: Sample) -> bool:
    """Whether torch itself runs a sample here, twice alike, with some result."""
    if not sample.tensors:
        return False
    try:
        return bool(outcome(sample))
    except Exception:  # on this machine, or in this form
        return False


def batches(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    """Yield the samples in groups of ``size``."""
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def together(samples: Sequence[Sample]) -> tuple[Callable[..., list[Any]], list[Tensor]]:
    """Return one function that makes all results, and copies of its arguments."""
    given = [sample.copies() for sample in samples]
    ends = list(itertools.accumulate(map(len, given), initial=0))

    def fn(*tensors: Tensor) -> list[Any]:
        pairs = zip(samples, itertools.pairwise(ends), strict=True)
        return [item for sample, (start, end) in pairs for item in sample.on(tensors[start:end])]

    return fn, [tensor for each in given for tensor in each]


def traced_differences(samples: Sequence[Sample]) -> dict[str, str]:
    """Return by name how samples differ if they are traced as one region, or why they cannot be.

    Regions are compiled by what ``tests.fusion.regions.compiled_by`` gives.
    """
    fn, given = together(samples)
    own = [sample.copies() for sample in samples]
    with torch.no_grad():
        expected = [sample.on(tensors) for sample, tensors in zip(samples, own, strict=True)]
        count = sum(map(len, expected))
        made = region(
            (lambda *args: fn(*args)[0]) if count == 1 else (lambda *args: tuple(fn(*args))),
            inputs=len(given),
            outputs=count,
        )
        made.compares = False
        found = made(*given)
    if made.failure is not None:
        if len(samples) == 1:
            return {samples[0].name: made.failure}
        middle = len(samples) // 2
        return traced_differences(samples[:middle]) | traced_differences(samples[middle:])
    results = iter([found] if count == 1 else found)
    left = iter(given)
    wrong = {}
    for sample, one, tensors in zip(samples, expected, own, strict=True):
        pairs = [(item, next(results)) for item in one] + [(t, next(left)) for t in tensors]
        said = next(filter(None, (different(a, b) for a, b in pairs)), None)
        if said is not None:
            wrong[sample.name] = said
    return wrong


def different(expected: Any, found: Any, ulps: float = ULPS) -> str | None:
    """Return how a result differs by more than so many units in the last place, or None."""
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        same = type(expected) is type(found) and str(expected) == str(found)
        return None if same else f"{found} instead of {expected}"
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return f"{found.dtype} {found.shape} instead of {expected.dtype} {expected.shape}"
    if _strides(expected) != _strides(found):
        return f"strides {found.stride()} instead of {expected.stride()}"
    a, b = map(_numbers, (expected, found))
    if not a.is_floating_point():
        return None if torch.equal(a, b) else f"{int((a != b).sum())} elements differ"
    finite = a.isfinite()
    if (
        not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num())
        or not b[finite].isfinite().all()
    ):
        return "other elements are infinite or no numbers"
    a, b = a[finite].double(), b[finite].double()
    if not a.numel():
        return None
    error, size = float((a - b).abs().max()), float(a.abs().max())
    if error <= ulps * torch.finfo(_numbers(expected).dtype).eps * size:
        return None
    return f"by {error:.3g}, where it is up to {size:.3g}"


def _numbers(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _strides(tensor: Tensor) -> list[int]:
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in pairs if size > 1 and tensor.numel()]
