"""The list of operators that add in an order that varies is complete, as is what is known to be random."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from autosched._lib.tree import flatten, transform
from autosched.fusion.candidates import _MAY_BE_UNDEFINED, _SUMS
from autosched.graph.effects import effects_of
from tests.frontends.op_samples import operators
from tests.fusion.operators import outcome, runs, sample_of

aten = torch.ops.aten

# By operator, the argument that says that it accumulates, and its values that say so.
_ADDING: dict[Any, tuple[str | None, tuple[Any, ...]]] = {
    aten.index_put: ("accumulate", (True,)),
    aten.index_put_: ("accumulate", (True,)),
    aten._unsafe_index_put: ("accumulate", (True,)),
    aten.scatter_add: (None, ()),
    aten.scatter_add_: (None, ()),
    aten.scatter_reduce: ("reduce", ("sum", "mean", "prod")),
    aten.scatter_reduce_: ("reduce", ("sum", "mean", "prod")),
    aten.scatter: ("reduce", ("add", "multiply")),
}
# Known otherwise: Inductor has no decomposition of the first three, the next is decomposed as
# index_reduce, and the kernels of the others are called, which add atomically on a GPU.
NOT_DECOMPOSED = set(
    """
    _unsafe_index_put _unsafe_masked_index_put_accumulate embedding_dense_backward
    index_reduce_ grid_sampler_2d_backward max_pool3d_with_indices_backward upsample_bicubic2d_backward
    """.split()
)
MOST = 6  # calls of one operator that are examined

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Recording(TorchDispatchMode):
    """Notes calls of operators, with arguments of each kind, on fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Any, dict[Any, Call]] = defaultdict(dict)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = (tuple(args), dict(kwargs or {}))
        key = str(transform(_described, given))
        if len(self.calls[func]) < MOST and key not in self.calls[func]:
            self.calls[func][key] = (func, *transform(_copied, given))
        return func(*args, **(kwargs or {}))


def _described(leaf: Any) -> Any:
    return (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def decomposed(call: Call, table: Mapping[Any, Callable[..., Any]]) -> list[torch.fx.Node]:
    """Return the operators that torch makes of a call."""
    func, args, kwargs = call
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # type: ignore[no-untyped-call]

        def fake(leaf: Any) -> Any:
            return mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf

        args, kwargs = transform(fake, (args, kwargs))
        tensors = [leaf for leaf in flatten((args, kwargs)) if isinstance(leaf, Tensor)]

        def on(*given: Tensor) -> Any:
            it = iter(given)

            def own(leaf: Any) -> Any:
                return next(it) if isinstance(leaf, Tensor) else leaf

            a, k = transform(own, (args, kwargs))
            return func(*a, **k)

        graph = make_fx(on, decomposition_table=dict(table))(*tensors)
    return [node for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def adds(node: torch.fx.Node) -> bool:
    """Whether a node adds floating-point numbers into places that indices name."""
    target: Any = node.target
    if target.overloadpacket not in _ADDING:
        return False
    value = node.args[0].meta.get("val")  # type: ignore[union-attr]
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return False
    name, values = _ADDING[target.overloadpacket]
    names = [item.name for item in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return name is None or given.get(name) in values


def is_random(call: Call) -> bool:
    """Whether an operator is known to draw random numbers."""
    return bool(effects_of(*call).random)


def recorded() -> Iterator[Call]:
    """Yield calls of the operators that torch's samples and their gradients call."""
    recording = Recording()
    for op in operators():
        for dtype in (torch.float32, torch.complex64):
            forms = ("backward" if op.supports_autograd else "function", "in place")
            samples = (sample_of(op, dtype, form) for form in forms)
            for sample in (each for each in samples if each is not None and runs(each)):
                with recording, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    outcome(sample)
    yield from (call for calls in recording.calls.values() for call in calls.values())


@pytest.mark.slow
def test_operators_that_add_in_any_order_or_draw_random_numbers_are_known() -> None:
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    adding, drawing, seen, refused = set(), set(), set(), set()
    for call in recorded():
        name = call[0]._schema.name.partition("::")[2]
        seen.add(name)
        try:
            nodes = decomposed(call, table)
        except Exception:  # on fake tensors
            refused.add(name)
            continue
        if any(map(adds, nodes)):
            adding.add(name)
        drawn = [effects_of(node.target, node.args, node.kwargs).random for node in nodes]
        if any(drawn) and not is_random(call):
            drawing.add(name)
    assert adding - _SUMS - _MAY_BE_UNDEFINED == set()
    assert drawing == set()
    assert _SUMS - adding == NOT_DECOMPOSED
    assert len(seen) > 400
    assert len(refused) < 40, refused
