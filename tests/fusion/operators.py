"""Torch's operator samples, as functions of tensors that a region can call, and how results are compared.

Knows no operator by name.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosched._lib.tree import flatten, transform
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


@dataclass(frozen=True)
class Sample:
    """A call of a function of torch, by name."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, each once."""
        found = (leaf for leaf in flatten((self.args, self.kwargs)) if isinstance(leaf, Tensor))
        return list({id(tensor): tensor for tensor in found}.values())

    def on(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Call the function on other tensors; return its results as one list."""
        twins = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}

        def twin(leaf: Any) -> Any:
            return twins[id(leaf)] if isinstance(leaf, Tensor) else leaf

        args, kwargs = transform(twin, (self.args, self.kwargs))
        return [leaf for leaf in flatten(self.fn(*args, **kwargs)) if leaf is not None]

    def copies(self) -> list[Tensor]:
        """Return copies of the tensors, with their strides."""
        return list(map(_copy, self.tensors))


def _copy(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    made.copy_(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)


def sample_of(op: Any, dtype: torch.dtype, form: str) -> Sample | None:
    """Return a sample of an operator; None if it has none of this form and dtype, with tensors.

    Forms are ``function``, ``in place``, and ``backward``, which differentiates the results, too.
    """
    fn = op.inplace_variant if form == "in place" else op.op
    is_backward = form == "backward"
    if fn is None or dtype not in op.supported_dtypes("cpu"):
        return None
    if is_backward and not (op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")):
        return None
    torch.manual_seed(0)
    first = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=is_backward), FIRST))
    found = [
        Sample(
            f"{op.formatted_name} {form}",
            _differentiated(fn) if is_backward else fn,
            (given.input, *given.args),
            given.kwargs,
        )
        for given in first
        if form != "in place" or not given.broadcasts_input
    ]
    return max(found, key=lambda sample: sum(t.numel() for t in sample.tensors), default=None)


def _differentiated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also returns the gradients of its results."""

    def both(*args: Any, **kwargs: Any) -> Any:
        made = fn(*args, **kwargs)
        leaves = (leaf for leaf in flatten((args, kwargs)) if isinstance(leaf, Tensor))
        wanted = list({id(leaf): leaf for leaf in leaves if leaf.requires_grad}.values())
        found = [leaf for leaf in flatten(made) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not found or not wanted:
            return made
        weights = [leaf.detach() * 0 + _ramp(leaf) for leaf in found]
        grads = torch.autograd.grad(found, wanted, weights, allow_unused=True)
        return [leaf.detach() for leaf in flatten(made) if isinstance(leaf, Tensor)], grads

    return both


def _ramp(like: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, like.numel()).to(like.dtype).reshape(like.shape)


def runs(sample: Sample) -> bool:
    """Whether torch itself runs a sample here, twice alike, with some result."""
    if not sample.tensors:
        return False
    try:
        return bool(outcome(sample))
    except Exception:  # on this machine, or in this form
        return False


def outcome(sample: Sample) -> list[Any]:
    """Return the results of a sample, and its arguments afterwards."""
    given = sample.copies()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [*sample.on(given), *given]


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
