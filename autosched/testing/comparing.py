"""Compare trees of tensors, arrays and numbers bit for bit.

NaN equals itself; 0.0 and -0.0 differ. Of leaves that are not tensors, arrays, numbers or strings,
only the types are compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch

from autosched._lib.tree import flatten


def bits(tree: Any) -> Hashable:
    """Return an object that is equal for trees whose leaves are equal bit for bit.

    >>> nan = float("nan")
    >>> bits([torch.tensor(nan)]) == bits([torch.tensor(nan)]), bits(0.0) == bits(-0.0)
    (True, False)
    """
    return tuple([_leaf_bits(leaf) for leaf in flatten(tree)])


def difference(expected: Any, found: Any) -> str | None:
    """Return how a tree differs from the expected one; None if it does not.

    >>> difference({"w": torch.zeros(3)}, {"w": torch.tensor([0.0, 0.5, 0.0])})
    "['w'] differs in 1 of 3 numbers, by up to 0.5"
    """
    wanted = dict(_leaves(expected))
    got = dict(_leaves(found))
    if list(wanted) != list(got):
        return f"has the leaves {list(got)} instead of {list(wanted)}"
    for path, leaf in wanted.items():
        if _leaf_bits(leaf) != _leaf_bits(got[path]):
            return f"{path} {_unequal(leaf, got[path])}".lstrip()
    return None


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their paths, as Python would write them."""
    if isinstance(tree, (tuple, list, dict)):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(item, f"{path}[{key!r}]")
    else:
        yield path, tree


def _leaf_bits(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        with torch._C.DisableTorchFunction():  # a mode of the caller would see a dozen calls
            return str(leaf.dtype), tuple(leaf.shape), _memory(leaf)
    if hasattr(leaf, "tobytes") and not leaf.dtype.hasobject:  # of NumPy
        return str(leaf.dtype), leaf.shape, leaf.tobytes()
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes)):
        return type(leaf).__name__, repr(leaf)
    return type(leaf).__name__


def _memory(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements of a tensor, in order."""
    dense = tensor.detach().cpu()
    if dense.is_quantized:  # other accesses to its bytes crash
        dense = dense.int_repr()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    # A single number is contiguous with any stride, so it must be copied.
    memory = dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return memory.view(-1).view(torch.uint8).numpy().tobytes()


def _unequal(expected: Any, found: Any) -> str:
    kinds = [_kind(item) for item in (expected, found)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[1]} instead of {kinds[0]}"
    if not hasattr(expected, "shape"):
        return f"is {found!r:.60} instead of {expected!r:.60}"
    try:
        tensors = [torch.as_tensor(item).detach().cpu().to_dense() for item in (expected, found)]
        a, b = (tensor.to(torch.complex128) for tensor in tensors)
    except (TypeError, RuntimeError):  # arrays of objects, and tensors without a dense form
        return "differs"
    gap = (a - b).abs()[~((a == b) | (a.isnan() & b.isnan()))]
    if not gap.numel():
        return "differs in bits but not in numbers: the sign of a zero, or another NaN"
    nan = int(gap.isnan().sum())
    by = f", by up to {float(gap.nan_to_num(nan=0.0).max()):.3g}" if nan < gap.numel() else ""
    one_sided = f"; {nan} are NaN on one side only" if nan else ""
    return f"differs in {gap.numel()} of {a.numel()} numbers{by}{one_sided}"


def _kind(item: Any) -> str:
    return f"{item.dtype}{list(item.shape)}" if hasattr(item, "shape") else type(item).__name__
