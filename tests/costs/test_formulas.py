"""FLOPs of operators that hide products: of all in torch's table, and those of factorizations."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import pytest
import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

from autosched.costs.estimate import _FORMULAS
from tests.costs.test_estimate import flops_of
from tests.frontends.op_samples import operators

# Names of operators whose work is more than an element each; those that only look like one
HIDES = re.compile(
    r"^(?!.*upsample).*(linalg|chol|_mm|mm$|conv|dist|linear|attention|solve|_qr|geqrf|svd|eig|rnn|ormqr)"
)
PLAIN = {
    "_linalg_check_errors",
    "dist",
    "linalg_cross",
    "linalg_vector_norm",
    "_sparse_mm_reduce_impl",
    "sparse_sampled_addmm",
}


class Noting(TorchDispatchMode):
    """Notes some calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, list[tuple[Any, Any]]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls = self.calls.setdefault(op, [])
        if len(calls) < 3 and not kwargs:
            calls.append((args, kwargs))
        return op(*args, **(kwargs or {}))


def operators_below(names: re.Pattern[str]) -> dict[Any, list[tuple[Any, Any]]]:
    """Return calls of the operators that samples of torch's table reach; of those with such names."""
    noting = Noting()
    for info in operators():
        if not names.search(info.name) or torch.float32 not in info.dtypes:
            continue
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 2):
                try:
                    with noting:
                        info.op(sample.input, *sample.args, **sample.kwargs)
                except Exception:
                    continue  # a sample that this build of torch cannot run
    return noting.calls


@pytest.mark.slow
def test_every_operator_that_hides_products_has_a_formula() -> None:
    calls = operators_below(HIDES)
    assert any(op.overloadpacket is torch.ops.aten._linalg_svd for op in calls)
    without = set()
    for op, given in calls.items():
        packet = op.overloadpacket
        if packet in _FORMULAS or packet.__name__ in PLAIN or op.namespace != "aten":
            continue
        if HIDES.search(packet.__name__):
            without.add(packet.__name__)
        # What others decompose into has no products.
        if (decomposition := decomposition_table.get(op)) is not None:
            for args, _ in given:
                below = Noting()
                with below, torch.no_grad(), torch.random.fork_rng(devices=[]):
                    try:
                        decomposition(*args)
                    except Exception:
                        continue
                hidden = {inner.overloadpacket for inner in below.calls} & _FORMULAS.keys()
                if hidden - {packet}:
                    without.add(packet.__name__)
    assert without == set()


A, B = torch.randn(2, 40, 40), torch.randn(2, 40, 7)


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (torch.linalg.cholesky, (A,), 2 * 40**3 / 3),
        (torch.linalg.inv, (A,), 2 * 2 * 40**3),
        (torch.linalg.det, (A,), 2 * 2 * 40**3 / 3),
        (torch.linalg.solve, (A, B), 2 * (2 * 40**3 / 3 + 2 * 40**2 * 7)),
        (torch.linalg.qr, (B,), 2 * (4 * 40 * 7**2 - 4 * 7**3 / 3)),
        (torch.linalg.svdvals, (B,), 2 * 4 * 40 * 7**2),
        (torch.linalg.svd, (B,), 2 * 22 * 40 * 7**2),
        (torch.linalg.eigvalsh, (A,), 2 * 4 * 40**3 / 3),
        (torch.linalg.eigh, (A,), 2 * 9 * 40**3),
        (
            lambda a, b: torch.cdist(a, b, 1.0),
            (torch.randn(9, 5), torch.randn(8, 5)),
            3 * 9 * 8 * 5,
        ),
        (torch.pdist, (torch.randn(9, 5),), 3 * 36 * 5),
    ],
)
def test_flops_are_those_of_the_usual_algorithms(fn: Any, args: Any, expected: float) -> None:
    assert flops_of(fn, *args) == pytest.approx(expected, rel=0.05)


def test_a_bilinear_layer_costs_what_its_products_cost() -> None:
    x, y, weight = torch.randn(20, 30), torch.randn(20, 40), torch.randn(5, 30, 40)

    def products(x: Any, y: Any, weight: Any) -> Any:
        return torch.einsum("ni,oij,nj->no", x, weight, y)

    found = flops_of(torch.nn.functional.bilinear, x, y, weight)
    assert found == pytest.approx(flops_of(products, x, y, weight), rel=1.0)
    assert found >= 2 * 20 * 30 * 40 * 5
