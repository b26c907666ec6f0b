"""Results that torch names, and results that are unpacked, in graphs written by hand."""

import re

import pytest
import torch
from torch import nn

import autosched as asc
from autosched import GraphError

SQUARE = torch.tensor([[4.0, 1.0, 2.0], [1.0, 5.0, 3.0], [2.0, 3.0, 6.0]])
ARGUMENTS = [
    (),
    (1,),
    (SQUARE,),
    (SQUARE[0],),
    (SQUARE.int()[0],),
    (torch.tensor([3, 3, 3], dtype=torch.int32),),
]
TYPES = [
    name
    for name in torch.return_types.__all__
    if isinstance(getattr(torch.return_types, name), type)
]


def calls(name):
    """Yield the calls of a function that give named results of this type, with their arguments."""
    kind = getattr(torch.return_types, name)
    fn = getattr(torch, name, None) or getattr(torch.linalg, name.removeprefix("linalg_"))
    for more in ({}, {"dim": 1}, {"bins": 3}, {"bins": [2, 2, 2]}):
        for args in ARGUMENTS:
            try:
                made = fn(SQUARE, *args, **more)
            except (RuntimeError, TypeError):
                continue
            if isinstance(made, kind):
                yield fn, args, more, made


@pytest.mark.parametrize("name", [name for name in TYPES if not name.endswith("_out")])
def test_results_have_the_names_and_the_number_that_torch_gives_them(name):
    found = list(calls(name))
    assert found
    for fn, args, more, made in found:
        graph = asc.Graph()
        result = fn(graph.input("x"), *args, **more)
        assert len(result) == len(made)
        fields = type(made).__match_args__
        graph.output(**{f"by_{field}": getattr(result, field) for field in fields})
        graph.output(**dict(zip(fields, result, strict=True)))
        outputs = graph.run_serial(x=SQUARE)
        for field in fields:  # LAPACK's last bits depend on where memory begins
            torch.testing.assert_close(outputs[field], getattr(made, field))
            torch.testing.assert_close(outputs[f"by_{field}"], getattr(made, field))


@pytest.mark.parametrize(
    "call",
    [
        torch.var_mean,
        lambda x: torch.std_mean(x, dim=1),
        lambda x: torch.native_layer_norm(x, [3], None, None, 1e-5),
        lambda x: torch.ops.aten.max_pool2d_with_indices(x[None], 2),
    ],
)
def test_the_number_of_results_without_names_is_known(call):
    graph = asc.Graph()
    graph.output(*call(graph.input("x")))
    for made, expected in zip(graph.run_serial(x=SQUARE).values(), call(SQUARE), strict=True):
        torch.testing.assert_close(made, expected)


def test_named_results_are_views_of_a_call_in_schedules_too():
    graph = asc.Graph()
    x = graph.input("x")
    best = x.max(dim=1)
    best.values.mul_(2)
    graph.output(low=best.values, at=best.indices)
    assert [task.name for task in graph.tasks[:2]] == ["max", "max.values"]
    assert graph.tasks[1].view
    with asc.schedule(graph, asc.Machine.emulated(gpus=1)) as schedule:
        assert "max.values" in schedule.code.replace("_", ".")
        outputs = schedule(x=SQUARE)
    assert outputs["low"].tolist() == [8, 10, 12]
    assert outputs["at"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "call",
    [
        *(torch.max, torch.median, lambda x: torch.max(x, x), lambda x: torch.min(x, other=x)),
        *(
            lambda x: x.unique_consecutive(),
            lambda x: nn.functional.embedding_bag(x.long(), SQUARE),
        ),
    ],
)
def test_other_overloads_have_no_names(call):
    result = call(asc.Graph().input("x"))
    for use in (len, list):
        with pytest.raises(GraphError):
            use(result)


def test_an_assignment_says_how_many_results_there_are():
    graph = asc.Graph()
    x = graph.input("x")
    low, high = x.split(2)
    high += low[:1]
    first, (second, third) = graph.add(lambda t: (t.sum(), (t.min(), t.max())), x)
    one, two, three = x
    graph.output(low=low, high=high, parts=first + second + third, rows=one + two + three)
    with asc.schedule(graph, asc.Machine.emulated(gpus=1)) as schedule:
        outputs = schedule(x=SQUARE.clone())
    rows = SQUARE.clone()
    rows[2] += rows[0]
    assert torch.equal(outputs["low"], rows[:2])
    assert torch.equal(outputs["high"], rows[2:])
    assert outputs["parts"] == rows.sum() + rows.min() + rows.max()
    assert torch.equal(outputs["rows"], rows.sum(0))


def test_an_assignment_of_another_number_of_results_is_refused():
    graph = asc.Graph()
    low, high = graph.input("x").split(1)
    graph.output(low=low, high=high)
    with pytest.raises(ValueError, match="3 results where outputs= says 2"):
        graph.run_serial(x=SQUARE)


@pytest.mark.parametrize("use", [list, lambda x: [row + 1 for row in x], lambda x: torch.add(*x)])
def test_who_does_not_know_the_number_says_it(use):
    graph = asc.Graph()
    message = (
        "value 'split' has no length before it runs; say how many results its task has: graph.add"
    )
    with pytest.raises(GraphError, match=re.escape(message)):
        use(graph.input("x").split(2))
    assert len(graph.add(torch.split, graph.value("x"), 2, outputs=2)) == 2


@pytest.mark.parametrize(
    ("module", "outputs"),
    [
        (nn.LSTM(3, 2), ("y", ("h", "c"))),
        (nn.GRU(3, 2), 2),
        (nn.LSTMCell(3, 2), 2),
        (nn.MultiheadAttention(3, 1), 2),
        (nn.BatchNorm1d(3), None),
    ],
)
def test_a_module_that_needs_facts_about_its_input_is_named_with_the_way(module, outputs):
    graph = asc.Graph()
    x = graph.input("x")
    arguments = [x] * (3 if isinstance(module, nn.MultiheadAttention) else 1)
    with pytest.raises(
        GraphError, match=rf"; {type(module).__name__}.forward needs it. Add the module"
    ):
        module(*arguments)
    graph = asc.Graph()
    x = graph.input("x")
    found = graph.add(module, *[x] * len(arguments), outputs=outputs)
    graph.output(y=found if outputs is None else found[0])
    with torch.no_grad():
        expected = module(*[SQUARE] * len(arguments))
    expected = expected if outputs is None else expected[0]
    assert torch.equal(graph.run_serial(x=SQUARE)["y"], expected)
