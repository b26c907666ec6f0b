"""What no graph can say is refused, with the user's line and what to do instead, and nothing is left changed."""

from __future__ import annotations

import random
from collections import ChainMap, UserList, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn, optim

import autosched as asc
from autosched.graph.effects import shared_state
from tests.files import module_at

MACHINE = asc.Machine([asc.Device("cpu")])
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
OUTSIDE = torch.ones(2)
COUNT = 0


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 2))


def refused(what: str, fn: Any, *given: Any) -> None:
    with pytest.raises(asc.CaptureError, match=what):
        asc.capture(fn, *given)


# ---- what a function of a tensor does


def branches(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


def uses_a_global(x: Tensor) -> Tensor:
    return x + OUTSIDE


def counts(x: Tensor) -> Tensor:
    global COUNT  # noqa: PLW0603
    COUNT += 1
    return x * COUNT


def gives_other_memory(x: Tensor) -> Tensor:
    y = x.clone()
    y.set_(x.t().contiguous())
    return y


HOLDS = "a graph has no data: keep them in tensors"
FUNCTIONS: list[tuple[Callable[[Tensor], Any], str, str]] = [
    (branches, HOLDS, "return x + 1 if x.sum() > 0 else x - 1"),
    (lambda x: f"{x.sum():.2f}", HOLDS, "x.sum():.2f"),
    (lambda x: x * len(x.nonzero()), HOLDS, "len(x.nonzero())"),
    (
        uses_a_global,
        "global 'OUTSIDE' is a tensor from outside; pass it as an argument",
        "x + OUTSIDE",
    ),
    (lambda x: torch.from_numpy(x.numpy() + 1), "NumPy cannot be captured", "x.numpy()"),
    (
        lambda x: torch.as_tensor(numpy.maximum(x, 0)),
        "NumPy cannot be captured",
        "numpy.maximum(x, 0)",
    ),
    (counts, "global 'COUNT' is 1 after the step", "test_unsupported.py"),
    (lambda x: x * random.random(), "Python's random", "test_unsupported.py"),
    (lambda x: x * float(numpy.random.rand()), "NumPy's random", "test_unsupported.py"),
    (
        lambda x: x.to_sparse() @ x,
        "returns a tensor of layout torch.sparse_coo",
        "test_unsupported.py",
    ),
    (lambda x: torch.nested.nested_tensor([x, x[:1]]).sum(), "tasks of your own", "nested_tensor"),
    (
        gives_other_memory,
        "set_ gives value 'clone' other memory, which other values may see; write in place",
        "py:",
    ),
    (torch.compile(lambda x: x.sin(), backend="eager"), "leave out torch.compile", "eval_frame"),
]


@pytest.mark.parametrize(("fn", "said", "line"), FUNCTIONS)
def test_a_function_that_no_graph_can_say_is_refused(
    fn: Callable[[Tensor], Any], said: str, line: str
) -> None:
    generators = (
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )
    with pytest.raises(asc.CaptureError) as error:
        asc.capture(fn, X.clone())
    assert said in str(error.value)
    assert line in str(error.value) or line == "eval_frame"
    assert COUNT == 0
    assert generators == (
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )


# ---- what it finds around it


def with_tensors_around() -> dict[str, Callable[[Tensor], Tensor]]:
    tensor, flag = torch.ones(2), torch.tensor(True)
    table, box = {"w": [tensor]}, SimpleNamespace(w=tensor)
    return {
        "variable 'tensor'": lambda x: x + tensor,
        "variable 'tensor' as keyword": lambda x: torch.add(x, other=tensor),
        "variable 'tensor' written": lambda x: tensor.add_(x.sum(0)),
        "variable 'flag'": lambda x: x + 1 if flag else x,
        "variable 'table'['w'][0]": lambda x: x + table["w"][0],
        "attribute 'w' of a SimpleNamespace": lambda x: x + box.w,
    }


@pytest.mark.parametrize("holder", with_tensors_around())
def test_a_tensor_from_outside_is_named(holder: str) -> None:
    with pytest.raises(asc.CaptureError) as error:
        asc.capture(with_tensors_around()[holder], X)
    name = holder.partition(" as ")[0].partition(" written")[0]
    assert (
        f"{name} is a tensor from outside; pass it as an argument, or make it a module's buffer"
        in str(error.value)
    )
    assert "lambda x:" in str(error.value)


def test_parameters_that_code_has_in_a_set_are_named() -> None:
    model = mlp()
    listed = set(model.parameters())

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(listed, 0.1)  # would find no gradients

    refused(r"is parameter '.*'; get it from the module", step, X)


# ---- what it leaves


class Leaving(nn.Module):
    """Leaves something in its attributes."""

    def __init__(self, leave: Callable[[Any, Tensor], Any]):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.count, self.seen, self.table = 0, list[Any](), dict[str, Any]()
        self._last: Any = None
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.leave(self, y)
        return y


def replace_weight(module: Leaving, y: Tensor) -> None:
    module.inner.weight = nn.Parameter(module.inner.weight * 2)


def assign_data(module: Leaving, y: Tensor) -> None:
    module.inner.weight.data = module.inner.weight.data * 2


def freeze(module: Leaving, y: Tensor) -> None:
    module.inner.weight.requires_grad_(False)


LEAVING: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (
        lambda module, y: setattr(module, "count", module.count + 1),
        "attribute 'count' of module 'part' is 1",
    ),
    (lambda module, y: module.seen.append(1), "attribute 'seen' of module 'part' has other items"),
    (
        lambda module, y: module.table.update(h=y),
        "attribute 'table' of module 'part'['h'] is a tensor",
    ),
    (lambda module, y: setattr(module, "new", 3), "attribute 'new' of module 'part' is 3"),
    (replace_weight, "attribute 'weight' of module 'part.inner' is a tensor"),
    (freeze, "requires_grad of 'part.inner.weight' changes in the step; change it between calls"),
    (
        assign_data,
        "'part.inner.weight' has other memory after the step; write in place, with copy_",
    ),
]


@pytest.mark.parametrize(("leave", "said"), LEAVING)
def test_what_a_module_would_keep_is_named_and_put_back(
    leave: Callable[[Any, Tensor], Any], said: str
) -> None:
    model = nn.Sequential()
    model.add_module("part", Leaving(leave))
    part: Any = model.part
    weight = part.inner.weight
    before = weight.detach().clone()
    with pytest.raises(asc.CaptureError) as error:
        asc.capture(model, X)
    assert said in str(error.value)
    assert (part.count, part.seen, part.table, part._last, part.training) == (0, [], {}, None, True)
    assert part.inner.weight is weight
    assert torch.equal(weight, before)
    assert not hasattr(part, "new")


def test_what_a_step_keeps_elsewhere_is_named_and_put_back() -> None:
    history, last, box = list[Tensor](), None, SimpleNamespace(total=0)

    def appends(x: Tensor) -> None:
        history.append(x.sum())

    def assigns(x: Tensor) -> None:
        nonlocal last
        last = x + 1

    def sets(x: Tensor) -> None:
        box.total = x + 1

    for fn, said in [
        (appends, "variable 'history' has other items"),
        (assigns, "variable 'last' is a tensor"),
        (sets, "attribute 'total' of a SimpleNamespace is a tensor"),
    ]:
        refused(f"{said} after the step, but a graph changes only tensors", fn, X)
    assert (history, last, box.total) == ([], None, 0)


class Slotted:
    __slots__ = ("count",)


class Counting:
    """Has no count yet."""


def counted(holder: Any) -> Any:
    """Count in an attribute, which may be the first time."""
    holder.count = getattr(holder, "count", 0) + 1
    return holder.count


def slotted() -> Slotted:
    made = Slotted()
    made.count = 0
    return made


def function() -> Callable[[], int]:
    return lambda number=0: number


KEEPING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "slot": (slotted, counted, "attribute 'count' of variable 'thing' is 1"),
    "attribute that was not there": (Counting, counted, "attribute 'count' of a Counting is 1"),
    "attribute of a function": (function, counted, "attribute 'count' of a function is 1"),
    "default of a function": (
        function,
        lambda fn: setattr(fn, "__defaults__", (fn() + 1,)) or fn(),
        r"attribute '__defaults__' of variable 'thing' is \(1,\)",
    ),
    "attribute of a class": (
        lambda: type("Counted", (), {"count": 0}),
        counted,
        "attribute 'count' of class Counted is 1",
    ),
    "attribute that a class did not have": (
        lambda: type("Counted", (), {}),
        counted,
        "attribute 'count' of class Counted is 1",
    ),
    "deque": (lambda: deque([1.0, 2.0]), lambda item: item.popleft(), "'thing' has other items"),
    "set": (lambda: {1}, lambda item: item.add(2) or 1, "'thing' has other items"),
    "order of a dict": (
        lambda: {"a": 1, "b": 2},
        lambda item: item.update(a=item.pop("a")) or next(iter(item.values())),
        "'thing' has its items in another order",
    ),
    "class of an object": (
        Counting,
        lambda item: setattr(item, "__class__", type("Other", (), {})) or 1,
        "attribute '__class__' of variable 'thing' is <class '.*Other'>",
    ),
    "dict in a mapping": (
        lambda: ChainMap({"n": 1}),
        lambda item: item.update(n=item["n"] + 1) or item["n"],
        r"\['n'\] is 2",
    ),
    "list in an object": (
        lambda: UserList([1]),
        lambda item: item.append(2) or 1,
        "has other items",
    ),
}


@pytest.mark.parametrize("name", KEEPING)
def test_whatever_holds_what_a_step_keeps_is_named_and_put_back(name: str) -> None:
    """These were not compared, so a graph had the number of the capture in each call."""
    make, keep, said = KEEPING[name]
    thing = make()
    refused(f"{said} after the step", lambda x: x * keep(thing), X)
    before = {name: keep(made) for name, made in (("new", make()), ("old", thing))}
    assert before["new"] == before["old"]


def test_what_a_step_leaves_unchanged_is_not_written() -> None:
    """Attributes and globals were taken out and put back, in another order."""

    class Watched(Counting):
        def __setattr__(self, name: str, item: Any) -> None:
            raise AssertionError(name)

    thing = Watched()
    vars(thing).update(b=2, a=1, _other=3)
    order = [*vars(thing)], [*globals()]
    asc.capture(lambda x: x * thing.a * thing.b * len(FUNCTIONS), X)
    assert ([*vars(thing)], [*globals()]) == order


def test_a_global_that_was_not_there_is_named_and_removed() -> None:
    def step(x: Tensor) -> Tensor:
        global NEW  # noqa: PLW0603
        NEW = globals().get("NEW", 0) + 1
        return x * NEW

    refused("global 'NEW' is 1 after the step", step, X)
    assert "NEW" not in globals()


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.set_autocast_enabled("cpu", True),
    ],
)
def test_a_setting_of_torch_that_a_step_leaves_changed_is_refused(
    change: Callable[[], object],
) -> None:
    """A graph would set it once, when it is captured."""

    def step(x: Tensor) -> Tensor:
        change()
        return x * 2

    try:
        refused("a setting of torch, such as grad mode or autocast, is another", step, X)
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_autocast_enabled("cpu", False)


def test_a_hook_that_a_step_registers_is_refused() -> None:
    model = mlp()

    def step(x: Tensor, *, removes: bool) -> None:
        handle = model[0].weight.register_hook(lambda grad: grad * 2)
        model(x).sum().backward()
        if removes:
            handle.remove()

    with pytest.raises(asc.CaptureError, match=r"'0\.weight' has other hooks after the step"):
        asc.capture(step, X, removes=False)
    asc.capture(step, X, removes=True)


def test_a_gradient_that_an_argument_would_keep_is_named() -> None:
    def step(x: Tensor) -> None:
        (x * x).sum().backward()

    for before in (None, torch.ones(2, 2)):
        x = X.clone().requires_grad_()
        x.grad = before
        refused(r"a gradient is stored at 'x', .*; torch\.autograd\.grad returns it", step, x)
        assert x.grad is before


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: (x * number for number in range(3)), "a generator is returned"),
        (lambda x: SimpleNamespace(y=x + 1), "a SimpleNamespace is returned"),
        (lambda x: [{x + 1}], "a set is returned"),
    ],
)
def test_what_cannot_be_returned_is_named(fn: Callable[[Tensor], Any], said: str) -> None:
    refused(f"{said}; return tensors, in tuples, lists, dicts or dataclasses", fn, X)


def test_arguments_of_one_name_are_told() -> None:
    refused(
        r"two arguments would have the name 'table\.a_b'; rename one",
        lambda table: table["a b"] + table["a_b"],
        {"a b": X, "a_b": X},
    )


# ---- what tensors, modules and optimizers it cannot be


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (X.to_sparse, "'x' is a torch.sparse_coo tensor, and only dense ones can be captured"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "'x' is a nested tensor",
        ),
        (
            lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
            "'x' is a quantized tensor",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_are_no_blocks_of_numbers_are_named(
    make: Callable[[], Tensor], said: str
) -> None:
    def double(x: Tensor) -> Tensor:
        return x + x

    refused(said, double, make())
    with asc.compile(double, MACHINE) as run, pytest.raises(asc.CaptureError, match=said):
        run(make())


def test_a_lazy_module_is_to_be_run_first() -> None:
    said = "'weight' has no shape yet; call the lazy module once before"
    refused(said, nn.LazyLinear(3), X)
    with (
        asc.compile(nn.LazyLinear(3), MACHINE) as run,
        torch.no_grad(),
        pytest.raises(asc.CaptureError, match=said),
    ):
        run(X)


@pytest.mark.parametrize("where", ["model", "part", "input"])
def test_models_and_inputs_on_several_devices_are_refused(where: str) -> None:
    model, x = mlp(), X
    {"model": model, "part": model[2]}.get(where, nn.Module()).to("meta")
    refused("on one device, with data", model, x.to("meta") if where == "input" else x)


def trained(
    of: Callable[[optim.Optimizer, nn.Module], Any],
    make: Callable[..., optim.Optimizer] = optim.SGD,
) -> Callable[[Tensor], Any]:
    """Make a step that does something with its optimizer when gradients are there."""
    model = mlp()
    optimizer = make(model.parameters(), lr=0.1)
    more = of(optimizer, model)

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        more()

    return step


def scheduling(optimizer: optim.Optimizer, model: nn.Module) -> Callable[[], Any]:
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def more() -> None:
        optimizer.step()
        scheduler.step()

    return more


def scaling(optimizer: optim.Optimizer, model: nn.Module) -> Callable[[], Any]:
    scaler = torch.amp.GradScaler("cpu")

    def more() -> None:
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)

    return more


def growing(optimizer: optim.Optimizer, model: nn.Module) -> Callable[[], Any]:
    return lambda: optimizer.add_param_group({"params": []})


def counting(optimizer: optim.Optimizer, model: nn.Module) -> Callable[[], Any]:
    model(X).sum().backward()
    optimizer.step()
    return optimizer.step


def strict(optimizer: optim.Optimizer, model: nn.Module) -> Callable[[], Any]:
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)


def averaging(optimizer: optim.Optimizer, model: nn.Module) -> Callable[[], Any]:
    average = optim.swa_utils.AveragedModel(model)
    return lambda: average.update_parameters(model)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (trained(scheduling), "attribute 'lr' of group 0 of SGD is 0.05 after the step"),
        (trained(growing), "attribute 'param_groups' of a SGD has other items after the step"),
        (trained(scaling), "GradScaler tests whether gradients are finite"),
        (
            trained(counting, optim.ASGD),
            "ASGD reads the elements of tensors; call its step() after the function",
        ),
        (trained(strict), "leave out error_if_nonfinite"),
        (trained(averaging), "update it outside of the step"),
    ],
)
def test_what_optimizers_would_look_at_or_change_is_named(
    step: Callable[[Tensor], Any], said: str
) -> None:
    with pytest.raises(asc.CaptureError) as error:
        asc.capture(step, X)
    assert said in str(error.value)


@pytest.mark.parametrize("several", [False, True])
def test_a_hook_for_when_gradients_are_there_is_refused(several: bool) -> None:
    model = mlp()
    if several:
        torch.autograd.graph.register_multi_grad_hook([*model.parameters()], lambda grads: None)
    else:
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    what = "when several gradients are there" if several else "after its gradient is accumulated"
    refused(rf"'0\.weight' has a hook that runs {what}", model, X)


@pytest.mark.parametrize("folder", ["torch/optim", "autosched", "a folder/autosched/torch"])
def test_files_below_a_folder_that_is_named_like_a_library_are_the_users(
    folder: str, tmp_path: Path
) -> None:
    """The file of torch's LBFGS has advice of its own, which is not meant for a user's file of that name."""
    file = tmp_path / folder / "lbfgs.py"
    users = module_at(file, "def step(x):\n    return x * float(x.sum())\n")
    with pytest.raises(asc.CaptureError) as error:
        asc.capture(users.step, X)
    assert f"\n    at {file}:2: return x * float(x.sum())\n" in str(error.value)
    assert "LBFGS" not in str(error.value)


def test_a_model_of_several_processes_is_refused() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(mlp())
        refused(r"DistributedDataParallel communicates .*; train its \.module", model, X)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_module_is_refused() -> None:
    for model in (torch.jit.script(nn.Linear(2, 2)), torch.jit.trace(nn.Linear(2, 2), X)):
        refused(r"torch\.jit differentiates by other formulas", model, X)


@pytest.mark.filterwarnings("ignore:`isinstance")
def test_an_exported_program_is_called_by_its_module() -> None:
    program = torch.export.export(nn.Linear(2, 2), (X,))
    for attempt, error in (
        (lambda: asc.capture(program, X), asc.CaptureError),
        (lambda: asc.compile(program), asc.ScheduleError),
    ):
        with pytest.raises(error, match=r"ExportedProgram.*; pass its module\(\)$"):
            attempt()
    module = program.module()
    graph = asc.capture(module, X)
    assert torch.equal(graph.finish(graph.run_serial(**graph.feed(X))), module(X))
    assert shared_state(lambda x: program.module()(x), [])


@pytest.mark.parametrize("thing", [5, None, X, asc.Graph(), [abs]])
def test_what_is_no_function_is_named(thing: Any) -> None:
    refused("capture takes a function of tensors", thing, X)


class Doubled(Tensor):
    """Changes what a function of torch returns."""

    @classmethod
    def __torch_function__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(fn, types, args, kwargs or {})
        return result * 2 if fn is torch.sin else result


class Dispatched(Tensor):
    @classmethod
    def __torch_dispatch__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class Quantity:
    """Is no tensor, and torch's functions take it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fn(*(item.tensor for item in args))


class Plain(Tensor):
    """Changes nothing."""


def test_classes_that_change_what_torch_does_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(X.as_subclass(Doubled))
    for fn, argument, said in (
        (
            torch.sin,
            X.as_subclass(Doubled),
            "'arg0' is a Doubled, which defines __torch_function__",
        ),
        (lambda x: torch.sin(x), X.as_subclass(Dispatched), "'x' is a Dispatched, .*dispatch__"),
        (lambda x: torch.sin(x), Quantity(X), "an argument is a Quantity, .*_function__"),
        (model, X, "'weight' is a Doubled"),
    ):
        refused(said, fn, argument)


def test_classes_that_change_nothing_are_captured() -> None:
    for given in (X.as_subclass(Plain), nn.Parameter(X, requires_grad=False), nn.Buffer(X)):
        found = asc.compile(lambda x: torch.sin(x), MACHINE)(given)
        assert type(found) is type(torch.sin(given))
        assert torch.equal(found, X.sin())
