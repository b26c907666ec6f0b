"""Graphs: names, versions and dependencies as text, what torch and Python spell as tasks, and every error message."""

import functools
import inspect
import operator
import re
import sys
from collections import namedtuple

import pytest
import torch
from torch import nn

import autosched as asc
from autosched._lib.tree import flatten
from autosched.coarsening import merged
from autosched.errors import GraphError
from autosched.graph.graph import Graph
from autosched.graph.value import Value


def text(lines):
    """Strip the indentation of an expected text."""
    return inspect.cleandoc(lines)


def dependencies(graph, name):
    return [(graph.tasks[d.task].name, d.kind) for d in graph.task(name).dependencies]


def source_of(fn):
    """Return ``file:line`` of a function that stands on one line."""
    return f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}"


def identity(x):
    return x


# ---- names


def test_a_made_name_avoids_names_that_are_taken():
    graph = Graph()
    x = graph.input("mm")
    graph.add(torch.mm, x, x, name="mm_1")
    assert [torch.mm(x, x).name, torch.mm(x, x).name] == ["mm_2", "mm_3"]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: x @ x, "matmul"),
        (lambda x: x.T, "T"),
        (lambda x: x & x, "and"),
        (lambda x: x.relu(), "relu"),
        (lambda x: nn.functional.relu(x), "relu"),
        (lambda x: torch.ops.aten.mm.default(x, x), "mm"),
        (lambda x: x[0], "getitem"),
        (lambda x: x.to("cuda:1"), "to_cuda1"),
        (lambda x: x.graph.add(lambda v: v, x), "lambda"),
        (lambda x: x.graph.add(nn.ReLU(), x), "ReLU"),
    ],
)
def test_a_name_says_what_the_task_does(make, name):
    assert make(Graph().input("x")).name == name


def test_an_input_has_the_bytes_that_are_given():
    graph = Graph()
    graph.output(y=graph.input("x", nbytes=8) + graph.input("w"))
    assert asc.schedule(graph, asc.Machine.emulated(gpus=0)).peak_bytes == {"cpu": 8.0}
    with pytest.raises(
        GraphError, match="nbytes of input 'z' must be a number, 0 or more, and finite, got -1"
    ):
        graph.input("z", nbytes=-1)


# ---- versions and dependencies


def test_versions_and_dependencies_of_every_kind():
    graph = Graph("kinds")
    x, w = graph.inputs("x", "w")
    h = x @ w
    w += 1
    y = h @ w
    w *= 2
    with graph.on("cuda:0"):
        graph.add(identity, y, name="last", after=[h, "iadd"])
    graph.output(y, weights=w)
    assert str(graph) == text("""
        graph kinds
          input x
          input w
          matmul(x, w)
          iadd(w): writes w
          matmul_1(matmul, w@1)
          imul(w@1): writes w
          last(matmul_1): after matmul, after iadd, on cuda:0
          output matmul_1 = matmul_1
          output weights = w
    """)
    assert dependencies(graph, "matmul") == []
    assert dependencies(graph, "iadd") == [("matmul", "anti")]
    assert dependencies(graph, "matmul_1") == [("matmul", "data"), ("iadd", "data")]
    assert dependencies(graph, "imul") == [("iadd", "data"), ("matmul_1", "anti")]
    assert dependencies(graph, "last") == [
        ("matmul_1", "data"),
        ("matmul", "order"),
        ("iadd", "order"),
    ]
    assert graph.users == [[1, 2, 4], [2, 3, 4], [3, 4], [], []]
    assert graph.last_version(w.index) == 2


def test_tasks_that_write_disjoint_parts_do_not_depend_on_each_other():
    graph = Graph()
    x = graph.input("x")
    top, bottom = x[:2], x[2:]
    top += 1
    bottom[1:] += 1
    x[0] = 2.0
    y = top * 2
    z = x.sum()
    assert str(graph) == text("""
        graph graph
          input x
          getitem(x)
          getitem_1(x)
          iadd(getitem): writes getitem
          getitem_2(getitem_1)
          iadd_1(getitem_2): writes getitem_2
          setitem(x@2): writes x
          mul(getitem@2)
          sum(x@3)
    """)
    assert dependencies(graph, "iadd_1") == [("getitem_2", "data"), ("getitem_1", "anti")]
    assert dependencies(graph, "setitem") == [("iadd", "data")]
    assert dependencies(graph, y.name) == [
        ("getitem", "data"),
        ("iadd", "data"),
        ("setitem", "data"),
    ]
    assert sorted(dependencies(graph, z.name)) == [
        ("iadd", "data"),
        ("iadd_1", "data"),
        ("setitem", "data"),
    ]


def test_a_view_through_a_function_of_ones_own_may_see_all_of_its_base():
    graph = Graph()
    x = graph.input("x")
    mine = graph.add(lambda t: t[:1], x[:2], aliases=graph.value("getitem"), name="mine")
    mine[0] = 1.0
    x[2] = 2.0
    mine[1:] += 1.0
    assert dependencies(graph, "setitem_1") == []
    assert ("setitem", "data") in dependencies(graph, "iadd")


def test_pieces_of_a_split_are_apart():
    graph = Graph()
    a, b = graph.add(torch.chunk, graph.input("x"), 2, outputs=("a", "b"))
    a += 1
    b += 1
    assert dependencies(graph, "iadd_1") == [("chunk", "data")]


def test_a_shape_that_changes_in_place_changes_no_value_and_copies_of_the_graph_know_of_it():
    graph = asc.Graph()
    x = graph.input("x")
    rows = x[:1]
    before = x.region, rows.region
    x.t_()
    assert x.region is before[0]
    assert rows.region is before[1]
    part = rows[0]
    other = asc.Graph()
    other.include(graph, {"x": other.input("x")})
    for copied in (graph, merged(graph, {}), other):
        rest = copied.value("x")[1:]  # of the transposed tensor
        for value in (rows, part):
            assert copied.value(value.name).region.overlaps(rest.region)


def test_an_item_of_a_plain_list_is_no_view():
    graph = Graph()
    item = graph.add(operator.getitem, [3, 4], graph.input("index"))
    assert (graph.task(item.name).view, item.root) == (False, item.index)


# ---- what torch and Python spell


BINARY = "add sub mul matmul truediv floordiv mod pow and_ or_ xor lshift rshift lt le gt ge eq ne".split()
UNARY = "neg pos abs invert".split()
IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()


def operands(name):
    whole = any(word in name for word in ("and", "or", "shift", "invert"))
    return (torch.tensor([[6, 3], [2, 5]]), torch.tensor([[1, 2], [3, 1]])) if whole else (
        torch.tensor([[6.0, 3.0], [2.0, 5.0]]), torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    )  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_binary_operators_run_as_in_torch(name):
    fn = getattr(operator, name)
    a, b = operands(name)
    graph = Graph()
    x, y = graph.inputs("x", "y")
    graph.output(values=fn(x, y), left=fn(a, y), right=fn(x, b))
    assert len(graph) == 3
    for result in graph.run_serial(x=a, y=b).values():
        assert torch.equal(result, fn(a, b))


@pytest.mark.parametrize("name", UNARY)
def test_unary_operators_run_as_in_torch(name):
    a, _ = operands(name)
    graph = Graph()
    graph.output(y=getattr(operator, name)(graph.input("x")))
    assert torch.equal(graph.run_serial(x=a)["y"], getattr(operator, name)(a))


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operators_write_and_make_no_new_value(name):
    fn = getattr(operator, name)
    a, b = operands(name)
    graph = Graph()
    x, y = graph.inputs("x", "y")
    assert fn(x, y) is x
    graph.output(x)
    assert str(graph).splitlines()[3] == f"  {name.rstrip('_')}(x, y): writes x"
    assert len(graph.values) == 2
    given = a.clone()
    result = graph.run_serial(x=given, y=b)["x"]
    assert result is given
    assert torch.equal(result, fn(a.clone(), b))


def test_an_in_place_operator_on_a_plain_tensor_makes_it_a_constant_that_is_written():
    graph = Graph()
    tensor = total = torch.ones(2)
    total += graph.input("x")
    graph.output(total=total)
    assert isinstance(total, Value)
    assert torch.equal(graph.run_serial(x=torch.ones(2))["total"], torch.full((2,), 2.0))
    assert tensor.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda x, y: x.add_(y), "add(x, y): writes x"),
        (lambda x, y: x.relu_(), "relu(x): writes x"),
        (lambda x, y: torch.add(y, y, out=x), "add(y, x): writes x"),
        (lambda x, y: nn.functional.relu(x, inplace=True), "relu(x): writes x"),
        (lambda x, y: operator.setitem(x, 0, y), "setitem(x, y): writes x"),
        (lambda x, y: torch.ops.aten.add_.Tensor(x, y), "add(x, y): writes x"),
    ],
)
def test_what_writes_in_place_is_seen(change, line):
    graph = Graph()
    x, y = graph.inputs("x", "y")
    returned = change(x, y)
    assert returned is x or returned is None
    assert str(graph).splitlines()[3] == f"  {line}"
    assert graph.last_version(x.index) == 1


def test_out_may_be_a_tuple():
    graph = Graph()
    x, values, indices = graph.inputs("x", "values", "indices")
    assert torch.max(x, 0, out=(values, indices)) == (values, indices)
    assert [graph.values[use.value].name for use in graph.tasks[0].writes] == ["values", "indices"]


def test_batch_norm_writes_its_statistics_only_in_training():
    graph = Graph()
    x, mean, variance = graph.inputs("x", "mean", "variance")
    y = nn.functional.batch_norm(x, mean, variance, training=True)
    nn.functional.batch_norm(y, mean, variance, training=False)
    assert [[graph.values[use.value].name for use in task.writes] for task in graph.tasks] == [
        ["mean", "variance"],
        [],
    ]


def test_to_another_device_is_a_task_there_and_to_another_dtype_is_one_anywhere():
    graph = Graph()
    x = graph.input("x")
    graph.output(a=x.to("cuda:3"), b=x.to(torch.float64), c=x.to(dtype=torch.int32))
    assert [task.device for task in graph.tasks] == ["cuda:3", None, None]
    found = graph.run_serial(x=torch.ones(2))  # the reference runs where its arguments are
    assert [v.dtype for v in found.values()] == [torch.float32, torch.float64, torch.int32]


# ---- arguments, results, constants, constraints


Pair = namedtuple("Pair", "left right")


def test_arguments_and_results_may_be_trees():
    graph = Graph()
    x, y = graph.inputs("x", "y")
    add = graph.add(
        lambda pair, scale, more: {"sum": pair.left + pair.right, "all": [scale * v for v in more["v"]]},
        Pair(x, y), 10, more={"v": [x, y]}, outputs={"sum": "s", "all": ["a", "b"]},
    )  # fmt: skip
    assert add == {"sum": graph.value("s"), "all": [graph.value("a"), graph.value("b")]}
    graph.output(*flatten(add))
    assert graph.run_serial(x=1, y=2) == {"s": 3, "a": 10, "b": 20}


def test_a_tensor_becomes_one_constant_however_often_it_comes():
    graph = Graph()
    x, weight = graph.input("x"), torch.ones(2)
    graph.output(y=weight * x + weight, z=graph.add(operator.add, x, graph.constant(weight)))
    assert [v.name for v in graph.sources] == ["x", "constant"]
    assert graph.input_names == ("x",)
    assert graph.run_serial(x=2)["y"].tolist() == [3, 3]


def test_constraints_nest_and_hold_for_inputs_and_tasks():
    graph = Graph()
    with graph.on("cuda:0"):
        x = graph.input("x")
        with graph.on("cuda:1"):
            a = x + 1
        b = x + 2
        c = graph.add(identity, x, on="cpu")
    d = x + 3
    assert x.home == "cuda:0"
    assert [graph.task(v.name).device for v in (a, b, c, d)] == ["cuda:1", "cuda:0", "cpu", None]
    assert str(graph).splitlines()[1] == "  input x on cuda:0"


def test_a_snapshot_stays_as_it_is():
    graph = Graph()
    x = graph.input("x")
    y = x + 1
    copied = graph.snapshot()
    before = str(copied), [list(users) for users in copied.users], copied.members(y.index)
    z = y.T
    z += 1
    graph.output(y)
    assert (str(copied), copied.users, copied.members(y.index)) == before
    assert (copied.last_version(y.index), copied.is_used(y.index)) == (0, False)


# ---- the user's line


ADDING = [
    lambda x: x.graph.add(identity, x),
    lambda x: x @ x,
    lambda x: 1 + x,
    lambda x: x.relu(),
    lambda x: torch.relu(x),
    lambda x: nn.functional.gelu(x),
    lambda x: torch.ones(2) + x,
    lambda x: operator.iadd(x, 1),
    lambda x: operator.setitem(x, 0, 1),
    lambda x: x[0],
    lambda x: x.T,
    lambda x: x.to("cpu"),
    lambda x: nn.Linear(2, 2)(x),
]


@pytest.mark.parametrize("add", ADDING)
def test_each_task_remembers_the_line_that_added_it(add):
    graph = Graph()
    add(graph.input("x"))
    assert graph.tasks[-1].source == source_of(add)


def test_an_error_in_a_serial_run_names_the_task_and_its_line():
    graph = Graph()
    add = lambda: graph.add(lambda x: x / 0, graph.input("x"), name="divide")  # noqa: E731, both on one line
    graph.output(add())
    with pytest.raises(ZeroDivisionError) as caught:
        graph.run_serial(x=1)
    assert caught.value.__notes__ == [f"in task 'divide', added at {source_of(add)}"]


# ---- errors: what Python cannot do with a value


BRANCH = (
    "value {0!r} is not known before it runs, so Python cannot branch on it; put the branch into a function and add "
    "that as one task: graph.add(fn, {0})"
)
LENGTH = (
    "value {0!r} has no length before it runs; say how many results its task has: "
    "graph.add(fn, ..., outputs=2), or unpack it: a, b = value"
)
NUMBER = "value {0!r} is not a number before it runs; read it from the schedule's outputs"
FACT = (
    "value {0!r} has no {1} before it runs; do what needs it inside a function and add that as one task: "
    "graph.add(fn, {0})"
)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (bool, BRANCH.format("x")),
        (lambda x: 1 if x > 0 else 2, BRANCH.format("gt")),
        (lambda x: x and x, BRANCH.format("x")),
        (lambda x: x in [x + 1], BRANCH.format("eq")),
        (list, LENGTH.format("x")),
        (tuple, LENGTH.format("x")),
        (len, NUMBER.format("x")),
        (float, NUMBER.format("x")),
        (int, NUMBER.format("x")),
        (complex, NUMBER.format("x")),
        (lambda x: range(3)[x], NUMBER.format("x")),
        (lambda x: x.shape, FACT.format("x", "shape")),
        (lambda x: x.dtype, FACT.format("x", "dtype")),
        (lambda x: x.requires_grad, FACT.format("x", "requires_grad")),
        (lambda x: x.device, FACT.format("x", "device")),
        (lambda x: x.data, FACT.format("x", "data")),
    ],
)
def test_what_python_cannot_do_with_a_value(act, message):
    with pytest.raises(GraphError, match=f"^{re.escape(message)}$"):
        act(Graph().input("x"))


def test_private_attributes_are_missing_as_python_expects():
    with pytest.raises(AttributeError, match="Value has no attribute '_x'"):
        Graph().input("x")._x  # noqa: B018


# ---- errors: what a graph refuses


def refused(message):
    return pytest.raises(GraphError, match=f"^{re.escape(message)}$")


@pytest.fixture
def graph():
    graph = Graph("g")
    graph.inputs("x", "y")
    return graph


@pytest.mark.parametrize("name", ["", "a b", "a@1", "tab\t", 3])
def test_a_name_that_cannot_be(graph, name):
    with refused(f"a name must be a string without spaces and '@', got {name!r}"):
        graph.input(name)


TAKEN = "name 'x' is already taken in graph 'g'; choose another, or leave it out"
FIRST = "graph.add needs a function first, got"
ELSEWHERE = "value 'add' belongs to graph 'other', not to 'g'; make it an input of this graph"
NO_ARGUMENT = "task 'identity' declares Value('y') as written or aliased, which is not among its arguments 'x'"
AFTER = "after= needs tasks, or values that tasks of this graph made, got"
TREE = "outputs= of task 't' must be a number or a tree of names, got"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda g, x, y, z: g.input("x"), TAKEN),
        (lambda g, x, y, z: g.add(identity, name="x"), TAKEN),
        (lambda g, x, y, z: g.constant(torch.ones(1), "x"), TAKEN),
        (lambda g, x, y, z: g.add(3), f"{FIRST} 3"),
        (lambda g, x, y, z: g.add(x.relu()), f"{FIRST} Value('relu'); write graph.add(f, x), not graph.add(f(x))"),
        (lambda g, x, y, z: g.add(identity, x, writes=y), NO_ARGUMENT),
        (lambda g, x, y, z: g.add(identity, x, aliases=y), NO_ARGUMENT),
        (lambda g, x, y, z: g.record(operator.iadd, (3, x), {}), "cannot write 3 in place: it is no tensor"),
        (lambda g, x, y, z: g.add(identity, [z]), ELSEWHERE),
        (lambda g, x, y, z: x @ z, ELSEWHERE),
        (lambda g, x, y, z: g.output(z), ELSEWHERE),
        (lambda g, x, y, z: g.add(identity, after=z), ELSEWHERE),
        (lambda g, x, y, z: g.add(identity, after=[3]), f"{AFTER} 3"),
        (lambda g, x, y, z: g.add(identity, after=[None]), f"{AFTER} None"),
        (lambda g, x, y, z: g.add(identity, after=[x]), f"{AFTER} Value('x')"),
        (lambda g, x, y, z: g.add(identity, name="t", outputs=True), f"{TREE} True in it"),
        (lambda g, x, y, z: g.add(identity, name="t", outputs=-1), f"{TREE} -1 in it"),
        (lambda g, x, y, z: g.add(identity, name="t", outputs=("a", 3)), f"{TREE} 3 in it"),
        (lambda g, x, y, z: g.add(identity, name="t", outputs={"a": None}), f"{TREE} None in it"),
        (lambda g, x, y, z: g.add(identity, name="t", outputs=2.0), f"{TREE} 2.0 in it"),
        (
            lambda g, x, y, z: g.add(identity, name="t", outputs=("a", "a")),
            "outputs= of task 't' has the name 'a' twice; names are unique",
        ),
        (lambda g, x, y, z: g.output(y=3), "an output must be a Value of graph 'g', got 3"),
        (lambda g, x, y, z: (g.output(x), g.output(x=y)), "output 'x' is declared twice; outputs so far: 'x'"),
        (lambda g, x, y, z: g.output(y, y), "output 'y' is declared twice; outputs so far: 'y'"),
        (lambda g, x, y, z: (x + y, g.task("x")), "graph 'g' has no task 'x'; tasks are 'add'"),
        (lambda g, x, y, z: g.value("t"), "graph 'g' has no value 't'; values are 'x', 'y'"),
        (lambda g, x, y, z: g.task("y"), "graph 'g' has no task 'y'; tasks are none"),
        (
            lambda g, x, y, z: (g.inputs(*(f"x{i}" for i in range(9))), g.value("z")),
            "graph 'g' has no value 'z'; values are 'x', 'y', 'x0', 'x1', 'x2', 'x3', 'x4', 'x5' and 3 more",
        ),
    ],
)  # fmt: skip
def test_what_a_graph_refuses(graph, act, message):
    other = Graph("other")
    with refused(message):
        act(graph, graph.value("x"), graph.value("y"), other.input("x") + 1)


@pytest.mark.parametrize("device", ["", "cuda 0", "cuda/0", "a@b", -1, None])
def test_a_device_that_is_no_name(graph, device):
    message = f"a device is a name such as 'cpu' or 'cuda:0', got {device!r}"
    with refused(message), graph.on(device):
        pass
    if device is not None:
        with refused(message):
            graph.add(identity, on=device)


@pytest.mark.parametrize(
    "wrong", [{"outputs": ("a", "a")}, {"after": "nothing"}, {"on": ""}, {"writes": "y"}]
)
def test_a_refused_task_leaves_no_trace(graph, wrong):
    """A task that failed half-way once left its write behind, and the next task depended on itself."""
    x = graph.value("x")
    facts = {"writes": [x], "random": True, **wrong}
    if facts["writes"] == "y":
        facts["writes"] = [x, graph.value("y")]
    with pytest.raises(GraphError):
        graph.add(identity, x, **facts)
    graph.add(identity, x, writes=[x], random=True, name="t")
    assert str(graph).splitlines()[3:] == ["  t(x): writes x"]
    assert graph.tasks[0].dependencies == ()


# ---- trees


def test_an_index_by_a_mask_makes_a_copy_and_one_by_a_slice_a_view():
    graph = Graph()
    x, mask = graph.inputs("x", "mask")
    kinds = [
        graph.tasks[value.producer].view
        for value in (x[1:], x[0, ..., None], x[mask], x[torch.tensor([0, 2])], x[[0, 2]])
    ]
    assert kinds == [True, True, False, False, False]
    graph.output(y=x[mask] + 1)
    with asc.schedule(graph, asc.Machine.emulated(gpus=1)) as schedule:
        y = schedule(x=torch.tensor([1.0, 2.0, 3.0]), mask=torch.tensor([True, False, True]))["y"]
    assert y.tolist() == [2.0, 4.0]


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x)


SHARED = Shared()


def test_tasks_that_share_a_module_keep_their_order_however_they_reach_it():
    graph = Graph()
    x = graph.input("x")
    closed_over = SHARED

    def by_closure(x):
        return torch.func.functional_call(closed_over, {}, (x,))

    def by_name(x):
        return SHARED(x)

    for fn in (SHARED, SHARED.forward, SHARED.inner, functools.partial(by_name), by_closure):
        graph.add(fn, x)
    graph.add(nn.Linear(2, 2), x)
    graph.add(lambda module, x: module(x), SHARED, x)
    orders = [[d.task for d in task.dependencies if d.kind == "order"] for task in graph.tasks]
    assert [max(found, default=None) for found in orders] == [None, 0, 1, 2, 3, None, 4]


def test_autograd_on_a_value_is_refused_with_what_to_do():
    x = Graph().input("x")
    with pytest.raises(
        GraphError,
        match=r"value 'x' has no backward; compute gradients inside a task, under torch.enable_grad",
    ):
        x.backward()


def test_a_value_moves_as_a_tensor_does_and_shows_its_parts():
    graph = Graph()
    x = graph.input("x")
    assert [graph.tasks[v.producer].device for v in (x.cuda(), x.cuda(1), x.cpu(), x.to("cuda:2"))] == [
        "cuda:0", "cuda:1", "cpu", "cuda:2"
    ]  # fmt: skip
    graph.output(low=torch.max(x, 0).values)
    assert graph.run_serial(x=torch.tensor([1.0, 3.0]))["low"] == 3
    assert "of Value('x')>, Tensor.relu" in repr(x.relu)


KEYWORDS = "value self name fn func function graph args kwargs item of options on".split()


@pytest.mark.parametrize("word", KEYWORDS)
def test_methods_take_keywords_of_any_name(word):
    """They are handed on to the tensor's method, whatever parameters ours have."""
    graph = Graph()
    x, flag = graph.inputs("x", "flag")
    made = x.masked_fill(flag, **{word: 0.0})
    assert graph.task("masked_fill").kwargs == {word: 0.0}
    assert graph.task("masked_fill").args == (x, flag)
    if word == "value":
        graph.output(y=made)
        given = {"x": torch.ones(2), "flag": torch.tensor([True, False])}
        assert graph.run_serial(**given)["y"].tolist() == [0, 1]
        with asc.schedule(graph, asc.Machine.emulated(gpus=1), backend="host") as schedule:
            for _ in range(2):
                assert schedule(**given)["y"].tolist() == [0, 1]


@pytest.mark.parametrize("outputs", [0, (), {}, []])
@pytest.mark.parametrize("policy", ["auto", "round_robin", "heft"])
def test_a_view_without_results_is_no_view(outputs, policy):
    graph = Graph()
    x = graph.input("x")
    x.add_(1)
    graph.add(torch.unbind, x, outputs=outputs)
    graph.add(identity, x, aliases=x, outputs=outputs)
    x[:1].add_(1)
    graph.output(y=torch.where(x > 0, x, x))
    task = graph.task("unbind")
    assert (task.view, task.region, dependencies(graph, "unbind")) == (
        False,
        None,
        [("add", "data")],
    )
    with asc.schedule(
        graph, asc.Machine.emulated(gpus=2), policy=policy, place={"unbind": "cuda:1", "add": "cpu"}
    ):
        pass


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rellu", "did you mean 'relu' or .*? For what is no tensor"),
        ("masked_fil", "did you mean 'masked_fill'"),
        ("xyzzy_plugh", "that name; for what is no tensor, add a function: graph.add"),
    ],
)
def test_a_method_that_tensors_do_not_have_is_refused_at_once(name, hint):
    x = Graph().input("x")
    with pytest.raises(
        GraphError, match=f"value 'x' has no method '{name}', for tensors have none of .*{hint}"
    ):
        getattr(x, name)
    assert not hasattr(x, name)


def test_without_torch_a_method_may_have_any_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    graph = Graph()
    graph.output(y=graph.input("x").title())
    assert graph.run_serial(x="a word") == {"y": "A Word"}
