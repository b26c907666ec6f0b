"""Which tasks can be fused, and the groups of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor

import autosched as asc
from autosched.coarsening.merging import merged
from autosched.fusion.candidates import (
    by_device,
    by_joining,
    by_stream,
    reads_numbers,
    repeatable,
    unfusable,
)
from autosched.graph.task import Task
from autosched.program.program import Program, Record, Run, Stream, Wait

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


def test_groups_end_where_streams_wait() -> None:
    graph = two_branches()
    schedule = asc.schedule(graph, GPUS, policy="heft")
    device = by_device(graph, schedule.placement, lambda task: task.name != "exp")
    assert device == {
        "add": "add+3", "sin": "add+3", "mul": "add+3", "relu": "add+3",
        "add_1": "add_1+1", "cos": "add_1+1",
    }  # fmt: skip
    stream = by_stream(graph, schedule.program, lambda task: True)
    assert stream["add"] == stream["sin"]
    assert stream["add_1"] == stream["cos"]
    assert stream["mul"] == stream["exp"]
    assert len({stream["add"], stream["add_1"], stream["mul"]}) == 3


def test_a_group_has_at_least_two_tasks_and_no_views() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=x.t() + 1)
    schedule = asc.schedule(graph, GPUS, policy="single")
    assert by_device(graph, schedule.placement, lambda task: True) == {}


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
    groups = by_stream(graph, program, lambda task: True)
    assert groups["a"] == groups["b"]
    assert groups["c"] == groups["d"]
    assert groups["e"] == groups["f"]
    assert len(set(groups.values())) == 3


def test_a_task_that_nothing_needs_joins_the_region_before_it() -> None:
    """Between waits it would be a region, or a task, of its own."""
    graph = asc.Graph()
    x = graph.input("x")
    a = graph.add(half, x, name="a")
    graph.add(aten.empty.memory_format, (0,), name="unused")
    graph.output(b=graph.add(half, a, name="b"))
    own, other = Stream("cpu", "compute"), Stream("cpu", "compute1")
    program = Program((Run(own, "a"), Run(own, "b"), Record(other, 0), Run(other, "unused")))
    groups = by_stream(graph, program, lambda task: True)
    assert groups["a"] == groups["b"] == groups["unused"]


OWN, OTHER = Stream("cpu", "compute"), Stream("cpu", "compute1")
# Two branches, what joins them on one stream, and two branches that need it.
JOINED = Program(
    (
        *(Run(OWN, "a"), Run(OTHER, "b"), Record(OTHER, 0), Wait(OWN, 0)),
        *(Run(OWN, "join"), Record(OWN, 1), Run(OWN, "c"), Wait(OTHER, 1), Run(OTHER, "d")),
        *(Record(OTHER, 2), Wait(OWN, 2), Run(OWN, "end")),
    )
)


def joined(**options: str) -> asc.Graph:
    graph = asc.Graph()
    x = graph.input("x")
    a, b = graph.add(half, x, name="a"), graph.add(half, x, name="b")
    join = graph.add(torch.add, a, b, name="join", on=options.get("on"))
    c, d = graph.add(half, join, name="c"), graph.add(half, join, name="d")
    if "writes" in options:
        graph.add(torch.Tensor.add_, {"a": a, "join": join}[options["writes"]], join, name="write")
    if "after" in options:
        graph.add(half, x, name="last", after=[options["after"]])
    graph.output(y=graph.add(torch.add, c, d, name="end"))
    if "output" in options:
        graph.output(join=join)
    return graph


def repeated(
    graph: asc.Graph,
    program: Program = JOINED,
    seconds: float = 1e-5,
    can_fuse: Callable[[Task], bool] = lambda task: True,
) -> frozenset[str]:
    known = {item.task for item in program if isinstance(item, Run)}
    rest = (Run(OWN, task.name) for task in graph.tasks if task.name not in known)
    program = Program((*program, *rest))
    return repeatable(graph, program, can_fuse, lambda task, device: seconds)


def test_what_joins_branches_is_run_again_by_each_stream_that_needs_it() -> None:
    graph = joined()
    assert repeated(graph) == {"join"}
    assert by_stream(graph, JOINED, lambda task: True, ["join"]) == {}
    found = merged(graph, {"c": "c", "d": "d"}, repeated=["join"])
    assert [[part.name for part in task.parts] for task in found.tasks] == [
        *([], [], ["join", "c"], ["join", "d"], []),
    ]
    x = torch.ones(2)
    assert torch.equal(found.run_serial(x=x)["y"], graph.run_serial(x=x)["y"])


@pytest.mark.parametrize(
    "options",
    [{"on": "cpu"}, {"writes": "a"}, {"writes": "join"}, {"after": "join"}, {"output": "join"}],
)
def test_a_task_is_not_run_again_if_its_results_or_its_place_would_change(
    options: dict[str, str],
) -> None:
    assert repeated(joined(**options)) == set()


def test_a_task_is_run_again_if_that_is_shorter_than_a_wait_and_all_are_regions() -> None:
    graph = joined()
    assert repeated(graph, seconds=1e-3) == set()
    for name in ("join", "d"):
        assert repeated(graph, can_fuse=lambda task, name=name: task.name != name) == set()


def test_a_task_that_only_its_own_stream_needs_is_not_run_again() -> None:
    alone = Program(tuple(Run(OWN, task) for task in ("a", "b", "join", "c", "d", "end")))
    assert repeated(joined(), alone) == set()


def test_a_task_is_not_run_again_on_another_device() -> None:
    """Instead of its result, what it reads would be copied."""
    gpu = Stream("cuda:0", "compute")
    others = tuple(
        Run(gpu, "d") if isinstance(item, Run) and item.task == "d" else item for item in JOINED
    )
    assert repeated(joined(), Program(others)) == set()


def test_what_reads_the_results_of_repeated_tasks_is_not_repeated() -> None:
    """Otherwise the work would grow with the number of joins."""
    graph = asc.Graph()
    x = graph.input("x")
    program: list[Run | Record | Wait] = []
    total = graph.add(half, x, name="first")
    program += [Run(OWN, "first"), Record(OWN, 0), Wait(OTHER, 0)]
    for i in range(4):
        own = graph.add(half, total, name=f"own{i}")
        other = graph.add(half, total, name=f"other{i}")
        total = graph.add(torch.add, total, graph.add(torch.add, own, other), name=f"join{i}")
        program += [Run(OWN, f"own{i}"), Run(OTHER, f"other{i}"), Record(OTHER, 2 * i + 1)]
        program += [Wait(OWN, 2 * i + 1), Run(OWN, graph.tasks[-2].name), Run(OWN, f"join{i}")]
        program += [Record(OWN, 2 * i + 2), Wait(OTHER, 2 * i + 2)]
    graph.output(y=graph.add(half, total, name="end"))
    found = repeatable(graph, Program((*program, Run(OWN, "end"))), lambda _: True, lambda *_: 0)
    assert {"first", *(f"join{i}" for i in range(4))} & found == {"first", "join1"}


# ---- joining


@pytest.mark.parametrize("is_run", [True, False])
@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[0], lambda x: x.t()[1:]])
def test_joining_sees_dependencies_through_views(view: Callable[[Any], Any], is_run: bool) -> None:
    """The stream has waited before, so no wait tells of them.

    Programs that are lowered run views, those written by hand need not.
    """
    graph = asc.Graph()
    a = graph.add(half, graph.input("x"), name="a")
    short = graph.add(half, a, name="short")
    long = graph.add(half, view(a), name="long")
    end = graph.add(half, long, name="end")
    graph.output(short=short, end=end, b=graph.add(half, long, name="b"))
    views = [task.name for task in graph.tasks if task.view]
    program = Program(
        (
            *(Run(OWN, "a"), Record(OWN, 0), Wait(OTHER, 0), Run(OTHER, "short")),
            *(Run(OTHER, name) for name in views if is_run),
            *(Run(OTHER, "long"), Record(OTHER, 1), Run(OTHER, "end")),
            *(Wait(OWN, 1), Run(OWN, "b")),
        )
    )
    machine = asc.Machine([asc.Device("cpu", streams=2)], [], imagined=True)
    costs = asc.Costs.table({"a": 1e-5, "short": 1e-5, "long": 1e-4, "end": 1e-3, "b": 1e-5})
    timeline = asc.simulate(program, asc.Problem(graph, machine, costs))
    members = {name: [graph.task(name)] for name in ("a", "short", "b")} | dict.fromkeys(views, ())
    groups = by_joining(graph, machine, timeline, members)
    # A region with ``b`` would come before ``long``, and after it.
    assert groups == {"a": "a+1", "short": "a+1"}
    found = merged(graph, groups)
    assert [task.name for task in found.tasks] == ["a+1", "long", "end", "b"]
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(found.run_serial(x=x)["b"], graph.run_serial(x=x)["b"])
