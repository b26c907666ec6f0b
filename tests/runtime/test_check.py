"""What tasks do against what they declared, and what torch's own functions are known to do."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import autosched as asc
from autosched._lib.tree import transform
from autosched.graph.effects import _ALSO_WRITES, effects_of
from autosched.simulated_gpus import playing

GPUS = asc.Machine.emulated(gpus=2)


def run(graph: asc.Graph, check: Any, backend: str = "virtual", **inputs: Any) -> dict[str, Any]:
    with asc.schedule(graph, GPUS, check=check, backend=backend) as schedule:
        for _ in range(2):
            outputs = schedule(**inputs)
    return outputs


def lone(fn: Any, **facts: Any) -> asc.Graph:
    graph = asc.Graph()
    graph.output(y=graph.add(fn, graph.input("x"), name="sly", **facts))
    return graph


# ---- what counters do not see


def through_data(x: torch.Tensor) -> torch.Tensor:
    x.data.add_(1)
    return x.clone()


def through_numpy(x: torch.Tensor) -> torch.Tensor:
    x.numpy()[0] = 7
    return x.clone()


def fused(x: torch.Tensor) -> torch.Tensor:
    grad, *state = (torch.ones_like(x) for _ in range(3))
    torch._fused_adamw_(
        [x], [grad], [state[0]], [state[1]], [], [torch.ones(())],
        lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return x.clone()


def of_numpy(x: Any) -> Any:
    x += 1
    return x.copy()


@pytest.mark.parametrize("fn", [through_data, through_numpy, fused, of_numpy])
def test_comparing_bytes_sees_writes_that_counters_do_not(fn):
    x = torch.zeros(3).numpy() if fn is of_numpy else torch.zeros(3)
    with pytest.raises(
        asc.HazardError,
        match=r"task 'sly' wrote its argument 'x' .*writes=\[x\]\)\n    added at .*\d",
    ):
        run(lone(fn), "bytes", x=x)
    if fn is not of_numpy:  # whose bytes are always compared
        run(lone(fn), True, x=x)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((2, 3), torch.nan),
        torch.zeros(2, 3).t(),
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.tensor([True]),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.eye(2).to_sparse(),
        torch.zeros(1).expand(3),
        "text",
        {"a": [torch.zeros(2), 3]},
        None,
    ],
    ids=repr,
)
def test_comparing_bytes_takes_all_there_is(tensor):
    graph = asc.Graph()
    graph.output(y=graph.add(lambda x: 1, graph.input("x")))
    assert run(graph, "bytes", x=tensor) == {"y": 1}


@pytest.mark.parametrize("check", [False, True, "bytes"])
@pytest.mark.parametrize("backend", ["host", "emulated", "virtual"])
def test_a_task_that_writes_another_part_than_it_declared_is_found_out(check, backend):
    def write(mine: torch.Tensor, other: torch.Tensor) -> None:
        mine += 1
        other += 1

    graph = asc.Graph()
    x = graph.input("x")
    graph.add(write, x[:2], x[2:], writes=[graph.value("getitem")], outputs=(), name="sly")
    graph.output(x=x)
    with pytest.raises(asc.HazardError, match="task 'sly' wrote its argument 'getitem_1'"):
        run(graph, check, backend, x=torch.zeros(4))


@pytest.mark.parametrize("check", [False, True, "bytes"])
def test_tasks_that_write_parts_at_the_same_time_are_not_accused(check):
    def slow(x: torch.Tensor) -> torch.Tensor:
        return sum(x.sum() for _ in range(200))

    graph = asc.Graph()
    x = graph.input("x")
    for i in range(4):
        part = x[i * 2 : i * 2 + 2]
        graph.add(slow, part, name=f"look{i}")
        part += 1
    graph.output(x=x)
    machine = asc.Machine([asc.Device("cpu", streams=4)], imagined=True)
    for backend in ("threads", "virtual"):
        with asc.schedule(graph, machine, check=check, backend=backend, policy="heft") as schedule:
            for _ in range(5):
                assert schedule(x=torch.zeros(8))["x"].tolist() == [1.0] * 8


def test_the_check_of_a_first_run_takes_no_memory_of_a_gpu() -> None:
    graph = asc.Graph()
    value = graph.add(torch.neg, graph.input("x"), name="value", on="cuda:0")
    upper, lower = value[:512], value[512:]
    with graph.on("cuda:0"):
        upper += 1
        lower *= 2
        graph.output(y=value)
    x = torch.rand(1024, 8)
    with playing():
        machine = asc.Machine.local()
        examples = {"x": x}
        with asc.schedule(graph, machine, examples=examples, replay=False) as schedule:
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                y = schedule(x=x)["y"]
                assert torch.equal(y.cpu(), torch.cat([1 - x[:512], -2 * x[512:]]))
                del y
                assert torch.cuda.max_memory_allocated() == schedule.peak_bytes["cuda:0"]


def test_check_is_one_of_three():
    with pytest.raises(asc.ScheduleError, match="check must be False, True or 'bytes', got 'byte'"):
        asc.schedule(lone(abs), GPUS, check="byte")


# ---- random numbers


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(())


def test_undeclared_random_numbers_are_told_of_in_the_first_run_and_refused_by_a_check():
    with pytest.warns(
        UserWarning, match=r"task 'sly' drew random numbers .*random=True\)\n    added at"
    ) as caught:
        run(lone(noisy), False, x=torch.zeros(1))
    assert len(caught) == 1
    with pytest.raises(
        asc.HazardError, match="task 'sly' drew random numbers without declaring it"
    ):
        run(lone(noisy), True, x=torch.zeros(1))


@pytest.mark.parametrize("check", [False, True, "bytes"])
def test_declared_random_numbers_are_fine_and_so_are_modules_that_draw_them(check):
    graph = asc.Graph()
    x = graph.input("x")
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.ReLU())
    graph.output(
        a=graph.add(noisy, x, random=True),
        b=F.dropout(x),
        c=graph.add(model, x),
        d=torch.rand_like(x),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(graph, check, "emulated", x=torch.zeros(3))


def test_a_task_is_not_accused_of_random_numbers_that_one_beside_it_draws_and_declares():
    begun, drawn = threading.Event(), threading.Event()

    def quiet(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert drawn.wait(30)
        return x + 1

    def draw(x: torch.Tensor) -> torch.Tensor:
        assert begun.wait(30)
        made = torch.rand_like(x)
        drawn.set()
        return made

    graph = asc.Graph()
    x = graph.input("x")
    graph.output(graph.add(quiet, x), graph.add(draw, x, random=True))
    machine = asc.Machine([asc.Device("cpu", streams=2)])
    with asc.schedule(
        graph, machine, policy="round_robin", backend="threads", check=True
    ) as schedule:
        schedule(x=torch.zeros(1))


# ---- the tables, against what torch's functions do under the referee

aten = torch.ops.aten
T = torch.Tensor
square, image, statistics = torch.rand(3, 3), torch.rand(2, 3, 4, 4), torch.rand(2, 3)


def mean_and_var() -> list[torch.Tensor]:
    return [torch.zeros(3), torch.ones(3)]


CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    # views and perhaps views
    *[(fn, (square,), {}) for fn in (T.t, T.contiguous, T.detach, T.ravel, T.unbind)],
    *[(fn, (square, -1), {}) for fn in (T.view, T.reshape)],
    (T.chunk, (square, 3), {}),
    (aten._unsafe_view.default, (square, [9]), {}),
    (aten.unsafe_split.Tensor, (square, 2), {}),
    (aten.slice.Tensor, (square, 0, 1, 3), {}),
    # in place, out= and many at once
    (torch.add, (square, square), {"out": torch.empty(3, 3)}),
    (aten.add.out, (square, square), {"out": torch.empty(3, 3)}),
    (aten.add_.Tensor, (torch.rand(3, 3), square), {}),
    (aten.copy_.default, (torch.rand(3, 3), square), {}),
    (torch._foreach_add_, ([torch.rand(2), torch.rand(3)], 1.0), {}),
    (F.relu, (torch.rand(3),), {"inplace": True}),
    # writes that no schema and no counter tells
    (F.batch_norm, (image, *mean_and_var()), {"training": True}),
    (F.instance_norm, (image, *mean_and_var()), {"use_input_stats": True}),
    (torch.batch_norm, (image, None, None, *mean_and_var(), True, 0.1, 1e-5, False), {}),
    (aten.native_batch_norm.default, (image, None, None, *mean_and_var(), True, 0.1, 1e-5), {}),
    (
        aten._native_batch_norm_legit.default,
        (image, None, None, *mean_and_var(), True, 0.1, 1e-5),
        {},
    ),
    (aten.native_batch_norm.default, (image, None, None, *mean_and_var(), False, 0.1, 1e-5), {}),
    (aten.batch_norm_update_stats.default, (image, *mean_and_var(), 0.1), {}),
    (aten.rrelu_with_noise.default, (torch.randn(3), torch.zeros(3), 0.1, 0.3, True), {}),
    (F.embedding, (torch.tensor([0, 1]), 9 * torch.rand(3, 3)), {"max_norm": 1.0}),
    (F.embedding_bag, (torch.tensor([[0, 1]]), 9 * torch.rand(3, 3)), {"max_norm": 1.0}),
    (
        torch._fused_sgd_,
        ([torch.rand(2)], [torch.rand(2)], [torch.rand(2)]),
        {
            **dict.fromkeys(("nesterov", "maximize", "is_first_step"), False),
            "weight_decay": 0.0,
            "momentum": 0.9,
            "lr": 0.1,
            "dampening": 0.0,
        },
    ),
    (
        torch._fused_adamw_,
        ([torch.rand(2)], [torch.rand(2)], [torch.rand(2)], [torch.rand(2)], [], [torch.ones(())]),
        {
            "lr": 0.1,
            "beta1": 0.9,
            "beta2": 0.9,
            "weight_decay": 0.0,
            "eps": 1e-8,
            "amsgrad": False,
            "maximize": False,
        },
    ),
    # random
    (F.dropout, (square,), {}),
    (torch.bernoulli, (square,), {}),
    (T.normal_, (torch.rand(3),), {}),
    (aten.native_dropout.default, (square, 0.5, True), {}),
    (aten.rand_like.default, (square,), {}),
    (aten.bernoulli_.float, (torch.rand(3), 0.5), {}),
    (F.scaled_dot_product_attention, (image, image, image), {}),
]


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"), CALLS, ids=lambda item: getattr(item, "__name__", "")
)
def test_torchs_functions_do_what_the_tables_say(fn, args, kwargs):
    """The referee compares the bytes of all arguments, the memory of results, and the state of the generators."""
    graph = asc.Graph()
    count = iter(range(99))
    inputs: dict[str, torch.Tensor] = {}

    def as_input(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        name = f"x{next(count)}"
        inputs[name] = leaf.clone()
        return graph.input(name)

    given, named = transform(as_input, (args, kwargs))
    result = graph.add(fn, *given, **named)
    graph.output(
        *[graph.value(name) for name in inputs],
        **({"y": result} if isinstance(result, asc.Value) else {}),
    )
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    torch.manual_seed(0)
    expected = graph.run_serial(**{name: tensor.clone() for name, tensor in inputs.items()})
    torch.manual_seed(0)
    found = run_checked(graph, inputs)
    assert all(torch.equal(found[name], expected[name]) for name in inputs)
    written = {graph.values[use.value].name for task in graph.tasks for use in task.changes}
    assert {name for name in inputs if not torch.equal(before[name], inputs[name])} <= written


def run_checked(graph: asc.Graph, inputs: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with asc.schedule(
            graph, asc.Machine.emulated(gpus=1), backend="host", check="bytes"
        ) as schedule:
            return schedule(**inputs)


def test_without_the_table_the_referee_would_find_the_write(monkeypatch):
    monkeypatch.setattr("autosched.graph.effects.BATCH_NORMS", frozenset())
    with pytest.raises(asc.HazardError, match="task 'native_batch_norm' wrote its argument 'x1'"):
        test_torchs_functions_do_what_the_tables_say(
            aten.native_batch_norm.default,
            (image, None, None, *mean_and_var(), True, 0.1, 1e-5),
            {},
        )


def test_attention_draws_only_with_dropout():
    names = [name for name in dir(aten) if "scaled_dot_product" in name and "attention" in name]
    drawing = [
        op
        for op in (getattr(getattr(aten, name), "default", None) for name in names)
        if op is not None and torch.Tag.nondeterministic_seeded in op.tags
    ]
    assert len(drawing) > 3
    for op in drawing:
        assert not effects_of(op, ["q", "k", "v"], {"dropout_p": 0.0}).random
        assert effects_of(op, ["q", "k", "v"], {"dropout_p": 0.1}).random


@pytest.mark.parametrize(
    "name", [name for name, (_, _, condition) in _ALSO_WRITES.items() if not condition]
)
def test_what_a_table_calls_written_stands_where_the_schema_has_it(name: str) -> None:
    names = _ALSO_WRITES[name][0].split()
    parameters = [argument.name for argument in getattr(aten, name).default._schema.arguments]
    assert parameters.index(names[-1]) == len(names) - 1


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_one_empty_tensor_may_be_two_inputs(shape):
    """It has one version counter, and nothing that could be written."""
    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    x[:1].add_(1)
    torch.sub(x, y, out=x)
    graph.output(x=x)
    empty = torch.empty(shape)
    for check in (False, True, "bytes"):
        with asc.schedule(
            graph, asc.Machine.emulated(gpus=1), check=check, backend="host"
        ) as schedule:
            assert schedule(x=empty, y=empty)["x"].shape == shape
