"""torch.compile with our backend gives what it gives with ``aot_eager``, bit for bit, on any machine."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autosched as asc
from autosched import TorchBackend
from autosched.frontends.dynamo import default
from autosched.testing import scattered
from tests.models import KINDS
from tests.serial import some

pytestmark = pytest.mark.usefixtures("forgotten")

Compile = Callable[..., Any]  # torch.compile with a backend

SCATTERED = {"machine": asc.Machine.emulated(gpus=2), "policy": scattered(0), "backend": "virtual"}


def leaves(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


def assert_same(found: Any, expected: Any) -> None:
    """Tensors to the last bit, their strides and whether autograd follows them; all else by value."""
    assert len(leaves(found)) == len(leaves(expected))
    for ours, theirs in zip(leaves(found), leaves(expected), strict=True):
        if isinstance(theirs, Tensor):
            assert (ours.dtype, ours.shape, ours.stride()) == (
                theirs.dtype,
                theirs.shape,
                theirs.stride(),
            )
            assert ours.requires_grad == theirs.requires_grad
            assert torch.equal(ours, theirs)
        else:
            assert ours == theirs


def with_backend(backend: Any, do: Callable[[Compile], Any]) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return do(partial(torch.compile, backend=backend))


def assert_as_aot_eager(do: Callable[[Compile], Any], **options: Any) -> TorchBackend:
    """Hold what a program gives to what it gives with ``aot_eager``; return the backend."""
    backend = TorchBackend(**(options or SCATTERED))
    expected = with_backend("aot_eager", do)
    assert_same(with_backend(backend, do), expected)
    return backend


# ---- training


def train(kind: str, compile: Compile) -> Any:
    """Take some steps; return losses, gradients, parameters and buffers."""
    model = KINDS[kind].make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled, found = compile(model), list[Any]()
    for number in range(3):
        x, y = KINDS[kind].batch()
        torch.manual_seed(number)
        out = compiled(x)
        loss = (
            functional.mse_loss(out, y)
            if y.is_floating_point()
            else functional.cross_entropy(out, y)
        )
        loss.backward()
        found += [loss, [None if p.grad is None else p.grad.clone() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return found, copy.deepcopy(model.state_dict())


@pytest.mark.parametrize(
    "kind", some([kind for kind in KINDS if kind != "recurrent"], "lenet")
)  # Dynamo does not trace recurrent networks
def test_models_train_as_with_aot_eager_and_as_eagerly(kind: str) -> None:
    options = [
        SCATTERED,
        {"machine": asc.Machine.emulated(gpus=1), "policy": "round_robin", "backend": "emulated"},
        {"machine": asc.Machine.emulated(gpus=0), "backend": "threads"},
        {"machine": asc.Machine.emulated(gpus=2), "backend": "host"},
    ][list(KINDS).index(kind) % 4]
    backend = assert_as_aot_eager(partial(train, kind), **options)
    assert [schedule.graph.name for schedule in backend.schedules()] == ["forward", "backward"]
    torch.manual_seed(0)
    eager = train(kind, lambda model: model)
    assert_same(with_backend(backend, partial(train, kind)), eager)


# ---- what programs do

PROGRAMS: dict[str, Callable[[Compile], Any]] = {}


def program(do: Callable[[Compile], Any]) -> Callable[[Compile], Any]:
    PROGRAMS[do.__name__] = do
    return do


@program
def breaks_the_graph(compile: Compile) -> Any:
    linear = nn.Linear(4, 4)

    def f(x: Tensor) -> Tensor:
        y = linear(x).relu()
        torch._dynamo.graph_break()
        return (y * 2).sum()

    loss = compile(f)(torch.randn(3, 4))
    loss.backward()
    return loss, linear.weight.grad


@program
def changes_shapes(compile: Compile) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    compiled, found = compile(model), list[Any]()
    for count in (3, 5, 7, 3, 1, 0):
        loss = compiled(torch.randn(count, 4)).sum()
        loss.backward()
        found.append((loss, [parameter.grad.clone() for parameter in model.parameters()]))
    return found


@program
def writes_its_inputs(compile: Compile) -> Any:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        y[0] = x[1]
        return x + y

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    return compile(f)(x, y), x, y


@program
def writes_inputs_that_overlap(compile: Compile) -> Any:
    base = torch.ones(6)
    return compile(lambda x, y: (x.add_(1), y * 2))(base[:4], base[2:]), base


@program
def returns_inputs_and_views(compile: Compile) -> Any:
    def f(x: Tensor, y: Tensor) -> Any:
        return x, y.view(-1), y, x[1:], (y + 1).t(), None, 3, "three"

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    found = compile(f)(x, y)
    assert found[0] is x
    assert found[2] is y
    assert found[1].untyped_storage()._cdata == y.untyped_storage()._cdata
    found[3].zero_()
    return found, x


@program
def draws_random_numbers(compile: Compile) -> Any:
    def f(x: Tensor) -> Any:
        return (
            torch.randn(3) + x,
            torch.rand_like(x),
            torch.randperm(5),
            x.multinomial(1),
            torch.normal(x, 1.0),
        )

    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(3, 3), nn.Dropout(0.5), nn.AlphaDropout(0.2))
    out = compile(model)(torch.ones(8, 3))
    out.sum().backward()
    return out, compile(f)(torch.ones(3)), torch.rand(2), model[1].weight.grad


@program
def computes_again_in_backward(compile: Compile) -> Any:
    branches = [
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4))
        for _ in range(2)
    ]
    loss = compile(
        lambda x: sum(checkpoint(branch, x, use_reentrant=False).sum() for branch in branches)
    )(torch.ones(3, 4))
    loss.backward()
    return loss, [parameter.grad for branch in branches for parameter in branch.parameters()]


@program
def branches_on_data(compile: Compile) -> Any:
    compiled = compile(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)))
    return compiled(torch.ones(3)), compiled(-torch.ones(3))


@program
def calls_operators_of_its_own(compile: Compile) -> Any:
    def f(x: Tensor, y: Tensor) -> Tensor:
        torch.ops.autosched_tests.increment(y)
        return torch.ops.autosched_tests.scale(x, 2.0) + y

    y = torch.ones(3)
    return compile(f)(torch.ones(3), y), y


@torch.library.custom_op("autosched_tests::scale", mutates_args=())
def scale(x: Tensor, by: float) -> Tensor:
    return x * by


@scale.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autosched_tests::increment", mutates_args=("x",))
def increment(x: Tensor) -> None:
    x.add_(1)


@program
def takes_whole_steps(compile: Compile) -> Any:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = compile(step)
    return [compiled(torch.randn(2, 4)) for _ in range(3)], model.state_dict()


@program
def fails_in_an_operator(compile: Compile) -> Any:
    with pytest.raises(IndexError) as error:
        compile(nn.Embedding(3, 4))(torch.tensor([5]))
    return str(error.value)


@program
def has_an_argument_called_timeout(compile: Compile) -> Any:
    return compile(lambda x, timeout: x * timeout)(torch.ones(3), torch.ones(3))


@pytest.mark.filterwarnings("error:torch.compile's", "error:.*drew random numbers")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_what_they_give_with_aot_eager(name: str) -> None:
    backend = assert_as_aot_eager(PROGRAMS[name])
    assert backend.schedules()


# ---- looking


def test_schedules_are_named_by_phase_module_line_and_the_users_words() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.fc1(x))  # this line

    backend = TorchBackend(**SCATTERED)
    torch.compile(Model(), backend=backend)(torch.ones(2, 4)).sum().backward()
    forward, backward = [schedule.graph for schedule in backend.schedules()]
    assert set(forward.input_names) == {"fc1.weight", "fc1.bias", "x"}
    assert {"fc1.weight.grad", "fc1.bias.grad"} <= set(backward.outputs)
    assert all(
        home == "cpu" for schedule in backend.schedules() for _, home in schedule.program.outputs
    )
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if text.endswith("# this line\n"))
    addmm, mm = forward.task("fc1.addmm").origin, backward.task("fc1.backward.mm").origin
    assert addmm[:3] == ((__file__, line), "fc1", "forward")
    assert mm[:3] == ((__file__, line), "fc1", "backward")


def test_the_backend_is_known_by_name_where_the_package_is_installed() -> None:
    if "autosched" not in torch._dynamo.list_backends():
        pytest.skip("the package is not installed with its entry points")
    assert torch.equal(torch.compile(torch.neg, backend="autosched")(torch.ones(2)), -torch.ones(2))


def test_few_schedules_are_kept_of_one_graph() -> None:
    backend = TorchBackend(**SCATTERED)
    run = torch.compile(lambda x: x + 1, backend=backend, dynamic=True)
    for size in range(2, 14):
        assert run(torch.ones(size)).tolist() == [2] * size
    assert len(backend.schedules()) == 8


def test_costs_may_name_tasks_of_several_graphs() -> None:
    costs = asc.Costs.table({"linear.addmm": 1.0, "linear.backward.mm": 2.0})
    backend = TorchBackend(costs=costs, **SCATTERED)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    torch.compile(Model(), backend=backend)(torch.ones(1, 3)).sum().backward()
    assert [dict(schedule.costs.seconds) for schedule in backend.schedules()] == [
        {"linear.addmm": 1.0},
        {"linear.backward.mm": 2.0},
    ]


# ---- what goes, goes


def test_schedules_end_with_a_reset_and_what_is_left_makes_new_ones() -> None:
    backend = TorchBackend(asc.Machine.emulated(gpus=1), policy="round_robin", backend="emulated")
    x = torch.randn(3, requires_grad=True)
    y = torch.compile(lambda x: x.sin().cos(), backend=backend)(x)
    kept = backend.schedules()
    torch._dynamo.reset()
    with pytest.raises(asc.ScheduleError, match="closed"):
        kept[0](x=x)
    y.sum().backward()
    assert torch.equal(x.grad, -x.sin().sin() * x.cos())
    assert len(backend.schedules()) == 1
    del y, kept
    gc.collect()
    assert backend.schedules() == ()


# ---- what is not scheduled


def test_what_cannot_be_scheduled_runs_as_it_is_with_one_warning_that_names_the_line() -> None:
    def fails(*_: Any) -> Any:
        raise asc.ScheduleError("no such policy today")

    run = torch.compile(lambda x: x.sin(), backend=TorchBackend(policy=fails))
    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        y = [run(x) for _ in range(2)][-1]
    told = [str(item.message) for item in warned if "torch.compile" in str(item.message)]
    assert told == ["torch.compile's forward graph runs without a schedule: no such policy today"]
    with pytest.warns(
        UserWarning, match="backward graph runs without a schedule: no such policy today"
    ):
        y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_an_operator_of_which_nothing_is_known_is_named_with_its_line() -> None:
    def f(x: Tensor) -> Tensor:
        loop = torch._higher_order_ops.while_loop
        return loop(lambda x: x.sum() < 9, lambda x: (x + 1,), (x,))[0]  # here

    run = torch.compile(f, backend=TorchBackend(**SCATTERED))
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if text.endswith("# here\n"))
    with pytest.warns(
        UserWarning, match=rf"while_loop is not known[^\n]*\n    at .*test_dynamo.py:{line}"
    ):
        assert run(torch.ones(3)).tolist() == [3, 3, 3]


def test_tensors_of_inference_mode_are_written_as_given() -> None:
    run = torch.compile(lambda x: x.add_(1) * 2, backend=TorchBackend(**SCATTERED))
    with torch.inference_mode():
        x = torch.ones(3)
        with pytest.warns(UserWarning, match="'x' is a tensor of inference mode and written"):
            assert run(x).tolist() == [4, 4, 4]
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"polcy": "heft"},
            "unknown option 'polcy'; options of backend 'autosched' are 'machine', 'policy', 'costs'",
        ),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"machine": "gpu"}, "machine must be a Machine, got 'gpu'"),
        ({"costs": 3}, "costs must be Costs"),
        ({"backend": "quantum"}, "unknown backend 'quantum'"),
        ({"backend": 3}, "backend must be a name, or a function that makes one, got 3"),
    ],
)
def test_options_that_fit_nothing_are_errors(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        torch.compile(torch.neg, backend=default, options=options)(torch.ones(1))
