"""Estimate the work of tasks and bytes of values from examples.

The tasks run once, in the order in which they were added, on fake tensors: shapes without memory,
all on one fake CPU, so constraints and the devices of the examples do not matter. Nothing is
computed. Each operator that the tasks reach is counted:

* FLOPs: for matrix products, convolutions and attention, torch's own formulas, and similar ones for
  recurrent layers, factorizations of matrices and other operators that hide products. For any
  other operator, one per element that it returns, or reads if that is more.
* Bytes: everything read and everything written, each tensor once. A dimension of stride 0 counts
  once. Lookups read of their table only the rows that they return. Views, ``empty`` and queries of
  shapes cost nothing.

A task is **unknown**, and keeps its default cost, in these cases: its function fails on fake
tensors (``.item()``, NumPy, shapes that depend on data); it reads a result of an unknown task; it
writes, or differentiates by, a tensor that is not among its arguments; or it has no tensor
argument. A function without tensor arguments could do anything, so only torch functions
(``torch.zeros``) and those of this package are run then. A value that an unknown task writes in
place stays known, because a write changes no shape.

Functions run as they do while torch.compile traces them: a function that prints will print, and a
function that stores its arguments will store fake tensors. This module knows no device, no rate and
no time.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autosched._lib.aten import operators
from autosched._lib.fake_tensors import Fakes, quiet
from autosched._lib.logs import users_frame
from autosched._lib.tree import flatten, transform
from autosched.costs.costs import Costs, Work
from autosched.errors import GraphError, listed
from autosched.graph.files import StoredTensor
from autosched.graph.graph import Graph, Task, Value, called_with

aten = torch.ops.aten
Op = OpOverload[..., Any]


@dataclass(frozen=True)
class Estimate:
    """Costs with estimated work and bytes, and the reason for each task without an estimate.

    Reasons are by task name. A merged task is represented by its parts.
    """

    costs: Costs
    unknown: Mapping[str, str]

    def warn(self, graph: Graph) -> None:
        """Warn, at the user's line, of the graph's tasks whose durations are unknown."""
        given = {task.name for task in graph.tasks if task.seconds is not None}
        unknown = {name: reason for name, reason in self.unknown.items() if name not in given}
        if not unknown:
            return
        guess = f"{self.costs.default_seconds * 1e6:.0f} us{' each' if len(unknown) > 1 else ''}"
        reason = next(iter(unknown.values()))
        warnings.warn(
            f"no estimate for {listed(unknown)}, taken to cost {guess} ({reason}); give seconds=",
            stacklevel=users_frame()[1],
        )


def estimate(graph: Graph, examples: Mapping[str, Any]) -> Estimate:
    """Return the work of each task and the bytes of each value, for inputs like ``examples``.

    Examples may be on any device, also ``"meta"``, which holds no data. They are not changed, and
    no random number is generated. Raises GraphError for missing or unknown examples, and for those
    whose sizes do not fit.

    >>> import torch, autosched as asc
    >>> graph = asc.Graph()
    >>> x, w = graph.inputs("x", "w")
    >>> graph.output(y=x @ w)
    >>> estimate(graph, {"x": torch.zeros(2, 3), "w": torch.zeros(3, 5)}).costs.work
    {'matmul': Work(flops=60, nbytes=124, launches=1)}
    """
    given = graph.bind(examples)
    work: dict[str, Work] = {}
    unknown: dict[str, str] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), Fakes(learn=False), quiet():
        data: dict[int, Any] = {}
        for index, example in given.items():
            with contextlib.suppress(Exception):  # its readers are then unknown, too
                data[index] = transform(_twin, example)
        for task in graph.tasks:
            _learn(task, data, work, unknown)
        known = {index: list(_tensors(item)) for index, item in data.items()}
        known = {index: tensors for index, tensors in known.items() if tensors}
        nbytes = {graph.values[i].name: sum(t.nbytes for t in known[i]) for i in known}
    return Estimate(Costs(work=work, nbytes=nbytes), unknown)


def _learn(
    task: Task, data: dict[int, Any], work: dict[str, Work], unknown: dict[str, str]
) -> None:
    """Run a task, or its parts, on fake tensors; store results and work."""
    if task.composite is not None:
        given = zip(task.composite.takes, task.args, strict=False)
        inner = {index: data[value.index] for index, value in given if value.index in data}
        for part in task.parts:
            _learn(part, inner, work, unknown)
        made = zip(task.outputs, task.composite.gives, strict=True)
        data.update((use.value, inner[index]) for use, index in made if index in inner)
        return
    try:
        results, work[task.name] = _run(task, data)
    except Exception as error:
        # A torch function says that the sizes of its arguments do not fit.
        is_own = task.fn is not None and _is_torch(task.fn)
        if is_own and type(error) is RuntimeError and _SIZES.search(str(error)):
            raise GraphError(_misfit(task, data, error)) from error
        unknown[task.name] = _reason(error)
    else:
        data.update(results)


_SIZES = re.compile(r"\b(sizes?|shapes?|dim|dims|dimensions?)\b")


def _misfit(task: Task, data: Mapping[int, Any], error: Exception) -> str:
    """Return the error message for a task that cannot run on the examples."""
    leaves = flatten((task.args, task.kwargs))
    graph = next(leaf.graph for leaf in leaves if isinstance(leaf, Value))
    sizes = [
        f"{graph.values[use.value].name!r} is {tuple(data[use.value].shape)}"
        for use in task.reads
        if isinstance(data.get(use.value), torch.Tensor)
    ]
    return (
        f"task {task.name!r}, added at {task.source}, cannot run on these examples: "
        f"{str(error).splitlines()[0].rstrip('.')}; {', '.join(sizes)}"
    )


class _UnknownError(Exception):
    """The reason why a task is not run."""


def _run(task: Task, data: Mapping[int, Any]) -> tuple[dict[int, Any], Work]:
    """Run one task on fake tensors; return its results, by value index, and its work."""
    if task.fn is None:
        raise _UnknownError("has no function")
    if isinstance(task.fn, StoredTensor):
        return dict(task.results(task.fn.empty())), Work(0, task.fn.nbytes)
    for value in flatten((task.args, task.kwargs)):
        if isinstance(value, Value) and value.index not in data:
            raise _UnknownError(f"reads {value.name!r}, which is unknown")
    args, kwargs = called_with(task, data)
    if not any(True for _ in _tensors((args, kwargs))) and not _is_safe(task.fn):
        raise _UnknownError("has no tensor among its arguments")
    if task.fn is aten._local_scalar_dense.default:
        # Optimizers may divide by the number, or by one less.
        return dict(task.results(0.5 if args[0].is_floating_point() else 1)), Work(0, 0)
    with _Counter() as counter:
        returned = task.fn(*args, **kwargs)
    results = {index: transform(_as_fake, result) for index, result in task.results(returned)}
    is_python = getattr(task.fn, "__module__", "") in ("_operator", "builtins", "math")
    least = _PYTHON if is_python else 1
    return results, Work(counter.flops, counter.nbytes, max(counter.launches, least))


_PYTHON = 0.02  # launches per function of Python numbers: about 0.1 us


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of operators, keeps them on the fake CPU, and away from real tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.nbytes = 0
        self.launches = 0

    def __torch_dispatch__(
        self, op: Op, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        _refuse_real(op, _named(op, args, kwargs or {}))
        args, kwargs = transform(_as_fake, (args, dict(kwargs or {})))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        result = op(*args, **kwargs)
        if not (op.is_view or torch.Tag.inplace_view in op.tags or op.overloadpacket in _FREE):
            # prim operators query the device of fake tensors
            self.launches += op.namespace != "prim"
            formula = _FORMULAS.get(op.overloadpacket)
            flops = formula and formula(*args, **kwargs, out_val=result)
            self._count(op, _named(op, args, kwargs), result, flops)
        return result

    def _count(self, op: Op, given: Mapping[str, Any], result: Any, flops: int | None) -> None:
        is_lookup = op.overloadpacket in _LOOKUPS
        unread = {argument.name for argument in op._schema.arguments if argument.is_out}
        if is_lookup or op.overloadpacket in _OVERWRITES:
            unread.add(op._schema.arguments[0].name)
        read = _once([item for name, item in given.items() if name not in unread])
        made = _once([result, _written(op, given)])
        if not made:  # a query of a shape
            return
        self.nbytes += sum(map(_memory, read)) + sum(map(_memory, made)) * (2 if is_lookup else 1)
        returned = sum(tensor.numel() for tensor in made)
        elements = max(returned, *(tensor.numel() for tensor in read), 0)
        self.flops += elements if flops is None else flops


# Their first argument is the table.
_LOOKUPS = operators("embedding gather index index_select")
# Their first argument is written without being read.
_OVERWRITES = operators("bernoulli_ copy_ exponential_ fill_ normal_ random_ uniform_ zero_")
# Views that schemas do not mark, and uninitialised allocations.
_FREE = operators("_unsafe_view empty empty_like empty_strided new_empty new_empty_strided")


def _layer(times: int, attends: bool = False) -> Callable[..., int]:
    """Return the formula of an operator that multiplies each row of its first argument by matrices.

    ``times`` is 1 forward, and 2 backward: for gradients of rows and of matrices. Hidden states may
    be matrices, too, but are small.
    """

    def formula(rows: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
        numbers = sum(tensor.numel() for tensor in _tensors((args, kwargs)) if tensor.dim() == 2)
        count = rows.numel() // max(rows.shape[-1], 1)
        return 2 * times * count * numbers + attends * 4 * rows.numel() * rows.shape[-2]

    return formula


def _product(position: int) -> Callable[..., int]:
    """Return the formula of an operator that multiplies two arguments, the first at a position."""

    def formula(*args: Any, out_val: Any, **kwargs: Any) -> int:
        a, b = args[position : position + 2]
        return int(2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1))

    return formula


def _of_matrices(
    count: Callable[[int, int, int], float], matrix: int = 0, right: int | None = None
) -> Callable[..., int]:
    """Return the formula of an operator on matrices, those of the argument at a position.

    ``count`` takes their larger and their smaller size, and the columns of the argument ``right``.
    """

    def formula(*args: Any, out_val: Any, **kwargs: Any) -> int:
        given = [args[i] for i in (matrix, right) if i is not None]
        number = max(math.prod(tensor.shape[:-2]) for tensor in given)
        large, small = max(given[0].shape[-2:]), min(given[0].shape[-2:])
        columns = given[-1].shape[-1] if given[-1].dim() > 1 else 1
        return int(number * count(large, small, columns))

    return formula


def _with_vectors(position: int, without: float, with_them: float) -> Callable[..., int]:
    """Return the formula of a spectral decomposition: times ``large * small ** 2``.

    The argument at a position says whether vectors are computed, too.
    """

    def formula(*args: Any, out_val: Any, **kwargs: Any) -> int:
        named = kwargs.get("compute_uv", kwargs.get("compute_v", True))
        wanted = args[position] if len(args) > position else named
        times = with_them if wanted else without
        return _of_matrices(lambda m, n, _: times * m * n**2)(*args, out_val=out_val)

    return formula


def _distances(position: int, times: int) -> Callable[..., int]:
    """Return the formula of distances between rows: of each, ``times`` the size of a row.

    Distances are the result, or the gradient, which is then the first argument.
    """

    def formula(*args: Any, out_val: Any, **kwargs: Any) -> int:
        distances = args[0] if position else out_val
        return int(times * distances.numel() * args[position].shape[-1])

    return formula


def _trilinear(
    a: Any, b: Any, c: Any, of_a: Any, of_b: Any, of_c: Any, *args: Any, out_val: Any, **_: Any
) -> int:
    """Return the FLOPs of a product of three tensors, which have more dimensions of size 1."""
    shapes = []
    for tensor, dims in ((a, of_a), (b, of_b), (c, of_c)):
        sizes = iter(tensor.shape)
        shapes.append([1 if i in dims else next(sizes) for i in range(tensor.dim() + len(dims))])
    return int(2 * math.prod(map(max, *shapes)))


# Of LAPACK, where not noted after Golub and Van Loan, "Matrix computations", 4th edition, 2013.
_LAPACK: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(
        ["linalg_lu", "linalg_lu_factor_ex", "_linalg_det", "_linalg_slogdet"],
        _of_matrices(lambda m, n, _: m * n**2 - n**3 / 3),
    ),
    **dict.fromkeys(
        ["linalg_cholesky_ex", "cholesky", "linalg_ldl_factor_ex"],
        _of_matrices(lambda m, n, _: n**3 / 3),
    ),
    "cholesky_inverse": _of_matrices(lambda m, n, _: 2 * n**3 / 3),
    "linalg_inv_ex": _of_matrices(lambda m, n, _: 2 * n**3),
    "_linalg_solve_ex": _of_matrices(lambda m, n, k: 2 * n**3 / 3 + 2 * n**2 * k, right=1),
    "linalg_lu_solve": _of_matrices(lambda m, n, k: 2 * n**2 * k, right=2),
    "linalg_ldl_solve": _of_matrices(lambda m, n, k: 2 * n**2 * k, right=2),
    "cholesky_solve": _of_matrices(lambda m, n, k: 2 * n**2 * k, 1, 0),
    "linalg_solve_triangular": _of_matrices(lambda m, n, k: n**2 * k, right=1),
    "triangular_solve": _of_matrices(lambda m, n, k: n**2 * k, 1, 0),
    "geqrf": _of_matrices(lambda m, n, _: 2 * m * n**2 - 2 * n**3 / 3),
    "linalg_householder_product": _of_matrices(lambda m, n, _: 2 * m * n**2 - 2 * n**3 / 3),
    "linalg_qr": _of_matrices(lambda m, n, _: 4 * m * n**2 - 4 * n**3 / 3),
    "ormqr": _of_matrices(lambda m, n, k: 4 * m * n * k, right=2),
    "linalg_lstsq": _of_matrices(lambda m, n, k: 2 * m * n**2 + 4 * m * n * k, right=1),
    "_linalg_svd": _with_vectors(2, 4, 22),
    "linalg_pinv": _of_matrices(lambda m, n, _: 24 * m * n**2),  # by an SVD
    "_linalg_eigh": _with_vectors(2, 4 / 3, 9),
    "linalg_eig": _of_matrices(lambda m, n, _: 25 * n**3),
    "_linalg_eigvals": _of_matrices(lambda m, n, _: 10 * n**3),
    "linalg_matrix_exp": _of_matrices(lambda m, n, _: 20 * n**3),  # about ten products
}

# torch has no formulas for these: attention on a CPU, recurrent and other whole layers, products.
_FORMULAS: Mapping[Any, Callable[..., int]] = ChainMap(
    flop_registry,
    {
        aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
            aten._scaled_dot_product_flash_attention
        ],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            aten._scaled_dot_product_flash_attention_backward
        ],
        **dict.fromkeys(operators("mkldnn_rnn_layer _cudnn_rnn miopen_rnn linear"), _layer(1)),
        **dict.fromkeys(
            operators("mkldnn_rnn_layer_backward _cudnn_rnn_backward miopen_rnn_backward"),
            _layer(2),
        ),
        **dict.fromkeys(
            operators("_native_multi_head_attention _transformer_encoder_layer_fwd"),
            _layer(1, attends=True),
        ),
        **dict.fromkeys(operators("mv dot vdot _int_mm"), _product(0)),
        **dict.fromkeys(operators("addmv addbmm _addmm_activation"), _product(1)),
        aten._cdist_forward: _distances(0, 3),
        aten._cdist_backward: _distances(1, 4),
        aten._pdist_forward: _distances(0, 3),
        aten._pdist_backward: _distances(1, 4),
        aten._trilinear: _trilinear,
    },
    {operator: formula for name, formula in _LAPACK.items() for operator in operators(name)},
)


def _refuse_real(op: Op, given: Mapping[str, Any]) -> None:
    """Raise if an operator would write a fake tensor into an object of the user."""
    if any(not isinstance(tensor, FakeTensor) for tensor in _tensors(_written(op, given))):
        raise _UnknownError("writes a tensor that is not among its arguments")
    real = (tensor for tensor in _tensors(given) if not isinstance(tensor, FakeTensor))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in real):
        raise _UnknownError("differentiates by a tensor that is not among its arguments")


def _named(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by their names in its schema."""
    names = (argument.name for argument in op._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _written(op: Op, given: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes."""
    aliases = ((argument.name, argument.alias_info) for argument in op._schema.arguments)
    return [given.get(name) for name, info in aliases if info is not None and info.is_write]


def _twin(leaf: Any) -> Any:
    """Make a fake tensor like this tensor, on the CPU; other leaves pass."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout is not torch.strided:
        raise _UnknownError(f"meets a tensor of layout {leaf.layout}")
    twin = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    return twin.requires_grad_(leaf.requires_grad)


def _as_fake(leaf: Any) -> Any:
    return leaf if isinstance(leaf, FakeTensor) and leaf.layout is torch.strided else _twin(leaf)


def _is_safe(fn: Callable[..., Any]) -> bool:
    """Whether a function is known to do nothing but return a result."""
    return _is_torch(fn) or getattr(fn, "__module__", "").startswith("autosched.")


def _is_torch(fn: Callable[..., Any]) -> bool:
    """Whether a function is an operator or a torch function."""
    if isinstance(fn, (OpOverload, OpOverloadPacket)):
        return True
    if getattr(fn, "__module__", "") == "_operator":
        return True
    name = getattr(fn, "__name__", "")
    plain = getattr(torch._C._VariableFunctions, name, None)
    # What makes tensors is another function of torch while GPUs are simulated.
    return plain is not None and fn in (plain, getattr(torch, name, None))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in flatten(tree) if isinstance(leaf, torch.Tensor))


def _once(tree: Any) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in _tensors(tree)}.values())


def _memory(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's memory; a dimension of stride 0 counts once."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(n for n, stride in dimensions if stride or not n) * tensor.element_size()


def _reason(error: Exception) -> str:
    if isinstance(error, _UnknownError):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")
