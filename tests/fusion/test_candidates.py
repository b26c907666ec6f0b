"""Which tasks can be fused, and the groups of them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import autosched as asc
from autosched._lib.tree import flatten, transform
from autosched.fusion.candidates import (
    _MAY_BE_UNDEFINED,
    _SUMS,
    by_device,
    by_stream,
    reads_numbers,
    unfusable,
)
from autosched.graph.effects import effects_of
from autosched.program.program import Program, Record, Run, Stream, Wait
from tests.frontends.op_samples import operators, outcome
from tests.fusion.operators import runs, sample_of

aten = torch.ops.aten
GPUS = asc.Machine.emulated(gpus=2)


def half(x: Tensor) -> Tensor:
    return x / 2


def layer(x: Tensor) -> Tensor:
    return x / 2


layer.__wrapped__ = aten.mkldnn_rnn_layer.default  # type: ignore[attr-defined]


def test_the_reasons_why_tasks_are_not_fused() -> None:
    graph = asc.Graph()
    x, rows = graph.inputs("x", "rows")
    module = torch.nn.BatchNorm1d(3)
    graph.add(half, x, name="half")
    graph.add(torch.rand_like, x, name="draws", random=True)
    graph.add(module, x, name="module")
    with graph.on("host"):
        graph.add(half, x, name="host")
    number = graph.add(aten._local_scalar_dense.default, x, name="number")
    graph.add(torch.mul, x, number, name="scaled")
    graph.add(aten.nonzero.default, x, name="sizes")
    strided = graph.add(aten.as_strided.default, x, (2,), (1,), 1, name="strided")
    graph.add(torch.add, strided[0], 1, name="reads")
    graph.add(aten.embedding_dense_backward.default, x, rows, 5, -1, False, name="sums")
    lists = [[value] for value in graph.inputs("weight", "gradient", "sum", "step")]
    rates = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 0.0, "maximize": False}
    graph.add(aten._fused_adagrad_.default, *lists, **rates, name="fused")
    names = "weight", "gradient", "mean", "square", "largest", "step"
    lists = [[value] for value in graph.inputs(*(f"adam.{name}" for name in names))]
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 0.0}
    choices = {"amsgrad": False, "maximize": False}
    graph.add(aten._fused_adam_.default, *lists, **rates, **choices, name="Adam")
    graph.add(layer, x, name="layer")
    graph.add(aten.frexp.Tensor, x, name="parts", outputs=2)
    graph.add(half, x, name="unknown")
    graph.add(half, x, aliases=x, name="alias")
    graph.add(aten.index.Tensor, x, [rows], name="index")
    assert unfusable(graph, None)["index"] == "returns a tensor whose size depends on data"
    found = unfusable(graph, {"unknown": "reads its mind", "sizes": "has a size of its own"})
    assert [task.name for task in reads_numbers(graph.tasks)] == ["number", "scaled"]
    assert found == {
        "draws": "draws random numbers",
        "module": "uses the state of BatchNorm1d",
        "host": "is a Python function that is bound to the host",
        "sizes": "has a size of its own",
        "reads": "reads a view that as_strided makes",
        "sums": "adds numbers in an order that varies, if compiled",
        "fused": "has no kernel for tensors without data",
        "Adam": "writes to lists of tensors in one kernel",
        "layer": "may leave results undefined",
        "parts": "has no C++ that compiles in double precision",
        "unknown": "reads its mind",
        "alias": "touches a part of memory, or may return its argument",
    }


def test_views_that_depend_on_memory_are_recognized_in_captures() -> None:
    def step(x: Tensor) -> Tensor:
        room = torch.zeros(6)
        room.as_strided((2, 2), (2, 1), 1).copy_(x * 2)
        return room + 1

    graph = asc.capture(step, torch.ones(2, 2))
    assert unfusable(graph, {}) == {"copy": "reads a view that as_strided makes"}


def test_tasks_without_functions_and_merged_ones() -> None:
    assert unfusable(asc.Graph.from_networkx(networkx.DiGraph([("a", "b")])), {}) == (
        dict.fromkeys("ab", "has no function")
    )
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=graph.add(aten.bernoulli.default, x + 1) * 2, z=(x * 3).exp())
    merged = asc.merge(graph, {"add": "a", "bernoulli": "a", "mul_1": "b", "exp": "b"})
    assert list(unfusable(merged, {})) == ["a"]


def two_branches() -> asc.Graph:
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:0"):
        a = (x + 1).sin()
    with graph.on("cuda:1"):
        b = (x + 2).cos()
    with graph.on("cuda:0"):
        c = (a * b).exp()
    graph.output(c=c.relu())
    return graph


def test_all_tasks_of_a_device_are_a_group() -> None:
    graph = two_branches()
    schedule = asc.schedule(graph, GPUS, policy="heft")
    device = by_device(graph, schedule.placement, lambda task: task.name != "exp")
    assert device == {
        "add": "add+3", "sin": "add+3", "mul": "add+3", "relu": "add+3",
        "add_1": "add_1+1", "cos": "add_1+1",
    }  # fmt: skip


def test_a_region_ends_where_a_stream_waits_or_is_waited_for() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    for name in "abcdef":
        graph.add(half, x, name=name)
    own, other = Stream("cpu", "compute"), Stream("cpu", "compute1")
    program = Program(
        (
            *(Run(own, "a"), Run(own, "b"), Record(own, 0), Run(own, "c"), Run(own, "d")),
            *(Record(other, 1), Wait(own, 1), Run(own, "e"), Run(own, "f")),
        )
    )
    groups = by_stream(graph, program, lambda task: [task], lambda *_: 1.0)
    assert groups["a"] == groups["b"]
    assert groups["c"] == groups["d"]
    assert groups["e"] == groups["f"]
    assert len(set(groups.values())) == 3
    shorter_than_a_wait = by_stream(graph, program, lambda task: [task], lambda *_: 1e-6)
    assert len(set(shorter_than_a_wait.values())) == 1


def test_a_task_that_nothing_needs_joins_the_region_before_it() -> None:
    """Between waits it would be a region, or a task, of its own."""
    graph = asc.Graph()
    x = graph.input("x")
    a = graph.add(half, x, name="a")
    graph.add(aten.empty.memory_format, (0,), name="unused")
    graph.output(b=graph.add(half, a, name="b"))
    own, other = Stream("cpu", "compute"), Stream("cpu", "compute1")
    program = Program((Run(own, "a"), Run(own, "b"), Record(other, 0), Run(other, "unused")))
    groups = by_stream(graph, program, lambda task: [task], lambda *_: 1.0)
    assert groups["a"] == groups["b"] == groups["unused"]


# ---- the list of operators that add in an order that varies is complete, as is what is known to be random

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
