"""The roofline estimate: what each op counts, what stays unknown and why, and that nothing outside is touched."""

import dataclasses

import pytest
import torch
from torch import nn

import autosched as asc
from autosched.costs.costs import Work
from autosched.costs.estimate import estimate
from autosched.errors import GraphError
from autosched.graph.graph import Graph
from autosched.machine.machine import Device

FLOAT = 4  # bytes


def estimate_one(fn, *examples, **facts):
    """Estimate a graph of the one task ``t``, which is ``fn(x0, x1, ...)``."""
    graph = Graph()
    names = [f"x{i}" for i in range(len(examples))]
    writes = facts.pop("writes", ())
    values = graph.inputs(*names)
    graph.add(fn, *values, name="t", writes=[values[i] for i in writes], **facts)
    return estimate(graph, dict(zip(names, examples, strict=True)))


def work_of(fn, *examples, **facts):
    found = estimate_one(fn, *examples, **facts)
    assert found.unknown == {}
    return found.costs.work["t"]


def why_unknown(fn, *examples, **facts):
    found = estimate_one(fn, *examples, **facts)
    assert "t" not in found.costs.work
    assert "t" not in found.costs.nbytes
    return found.unknown["t"]


def floats(*shape):
    return torch.ones(shape)


# ---- what an op counts


COUNTED = {  # by what is counted: a function, the shapes of its arguments, its work, and facts of its task
    "a product has two flops per multiplication, and reads and writes each matrix": (
        torch.mm, [(2, 3), (3, 5)], Work(2 * 2 * 3 * 5, FLOAT * (6 + 15 + 10)), {}),
    "more than two dimensions cost no more than a bmm": (
        torch.matmul, [(4, 2, 3), (3, 5)], Work(2 * 8 * 3 * 5, FLOAT * (24 + 15 + 40)), {}),
    "an elementwise op has one flop per element that it makes": (
        torch.add, [(8, 16), (16,)], Work(128, FLOAT * (128 + 16 + 128)), {}),
    "a reduction has one flop per element that it reads": (torch.sum, [(100,)], Work(100, FLOAT * 101), {}),
    "ops of one task add up": (lambda x: x.relu() + 1, [(10,)], Work(20, FLOAT * 40, launches=2), {}),
    "a module": (nn.Linear(8, 3), [(4, 8)], Work(2 * 4 * 8 * 3, FLOAT * (32 + 24 + 3 + 12)), {}),
    "what comes twice is read once": (lambda x: x * x, [(10,)], Work(10, FLOAT * 20), {}),
    "and so is a repeated dimension": (lambda x: x.expand(1000, 10).sum(), [(10,)], Work(10_000, FLOAT * 11), {}),
    "a transposed view": (lambda x: x.T, [(4, 5)], Work(0, 0), {}),
    "a part": (lambda x: x.view(-1)[2:], [(4, 5)], Work(0, 0), {}),
    "another shape in place": (lambda x: x.unsqueeze_(0), [(4, 5)], Work(0, 0), {}),
    "empty memory": (torch.empty_like, [(4, 5)], Work(0, 0), {}),
    "questions about a shape": (lambda x: x.shape[0] + x.dim() + x.is_contiguous(), [(4, 5)], Work(0, 0), {}),
    "an empty tensor": (lambda x, y: x + y.expand(0, 3), [(0, 3), (1, 3)], Work(0, 0), {}),
    "in place: reads and writes": (torch.Tensor.add_, [(10,), (10,)], Work(10, FLOAT * 30), {"writes": [0]}),
    "no result": (
        lambda x: torch._foreach_add_([x], 1.0), [(10,)], Work(10, FLOAT * 20), {"writes": [0], "outputs": ()}),
    "what is overwritten is not read": (
        torch.Tensor.copy_, [(10,), (10,)], Work(10, FLOAT * 20), {"writes": [0]}),
    "nor is what is given as out": (
        lambda x, y: torch.add(x, x, out=y), [(10,), (10,)], Work(10, FLOAT * 20), {"writes": [1]}),
}  # fmt: skip


@pytest.mark.parametrize("what", COUNTED)
def test_what_is_counted(what):
    fn, shapes, work, facts = COUNTED[what]
    assert work_of(fn, *(floats(*shape) for shape in shapes), **facts) == work


def test_a_lookup_reads_only_what_it_returns():
    work = work_of(nn.functional.embedding, torch.tensor([7, 7, 1]), floats(1000, 2))
    assert work == Work(6, 3 * 8 + 2 * FLOAT * 6)


def test_attention_on_the_fake_cpu_has_its_formula():
    q = floats(1, 2, 8, 16)
    assert work_of(nn.functional.scaled_dot_product_attention, q, q, q).flops == 2 * 2 * (
        2 * 8 * 8 * 16
    )


def test_attention_backwards_has_its_formula():
    def gradient(x):
        with torch.enable_grad():
            return torch.autograd.grad(
                nn.functional.scaled_dot_product_attention(x, x, x).sum(), x
            )[0]

    flops = work_of(gradient, floats(1, 2, 8, 16).requires_grad_()).flops
    assert flops > (2 + 5) * 2 * (
        2 * 8 * 8 * 16
    )  # two products forward, five backward, and some elementwise ops


def test_operators_methods_and_setitem_are_counted():
    graph = Graph()
    x, w = graph.inputs("x", "w")
    y = (x @ w).relu()
    y += 1
    y[0] = 0
    graph.output(y=y)
    found = estimate(graph, {"x": floats(2, 3), "w": floats(3, 5)})
    assert found.unknown == {}
    assert {name: work.flops for name, work in found.costs.work.items()} == {
        "matmul": 60,
        "relu": 10,
        "iadd": 10,
        "setitem": 5,
    }


# ---- bytes of values


def test_bytes_of_inputs_constants_views_and_trees():
    graph = Graph()
    x = graph.input("x")
    constant = graph.constant(torch.zeros(3, dtype=torch.float64), name="c")
    row = x[0]
    pair = graph.add(
        lambda v, c: (v * 2, {"sum": [c.sum(), 1]}),
        row,
        constant,
        name="p",
        outputs=("a", {"sum": "b"}),
    )
    graph.output(*pair[:1])
    costs = estimate(graph, {"x": floats(4, 5)}).costs
    assert costs.nbytes == {"x": 80, "c": 24, "getitem": 20, "a": 20, "b": 8}
    assert costs.value_nbytes(x) == 80


def test_a_repeated_dimension_counts_in_full_in_a_value_for_a_copy_writes_it_out():
    assert estimate_one(lambda x: x.expand(100, 10), floats(10)).costs.nbytes["t"] == FLOAT * 1000


def test_a_value_without_a_tensor_keeps_the_default():
    costs = estimate_one(lambda x, n: x * n, floats(10), 3).costs
    assert costs.nbytes == {"x0": 40, "t": 40}


# ---- where it runs


def test_constraints_and_devices_in_calls_do_not_matter():
    graph = Graph()
    with graph.on("cuda:7"):
        x = graph.input("x")
        y = x + x
    z = graph.add(lambda v: v + torch.ones(3, device="cuda:1"), y.to("cuda:0"), name="z")
    graph.output(z=z)
    found = estimate(graph, {"x": floats(3)})
    assert found.unknown == {}
    assert found.costs.work["to_cuda0"] == Work(0, 0)
    assert found.costs.nbytes["z"] == 12


def test_examples_on_meta_need_no_memory():
    big = torch.empty(10**6, 10**6, device="meta")
    assert work_of(torch.mm, big, big).flops == 2 * 10**18


def test_torch_functions_without_tensors_run():
    graph = Graph()
    graph.add(torch.zeros, 3, 4, device="cuda:0")
    graph.add(torch.ops.aten.ones.default, [2], name="ones")
    found = estimate(graph, {})
    assert found.unknown == {}
    assert found.costs.nbytes == {"zeros": 48, "ones": 8}


# ---- what stays unknown


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (
            lambda x: x.sum().item(),
            "DataDependentOutputException: aten._local_scalar_dense.default",
        ),
        (lambda x: 1 if x.sum() > 0 else 2, "DataDependentOutputException"),
        (lambda x: x[x > 0], "DynamicOutputShapeException: aten.nonzero.default"),
        (lambda x: torch.from_numpy(x.numpy()), "RuntimeError: .numpy() is not supported"),
        (lambda x: x.to_sparse(), "meets a tensor of layout torch.sparse_coo"),
        (lambda x: int("four"), "ValueError: invalid literal for int() with base 10"),
        (lambda x: (x, x), "ValueError: 2 results where outputs= says 3"),
    ],
)
def test_a_function_that_cannot_run_on_fake_tensors_is_unknown(fn, reason):
    facts = {"outputs": 3} if "3" in reason else {}
    assert why_unknown(fn, floats(4), **facts).startswith(reason)


def test_unknown_spreads_to_what_depends_on_it_and_no_further():
    graph = Graph()
    x = graph.input("x")
    n = graph.add(lambda t: t.sum().item(), x, name="n")
    y = graph.add(lambda t, k: t * k, x, n, name="y")
    graph.output(z=x + x, w=y + 1)
    found = estimate(graph, {"x": floats(4)})
    assert list(found.costs.work) == ["add"]
    assert found.costs.nbytes == {"x": 16, "add": 16}
    assert {name: reason.partition(":")[0] for name, reason in found.unknown.items()} == {
        "n": "DataDependentOutputException",
        "y": "reads 'n', which is unknown",
        "add_1": "reads 'y', which is unknown",
    }


def test_a_value_that_an_unknown_task_writes_keeps_its_shape_and_stays_known():
    graph = Graph()
    x = graph.input("x")
    graph.add(lambda t: t.mul_(t.max().item()), x, name="scale", writes=[x], outputs=())
    graph.output(y=x + 1)
    found = estimate(graph, {"x": floats(4)})
    assert list(found.unknown) == ["scale"]
    assert found.costs.nbytes == {"x": 16, "add": 16}


def test_a_task_that_sees_no_tensor_is_not_run():
    ran = []
    assert why_unknown(lambda n: ran.append(n), 3) == "has no tensor among its arguments"
    assert ran == []


def test_a_task_without_a_function_is_unknown():
    networkx = pytest.importorskip("networkx")
    graph = Graph.from_networkx(networkx.DiGraph([("a", "b")]))
    assert estimate(graph, {}).unknown == {"a": "has no function", "b": "has no function"}


def test_an_example_that_has_no_fake_twin_is_unknown():
    assert why_unknown(lambda x: x, floats(3).to_sparse()) == "reads 'x0', which is unknown"


def test_an_unknown_task_keeps_its_default_cost():
    graph = Graph()
    x = graph.input("x")
    graph.add(lambda t: t.sum().item(), x, name="n")
    costs = estimate(graph, {"x": floats(4)}).costs
    assert costs.task_seconds(graph.task("n"), Device("cpu")) == costs.default_seconds


def test_wrong_examples_are_named():
    graph = Graph("g")
    graph.inputs("x", "y")
    with pytest.raises(GraphError, match=r"graph 'g' misses input 'y'; its inputs are 'x', 'y'"):
        estimate(graph, {"x": floats(1)})
    with pytest.raises(GraphError, match=r"graph 'g' was given 'z', which is no input"):
        estimate(graph, {"x": floats(1), "y": floats(1), "z": floats(1)})


# ---- nothing outside is touched


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (torch.matmul, [(2, 3), (4, 5)]),
        (torch.add, [(2,), (3,)]),
        (lambda a, b: torch.cat([a, b]), [(2, 2), (2, 3)]),
    ],
)
def test_examples_of_sizes_that_do_not_fit_are_named(fn, shapes, caplog):
    graph = asc.Graph()
    graph.output(y=fn(graph.input("a"), graph.input("b")))
    examples = dict(zip("ab", map(torch.randn, shapes), strict=True))
    message = rf"task '\w+', added at .*test_estimate.py:\d+, cannot run on .*; 'a' is \({shapes[0][0]},.*'b' is \("
    with pytest.raises(asc.GraphError, match=message) as caught:
        asc.schedule(graph, asc.Machine.emulated(gpus=1), examples=examples)
    assert "\n" not in str(caught.value)
    assert not caplog.records  # torch would log a traceback of twenty lines


def test_examples_and_constants_are_not_written():
    graph = Graph()
    x = graph.input("x")
    constant = torch.ones(4)
    graph.add(torch.Tensor.add_, x, constant, writes=[x])
    graph.add(torch.Tensor.zero_, graph.constant(constant), writes=[graph.constant(constant)])
    x.unsqueeze_(0)
    example = torch.arange(4.0)
    versions = example._version, constant._version
    assert estimate(graph, {"x": example}).unknown == {}
    assert (example._version, constant._version) == versions
    assert example.tolist() == [0, 1, 2, 3]
    assert constant.tolist() == [1, 1, 1, 1]


def test_no_random_number_is_drawn():
    def seeds(x):
        torch.manual_seed(5)
        return nn.functional.dropout(x) + torch.rand(4)

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    assert work_of(seeds, floats(4)).flops > 0
    assert torch.equal(torch.rand(3), expected)


def test_a_module_that_counts_batches_is_refused_and_left_as_it_was():
    norm = nn.BatchNorm1d(8)
    assert why_unknown(norm, floats(4, 8)) == "writes a tensor that is not among its arguments"
    assert type(norm.num_batches_tracked) is torch.Tensor
    assert norm.num_batches_tracked.item() == 0
    assert norm.running_mean.tolist() == [0.0] * 8


def test_a_hidden_backward_leaves_no_fake_gradient_behind():
    layer = nn.Linear(8, 3)

    def train(x):
        with torch.enable_grad():
            layer(x).sum().backward()

    assert (
        why_unknown(train, floats(4, 8))
        == "differentiates by a tensor that is not among its arguments"
    )
    assert layer.weight.grad is None


def test_gradients_of_arguments_are_known():
    def gradient(x):
        with torch.enable_grad():
            return torch.autograd.grad((x * x).sum(), x)[0]

    assert estimate_one(gradient, floats(4).requires_grad_()).costs.nbytes["t"] == 16


def test_autograd_records_nothing_across_tasks():
    recorded = []

    def look(x):
        y = x * 2
        recorded.append(y.requires_grad)
        return y

    assert work_of(look, floats(4).requires_grad_()).flops == 4
    assert recorded == [False]


def flops_of(fn, *args):
    """Return the FLOPs of a captured function without gradients."""
    graph = asc.capture(torch.no_grad()(fn), *args)
    return sum(work.flops for work in asc.Costs.estimate(graph, graph.feed(*args)).work.values())


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_multiply_each_step_by_all_weights(kind):
    """On a CPU an LSTM is one operator, whose products no formula of torch counts."""
    layer, x = kind(64, 128, num_layers=2, batch_first=True), torch.zeros(8, 2, 64)
    products = 2 * 8 * 2 * sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    assert flops_of(lambda x: layer(x)[0], x) == pytest.approx(products, rel=0.05)

    def backward(x):
        with torch.enable_grad():
            layer(x)[0].sum().backward()
            grads = [parameter.grad for parameter in layer.parameters()]
        layer.zero_grad()
        return grads

    assert flops_of(backward, x) == pytest.approx(3 * products, rel=0.15)


def test_a_layer_of_a_transformer_is_the_sum_of_its_products_and_attention():
    layer, x = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.zeros(8, 5, 64)
    weights = sum(p.numel() for p in layer.eval().parameters() if p.dim() == 2)
    assert flops_of(lambda x: layer(x), x) == 2 * 8 * 5 * weights + 4 * 8 * 5 * 5 * 64


@pytest.mark.parametrize(
    ("fn", "shapes", "flops"),
    [
        (torch.mv, [(30, 40), (40,)], 2 * 30 * 40),
        (torch.addmv, [(30,), (30, 40), (40,)], 2 * 30 * 40),
        (torch.addbmm, [(4, 6), (3, 4, 5), (3, 5, 6)], 2 * 3 * 4 * 5 * 6),
        (torch.dot, [(40,), (40,)], 2 * 40),
    ],
)
def test_products_that_torch_does_not_count(fn, shapes, flops):
    assert flops_of(fn, *map(torch.zeros, shapes)) == flops


def test_merged_tasks_launch_their_operators_one_by_one_whatever_their_seconds():
    graph = asc.Graph()
    graph.output(y=torch.exp(torch.sin(graph.input("x"))))
    (merged,) = asc.merge(graph, {"sin": "all", "exp": "all"}).tasks
    for costs in (asc.Costs(), asc.Costs.table({"all": 1.0})):
        assert (merged.name, costs.launches(merged)) == ("all", 2)
    device = dataclasses.replace(asc.Machine.emulated(1).device("cuda:0"), issue_seconds=0.5)
    assert asc.Costs.table({"all": 1.0}).issue_seconds(merged, device) == 1.0
